// SPDX-License-Identifier: Apache-2.0
//! Tests `guest log`, and `debug on --follow` in a guest without an agent.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use patchbay_guest::testing::TestKey;
use patchbay_kernel_image::DebugLine;
use patchbay_service::testing::{Discovered, GuestLog, numbered};
use serde_json::Value;

use super::lab::{Commands, Lab};

fn lab() -> (Lab, GuestLog) {
    let lab = Lab::with(&[TestKey::guarded("net/a.c/10")]);
    let log = GuestLog::new(&lab.guest);
    log.found_by(&lab.registry);
    log.write(|writer| {
        writer.time = 12_345_678_901;
        let id = writer.print(6, "eth0: link up\n\ttwo lines");
        writer.name_device(id, "pci", "+pci:0000:00:03.0");
        writer.time = 400_000_000_000;
        writer.print(3, "a \x1b[2J\u{9b} \u{e9}rror");
        writer.print(7, "a detail");
    });
    (lab, log)
}

#[test]
fn the_log_is_printed_as_dmesg_does_and_steers_no_terminal() {
    let (lab, _log) = lab();
    assert_eq!(
        lab.ok(&["guest", "log"]),
        "[   12.345678] eth0: link up\n                       two lines\n\
         [  400.000000] a \\x1b[2J\\xc2\\x9b \u{e9}rror\n\
         [  400.000001] a detail\n"
    );
    for (words, expected) in [
        (
            &["--level", "err"][..],
            "[  400.000000] a \\x1b[2J\\xc2\\x9b \u{e9}rror\n",
        ),
        (&["--grep", "detail"], "[  400.000001] a detail\n"),
        (&["--since", "1ms", "--level", "7", "--grep", "link"], ""),
        (&["--from", "2"], "[  400.000001] a detail\n"),
    ] {
        assert_eq!(lab.ok(&[&["guest", "log"], words].concat()), expected);
    }
}

#[test]
fn taints_and_load_are_described() {
    let (lab, log) = lab();
    log.put_state(1 << 9 | 1 << 12, [2038, 0, 3 << 11]);
    log.put_health([2, 1], [4, 3, 2, 1, 99]);
    log.put_uptime(90_061, 2_000_000_000);
    log.put_tasks(&[(1, 1, "init"), (0, 0, "swapper/1")]);
    log.write(|writer| writer.refuse(3));
    let described = lab.json(&["guest", "describe"]);
    let details = &described["details"];
    let taints = ["W (warning issued)", "O (module built out of the tree)"];
    assert_eq!(details["taints"], serde_json::json!(taints));
    assert_eq!(details["load"], "1.00 0.00 3.00");
    assert_eq!(details["kernel_warnings"], 2);
    assert_eq!(details["oopses"], 1);
    assert_eq!(
        details["pressure"],
        "io some 4.00 %, io full 3.00 %, memory some 2.00 %, memory full 1.00 %, cpu some 99.00 %"
    );
    assert_eq!(details["uptime"], "1 d 01:01:03");
    assert_eq!(details["panicked"], false);
    assert!(details.get("last_warning").is_none(), "{described}");
    assert_eq!(details["log_overwritten"], 0);
    assert_eq!(details["log_refused"], 3);
    assert!(details.get("not_in_memory").is_none(), "{described}");
    // A hostile kernel's time of 2^63 seconds is none.
    log.put_uptime(1 << 63, 0);
    log.panic(0);
    for text in [
        "WARNING: at a.c:1",
        "BUG: \x1b[2J\nof a guest",
        "later",
        "Kernel panic - not syncing: x",
    ] {
        log.print(2, text);
    }
    let described = lab.json(&["guest", "describe"]);
    let details = &described["details"];
    assert_eq!(details["panicked"], true);
    assert_eq!(details["last_warning"], "[  400.000003] BUG: \\x1b[2J");
    assert_eq!(
        details["last_panic"],
        "[  400.000005] Kernel panic - not syncing: x"
    );
    assert_eq!(details["not_in_memory"], serde_json::json!(["uptime"]));
    (0..100).for_each(|_| log.print(6, "later"));
    let described = lab.json(&["guest", "describe"]);
    let details = &described["details"];
    assert_eq!(details["log_overwritten"], 7 + 100 - 64);
    assert!(details.get("last_warning").is_none(), "{described}");
    let described = Lab::new().json(&["guest", "describe"]);
    for part in ["taints", "uptime", "not_in_memory"] {
        assert!(described["details"].get(part).is_none(), "{described}");
    }
}

#[test]
fn an_autopsy_has_every_part_that_can_be_read() {
    let lab = Lab::with(&[TestKey::new("alpha", 1), TestKey::new("beta", 1)]);
    let rings = lab.rings();
    let log = rings.log();
    log.print(4, "the last \x1b words");
    log.put_state(1 << 7, [0; 3]);
    log.put_tasks(&[(4242, 4240, "a\x1b[2J worker"), (0, 0, "swapper/1")]);
    rings.write(|writer| {
        writer.put_instances([&b"boot"[..], b"a\x1b[2J", b"\xff"]);
    });
    for number in 0..3 {
        let payload = numbered(number);
        rings.write(|writer| writer.event(0, 1000 * number, &payload));
    }
    lab.ok(&["keys", "inc", "alpha"]);
    let file = lab.folder().join("autopsy.json");
    let path = file.to_str().expect("UTF-8");
    let (text, said, code) = lab.all(&["guest", "autopsy", "--file", path, "--events", "2"]);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "D (oops or BUG)",
        "alpha",
        "test:numbered",
        "the last \\x1b words",
        "CPU 0: a\\x1b[2J worker, pid 4242 of process 4240",
        "CPU 1: swapper/1, pid 0 of process 0",
        "Newest trace events of the instance boot",
        "Newest trace events of the instance a\\u{1b}[2J",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("beta"), "{text}");
    let mode = std::fs::metadata(&file).expect("written").permissions();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777,
        0o600
    );
    let written = std::fs::read(&file).expect("written");
    let found: serde_json::Value = serde_json::from_slice(&written).expect("JSON");
    assert_eq!(found["log"]["records"][0]["text"], "the last \\x1b words");
    let ring = &found["rings"][""];
    assert_eq!(ring["left_out"], 1);
    assert_eq!(ring["events"][1]["fields"]["number"], 2);
    assert_eq!(found["holds"][0]["key"], "alpha");
    // The name of the last instance is not UTF-8, so nobody can ask for it.
    let missing = found["missing"].as_object().expect("an object").keys();
    assert!(missing.eq(["ring of the instance \\xff"]), "{found}");
    let events = |instance: &str| found["rings"][instance]["events"].as_array().map(Vec::len);
    assert_eq!(
        ["boot", "a\u{1b}[2J", "none"].map(events),
        [Some(2), Some(2), None]
    );

    let found = lab.json(&["guest", "autopsy", "--instance", "none"]);
    let why = &found["missing"]["ring of the instance none"];
    let why = why.as_str().expect("a reason");
    assert!(why.contains("none"), "{why}");
    assert_eq!(found["keys"][0]["name"], "alpha");
    let (_, said, code) = lab.all(&["guest", "autopsy", "--file", "/nowhere/autopsy.json"]);
    assert!(
        said.contains("/nowhere/autopsy.json cannot be written"),
        "{said}"
    );
    assert_eq!(code, Some(1));
}

#[test]
fn records_are_objects_and_entries_of_a_journal() {
    let (lab, log) = lab();
    let text = lab.ok(&["guest", "log", "-o", "json"]);
    let mut lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let first: serde_json::Value = lines.next().expect("a record");
    let expected = serde_json::json!({
        "sequence": 0,
        "time_us": 12_345_678,
        "level": "info",
        "facility": "kern",
        "caller": "T7",
        "subsystem": "pci",
        "device": "+pci:0000:00:03.0",
        "text": "eth0: link up\n\ttwo lines",
    });
    assert_eq!(first, expected);
    assert_eq!(lines.count(), 2);
    assert_eq!(lab.ok(&["-o", "json", "guest", "log"]), text);
    // Of 103 records, numbered from 0, the log still has the last 64.
    (0..100).for_each(|_| log.print(6, "x"));
    let text = lab.ok(&["guest", "log", "-o", "json", "--from", "1"]);
    assert!(
        text.starts_with("{\"lost\":38}\n{\"sequence\":39,"),
        "{text:.80}"
    );

    log.put_uptime(500, 0);
    let now = || {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.expect("after 1970").as_micros()
    };
    let before = now();
    let output = lab.run(&["guest", "log", "--from", "102", "-o", "export"]);
    let boots = before - 500_000_000..=now() - 500_000_000;
    let entry = String::from_utf8(output.stdout).expect("UTF-8");
    let time = entry.lines().next().expect("a field");
    let time = time
        .strip_prefix("__REALTIME_TIMESTAMP=")
        .expect("the time");
    let time: u128 = time.parse().expect("a number");
    assert!(boots.contains(&(time - 400_000_101)), "{boots:?} {entry}");
    for field in [
        "__MONOTONIC_TIMESTAMP=400000101",
        "_SOURCE_MONOTONIC_TIMESTAMP=400000101",
        "_TRANSPORT=kernel",
        "PRIORITY=6",
        "SYSLOG_FACILITY=0",
        "SYSLOG_IDENTIFIER=kernel",
        "MESSAGE=x",
    ] {
        assert!(entry.lines().any(|line| line == field), "{field}: {entry}");
    }
    assert!(entry.ends_with("\n\n"), "{entry}");
    let (_, said, code) = lab.all(&["guest", "log", "--from", "1"]);
    assert!(said.contains("38 messages are lost"), "{said}");
    assert_eq!(code, Some(0));
}

#[test]
fn a_value_of_several_lines_has_its_length_in_a_journal() {
    let (lab, _log) = lab();
    let output = lab.run(&["guest", "log", "-o", "export"]).stdout;
    let field = b"MESSAGE\n\x18\0\0\0\0\0\0\0eth0: link up\n\ttwo lines\n\n";
    let found = output.windows(field.len()).any(|part| part == field);
    assert!(found, "{}", String::from_utf8_lossy(&output));
}

/// The path of the program in Debian. It is in no folder of `$PATH`.
const JOURNAL_REMOTE: &str = "/lib/systemd/systemd-journal-remote";

#[test]
fn the_journal_imports_the_records() {
    let (lab, log) = lab();
    log.put_uptime(500, 0);
    let folder = tempfile::tempdir().expect("a folder");
    let journal = folder.path().join("guest.journal");
    let mut import = Command::new(JOURNAL_REMOTE);
    let import = import.arg("--output").arg(&journal).arg("-");
    let mut import = match import.stdin(Stdio::piped()).spawn() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("SKIPPED: {JOURNAL_REMOTE} is missing; install systemd-journal-remote");
            return;
        }
        import => import.expect("started"),
    };
    let exported = lab.run(&["guest", "log", "-o", "export"]).stdout;
    let mut input = import.stdin.take().expect("a pipe");
    input.write_all(&exported).expect("it reads");
    drop(input);
    assert!(import.wait().expect("it ends").success());
    let mut journalctl = Command::new("journalctl");
    let journalctl = journalctl.args(["--all", "-o", "json", "--file"]);
    let read = journalctl.arg(&journal).output().expect("started");
    assert!(read.status.success(), "{read:?}");
    let text = String::from_utf8(read.stdout).expect("UTF-8");
    let entries = text.lines().map(|line| {
        let entry: Value = serde_json::from_str(line).expect("JSON");
        let fields = ["_SOURCE_MONOTONIC_TIMESTAMP", "PRIORITY", "_HOSTNAME"];
        fields.map(|field| entry[field].as_str().unwrap_or_default().to_owned())
    });
    let name = lab.json(&["guest", "describe"])["name"].clone();
    let name = name.as_str().expect("a name");
    let expected = [("12345678", "6"), ("400000000", "3"), ("400000001", "7")];
    let expected = expected.map(|(time, level)| [time, level, name].map(str::to_owned));
    assert_eq!(entries.collect::<Vec<_>>(), expected, "{text}");
}

#[test]
fn wrong_options_and_a_guest_without_a_log_are_refused() {
    let (lab, _log) = lab();
    let (_, said, code) = lab.all(&["guest", "log", "--level", "loud"]);
    assert!(said.contains("emerg, alert"), "{said}");
    assert_eq!(code, Some(2));
    let (_, _, code) = lab.all(&["guest", "log", "--since", "1m", "--from", "1"]);
    assert_eq!(code, Some(2));
    let (_, _, code) = lab.all(&["guest", "log", "-o", "yaml"]);
    assert_eq!(code, Some(2));
    let other = Lab::new();
    let said = other.fails(1, &["guest", "log"]);
    assert!(
        said.contains("no agent is connected") && said.contains("not found in its memory"),
        "{said}"
    );
    let said = other.fails(1, &["guest", "log", "--source", "memory"]);
    assert!(said.contains("not found in its memory"), "{said}");
}

#[test]
fn a_closed_pipe_ends_a_stream_without_a_message() {
    let lab = Lab::with(&[TestKey::new("alpha", 1)]);
    let rings = lab.rings();
    rings.log().print(6, "a line");
    rings.write(|writer| writer.event(0, 1000, &numbered(0)));
    let reading = "patchbay: reading the events that the guest records, in its memory; Ctrl-C \
                   ends the command\n";
    for (words, expected) in [
        (&["guest", "log"][..], ""),
        (&["guest", "log", "--follow"], ""),
        (&["guest", "log", "-o", "json"], ""),
        (&["guest", "log", "-o", "export"], ""),
        (&["trace", "tail", "--buffered"], reading),
        (&["trace", "tail", "--buffered", "-o", "json"], reading),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = lab.command(words).stdout(writer).output();
        let output = output.expect("the command starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let found = (said.as_str(), output.status.code());
        assert_eq!(found, (expected, Some(141)), "{words:?}");
    }
}

#[test]
fn the_log_is_followed() {
    let (lab, log) = lab();
    let mut following = lab.follow(&["guest", "log", "--follow", "--since", "1ms"]);
    assert!(following.line().ends_with("rror"));
    assert!(following.line().ends_with("a detail"));
    for number in 0..3 {
        log.print(6, &format!("line {number}"));
        assert!(following.line().ends_with(&format!("line {number}")));
    }
    following.end();
}

/// The monitor ends in order, or is killed.
#[test]
fn a_guest_that_ends_ends_its_streams() {
    for is_killed in [false, true] {
        let lab = Lab::with(&[TestKey::new("alpha", 1)]);
        let rings = lab.rings();
        rings.log().print(6, "a line");
        rings.write(|writer| writer.event(0, 1000, &numbered(0)));
        let mut log = lab.follow(&["guest", "log", "--follow"]);
        let mut events = lab.follow(&["trace", "tail", "--buffered"]);
        assert!(log.line().ends_with("a line"));
        assert!(events.line().contains("test:numbered"));
        let reason = match is_killed {
            false => {
                lab.end();
                "the guest is served here no longer: the monitor ends"
            }
            true => {
                drop(lab);
                "patchbay: "
            }
        };
        for stream in [log, events] {
            let (rest, said, code) = stream.output();
            assert_eq!((rest.as_str(), code), ("", Some(1)), "{said}");
            let last = said.lines().last().unwrap_or_default();
            assert!(last.contains(reason), "{is_killed}: {said}");
        }
    }
}

#[test]
fn a_stream_ends_at_its_timeout() {
    let (lab, _log) = lab();
    for command in [
        &["guest", "log", "--follow"][..],
        &["guest", "watch"],
        &["keys", "watch"],
    ] {
        let (_, said, code) = lab.all(&[command, &["--timeout", "500ms"]].concat());
        assert_eq!(code, Some(124), "{command:?}: {said}");
    }
    let words = ["debug", "on", "module net", "--follow", "-o", "json"];
    let said = lab.fails(2, &words);
    assert!(said.contains("guest log --follow"), "{said}");
}

#[test]
fn debug_lines_are_followed_in_memory_without_an_agent() {
    let (lab, log) = lab();
    let site = DebugLine {
        module: "net".to_owned(),
        file: "net/a.c".to_owned(),
        function: "a_open".to_owned(),
        line: 10,
        format: "open %s\n".to_owned(),
        classed: false,
    };
    lab.guest
        .discover(&lab.registry, &[("net/a.c/10", site)], &[]);
    let mut following = lab.follow(&["debug", "on", "module net", "--follow"]);
    let mut line = following.line();
    while !line.starts_with("1 of 1") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    lab.guest.print(b"on the console\r\n");
    for (level, text) in [
        (7, "closed eth0"),
        (6, "open eth0"),
        (7, "net:b_open:20: open eth0"),
        (7, "net:a_open:10: open eth0"),
    ] {
        log.print(level, text);
    }
    let line = loop {
        let line = following.line();
        assert!(
            !["console", "link up", "closed", "b_open", "] open"]
                .iter()
                .any(|other| line.contains(other)),
            "{line}"
        );
        if line.starts_with('[') {
            break line;
        }
    };
    assert!(line.ends_with("] net:a_open:10: open eth0"), "{line}");
    following.end();

    let words = ["debug", "on", "module net", "--follow", "--whole-log"];
    let mut following = lab.follow(&words);
    let mut line = following.line();
    while !line.contains(" of 1") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    log.print(7, "closed eth0");
    while !line.ends_with("] closed eth0") {
        assert!(!line.is_empty(), "it ended");
        line = following.line();
    }
    following.end();
}
