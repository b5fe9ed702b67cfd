// SPDX-License-Identifier: Apache-2.0

use std::process::Stdio;

use patchbay_guest::testing::Gate;

use super::lab::{Commands, Host, Lab};

#[test]
fn keys_are_listed_in_each_format() {
    let lab = Lab::new();
    let table = lab.ok(&["keys", "list"]);
    assert!(table.starts_with("NAME"), "{table}");
    assert_eq!(table.lines().count(), 5, "{table}");
    assert_eq!(
        lab.ok(&["keys", "list", "-o", "name"]),
        "alpha\nbeta\nguarded\nsched_switch\n"
    );
    let keys = lab.json(&["keys", "list", "b*"]);
    assert_eq!(
        (&keys[0]["name"], &keys[0]["site_count"]),
        (&"beta".into(), &3.into())
    );
    assert!(
        lab.ok(&["keys", "list", "-o", "yaml"])
            .contains("- name: alpha\n")
    );
    assert_eq!(
        lab.ok(&["keys", "list", "-o", "name", "*", "!a*", "!b*"]),
        "guarded\nsched_switch\n"
    );
    assert_eq!(
        lab.ok(&[
            "keys",
            "list",
            "-o",
            "name",
            "--class",
            "guarded,tracepoint"
        ]),
        "guarded\nsched_switch\n"
    );
    assert_eq!(lab.ok(&["keys", "list", "-o", "name", "--enabled"]), "");
}

#[test]
fn an_empty_list_says_so_to_people() {
    let lab = Lab::new();
    let none = tempfile::tempdir().expect("temporary folder");
    for (words, nouns) in [
        (&["keys", "list", "nothing*"][..], "keys"),
        (&["keys", "list", "--enabled"], "keys"),
        (&["--guest", "t*", "keys", "list", "nothing*"], "keys"),
        (&["holds", "list"], "holds"),
        (&["--all", "holds", "list"], "holds"),
        (&["debug", "list"], "lines"),
        (&["guest", "list", "nothing*"], "guests"),
    ] {
        let (out, said, code) = lab.all(words);
        assert_eq!((out.as_str(), code), ("", Some(0)), "{words:?}: {said}");
        assert_eq!(said, format!("patchbay: no {nouns} found\n"), "{words:?}");
        for format in ["json", "yaml", "name"] {
            let (_, said, code) = lab.all(&[words, &["-o", format]].concat());
            assert_eq!(
                (said.as_str(), code),
                ("", Some(0)),
                "{words:?} -o {format}"
            );
        }
    }
    let mut list = lab.command(&["guest", "list"]);
    let output = list.env("XDG_RUNTIME_DIR", none.path()).output();
    let said = String::from_utf8(output.expect("starts").stderr).expect("text");
    assert_eq!(said, "patchbay: no guests found\n");
}

#[test]
fn get_shows_sites_with_bytes_and_disassembly() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "get", "beta"]);
    assert!(
        text.starts_with("beta: off, count 0, ref class\n"),
        "{text}"
    );
    assert_eq!(text.matches("0f 1f 44 00 00").count(), 3, "{text}");
    assert!(
        text.contains("nop dword ptr [rax+rax]") && text.contains("jmp 0xffffffff81"),
        "{text}"
    );
    let keys = lab.json(&["keys", "get", "alpha", "beta"]);
    assert_eq!(keys[1]["sites"].as_array().expect("sites").len(), 3);
    assert_eq!(keys[0]["sites"][0]["bytes"], "0f 1f 44 00 00");
}

#[test]
fn updates_print_counts_sites_and_times() {
    let lab = Lab::new();
    let text = lab.ok(&["keys", "enable", "beta", "--reason", "incident 7"]);
    assert!(
        text.contains("0 -> 1") && text.contains("3 sites patched; stop 20.0 us, patch "),
        "{text}"
    );
    assert!(lab.guest.jumps("beta"));
    let text = lab.ok(&["keys", "inc", "beta"]);
    assert!(
        text.contains("1 -> 2") && text.contains("the guest was not stopped"),
        "{text}"
    );
    let holds = lab.json(&["holds", "list"]);
    assert_eq!(
        (&holds[0]["key"], &holds[0]["reason"]),
        (&"beta".into(), &"incident 7".into())
    );
    lab.ok(&["keys", "dec", "beta"]);
    let result = lab.json(&["keys", "disable", "beta"]);
    assert_eq!(
        (&result["results"][0]["after"], &result["paused"]),
        (&0.into(), &true.into())
    );
    assert!(!lab.guest.jumps("beta"));
}

#[test]
fn globs_are_one_transaction() {
    let lab = Lab::new();
    lab.ok(&["keys", "enable", "*a"]);
    assert_eq!(
        (
            lab.guest.count("alpha"),
            lab.guest.count("beta"),
            lab.guest.pauses()
        ),
        (1, 1, 1)
    );
    let text = lab.ok(&["keys", "disable", "*", "--summary"]);
    let left_out = "2 of 3 keys changed; 1 more matches and is left out";
    assert!(text.starts_with(left_out), "{text}");
    let message = lab.fails(1, &["keys", "enable", "guard*"]);
    assert!(message.contains("--allow-guarded"), "{message}");
    // A guarded key that is given by its name is refused, even if globs are given too.
    let message = lab.fails(1, &["keys", "enable", "guarded", "alph*"]);
    assert!(
        message.contains("key guarded") && message.contains("--allow-guarded"),
        "{message}"
    );
    lab.fails(2, &["keys", "enable", "alph*", "--etag", "x"]);
    let message = lab.fails(1, &["keys", "enable", "nothing*"]);
    assert!(message.contains("no key matches nothing*"), "{message}");
    let message = lab.fails(1, &["keys", "enable", "b*", "alhpa"]);
    assert!(
        message.contains("alhpa") && message.contains("alpha"),
        "{message}"
    );
}

#[test]
fn names_come_from_standard_input() {
    let lab = Lab::new();
    let fed = lab.fed(
        &["keys", "enable", "-"],
        "# both\nalpha\nbeta # the second\n\n",
    );
    assert_eq!(fed.status.code(), Some(0), "{fed:?}");
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (1, 1));
    let listed = lab.fed(&["keys", "list", "-o", "name", "-"], "b*\n");
    assert_eq!(listed.stdout, b"beta\n");
    let shown = lab.fed(&["keys", "get", "-o", "name", "beta", "-"], "alpha\n");
    assert_eq!(shown.stdout, b"beta\nalpha\n");
    // An empty list of names must not select all keys.
    for input in ["", "# nothing\n"] {
        let fed = lab.fed(&["keys", "list", "-"], input);
        assert_eq!((fed.status.code(), fed.stdout.len()), (Some(2), 0));
    }
}

#[test]
fn answers_in_pages_are_put_together() {
    let host = Host::with(&["only"]);
    assert_eq!(
        host.ok(&["keys", "list", "-o", "name"]),
        "alpha\nbeta\ngamma\n"
    );
    let key = host.json(&["keys", "get", "alpha"]);
    assert_eq!(key[0]["sites"].as_array().map(Vec::len), Some(2));
    let names = "alpha\nbeta\ngamma\n";
    let enable = ["keys", "enable", "-o", "name", "*"];
    assert_eq!(host.ok(&enable), names);
}

#[test]
fn exit_codes_tell_the_kinds_of_failure() {
    let lab = Lab::new();
    assert!(
        lab.fails(1, &["keys", "get", "alhpa"])
            .contains("did you mean \"alpha\"")
    );
    assert!(
        lab.fails(1, &["keys", "inc", "guarded"])
            .contains("--allow-guarded")
    );
    assert!(lab.fails(2, &["keys", "list", "["]).contains("']'"));
    lab.guest.set_count("alpha", 1);
    assert!(lab.fails(1, &["keys", "dec", "alpha"]).contains("--force"));
    lab.ok(&["keys", "dec", "alpha", "--force"]);
    lab.guest.set_late(true);
    assert!(lab.fails(124, &["keys", "inc", "alpha"]).contains("vCPU 0"));
    lab.guest.set_late(false);
    lab.guest.set_gate(Gate::JumpLabelMutex, 0x1000);
    let message = lab.fails(5, &["keys", "inc", "alpha", "--timeout", "2s"]);
    assert!(
        message.contains("jump_label_mutex") && message.contains("--timeout"),
        "{message}"
    );
    for usage in [
        &["keys"][..],
        &["keys", "inc"],
        &["keys", "inc", "alpha", "--ttl", "soon"],
        &["keys", "list", "--enabled", "--disabled"],
        &["--all", "--guest", "b", "keys", "list"],
        &["keys", "inc", "alpha", "--plan-ttl", "1m"],
        &["keys", "inc", "alpha", "--dry-run", "--stop-timeout", "1ms"],
        &["keys", "get"],
        &["keys", "apply"],
        &["keys", "commit"],
        &["keys", "discard"],
        &["keys", "wait", "alpha"],
        &["keys", "wait", "--for", "on"],
        &["keys", "wait", "alpha", "--for", "ever"],
        &["keys", "watch", "--from-revision", "1"],
        &["keys", "list", "--class", "none"],
        &["keys", "list", "-o", "xml"],
        &["nonsense"],
    ] {
        assert_eq!(lab.run(usage).status.code(), Some(2), "{usage:?}");
    }
    lab.fails(2, &["keys", "inc", "alpha", "beta", "--etag", "x"]);
    assert_eq!((lab.guest.count("alpha"), lab.guest.count("beta")), (0, 0));
}

#[test]
fn a_reader_that_goes_away_is_no_error_message() {
    let lab = Lab::new();
    let mut list = lab
        .command(&["keys", "list"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    drop(list.stdout.take());
    let output = list.wait_with_output().expect("ends");
    assert!(output.stderr.is_empty(), "{output:?}");
}
