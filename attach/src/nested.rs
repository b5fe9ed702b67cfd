// SPDX-License-Identifier: Apache-2.0
//! Detects a vCPU that runs a nested guest. KVM counts entries into nested guests (since Linux
//! 5.14), and shows the counts in two places:
//!
//! | source | needs |
//! |---|---|
//! | debugfs of the host | root, the initial PID namespace |
//! | QEMU's `query-stats` | QEMU 7.1 |
//!
//! QEMU is asked only if debugfs does not show the guest.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::kvm;

/// The names of KVM's statistics of a vCPU: the vCPU is in a nested guest; the number of entries
/// into nested guests so far.
pub(crate) const STATISTICS: [&str; 2] = ["guest_mode", "nested_run"];

/// KVM's counts for a guest at one time.
#[derive(Debug, PartialEq, Eq)]
pub struct Nesting {
    /// Number of entries into nested guests so far: for each vCPU by its path in QEMU, or for all
    /// vCPUs by the guest's folder.
    entries: BTreeMap<String, u64>,
    /// Number of vCPUs that were examined.
    vcpus: usize,
    /// A vCPU is in a nested guest.
    inside: bool,
}

impl Nesting {
    /// Parses QEMU's answer to `query-stats`; `None` if a statistic is missing.
    #[must_use]
    pub fn of_statistics(answer: &Value) -> Option<Self> {
        let vcpus = answer.as_array()?;
        let mut found = Self {
            entries: BTreeMap::new(),
            vcpus: vcpus.len(),
            inside: false,
        };
        for vcpu in vcpus {
            let statistics = vcpu["stats"].as_array()?;
            let value = |name| {
                let named = statistics.iter().find(|one| one["name"] == name)?;
                let value = &named["value"];
                value.as_u64().or(value.as_bool().map(u64::from))
            };
            let [inside, entries] = STATISTICS.map(value);
            found.inside |= inside? != 0;
            let path = vcpu["qom-path"].as_str()?.to_owned();
            if found.entries.insert(path, entries?).is_some() {
                return None;
            }
        }
        Some(found)
    }

    /// Reads the counts from debugfs for the guest that the threads of a process created; `None` if
    /// this process cannot read them.
    #[must_use]
    pub fn in_debugfs(
        folder: &Path,
        namespace: Option<u64>,
        has_thread: impl Fn(u32) -> bool,
    ) -> Option<Self> {
        let [guest] = &kvm::guests_of(folder, namespace, has_thread)?[..] else {
            // A process with two guests is ambiguous.
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

    /// Returns whether none of the `vcpus` vCPUs was in a nested guest between the two readings.
    #[must_use]
    pub fn never_between(before: Option<&Self>, after: Option<&Self>, vcpus: usize) -> bool {
        // An unplugged vCPU may still be listed.
        before.is_some_and(|before| !before.inside && before.vcpus >= vcpus) && before == after
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn only_two_equal_looks_from_outside_prove_that_no_guest_ran() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("room");
            fs::write(path, text).expect("room");
        };
        let look = || Nesting::in_debugfs(folder.path(), Some(0xefff_fffc), |id| id == 7);
        write("77-1/nested_run", "0\n");
        assert_eq!(look(), None, "another process");
        write("7-11/nested_run", "5\n");
        write("7-11/vcpu0/guest_mode", "0\n");
        write("7-11/vcpu1/guest_mode", "0\n");
        for namespace in [Some(0xefff_fffd), None] {
            assert_eq!(
                Nesting::in_debugfs(folder.path(), namespace, |id| id == 7),
                None
            );
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

    /// Builds the answer of QEMU 7.2 for a guest with two vCPUs.
    fn statistics(inside: Value, entries: u64) -> Value {
        let vcpu = |path: &str, inside: &Value, entries| {
            json!({ "provider": "kvm", "qom-path": path, "stats": [
                { "name": "guest_mode", "value": inside },
                { "name": "nested_run", "value": entries },
            ]})
        };
        json!([
            vcpu("/machine/unattached/device[2]", &json!(false), 7),
            vcpu("/machine/unattached/device[0]", &inside, entries),
        ])
    }

    #[test]
    fn statistics_of_qemu_tell_the_same() {
        let look = |answer: &Value| Nesting::of_statistics(answer).expect("known");
        let never = |before: &Value, after: &Value, vcpus| {
            Nesting::never_between(Some(&look(before)), Some(&look(after)), vcpus)
        };
        for outside in [json!(false), json!(0)] {
            let before = statistics(outside.clone(), 5);
            assert!(never(&before, &before, 2));
            assert!(!never(&before, &before, 3), "a vCPU is missing");
            assert!(!never(&before, &statistics(outside, 6), 2), "it was inside");
        }
        for inside in [json!(true), json!(1)] {
            let inside = statistics(inside, 5);
            assert!(!never(&inside, &inside, 2), "it is inside");
        }
        let none = look(&json!([]));
        assert!(!Nesting::never_between(Some(&none), Some(&none), 1));
        let debugfs = Nesting {
            entries: BTreeMap::from([("7-11".to_owned(), 5)]),
            vcpus: 2,
            inside: false,
        };
        let other = look(&statistics(json!(false), 5));
        assert!(!Nesting::never_between(Some(&debugfs), Some(&other), 2));
    }

    #[test]
    fn statistics_that_lack_something_tell_nothing() {
        let complete = statistics(json!(false), 5);
        for path in [
            "/0/stats",
            "/1/stats/0/value",
            "/1/stats/1/name",
            "/0/qom-path",
        ] {
            for nonsense in [Value::Null, json!({}), json!(-1), json!("guest_mode")] {
                let mut answer = complete.clone();
                *answer.pointer_mut(path).expect("there") = nonsense.clone();
                let accepted = Nesting::of_statistics(&answer);
                let name = path.ends_with("qom-path") && nonsense.is_string();
                assert_eq!(accepted.is_some(), name, "{path}: {nonsense}");
            }
        }
        let mut twice = complete.clone();
        twice[0]["qom-path"] = complete[1]["qom-path"].clone();
        for answer in [Value::Null, json!({}), json!([7]), twice] {
            assert_eq!(Nesting::of_statistics(&answer), None, "{answer}");
        }
    }
}
