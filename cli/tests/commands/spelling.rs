// SPDX-License-Identifier: Apache-2.0

use super::lab::{Commands, Host, Lab};

/// Documents have shown these; help does not.
#[test]
fn old_spellings_work_and_are_hidden() {
    let lab = Lab::new();
    lab.guest.print(b"hello from the guest\n");
    assert_eq!(lab.ok(&["console", "--dump"]), "hello from the guest\n");
    assert!(lab.ok(&["keys", "holds"]).starts_with("ID"));
    let host = Host::with(&["only"]);
    assert_eq!(host.ok(&["guests", "-o", "name"]), "only\n");
    assert!(host.ok(&["trace", "list"]).contains("sched:sched_switch"));
    let lists = |words: &[&str], verb: &str| {
        let help = lab.ok(&[words, &["--help"]].concat());
        let mut lines = help
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        lines.any(|first| first == verb)
    };
    for (noun, new, old) in [
        ("guest", "console", "guests"),
        ("keys", "apply", "holds"),
        ("trace", "events", "list"),
    ] {
        assert!(lists(&[noun], new) && !lists(&[noun], old), "{noun}");
        assert!(!lists(&[], "guests") && !lists(&[], "console") && !lists(&[], "run"));
    }
}

#[test]
fn a_misspelt_verb_is_a_usage_error_with_a_suggestion() {
    let lab = Lab::new();
    let (_, said, code) = lab.all(&["keys", "lst"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("'list'"), "{said}");
}

#[test]
fn completion_is_written_for_each_shell() {
    let lab = Lab::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            lab.ok(&["completion", shell]).contains("patchbay"),
            "{shell}"
        );
    }
}
