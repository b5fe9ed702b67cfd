// SPDX-License-Identifier: Apache-2.0
//! Reads a VM: its memory slots, its vCPUs and its protection.
//!
//! KVM replaces the set of slots under RCU. So a set is read between two reads of its address and
//! its generation. If the two reads differ, or if the generation says that an update is in
//! progress, the set is read again.

mod description;

use std::collections::HashSet;
use std::thread;
use std::time::Duration;

use crate::kernel::{HostKernel, WalkError, at};
use crate::layout::{Sev, SlotsLayout, VcpusLayout};
use crate::memory::ReadError;
pub(crate) use description::Found;
pub use description::{DirtyLogging, Protection, Refusal, Slot, Vcpu, Vm};

/// The maximum number of slots of an address space (`KVM_USER_MEM_SLOTS`).
const MAX_SLOTS: usize = 1 << 15;
/// The maximum number of vCPUs (`KVM_MAX_VCPUS`).
const MAX_VCPUS: u32 = 4096;
/// The maximum number of address spaces (`KVM_MAX_NR_ADDRESS_SPACES` is 2).
const MAX_SPACES: u32 = 8;
/// The maximum size of a `struct kvm_memory_slot`.
const MAX_SLOT_SIZE: u32 = 4096;
/// The maximum depth of a red-black tree with [`MAX_SLOTS`] nodes, 2 log2(n + 1).
const MAX_DEPTH: usize = 32;
/// The size of the pages that KVM's frame numbers count.
const PAGE: u64 = 4096;

/// `KVM_MEMSLOT_GEN_UPDATE_IN_PROGRESS`
const IN_PROGRESS: u64 = 1 << 63;
/// Flags of a slot (`include/uapi/linux/kvm.h`).
const LOG_DIRTY_PAGES: u32 = 1 << 0;
const READONLY: u32 = 1 << 1;
const GUEST_MEMFD: u32 = 1 << 2;
/// `KVM_MEMSLOT_INVALID`: the slot is being moved or deleted.
const INVALID: u32 = 1 << 16;

/// The maximum number of attempts to read a structure that changes during the read.
const ATTEMPTS: u32 = 50;
/// The maximum number of attempts to read a structure that contradicts its type. If the structure
/// was freed during a read, a later attempt finds its successor.
const FEW_ATTEMPTS: u32 = 5;
/// The time between attempts after the first few. KVM's update of the slots itself waits until no
/// vCPU reads the former set.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

impl HostKernel {
    /// Reads the VM at a descriptor of a process. Every call walks from the process again, because
    /// the memory of a closed VM may still contain its former values. Hold a pidfd of the process
    /// during the call, so that no other process gets its number.
    ///
    /// # Errors
    /// [`WalkError`].
    pub fn vm(&mut self, pid: u32, descriptor: u32) -> Result<Vm, WalkError> {
        let mut last = WalkError::Busy("the process");
        for _ in 0..3 {
            last = match self.attempt(pid, descriptor) {
                // A structure may have been freed during the walk.
                Err(
                    error @ (WalkError::Inconsistent(_)
                    | WalkError::Busy(_)
                    | WalkError::Read(ReadError::Unmapped(_))),
                ) => error,
                result => return result,
            };
        }
        Err(last)
    }

    /// Reads the VMs at several descriptors of a process as [`Self::vm`] does. A VM has one file.
    /// So of several duplicates of a descriptor, only the first is read and returned.
    pub fn vms(&mut self, pid: u32, descriptors: &[u32]) -> Vec<(u32, Result<Vm, WalkError>)> {
        let mut seen = HashSet::new();
        let mut vms = Vec::new();
        for &descriptor in descriptors {
            let task = self.task(pid);
            let file = task.and_then(|task| self.file(pid, task, descriptor));
            if file.is_ok_and(|file| !seen.insert(file)) {
                continue;
            }
            vms.push((descriptor, self.vm(pid, descriptor)));
        }
        vms
    }

    /// Returns whether descriptors of two processes have the same open file.
    ///
    /// # Errors
    /// [`WalkError`].
    pub fn is_same_file(&mut self, one: (u32, u32), other: (u32, u32)) -> Result<bool, WalkError> {
        let mut file = |(pid, descriptor)| {
            let task = self.task(pid)?;
            self.file(pid, task, descriptor)
        };
        Ok(file(one)? == file(other)?)
    }

    /// Returns whether a descriptor still leads to this VM, and whether the VM's slots are still
    /// those that were read. This takes 12 reads for a VM with two address spaces.
    ///
    /// The caller must have held a duplicate of the descriptor since before the VM was read, so
    /// that neither the file nor the VM was freed. After the call it must see by a pidfd that the
    /// process has not ended. The walk begins at the `task_struct` that was found before. The
    /// process gets another one if a thread other than the first calls `execve()`. The former one
    /// then has no memory. If it was freed and reused, its memory is not that of the VM.
    ///
    /// # Errors
    /// [`WalkError`].
    pub fn is_unchanged(&mut self, pid: u32, descriptor: u32, vm: &Vm) -> Result<bool, WalkError> {
        let Found { task, file, kvm } = vm.found;
        for (space, generation) in (0..).zip(&vm.generations) {
            let set = self.pointer(self.set_of(kvm, space))?;
            if self.word(at(set, self.layout.slots_generation))? != *generation {
                return Ok(false);
            }
        }
        Ok(self.file(pid, task, descriptor)? == file
            && self.word(at(file, self.layout.file_private))? == kvm
            && self.has_created(task, kvm)?)
    }

    /// Returns the address of the pointer to the slots of an address space.
    fn set_of(&self, kvm: u64, space: u32) -> Option<u64> {
        let offset = self.layout.kvm_memslots.checked_add(8 * space);
        offset.and_then(|offset| at(kvm, offset))
    }

    fn attempt(&mut self, pid: u32, descriptor: u32) -> Result<Vm, WalkError> {
        let found = self.find(pid, descriptor)?;
        let vm = self.read_vm(found)?;
        // The values belong to this VM only if the walk still leads to it.
        match self.find(pid, descriptor)? == found {
            true => Ok(vm),
            false => Err(WalkError::Busy("the descriptor")),
        }
    }

    fn find(&mut self, pid: u32, descriptor: u32) -> Result<Found, WalkError> {
        let task = self.task(pid)?;
        let file = self.file(pid, task, descriptor)?;
        if !self.is_vm_file(file)? {
            return Err(WalkError::NotAVm { pid, descriptor });
        }
        let kvm = self.word(at(file, self.layout.file_private))?;
        let kvm = self.checked(kvm, "a struct kvm")?;
        match self.has_created(task, kvm)? {
            true => Ok(Found { task, file, kvm }),
            false => Err(WalkError::OtherProcess { pid, descriptor }),
        }
    }

    /// Returns whether a process has created a VM. kvm.userspace_pid names a thread, and a process
    /// may hold the descriptor of another process's VM, so the address space decides.
    fn has_created(&mut self, task: u64, kvm: u64) -> Result<bool, WalkError> {
        let mm = self.word(at(task, self.layout.task_mm))?;
        Ok(mm != 0 && self.word(at(kvm, self.layout.kvm_mm))? == mm)
    }

    fn read_vm(&mut self, found: Found) -> Result<Vm, WalkError> {
        let kvm = found.kvm;
        let vcpus = self.vcpus(kvm)?;
        let protection = self.protection(kvm, vcpus.first().map(|(address, _)| *address))?;
        let dirty_ring_bytes = match self.layout.kvm_dirty_ring {
            Some(offset) => self.half(at(kvm, offset))?,
            None => 0,
        };
        let (mut slots, mut generations) = (Vec::new(), Vec::new());
        if self.layout.kvm_spaces > MAX_SPACES {
            return Err(WalkError::Inconsistent("kvm.memslots"));
        }
        for space in 0..self.layout.kvm_spaces {
            let (generation, read) = self.space(kvm, space)?;
            generations.push(generation);
            slots.extend(read);
        }
        Ok(Vm {
            found,
            slots,
            generations,
            vcpus: vcpus.into_iter().map(|(_, vcpu)| vcpu).collect(),
            protection,
            dirty_ring_bytes,
        })
    }

    /// Reads the slots of an address space. Repeats the read if the slots change meanwhile.
    fn space(&mut self, kvm: u64, space: u32) -> Result<(u64, Vec<Slot>), WalkError> {
        let place = self.set_of(kvm, space);
        let generation_at = self.layout.slots_generation;
        let mut last = WalkError::Busy("the memory slots");
        for attempt in 0..ATTEMPTS {
            if attempt > 2 {
                thread::sleep(BETWEEN_ATTEMPTS);
            }
            let set = self.pointer(place)?;
            let generation = self.word(at(set, generation_at))?;
            if generation & IN_PROGRESS != 0 {
                last = WalkError::Busy("the memory slots");
                continue;
            }
            let slots = match self.layout.slots {
                SlotsLayout::Tree { .. } => self.tree(set, space),
                SlotsLayout::Array { .. } => self.array(set, space),
            };
            let again = (self.pointer(place)?, self.word(at(set, generation_at))?);
            match slots {
                Ok(slots) if again == (set, generation) => return Ok((generation, slots)),
                Ok(_) => last = WalkError::Busy("the memory slots"),
                // The slot may have been replaced and freed during the read, so other errors are
                // retried.
                Err(error @ WalkError::Read(ReadError::Transport(_))) => return Err(error),
                Err(error) => {
                    let may_end = matches!(error, WalkError::Busy(_)) || attempt < FEW_ATTEMPTS;
                    last = error;
                    if !may_end {
                        break;
                    }
                }
            }
        }
        Err(last)
    }

    /// Reads the slots in a red-black tree, in the order of their addresses.
    fn tree(&mut self, set: u64, space: u32) -> Result<Vec<Slot>, WalkError> {
        const WHAT: &str = "the tree of memory slots";
        let SlotsLayout::Tree {
            root,
            node_index,
            nodes,
            node_size,
            left,
            right,
        } = self.layout.slots
        else {
            return Err(WalkError::Inconsistent(WHAT));
        };
        // Each slot has a node for each of two trees, of which one is active.
        let index = self.half(at(set, node_index))?;
        let node_at = (index <= 1)
            .then(|| nodes.checked_add(index * node_size))
            .flatten()
            .ok_or(WalkError::Inconsistent(WHAT))?;
        let mut slots = Vec::new();
        let mut above: Vec<(Vec<u8>, u64)> = Vec::new();
        let mut next = self.word(at(set, root))?;
        loop {
            while next != 0 {
                if above.len() == MAX_DEPTH {
                    return Err(WalkError::Inconsistent(WHAT));
                }
                let slot = self.checked(next, WHAT)?.checked_sub(node_at.into());
                let bytes = self.slot_bytes(slot)?;
                next = field(&bytes, node_at.checked_add(left))?;
                let to_the_right = field(&bytes, node_at.checked_add(right))?;
                above.push((bytes, to_the_right));
            }
            let Some((bytes, to_the_right)) = above.pop() else {
                return Ok(slots);
            };
            self.push(&mut slots, &bytes, space)?;
            next = to_the_right;
        }
    }

    /// Reads the slots in an array. Linux before 5.17 sorts it by descending address.
    fn array(&mut self, set: u64, space: u32) -> Result<Vec<Slot>, WalkError> {
        const WHAT: &str = "the array of memory slots";
        let SlotsLayout::Array { used, first } = self.layout.slots else {
            return Err(WalkError::Inconsistent(WHAT));
        };
        let used = self.half(at(set, used))?;
        if used as usize > MAX_SLOTS {
            return Err(WalkError::Inconsistent(WHAT));
        }
        let mut slots = Vec::new();
        for index in (0..used).rev() {
            let offset = u64::from(index) * u64::from(self.layout.slot_size);
            let slot = at(set, first).and_then(|first| first.checked_add(offset));
            let bytes = self.slot_bytes(slot)?;
            self.push(&mut slots, &bytes, space)?;
        }
        Ok(slots)
    }

    fn slot_bytes(&mut self, address: Option<u64>) -> Result<Vec<u8>, WalkError> {
        let size = self.layout.slot_size;
        if size > MAX_SLOT_SIZE {
            return Err(WalkError::Inconsistent("kvm_memory_slot"));
        }
        let mut bytes = vec![0; size as usize];
        self.bytes(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Appends a slot, which must follow the others.
    fn push(&self, slots: &mut Vec<Slot>, bytes: &[u8], space: u32) -> Result<(), WalkError> {
        let wrong = || WalkError::Inconsistent("a memory slot");
        let layout = &self.layout;
        let flags = field(bytes, Some(layout.slot_flags & !7))?;
        let flags = (flags >> (8 * (layout.slot_flags & 7))) as u32;
        if flags & INVALID != 0 {
            return Err(WalkError::Busy("a memory slot"));
        }
        let [base, pages, process_address, bitmap] = [
            layout.slot_base,
            layout.slot_pages,
            layout.slot_address,
            layout.slot_bitmap,
        ]
        .map(|at| field(bytes, Some(at)));
        let (guest_address, size) = (base?.checked_mul(PAGE), pages?.checked_mul(PAGE));
        let guest_address = guest_address.ok_or_else(wrong)?;
        let size = size.filter(|size| *size != 0).ok_or_else(wrong)?;
        let process_address = process_address?;
        // Both ranges end within their address space, and the process's range is in the user half.
        let end = process_address.checked_add(size);
        let fits = end.is_some_and(|end| end >> 63 == 0) && process_address % PAGE == 0;
        guest_address
            .checked_add(size)
            .filter(|_| fits)
            .ok_or_else(wrong)?;
        let follows = slots
            .last()
            .is_none_or(|last| last.guest_address + last.bytes <= guest_address);
        if !follows || slots.len() == MAX_SLOTS {
            return Err(wrong());
        }
        slots.push(Slot {
            space,
            guest_address,
            bytes: size,
            process_address,
            readonly: flags & READONLY != 0,
            guest_memfd: flags & GUEST_MEMFD != 0,
            logs_dirty_pages: flags & LOG_DIRTY_PAGES != 0 || bitmap? != 0,
        });
        Ok(())
    }

    /// Reads the vCPUs, each with the address of its `struct kvm_vcpu`.
    fn vcpus(&mut self, kvm: u64) -> Result<Vec<(u64, Vcpu)>, WalkError> {
        let count = self.half(at(kvm, self.layout.kvm_online_vcpus))?;
        let limit = match self.layout.kvm_vcpus {
            VcpusLayout::Xarray(_) => MAX_VCPUS,
            VcpusLayout::Array(_, length) => length.min(MAX_VCPUS),
        };
        if count > limit {
            return Err(WalkError::Inconsistent("kvm.online_vcpus"));
        }
        let mut vcpus = Vec::new();
        for index in 0..count {
            let vcpu = match self.layout.kvm_vcpus {
                VcpusLayout::Xarray(head) => self.entry(at(kvm, head), index.into())?,
                VcpusLayout::Array(offset, _) => {
                    let array = at(kvm, offset);
                    let place = array.and_then(|array| array.checked_add(8 * u64::from(index)));
                    Some(self.word(place)?)
                }
            };
            let vcpu = self.checked(vcpu.unwrap_or_default(), "a struct kvm_vcpu")?;
            let thread = self.thread(vcpu)?;
            vcpus.push((vcpu, Vcpu { thread }));
        }
        Ok(vcpus)
    }

    /// Returns the thread that ran a vCPU last.
    fn thread(&mut self, vcpu: u64) -> Result<Option<u32>, WalkError> {
        let place = at(vcpu, self.layout.vcpu_pid);
        for _ in 0..ATTEMPTS {
            let pid = self.word(place)?;
            if pid == 0 {
                return Ok(None);
            }
            let pid = self.checked(pid, "kvm_vcpu.pid")?;
            // KVM keeps the pid of a thread that has ended. Another thread may have got the number.
            let has_ended = self.word(at(pid, self.layout.pid_tasks))? == 0;
            let number = match has_ended {
                true => Ok(None),
                false => self.number(pid),
            };
            // Another thread may have run the vCPU meanwhile, and the previous pid may be freed.
            if self.word(place)? == pid {
                return number;
            }
        }
        Err(WalkError::Busy("kvm_vcpu.pid"))
    }

    fn protection(&mut self, kvm: u64, vcpu: Option<u64>) -> Result<Protection, WalkError> {
        if let Some((offset, size)) = self.layout.kvm_vm_type {
            let mut bytes = [0; 8];
            let size = (size as usize).min(bytes.len());
            self.bytes(at(kvm, offset), &mut bytes[..size])?;
            if u64::from_le_bytes(bytes) != 0 {
                return Ok(Protection::Protected("its type is not KVM_X86_DEFAULT_VM"));
            }
        }
        if let Some(offset) = self.layout.kvm_protected
            && self.byte(at(kvm, offset))? != 0
        {
            return Ok(Protection::Protected("its registers are protected"));
        }
        if let (Some(offset), Some(vcpu)) = (self.layout.vcpu_protected, vcpu)
            && self.byte(at(vcpu, offset))? != 0
        {
            return Ok(Protection::Protected("its registers are protected"));
        }
        let sev = self.layout.sev;
        match sev {
            Sev::At(offset) if self.byte(at(kvm, offset))? != 0 => {
                Ok(Protection::Protected("SEV encrypts its memory"))
            }
            Sev::Unknown => Ok(Protection::Unknown(
                "the host has SEV, but no type information of kvm_amd",
            )),
            _ => Ok(Protection::None),
        }
    }
}

/// Returns a word of a structure that has been read.
fn field(bytes: &[u8], at: Option<u32>) -> Result<u64, WalkError> {
    let word = at.and_then(|at| bytes.get(at as usize..)?.first_chunk());
    let word = word.ok_or(WalkError::Inconsistent("kvm_memory_slot"))?;
    Ok(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests;
