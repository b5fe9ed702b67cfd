// SPDX-License-Identifier: Apache-2.0
//! Tests that wrong command lines end with exit code 2, whether the command or the service finds
//! the fault.

use super::lab::{Commands, Host, Lab};

/// Checks values that only the service can refuse. The command reports them as faults of the
/// command line.
#[test]
fn every_verb_ends_with_2_for_a_wrong_value() {
    let lab = Lab::new();
    let empty = lab.folder().join("empty.yaml");
    std::fs::write(&empty, "[]").expect("writable");
    let empty = empty.to_str().expect("text");
    let long = "x".repeat(5000);
    let wrong: &[&[&str]] = &[
        &["guest", "list", "["],
        &["guest", "run", "--name", "../x"],
        &["guest", "wait", "--for", "ever"],
        &["guest", "describe", "--timeout", "5"],
        &["guest", "pause", "--ttl", "61m"],
        &["guest", "pause", "--ttl", "1us"],
        &["guest", "shutdown", "--timeout", "2h"],
        &["guest", "watch", "extra"],
        &["guest", "resume", "extra"],
        &["guest", "console", "--follow"],
        &["--guest", "[", "keys", "list"],
        &["--guest", "!", "keys", "list"],
        &["keys", "list", "["],
        &["keys", "list", "!"],
        &["keys", "list", "--class", "none"],
        &["keys", "get", "["],
        &["keys", "enable", "["],
        &["keys", "disable", "a["],
        &["keys", "disable", "alpha", "--ttl", "10m"],
        &["keys", "inc", "alpha", "--ttl", "366d"],
        &["keys", "inc", "alpha", "--ttl", "1us"],
        &["keys", "inc", "alpha", "--reason", &long],
        &["keys", "inc", "alpha", "--request-id", &long],
        &["keys", "inc", "alpha", "--stop-timeout", "31s"],
        &["keys", "dec", "alpha", "--dry-run", "--plan-ttl", "25h"],
        &["keys", "dec", "alpha", "--dry-run", "--plan-ttl", "1ms"],
        &["keys", "apply", "-f", empty],
        &["keys", "apply", "-f", "/nonexistent"],
        &["keys", "commit", "p", "--stop-timeout", "31s"],
        &["keys", "commit", ""],
        &["keys", "discard", ""],
        &["keys", "discard"],
        &["keys", "watch", "["],
        &[
            "keys",
            "watch",
            "--from-revision",
            "x",
            "--incarnation",
            "y",
        ],
        &["keys", "wait", "alpha", "--for", "ever"],
        &["keys", "wait", "al*", "--for", "on"],
        &["holds", "list", "["],
        &["holds", "release", "h", "--stop-timeout", "31s"],
        &["holds", "renew", "h", "--ttl", "366d"],
        &["debug", "list", "file"],
        &["debug", "on", "line x"],
        &["debug", "off", ""],
        &["trace", "events", "["],
        &["trace", "arm", "["],
        &["trace", "arm", "sched:*", "--ttl", "366d"],
        &["trace", "fire", "[", "--stop-timeout", "1s"],
        &["trace", "fire", "sched:*", "--stop-timeout", "31s"],
        &["trace", "park", "["],
        &["trace", "disarm", "["],
        &["trace", "tail", "["],
        &["trace", "tail", "-n", "x"],
        &["trace", "tail", "-n", "0"],
        &["trace", "tail", "--max-rate", "0"],
        &["trace", "record", "-o", "/nonexistent/t.json", "["],
        &[
            "trace",
            "record",
            "-o",
            "/nonexistent/t.json",
            "--duration",
            "0s",
        ],
        &["trace", "stat", "--interval", "0s"],
        &["trace", "agent", "extra"],
        &["ci", "run", "--kernel", "k", "--vcpus", "17", "--", "true"],
        &[
            "ci", "run", "--kernel", "k", "--memory", "much", "--", "true",
        ],
        &["ci", "run", "--kernel", "k", "--memory", "1M", "--", "true"],
        &[
            "ci",
            "run",
            "--kernel",
            "k",
            "--set",
            "key=perhaps",
            "--",
            "true",
        ],
        &["ci", "run", "--kernel", "k", "--matrix", "[", "--", "true"],
        &["ci", "run", "--kernel", "k"],
        &["lab", "--memory", "0", "--", "true"],
        &["lab", "--memory", "1000000000", "--", "true"],
        &["lab", "--out", "/dev/null/x", "--", "true"],
        &["inspect", "/nonexistent"],
        &["inspect", "/dev/null"],
        &["inspect", "/bin/sh", "["],
        &["inspect", "/bin/sh", "--debug-file", "/nonexistent"],
        &["rollout", "plan", "/nonexistent.yaml"],
        &["rollout", "explain", "r"],
        &["rollout", "forget", "r"],
        &["completion", "tcsh"],
    ];
    let mut ended_otherwise = vec![];
    for words in wrong {
        let (out, said, code) = lab.all(words);
        if code != Some(2) || !out.is_empty() {
            ended_otherwise.push(format!("{code:?} {words:.60?}: {out}{said}"));
        }
    }
    assert!(ended_otherwise.is_empty(), "{}", ended_otherwise.join("\n"));
}

/// Checks that a refusal by the service names the option that the user wrote.
#[test]
fn a_refused_value_is_that_of_an_option() {
    let lab = Lab::new();
    let long = "x".repeat(5000);
    for option in ["--reason", "--request-id"] {
        let said = lab.fails(2, &["keys", "inc", "alpha", option, &long]);
        assert!(
            said.contains(&format!("{option}: is longer than")),
            "{said}"
        );
    }
    lab.ok(&["keys", "inc", "alpha", "--request-id", "ttl"]);
    let (_, said, code) = lab.all(&["keys", "inc", "beta", "--request-id", "ttl"]);
    assert!(
        said.contains("--request-id \"ttl\" was already used"),
        "{said}"
    );
    assert_ne!(code, Some(0));
}

#[test]
fn a_choice_among_several_guests_is_left_to_the_command_line() {
    let host = Host::new();
    let message = host.fails(2, &["keys", "list"]);
    assert!(message.contains("--guest or --all"), "{message}");
    // With several sockets, the guests are named, and not the sockets.
    let lab = Lab::new();
    let second = host.folder().join("host/attached-77.sock");
    std::os::unix::fs::symlink(lab.socket(), &second).expect("writable");
    let message = host.fails(2, &["keys", "list"]);
    assert!(
        message.contains("several guests run: db, test, web-1, web-2; choose"),
        "{message}"
    );
    // Both sockets serve the same guest.
    std::fs::remove_file(host.folder().join("host/all.sock")).expect("there");
    let third = host.folder().join("host/third.sock");
    std::os::unix::fs::symlink(lab.socket(), &third).expect("writable");
    let message = host.fails(2, &["keys", "list"]);
    assert!(
        message.contains("third.sock; choose with --socket"),
        "{message}"
    );
}

#[test]
fn a_socket_of_another_service_is_supposed() {
    let host = Host::new();
    let socket = host.folder().join("host/all.sock");
    let socket = socket.to_str().expect("text");
    let message = host.fails(1, &["--fleet-socket", socket, "rollout", "list"]);
    assert!(message.contains("not that of a controller"), "{message}");
}

#[test]
fn a_negative_time_is_answered_with_the_range() {
    let lab = Lab::new();
    let (_, said, code) = lab.all(&["keys", "inc", "alpha", "--ttl", "-5s"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("it must be 1ms to 365d"), "{said}");
    assert_eq!(lab.guest.count("alpha"), 0);
}

/// Checks that an option that a command would ignore is refused.
#[test]
fn a_command_about_no_guest_takes_no_guest() {
    let lab = Lab::new();
    for (words, next) in [
        (
            &["--guest", "web-1", "rollout", "status", "net"][..],
            "rollout explain",
        ),
        (
            &["rollout", "status", "net", "--guest", "web-1"],
            "rollout explain",
        ),
        (&["--all", "rollout", "list"], "rollout explain"),
        (&["--socket", "s", "rollout", "list"], "--fleet-socket"),
        (&["--guest", "web-1", "policy", "can"], "after the command"),
        (&["--socket", "s", "attach", "qemu"], "attach --help"),
        (
            &["--all", "ci", "run", "--kernel", "k", "--", "true"],
            "of its own",
        ),
        (
            &["inspect", "vmlinux", "--all"],
            "not concern a running guest",
        ),
        (&["--all", "host", "list"], "all KVM virtual machines"),
    ] {
        let message = lab.fails(2, words);
        assert!(message.contains(next), "{words:?}: {message}");
    }
}
