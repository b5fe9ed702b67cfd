// SPDX-License-Identifier: Apache-2.0
//! Events on their way from pages to clients.

use std::time::Duration;

use patchbay_proto::AGENT_PAGE_OVERHEAD;
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{StreamTracepointEventsRequest, StreamTracepointEventsResponse};
use tokio_stream::StreamExt;

use super::super::link::WINDOW;
use super::fake::{BEFORE, Fake, pages};
use super::tracing::{Events, api, arm, open, until};

/// Returns the next batch with events or losses.
async fn batch(stream: &mut Events) -> StreamTracepointEventsResponse {
    loop {
        let next = tokio::time::timeout(Duration::from_secs(30), stream.next())
            .await
            .expect("in time");
        let batch = next.expect("no end").expect("no error");
        if !batch.events.is_empty() || batch.losses.is_some() {
            return batch;
        }
    }
}

#[tokio::test]
async fn events_stream_with_names_and_both_clocks() {
    let fake = Fake::new();
    let agent = fake.agent().await;
    *fake.script.settle_time.lock().unwrap() = BEFORE;
    let api = api(&fake);
    let request = StreamTracepointEventsRequest {
        patterns: vec!["sched:*".into()],
        arm_and_fire: true,
        ..Default::default()
    };
    let mut stream = open(&api, request).await;
    let first = stream.next().await.expect("no end").expect("no error");
    assert_eq!(
        first.names,
        ["sched:sched_process_fork", "sched:sched_switch"]
    );
    assert!(fake.keys.is_on("sched_switch"));
    // The first stream grants credit; the pages of the fixtures have 8 KiB.
    until(|| *fake.script.credit.lock().unwrap() >= 8192).await;
    until(|| fake.tracer.link.clock().error().is_some()).await;
    agent.send(pages()).expect("sent");
    let batch = batch(&mut stream).await;
    assert!(batch.events.len() > 40, "{}", batch.events.len());
    assert!(batch.events.is_sorted_by_key(|event| event.guest_time_ns));
    let event = &batch.events[0];
    assert_eq!((event.name.as_str(), event.cpu), ("sched:sched_switch", 3));
    assert!(event.time.is_some());
    assert_eq!(event.fields[0].value, Some(Value::Text("init".into())));
    assert_eq!(event.comm, "init", "from the event itself");
    assert!(
        batch.events.iter().all(|event| !event.comm.is_empty()),
        "asked for"
    );
    // Credit is returned when it is worth a message.
    for _ in 0..40 {
        agent.send(pages()).expect("sent");
    }
    until(|| *fake.script.credit.lock().unwrap() > WINDOW).await;
}

/// The agent sends in order, so the names of the first page's tasks arrive after all pages.
#[tokio::test]
async fn names_of_tasks_come_behind_a_window_of_pages() {
    let fake = Fake::new();
    let agent = fake.agent().await;
    *fake.script.settle_time.lock().unwrap() = BEFORE;
    let api = api(&fake);
    arm(&fake, "a", &["sched_process_fork"]).await;
    let mut stream = open(&api, StreamTracepointEventsRequest::default()).await;
    until(|| *fake.script.credit.lock().unwrap() == WINDOW).await;
    let frame = pages();
    let cost = 8192 + 2 * AGENT_PAGE_OVERHEAD;
    for _ in 0..WINDOW / cost {
        agent.send(frame.clone()).expect("sent");
    }
    let batch = batch(&mut stream).await;
    let names: Vec<_> = batch.events.iter().map(|event| &event.comm).collect();
    assert!(
        names.iter().all(|name| name.starts_with("task-")),
        "{names:?}"
    );
}

#[tokio::test]
async fn what_was_recorded_while_arming_is_not_told() {
    let fake = Fake::new();
    let agent = fake.agent().await;
    *fake.script.settle_time.lock().unwrap() = u64::MAX - 1;
    let api = api(&fake);
    arm(&fake, "a", &["sched_switch"]).await;
    *fake.script.settle_time.lock().unwrap() = BEFORE;
    arm(&fake, "a", &["sched_process_fork"]).await;
    let mut stream = open(&api, StreamTracepointEventsRequest::default()).await;
    agent.send(pages()).expect("sent");
    let batch = batch(&mut stream).await;
    assert!(
        batch
            .events
            .iter()
            .all(|event| event.name == "sched:sched_process_fork")
    );
    assert_eq!(batch.events.len(), 5);
}

#[tokio::test]
async fn the_flood_guard_drops_and_tells() {
    let fake = Fake::new();
    let agent = fake.agent().await;
    let api = api(&fake);
    arm(&fake, "a", &["sched:*"]).await;
    let request = StreamTracepointEventsRequest {
        max_events_per_second: 3,
        ..Default::default()
    };
    let mut stream = open(&api, request).await;
    agent.send(pages()).expect("sent");
    agent.send(pages()).expect("sent");
    let first = batch(&mut stream).await;
    assert_eq!(first.events.len(), 3);
    let second = batch(&mut stream).await;
    assert!(second.losses.or(first.losses).expect("told").flood > 30);
}
