// SPDX-License-Identifier: Apache-2.0

use super::lab::{Commands, Host, Lab};

/// Checks that old spellings, which earlier documents showed, still work and that the help does not
/// show them.
#[test]
fn old_spellings_work_and_are_hidden() {
    let lab = Lab::new();
    lab.guest.print(b"hello from the guest\n");
    assert_eq!(lab.ok(&["console", "--dump"]), "hello from the guest\n");
    lab.ok(&["keys", "inc", "alpha"]);
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

/// Checks that an empty value is refused, because an unset variable in a script must not disable a
/// condition.
#[test]
fn an_empty_value_is_no_value() {
    let lab = Lab::new();
    for words in [
        &["keys", "commit", "p", "--digest", ""][..],
        &["keys", "enable", "alpha", "--etag", ""],
        &["keys", "enable", "alpha", "--request-id", ""],
        &["holds", "list", "--holder", ""],
        &["holds", "renew", "h"],
        &["keys", "list", "--timeout", "100000000000h"],
        &["keys", "list", "--timeout", "0s"],
    ] {
        let (out, said, code) = lab.all(words);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{words:?}: {said}");
    }
    let said = lab.fails(2, &["debug", "on", ""]);
    assert!(said.contains("it is empty"), "{said}");
    assert_eq!(lab.guest.count("alpha"), 0);
}

#[test]
fn output_that_nobody_reads_is_no_panic() {
    let lab = Lab::new();
    for line in [
        "\"$0\" completion bash 2>&1 >/dev/full",
        "\"$0\" keys get nope 2>&1 >&2 | true",
    ] {
        let mut shell = lab.under(&["bash", "-o", "pipefail", "-c", line], &[]);
        let output = shell.output().expect("bash runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_ne!(output.status.code(), Some(101), "{line}: {said}");
        assert!(!said.contains("panicked"), "{line}: {said}");
    }
}
