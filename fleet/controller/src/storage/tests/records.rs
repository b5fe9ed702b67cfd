// SPDX-License-Identifier: Apache-2.0
//! Tests the form of the records, and that those of earlier versions are read.

use super::*;

/// The records of the first builds, of the later ones without a version, and of version 2. A
/// fixture is not changed once its version is released.
const FIRST: &str = include_str!("../fixtures/v1-first.jsonl");
const VERSION_1: &str = include_str!("../fixtures/v1.jsonl");
const VERSION_2: &str = include_str!("../fixtures/v2.jsonl");

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
