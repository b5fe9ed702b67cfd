// SPDX-License-Identifier: Apache-2.0
//! Tests guests that differ from the state in which a rollout left them.

use patchbay_fleet::drift::{Action, Cause, Report, drift};
use patchbay_fleet::rollout::{Member, Phase, Stage};
use patchbay_fleet::runner::{Command, Running, now};
use patchbay_proto::v1;

use super::support::{Fleet, PATIENCE, Replica, is_over, spec, tell, wait_for};

async fn compare(replica: &Replica, running: &Running, action: Action) -> Report {
    let leads = replica.lead().await;
    let authority = replica.controller.authority();
    let report = drift(leads.hosts(), authority, running, action, "alice").await;
    report.expect("it runs")
}

fn found(report: &Report) -> Vec<(&str, Cause, Option<&str>)> {
    let drifts = report.drifts.iter();
    let found = drifts.map(|drift| (drift.guest.as_str(), drift.cause, drift.left.as_deref()));
    found.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_drift_is_told_apart_and_only_a_key_is_fixed() {
    let fleet = Fleet::start(1, 4).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!((found(&report), report.compared), (vec![], 4));

    // The guest drops the reference of the rollout.
    fleet.guests[0].set_count("alpha", 0);
    let site = fleet.guests[1].sites("alpha")[0];
    fleet.guests[1].write(site, &[0xcc]);
    fleet.take_away(2);
    let causes = [Cause::Key, Cause::Bytes, Cause::Unreachable];
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!(report.compared, 4);
    let guests = ["web-0", "web-1", "web-2"];
    for ((drift, cause), guest) in report.drifts.iter().zip(causes).zip(guests) {
        assert_eq!((drift.guest.as_str(), drift.cause), (guest, cause));
    }
    assert_eq!(report.drifts.len(), 3, "{report:?}");
    assert!(report.drifts[1].actual.starts_with("cc"), "{report:?}");
    // What the report says of the guest that does not answer, the rollout says too.
    let is_unknown = |_| running.rollout().members()[2].is_unknown();
    wait_for(&running, is_unknown).await;

    let report = compare(&replica, &running, Action::Fix).await;
    let bytes = "a flip does not write over foreign bytes; boot the guest again";
    let left = [None, Some(bytes), Some("its state is unknown")];
    for (drift, left) in report.drifts.iter().zip(left) {
        assert_eq!(drift.left.as_deref(), left);
    }
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1, 1, 1, 1]);
    let report = compare(&replica, &running, Action::Report).await;
    let causes: Vec<Cause> = report.drifts.iter().map(|drift| drift.cause).collect();
    assert_eq!(causes, [Cause::Bytes, Cause::Unreachable]);

    // The kernel withdraws its registration, as before a kexec.
    assert_eq!(fleet.guests[3].unregister(), 0);
    let report = compare(&replica, &running, Action::Report).await;
    let withdrawn = report.drifts.iter().find(|drift| drift.guest == "web-3");
    let withdrawn = withdrawn.map(|drift| (drift.cause, drift.actual.as_str()));
    let why = "its kernel is not known, or has panicked";
    assert_eq!(withdrawn, Some((Cause::Unreachable, why)));
}

/// Checks that `--fix` cuts its waves as the spec does, and that a report counts the guests that
/// wait in them.
#[tokio::test(flavor = "multi_thread")]
async fn drift_is_fixed_in_waves_and_a_report_counts_the_guests_that_wait() {
    let fleet = Fleet::start(1, 4).await;
    let replica = fleet.replica("one");
    let waves = "waves: [{name: canary, size: 1, bake: 1h}, {name: all, size: rest}]";
    let running = replica.start("net", &spec(waves)).await;
    let baking = |phase| phase == Phase::Running(Stage::Baking);
    wait_for(&running, baking).await;
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!((report.compared, report.waiting.len()), (1, 0));
    tell(&running, Command::Promote).await;
    wait_for(&running, is_over).await;
    for guest in 0..3 {
        fleet.guests[guest].set_count("alpha", 0);
    }
    let report = compare(&replica, &running, Action::Fix).await;
    assert_eq!((report.drifts.len(), report.waiting.len()), (3, 0));
    wait_for(&running, baking).await;
    assert_eq!(fleet.counts("alpha"), [1, 0, 0, 1], "the first wave bakes");
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!((found(&report), report.compared), (vec![], 2));
    assert_eq!(report.waiting, ["web-1", "web-2"]);
    let waves = running.rollout().header().waves.clone();
    let waves: Vec<(&str, usize, bool)> = waves
        .iter()
        .map(|wave| (wave.name.as_str(), wave.count, wave.is_added))
        .collect();
    let expected = [
        ("canary", 1, false),
        ("all", 3, false),
        ("fix-3/canary", 1, true),
        ("fix-3/all", 2, true),
    ];
    assert_eq!(waves, expected);
    // The guests that wait for their wave stay in it.
    let report = compare(&replica, &running, Action::Fix).await;
    assert_eq!((report.drifts.len(), report.waiting.len()), (0, 2));
    tell(&running, Command::Promote).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1; 4]);
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!((report.compared, report.waiting.len()), (4, 0));
}

/// Checks that a guest is fixed whose service has seen a later generation than the one that the
/// rollout had when the guest was compared.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_has_seen_a_later_generation_is_fixed() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let running = replica.start("net", &spec("waves: [{size: rest}]")).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    let leads = replica.lead().await;
    let host = leads.hosts().get("host-0").expect("known");
    let request = v1::SetClaimsRequest {
        guest: "web-0".to_owned(),
        owner: running.asks.owner.clone(),
        generation: 7,
        ..v1::SetClaimsRequest::default()
    };
    let ended = host.set_claims(|| request, "alice").await;
    ended.expect("ended");
    assert_eq!(fleet.counts("alpha"), [0]);
    let report = compare(&replica, &running, Action::Fix).await;
    assert_eq!(found(&report), [("web-0", Cause::Key, None)]);
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1]);
}

/// Checks a rollout whose plan is older than the time for which its claims last.
#[tokio::test(flavor = "multi_thread")]
async fn claims_expire_by_the_time_at_which_they_were_made() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]\nttl: 1h");
    let running = replica.start("net", &text).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    drop(running);
    drop(replica);
    let key = "rollouts/net/header";
    let header = fleet.store.get(key).await.expect("read").expect("planned");
    let mut header: serde_json::Value = serde_json::from_slice(&header.value).expect("JSON");
    assert!(header["created"].as_u64().is_some(), "{header}");
    header["created"] = 1.into();
    fleet.put(key, &header.to_string()).await;
    let replica = fleet.replica("two");
    let running = replica.lead().await.rollout("net").expect("stored");
    fleet.guests[0].set_count("alpha", 0);
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!(found(&report), [("web-0", Cause::Key, None)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn references_that_end_with_their_time_are_no_drift() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]\nttl: 1s");
    let running = replica.start("net", &text).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    let leads = replica.lead().await;
    let host = leads.hosts().get("host-0").expect("known");
    let expired = async {
        for guest in ["web-0", "web-1"] {
            let owner = &running.asks.owner;
            while host.not_made(guest, owner).await.expect("it answers").total > 0 {}
        }
        // The controller's time begins with the answer, so it ends after the guest's.
        let has_expired = |member: &Member| member.has_expired(now());
        while !running.rollout().members().iter().all(has_expired) {
            tokio::task::yield_now().await;
        }
    };
    let expired = tokio::time::timeout(PATIENCE, expired).await;
    expired.expect("the references are released");
    assert_eq!(fleet.counts("alpha"), [0, 0]);
    let report = compare(&replica, &running, Action::Report).await;
    assert_eq!((found(&report), report.compared), (vec![], 2));
}
