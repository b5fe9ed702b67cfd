// SPDX-License-Identifier: Apache-2.0
//! Lists the VMs of this host.
//!
//! /proc shows which processes have a VM. Users without privileges can inspect only their own
//! processes. The memory of the host's kernel adds the properties of each VM.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::kernel::{HostKernel, OpenError, WalkError};
use crate::locks::Locks;
use crate::monitor::{Kind, Monitor};
use crate::vm::{DirtyLogging, Refusal, Vm};

/// The names of the descriptors of VMs and vCPUs (`kvm_dev_ioctl_create_vm()`, `create_vcpu_fd()`).
const VM: &[u8] = b"anon_inode:kvm-vm";
const VCPU: &[u8] = b"anon_inode:kvm-vcpu";
/// The maximum number of bytes read of a file in /proc.
const MAX_FILE: u64 = 4 << 20;
/// The maximum number of VMs per process that are listed.
const MAX_VMS: usize = 64;
/// The maximum number of descriptors of VMs per process that are read. A process may duplicate a
/// descriptor without end.
const MAX_DESCRIPTORS: usize = 1024;
/// The maximum number of descriptors per process whose names are read. A process may have a
/// million, and the name of each takes about a microsecond.
const MAX_LOOKED_AT: usize = if cfg!(test) { 4096 } else { 65_536 };
/// `PF_KTHREAD`
const KERNEL_THREAD: u64 = 0x0020_0000;
/// The errors of a process that has ended: `ENOENT` and `ESRCH`.
const ENDED: [Option<i32>; 2] = [Some(2), Some(3)];
/// `CAP_SYS_PTRACE`
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// The verdict on attaching Patchbay to a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Patchbay can attach, as far as is known.
    Yes,
    /// Patchbay would refuse to attach, for these reasons.
    No(Vec<String>),
    /// Patchbay may refuse to attach: a fact is unknown, for this reason.
    Unknown(String),
}

/// A VM of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedVm {
    /// The number of the monitor's process.
    pub pid: u32,
    /// The time at which the monitor's process started, in clock ticks since the boot of the host;
    /// `None` if it is unknown. This time and the number identify the process.
    pub started: Option<u64>,
    /// The real user id of this process; `None` if it is unknown. A user cannot give a process the
    /// real user id of another one.
    pub user: Option<u32>,
    /// The process is in a PID namespace below the one of /proc, as in a container. Its root need
    /// not be the host's, whatever its user id is.
    pub is_contained: bool,
    /// The descriptor in this process.
    pub descriptor: u32,
    /// The monitor that runs it.
    pub monitor: Monitor,
    /// Number of vCPUs; `None` if it is unknown.
    pub vcpus: Option<usize>,
    /// Size of the VM's RAM in bytes; `None` if it is unknown.
    pub memory_bytes: Option<u64>,
    /// The part of the RAM whose dirty pages KVM logs; `None` if it is unknown.
    pub dirty_logging: Option<DirtyLogging>,
    /// The verdict on attaching to the VM. It does not consider an attacher.
    pub verdict: Verdict,
    /// The process that is attached to the VM; `None` if there is none, or if it is unknown.
    pub attacher: Option<u32>,
}

impl ListedVm {
    /// Returns the guest's name, or one made of the program and the process id.
    #[must_use]
    pub fn name(&self) -> String {
        let made = || format!("{}-{}", self.monitor.program, self.pid);
        self.monitor.name.clone().unwrap_or_else(made)
    }
}

/// The VMs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The VMs by process and descriptor.
    pub vms: Vec<ListedVm>,
    /// Sentences for the user about what is missing from the list.
    pub remarks: Vec<String>,
    /// Number of processes of other users that could not be inspected.
    pub hidden: u32,
}

impl Listing {
    /// Returns a sentence about the processes that could not be inspected, if there are any.
    #[must_use]
    pub fn hidden_remark(&self) -> Option<String> {
        (self.hidden > 0).then(|| {
            format!(
                "{} processes of other users could not be inspected and may have VMs; run as root, or grant \
                 CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
                self.hidden
            )
        })
    }
}

/// Lists the VMs of this host. A property that cannot be read is unknown, which is not an error.
/// The function calls `open` only if a process has a VM.
///
/// # Errors
/// /proc cannot be read.
pub fn list(open: impl FnOnce() -> Result<HostKernel, OpenError>) -> io::Result<Listing> {
    list_in(Path::new("/proc"), open)
}

fn list_in(
    proc: &Path,
    open: impl FnOnce() -> Result<HostKernel, OpenError>,
) -> io::Result<Listing> {
    let found = Found::find(proc, |path, pid| Candidate::open(path, pid, None))?;
    let mut listing = Listing {
        vms: Vec::new(),
        remarks: found.closed(),
        hidden: found.hidden,
    };
    let (mut kernel, why) = match found.has_vms().then(open) {
        Some(Ok(kernel)) => (Some(kernel), String::new()),
        Some(Err(error)) => (None, error.to_string()),
        None => (None, String::new()),
    };
    let ptrace = ptrace_refusal(proc);
    let mut seen = HashSet::new();
    for candidate in found.with_vms() {
        let (rows, remark) = candidate.rows(kernel.as_mut(), &mut seen, &ptrace);
        listing.vms.extend(rows.into_iter().map(|(row, _)| row));
        listing.remarks.extend(remark);
    }
    listing
        .remarks
        .extend(add_attachers(proc, &mut listing.vms));
    if kernel.is_none() && !listing.vms.is_empty() {
        listing.remarks.push(format!(
            "memory, dirty logging and protection are unknown, because the host's kernel cannot be read: {why}"
        ));
    }
    listing.remarks.extend(found.failures.remark());
    Ok(listing)
}

/// Adds the attachers of the VMs. Returns a sentence if some locks were not read.
fn add_attachers(proc: &Path, vms: &mut [ListedVm]) -> Option<String> {
    if vms.is_empty() {
        return None;
    }
    // An attacher locks this file of its guest's monitor.
    let file = |vm: &ListedVm| fs::metadata(proc.join(format!("{}/maps", vm.pid))).ok();
    let files: Vec<_> = vms.iter().map(file).collect();
    let locks = Locks::read(proc, files.iter().flatten());
    for (vm, file) in vms.iter_mut().zip(&files) {
        vm.attacher = file.as_ref().and_then(|file| locks.holder(file));
    }
    locks.remark()
}

/// The processes that have a VM, or vCPUs of one, in the order of their numbers.
struct Found {
    candidates: Vec<Candidate>,
    hidden: u32,
    failures: Failures,
}

impl Found {
    /// Opens each process by `open`.
    fn find(
        proc: &Path,
        mut open: impl FnMut(&Path, u32) -> io::Result<Option<Candidate>>,
    ) -> io::Result<Self> {
        let mut found = Self {
            candidates: Vec::new(),
            hidden: 0,
            failures: Failures::default(),
        };
        for entry in fs::read_dir(proc)?.flatten() {
            let number = entry.file_name().to_str().map(str::parse);
            let Some(Ok(pid)) = number else { continue };
            match open(&entry.path(), pid) {
                Ok(candidate) => found.candidates.extend(candidate),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    found.hidden += u32::from(!is_kernel_thread(&entry.path()));
                }
                Err(error) => found.failures.add(error),
            }
        }
        found
            .candidates
            .sort_unstable_by_key(|candidate| candidate.pid);
        Ok(found)
    }

    fn with_vms(&self) -> impl Iterator<Item = &Candidate> {
        let candidates = self.candidates.iter();
        candidates.filter(|candidate| !candidate.vms.is_empty())
    }

    fn has_vms(&self) -> bool {
        self.with_vms().next().is_some()
    }

    /// Returns sentences about the processes that have only vCPUs.
    fn closed(&self) -> Vec<String> {
        let candidates = self.candidates.iter();
        let closed = candidates.filter(|candidate| candidate.vms.is_empty());
        closed
            .map(|candidate| {
                format!(
                    "process {} runs vCPUs of a VM whose descriptor it has closed",
                    candidate.pid
                )
            })
            .collect()
    }
}

/// The processes that could not be inspected because of an error.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    last: Option<io::Error>,
}

impl Failures {
    /// Counts a process, unless it has ended.
    fn add(&mut self, error: io::Error) {
        if !ENDED.contains(&error.raw_os_error()) {
            self.count += 1;
            self.last = Some(error);
        }
    }

    fn remark(&self) -> Option<String> {
        let (count, error) = (self.count, self.last.as_ref()?);
        Some(format!(
            "{count} processes could not be inspected and may have VMs: {error}"
        ))
    }
}

/// Returns whether a process is a thread of the kernel, which has no descriptors.
fn is_kernel_thread(process: &Path) -> bool {
    stat(process, 6).is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

/// Returns the time at which a process started, in clock ticks since the boot of the host. This
/// time and the process's number together identify the process.
fn started(process: &Path) -> Option<u64> {
    stat(process, 19)
}

/// Returns the real user id of a process, and whether it is in a PID namespace below the one of
/// /proc. The owner of its folder does not tell the user: a process that cannot be dumped has a
/// folder of root.
fn real_user(process: &Path) -> (Option<u32>, bool) {
    let status = read(&process.join("status"));
    let status = String::from_utf8_lossy(&status);
    let numbers = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().split_whitespace()
    };
    let user = numbers("Uid:").next();
    // One number for each namespace, from that of /proc to its own. A kernel without PID namespaces
    // has no such line.
    let is_contained = numbers("NSpid:").count() > 1;
    (user.and_then(|user| user.parse().ok()), is_contained)
}

/// Returns a number in a process's `stat`, given by its index after the program's name
/// (proc_pid_stat(5)).
fn stat(process: &Path, index: usize) -> Option<u64> {
    let stat = read(&process.join("stat"));
    let stat = String::from_utf8_lossy(&stat);
    // The program's name is in parentheses and may itself contain parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(index)?.parse().ok()
}

/// Returns a path by which the files in an open folder of /proc can be opened. The path never leads
/// to another process.
fn inside(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

/// Returns the reason why this process may not trace other processes, if there is one
/// (Documentation/admin-guide/LSM/Yama.rst).
fn ptrace_refusal(proc: &Path) -> Option<String> {
    let scope = fs::read_to_string(proc.join("sys/kernel/yama/ptrace_scope")).ok()?;
    let status = fs::read_to_string(proc.join("self/status")).unwrap_or_default();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let may_trace = capabilities.unwrap_or_default() & CAP_SYS_PTRACE != 0;
    match scope.trim() {
        "3" => Some("kernel.yama.ptrace_scope is 3, which lasts until the host reboots".to_owned()),
        "1" | "2" if !may_trace => Some(format!(
            "kernel.yama.ptrace_scope is {}; grant CAP_SYS_PTRACE",
            scope.trim()
        )),
        _ => None,
    }
}

/// A process that has a VM, or vCPUs of one.
#[derive(Clone, Debug)]
struct Candidate {
    pid: u32,
    /// The process's directory in /proc. It is not kept open, because a host may have more VMs than
    /// a process may have descriptors.
    path: PathBuf,
    started: Option<u64>,
    user: Option<u32>,
    is_contained: bool,
    monitor: Monitor,
    /// Its descriptors of VMs.
    vms: Vec<u32>,
    /// True if the process has more than [`MAX_DESCRIPTORS`] descriptors of VMs, or more than
    /// [`MAX_LOOKED_AT`] descriptors in all.
    has_more: bool,
    vcpus: usize,
}

impl Candidate {
    /// Returns whether a process that was found later is this one and has the same descriptors of
    /// VMs.
    fn is_process(&self, pid: u32, started: Option<u64>, vms: &[u32]) -> bool {
        started.is_some() && (self.pid, self.started, &*self.vms) == (pid, started, vms)
    }

    /// Opens a process; `None` if it has neither a VM nor vCPUs. If it is the process `known`, with
    /// the same descriptors of VMs, its program is not read again.
    fn open(path: &Path, pid: u32, known: Option<&Self>) -> io::Result<Option<Self>> {
        let folder = File::open(path)?;
        let base = inside(&folder);
        let (mut vms, mut has_more, mut vcpus) = (Vec::new(), false, 0);
        for (index, entry) in fs::read_dir(base.join("fd"))?.flatten().enumerate() {
            if index == MAX_LOOKED_AT {
                has_more = true;
                break;
            }
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            let target = target.as_os_str().as_bytes();
            let number = entry.file_name().to_str().map(str::parse);
            if let (true, Some(Ok(number))) = (target == VM, number) {
                match vms.len() < MAX_DESCRIPTORS {
                    true => vms.push(number),
                    false => has_more = true,
                }
            } else if target.starts_with(VCPU) {
                vcpus += 1;
            }
        }
        if vms.is_empty() && vcpus == 0 {
            return Ok(None);
        }
        vms.sort_unstable();
        let started = started(&base);
        let monitor = match known.filter(|known| known.is_process(pid, started, &vms)) {
            Some(known) => known.monitor.clone(),
            None => {
                let program = fs::read_link(base.join("exe")).unwrap_or_default();
                let program = program.file_name().unwrap_or_default().to_string_lossy();
                let line = read(&base.join("cmdline"));
                Monitor::recognise(&program, &line, || read(&base.join("maps")))
            }
        };
        let (user, is_contained) = real_user(&base);
        Ok(Some(Self {
            pid,
            path: path.to_owned(),
            started,
            user,
            is_contained,
            monitor,
            vms,
            has_more,
            vcpus,
        }))
    }

    /// Returns the rows of the process's VMs with their addresses in the kernel, and a sentence if
    /// VMs are missing. `seen` contains the VMs of other processes.
    fn rows(
        &self,
        kernel: Option<&mut HostKernel>,
        seen: &mut HashSet<u64>,
        ptrace: &Option<String>,
    ) -> (Vec<(ListedVm, Option<u64>)>, Option<String>) {
        let mut vms = self.vms(kernel);
        // Processes that share their memory also share its VMs.
        vms.retain(|(_, vm)| match vm {
            Some(Ok(vm)) => seen.insert(vm.found.kvm),
            _ => true,
        });
        let remark = self.remark(vms.len());
        let is_only = vms.len() == 1;
        let rows = vms.into_iter().take(MAX_VMS).map(|(descriptor, vm)| {
            let address = match &vm {
                Some(Ok(vm)) => Some(vm.found.kvm),
                _ => None,
            };
            (self.listed(descriptor, vm, is_only, ptrace), address)
        });
        (rows.collect(), remark)
    }

    /// Returns the process's VMs by descriptor, and each VM as the kernel shows it. Without the
    /// kernel, a VM appears once for each of its descriptors.
    fn vms(&self, kernel: Option<&mut HostKernel>) -> Vec<(u32, Option<Result<Vm, WalkError>>)> {
        let mut vms: Vec<_> = match kernel {
            Some(kernel) => {
                let vms = kernel.vms(self.pid, &self.vms).into_iter();
                vms.map(|(descriptor, vm)| (descriptor, Some(vm))).collect()
            }
            None => self.vms.iter().map(|number| (*number, None)).collect(),
        };
        // A process that only holds the VM of another process is not its monitor.
        vms.retain(|(descriptor, vm)| {
            let is_others = matches!(
                vm,
                Some(Err(
                    WalkError::OtherProcess { .. } | WalkError::NotAVm { .. }
                ))
            );
            !is_others && self.still_has(*descriptor)
        });
        vms
    }

    /// Returns a sentence if VMs of this process are missing from the list. The process has `vms`
    /// VMs.
    fn remark(&self, vms: usize) -> Option<String> {
        let pid = self.pid;
        if self.has_more {
            return Some(format!(
                "process {pid} has more than {MAX_DESCRIPTORS} descriptors of VMs, or {MAX_LOOKED_AT} in all; the others are not read"
            ));
        }
        (vms > MAX_VMS).then(|| {
            format!("process {pid} has more than {MAX_VMS} VMs; the others are not listed")
        })
    }

    /// Returns whether the process's number still belongs to this process, and this process still
    /// has the VM. In this case, everything that was read earlier under the number belongs to this
    /// process.
    fn still_has(&self, descriptor: u32) -> bool {
        let Ok(folder) = File::open(&self.path) else {
            return false;
        };
        let base = inside(&folder);
        let target = fs::read_link(base.join(format!("fd/{descriptor}")));
        started(&base) == self.started
            && target.is_ok_and(|target| target.as_os_str().as_bytes() == VM)
    }

    fn listed(
        &self,
        descriptor: u32,
        vm: Option<Result<Vm, WalkError>>,
        is_only: bool,
        ptrace: &Option<String>,
    ) -> ListedVm {
        let mut reasons: Vec<String> = ptrace.iter().cloned().collect();
        if self.monitor.kind == Kind::Patchbay {
            reasons.push("patchbay-vmm serves its guest's keys itself".to_owned());
        }
        // Without the kernel, a duplicate of a descriptor looks like another VM.
        if !is_only && vm.is_some() {
            reasons.push("its process has several VMs".to_owned());
        }
        let mut unknown = None;
        let vm = match vm {
            Some(Ok(vm)) => Some(vm),
            Some(Err(error)) => {
                unknown = Some(error.to_string());
                None
            }
            None => {
                unknown = Some("the host's kernel cannot be read".to_owned());
                None
            }
        };
        if vm
            .as_ref()
            .is_some_and(|vm| vm.vcpus.iter().any(|vcpu| vcpu.thread.is_none()))
        {
            reasons.push("one of its vCPUs has not run yet, or has lost its thread".to_owned());
        }
        for refusal in vm.as_ref().map(Vm::refusals).unwrap_or_default() {
            match refusal {
                Refusal::Unknown(_) => unknown = Some(refusal.to_string()),
                _ => reasons.push(refusal.to_string()),
            }
        }
        let verdict = match (reasons.is_empty(), unknown) {
            (false, _) => Verdict::No(reasons),
            (true, Some(why)) => Verdict::Unknown(why),
            (true, None) => Verdict::Yes,
        };
        // The descriptor of a vCPU does not tell which VM it belongs to.
        let counted = is_only.then_some(self.vcpus);
        ListedVm {
            pid: self.pid,
            started: self.started,
            user: self.user,
            is_contained: self.is_contained,
            descriptor,
            monitor: self.monitor.clone(),
            vcpus: vm.as_ref().map(|vm| vm.vcpus.len()).or(counted),
            memory_bytes: vm.as_ref().map(Vm::ram_bytes),
            dirty_logging: vm.as_ref().map(Vm::dirty_logging),
            verdict,
            attacher: None,
        }
    }
}

/// Reads a file in /proc; empty if it cannot be read.
fn read(path: &Path) -> Vec<u8> {
    read_file(path).unwrap_or_default()
}

/// Reads a file of a process in /proc, but at most 4 MiB of it. A process chooses the length of
/// some of its files, such as `cmdline` (PR_SET_MM_MAP in prctl(2)).
///
/// # Errors
/// The process has ended, or its file may not be read.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(File::open(path)?, MAX_FILE), &mut bytes)?;
    Ok(bytes)
}

mod scan;

pub use scan::Scanner;

#[cfg(test)]
mod tests;
