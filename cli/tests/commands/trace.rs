// SPDX-License-Identifier: Apache-2.0

use std::path::PathBuf;

use serde_json::Value;

use super::lab::{Commands, Host, Lab};

#[test]
fn events_are_listed_and_switched() {
    let host = Host::with(&["only"]);
    let (out, said, code) = host.all(&["trace", "events", "-o", "name"]);
    assert_eq!(
        (out.as_str(), code),
        ("sched:sched_switch\nsched:sched_waking\n", Some(0))
    );
    assert!(
        said.contains("the last known one: no agent is connected"),
        "{said}"
    );
    let text = host.ok(&[
        "trace", "arm", "a:b", "--filter", "pid == 1", "--ttl", "10m",
    ]);
    assert!(text.contains("a:b   parked"), "{text}");
    assert_eq!(host.fake.seen("ttl: Some(Duration { seconds: 600").len(), 1);
    let output = host.fed(&["trace", "fire", "-", "--ttl", "20m"], "a:b\n");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        host.fake.seen("ttl: Some(Duration { seconds: 1200").len(),
        1
    );
    host.ok(&["trace", "park", "a:b", "--force", "--even-if-others"]);
    host.ok(&["trace", "disarm", "a:b", "--force"]);
    assert!(host.ok(&["trace", "agent"]).contains("1.2.3"));
    let text = host.ok(&["trace", "stat", "--interval", "1ms"]);
    assert!(text.contains("lost: none"), "{text}");
    assert_eq!(
        host.ok(&["trace", "tail", "x", "-n", "2", "-o", "name"])
            .lines()
            .count(),
        2
    );
}

#[test]
fn events_that_others_keep_are_partly_done() {
    let host = Host::with(&["only"]);
    for verb in ["park", "disarm"] {
        let (out, said, code) = host.all(&["trace", verb, "a:b"]);
        assert_eq!(code, Some(3), "{said}");
        assert!(
            out.contains("uid:7") && said.contains("--force"),
            "{out}{said}"
        );
    }
    let (_, _, code) = host.all(&["trace", "park", "a:b", "--dry-run"]);
    assert_eq!(code, Some(0));
    let (out, _, code) = host.all(&["--all", "trace", "park", "a:b", "-o", "json"]);
    let entries: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(code, Some(3));
    assert!(entries[0]["result"].is_object() && entries[0]["error"]["exit_code"] == 3);
    for usage in [
        &["trace"][..],
        &["trace", "arm"],
        &["trace", "fire"],
        &["trace", "park"],
        &["trace", "disarm"],
        &["trace", "events", "--all-of-them"],
        &["trace", "stat", "--interval", "soon"],
        &["trace", "tail", "-n", "many"],
        &["trace", "record", "x"],
        &["trace", "agent", "x"],
    ] {
        assert_eq!(host.run(usage).status.code(), Some(2), "{usage:?}");
    }
}

/// Checks a recording while nothing is armed, which is therefore empty, and a recording that cannot
/// start because the disk is full.
#[test]
fn a_recording_is_written_to_the_named_file() {
    let lab = Lab::new();
    let file = lab.folder().join("t.json");
    let name = file.to_str().expect("text");
    let record = ["trace", "record", "--listen", "--duration", "1ms", "-o"];
    let said = lab.ok(&[&record[..], &[name]].concat());
    assert!(said.contains("t.json: 0 events"), "{said}");
    let timeline = std::fs::read(&file).expect("written");
    let timeline: Value = serde_json::from_slice(&timeline).expect("JSON");
    assert!(timeline["traceEvents"].is_array());
    let output = lab.run(&[&record[..], &["/dev/full"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("/dev/full: the disk is full"), "{said}");
}

#[test]
fn a_recording_that_is_refused_leaves_the_files_alone() {
    let lab = Lab::new();
    let path = |name| lab.folder().join(name);
    let (earlier, new, nowhere) = (path("earlier"), path("new"), path("no-folder/new"));
    std::fs::write(&earlier, "an earlier recording").expect("writable");
    let record = |file: &PathBuf, code: i32| {
        let file = file.to_str().expect("text");
        // The recording is refused, because no agent can arm events.
        let output = lab.run(&["trace", "record", "-o", file, "sched:*"]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = record(&earlier, 1);
    assert!(said.contains("agent"), "{said}");
    let kept = std::fs::read_to_string(&earlier).expect("there");
    assert_eq!(kept, "an earlier recording");
    record(&new, 1);
    assert!(!new.exists());
    let said = record(&nowhere, 2);
    assert!(
        said.contains("no-folder/new cannot be written: No such file"),
        "{said}"
    );
}
