// SPDX-License-Identifier: Apache-2.0

use super::lab::{Commands, Host, Lab};

#[test]
fn a_glob_or_all_make_a_table_by_guest() {
    let host = Host::new();
    let table = host.ok(&["--guest", "web-*", "keys", "list", "alpha"]);
    assert!(table.starts_with("GUEST  NAME "), "{table}");
    assert_eq!(table.matches("web-1").count(), 3, "{table}");
    assert!(!table.contains("db"), "{table}");
    let names = host.ok(&["--all", "keys", "list", "-o", "name"]);
    assert_eq!(names.lines().count(), 9, "{names}");
    assert!(names.contains("web-2/beta\n"), "{names}");
    let text = host.ok(&["--all", "keys", "enable", "alpha", "beta"]);
    assert!(
        text.contains("web-1: 2 of 2 keys changed\n") && text.contains("db     alpha  0 -> 1"),
        "{text}"
    );
    // A glob makes the output a list even if only one guest matches.
    let one = host.json(&["--guest", "d?", "guest", "describe"]);
    assert_eq!(
        (one.as_array().map(Vec::len), &one[0]["guest"]),
        (Some(1), &"db".into())
    );
    assert_eq!(one[0]["result"]["state"], "running");
}

#[test]
fn a_name_is_found_at_any_socket_and_said_in_the_request() {
    let host = Host::new();
    assert_eq!(
        host.ok(&["--guest", "web-2", "keys", "inc", "alpha", "-o", "name"]),
        "alpha\n"
    );
    assert_eq!(host.fake.guest("web-2", |guest| guest.count("alpha")), 1);
    assert_eq!(host.fake.guest("web-1", |guest| guest.count("alpha")), 0);
    let message = host.fails(1, &["--guest", "wbe-2", "keys", "list"]);
    assert!(message.contains("did you mean \"web-2\""), "{message}");
    let message = host.fails(1, &["--guest", "mail-*", "keys", "list"]);
    assert!(message.contains("no guest matches mail-*"), "{message}");
    let socket = host.folder().join("host/all.sock");
    let socket = socket.to_str().expect("text");
    let console = [
        "--socket", socket, "--guest", "db", "guest", "console", "--dump",
    ];
    assert_eq!(host.ok(&console), "console of db\n");
    // Like for other commands, a closed pipe ends the command without a message.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = host.command(&console).stdout(writer).output();
    let output = output.expect("the command starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((said.as_str(), output.status.code()), ("", Some(141)));
    let listed = host.ok(&[
        "--socket", socket, "--all", "guest", "describe", "-o", "name",
    ]);
    assert_eq!(listed, "db\nweb-1\nweb-2\n");
}

#[test]
fn some_failures_are_3_and_all_are_their_common_code() {
    let host = Host::new();
    host.fake.guest("web-1", |guest| guest.busy = true);
    let change = ["--all", "keys", "inc", "alpha", "--timeout", "1s"];
    let (out, said, code) = host.all(&[&change[..], &["-o", "json"]].concat());
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains("patchbay: web-1: the guest was busy"),
        "{said}"
    );
    assert!(said.ends_with("patchbay: 1 of 3 guests failed\n"), "{said}");
    let entries: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(entries[0]["result"]["keys_changed"], 1);
    assert_eq!(
        (
            &entries[1]["error"]["reason"],
            &entries[1]["error"]["exit_code"]
        ),
        (&"GUEST_BUSY".into(), &5.into())
    );
    assert!(entries[1]["result"].is_null() && entries[0]["error"].is_null());
    for guest in ["db", "web-2"] {
        host.fake.guest(guest, |guest| guest.busy = true);
    }
    let (_, said, code) = host.all(&change);
    assert_eq!(code, Some(5), "{said}");
    host.fake.guest("db", |guest| {
        guest.busy = false;
        guest.keys.clear();
    });
    let (_, said, code) = host.all(&change);
    assert_eq!(
        (code, said.ends_with("all 3 guests failed\n")),
        (Some(1), true)
    );
    // A named guest that does not run counts as failed.
    let (_, said, code) = host.all(&["--guest", "db", "--guest", "web-7", "guest", "describe"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("web-7: no guest is named"), "{said}");
}

/// Checks that one command restores the listed states of several guests.
#[test]
fn a_list_of_several_guests_is_applied_to_each() {
    let host = Host::new();
    host.fake
        .guest("web-1", |guest| guest.set_count("alpha", 1));
    host.fake.guest("web-2", |guest| guest.set_count("beta", 1));
    for format in ["yaml", "json"] {
        let listed = host.ok(&["--guest", "web-*", "keys", "list", "-o", format]);
        let file = host.folder().join("keys");
        std::fs::write(&file, listed).expect("writable");
        let file = file.to_str().expect("text");
        let turn = |name: &str, key: &str| {
            host.fake.guest(name, |guest| {
                let other = i32::from(guest.count(key) == 0);
                guest.set_count(key, other);
            });
        };
        let counts = || {
            let of = |name, key| host.fake.guest(name, |guest| guest.count(key));
            [("web-1", "alpha"), ("web-1", "beta"), ("web-2", "beta")]
                .map(|(name, key)| of(name, key))
        };
        turn("web-1", "alpha");
        turn("web-1", "beta");
        turn("web-2", "beta");
        assert_eq!(counts(), [0, 1, 0]);
        let said = host.ok(&["keys", "apply", "-f", file]);
        assert!(said.contains("web-1: 2 of 2 keys changed"), "{said}");
        assert_eq!(counts(), [1, 0, 1]);
        // The file selects the guest.
        turn("web-1", "alpha");
        turn("web-2", "beta");
        host.ok(&["--guest", "web-2", "keys", "apply", "-f", file]);
        assert_eq!(counts(), [0, 0, 1]);
        host.ok(&["--guest", "web-*", "keys", "apply", "-f", file]);
        assert_eq!(counts(), [1, 0, 1]);
        // Only the guest that the file does not name fails.
        let (_, said, code) = host.all(&["--all", "keys", "apply", "-f", file]);
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("no entry for guest \"db\""), "{said}");
    }
}

#[test]
fn verbs_about_one_guest_say_so() {
    let host = Host::new();
    for words in [
        &["guest", "console"][..],
        &["guest", "watch"],
        &["guest", "run", "--kernel", "k"],
        &["keys", "watch"],
        &["keys", "commit", "plan-1"],
        &["keys", "discard", "plan-1"],
        &["keys", "inc", "alpha", "--etag", "x"],
        &["holds", "release", "h1"],
        &["holds", "renew", "h1", "--ttl", "1m"],
        &["trace", "tail"],
        &["trace", "record", "-o", "/nonexistent/t.json"],
    ] {
        let message = host.fails(2, &[&["--all"], words].concat());
        assert!(message.contains("works on one guest"), "{message}");
    }
}

#[test]
fn two_sockets_with_one_name_are_ambiguous() {
    let host = Host::new();
    let lab = Lab::new();
    let user = host.folder().join("patchbay");
    std::fs::create_dir(&user).expect("writable");
    let (one, unit) = (user.join("test.sock"), host.folder().join("host/test"));
    std::os::unix::fs::symlink(lab.socket(), &one).expect("writable");
    host.ok(&["--guest", "test", "keys", "list"]);
    // The systemd unit of a guest creates a folder with this name.
    std::fs::create_dir(&unit).expect("writable");
    std::os::unix::fs::symlink(lab.socket(), unit.join("api.sock")).expect("writable");
    let message = host.fails(2, &["--guest", "test", "keys", "list"]);
    assert!(message.contains("choose one with --socket"), "{message}");
    std::fs::remove_file(&one).expect("there");
    host.ok(&["--guest", "test", "keys", "list"]);
}
