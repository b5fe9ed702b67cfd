// SPDX-License-Identifier: Apache-2.0
//! Walks from a process to its open files.
//!
//! ```text
//! own task_struct ─▶ pid ─▶ PID namespace ─▶ idr ─▶ pid ─▶ task_struct ─▶ files ─▶ fdtable ─▶ file
//! ```
//!
//! The kernel changes these structures while they are read, and this reader cannot take the
//! kernel's locks. A freed object often still contains its former values. So each walk begins at
//! the process and has a maximum number of reads. Its result counts only if a second walk from the
//! process leads to the same object.

use crate::layout::{Layout, LayoutError};
use crate::memory::{KernelMemory, ReadError, TransportError};

/// The maximum depth of nested PID namespaces (`MAX_PID_NS_LEVEL`).
const MAX_LEVEL: u32 = 32;
/// The maximum depth of an xarray of 64-bit indices.
const MAX_DEPTH: u32 = 16;
/// The tag of a pointer to a node of an xarray (`xa_to_node()`).
const NODE_TAG: u64 = 2;
/// Entries below this value are not pointers but internal marks, such as `XA_RETRY_ENTRY`.
const FIRST_NODE: u64 = 4097;
/// `ANON_INODE_FS_MAGIC`, the number of the file system whose files only the kernel can create.
const ANONYMOUS: u64 = 0x0904_1934;
/// The name that KVM gives to the file of a VM (`kvm_dev_ioctl_create_vm()`).
const VM_FILE: &[u8; 7] = b"kvm-vm\0";

/// The error of a walk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// No process has this number.
    #[error("no process {0} is in this PID namespace")]
    NoProcess(u32),
    /// The number is that of a thread, or of a process that has ended.
    #[error("{0} is not a running process: give the process's number, not a thread's")]
    NotAProcess(u32),
    /// The descriptor is closed.
    #[error("descriptor {descriptor} of process {pid} is closed")]
    NoDescriptor {
        /// The process's number.
        pid: u32,
        /// The descriptor.
        descriptor: u32,
    },
    /// The descriptor is open, but its file is not a VM.
    #[error("descriptor {descriptor} of process {pid} is not a VM")]
    NotAVm {
        /// The process's number.
        pid: u32,
        /// The descriptor.
        descriptor: u32,
    },
    /// The VM was created by another process, or by this process before it called `execve()`.
    #[error("the VM at descriptor {descriptor} of process {pid} belongs to another process")]
    OtherProcess {
        /// The process's number.
        pid: u32,
        /// The descriptor.
        descriptor: u32,
    },
    /// The structure changed during every attempt to read it.
    #[error("{0} changed during every attempt to read it; try again")]
    Busy(&'static str),
    /// A structure contradicts its type, because it has been freed or has another type.
    #[error("{0} in the host's kernel is inconsistent; it may have been freed, try again")]
    Inconsistent(&'static str),
    /// The transport returns bytes that are not those of the kernel's memory.
    #[error(
        "{0} does not return the memory of the host's kernel: {1} of the reading thread is no \
         address in the kernel"
    )]
    NotTheKernel(&'static str, &'static str),
    /// The kernel's memory cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// The memory of the host's kernel, and its layout.
#[derive(Debug)]
pub struct HostKernel {
    memory: Box<dyn KernelMemory>,
    pub(crate) layout: Layout,
    /// The address of the reader's PID namespace, and the level of this namespace.
    namespace: u64,
    level: u32,
}

/// The reasons why no transport can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct OpenError(pub Vec<TransportError>);

impl HostKernel {
    /// Opens the first transport that works: `/proc/kcore`, then BPF.
    ///
    /// # Errors
    /// [`OpenError`], with the reason of each transport.
    pub fn open() -> Result<Self, OpenError> {
        let layout = Layout::of_host().map_err(|error| OpenError(vec![error.into()]))?;
        let mut errors = Vec::new();
        for open in [open_kcore, open_bpf] {
            let opened = open().and_then(|memory| {
                Self::with(memory, layout.clone()).map_err(|error| TransportError {
                    what: "the host's kernel cannot be read",
                    error: error.to_string(),
                    next: "report it with the host's kernel release",
                })
            });
            match opened {
                Ok(kernel) => return Ok(kernel),
                Err(error) => errors.push(error),
            }
        }
        Err(OpenError(errors))
    }

    /// Uses the given transport with the layout of the kernel that runs this process.
    ///
    /// # Errors
    /// The layout is unknown, or the transport does not read this kernel's memory.
    pub fn over(memory: Box<dyn KernelMemory>) -> Result<Self, OpenError> {
        let layout =
            Layout::of_host().map_err(|error: LayoutError| OpenError(vec![error.into()]))?;
        Self::with(memory, layout).map_err(|error| {
            OpenError(vec![TransportError {
                what: "the host's kernel cannot be read",
                error: error.to_string(),
                next: "report it with the host's kernel release",
            }])
        })
    }

    pub(crate) fn with(
        mut memory: Box<dyn KernelMemory>,
        layout: Layout,
    ) -> Result<Self, WalkError> {
        // The reading thread cannot end during its own reads, so its structures are not freed. If
        // they contain no addresses, the transport is at fault, such as a /proc/kcore that returns
        // zeros, and a later attempt finds the same.
        let wrong = WalkError::NotTheKernel;
        let transport = memory.name();
        let own = memory.own_task(layout.task_thread_pid)?;
        let mut kernel = Self {
            memory,
            layout,
            namespace: 0,
            level: 0,
        };
        let own = kernel
            .checked(own, "")
            .map_err(|_| wrong(transport, "the struct pid"))?;
        let level = kernel.level_of(own)?;
        let upid = kernel.upid(own, level)?;
        let namespace = kernel.word(upid.checked_add(u64::from(kernel.layout.upid_ns)))?;
        kernel.namespace = kernel
            .checked(namespace, "")
            .map_err(|_| wrong(transport, "the PID namespace"))?;
        kernel.level = level;
        Ok(kernel)
    }

    /// Returns the transport's name.
    #[must_use]
    pub fn transport(&self) -> &'static str {
        self.memory.name()
    }

    /// Reads bytes at an address. `None` stands for an address whose computation overflowed.
    pub(crate) fn bytes(
        &mut self,
        address: Option<u64>,
        bytes: &mut [u8],
    ) -> Result<(), WalkError> {
        let address = address.ok_or(ReadError::Unmapped(u64::MAX))?;
        Ok(self.memory.read(address, bytes)?)
    }

    pub(crate) fn word(&mut self, address: Option<u64>) -> Result<u64, WalkError> {
        let mut bytes = [0; 8];
        self.bytes(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn half(&mut self, address: Option<u64>) -> Result<u32, WalkError> {
        let mut bytes = [0; 4];
        self.bytes(address, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub(crate) fn byte(&mut self, address: Option<u64>) -> Result<u8, WalkError> {
        let mut bytes = [0; 1];
        self.bytes(address, &mut bytes)?;
        Ok(bytes[0])
    }

    /// Checks that a word can be the address of a structure.
    #[allow(clippy::unused_self, reason = "it belongs to the reads")]
    pub(crate) fn checked(&self, word: u64, what: &'static str) -> Result<u64, WalkError> {
        match word >> 63 == 1 && word.is_multiple_of(8) {
            true => Ok(word),
            false => Err(WalkError::Inconsistent(what)),
        }
    }

    /// Reads the address of a structure.
    pub(crate) fn pointer(&mut self, address: Option<u64>) -> Result<u64, WalkError> {
        let word = self.word(address)?;
        self.checked(word, "a pointer")
    }

    fn level_of(&mut self, pid: u64) -> Result<u32, WalkError> {
        let level = self.half(at(pid, self.layout.pid_level))?;
        match level <= MAX_LEVEL {
            true => Ok(level),
            false => Err(WalkError::Inconsistent("a struct pid")),
        }
    }

    /// Returns the address of a `struct upid`.
    fn upid(&mut self, pid: u64, level: u32) -> Result<u64, WalkError> {
        let offset = level
            .checked_mul(self.layout.upid_size)
            .and_then(|offset| offset.checked_add(self.layout.pid_numbers));
        offset
            .and_then(|offset| at(pid, offset))
            .ok_or(WalkError::Inconsistent("a struct pid"))
    }

    /// Returns the number of a `struct pid` in the reader's PID namespace; `None` if the pid is not
    /// in this namespace.
    pub(crate) fn number(&mut self, pid: u64) -> Result<Option<u32>, WalkError> {
        if self.level_of(pid)? < self.level {
            return Ok(None);
        }
        let upid = self.upid(pid, self.level)?;
        let namespace = self.word(at(upid, self.layout.upid_ns))?;
        let number = self.half(at(upid, self.layout.upid_nr))?;
        Ok((namespace == self.namespace).then_some(number))
    }

    /// Returns an entry of an xarray; `None` if the index has no entry.
    pub(crate) fn entry(
        &mut self,
        head: Option<u64>,
        index: u64,
    ) -> Result<Option<u64>, WalkError> {
        const WHAT: &str = "an xarray";
        let is_node = |entry: u64| entry & 3 == NODE_TAG && entry >= FIRST_NODE;
        let fanout = u64::from(self.layout.node_fanout);
        let mut entry = self.word(head)?;
        if !is_node(entry) && index != 0 {
            return Ok(None);
        }
        let mut above = None;
        for _ in 0..MAX_DEPTH {
            if !is_node(entry) {
                return match entry {
                    0 => Ok(None),
                    entry if entry & 3 == NODE_TAG => Err(WalkError::Busy(WHAT)),
                    entry => Ok(Some(entry)),
                };
            }
            let node = self.checked(entry - NODE_TAG, WHAT)?;
            let shift = u32::from(self.byte(at(node, self.layout.node_shift))?);
            // Each level divides the index further.
            let deeper = above.is_none_or(|above| shift < above);
            let position = index.checked_shr(shift).filter(|_| deeper);
            let mut position = position.ok_or(WalkError::Inconsistent(WHAT))?;
            match above {
                None if position >= fanout => return Ok(None),
                _ => position %= fanout.max(1),
            }
            above = Some(shift);
            let slots = at(node, self.layout.node_slots);
            entry = self.word(slots.and_then(|slots| slots.checked_add(8 * position)))?;
        }
        Err(WalkError::Inconsistent(WHAT))
    }

    /// Returns the address of a process's `task_struct`.
    pub(crate) fn task(&mut self, number: u32) -> Result<u64, WalkError> {
        let base = self.half(at(self.namespace, self.layout.ns_base))?;
        let index = number.checked_sub(base);
        let index = index.ok_or(WalkError::NoProcess(number))?;
        let head = at(self.namespace, self.layout.ns_head);
        let pid = self.entry(head, index.into())?;
        let pid = self.checked(pid.ok_or(WalkError::NoProcess(number))?, "a struct pid")?;
        if self.number(pid)? != Some(number) {
            return Err(WalkError::Inconsistent("a struct pid"));
        }
        let kind = self.layout.process_type;
        let first = at(pid, self.layout.pid_tasks).and_then(|list| at(list, kind.checked_mul(8)?));
        let first = self.word(first)?;
        if first == 0 {
            return Err(WalkError::NotAProcess(number));
        }
        // The list links the members `pid_links` of tasks. Each of them is a node of two pointers.
        let link = kind
            .checked_mul(16)
            .and_then(|link| link.checked_add(self.layout.task_pid_links));
        let task = link.and_then(|link| first.checked_sub(link.into()));
        let task = self.checked(task.unwrap_or_default(), "a task_struct")?;
        if self.word(at(task, self.layout.task_thread_pid))? != pid {
            return Err(WalkError::Inconsistent("a task_struct"));
        }
        Ok(task)
    }

    /// Returns the address of the `struct file` of a descriptor.
    pub(crate) fn file(&mut self, pid: u32, task: u64, descriptor: u32) -> Result<u64, WalkError> {
        let closed = WalkError::NoDescriptor { pid, descriptor };
        let files = self.word(at(task, self.layout.task_files))?;
        if files == 0 {
            return Err(WalkError::NotAProcess(pid));
        }
        let files = self.checked(files, "a files_struct")?;
        let table = self.pointer(at(files, self.layout.files_fdt))?;
        if descriptor >= self.half(at(table, self.layout.fdt_max))? {
            return Err(closed);
        }
        let files = self.pointer(at(table, self.layout.fdt_fd))?;
        let place = files.checked_add(8 * u64::from(descriptor));
        match self.word(place)? {
            0 => Err(closed),
            file => self.checked(file, "a struct file"),
        }
    }

    /// Returns whether a `struct file` is that of a VM. Only then is `private_data` a `struct kvm`.
    /// The address of `kvm_vm_fops` may be hidden, so the name and the file system of the dentry
    /// identify a VM: no process can create a file in that file system.
    pub(crate) fn is_vm_file(&mut self, file: u64) -> Result<bool, WalkError> {
        let dentry = self.pointer(at(file, self.layout.file_dentry))?;
        let super_block = self.pointer(at(dentry, self.layout.dentry_super))?;
        if self.word(at(super_block, self.layout.super_magic))? != ANONYMOUS {
            return Ok(false);
        }
        let name = self.word(at(dentry, self.layout.dentry_name))?;
        let mut bytes = [0; VM_FILE.len()];
        self.bytes(Some(name), &mut bytes)?;
        Ok(bytes == *VM_FILE)
    }
}

fn open_kcore() -> Result<Box<dyn KernelMemory>, TransportError> {
    Ok(Box::new(crate::kcore::Kcore::open()?))
}

fn open_bpf() -> Result<Box<dyn KernelMemory>, TransportError> {
    Ok(Box::new(crate::bpf::Bpf::open()?))
}

/// Returns the address of a member; `None` if the sum overflows.
pub(crate) fn at(structure: u64, offset: u32) -> Option<u64> {
    structure.checked_add(offset.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LOW, OWN_PID, OWN_TASK, World};

    #[test]
    fn a_transport_that_returns_zeros_is_refused() {
        let refused = |world: &World| {
            let memory = Box::new(world.clone());
            let error = HostKernel::with(memory, world.1.clone()).expect_err("zeros");
            error.to_string()
        };
        let prefix = "a test does not return the memory of the host's kernel";
        let world = World::new(true, &[LOW]);
        // The notes of /proc/kcore contain the task, and the rest of the file is zeros.
        world.put(OWN_PID, &[0; 9]);
        let error = refused(&world);
        assert!(error.starts_with(prefix), "{error}");
        assert!(error.contains("the PID namespace"), "{error}");
        world.put(OWN_TASK, &[0]);
        let error = refused(&world);
        assert!(error.starts_with(prefix), "{error}");
        assert!(error.contains("the struct pid"), "{error}");
        assert!(!error.contains("try again"), "{error}");
    }
}
