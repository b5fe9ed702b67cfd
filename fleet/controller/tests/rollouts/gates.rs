// SPDX-License-Identifier: Apache-2.0
//! Tests gates that query the guests' agents and servers.

use std::sync::Arc;

use patchbay_fleet::rollout::{End, Phase, Stage, State};
use patchbay_fleet::runner::{Command, Running};

use super::agent::Agent;
use super::support::{Fleet, PATIENCE, Replica, is_over, spec, tell, wait_for};

const GATE: &str = "gates: [{agent_health: {max_new_warnings: 0, max_pressure: {memory: 10}}, \
                    on_failure: abort}]";

pub fn agents(fleet: &Fleet) -> Vec<Agent> {
    let guests = 0..fleet.guests.len();
    let connect = |index| {
        let agent = Agent::connect(&fleet.agent_socket(&format!("web-{index}")), "first");
        let pressure = patchbay_proto::agent::v1::AgentPressure {
            resource: "memory some".to_owned(),
            average_60s: 10.0,
            ..Default::default()
        };
        agent.health.lock().expect("no panic").pressure = vec![pressure];
        agent
    };
    guests.map(connect).collect()
}

/// Waits until the hosts know this many agents.
pub async fn wait_for_agents(replica: &Replica, agents: usize) {
    let leads = replica.lead().await;
    let hosts = leads.hosts().all();
    let known = async {
        for index in 0..agents {
            let guest = format!("web-{index}");
            while !hosts[0]
                .agent(&guest)
                .await
                .is_ok_and(|agent| agent.absent.is_empty())
            {
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, known)
        .await
        .expect("in time");
}

/// Starts a rollout, and waits until the canary is changed and its wave bakes. The other guests are
/// in the next wave.
async fn baking(replica: &Replica, name: &str) -> Arc<Running> {
    let text = spec(&format!(
        "waves: [{{name: canary, size: 1, bake: 1h}}, {{size: rest}}]\n{GATE}"
    ));
    let running = replica.start(name, &text).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    running
}

#[tokio::test(flavor = "multi_thread")]
async fn warnings_since_the_wave_began_take_it_back() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let agents = agents(&fleet);
    wait_for_agents(&replica, 3).await;
    // These warnings are older than the change.
    agents.iter().for_each(|agent| agent.warnings(7));
    let healthy = spec(&format!("waves: [{{size: 1}}, {{size: rest}}]\n{GATE}"));
    let running = replica.start("healthy", &healthy).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1; 3]);
    tell(&running, Command::Undo).await;
    wait_for(&running, is_over).await;

    // The canary is queried when its wave begins and at the gate. Its kernel warns between the two
    // queries.
    agents[0].warnings_later(8);
    let text = spec(&format!(
        "waves: [{{name: canary, size: 1}}, {{size: rest}}]\n{GATE}"
    ));
    let running = replica.start("ill", &text).await;
    assert_eq!(
        wait_for(&running, is_over).await,
        Phase::Ended(End::Aborted)
    );
    assert_eq!(fleet.counts("alpha"), [0; 3]);
    let timeline = running.rollout().header().timeline.clone();
    let expected = "gate 1 of wave canary is closed: agent_health: 1 of the wave's 1 changed guests \
                    are not healthy; the first is web-0: 1 kernel warnings since the wave began";
    let is_named = timeline.iter().any(|entry| entry.text.contains(expected));
    assert!(is_named, "{timeline:?}");
}

/// Checks `max_unhealthy`, which is a share of the wave's guests and not a number.
#[tokio::test(flavor = "multi_thread")]
async fn a_share_of_the_guests_may_be_unhealthy() {
    let fleet = Fleet::start(1, 4).await;
    let replica = fleet.replica("one");
    let agents = agents(&fleet);
    wait_for_agents(&replica, 4).await;
    let text = spec(
        "waves: [{name: all, size: rest}]\n\
         gates: [{agent_health: {max_new_warnings: 0, max_unhealthy: 25}, on_failure: abort}]",
    );
    // These kernels warn between the query before the change and the one of the gate.
    agents[0].warnings_later(1);
    let running = replica.start("one-of-four", &text).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await;
    agents[0].warnings_later(2);
    agents[3].warnings_later(1);
    let running = replica.start("two-of-four", &text).await;
    let aborted = Phase::Ended(End::Aborted);
    assert_eq!(wait_for(&running, is_over).await, aborted);
    let timeline = running.rollout().header().timeline.clone();
    let expected = "2 of the wave's 4 changed guests are not healthy; the first is web-0";
    let is_named = timeline.iter().any(|entry| entry.text.contains(expected));
    assert!(is_named, "{timeline:?}");
    assert_eq!(fleet.counts("alpha"), [0; 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_agent_is_silent_is_changed_once_it_reports() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let text = spec(&format!("waves: [{{size: rest, bake: 1h}}]\n{GATE}"));
    let running = replica.start("net", &text).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    assert_eq!(fleet.counts("alpha"), [0]);
    let state = running.rollout().members()[0].state.clone();
    assert!(
        matches!(&state, State::NotYet { why, .. } if why.contains("no agent is connected")),
        "{state:?}"
    );
    let _agents = agents(&fleet);
    wait_for_agents(&replica, 1).await;
    let changed = |_| fleet.counts("alpha") == [1];
    wait_for(&running, changed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_a_guest_without_an_agent_tells_its_health() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let logs = fleet.logs();
    // These warnings are older than the change.
    logs.iter()
        .for_each(|log| log.put_health([7, 1], [99, 99, 10, 99, 99]));
    let gate = GATE.replace("on_failure", "interval: 10ms, on_failure");
    let text = spec(&format!(
        "waves: [{{name: canary, size: 1, bake: 1h}}, {{size: rest}}]\n{gate}"
    ));
    let running = replica.start("net", &text).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    assert_eq!(fleet.counts("alpha"), [1, 0]);
    let warning = "WARNING: CPU: 0 PID: 1 at net/core/dev.c:1 \u{1b}[2J";
    logs[0].print(4, warning);
    logs[0].print(4, "---[ end trace 0000000000000000 ]---");
    logs[0].put_health([7, 2], [0; 5]);
    let aborted = Phase::Ended(End::Aborted);
    assert_eq!(wait_for(&running, is_over).await, aborted);
    assert_eq!(fleet.counts("alpha"), [0; 2]);
    let timeline = running.rollout().header().timeline.clone();
    let expected = "web-0: 1 kernel warnings since the wave began, more than 0; its last message is \"WARNING: CPU: 0 PID: 1 at net/core/dev.c:1 \\\\x1b[2J\"";
    let is_named = timeline.iter().any(|entry| entry.text.contains(expected));
    assert!(is_named, "{timeline:?}");

    let text = spec(&format!("waves: [{{size: rest, bake: 1h}}]\n{gate}"));
    let running = replica.start("slow", &text).await;
    wait_for(&running, |phase| phase == Phase::Running(Stage::Baking)).await;
    logs[1].put_health([7, 1], [0, 0, 11, 0, 0]);
    assert_eq!(wait_for(&running, is_over).await, aborted);
    let timeline = running.rollout().header().timeline.clone();
    let expected = "web-1: some task waited for memory in 11.0 percent";
    let is_named = timeline.iter().any(|entry| entry.text.contains(expected));
    assert!(is_named, "{timeline:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_leader_compares_with_what_the_first_observed() {
    let fleet = Fleet::start(1, 2).await;
    let first = fleet.replica("one");
    let agents = agents(&fleet);
    wait_for_agents(&first, 2).await;
    drop(baking(&first, "net").await);
    agents[0].warnings(1);
    drop(first);
    let second = fleet.replica("two");
    let leads = second.lead().await;
    let running = leads.rollout("net").expect("it was stored");
    let health = running.rollout().members()[0].health.clone();
    assert_eq!(health.expect("observed").kernel_warnings, 0);
}

/// Tests a gate that queries a server, in the rollout that the gate pauses.
#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_nobody_answers_pauses_the_rollout() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", closed.local_addr().expect("bound"));
    drop(closed);
    let text = spec(&format!(
        "waves: [{{size: 1}}, {{size: rest}}]\n\
         gates: [{{prometheus: {{url: \"{url}\", query: up, above: 0}}, interval: 10ms, patience: 1ms, on_failure: abort}}]"
    ));
    let running = replica.start("net", &text).await;
    wait_for(&running, |phase| phase == Phase::Paused).await;
    let message = running.rollout().header().message.clone();
    let expected =
        format!("gate 1 of wave 1 is inconclusive: prometheus {url}, query \"up\": cannot");
    assert!(message.starts_with(&expected), "{message}");
    assert_eq!(fleet.counts("alpha"), [1, 0]);
}
