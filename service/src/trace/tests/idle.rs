// SPDX-License-Identifier: Apache-2.0
//! Counts how often a tracer without work wakes its thread.

use std::time::Duration;

use tokio::runtime::Handle;

use super::fake::Fake;
use super::tracing::{arm, until};

const MINUTE: Duration = Duration::from_secs(60);

/// Returns how often the thread of this runtime wakes within a minute of the paused clock, the
/// wake for the end of the minute included.
async fn wakes_in_a_minute() -> u64 {
    let parked = || Handle::current().metrics().worker_park_count(0);
    // What is ready now runs first.
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = parked();
    tokio::time::sleep(MINUTE).await;
    parked() - before
}

#[tokio::test(start_paused = true)]
async fn a_tracer_without_agent_and_events_sleeps() {
    let fake = Fake::new();
    let wakes = wakes_in_a_minute().await;
    assert!(wakes < 10, "{wakes}");
    // An agent is asked each second whether it is there.
    let agent = fake.agent().await;
    assert!(wakes_in_a_minute().await >= 60);
    drop(agent);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_is_armed_after_a_long_sleep_is_fired_for_others() {
    let fake = Fake::with_agent().await;
    tokio::time::sleep(60 * MINUTE).await;
    arm(&fake, "a", &["sched_switch"]).await;
    fake.keys.probe("sched:sched_switch", true);
    assert!(!fake.keys.is_on("sched_switch"));
    until(|| fake.keys.is_on("sched_switch")).await;
}
