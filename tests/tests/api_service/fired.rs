// SPDX-License-Identifier: Apache-2.0
//! Tests that tracing and `StaticKeysService` share one ledger: a firing event is a hold on the
//! tracepoint's key.

use std::time::{Duration, Instant};

use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_service::keys::{FlipReport, KeysError, TracepointUpdate};
use patchbay_service::trace::{Switch, TracepointKeys};
use tonic::Code;

use super::support::{PATIENCE, Served, assert_refused, request};

const KEY: &str = "sched_switch";
const STREAM: &str = "uid:0/stream-7";

/// Fires an event as the tracer does for a client.
async fn trace(
    served: &Served,
    client: &str,
    update: TracepointUpdate,
    ttl: Option<u64>,
) -> Result<Option<FlipReport>, KeysError> {
    let switch = Switch {
        keys: vec![KEY.to_owned()],
        update,
        holder: client.to_owned(),
        reason: "fire tracepoints",
        ttl: ttl.map(Duration::from_secs),
        validate_only: false,
        stop_timeout: PATIENCE,
        deadline: Instant::now() + PATIENCE,
    };
    served.keys.switch(switch).await
}

async fn fire(served: &Served, client: &str) {
    let fired = trace(served, client, TracepointUpdate::Fire, None).await;
    fired.expect("a probe is attached");
}

/// Ends the client's hold. Returns whether the event still fires.
async fn end(served: &Served, client: &str, update: TracepointUpdate) -> bool {
    let ended = trace(served, client, update, None).await;
    ended.expect("can be switched");
    served.guest.jumps(KEY)
}

async fn holders(served: &Served) -> Vec<String> {
    let holds = served.holds().await.into_iter();
    holds.map(|hold| hold.holder).collect()
}

async fn later(served: &Served, seconds: u64) {
    served.clock.advance(Duration::from_secs(seconds));
    served.keys.tick().await.expect("the thread runs");
}

fn own() -> String {
    format!("uid:{}", rustix::process::getuid().as_raw())
}

#[tokio::test]
async fn a_firing_event_is_a_hold_that_others_may_not_drop() {
    let served = Served::start().await;
    fire(&served, STREAM).await;
    let holds = served.holds().await;
    assert_eq!(holds.len(), 1);
    assert_eq!(
        (&*holds[0].key, &*holds[0].holder, &*holds[0].reason),
        (KEY, STREAM, "fire tracepoints")
    );
    let key = served.get(KEY).await.expect("a key");
    assert_eq!((key.count, key.held_references), (1, 1));
    let disabled = served.op(KEY, KeyOp::Disable).await;
    let (message, _) = assert_refused(disabled, Code::FailedPrecondition, "NOT_HOLDER");
    assert!(message.contains(STREAM), "{message}");
    let release = v1::ReleaseHoldsRequest {
        ids: vec![holds[0].id.clone()],
        ..Default::default()
    };
    let released = served.client().release_holds(release).await;
    assert_refused(released, Code::FailedPrecondition, "NOT_HOLDER");
    assert!(served.guest.jumps(KEY));

    let mut forced = request(&[(KEY, KeyOp::Disable)]);
    forced.force = true;
    served.update(forced).await.expect("forced");
    assert!(!served.guest.jumps(KEY) && served.holds().await.is_empty());
}

#[tokio::test]
async fn an_event_fires_until_each_client_has_parked_it() {
    let served = Served::start().await;
    fire(&served, STREAM).await;
    let pauses = served.guest.pauses();
    fire(&served, &own()).await;
    fire(&served, &own()).await;
    assert_eq!(served.guest.pauses(), pauses, "it is on");
    assert_eq!(holders(&served).await, [STREAM, &own()]);
    // The update is refused, because it would also have to drop the hold of the stream.
    let disabled = served.op(KEY, KeyOp::Disable).await;
    assert_refused(disabled, Code::FailedPrecondition, "NOT_HOLDER");
    assert!(end(&served, "another", TracepointUpdate::Park).await);
    assert!(end(&served, STREAM, TracepointUpdate::Park).await);
    assert_eq!(holders(&served).await, [own()]);
    served.op(KEY, KeyOp::Disable).await.expect("its own alone");
    assert!(!served.guest.jumps(KEY));
    assert!(served.holds().await.is_empty());
}

#[tokio::test]
async fn a_hold_of_an_enable_and_a_fire_are_one() {
    let served = Served::start().await;
    let enabled = served.op(KEY, KeyOp::Enable).await.expect("a probe");
    fire(&served, &own()).await;
    let holds = served.holds().await;
    assert_eq!(
        (holds.len(), &holds[0].id),
        (1, &enabled.results[0].hold_id)
    );
    assert!(!end(&served, &own(), TracepointUpdate::Park).await);
}

#[tokio::test]
async fn what_is_fired_for_a_time_is_parked_for_that_client_alone() {
    let served = Served::start().await;
    let for_a_time = async |client, seconds| {
        let fired = trace(&served, client, TracepointUpdate::Fire, Some(seconds)).await;
        fired.expect("a probe is attached");
    };
    for_a_time("a", 5).await;
    for_a_time("b", 50).await;
    let id = served.holds().await[0].id.clone();
    for_a_time("a", 10).await;
    assert_eq!(served.holds().await[0].id, id, "renewed");
    later(&served, 9).await;
    assert_eq!(holders(&served).await, ["a", "b"]);
    later(&served, 1).await;
    assert_eq!(holders(&served).await, ["b"]);
    assert!(served.guest.jumps(KEY));
    fire(&served, "b").await;
    later(&served, 1000).await;
    assert_eq!(holders(&served).await, ["b"], "for good now");
    for_a_time("b", 5).await;
    later(&served, 5).await;
    assert!(!served.guest.jumps(KEY) && served.holds().await.is_empty());
}

#[tokio::test]
async fn what_nobody_fired_is_parked_by_anyone_and_left_by_nobody() {
    let served = Served::start().await;
    served.guest.set_count(KEY, 1);
    assert!(end(&served, "a", TracepointUpdate::Leave).await);
    assert!(!end(&served, "a", TracepointUpdate::Park).await);
    assert!(
        !end(&served, "a", TracepointUpdate::Leave).await,
        "nor turned on"
    );
    fire(&served, "a").await;
    fire(&served, "b").await;
    assert!(end(&served, "a", TracepointUpdate::Leave).await);
    assert!(!end(&served, "b", TracepointUpdate::Leave).await);
    fire(&served, "a").await;
    assert!(!end(&served, "b", TracepointUpdate::Silence).await);
    assert!(served.holds().await.is_empty());
}

/// Checks that the end of a fired hold does not turn the key off if another client in the guest has
/// attached a probe meanwhile.
#[tokio::test]
async fn a_fired_hold_outlives_probes_of_others_and_does_not_silence_them() {
    let served = Served::start().await;
    for (update, expires) in [(Some(TracepointUpdate::Leave), false), (None, true)] {
        served.guest.set_probes(KEY, &[1]);
        let fired = trace(&served, "a", TracepointUpdate::Fire, Some(5)).await;
        fired.expect("the agent's probe");
        served.guest.set_probes(KEY, &[1, 2]);
        assert_eq!(holders(&served).await, ["a"]);
        match update {
            Some(update) => assert!(end(&served, "a", update).await, "the other goes on"),
            None => later(&served, 5).await,
        }
        assert!(served.guest.jumps(KEY), "expires: {expires}");
        assert!(served.holds().await.is_empty());
    }
    // The other probe is attached and detached again, so only the agent's is left when the hold
    // expires.
    served.guest.set_probes(KEY, &[1]);
    let fired = trace(&served, "a", TracepointUpdate::Fire, Some(5)).await;
    fired.expect("the agent's probe");
    served.guest.set_probes(KEY, &[1, 2]);
    served.guest.set_probes(KEY, &[1]);
    later(&served, 5).await;
    assert!(!served.guest.jumps(KEY) && served.holds().await.is_empty());
}

#[tokio::test]
async fn a_fired_hold_is_void_once_the_guest_has_turned_the_key_off() {
    let served = Served::start().await;
    fire(&served, "a").await;
    served.guest.set_probes(KEY, &[]);
    assert!(served.holds().await.is_empty());
    served.guest.set_probes(KEY, &[2]);
    assert!(end(&served, "b", TracepointUpdate::Leave).await);
    // When the agent detaches its probe, the reference is handed over to the probe that stays.
    fire(&served, "a").await;
    assert!(end(&served, "a", TracepointUpdate::HandOver).await);
    assert!(served.holds().await.is_empty());
}
