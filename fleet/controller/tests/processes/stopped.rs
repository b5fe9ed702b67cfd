// SPDX-License-Identifier: Apache-2.0
//! Stops processes and lets them go on, fills etcd, and kills a controller while it writes its own
//! store.

use std::time::Duration;

use patchbay_fleet::store::{Store, StoreError, Transaction};
use patchbay_proto::fleet::v1;
use rustix::process::Signal;

use super::etcd::Etcd;
use super::fleet::{PATIENCE, ProcessFleet, spec};

/// The next leader finishes and undoes what the stopped one began. Then the stopped one wakes up,
/// with the answer of a guest and with calls that it had decided on.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_stopped_and_wakes_up_changes_nothing() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 4, &[1]).await else {
        return;
    };
    let first = fleet.replica("first", &[]);
    let text = spec("waves: [{size: rest}]\nmax_concurrent: {count: 1}");
    first.start("net", &text, 4).await;
    fleet.monitors[1].as_mut().expect("started").paused().await;
    first.signal(Signal::STOP);
    let next = fleet.replica("next", &[]);
    next.logged(" leads").await;
    fleet.monitors[1].as_mut().expect("started").go_on();
    next.wait("net", v1::Phase::Completed).await;
    let rollout = "net".to_owned();
    let undo = v1::UndoRequest { rollout };
    next.rollouts().undo(undo).await.expect("legal");
    let monitor = fleet.monitors[1].as_mut().expect("started");
    monitor.paused().await;
    monitor.go_on();
    next.wait("net", v1::Phase::Undone).await;
    first.signal(Signal::CONT);
    first.logged("this replica does not lead").await;
    for guest in 0..4 {
        assert_eq!(fleet.changes(guest), [(0, 1), (1, 0)], "guest {guest}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_stands_while_etcd_is_stopped_and_goes_on_after_it() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 3, &[1]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]\nmax_concurrent: {count: 1}");
    replica.start("net", &text, 3).await;
    fleet.monitors[1].as_mut().expect("started").paused().await;
    fleet.etcd.signal(0, Signal::STOP);
    replica.logged("this replica does not lead").await;
    fleet.monitors[1].as_mut().expect("started").go_on();
    fleet.flip_beta(0).await.expect("the host needs no etcd");
    assert_eq!(fleet.changes(2), [], "nothing is begun that is not stored");
    fleet.etcd.signal(0, Signal::CONT);
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(rollout.waves[0].as_wanted, 3, "{rollout:?}");
    for guest in 1..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}

/// Fills etcd while a guest is changed. The next guest is not begun until there is room.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_waits_until_etcd_has_room() {
    const QUOTA: u64 = 8 << 20;
    let Some(etcd) = Etcd::start_small(QUOTA).await else {
        return;
    };
    let mut fleet = ProcessFleet::on(etcd, &[], 1, 3, &[1]).await;
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]\nmax_concurrent: {count: 1}");
    replica.start("net", &text, 3).await;
    fleet.monitors[1].as_mut().expect("started").paused().await;
    let store = fleet.etcd.store();
    let error = loop {
        let fill = Transaction::new().put("filling", vec![1; 1 << 20]);
        if let Err(error) = store.commit(fill).await {
            break error;
        }
    };
    assert!(error.to_string().contains("space"), "{error}");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    fleet.monitors[1].as_mut().expect("started").go_on();
    replica.logged("space").await;
    assert_eq!(fleet.changes(2), [], "nothing is begun that is not stored");
    let latest = store.get("filling").await.expect("readable");
    let revision = latest.expect("stored").modified;
    store.compact(revision).await.expect("compacted");
    fleet.etcd.ctl("defrag");
    fleet.etcd.ctl("alarm disarm");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    assert_eq!(rollout.waves[0].as_wanted, 3, "{rollout:?}");
    for guest in 0..3 {
        assert_eq!(fleet.changes(guest), [(0, 1)], "guest {guest}");
    }
}

/// Kills a standalone controller at times that are a little later in each round, so that some kills
/// are in the middle of a write. Each round ends with the guests as they were.
#[tokio::test(flavor = "multi_thread")]
async fn a_standalone_controller_that_is_killed_in_a_write_loses_nothing() {
    const ROUNDS: u32 = 16;
    let Some(fleet) = ProcessFleet::start(1, 1, 6, &[]).await else {
        return;
    };
    let text = spec("waves: [{size: 1}, {size: rest}]\nmax_concurrent: {count: 2}");
    let mut controller = fleet.standalone();
    for round in 0..ROUNDS {
        let name = format!("net-{round}");
        let digest = controller.plan(&name, &text, 6).await;
        let mut client = controller.rollouts();
        let start = v1::StartRequest {
            rollout: name.clone(),
            digest,
            ..Default::default()
        };
        let started = tokio::spawn(async move { client.start(start).await.map(|_| ()) });
        tokio::time::sleep(Duration::from_millis(3) * round).await;
        drop(controller);
        let is_started = started.await.expect("it does not panic").is_ok();
        controller = fleet.standalone();
        let found = async {
            loop {
                let rollout = name.clone();
                let found = controller.rollouts().get(v1::GetRequest { rollout }).await;
                if let Ok(found) = found {
                    return found.into_inner().rollout.expect("a rollout");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        let found = found.expect("a plan that was answered is stored");
        let is_planned = found.phase() == v1::Phase::Planned;
        assert!(!is_planned || !is_started, "an answered start is lost");
        if is_planned {
            let started = controller.start_planned(&name, found.digest).await;
            started.expect("started");
        }
        controller.wait(&name, v1::Phase::Completed).await;
        controller.undo(&name).await;
    }
    for guest in 0..6 {
        let expected = [(0, 1), (1, 0)].repeat(ROUNDS as usize);
        assert_eq!(fleet.changes(guest), expected, "guest {guest}");
    }
}
