// SPDX-License-Identifier: Apache-2.0
//! Kills processes while a rollout runs. The monitors' audit logs prove which changes each guest
//! got.

use patchbay_fleet::store::{Change, Store};
use patchbay_proto::fleet::v1;

use super::fleet::{PATIENCE, ProcessFleet, Replica, spec};

/// Resumes the rollout until it is completed, as an operator does, because a guest that is not
/// yet as wanted closes a gate and pauses it.
async fn finish(replica: &Replica, name: &str) -> v1::Rollout {
    let request = v1::GetRequest {
        rollout: name.to_owned(),
    };
    let finished = async {
        loop {
            if let Ok(answer) = replica.rollouts().get(request.clone()).await {
                let rollout = answer.into_inner().rollout.expect("a rollout");
                match rollout.phase() {
                    v1::Phase::Completed => return rollout,
                    v1::Phase::Paused => {
                        let rollout = name.to_owned();
                        let _ = replica
                            .rollouts()
                            .resume(v1::ResumeRequest { rollout })
                            .await;
                    }
                    _ => {}
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let finished = tokio::time::timeout(PATIENCE, finished).await;
    finished.expect("completed in time")
}

/// Kills the leader after each stored change in turn, until a rollout ends before its leader is
/// killed.
#[tokio::test(flavor = "multi_thread")]
async fn another_replica_finishes_what_a_killed_leader_began() {
    let Some(fleet) = ProcessFleet::start(1, 2, 2, &[]).await else {
        return;
    };
    let text = spec("waves: [{size: 1}, {size: rest}]\nmax_concurrent: {count: 2}");
    let store = fleet.etcd.store();
    let mut leader = fleet.replica("replica-0", &[]);
    let mut rounds = 0;
    for death in 1.. {
        let name = format!("net-{death}");
        // Only the leader plans, so this replica leads when the next one is started.
        let digest = leader.plan(&name, &text, 4).await;
        let next = fleet.replica(&format!("replica-{death}"), &[]);
        let revision = store.range("rollouts/").await.expect("listed").revision;
        let prefix = format!("rollouts/{name}/");
        let mut changes = store.watch(&prefix, revision + 1).await.expect("watched");
        let start = v1::StartRequest {
            rollout: name.clone(),
            digest,
            ..Default::default()
        };
        let mut client = leader.rollouts();
        // The answer may never arrive.
        let started = tokio::spawn(async move { client.start(start).await.map(|_| ()) });
        let is_completed = |change: &Change| match change {
            Change::Put(entry) => {
                let text = String::from_utf8_lossy(&entry.value);
                entry.key.ends_with("/header") && text.contains("\"phase\":\"Completed\"")
            }
            Change::Deleted { .. } => false,
        };
        let mut survived = false;
        for _ in 0..death {
            let change = tokio::time::timeout(PATIENCE, changes.next()).await;
            let change = change.expect("in time").expect("watched");
            survived = change.iter().any(is_completed);
            if survived {
                break;
            }
        }
        drop(std::mem::replace(&mut leader, next));
        let _ = started.await;
        leader.wait(&name, v1::Phase::Completed).await;
        leader.undo(&name).await;
        rounds += 1;
        if survived {
            assert!(death > 3, "the rollout took {death} changes");
            break;
        }
    }
    for guest in 0..4 {
        let expected = [(0, 1), (1, 0)].repeat(rounds);
        assert_eq!(fleet.changes(guest), expected, "guest {guest}");
    }
}

/// Changes "web-1", and kills its host before the host has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_started_again_goes_on_with_the_wave() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 3, &[1]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec(
        "waves: [{size: rest}]\nmax_concurrent: {count: 1}\n\
         gates: [{max_errors: 0, on_failure: pause}]",
    );
    replica.start("net", &text, 3).await;
    let monitor = fleet.monitors[1].as_mut().expect("started");
    monitor.paused().await;
    fleet.hosts[0] = None;
    fleet.monitors[1].as_mut().expect("started").go_on();
    fleet.start_host(0);
    let rollout = finish(&replica, "net").await;
    assert_eq!(rollout.waves[0].as_wanted, 3, "{rollout:?}");
    for guest in 0..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}

/// Kills the monitors of one guest in ten while these guests are changed.
#[tokio::test(flavor = "multi_thread")]
async fn a_monitor_that_dies_does_not_hold_up_the_other_guests() {
    let Some(mut fleet) = ProcessFleet::start(1, 2, 5, &[4]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]\ngates: [{max_errors: 10, on_failure: abort}]");
    replica.start("net", &text, 10).await;
    fleet.monitors[4].as_mut().expect("started").paused().await;
    fleet.monitors[4] = None;
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    let wave = &rollout.waves[0];
    assert_eq!((wave.as_wanted, wave.not_yet), (9, 1), "{rollout:?}");
    for guest in (0..10).filter(|guest| *guest != 4) {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
    // The guest comes back unchanged, and the rollout reports it as drift.
    fleet.start_monitor(4, false);
    fleet.registered(2, 10).await;
    let drift = |action: v1::DriftAction| v1::DriftRequest {
        rollout: "net".to_owned(),
        action: action.into(),
    };
    let report = replica.rollouts().drift(drift(v1::DriftAction::Fix)).await;
    let report = report.expect("compared").into_inner();
    let found: Vec<(&str, &str)> = report
        .drifts
        .iter()
        .map(|drift| (drift.guest.as_str(), drift.left.as_str()))
        .collect();
    assert_eq!(found, [("web-4", "")], "{report:?}");
    replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(fleet.changes(4).last(), Some(&(0, 1)));
}
