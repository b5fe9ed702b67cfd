// SPDX-License-Identifier: Apache-2.0
//! Lists the VMs of this host.
//!
//! /proc shows which processes have a VM, also to users without privileges for their own processes.
//! The host's kernel adds what the VM is.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::kernel::{HostKernel, OpenError, WalkError};
use crate::monitor::{Kind, Monitor};
use crate::vm::{DirtyLogging, Refusal, Vm};

/// The names of the descriptors of VMs and vCPUs (`kvm_dev_ioctl_create_vm()`, `create_vcpu_fd()`).
const VM: &[u8] = b"anon_inode:kvm-vm";
const VCPU: &[u8] = b"anon_inode:kvm-vcpu";
/// The maximum number of bytes read of a file in /proc.
const MAX_FILE: u64 = 4 << 20;
/// `CAP_SYS_PTRACE`
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// The answer to the question whether Patchbay can attach to a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is known that forbids it.
    Yes,
    /// It is refused, for these reasons.
    No(Vec<String>),
    /// It cannot be told, for this reason.
    Unknown(String),
}

/// A VM of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedVm {
    /// Process of its monitor.
    pub pid: u32,
    /// The descriptor in this process.
    pub descriptor: u32,
    /// The monitor.
    pub monitor: Monitor,
    /// Number of vCPUs; `None` if it is unknown.
    pub vcpus: Option<usize>,
    /// Size of its RAM in bytes.
    pub memory_bytes: Option<u64>,
    /// The dirty logs.
    pub dirty_logging: Option<DirtyLogging>,
    /// Whether Patchbay can attach to it.
    pub verdict: Verdict,
}

impl ListedVm {
    /// Returns the guest's name, or one made of the program and the process.
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
    /// Sentences about what could not be seen.
    pub remarks: Vec<String>,
}

/// Lists the VMs of this host. What is missing is unknown, not an error. The host's kernel is opened
/// if a process has a VM.
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
    let mut listing = Listing::default();
    let mut hidden = 0_u32;
    let mut found = Vec::new();
    for entry in fs::read_dir(proc)?.flatten() {
        let number = entry.file_name().to_str().map(str::parse);
        let Some(Ok(pid)) = number else { continue };
        match Candidate::open(&entry.path(), pid) {
            Ok(candidate) => found.extend(candidate),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => hidden += 1,
            // It has ended.
            Err(_) => {}
        }
    }
    found.sort_unstable_by_key(|candidate| candidate.pid);
    let (mut kernel, why) = match (!found.is_empty()).then(open) {
        Some(Ok(kernel)) => (Some(kernel), String::new()),
        Some(Err(error)) => (None, error.to_string()),
        None => (None, String::new()),
    };
    let ptrace = ptrace_refusal(proc);
    let mut seen = Vec::new();
    for candidate in &found {
        for &descriptor in &candidate.vms {
            let vm = kernel
                .as_mut()
                .map(|kernel| kernel.vm(candidate.pid, descriptor));
            if let Some(Ok(vm)) = &vm {
                // A descriptor may have been duplicated.
                if seen.contains(&vm.address) {
                    continue;
                }
                seen.push(vm.address);
            }
            // A process that only holds the VM of another is not its monitor.
            let held = matches!(vm, Some(Err(WalkError::OtherProcess { .. })));
            if held || !candidate.still_has(descriptor) {
                continue;
            }
            listing.vms.push(candidate.listed(descriptor, vm, &ptrace));
        }
    }
    if kernel.is_none() && !listing.vms.is_empty() {
        listing.remarks.push(format!(
            "memory, dirty logging and protection are unknown, because the host's kernel cannot be read: {why}"
        ));
    }
    if hidden > 0 {
        listing.remarks.push(format!(
            "{hidden} processes of other users could not be inspected and may have VMs; run as root, or grant \
             CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        ));
    }
    Ok(listing)
}

/// Returns the reason why this process may trace no other, if there is one
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

/// A process that has a VM.
#[derive(Debug)]
struct Candidate {
    pid: u32,
    /// Its directory in /proc, which never becomes that of another process.
    folder: File,
    monitor: Monitor,
    vms: Vec<u32>,
    vcpus: usize,
}

impl Candidate {
    /// Opens a process; `None` if it has no VM.
    fn open(path: &Path, pid: u32) -> io::Result<Option<Self>> {
        let folder = File::open(path)?;
        let base = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
        let (mut vms, mut vcpus) = (Vec::new(), 0);
        for entry in fs::read_dir(base.join("fd"))?.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else {
                continue;
            };
            let target = target.as_os_str().as_bytes();
            let number = entry.file_name().to_str().map(str::parse);
            if let (true, Some(Ok(number))) = (target == VM, number) {
                vms.push(number);
            } else if target.starts_with(VCPU) {
                vcpus += 1;
            }
        }
        if vms.is_empty() {
            return Ok(None);
        }
        vms.sort_unstable();
        let program = fs::read_link(base.join("exe")).unwrap_or_default();
        let program = program.file_name().unwrap_or_default().to_string_lossy();
        let line = read(&base.join("cmdline"));
        let monitor = Monitor::recognise(&program, &line, || read(&base.join("maps")));
        Ok(Some(Self {
            pid,
            folder,
            monitor,
            vms,
            vcpus,
        }))
    }

    fn still_has(&self, descriptor: u32) -> bool {
        let path = format!("/proc/self/fd/{}/fd/{descriptor}", self.folder.as_raw_fd());
        fs::read_link(path).is_ok_and(|target| target.as_os_str().as_bytes() == VM)
    }

    fn listed(
        &self,
        descriptor: u32,
        vm: Option<Result<Vm, WalkError>>,
        ptrace: &Option<String>,
    ) -> ListedVm {
        let mut reasons: Vec<String> = ptrace.iter().cloned().collect();
        reasons.extend(self.refusal().map(str::to_owned));
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
        // The vCPUs of several VMs cannot be told apart by their descriptors.
        let counted = (self.vms.len() == 1).then_some(self.vcpus);
        ListedVm {
            pid: self.pid,
            descriptor,
            monitor: self.monitor.clone(),
            vcpus: vm.as_ref().map(|vm| vm.vcpus.len()).or(counted),
            memory_bytes: vm.as_ref().map(Vm::ram_bytes),
            dirty_logging: vm.as_ref().map(Vm::dirty_logging),
            verdict,
        }
    }

    /// Returns why Patchbay does not attach to guests of this monitor.
    fn refusal(&self) -> Option<&'static str> {
        match self.monitor.kind {
            Kind::Patchbay => Some("patchbay-vmm serves its guest's keys itself"),
            _ if self.vms.len() > 1 => Some("its process has several VMs"),
            _ => None,
        }
    }
}

/// Reads a file in /proc; empty if it cannot be read.
fn read(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = io::Read::read_to_end(&mut io::Read::take(file, MAX_FILE), &mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests;
