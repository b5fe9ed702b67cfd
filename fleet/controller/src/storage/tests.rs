// SPDX-License-Identifier: Apache-2.0

mod authentic;
mod records;
#[path = "../../tests/processes/samples.rs"]
mod samples;

use super::*;
use crate::rollout::{
    AfterReboot, AgentLimits, Caps, End, ErrorsOf, Failure, Freeze, Health, KeySet, LeftOut,
    OnFailure, Phase, Plan, Policy, Stage, State, TimelineEntry, Tracepoint, Wave, WaveGate,
    WaveGateKind,
};
use crate::store::{EmbeddedStore, Transaction};

pub const SPEC: &str =
    "selector: {guests: [\"*\"]}\nclaims: [{want: on, keys: [alpha]}]\nwaves: [{size: rest}]\n";

/// Returns a planned rollout with one wave, in which each guest has this many keys.
pub fn rollout(name: &str, guests: usize, keys: usize) -> Rollout {
    samples::rollout(name, guests, 1, keys)
}

async fn store() -> (tempfile::TempDir, EmbeddedStore) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let store = EmbeddedStore::open(&folder.path().join("x.redb")).expect("opens");
    (folder, store)
}

async fn write(store: &dyn Store, writes: Vec<Write>) {
    for write in writes {
        let one = Transaction::new().write(write);
        store.commit(one).await.expect("written");
    }
}

async fn keys(store: &dyn Store) -> Vec<String> {
    let snapshot = store.range(PREFIX).await.expect("listed");
    let keys = snapshot.entries.into_iter().map(|entry| entry.key);
    keys.collect()
}

fn names(loaded: &Loaded) -> Vec<&str> {
    let rollouts = loaded.rollouts.iter();
    rollouts.map(|(one, _)| &*one.header().name).collect()
}

/// Returns the header of a rollout of two guests with a changed field.
fn header(field: &str, value: serde_json::Value) -> String {
    let header = record::encode(rollout("broken", 2, 1).header());
    let mut header: serde_json::Value = serde_json::from_slice(&header).expect("JSON");
    header[field] = value;
    header.to_string()
}

#[tokio::test]
async fn a_rollout_that_cannot_be_read_is_named_and_the_others_are_loaded() {
    let wave = |first, count| {
        let wave = Wave {
            first,
            count,
            ..rollout("broken", 2, 1).header().waves[0].clone()
        };
        header("waves", serde_json::json!([wave, wave]))
    };
    let gating = serde_json::json!({"Running": "Gating"});
    let beyond = serde_json::json!([Wave {
        count: 3,
        ..rollout("broken", 2, 1).header().waves[0].clone()
    }]);
    let mut past = header("phase", gating);
    past = past.replace("\"wave\":0", "\"wave\":1");
    for (key, value, why) in [
        ("header", Some("not JSON".to_owned()), "header is malformed"),
        (
            "header",
            Some("{\"version\":3}".to_owned()),
            "header is malformed",
        ),
        (
            "header",
            Some("{}".to_owned()),
            "header has version 1, which",
        ),
        ("header", Some("\u{0}".to_owned()), "header is malformed"),
        (
            "header",
            Some(header("name", "other".into())),
            "of rollout \"other\"",
        ),
        (
            "header",
            Some(header("members", (1u64 << 60).into())),
            "members/00000002 is missing",
        ),
        ("header", Some(wave(0, 2)), "within the wave before"),
        (
            "header",
            Some(wave(0, usize::MAX)),
            "within the wave before",
        ),
        ("header", Some(wave(2, 2)), "within the wave before"),
        ("header", Some(header("waves", serde_json::json!([]))), ""),
        ("header", Some(past), "wave 1 of 1"),
        ("header", Some(header("waves", beyond)), "end at guest 3"),
        ("spec", None, "spec is missing"),
        (
            "spec",
            Some("# patchbay-spec version 3\nclaims: 7".to_owned()),
            "spec is malformed: line 1",
        ),
        ("members/00000001", None, "members/00000001 is missing"),
        (
            "members/00000001",
            Some("{\"host\":".to_owned()),
            "members/00000001 is malformed",
        ),
    ] {
        let (_folder, store) = store().await;
        for name in ["a", "broken", "c"] {
            write(
                &store,
                planned(&mut rollout(name, 2, 1), SPEC).expect("fits"),
            )
            .await;
        }
        let key = format!("rollouts/broken/{key}");
        let change = match &value {
            Some(value) => put(key, value.as_bytes().to_vec()),
            None => Write::Delete { key },
        };
        write(&store, vec![change]).await;
        let loaded = load(&store, &RecordKeys::default()).await.expect("loaded");
        if why.is_empty() {
            assert_eq!(names(&loaded), ["a", "broken", "c"]);
            continue;
        }
        assert_eq!(names(&loaded), ["a", "c"], "{value:?}");
        assert_eq!(loaded.unreadable.len(), 1, "{value:?}");
        let Unreadable { name, why: said } = &loaded.unreadable[0];
        assert!(name == "broken" && said.contains(why), "{said}");
        assert!(loaded.leftovers.is_empty(), "nothing of it is deleted");
        assert!(loaded.over.is_empty(), "it is planned, or nothing is known");
    }
}

#[tokio::test]
async fn what_is_left_of_a_plan_or_a_deletion_is_found_and_foreign_keys_are_kept() {
    let (_folder, store) = store().await;
    let mut writes = planned(&mut rollout("half", 2, 1), SPEC).expect("fits");
    writes.pop();
    let foreign = [
        "notes",
        "half/notes",
        "half/members/x",
        "half/members/00000000/x",
        "x/y",
    ];
    let foreign = foreign.map(|key| format!("{PREFIX}{key}"));
    writes.extend(foreign.iter().map(|key| put(key.clone(), vec![])));
    write(&store, writes).await;
    let loaded = load(&store, &RecordKeys::default()).await.expect("loaded");
    assert!(loaded.rollouts.is_empty() && loaded.unreadable.is_empty());
    let set = rollout("half", 2, 1).members()[0]
        .plan
        .set
        .digest()
        .to_owned();
    let [Leftover { name, entries }] = &loaded.leftovers[..] else {
        panic!("the leftovers of one rollout");
    };
    let left: Vec<String> = entries.iter().map(|entry| entry.key.clone()).collect();
    assert_eq!(name, "half");
    assert_eq!(
        left,
        [
            "rollouts/half/members/00000000",
            "rollouts/half/members/00000001",
            &format!("rollouts/half/sets/{set}"),
            "rollouts/half/spec"
        ]
    );
    write(&store, deletions(entries)).await;
    let mut foreign = foreign.to_vec();
    foreign.sort();
    assert_eq!(keys(&store).await, foreign);
}

#[tokio::test]
async fn a_rollout_is_written_to_a_file_with_all_its_records() {
    let (folder, store) = store().await;
    let archive = Archive {
        folder: folder.path().join("a/b"),
        keep: std::time::Duration::ZERO,
    };
    for name in ["net", "net-2"] {
        write(
            &store,
            planned(&mut rollout(name, 300, 1), SPEC).expect("fits"),
        )
        .await;
    }
    write(&store, vec![put("rollouts/net/notes".to_owned(), vec![])]).await;
    let all = entries(&store, "net", Keys::All).await.expect("read");
    assert_eq!(all.len(), 304);
    let entries = entries(&store, "net", Keys::Own).await.expect("read");
    assert_eq!(entries.len(), 303, "without the foreign key");
    // A file stands where the folder should be.
    std::fs::write(folder.path().join("a"), "").expect("written");
    let refused = archive.write("net", entries.clone()).await;
    let refused = refused.expect_err("no folder").to_string();
    assert!(
        refused.contains("a/b") && refused.contains("--archive"),
        "{refused}"
    );
    std::fs::remove_file(folder.path().join("a")).expect("removed");
    let first = archive
        .write("net", entries.clone())
        .await
        .expect("written");
    let text = std::fs::read_to_string(&first).expect("written");
    assert_eq!(fixture(&text), entries.iter().map(pair).collect::<Vec<_>>());
    let mode = std::os::unix::fs::MetadataExt::mode(&first.metadata().expect("there"));
    assert_eq!(mode & 0o777, 0o600);
    // What is left after an error in the middle of a deletion is not written over it.
    let some = entries[..1].to_vec();
    let second = archive.write("net", some).await.expect("written");
    assert_ne!(first, second);
    let kept = std::fs::read_to_string(&first).expect("written");
    assert_eq!(kept, text);
    let deletions = deletions(&entries);
    let header = "rollouts/net/header".to_owned();
    assert_eq!(
        deletions[0],
        Write::Delete { key: header },
        "it comes first"
    );
    assert_eq!(deletions.len(), entries.len());
}

/// Checks that the records can be made again from a file, also those that are damaged.
#[tokio::test]
async fn a_file_has_the_exact_bytes_of_each_record() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let archive = Archive {
        folder: folder.path().to_owned(),
        keep: std::time::Duration::ZERO,
    };
    let values: [&[u8]; 4] = [
        b"{ \"b\": 1.0,\n \"a\": 12345678901234567890123 }",
        b"\"text\"",
        b"{\"version\":2,\xff",
        b"",
    ];
    let entry = |(index, value): (usize, &&[u8])| Entry {
        key: format!("rollouts/net/{index}"),
        value: value.to_vec(),
        created: 1,
        modified: 1,
    };
    let entries: Vec<Entry> = values.iter().enumerate().map(entry).collect();
    let file = archive.write("net", entries).await.expect("written");
    let text = std::fs::read_to_string(file).expect("written");
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), values.len());
    for (line, value) in lines.iter().zip(values) {
        match std::str::from_utf8(value) {
            Ok(text) => assert_eq!(line["value"], text),
            Err(_) => assert_eq!(line["hex"], patchbay_proto::text::hex(value)),
        }
    }
}

#[tokio::test]
async fn an_unreadable_rollout_is_over_if_its_header_says_so() {
    for (phase, is_over) in [
        (serde_json::json!({"Ended": "Undone"}), true),
        (serde_json::json!("Completed"), true),
        (serde_json::json!({"Reverting": "Undone"}), false),
        (serde_json::json!("Paused"), false),
    ] {
        let (_folder, store) = store().await;
        let header = header("phase", phase);
        let key = "rollouts/broken/header".to_owned();
        write(&store, vec![put(key, header.into_bytes())]).await;
        let loaded = load(&store, &RecordKeys::default()).await.expect("loaded");
        assert_eq!(loaded.unreadable.len(), 1);
        assert_eq!(loaded.over.contains("broken"), is_over);
    }
}

/// Returns the keys and values of a file like an archive, whose values may also be JSON.
fn fixture(text: &str) -> Vec<(String, Vec<u8>)> {
    let record = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let value = match &line["value"] {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let key = line["key"].as_str().expect("a key");
        (key.to_owned(), comparable(value.as_bytes()))
    };
    text.lines().map(record).collect()
}

/// Returns the value with the fields of JSON objects in the order of their names.
fn comparable(value: &[u8]) -> Vec<u8> {
    match serde_json::from_slice::<serde_json::Value>(value) {
        Ok(json) => json.to_string().into_bytes(),
        Err(_) => value.to_vec(),
    }
}

fn pair(entry: &Entry) -> (String, Vec<u8>) {
    (entry.key.clone(), comparable(&entry.value))
}

#[test]
fn a_record_that_the_store_cannot_take_is_refused_and_named() {
    planned(&mut rollout("net", 3, 10_000), SPEC).expect("fits");
    let error = planned(&mut rollout("net", 3, 20_000), SPEC).expect_err("too large");
    let error = error.to_string();
    assert!(
        error.starts_with("the plan of guest guest-0 on host-0 takes 1") && error.contains("fewer"),
        "{error}"
    );
    let mut header = rollout("net", 1, 1).header().clone();
    header.waves = vec![header.waves[0].clone(); 8000];
    let error = planned(&mut Rollout::new(header, vec![]), SPEC).expect_err("too large");
    assert!(error.to_string().contains("fewer waves"), "{error}");
}
