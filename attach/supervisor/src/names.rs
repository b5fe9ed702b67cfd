// SPDX-License-Identifier: Apache-2.0
//! Names guests that are found by their processes.
//!
//! A policy, a rollout and an audit log know a guest by its name. A process chooses its own command
//! line, so its word is taken only if its user is root or one whom the administrator has named. The
//! root of a container is named like any other user. All others have names in a space of its own,
//! which contain nothing that the process chooses: `kvm:UID:PID`. A pattern selects them only if it
//! begins with a star, a class or `kvm:`.

use patchbay_host_kernel::ListedVm;

use crate::target::ATTACHED;

/// The maximum length of a name in bytes, so that a socket can be named after it.
pub(crate) const MAX_NAME_BYTES: usize = 64;
/// The beginning of the names of guests that may not name themselves.
const SPACE: &str = "kvm:";

/// Returns a name for the guest of a process of this user. If the user may name the guest, this is
/// the monitor's name, or PROGRAM-PID if there is none. If another guest has this name, the
/// process's number is appended. In all other cases the name is `kvm:UID:PID`. No other guest has
/// this name, so `is_free` is not called.
pub(crate) fn name(
    vm: &ListedVm,
    user: u32,
    may_name: bool,
    is_free: impl Fn(&str) -> bool,
) -> String {
    let made = format!("{SPACE}{user}:{}", vm.pid);
    let name = vm.name();
    if !may_name || !is_plain(&name) {
        return made;
    }
    let ending = format!("-{}", vm.pid);
    let longer = format!("{}{ending}", name.strip_suffix(&ending).unwrap_or(&name));
    let names = [name, longer].into_iter();
    let mut names = names.filter(|name| name.len() <= MAX_NAME_BYTES && is_free(name));
    names.next().unwrap_or(made)
}

/// Returns whether a name can be that of a guest and of a socket, and neither is in the space of
/// names of guests that may not name themselves, nor makes a lasting socket's name.
fn is_plain(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_graphic() && c != '/';
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with(['.', '-'])
        && !name.starts_with(SPACE)
        && !name.starts_with(ATTACHED)
        && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests {
    use patchbay_host_kernel::Verdict;

    use super::*;
    use crate::vms::tests::vm;

    #[test]
    fn hostile_names_are_replaced() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for text in [
            "a/b",
            "../x",
            "-x",
            ".x",
            "a b",
            "a\nb",
            "ä",
            "kvm:0:8",
            // `NAME.sock` could be the socket of another guest's attacher.
            "attached-0123456789abcdef",
            "attached-process-0123456789abcdef",
            &long,
        ] {
            let vm = vm(7, Some(text), Verdict::Yes);
            assert_eq!(name(&vm, 0, true, |_| true), "kvm:0:7", "{text}");
        }
        let unnamed = vm(7, None, Verdict::Yes);
        assert_eq!(name(&unnamed, 0, true, |_| true), "firecracker-7");
    }

    /// A process must not get the name of another guest, running or ended.
    #[test]
    fn a_process_of_a_user_does_not_name_its_guest() {
        for text in [Some("prod-db"), Some("kvm:0:7"), None] {
            let vm = vm(7, text, Verdict::Yes);
            assert_eq!(name(&vm, 1000, false, |_| true), "kvm:1000:7");
        }
    }

    #[test]
    fn a_name_that_is_taken_is_not_given() {
        let web = vm(7, Some("web"), Verdict::Yes);
        assert_eq!(name(&web, 0, true, |name| name != "web"), "web-7");
        assert_eq!(name(&web, 0, true, |_| false), "kvm:0:7");
        let long = "x".repeat(MAX_NAME_BYTES);
        let long = vm(7, Some(&long), Verdict::Yes);
        assert_eq!(name(&long, 5, true, |name| name.len() < 64), "kvm:5:7");
    }
}
