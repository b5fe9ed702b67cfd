// SPDX-License-Identifier: Apache-2.0
//! Reads what the host's kernel shows about a process's KVM guest in /proc and debugfs. A monitor
//! cannot forge this information. It is compared with QEMU's statements if the kernel's memory,
//! which tells more ([`crate::host`]), cannot be read.
//!
//! | source | tells | needs |
//! |---|---|---|
//! | names of descriptors in /proc/PID/fd | the process has a VM, and how many vCPUs | what an attacher needs anyway |
//! | debugfs, folder TID-FD (`kvm_create_vm_debugfs()`, `virt/kvm/kvm_main.c`) | a thread of the process created a VM | root, the initial PID namespace |
//! | debugfs, `vcpuN/pid` (since Linux 6.0) | the thread that ran the vCPU last; 0 before its first run | the same |
//!
//! A descriptor can be sent to any process that accepts descriptors. Without debugfs the host shows
//! only that a thread belongs to a process with a VM and enough vCPUs, not that the thread runs one
//! of them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::AttachError;
use crate::identity::named;
use crate::process::Process;

/// KVM keeps a folder TID-FD here for each guest: the thread that created the guest, and its
/// descriptor.
pub const FOLDER: &str = "/sys/kernel/debug/kvm";

/// The initial PID namespace: PROC_PID_INIT_INO (`include/linux/proc_ns.h`).
const INITIAL_NAMESPACE: u64 = 0xefff_fffc;

/// The names of the descriptors of VMs and vCPUs (`kvm_dev_ioctl_create_vm()`, `create_vcpu_fd()`).
pub(crate) const VM: &str = "anon_inode:kvm-vm";
const VCPU: &str = "anon_inode:kvm-vcpu:";

/// Returns the PID namespace of this process; `None` if it cannot be read.
#[must_use]
pub fn pid_namespace() -> Option<u64> {
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?;
    Some(namespace.ino())
}

/// Returns whether a PID namespace is the initial one, which shows every process of the host.
#[must_use]
pub fn is_initial(namespace: Option<u64>) -> bool {
    namespace == Some(INITIAL_NAMESPACE)
}

/// Returns KVM's folders of the guests that the threads of a process have created; `None` if this
/// process cannot see them. KVM names guests by ids of the initial PID namespace. In any other
/// namespace the same id may denote another guest.
pub(crate) fn guests_of(
    folder: &Path,
    namespace: Option<u64>,
    has_thread: impl Fn(u32) -> bool,
) -> Option<Vec<PathBuf>> {
    if !is_initial(namespace) {
        return None;
    }
    let mut found = Vec::new();
    for guest in fs::read_dir(folder).ok()? {
        let guest = guest.ok()?;
        let name = guest.file_name();
        let creator = name.to_str().and_then(|name| name.split_once('-'));
        let creator = creator.and_then(|(thread, _)| thread.parse().ok());
        if creator.is_some_and(&has_thread) {
            found.push(guest.path());
        }
    }
    Some(found)
}

/// Returns the folders of a guest's vCPUs; `None` if this process cannot see them.
pub(crate) fn vcpus_of(guest: &Path) -> Option<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(guest).ok()? {
        let entry = entry.ok()?;
        if entry.file_name().to_string_lossy().starts_with("vcpu") {
            found.push(entry.path());
        }
    }
    Some(found)
}

/// Reads the number in a file of debugfs.
pub(crate) fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Refuses a process's threads unless the host confirms that they run the vCPUs of a KVM guest.
///
/// # Errors
/// [`AttachError`].
pub fn prove(process: &Process, threads: &[u32]) -> Result<(), AttachError> {
    prove_in(Path::new(FOLDER), pid_namespace(), process, threads)
}

fn prove_in(
    folder: &Path,
    namespace: Option<u64>,
    process: &Process,
    threads: &[u32],
) -> Result<(), AttachError> {
    let pid = process.pid();
    let refused = |what: String| {
        Err(AttachError::Refused(format!(
            "{what}; give the process id of the guest's QEMU with --pid, and check which process listens on its QMP socket"
        )))
    };
    let names = process.descriptors()?;
    let names: BTreeSet<_> = names.iter().filter_map(|(_, name)| name.to_str()).collect();
    if !names.contains(VM) {
        return refused(format!(
            "QEMU says that it uses KVM, but process {pid} has no KVM VM"
        ));
    }
    let vcpus = names.iter().filter(|name| name.starts_with(VCPU)).count();
    let distinct: BTreeSet<u32> = threads.iter().copied().collect();
    if distinct.len() != threads.len() || threads.len() > vcpus {
        return refused(format!(
            "QEMU says that {} vCPUs run in the threads {}, but process {pid} has {vcpus} KVM vCPUs",
            threads.len(),
            named(threads)
        ));
    }
    let Some(guests) = guests_of(folder, namespace, |id| process.has_thread(id)) else {
        return Ok(());
    };
    if guests.is_empty() {
        return refused(format!(
            "process {pid} has a KVM VM, but {} shows that it did not create it",
            folder.display()
        ));
    }
    let mut ran = BTreeSet::new();
    let mut unknown = 0;
    for vcpu in guests.iter().filter_map(|guest| vcpus_of(guest)).flatten() {
        let thread = number(&vcpu.join("pid")).and_then(|thread| u32::try_from(thread).ok());
        // Linux before 6.0 does not show the thread, a vCPU may not have run yet, and an unplugged
        // vCPU keeps its last thread.
        match thread.filter(|thread| process.has_thread(*thread)) {
            Some(thread) => drop(ran.insert(thread)),
            None => unknown += 1,
        }
    }
    let others: Vec<u32> = distinct.difference(&ran).copied().collect();
    if others.len() > unknown {
        return refused(format!(
            "QEMU says that the threads {} of process {pid} run vCPUs, but {} shows that other threads do",
            named(&others),
            folder.display()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;

    #[test]
    fn the_pid_namespace_is_that_of_this_process() {
        let link = fs::read_link("/proc/self/ns/pid").expect("procfs");
        let namespace = pid_namespace().expect("known");
        assert_eq!(link.to_str(), Some(format!("pid:[{namespace}]").as_str()));
    }

    /// Uses this process as the monitor, with one of its threads as the vCPU's.
    #[test]
    fn threads_are_proven_by_descriptors_and_by_debugfs() {
        let process = Process::open(std::process::id()).expect("it runs");
        let pid = process.pid();
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let thread = thread.cast_unsigned();
        let folder = tempfile::tempdir().expect("temporary folder");
        let initial = Some(INITIAL_NAMESPACE);
        let prove = |threads: &[u32]| {
            let proven = prove_in(folder.path(), initial, &process, threads);
            proven.map_err(|error| error.to_string())
        };
        let error = prove(&[thread]).expect_err("no VM");
        assert!(error.contains("has no KVM VM"), "{error}");
        let kvm = match Kvm::new() {
            Ok(kvm) => kvm,
            Err(error) => {
                eprintln!("SKIPPED: /dev/kvm cannot be opened ({error})");
                return;
            }
        };
        let vm = kvm.create_vm().expect("a VM");
        let _vcpus = [0, 1].map(|id| vm.create_vcpu(id).expect("a vCPU"));
        for threads in [&[thread, thread][..], &[thread, 1, 2]] {
            let error = prove(threads).expect_err("not so many vCPUs");
            assert!(error.contains("has 2 KVM vCPUs"), "{error}");
        }
        let error = prove(&[thread]).expect_err("debugfs has no VM");
        assert!(error.contains("did not create"), "{error}");
        for (folder, namespace) in [
            (Path::new("/nonexistent"), initial),
            (folder.path(), Some(INITIAL_NAMESPACE + 1)),
            (folder.path(), None),
        ] {
            prove_in(folder, namespace, &process, &[thread]).expect("debugfs does not tell");
        }
        let write = |vcpu: &str, thread: u32| {
            let path = folder.path().join(format!("{pid}-4")).join(vcpu);
            fs::create_dir_all(&path).expect("room");
            fs::write(path.join("pid"), format!("{thread}\n")).expect("room");
        };
        write("vcpu0", thread);
        write("vcpu1", 1);
        prove(&[thread]).expect("it ran a vCPU");
        prove(&[thread, 7]).expect("another vCPU's thread has ended");
        write("vcpu1", 0);
        prove(&[thread, 7]).expect("another vCPU has not run");
        write("vcpu1", thread);
        let error = prove(&[thread, 7]).expect_err("another thread ran it");
        assert!(error.contains("the threads [7]"), "{error}");
    }
}
