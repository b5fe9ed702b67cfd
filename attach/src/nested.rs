// SPDX-License-Identifier: Apache-2.0
//! Whether a vCPU runs a guest of its own, as the host's KVM shows it in debugfs (since Linux 5.14).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// KVM keeps a folder PID-FD for each guest here (`kvm_create_vm_debugfs()`, `virt/kvm/kvm_main.c`).
pub const FOLDER: &str = "/sys/kernel/debug/kvm";

/// The initial PID namespace: PROC_PID_INIT_INO (`include/linux/proc_ns.h`).
const INITIAL_NAMESPACE: u64 = 0xefff_fffc;

/// The PID namespace of this process; `None` if it is not known.
#[must_use]
pub fn pid_namespace() -> Option<u64> {
    let namespace = fs::metadata("/proc/self/ns/pid").ok()?;
    Some(namespace.ino())
}

/// What KVM shows of a guest at one time.
#[derive(Debug, PartialEq, Eq)]
pub struct Nesting {
    /// Entries into nested guests so far, of all vCPUs (`nested_run`).
    entries: u64,
    /// A vCPU is in a nested guest (`guest_mode`).
    inside: bool,
}

impl Nesting {
    /// What KVM shows of the guest of a process; `None` if it is not known. KVM names guests by pids of the
    /// initial namespace. In another one, `pid` may be another guest's there.
    #[must_use]
    pub fn of(folder: &Path, namespace: Option<u64>, pid: u32) -> Option<Self> {
        if namespace != Some(INITIAL_NAMESPACE) {
            return None;
        }
        let prefix = format!("{pid}-");
        let mut found = None;
        for guest in fs::read_dir(folder).ok()? {
            let guest = guest.ok()?;
            if !guest.file_name().to_string_lossy().starts_with(&prefix) {
                continue;
            }
            let mut inside = false;
            for entry in fs::read_dir(guest.path()).ok()? {
                let entry = entry.ok()?;
                if entry.file_name().to_string_lossy().starts_with("vcpu") {
                    inside |= number(&entry.path().join("guest_mode"))? != 0;
                }
            }
            let entries = number(&guest.path().join("nested_run"))?;
            // A process with two guests: which of them is meant is not known.
            if found.replace(Self { entries, inside }).is_some() {
                return None;
            }
        }
        found
    }

    /// Whether no vCPU was in a nested guest between two looks.
    #[must_use]
    pub fn never_between(before: Option<&Self>, after: Option<&Self>) -> bool {
        before.is_some_and(|before| !before.inside) && before == after
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_equal_looks_from_outside_prove_that_no_guest_ran() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("room");
            fs::write(path, text).expect("room");
        };
        let look = || Nesting::of(folder.path(), Some(0xefff_fffc), 7);
        write("77-1/nested_run", "0\n");
        assert_eq!(look(), None, "another process");
        write("7-11/nested_run", "5\n");
        write("7-11/vcpu0/guest_mode", "0\n");
        write("7-11/vcpu1/guest_mode", "0\n");
        for namespace in [Some(0xefff_fffd), None] {
            assert_eq!(Nesting::of(folder.path(), namespace, 7), None);
        }
        let before = look();
        let never =
            |after: Option<Nesting>| Nesting::never_between(before.as_ref(), after.as_ref());
        assert!(never(look()));
        write("7-11/vcpu1/guest_mode", "1\n");
        assert!(!never(look()), "it is inside");
        let inside = look();
        assert!(!Nesting::never_between(inside.as_ref(), look().as_ref()));
        write("7-11/vcpu1/guest_mode", "0\n");
        write("7-11/nested_run", "6\n");
        assert!(!never(look()), "it was inside");
        write("7-11/nested_run", "x\n");
        assert_eq!(look(), None);
        write("7-11/nested_run", "5\n");
        write("7-12/nested_run", "5\n");
        assert_eq!(look(), None, "two guests");
        assert!(!Nesting::never_between(None, None));
    }

    #[test]
    fn the_pid_namespace_is_that_of_this_process() {
        let link = fs::read_link("/proc/self/ns/pid").expect("procfs");
        let namespace = pid_namespace().expect("known");
        assert_eq!(link.to_str(), Some(format!("pid:[{namespace}]").as_str()));
    }
}
