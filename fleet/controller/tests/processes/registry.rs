// SPDX-License-Identifier: Apache-2.0
//! Tests hosts and guests that join, leave and move.

use patchbay_fleet::store::Store;
use patchbay_fleet::store::registry::HostRecord;
use patchbay_proto::fleet::v1;
use patchbay_proto::v1 as guest;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;

use super::fleet::{PATIENCE, ProcessFleet, Replica, channel, eventually, spec};

#[tokio::test(flavor = "multi_thread")]
async fn of_two_hosts_with_one_name_the_second_waits_for_the_first_to_go() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let store = fleet.etcd.store();
    let key = "registry/host-0/host";
    let first = store.get(key).await.expect("read").expect("registered");
    let mut changes = store.watch(key, first.modified + 1).await.expect("watched");
    std::fs::create_dir(fleet.path("run-1")).expect("created");
    let _second = fleet.host_process(1, "host-0");
    fleet.hosts[0] = None;
    let next = async {
        loop {
            for change in changes.next().await.expect("watched") {
                if let patchbay_fleet::store::Change::Put(entry) = change {
                    return entry;
                }
            }
        }
    };
    let next = tokio::time::timeout(PATIENCE, next).await.expect("in time");
    let record: HostRecord = serde_json::from_slice(&next.value).expect("a host");
    assert!(record.socket.ends_with("host-1.sock"), "{record:?}");
    assert!(
        next.created > first.created,
        "not while the first one was there"
    );
    fleet.registered(1, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_changes_its_host_is_found_by_its_boot() {
    let Some(mut fleet) = ProcessFleet::start(1, 2, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]");
    let digest = replica.plan("net", &text, 2).await;
    fleet.monitors[1] = None;
    fleet.registered(2, 1).await;
    fleet.monitors[1] = Some(fleet.monitor_process(1, 0, false));
    fleet.registered(2, 2).await;
    let started = replica.start_planned("net", digest).await;
    started.expect("started");
    let rollout = replica.wait("net", v1::Phase::Completed).await;
    let moved = rollout
        .guests
        .iter()
        .find(|guest| guest.guest == "web-1")
        .expect("a member");
    assert_eq!(moved.phase(), v1::GuestPhase::AsWanted, "{moved:?}");
    assert_eq!(moved.host, "host-0");
    assert_eq!(fleet.changes(1), [(0, 1)]);
    let mut notes = rollout.timeline.iter();
    let is_noted = notes.any(|entry| entry.text.contains("web-1 moved from host-1 to host-0"));
    assert!(is_noted, "{rollout:?}");
}

/// Checks a host that dies after its guest was changed. Its guest must not be shown as wanted.
#[tokio::test(flavor = "multi_thread")]
async fn the_guests_of_a_host_that_has_died_are_unknown_until_it_is_back() {
    let Some(mut fleet) = ProcessFleet::start(1, 2, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    replica
        .start("net", &spec("waves: [{size: rest}]"), 2)
        .await;
    replica.wait("net", v1::Phase::Completed).await;
    fleet.hosts[1] = None;
    let rollout = unknown(&replica, 1).await;
    assert_eq!(rollout.waves[0].as_wanted, 1, "{rollout:?}");
    let mut guests = rollout.guests.iter();
    let guest = guests.find(|guest| guest.guest == "web-1");
    let guest = guest.expect("a member");
    assert_eq!(guest.phase(), v1::GuestPhase::Unknown, "{guest:?}");
    assert!(guest.since.is_some(), "{guest:?}");
    fleet.start_host(1);
    let rollout = unknown(&replica, 0).await;
    assert_eq!(rollout.waves[0].as_wanted, 2, "{rollout:?}");
    assert_eq!(fleet.changes(1), [(0, 1)]);
}

/// Waits until this many guests of the first wave of "net" are unknown.
async fn unknown(replica: &Replica, guests: u32) -> v1::Rollout {
    let wanted = async || {
        let rollout = replica.wait("net", v1::Phase::Completed).await;
        (rollout.waves[0].unknown == guests).then_some(rollout)
    };
    eventually(&format!("{guests} guests are unknown"), wanted).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_joins_late_is_changed_if_the_spec_says_so() {
    let Some(mut fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let wave = "waves: [{size: rest}]";
    let text = spec(&format!("{wave}\nlate_guests: change"));
    replica.start("net", &text, 1).await;
    replica.wait("net", v1::Phase::Completed).await;
    fleet.monitors.push(None);
    fleet.monitors[1] = Some(fleet.monitor_process(1, 0, false));
    let joined = async || {
        let rollout = replica.wait("net", v1::Phase::Completed).await;
        (rollout.waves.len() == 2).then_some(rollout)
    };
    let joined = eventually("there is a second wave", joined).await;
    assert_eq!(joined.waves[1].as_wanted, 1, "{joined:?}");
    assert_eq!(fleet.changes(1), [(0, 1)]);
    // Undo releases both waves.
    replica.undo("net").await;
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0)]);
    assert_eq!(fleet.changes(1), [(0, 1), (1, 0)]);
}

/// Lets another owner turn off the key that a rollout has turned on. The host registers that the
/// guest's keys have changed, so the controller does not wait for its next query.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_key_another_owner_changes_is_soon_not_as_wanted() {
    let Some(fleet) = ProcessFleet::start(1, 1, 1, &[]).await else {
        return;
    };
    let replica = fleet.replica("replica", &[]);
    let text = spec("waves: [{size: rest}]").replace("held", "on");
    replica.start("net", &text, 1).await;
    replica.wait("net", v1::Phase::Completed).await;
    let mut host = StaticKeysServiceClient::new(channel(&fleet.path("host-0.sock")));
    let request = |generation, claims| guest::SetClaimsRequest {
        guest: "web-0".to_owned(),
        owner: "another".to_owned(),
        generation,
        claims,
        ..Default::default()
    };
    let off = guest::KeyClaim {
        key: "alpha".to_owned(),
        want: guest::ClaimWant::Off.into(),
        patterns: vec![],
    };
    // The controller's own queries are 300 s apart, so at most one of them falls into the waits.
    for generation in [1, 3] {
        let made = host
            .set_claims(request(generation, vec![off.clone()]))
            .await;
        let made = made.expect("answered").into_inner();
        assert_eq!(made.results[0].state(), guest::ClaimState::Made, "{made:?}");
        let why = phase(&replica, v1::GuestPhase::NotYet).await.message;
        assert!(why.contains("the claim of another"), "{why}");
        let ended = host.set_claims(request(generation + 1, vec![])).await;
        ended.expect("ended");
        phase(&replica, v1::GuestPhase::AsWanted).await;
    }
    assert_eq!(fleet.changes(0), [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1)]);
}

/// Waits until the guest of "net" is in this phase.
async fn phase(replica: &Replica, expected: v1::GuestPhase) -> v1::RolloutGuest {
    let reached = async || {
        let rollout = replica.wait("net", v1::Phase::Completed).await;
        let found = rollout.guests.into_iter().next().expect("a member");
        (found.phase() == expected).then_some(found)
    };
    eventually(&format!("the guest is {expected:?}"), reached).await
}
