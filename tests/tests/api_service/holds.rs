// SPDX-License-Identifier: Apache-2.0
//! Tests the holders of keys, and the release of expired holds.

use std::time::{Duration, Instant};

use patchbay_guest::testing::{Gate, TestKey};
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::keys::{KeyUpdate, UpdateRequest};
use static_keys::Op;
use tonic::Code;

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

fn with_ttl(name: &str, op: KeyOp, seconds: i64) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        ttl: Some(prost_types::Duration { seconds, nanos: 0 }),
        reason: "for a while".into(),
        ..request(&[(name, op)])
    }
}

async fn later(served: &Served, seconds: u64) {
    served.clock.advance(Duration::from_secs(seconds));
    served.keys.tick().await.expect("the executor runs");
}

#[tokio::test]
async fn holds_tell_owner_reason_and_references() {
    let served = Served::start().await;
    let mut update = request(&[("alpha", KeyOp::Inc), ("alpha", KeyOp::Inc)]);
    update.reason = "incident 7".into();
    served.update(update).await.expect("a ref key");
    let holds = served.holds().await;
    assert_eq!(holds.len(), 1);
    let uid = rustix::process::getuid().as_raw();
    assert_eq!((holds[0].key.as_str(), holds[0].references), ("alpha", 2));
    assert_eq!(
        (holds[0].holder.clone(), holds[0].reason.as_str()),
        (format!("uid:{uid}"), "incident 7")
    );
    assert!(holds[0].since.is_some() && holds[0].expires_at.is_none());
    assert_eq!(
        served.get("alpha").await.expect("exists").held_references,
        2
    );
    let elsewhere = v1::ListHoldsRequest {
        patterns: vec!["beta".into()],
        ..Default::default()
    };
    assert!(
        served
            .client()
            .list_holds(elsewhere)
            .await
            .expect("fine")
            .into_inner()
            .holds
            .is_empty()
    );
}

#[tokio::test]
async fn the_guests_own_references_are_dropped_by_force_alone() {
    let served = Served::start().await;
    served.guest.set_count("alpha", 2);
    let (message, _) = assert_refused(
        served.op("alpha", KeyOp::Dec).await,
        Code::FailedPrecondition,
        "NOT_HOLDER",
    );
    assert!(message.contains("force"), "{message}");
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    served
        .op("alpha", KeyOp::Dec)
        .await
        .expect("the one just taken");
    assert_refused(
        served.op("alpha", KeyOp::Dec).await,
        Code::FailedPrecondition,
        "NOT_HOLDER",
    );
    let mut forced = request(&[("alpha", KeyOp::Dec)]);
    forced.force = true;
    served.update(forced).await.expect("forced");
    assert_eq!(served.guest.count("alpha"), 1);
}

#[tokio::test]
async fn enabling_what_is_on_takes_nothing() {
    let served = Served::start().await;
    served.guest.set_count("alpha", 1);
    served
        .op("alpha", KeyOp::Enable)
        .await
        .expect("nothing to do");
    assert!(served.holds().await.is_empty());
    assert_refused(
        served.op("alpha", KeyOp::Disable).await,
        Code::FailedPrecondition,
        "NOT_HOLDER",
    );
}

#[tokio::test]
async fn an_expired_hold_is_released_by_the_service() {
    let served = Served::start().await;
    served
        .update(with_ttl("beta", KeyOp::Enable, 60))
        .await
        .expect("a ref key");
    assert!(served.holds().await[0].expires_at.is_some());
    later(&served, 59).await;
    assert!(served.guest.jumps("beta"));
    later(&served, 1).await;
    assert!(!served.guest.jumps("beta"));
    assert!(served.holds().await.is_empty());
    let last = served
        .audit()
        .into_iter()
        .rev()
        .find(|line| line["event"] == "intent")
        .expect("told");
    assert_eq!(
        (&last["owner"], &last["updates"][0]["key"]),
        (&"monitor".into(), &"beta".into())
    );
}

#[tokio::test]
async fn only_the_expired_references_are_released() {
    let served = Served::start().await;
    served.op("alpha", KeyOp::Inc).await.expect("for good");
    served
        .update(with_ttl("alpha", KeyOp::Inc, 10))
        .await
        .expect("for 10 s");
    served
        .update(with_ttl("alpha", KeyOp::Inc, 20))
        .await
        .expect("for 20 s");
    for (seconds, left) in [(10, 2), (10, 1), (1000, 1)] {
        later(&served, seconds).await;
        assert_eq!(served.guest.count("alpha"), left);
    }
    assert_eq!(served.holds().await.len(), 1);
}

#[tokio::test]
async fn a_drop_takes_the_reference_that_expires_first() {
    let served = Served::start().await;
    served.op("alpha", KeyOp::Inc).await.expect("for good");
    served
        .update(with_ttl("alpha", KeyOp::Inc, 10))
        .await
        .expect("for 10 s");
    served.op("alpha", KeyOp::Dec).await.expect("own");
    later(&served, 10).await;
    assert_eq!(served.guest.count("alpha"), 1);
}

#[tokio::test]
async fn a_fired_tracepoint_is_parked_when_it_expires() {
    let served = Served::start().await;
    served
        .update(with_ttl("sched_switch", KeyOp::Enable, 5))
        .await
        .expect("a probe is attached");
    later(&served, 5).await;
    assert!(!served.guest.jumps("sched_switch"));
}

/// Checks that a hold on a tracepoint's key ends when the guest detaches the probes that existed
/// when the hold was taken. The reference for later probes belongs to the guest, and the expiry of
/// the hold does not drop it.
#[tokio::test]
async fn a_hold_on_a_tracepoint_ends_with_the_probes_that_it_was_taken_with() {
    let served = Served::start().await;
    served
        .update(with_ttl("sched_switch", KeyOp::Enable, 5))
        .await
        .expect("a probe is attached");
    served.guest.set_probes("sched_switch", &[]);
    served.guest.set_probes("sched_switch", &[2]);
    assert_refused(
        served.op("sched_switch", KeyOp::Disable).await,
        Code::FailedPrecondition,
        "NOT_HOLDER",
    );
    later(&served, 5).await;
    assert!(
        served.guest.jumps("sched_switch"),
        "the next one is silenced"
    );
    assert!(served.holds().await.is_empty());
    // With `force`, the client can disable the key all the same.
    let mut forced = request(&[("sched_switch", KeyOp::Disable)]);
    forced.force = true;
    served.update(forced).await.expect("parked by force");
}

#[tokio::test]
async fn an_expired_hold_waits_for_a_busy_guest() {
    let served = Served::start().await;
    served
        .update(with_ttl("alpha", KeyOp::Inc, 5))
        .await
        .expect("a ref key");
    served.guest.set_gate(Gate::JumpLabelMutex, 0x1000);
    later(&served, 5).await;
    assert_eq!(served.guest.count("alpha"), 1);
    served.guest.set_gate(Gate::JumpLabelMutex, 0);
    later(&served, 1).await;
    assert_eq!(served.guest.count("alpha"), 0);
}

/// Checks that the host does not drop a reference that the guest has already dropped, because the
/// guest would then warn.
#[tokio::test]
async fn what_the_guest_dropped_itself_is_not_given_back_again() {
    let served = Served::start().await;
    served
        .update(with_ttl("alpha", KeyOp::Inc, 5))
        .await
        .expect("a ref key");
    served.guest.set_count("alpha", 0);
    later(&served, 5).await;
    assert_eq!(served.guest.count("alpha"), 0);
    assert!(served.holds().await.is_empty());
    // A new reference of the guest does not make the hold valid again.
    served.guest.set_count("alpha", 1);
    later(&served, 100).await;
    assert_eq!(served.guest.count("alpha"), 1);
}

#[tokio::test]
async fn a_new_registration_voids_the_holds() {
    let served = Served::start().await;
    served
        .update(with_ttl("alpha", KeyOp::Inc, 5))
        .await
        .expect("a ref key");
    let rebooted: Vec<_> = every_kind();
    assert_eq!(served.guest.register(&rebooted), 0);
    assert!(served.holds().await.is_empty());
    served.guest.set_count("alpha", 1);
    later(&served, 5).await;
    assert_eq!(
        served.guest.count("alpha"),
        1,
        "the new kernel's own reference"
    );
}

/// Checks that a hold stays when its client's connection ends, and then expires in time.
#[tokio::test]
async fn holds_outlive_their_clients_and_expire_all_the_same() {
    let served = Served::start().await;
    let channel = super::support::connect(&served.socket()).await;
    let mut other = v1::static_keys_service_client::StaticKeysServiceClient::new(channel);
    other
        .update_static_keys(with_ttl("alpha", KeyOp::Inc, 5))
        .await
        .expect("a ref key");
    drop(other);
    assert_eq!(served.holds().await.len(), 1);
    later(&served, 5).await;
    assert_eq!(served.guest.count("alpha"), 0);
}

/// Checks that references that were taken in one pause are released in one pause, with one intent
/// in the audit log.
#[tokio::test]
async fn holds_that_expire_together_are_given_back_together() {
    const KEYS: usize = 4000;
    let names: Vec<String> = (0..KEYS).map(|number| format!("key{number}")).collect();
    let keys = names.iter().map(|name| TestKey::new(name, 2)).collect();
    let served = Served::with(Setup {
        keys: Some(keys),
        ..Setup::default()
    })
    .await;
    let updates: Vec<_> = names.iter().map(|name| (&**name, KeyOp::Enable)).collect();
    let mut update = request(&updates);
    update.ttl = Some(prost_types::Duration {
        seconds: 5,
        nanos: 0,
    });
    served.update(update).await.expect("ref keys");
    assert_eq!((served.guest.pauses(), served.audit().len()), (1, 2));
    later(&served, 5).await;
    assert!(names.iter().all(|name| !served.guest.jumps(name)));
    assert!(served.holds().await.is_empty());
    assert_eq!((served.guest.pauses(), served.audit().len()), (2, 4));
}

/// Checks that a key that cannot be released delays neither the other keys nor the clients.
#[tokio::test]
async fn clients_are_served_between_the_expiries() {
    let served = Served::start().await;
    for key in ["alpha", "beta"] {
        let update = with_ttl(key, KeyOp::Enable, 5);
        served.update(update).await.expect("a ref key");
    }
    // The first pause of the expiry fails, because alpha has foreign bytes. During that pause a
    // client's change is queued, and it must be made before the second pause, which releases beta.
    let site = served.guest.sites("alpha")[0];
    served.guest.write(site, &[0xcc; 5]);
    let keys = served.keys.clone();
    let (waiting, waits) = tokio::sync::oneshot::channel();
    let mut waiting = Some(waiting);
    served.guest.on_pause(move || {
        let Some(waiting) = waiting.take() else {
            return;
        };
        let now = Instant::now();
        let change = UpdateRequest::new(
            vec![KeyUpdate::new("siteless", Op::Inc)],
            "client".to_owned(),
            PATIENCE,
            now + PATIENCE,
        );
        let keys = keys.clone();
        let mut change = Box::pin(async move { keys.update(change).await });
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(change.as_mut().poll(&mut context).is_pending());
        assert!(waiting.send(change).is_ok());
    });
    later(&served, 5).await;
    let change = waits.await.expect("sent").await.expect("a ref key");
    assert!(!served.guest.jumps("beta"), "given back all the same");
    assert_eq!(
        served.keys.revision(),
        change.revision + 1,
        "the client's change came before the second expiry"
    );
    let mut expiries = served
        .keys
        .watch(change.revision + 1, served.keys.incarnation().as_str())
        .expect("kept");
    let expiry = expiries.next().await.expect("after the client's change");
    let first = expiry.events.from(0).next();
    assert_eq!(first.expect("a key").1.key(), Some("beta"));
}
