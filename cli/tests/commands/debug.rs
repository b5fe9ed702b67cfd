// SPDX-License-Identifier: Apache-2.0

use patchbay_service::keys::debug::DebugSite;
use patchbay_service::testing::TestKey;

use super::lab::{Commands, Host, Lab};

fn lab() -> Lab {
    let lab = Lab::with(&[
        TestKey::guarded("net/a.c/10"),
        TestKey::guarded("net/b.c/20"),
        TestKey::guarded("hook"),
    ]);
    let site = |file: &str, line, function: &str, format: &str| DebugSite {
        module: "net".to_owned(),
        file: file.to_owned(),
        function: function.to_owned(),
        line,
        format: format.to_owned(),
        classed: false,
    };
    lab.guest.discover(
        &[
            ("net/a.c/10", site("net/a.c", 10, "a_open", "open %s\n")),
            ("net/b.c/20", site("net/b.c", 20, "b_open", "\u{1b}[2J")),
        ],
        &["hook"],
    );
    lab
}

#[test]
fn lines_are_listed_and_their_texts_do_not_steer_the_terminal() {
    let lab = lab();
    let table = lab.ok(&["debug", "list"]);
    assert!(
        table.contains("net/a.c:10  net     a_open    off    0      \"open %s\"\n"),
        "{table}"
    );
    assert!(table.contains(r#""\033[2J""#), "{table}");
    let lines = lab.json(&["debug", "list", "func a_*"]);
    assert_eq!(lines[0]["key"], "net/a.c/10");
    assert_eq!(lines[0]["format"], r"open %s\n");
    assert!(lines[1].is_null());
    assert_eq!(lab.ok(&["debug", "list", "--on", "-o", "name"]), "");
}

#[test]
fn lines_are_switched_by_queries() {
    let lab = lab();
    let on = lab.ok(&["debug", "on", "file a.c", "line 20-", "--reason", "why"]);
    assert!(
        on.contains("net/a.c/10  0 -> 1  1\n") && on.contains("2 of 2 keys changed\n"),
        "{on}"
    );
    assert!(lab.guest.jumps("net/b.c/20"));
    assert_eq!(
        lab.ok(&["debug", "list", "--on", "-o", "name"]),
        "net/a.c/10\nnet/b.c/20\n"
    );
    lab.ok(&["debug", "off", "module net"]);
    assert!(!lab.guest.jumps("net/a.c/10") && !lab.guest.jumps("net/b.c/20"));
    let plan = lab.json(&["debug", "on", "module net", "--dry-run"]);
    assert_eq!(plan["keys_changed"], 2);
    assert!(!lab.guest.jumps("net/a.c/10"));
}

#[test]
fn errors_point_at_the_word() {
    let lab = lab();
    let message = lab.fails(1, &["debug", "on", "file a.c fnc x"]);
    assert!(
        message.contains("\"fnc\"") && message.contains("column 10"),
        "{message}"
    );
    let message = lab.fails(1, &["debug", "on", "file c.c"]);
    assert!(message.contains("no line"), "{message}");
    let message = lab.fails(1, &["keys", "enable", "hook", "--allow-guarded"]);
    assert!(message.contains("NULL"), "{message}");
    let usage = lab.all(&["debug", "on"]);
    assert_eq!(usage.2, Some(2));
}

#[test]
fn classes_are_shown_and_selected() {
    let lab = lab();
    let keys = lab.json(&["keys", "list", "--class", "dyndbg,never"]);
    assert_eq!(
        (&keys[0]["class"], &keys[1]["class"]),
        (&"never".into(), &"dyndbg".into())
    );
}

#[test]
fn the_console_is_followed_from_the_change_on() {
    let lab = lab();
    lab.guest.print(b"before\r\n");
    let mut following = lab.follow(&["debug", "on", "module net", "--follow"]);
    let mut line = following.line();
    while !line.starts_with("2 of 2") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    lab.guest.print(b"a line \x1b[2J\r\n");
    let line = loop {
        let line = following.line();
        assert!(line != "before" && !line.is_empty(), "{line:?}");
        if line.starts_with("a line") {
            break line;
        }
    };
    assert_eq!(line, "a line \u{fffd}[2J");
    following.end();
    assert!(lab.guest.jumps("net/b.c/20"), "the lines stay on");
}

#[test]
fn several_guests_answer_at_once() {
    let host = Host::new();
    let table = host.ok(&["--guest", "web-*", "debug", "on", "module x"]);
    assert!(
        table.contains("web-1") && table.contains("web-2"),
        "{table}"
    );
    assert_eq!(host.fake.guest("web-2", |guest| guest.count("beta")), 1);
    assert_eq!(host.fake.guest("db", |guest| guest.count("beta")), 0);
    let lines = host.json(&["--guest", "db", "debug", "list"]);
    assert_eq!(lines.as_array().map(Vec::len), Some(3), "all pages");
    let message = host.fails(2, &["--all", "debug", "on", "module x", "--follow"]);
    assert!(message.contains("one guest"), "{message}");
}
