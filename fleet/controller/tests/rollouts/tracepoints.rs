// SPDX-License-Identifier: Apache-2.0
//! Tests sets of tracepoints, which are claimed by their keys and shown by their names.

use patchbay_fleet::rollout::{End, Phase, Plan, State};
use patchbay_fleet::runner::Command;

use super::gates::{agents, wait_for_agents};
use super::support::{Fleet, is_over, tell, wait_for};

fn events(plan: &Plan) -> Vec<&str> {
    let tracepoints = plan.set.tracepoints().iter();
    tracepoints.map(|tracepoint| &*tracepoint.event).collect()
}

fn fire(patterns: &str) -> String {
    format!(
        "selector: {{guests: [\"web-*\"]}}\nclaims: [{{want: on, tracepoints: [{patterns}]}}]\n\
         waves: [{{size: 1}}, {{size: rest}}]\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_fired_on_every_guest_and_parked_by_undo() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let _agents = agents(&fleet);
    wait_for_agents(&replica, 2).await;
    let running = replica.start("trace", &fire("\"sched:*\"")).await;
    let plan = running.rollout().members()[0].plan.clone();
    assert_eq!(events(&plan), ["sched:sched_switch", "sched:sched_waking"]);
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    for (key, count) in [
        ("sched_switch", 1),
        ("sched_waking", 1),
        ("sched_wakeup", 0),
        ("kmem_alloc", 0),
    ] {
        assert_eq!(fleet.counts(key), [count; 2], "{key}");
    }
    tell(&running, Command::Undo).await;
    let ended = |phase| phase == Phase::Ended(End::Undone);
    wait_for(&running, ended).await;
    assert_eq!(fleet.counts("sched_switch"), [0; 2]);
    assert_eq!(fleet.counts("sched_waking"), [0; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_are_unknown_or_have_no_probe_are_not_planned() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    // No agent has reported the systems of the events yet.
    let planned = leads.plan("early", &fire("\"sched:*\""), "alice").await;
    let error = planned.err().expect("refused").to_string();
    assert!(
        error.contains("no tracepoint with a probe matches sched:*")
            && error.contains("no agent is connected"),
        "{error}"
    );
    let _agents = agents(&fleet);
    wait_for_agents(&replica, 1).await;
    let named = fire("\"sched:sched_wakeup\"");
    let error = leads.plan("named", &named, "alice").await;
    let error = error.err().expect("refused").to_string();
    assert!(error.contains("no probe is attached"), "{error}");
    let both = fire("\"sched:*\", \"!*wak*\"");
    let running = leads.plan("both", &both, "alice");
    let running = running.await.expect("planned");
    let member = running.rollout().members()[0].clone();
    assert_eq!(member.state, State::Pending);
    assert_eq!(events(&member.plan), ["sched:sched_switch"]);
}
