// SPDX-License-Identifier: Apache-2.0
//! Calls that switch keys do not wait for an agent that answers pings and nothing else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{
    ArmTracepointsRequest, FireTracepointsRequest, StreamTracepointEventsRequest,
};
use tokio::time::Instant;
use tonic::Request;

use super::super::tracer::SwitchTerms;
use super::fake::Fake;
use super::tracing::{api, api_with_grace, arm, reason, until, wanted};

const SWITCH: &str = "sched_switch";
const FORK: &str = "sched_process_fork";

fn mute(fake: &Fake, mute: bool) {
    fake.script.mute.store(mute, Ordering::Relaxed);
}

/// Waits for a request that gets no answer.
async fn until_asked(fake: &Fake, before: usize) {
    until(|| fake.script.unanswered.load(Ordering::Relaxed) > before).await;
}

async fn fire_and_park(fake: &Fake) {
    let terms = SwitchTerms::default();
    let tracer = &fake.tracer;
    tracer
        .fire("a", &wanted(&[SWITCH]), &terms)
        .await
        .expect("fired");
    assert!(fake.keys.is_on(SWITCH));
    tracer
        .park("a", &wanted(&[SWITCH]), &terms)
        .await
        .expect("parked");
    assert!(!fake.keys.is_on(SWITCH));
}

/// Returns p50 and p99 in microseconds.
async fn figures(fake: &Fake) -> (u128, u128) {
    let mut times = vec![];
    for _ in 0..2000 {
        let began = std::time::Instant::now();
        fire_and_park(fake).await;
        times.push(began.elapsed().as_micros());
    }
    times.sort_unstable();
    (times[1000], times[1980])
}

/// The clock stands still while any task runs, so it shows which call waited for a deadline.
#[tokio::test(start_paused = true)]
async fn fire_and_park_do_not_wait_for_what_the_agent_is_asked() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &["sched:*"]).await;
    let normal = figures(&fake).await;
    mute(&fake, true);
    let tracer = Arc::clone(&fake.tracer);
    let disarm =
        tokio::spawn(async move { tracer.disarm("a", &wanted(&[FORK]), false, None).await });
    until_asked(&fake, 0).await;
    let began = Instant::now();
    let beside = figures(&fake).await;
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    println!(
        "fire and park, p50 and p99 in µs: {normal:?} with an agent, {beside:?} with a mute one"
    );
    assert!(!disarm.is_finished(), "the agent is still being asked");
    let error = disarm.await.expect("no panic").expect_err("no answer");
    assert_eq!(reason(&error.into()), "AGENT_SILENT");
}

#[tokio::test(start_paused = true)]
async fn a_named_change_does_not_wait_for_another_that_the_agent_holds_up() {
    let fake = Fake::with_agent().await;
    arm(&fake, "unknown", &[SWITCH]).await;
    mute(&fake, true);
    let api = api(&fake);
    let api = Arc::new(api);
    let arming = ArmTracepointsRequest {
        patterns: vec![FORK.to_owned()],
        request_id: "r1".to_owned(),
        ..Default::default()
    };
    let (first, second) = (Arc::clone(&api), Arc::clone(&api));
    let again = arming.clone();
    let first = tokio::spawn(async move { first.arm_tracepoints(Request::new(arming)).await });
    until_asked(&fake, 0).await;
    let second = tokio::spawn(async move { second.arm_tracepoints(Request::new(again)).await });
    let began = Instant::now();
    let fire = FireTracepointsRequest {
        patterns: vec![SWITCH.to_owned()],
        request_id: "r2".to_owned(),
        ..Default::default()
    };
    api.fire_tracepoints(Request::new(fire))
        .await
        .expect("fired");
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    // The same id is used for another change while this one is in progress.
    let other = FireTracepointsRequest {
        patterns: vec![SWITCH.to_owned()],
        request_id: "r1".to_owned(),
        ..Default::default()
    };
    let status = api.fire_tracepoints(Request::new(other)).await;
    assert_eq!(reason(&status.expect_err("reused")), "REQUEST_ID_REUSED");
    // The repeat waits for the first request, and makes the change itself when that has failed.
    let status = first.await.expect("no panic").expect_err("no answer");
    assert_eq!(reason(&status), "AGENT_SILENT");
    mute(&fake, false);
    second.await.expect("no panic").expect("armed");
}

#[tokio::test(start_paused = true)]
async fn who_wants_an_event_that_is_being_moved_waits_for_it_or_is_told() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &[FORK]).await;
    mute(&fake, true);
    let tracer = Arc::clone(&fake.tracer);
    let disarm =
        tokio::spawn(async move { tracer.disarm("a", &wanted(&[FORK]), false, None).await });
    until_asked(&fake, 0).await;
    mute(&fake, false);
    // This waits for the end of the disarming, which fails. The event's probe is still attached,
    // and is not mistaken for another user's.
    arm(&fake, "b", &["sched:*"]).await;
    disarm.await.expect("no panic").expect_err("no answer");
    let terms = SwitchTerms::default();
    let fork = wanted(&[FORK]);
    fake.tracer.fire("b", &fork, &terms).await.expect("fired");

    let names = ["sched:sched_process_fork".to_owned()];
    let moving = fake.tracer.claim_whenever(&names).await;
    let error = fake.tracer.disarm("b", &fork, false, None).await;
    let error = error.expect_err("it is being moved");
    assert!(error.to_string().contains(&names[0]), "{error}");
    assert_eq!(reason(&error.into()), "EVENT_BUSY");
    drop(moving);
    fake.tracer
        .disarm("b", &fork, false, None)
        .await
        .expect("disarmed");
}

/// A client that disconnects before its events are armed leaves no events armed.
#[tokio::test(start_paused = true)]
async fn who_goes_while_the_agent_is_asked_leaves_when_it_is_in() {
    let fake = Fake::with_agent().await;
    let api = api_with_grace(&fake, Duration::ZERO);
    fake.script.hung.send_replace(true);
    let request = StreamTracepointEventsRequest {
        patterns: vec![SWITCH.to_owned()],
        arm_and_fire: true,
        ..Default::default()
    };
    let call = api.stream_tracepoint_events(Request::new(request));
    assert!(
        tokio::time::timeout(Duration::from_millis(1), call)
            .await
            .is_err()
    );
    fake.script.hung.send_replace(false);
    until(|| !fake.keys.switches.lock().unwrap().is_empty()).await;
    until(|| {
        fake.script.enabled.lock().unwrap().is_empty() && fake.tracer.book().events.is_empty()
    })
    .await;
    assert!(!fake.keys.is_on(SWITCH));
}
