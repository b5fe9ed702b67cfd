// SPDX-License-Identifier: Apache-2.0
//! Agents that connect and disconnect, and other users of tracepoints in the guest.

use std::collections::BTreeSet;
use std::time::Duration;

use patchbay_proto::v1::tracepoints_service_server::TracepointsService;
use patchbay_proto::v1::{ListTracepointsRequest, StreamTracepointEventsRequest};
use tokio_stream::StreamExt;
use tonic::Request;

use super::super::tracer::{ArmTerms, SwitchTerms};
use super::fake::{Fake, hello};
use super::tracing::{Events, api, arm, open, until, wanted};

/// The agent or its monitor was killed. State that only one side knows is removed.
#[tokio::test]
async fn agent_and_book_are_brought_together() {
    let fake = Fake::new();
    *fake.script.enabled.lock().unwrap() = BTreeSet::from(["sched:sched_process_fork".to_owned()]);
    fake.keys.probe("sched:sched_process_fork", true);
    let first = fake.agent().await;
    until(|| fake.script.enabled.lock().unwrap().is_empty()).await;
    assert!(
        !fake.keys.is_on("sched_process_fork"),
        "a stranger is disarmed"
    );
    drop(first);
}

/// The hello is older than events that were armed while the answer to it was on its way.
#[tokio::test]
async fn what_was_armed_since_the_agent_connected_stays_armed() {
    let fake = Fake::with_agent().await;
    arm(&fake, "a", &["sched_switch"]).await;
    fake.tracer.reconcile().await;
    fake.tracer
        .fire("a", &wanted(&["sched_switch"]), &SwitchTerms::default())
        .await
        .expect("still armed");
}

async fn until_marked(stream: &mut Events, text: &str) {
    let marked = async {
        loop {
            let batch = stream.next().await.expect("no end").expect("no error");
            if batch.marks.iter().any(|mark| mark.text.contains(text)) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), marked)
        .await
        .expect("in time");
}

#[tokio::test]
async fn streams_are_told_that_the_agent_is_gone_and_that_one_has_come() {
    let fake = Fake::new();
    let first = fake.connect(hello(1, 1, &BTreeSet::new())).await;
    until(|| fake.tracer.link.peer().is_ok()).await;
    let api = api(&fake);
    let mut stream = open(&api, StreamTracepointEventsRequest::default()).await;
    drop(first);
    until_marked(&mut stream, "no agent is connected").await;
    let _second = fake.agent().await;
    until_marked(&mut stream, "an agent has connected").await;
}

/// A user in the guest begins to trace an armed and parked event, and later stops.
#[tokio::test(start_paused = true)]
async fn what_others_begin_to_trace_fires_for_them() {
    let fake = Fake::with_agent().await;
    let event = "sched:sched_process_fork";
    arm(&fake, "a", &[event]).await;
    fake.keys.probe(event, true);
    assert!(
        !fake.keys.is_on("sched_process_fork"),
        "as the kernel leaves it"
    );
    until(|| fake.keys.is_on("sched_process_fork")).await;
    let api = api(&fake);
    let request = ListTracepointsRequest {
        armed_only: true,
        ..Default::default()
    };
    let listed = api.list_tracepoints(Request::new(request)).await;
    let listed = listed.expect("listed").into_inner().tracepoints;
    assert_eq!(listed[0].fired_by, ["others in the guest"]);
    assert_eq!(listed[0].others.len(), 1);
    fake.keys.probe(event, false);
    until(|| !fake.keys.is_on("sched_process_fork")).await;

    // With the client's consent, the other users are silenced and stay so.
    let terms = ArmTerms {
        even_if_others: true,
        ..ArmTerms::default()
    };
    fake.tracer
        .arm("a", &wanted(&[event]), &terms)
        .await
        .expect("armed");
    fake.keys.probe(event, true);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(!fake.keys.is_on("sched_process_fork"));
    // The other users stay silenced until the client disarms the event.
    fake.tracer
        .disarm("a", &wanted(&[event]), false, None)
        .await
        .expect("disarmed");
    assert!(
        fake.keys.is_on("sched_process_fork"),
        "the other's probe is the only one now"
    );
}

/// Each switch costs a pause and two lines of the audit log.
#[tokio::test(start_paused = true)]
async fn others_that_come_and_go_are_switched_for_less_and_less_often() {
    let fake = Fake::with_agent().await;
    let event = "sched:sched_process_fork";
    arm(&fake, "a", &[event]).await;
    let switches = || fake.keys.switches.lock().unwrap().len();
    let before = switches();
    for second in 0..3600 {
        fake.keys.probe(event, second % 2 == 0);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let made = switches() - before;
    assert!((2..40).contains(&made), "{made} switches in an hour");
    // Parking is delayed, firing is not: a stock kernel leaves a second probe silent.
    fake.keys.probe(event, false);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!fake.keys.is_on("sched_process_fork"));
    fake.keys.probe(event, true);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(fake.keys.is_on("sched_process_fork"));
}
