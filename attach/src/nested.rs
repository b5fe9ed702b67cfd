// SPDX-License-Identifier: Apache-2.0
//! Whether a vCPU runs a guest of its own, as the host's KVM shows it in debugfs (since Linux 5.14).

use std::collections::BTreeMap;
use std::path::Path;

use crate::kvm;

/// Names of KVM's statistics of a vCPU: it is in a nested guest; entries into nested guests so far.
pub(crate) const STATISTICS: [&str; 2] = ["guest_mode", "nested_run"];

/// What KVM shows of a guest at one time.
#[derive(Debug, PartialEq, Eq)]
pub struct Nesting {
    /// Entries into nested guests so far, of each vCPU by its path in QEMU, or of all vCPUs by the guest's folder.
    entries: BTreeMap<String, u64>,
    /// Number of vCPUs that were looked at.
    vcpus: usize,
    /// A vCPU is in a nested guest.
    inside: bool,
}

impl Nesting {
    /// What debugfs shows of the guest of a process; `None` if it is not known.
    #[must_use]
    pub fn in_debugfs(folder: &Path, namespace: Option<u64>, pid: u32) -> Option<Self> {
        let [guest] = &kvm::guests_of(folder, namespace, pid)?[..] else {
            // A process with two guests: which of them is meant is not known.
            return None;
        };
        let vcpus = kvm::vcpus_of(guest)?;
        let [guest_mode, nested_run] = STATISTICS;
        let mut inside = false;
        for vcpu in &vcpus {
            inside |= kvm::number(&vcpu.join(guest_mode))? != 0;
        }
        let entries = kvm::number(&guest.join(nested_run))?;
        Some(Self {
            entries: BTreeMap::from([(guest.display().to_string(), entries)]),
            vcpus: vcpus.len(),
            inside,
        })
    }

    /// Whether none of so many vCPUs was in a nested guest between two looks.
    #[must_use]
    pub fn never_between(before: Option<&Self>, after: Option<&Self>, vcpus: usize) -> bool {
        // A vCPU that was unplugged may be left.
        before.is_some_and(|before| !before.inside && before.vcpus >= vcpus) && before == after
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_two_equal_looks_from_outside_prove_that_no_guest_ran() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("room");
            fs::write(path, text).expect("room");
        };
        let look = || Nesting::in_debugfs(folder.path(), Some(0xefff_fffc), 7);
        write("77-1/nested_run", "0\n");
        assert_eq!(look(), None, "another process");
        write("7-11/nested_run", "5\n");
        write("7-11/vcpu0/guest_mode", "0\n");
        write("7-11/vcpu1/guest_mode", "0\n");
        for namespace in [Some(0xefff_fffd), None] {
            assert_eq!(Nesting::in_debugfs(folder.path(), namespace, 7), None);
        }
        let before = look();
        let never =
            |after: Option<Nesting>| Nesting::never_between(before.as_ref(), after.as_ref(), 2);
        assert!(never(look()));
        write("7-11/vcpu1/guest_mode", "1\n");
        assert!(!never(look()), "it is inside");
        let inside = look();
        assert!(!Nesting::never_between(inside.as_ref(), look().as_ref(), 2));
        write("7-11/vcpu1/guest_mode", "0\n");
        write("7-11/nested_run", "6\n");
        assert!(!never(look()), "it was inside");
        write("7-11/nested_run", "x\n");
        assert_eq!(look(), None);
        write("7-11/nested_run", "5\n");
        write("7-12/nested_run", "5\n");
        assert_eq!(look(), None, "two guests");
        assert!(!Nesting::never_between(None, None, 0));
    }
}
