// SPDX-License-Identifier: Apache-2.0
//! Tests the completion of values. The tests run the program as a shell does.

use std::os::unix::net::UnixListener;

use patchbay_proto::v1;

use super::lab::{Commands, Host, Lab};

/// Returns the candidates for the last word.
#[track_caller]
fn candidates(place: &impl Commands, words: &[&str]) -> Vec<String> {
    let words = [&["--", "patchbay"], words].concat();
    let mut command = place.command(&words);
    command
        .env("PATCHBAY_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", (words.len() - 2).to_string())
        .env("_CLAP_IFS", "\n");
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{words:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{words:?}: {output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let found = text.lines().map(|line| line.trim_end().to_owned());
    // An empty word may begin an option, so options are among its candidates. They are left out
    // here unless the word begins with `-`.
    let asked_for_option = words.last().is_some_and(|word| word.starts_with('-'));
    found
        .filter(|word| asked_for_option || !word.starts_with('-'))
        .collect()
}

#[test]
fn names_of_guests_keys_and_holds_are_completed() {
    let host = Host::new();
    host.fake.guest("web-2", |guest| {
        guest.holds = vec![v1::Hold {
            id: "h-17".to_owned(),
            key: "alpha".to_owned(),
            ..Default::default()
        }];
    });
    assert_eq!(
        candidates(&host, &["--guest", ""]),
        ["db", "web-1", "web-2"]
    );
    assert_eq!(
        candidates(&host, &["keys", "list", "--guest", "w"]),
        ["web-1", "web-2"]
    );
    assert_eq!(candidates(&host, &["guest", "list", "d"]), ["db"]);
    let of = ["--guest", "web-2"];
    let with = |words: &[&str]| candidates(&host, &[&of[..], words].concat());
    for verb in ["get", "enable", "dec", "watch", "wait", "list"] {
        assert_eq!(with(&["keys", verb, "al"]), ["alpha"], "{verb}");
    }
    assert_eq!(with(&["keys", "list", "beta", "!al"]), ["!alpha"]);
    assert_eq!(with(&["holds", "release", ""]), ["h-17"]);
    assert_eq!(with(&["holds", "renew", "--ttl", "1m", "h"]), ["h-17"]);
    assert_eq!(
        with(&["trace", "fire", "sched:sched_s"]),
        ["sched:sched_switch"]
    );
    // Options and subcommands are completed too.
    assert_eq!(candidates(&host, &["keys", "app"]), ["apply"]);
    assert!(candidates(&host, &["keys", "list", "--cl"]).contains(&"--class".to_owned()));
    let lab = Lab::new();
    assert_eq!(candidates(&lab, &["keys", "get", "b"]), ["beta"]);
}

#[test]
fn owners_and_the_wants_of_claims_are_completed() {
    let lab = Lab::new();
    lab.ok(&["keys", "claim", "set", "canary", "alpha=on", "beta=on"]);
    let of = |words: &[&str]| candidates(&lab, &[&["keys"], words].concat());
    assert_eq!(of(&["claim", "set", ""]), ["canary"]);
    assert_eq!(of(&["claim", "clear", "c"]), ["canary"]);
    assert_eq!(of(&["claims", "--owner", "c"]), ["canary"]);
    assert_eq!(of(&["claim", "set", "canary", "al"]), ["alpha="]);
    let states = ["alpha=on", "alpha=off"];
    assert_eq!(of(&["claim", "set", "canary", "alpha=o"]), states);
    // Bash splits the word at `=`.
    let split = ["claim", "set", "canary", "alpha", "=", "h"];
    assert_eq!(of(&split), ["held"]);
}

/// Checks that the program that a command becomes gets the words to complete. It is replaced by
/// echo here, so its only candidate is the words.
#[test]
fn arguments_of_other_programs_are_completed_by_these() {
    let lab = Lab::new();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary folder");
    let alone = folder.path().join("patchbay");
    std::fs::hard_link(env!("CARGO_BIN_EXE_patchbay"), &alone).expect("linked");
    for (program, words, passed) in [
        (
            "patchbay-attach",
            &["attach", "process", "--mem"][..],
            "process --mem",
        ),
        ("patchbay-attach", &["attach", "--all", "--r"], "--all --r"),
        ("patchbay-vmm", &["guest", "run", "--ker"], "--ker"),
        ("patchbayd", &["audit", "sho"], "audit sho"),
        ("patchbayd", &["policy", "can", ""], "policy can "),
    ] {
        let link = lab.folder().join(program);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink("/bin/echo", link).expect("writable");
        let output = std::process::Command::new(&alone)
            .args(["--", "patchbay"])
            .args(words)
            .env("PATCHBAY_COMPLETE", "bash")
            .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
            .env("_CLAP_IFS", "\n")
            .env("PATH", lab.folder())
            .output();
        let text = String::from_utf8(output.expect("starts").stdout).expect("text");
        let expected = format!("-- {program} {passed}");
        assert!(
            text.lines().any(|line| line == expected),
            "{words:?}: {text}"
        );
    }
}

/// Checks that a fault yields no candidates, so that the operator's command line stays unchanged.
#[test]
fn nobody_there_completes_to_nothing() {
    let host = Host::new();
    for words in [
        // There are several guests, and the command line selects none of them.
        &["keys", "get", ""][..],
        &["--guest", "none", "keys", "get", ""],
        &["--socket", "/nonexistent.sock", "keys", "get", ""],
        &["--socket", "/nonexistent.sock", "--guest", ""],
        &["rollout", "status", ""],
        &["rollout", "--fleet-socket", "/nonexistent.sock", "undo", ""],
        &["keys", "get", "a*"],
    ] {
        let found = candidates(&host, words);
        assert_eq!(found, Vec::<String>::new(), "{words:?}");
    }
    // A process listens on this socket and never answers.
    let silent = host.folder().join("silent.sock");
    let _listener = UnixListener::bind(&silent).expect("free");
    let silent = silent.to_str().expect("text");
    let found = candidates(&host, &["--socket", silent, "keys", "get", "a"]);
    assert_eq!(found, Vec::<String>::new());
}

/// Checks the script that the package installs and `patchbay completion` prints.
#[test]
fn a_shell_completes_by_the_script() {
    let host = Host::new();
    let script = host.ok(&["completion", "bash"]);
    let line = "COMP_WORDS=(patchbay --guest web); COMP_CWORD=2; \
                _clap_complete_patchbay patchbay web --guest; echo \"${COMPREPLY[@]}\"";
    let mut bash = host.under(&["bash", "-c", &format!("{script}\n{line}")], &[]);
    let output = bash.output().expect("bash runs");
    let found = String::from_utf8_lossy(&output.stdout).into_owned();
    let found: Vec<&str> = found.split_whitespace().collect();
    assert_eq!(found, ["web-1", "web-2"], "{output:?}");
}
