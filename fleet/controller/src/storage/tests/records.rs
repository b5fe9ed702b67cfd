// SPDX-License-Identifier: Apache-2.0
//! Tests the form of the records, and that those of earlier versions are left alone.

use super::*;
use crate::rollout::Record;

/// The records of the first builds, of the later ones without a version, and of each version since.
/// A fixture is not changed once its version is released.
const FIRST: &str = include_str!("../fixtures/v1-first.jsonl");
const VERSION_1: &str = include_str!("../fixtures/v1.jsonl");
const VERSION_2: &str = include_str!("../fixtures/v2.jsonl");
const VERSION_3: &str = include_str!("../fixtures/v3.jsonl");
const VERSION_4: &str = include_str!("../fixtures/v4.jsonl");

async fn load_fixture(text: &str) -> Loaded {
    let (_folder, store) = store().await;
    let records = fixture(text).into_iter();
    write(
        &store,
        records.map(|(key, value)| put(key, value)).collect(),
    )
    .await;
    load(&store, &RecordKeys::default()).await.expect("loaded")
}

/// The field `run` of the first of [`samples`].
const RUN: &str = "89abcdef01234567";

/// Returns rollouts that have every state and setting that the present version can store. The
/// first has this field `run`.
fn samples(run: &str) -> Vec<Rollout> {
    let why = || "GUEST_BUSY: try again".to_owned();
    let not_yet = |failure| State::NotYet {
        failure,
        why: why(),
    };
    let states = [
        State::Skipped {
            why: "it is as the spec wants it".to_owned(),
        },
        State::Pending,
        State::Claiming { again: false },
        State::Claiming { again: true },
        State::AsWanted { pause_us: 41 },
        not_yet(Failure::Refused),
        not_yet(Failure::Busy),
        not_yet(Failure::Unknown),
        not_yet(Failure::Ineffective),
        not_yet(Failure::NoRecord),
        State::Releasing { why: why() },
        State::Released { void: true },
        State::Adopted,
        State::Forgotten,
        State::Superseded,
    ];
    let mut members = rollout("net", states.len(), 2).members().to_vec();
    let tracepoint = Tracepoint {
        event: "sched:sched_switch".to_owned(),
        key: "__tracepoint_sched_switch".to_owned(),
    };
    let claims = members[0].plan.set.claims().to_vec();
    let set = Arc::new(KeySet::new(claims, vec![tracepoint]));
    for (member, state) in members.iter_mut().zip(states) {
        member.state = state;
        member.domain = "a".to_owned();
        member.plan = Plan {
            keys: 2,
            sites: 5,
            predicted_pause_us: 90,
            left_out: vec![LeftOut {
                reason: "KEY_GUARDED".to_owned(),
                count: 1,
                names: vec!["gamma".to_owned()],
            }],
            set: Arc::clone(&set),
        };
        member.generation = 4;
        member.boot = "0123456789abcdef".to_owned();
        member.is_confirmed = true;
        member.record = Some(Record {
            ledger: "89abcdef".to_owned(),
            generation: 3,
        });
        member.expires = Some(1_800_000_500_000);
    }
    members[1].health = Some(Health {
        boot_id: "b-1".to_owned(),
        kernel_warnings: 3,
    });
    let kinds = [
        WaveGateKind::Errors {
            max_percent: 2,
            of: ErrorsOf::Rollout,
        },
        WaveGateKind::PauseP99 { budget_us: 500 },
        WaveGateKind::Command {
            argv: vec!["/bin/true".to_owned()],
            timeout_ms: 30_000,
        },
        WaveGateKind::AgentHealth {
            limits: AgentLimits {
                new_warnings: Some(0),
                pressure: [("io".to_owned(), 40)].into(),
                unhealthy_percent: 5,
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
        interval_ms: 30_000,
        patience_ms: 900_000,
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
                is_added: false,
                is_taken_back: false,
                decided_by: String::new(),
            },
            Wave {
                name: "2".to_owned(),
                first: 4,
                count: 8,
                bake_ms: 0,
                bakes_until: None,
                is_added: true,
                is_taken_back: false,
                decided_by: String::new(),
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
            min_success: 3,
            after_reboot: AfterReboot::Leave,
            allow_guarded: false,
        },
        approvals: vec!["uid:0".to_owned(), "spiffe://example.org/alice".to_owned()],
        timeline: vec![TimelineEntry {
            time: 1_799_999_000_000,
            principal: "uid:0".to_owned(),
            text: "planned".to_owned(),
            ..TimelineEntry::default()
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
        ("p-2", Phase::Running(Stage::Changing)),
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
    let mut expected = fixture(VERSION_4);
    expected.sort();
    assert_eq!(records, expected);
    assert_same(&load_fixture(VERSION_4).await.rollouts, &samples(RUN));
}

/// Checks that rollouts of the version before are continued. That version lacks two states.
#[tokio::test]
async fn rollouts_of_the_version_before_are_read() {
    let mut expected = samples(RUN);
    for one in &mut expected {
        let (mut header, mut members) = (one.header().clone(), one.members().to_vec());
        members.retain(|member| !member.state.is_ineffective());
        let lacking = header.members - members.len();
        header.members = members.len();
        for wave in &mut header.waves {
            wave.count = wave.count.min(members.len().saturating_sub(wave.first));
        }
        assert!(lacking <= 2);
        *one = Rollout::stored(header, members, BTreeSet::new()).expect("as stored");
    }
    let found = load_fixture(VERSION_3).await.rollouts;
    assert_eq!(found.len(), expected.len());
    for ((found, _), expected) in found.iter().zip(&expected) {
        let states = |rollout: &Rollout| -> Vec<State> {
            let members = rollout.members().iter();
            members.map(|member| member.state.clone()).collect()
        };
        assert_eq!(states(found), states(expected));
    }
}

/// Checks that a rollout of a version before claims is not changed, and that it keeps its keys
/// unless it is over.
#[tokio::test]
async fn rollouts_of_versions_before_claims_are_out_of_service() {
    for (text, version) in [(FIRST, 1), (VERSION_1, 1), (VERSION_2, 2)] {
        let loaded = load_fixture(text).await;
        assert_eq!(names(&loaded), Vec::<&str>::new());
        assert!(loaded.leftovers.is_empty());
        let net = loaded.unreadable.iter().find(|one| one.name == "net");
        let why = &net.expect("it is named").why;
        let expected = format!("header has version {version}, which does not use claims");
        assert!(why.contains(&expected), "{why}");
        assert!(!loaded.over.contains("net"), "it was running");
    }
    let loaded = load_fixture(VERSION_2).await;
    let over: Vec<&str> = loaded.over.iter().map(String::as_str).collect();
    assert_eq!(over, ["p-5", "sets"]);
}

/// Checks that guests with equal sets of keys share one record and one value in memory.
#[tokio::test]
async fn a_set_of_keys_is_stored_once() {
    let sets = |writes: &[Write]| {
        let is_set = |write: &&Write| format!("{write:?}").contains("/sets/");
        writes.iter().filter(is_set).count()
    };
    let mut one = rollout("net", 200, 1000);
    let writes = planned(&mut one, SPEC).expect("fits");
    assert_eq!((writes.len(), sets(&writes)), (203, 1));
    let loaded = load_fixture(VERSION_3).await;
    let (mut old, _) = loaded.rollouts.into_iter().next().expect("net");
    let members = old.members();
    assert!(Arc::ptr_eq(&members[0].plan.set, &members[1].plan.set));
    old.abort("alice", 0);
    old.step(0);
    let writes = changed(&mut old);
    assert!(!writes.is_empty());
    assert_eq!(sets(&writes), 0, "a record has it");
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
        let loaded = load(&store, &RecordKeys::default()).await.expect("loaded");
        let said = &loaded.unreadable[0].why;
        assert!(said.contains(why), "{said}");
    }
}

#[tokio::test]
async fn a_record_of_a_newer_version_is_left_alone_and_says_so() {
    let newer = "{\"version\":5,\"name\":{\"new\":\"form\"}}";
    for (key, value) in [
        ("header", newer),
        ("members/00000001", newer),
        ("spec", "# patchbay-spec version 5\nnew form"),
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
        let loaded = load(&store, &RecordKeys::default()).await.expect("loaded");
        assert_eq!(names(&loaded), ["a"]);
        let why = format!(
            "the value of the key {key} has version 5, and this program reads up to 4; start the \
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

/// Checks the fields that records of earlier builds of this version do not have.
#[test]
fn a_header_keeps_who_decided() {
    let mut header = rollout("net", 2, 1).header().clone();
    let read: Header = record::decode(&record::encode(&header)).expect("of this version");
    assert_eq!(read, header);
    header.started_by = "alice".to_owned();
    header.ended_by = "bob".to_owned();
    header.waves[0].decided_by = "carol".to_owned();
    let read: Header = record::decode(&record::encode(&header)).expect("of this version");
    assert_eq!(read, header);
}

/// Checks that the next leader knows since when a guest does not answer.
#[test]
fn a_member_keeps_since_when_it_is_unknown() {
    let mut member = rollout("net", 1, 1).members()[0].clone();
    member.state = State::AsWanted { pause_us: 41 };
    member.since = Some(3000);
    let mut sets = KeySets::default();
    sets.shared(Arc::clone(&member.plan.set));
    let read = record::decode_member(&record::encode_member(&member), &sets);
    assert!(read.as_ref().is_ok_and(Member::is_unknown), "{read:?}");
    assert_eq!(read, Ok(member));
}
