// SPDX-License-Identifier: Apache-2.0
//! Tests arming and firing for a limited time.

use std::time::Duration;

use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{ArmTracepointsRequest, FireTracepointsRequest};
use tokio::time::Instant;
use tonic::Request;

use super::super::tracer::{ArmTerms, SwitchTerms};
use super::fake::Fake;
use super::tracing::{api, arm, reason, until, wanted};
use crate::keys::KeysError;

const SWITCH: &str = "sched:sched_switch";

async fn arm_for(fake: &Fake, client: &str, seconds: u64) {
    let terms = ArmTerms {
        ttl: Some(Duration::from_secs(seconds)),
        ..ArmTerms::default()
    };
    let armed = fake.tracer.arm(client, &wanted(&[SWITCH]), &terms).await;
    armed.expect("armed");
}

fn is_armed(fake: &Fake) -> bool {
    fake.script.enabled.lock().unwrap().contains(SWITCH)
}

/// Returns the seconds from now until the event is disarmed.
async fn seconds_armed(fake: &Fake) -> u64 {
    let began = Instant::now();
    until(|| !is_armed(fake)).await;
    began.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn what_is_armed_for_a_time_is_disarmed_when_it_is_over() {
    let fake = Fake::with_agent().await;
    arm_for(&fake, "a", 20).await;
    let fire = SwitchTerms::default();
    let fired = fake.tracer.fire("a", &wanted(&[SWITCH]), &fire).await;
    fired.expect("fired");
    assert_eq!(seconds_armed(&fake).await, 20);
    assert!(!fake.keys.is_on("sched_switch"));
    assert!(fake.tracer.book().events.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_later_call_renews_the_time() {
    let fake = Fake::with_agent().await;
    arm_for(&fake, "a", 10).await;
    arm_for(&fake, "a", 20).await;
    assert_eq!(seconds_armed(&fake).await, 20);
    arm_for(&fake, "a", 10).await;
    arm(&fake, "a", &[SWITCH]).await;
    tokio::time::sleep(Duration::from_secs(1000)).await;
    assert!(is_armed(&fake), "for good now");
    arm_for(&fake, "a", 10).await;
    arm(&fake, "b", &[SWITCH]).await;
    tokio::time::sleep(Duration::from_secs(1000)).await;
    let book = fake.tracer.book();
    let armed_by: Vec<&String> = book.events[SWITCH].armed_by.keys().collect();
    assert_eq!(armed_by, ["b"], "others keep it");
}

#[tokio::test(start_paused = true)]
async fn an_expiry_that_fails_is_tried_again() {
    let fake = Fake::with_agent().await;
    arm_for(&fake, "a", 10).await;
    *fake.keys.fail.lock().unwrap() = Some(KeysError::QueueFull { waiting: 1 });
    assert_eq!(seconds_armed(&fake).await, 11);
}

/// Calls `leave`, as a stream does when its client is gone.
#[tokio::test(start_paused = true)]
async fn who_leaves_while_the_guest_is_busy_leaves_nothing_firing() {
    let fake = Fake::with_agent().await;
    arm(&fake, "b", &[SWITCH]).await;
    let fire = SwitchTerms::default();
    let fired = fake.tracer.fire("a", &wanted(&[SWITCH]), &fire).await;
    fired.expect("fired");
    *fake.keys.fail.lock().unwrap() = Some(KeysError::QueueFull { waiting: 1 });
    fake.tracer.leave("a").await;
    assert!(!fake.keys.is_on("sched_switch"));
}

#[tokio::test]
async fn times_out_of_range_are_refused() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &[SWITCH]).await;
    let api = api(&fake);
    let patterns = vec![SWITCH.to_owned()];
    for seconds in [-1, 0, 365 * 86_400 + 1] {
        let ttl = Some(prost_types::Duration { seconds, nanos: 0 });
        let arm = ArmTracepointsRequest {
            patterns: patterns.clone(),
            ttl,
            ..Default::default()
        };
        let refused = api.arm_tracepoints(Request::new(arm)).await;
        assert_eq!(
            reason(&refused.expect_err("out of range")),
            "INVALID_ARGUMENT"
        );
        let fire = FireTracepointsRequest {
            patterns: patterns.clone(),
            ttl,
            ..Default::default()
        };
        let refused = api.fire_tracepoints(Request::new(fire)).await;
        assert_eq!(
            reason(&refused.expect_err("out of range")),
            "INVALID_ARGUMENT"
        );
    }
    let fire = FireTracepointsRequest {
        patterns,
        ttl: Some(Duration::from_secs(7).try_into().expect("short")),
        ..Default::default()
    };
    api.fire_tracepoints(Request::new(fire))
        .await
        .expect("fired");
    let switches = fake.keys.switches.lock().unwrap();
    let last = switches.last().expect("a switch");
    assert_eq!(last.ttl, Some(Duration::from_secs(7)));
}

/// Answers about changes to the previous kernel are dropped.
#[tokio::test]
async fn answers_are_forgotten_when_another_kernel_boots() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &[SWITCH]).await;
    let api = api(&fake);
    let fire = FireTracepointsRequest {
        patterns: vec![SWITCH.to_owned()],
        request_id: "r1".to_owned(),
        ..Default::default()
    };
    let switches = || fake.keys.switches.lock().unwrap().len();
    for (boot, made) in [(0, 1), (0, 1), (1, 2), (1, 2)] {
        fake.keys
            .boot
            .store(boot, std::sync::atomic::Ordering::Relaxed);
        let fired = api.fire_tracepoints(Request::new(fire.clone())).await;
        fired.expect("fired");
        assert_eq!(switches(), 1 + made, "boot {boot}");
    }
}
