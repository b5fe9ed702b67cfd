// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::rollout::{
    AgentLimits, Caps, CommitOutcome, End, Failure, Freeze, Health, InverseOp, KeySet, OnFailure,
    Phase, Policy, PreparedPlan, Stage, State, TimelineEntry, Tracepoint, Wave, WaveGate,
    WaveGateKind,
};
use crate::store::{EmbeddedStore, Transaction};

pub const SPEC: &str =
    "selector: {guests: [\"*\"]}\nops: [{op: enable, keys: [alpha]}]\nwaves: [{size: rest}]\n";

/// Returns a planned rollout with one wave, in which each guest has this many keys.
pub fn rollout(name: &str, guests: usize, keys: usize) -> Rollout {
    let op = |index| InverseOp {
        key: format!("a_static_key_with_a_name_of_usual_length_{index:05}"),
        op: 2,
        times: 1,
    };
    let set = Arc::new(KeySet::new(vec![], (0..keys).map(op).collect()));
    let member = |index| Member {
        host: format!("host-{}", index / 100),
        guest: format!("guest-{index}"),
        domain: String::new(),
        plan: PreparedPlan {
            set: Arc::clone(&set),
            ..PreparedPlan::default()
        },
        health: None,
        state: State::Pending,
    };
    let header = Header {
        name: name.to_owned(),
        title: String::new(),
        spec_digest: String::new(),
        digest: "digest".to_owned(),
        phase: Phase::Planned,
        message: String::new(),
        wave: 0,
        waves: vec![Wave {
            name: "1".to_owned(),
            first: 0,
            count: guests,
            bake_ms: 0,
            bakes_until: None,
        }],
        policy: Policy::default(),
        approvals: vec![],
        timeline: vec![],
        members: guests,
        created: 0,
        trace_id: String::new(),
        run: String::new(),
    };
    Rollout::new(header, (0..guests).map(member).collect())
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
        ("header", Some("{}".to_owned()), "header is malformed"),
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
            Some("ops: 7".to_owned()),
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
        let loaded = load(&store).await.expect("loaded");
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
    let loaded = load(&store).await.expect("loaded");
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
    write(&store, deletions(left)).await;
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
    let deletions = deletions(entries.iter().map(|entry| entry.key.clone()).collect());
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
        let loaded = load(&store).await.expect("loaded");
        assert_eq!(loaded.unreadable.len(), 1);
        assert_eq!(loaded.over.contains("broken"), is_over);
    }
}

/// The records of the first builds, of the later ones without a version, and of version 2. A
/// fixture is not changed once its version is released.
const FIRST: &str = include_str!("fixtures/v1-first.jsonl");
const VERSION_1: &str = include_str!("fixtures/v1.jsonl");
const VERSION_2: &str = include_str!("fixtures/v2.jsonl");

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

async fn load_fixture(text: &str) -> Loaded {
    let (_folder, store) = store().await;
    let records = fixture(text).into_iter();
    write(
        &store,
        records.map(|(key, value)| put(key, value)).collect(),
    )
    .await;
    load(&store).await.expect("loaded")
}

/// The field `run` of the first of [`samples`].
const RUN: &str = "89abcdef01234567";

/// Returns rollouts that have every state and setting that the present version can store. The
/// first has this field `run`.
fn samples(run: &str) -> Vec<Rollout> {
    let states = [
        State::Skipped {
            why: "it is as the spec wants it".to_owned(),
        },
        State::Pending,
        State::Committing {
            attempt: 2,
            not_before: 1_800_000_000_000,
        },
        State::Unresolved,
        State::Committed { pause_us: 41 },
        State::Failed {
            failure: Failure::Final,
            why: "PLAN_STALE".to_owned(),
        },
        State::Failed {
            failure: Failure::Busy,
            why: "GUEST_BUSY".to_owned(),
        },
        State::Failed {
            failure: Failure::Unknown,
            why: "no answer".to_owned(),
        },
        State::Reverted { void: true },
        State::RevertFailed {
            why: "WOULD_WARN".to_owned(),
            pause_us: 7,
        },
        State::Adopted,
    ];
    let mut members = rollout("net", states.len(), 2).members().to_vec();
    let tracepoint = Tracepoint {
        op: 0,
        event: "sched:sched_switch".to_owned(),
        key: "__tracepoint_sched_switch".to_owned(),
    };
    let inverse = members[0].plan.set.inverse().to_vec();
    let set = Arc::new(KeySet::new(vec![tracepoint], inverse));
    for (member, state) in members.iter_mut().zip(states) {
        member.state = state;
        member.domain = "a".to_owned();
        member.plan = PreparedPlan {
            plan_id: "plan-1".to_owned(),
            request_id: "fleet/net/prepare".to_owned(),
            digest: "00ff".to_owned(),
            incarnation: "i-1".to_owned(),
            keys: 2,
            sites: 5,
            predicted_pause_us: 90,
            set: Arc::clone(&set),
        };
    }
    members[1].health = Some(Health {
        boot_id: "b-1".to_owned(),
        kernel_warnings: 3,
    });
    let kinds = [
        WaveGateKind::Errors { max_percent: 2 },
        WaveGateKind::PauseP99 { budget_us: 500 },
        WaveGateKind::Command {
            argv: vec!["/bin/true".to_owned()],
            timeout_ms: 30_000,
        },
        WaveGateKind::AgentHealth {
            limits: AgentLimits {
                new_warnings: Some(0),
                pressure: [("io".to_owned(), 40)].into(),
            },
            timeout_ms: 60_000,
        },
        WaveGateKind::Grpc {
            url: "http://web:50051".to_owned(),
            service: "web".to_owned(),
            timeout_ms: 5000,
        },
        WaveGateKind::Prometheus {
            url: "http://prom:9090".to_owned(),
            query: "up".to_owned(),
            above: None,
            below: Some(0.5),
            timeout_ms: 60_000,
        },
    ];
    let on_failure = |index| [OnFailure::Pause, OnFailure::Abort][index % 2];
    let gate = |(index, kind)| WaveGate {
        kind,
        on_failure: on_failure(index),
    };
    let header = Header {
        title: "New receive path".to_owned(),
        spec_digest: "0a0b".to_owned(),
        digest: "0123456789abcdef0123456789abcdef".to_owned(),
        phase: Phase::Running(Stage::Baking),
        message: "started".to_owned(),
        waves: vec![
            Wave {
                name: "canary".to_owned(),
                first: 0,
                count: 4,
                bake_ms: 600_000,
                bakes_until: Some(1_800_000_000_000),
            },
            Wave {
                name: "2".to_owned(),
                first: 4,
                count: 6,
                bake_ms: 0,
                bakes_until: None,
            },
        ],
        policy: Policy {
            caps: Caps {
                count: Some(50),
                percent: Some(10),
                per_domain: None,
            },
            gates: kinds.into_iter().enumerate().map(gate).collect(),
            freezes: vec![Freeze {
                from: 1,
                until: 2,
                reason: "holidays".to_owned(),
            }],
            approvals: 2,
        },
        approvals: vec!["uid:0".to_owned(), "spiffe://example.org/alice".to_owned()],
        timeline: vec![TimelineEntry {
            time: 1_799_999_000_000,
            principal: "uid:0".to_owned(),
            text: "planned".to_owned(),
        }],
        created: 1_799_999_000_000,
        trace_id: "0af7651916cd43dd8448eb211c80319c".to_owned(),
        run: run.to_owned(),
        members: members.len(),
        ..rollout("net", 0, 0).header().clone()
    };
    let mut samples = vec![Rollout::new(header, members)];
    for (name, phase) in [
        ("p-1", Phase::Planned),
        ("p-2", Phase::Running(Stage::Committing)),
        ("p-3", Phase::Running(Stage::Gating)),
        ("p-4", Phase::Paused),
        ("p-5", Phase::Completed),
        ("p-6", Phase::Reverting(End::Aborted)),
        ("sets", Phase::Ended(End::Undone)),
    ] {
        let one = rollout(name, 1, 1);
        let header = Header {
            phase,
            ..one.header().clone()
        };
        samples.push(Rollout::new(header, one.members().to_vec()));
    }
    samples
}

fn assert_same(found: &[(Rollout, Spec)], expected: &[Rollout]) {
    assert_eq!(found.len(), expected.len());
    for ((found, _), expected) in found.iter().zip(expected) {
        assert_eq!(found.header(), expected.header());
        assert_eq!(found.members(), expected.members());
    }
}

/// Checks that a change of the form is not made without a new version.
#[tokio::test]
async fn the_present_version_is_written_and_read_as_its_fixture_says() {
    let writes = samples(RUN)
        .into_iter()
        .flat_map(|mut one| planned(&mut one, SPEC).expect("fits"));
    let records = writes.map(|write| match write {
        Write::Put { key, value, .. } => (key, comparable(&value)),
        Write::Delete { key } => panic!("{key} is deleted"),
    });
    let mut records: Vec<_> = records.collect();
    records.sort();
    for (key, value) in &records {
        let value = String::from_utf8_lossy(value);
        let value: serde_json::Value =
            serde_json::from_str(&value).unwrap_or_else(|_| value.clone().into());
        println!("{}", serde_json::json!({ "key": key, "value": value }));
    }
    let mut expected = fixture(VERSION_2);
    expected.sort();
    assert_eq!(records, expected);
    assert_same(&load_fixture(VERSION_2).await.rollouts, &samples(RUN));
}

#[tokio::test]
async fn version_1_is_read() {
    assert!(!VERSION_1.contains("version"));
    // Its requests keep the ids that the program before gave them.
    let old = samples("");
    assert_same(&load_fixture(VERSION_1).await.rollouts, &old);
    assert_eq!(old[0].header().request_prefix(), "fleet/net");
    let present = samples(RUN);
    let prefix = format!("fleet/net/{RUN}");
    assert_eq!(present[0].header().request_prefix(), prefix);
    let first = load_fixture(FIRST).await;
    assert_eq!(first.unreadable, []);
    let [(first, _)] = &first.rollouts[..] else {
        panic!("{:?}", names(&first));
    };
    assert_eq!(first.header().trace_id, "");
    let states: Vec<_> = first.members().iter().map(|member| &member.state).collect();
    assert_eq!(
        states,
        [&State::Committed { pause_us: 41 }, &State::Pending]
    );
    let plan = &first.members()[0].plan;
    assert_eq!((&*plan.request_id, plan.set.tracepoints().len()), ("", 0));
    assert_eq!((&*plan.plan_id, plan.set.inverse().len()), ("plan-1", 1));
}

/// Checks that guests with equal sets of keys share one record and one value in memory, also after
/// a rollout of version 1 is stored again.
#[tokio::test]
async fn a_set_of_keys_is_stored_once() {
    let sets = |writes: &[Write]| {
        let is_set = |write: &&Write| format!("{write:?}").contains("/sets/");
        writes.iter().filter(is_set).count()
    };
    let mut one = rollout("net", 200, 1000);
    let writes = planned(&mut one, SPEC).expect("fits");
    assert_eq!((writes.len(), sets(&writes)), (203, 1));
    let loaded = load_fixture(VERSION_1).await;
    let (mut old, _) = loaded.rollouts.into_iter().next().expect("net");
    assert_eq!(old.header().phase, Phase::Running(Stage::Baking));
    let members = old.members();
    assert!(Arc::ptr_eq(&members[0].plan.set, &members[1].plan.set));
    old.abort("alice", 0);
    old.step(0);
    let writes = changed(&mut old);
    assert_eq!(sets(&writes), 1, "no record had it");
    old.committed(2, CommitOutcome::Committed { pause_us: 1 }, 0);
    let writes = changed(&mut old);
    assert_eq!((writes.len(), sets(&writes)), (1, 0));
}

#[tokio::test]
async fn a_set_of_keys_that_is_missing_or_damaged_is_named() {
    let mut one = rollout("net", 2, 1);
    let key = set_key("net", one.members()[0].plan.set.digest());
    let writes = planned(&mut one, SPEC).expect("fits");
    let other = record::encode_set(&KeySet::default());
    for (change, why) in [
        (Write::Delete { key: key.clone() }, "names the set of keys"),
        (put(key.clone(), other), "its digest is"),
        (put(key.clone(), b"x".to_vec()), "is malformed"),
    ] {
        let (_folder, store) = store().await;
        write(&store, writes.clone()).await;
        write(&store, vec![change]).await;
        let loaded = load(&store).await.expect("loaded");
        let said = &loaded.unreadable[0].why;
        assert!(said.contains(why), "{said}");
    }
}

#[tokio::test]
async fn a_record_of_a_newer_version_is_left_alone_and_says_so() {
    let newer = "{\"version\":3,\"name\":{\"new\":\"form\"}}";
    for (key, value) in [
        ("header", newer),
        ("members/00000001", newer),
        ("spec", "# patchbay-spec version 3\nnew form"),
    ] {
        let (_folder, store) = store().await;
        for name in ["a", "net"] {
            write(
                &store,
                planned(&mut rollout(name, 2, 1), SPEC).expect("fits"),
            )
            .await;
        }
        let key = format!("rollouts/net/{key}");
        write(&store, vec![put(key.clone(), value.into())]).await;
        let loaded = load(&store).await.expect("loaded");
        assert_eq!(names(&loaded), ["a"]);
        let why = format!(
            "the value of the key {key} has version 3, and this program reads up to 2; start the \
             program that wrote it"
        );
        let name = "net".to_owned();
        assert_eq!(loaded.unreadable, [Unreadable { name, why }]);
    }
    for spec in ["# patchbay-spec version x\n", "# patchbay-spec version "] {
        let refused = record::decode_spec(spec.as_bytes());
        assert!(
            matches!(refused, Err(record::Unreadable::Malformed(_))),
            "{refused:?}"
        );
    }
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

/// Checks that a rollout of version 1 with a plan that no etcd takes goes on in the file that has
/// it.
#[tokio::test]
async fn a_plan_of_any_size_is_loaded_and_saved_in_the_embedded_store() {
    let (_folder, store) = store().await;
    let large = rollout("large", 1, 25_000).members()[0].plan.set.clone();
    assert!(record::encode_set(&large).len() > crate::store::MAX_TRANSACTION_BYTES);
    for (key, mut value) in fixture(VERSION_1) {
        if key == "rollouts/net/members/00000007" {
            let mut member: serde_json::Value = serde_json::from_slice(&value).expect("JSON");
            member["plan"]["inverse"] = serde_json::json!(large.inverse());
            value = member.to_string().into_bytes();
        }
        write(&store, vec![put(key, value)]).await;
    }
    let loaded = load(&store).await.expect("loaded");
    assert_eq!(loaded.unreadable, []);
    let (mut net, _) = loaded.rollouts.into_iter().next().expect("net");
    net.abort("alice", 0);
    net.step(0);
    let key = "leader".to_owned();
    let created = store.commit(Transaction::new().put(&key, "one")).await;
    let created = created.expect("written");
    let fence = crate::store::Fence { key, created };
    let saved = crate::store::commit_all(&store, &fence, &changed(&mut net)).await;
    saved.expect("saved");
    let loaded = load(&store).await.expect("loaded");
    let (again, _) = loaded
        .rollouts
        .iter()
        .find(|(one, _)| one.header().name == "net")
        .expect("net");
    assert_eq!(again.members(), net.members());
    assert_eq!(again.members()[7].plan.set.inverse(), large.inverse());
}
