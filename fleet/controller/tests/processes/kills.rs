// SPDX-License-Identifier: Apache-2.0
//! Kills leading controllers at named places of their work, and at random times.
//!
//! A proxy holds the request that saves a change, or the answer to it. So the controller is killed
//! exactly between two steps.

use std::time::Duration;

use patchbay_proto::fleet::v1;
use rustix::process::Signal;
use tonic::Status;

use super::fleet::Replica;
use super::killing::{GUESTS, Goal, Killing, ProxiedReplica, state};
use super::proxy::{Place, Side};
use super::setup::abort;
use Saved::{Phase, State};

/// The variable that gives the number of kills at random times.
const RANDOM_KILLS: &str = "PATCHBAY_TEST_FLEET_KILLS";
/// The number of kills at random times without the variable.
const FEW: u32 = 4;
/// The maximum time from a command to a kill at a random time.
const MAX_DELAY: Duration = Duration::from_millis(300);

/// The command that leads to the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Plan,
    Start,
    Undo,
    Abort,
    /// The start of a rollout that is aborted as soon as the next replica leads.
    StartAndAbort,
}

impl Step {
    fn goal(self) -> Goal {
        match self {
            Self::Abort => Goal::Aborted,
            Self::StartAndAbort => Goal::AbortedAtOnce,
            _ => Goal::Undone,
        }
    }
}

/// The part of a record by which the request that saves it is found.
#[derive(Clone, Copy)]
enum Saved {
    /// The phase in the rollout's record.
    Phase(&'static str),
    /// The state in a guest's record.
    State(&'static str),
}

impl Saved {
    fn text(self) -> String {
        match self {
            Self::Phase(json) => format!(r#""phase":{json}"#),
            Self::State(name) => state(name),
        }
    }
}

/// A request to etcd: its name, a part of its text, and the number of its occurrence.
type Request = (&'static str, Saved, usize);

/// The requests before and after which the leader is killed, by the command that leads to them.
/// Claims are sent to a guest once its record contains `Claiming`, and its answer is saved as
/// `AsWanted`. In the same way, the release of a guest begins with `Releasing` and ends with
/// `Released`.
const REQUESTS: [(Step, &[Request]); 5] = [
    (Step::Plan, &[("the plan", Phase(r#""Planned""#), 1)]),
    (
        Step::Start,
        &[
            ("the start", Phase(r#"{"Running":"Changing"}"#), 1),
            ("the claims of a guest", State("Claiming"), 2),
            ("the answer of a guest", State("AsWanted"), 2),
            ("the end of the last wave", Phase(r#""Completed""#), 1),
        ],
    ),
    (
        Step::Undo,
        &[
            ("the undo", Phase(r#"{"Reverting":"Undone"}"#), 1),
            ("the releases", State("Releasing"), 1),
            ("a released guest", State("Released"), 2),
            ("the end", Phase(r#"{"Ended":"Undone"}"#), 1),
        ],
    ),
    (
        Step::Abort,
        &[
            ("the abort", Phase(r#"{"Reverting":"Aborted"}"#), 1),
            ("the releases", State("Releasing"), 1),
            ("a released guest", State("Released"), 1),
            ("the end", Phase(r#"{"Ended":"Aborted"}"#), 1),
        ],
    ),
    (
        Step::StartAndAbort,
        &[
            ("the claims of a guest", State("Claiming"), 2),
            ("the answer of a guest", State("AsWanted"), 2),
        ],
    ),
];

/// Gives the command. There is no answer if the replica is killed first.
async fn command(replica: &Replica, step: Step, name: &str, digest: String) -> Result<(), Status> {
    let mut client = replica.rollouts();
    let rollout = name.to_owned();
    match step {
        Step::Plan => {
            let spec = step.goal().spec();
            client
                .plan(v1::PlanRequest { rollout, spec })
                .await
                .map(drop)
        }
        Step::Start | Step::StartAndAbort => replica.start_planned(name, digest).await,
        Step::Undo => client.undo(v1::UndoRequest { rollout }).await.map(drop),
        Step::Abort => abort(&mut client, name).await,
    }
}

/// Brings the rollout to the point at which the command is given, and returns its digest.
async fn prepare(replica: &Replica, step: Step, name: &str) -> String {
    if step == Step::Plan {
        return String::new();
    }
    let digest = replica.plan(name, &step.goal().spec(), GUESTS).await;
    if matches!(step, Step::Undo | Step::Abort) {
        let started = replica.start_planned(name, digest.clone()).await;
        started.expect("started");
    }
    match step {
        Step::Undo => _ = replica.wait(name, v1::Phase::Completed).await,
        Step::Abort => replica.as_wanted(name, 0).await,
        Step::Plan | Step::Start | Step::StartAndAbort => {}
    }
    digest
}

/// Kills the leader before the request arrives at etcd, or before its answer arrives. Returns the
/// next leader.
async fn kill_at(
    killing: &mut Killing,
    leader: ProxiedReplica,
    step: Step,
    (what, saved, occurrence): Request,
    side: Side,
) -> ProxiedReplica {
    let (text, place) = (saved.text(), format!("{step:?}, {side:?} {what}"));
    let name = killing.next_name();
    let next = killing.start_replica().await;
    let digest = prepare(&leader.replica, step, &name).await;
    let term = killing.fleet.etcd.term().await;
    leader.proxy.hold(Place {
        text: text.clone(),
        occurrence,
        side,
    });
    let held = async {
        leader.proxy.held().await;
        // A call that must not be made before the change is saved would arrive now.
        killing.fleet.ask_guests(0).await;
        if side == Side::After {
            killing.stored(&name, &text, occurrence).await;
        }
    };
    // The command has an answer if its change is saved earlier than that of the request.
    let commanded = async {
        let answer = command(&leader.replica, step, &name, digest).await;
        answer.expect("legal");
        std::future::pending().await
    };
    tokio::select! {
        () = held => {}
        () = commanded => {}
    }
    killing.take_over(leader, term, &next).await;
    killing.finish(&next, &name, step.goal(), &place).await;
    next
}

/// Stops the host, and kills the leader after it has saved that it begins to call the host. The
/// host continues when the next leader leads. It may then find the calls of both, because nothing
/// shows whether a call was sent.
async fn kill_with_late_call(
    killing: &mut Killing,
    leader: ProxiedReplica,
    step: Step,
) -> ProxiedReplica {
    let text = match step {
        Step::Undo => state("Releasing"),
        _ => state("Claiming"),
    };
    let name = killing.next_name();
    let next = killing.start_replica().await;
    let digest = prepare(&leader.replica, step, &name).await;
    let term = killing.fleet.etcd.term().await;
    killing.fleet.signal_host(0, Signal::STOP);
    let answer = command(&leader.replica, step, &name, digest).await;
    answer.expect("legal");
    killing.stored(&name, &text, 1).await;
    killing.take_over(leader, term, &next).await;
    killing.fleet.signal_host(0, Signal::CONT);
    let place = format!("{step:?}, its call is not read");
    killing.finish(&next, &name, step.goal(), &place).await;
    next
}

/// Kills the leader, and sometimes its host too, at a random time after the command.
async fn kill_at_random(killing: &mut Killing, leader: ProxiedReplica) -> ProxiedReplica {
    let step = fastrand::choice([Step::Start, Step::StartAndAbort, Step::Undo, Step::Abort])
        .expect("not empty");
    let delay = MAX_DELAY.mul_f64(fastrand::f64());
    let name = killing.next_name();
    let next = killing.start_replica().await;
    let digest = prepare(&leader.replica, step, &name).await;
    let term = killing.fleet.etcd.term().await;
    tokio::select! {
        () = tokio::time::sleep(delay) => {}
        () = async {
            let _ = command(&leader.replica, step, &name, digest).await;
            std::future::pending().await
        } => {}
    }
    let with_host = fastrand::bool();
    if with_host {
        killing.fleet.hosts[0] = None;
    }
    killing.take_over(leader, term, &next).await;
    if with_host {
        killing.restart_host().await;
    }
    let place = match with_host {
        true => "At a random time, with its host",
        false => "At a random time",
    };
    killing.finish(&next, &name, step.goal(), place).await;
    next
}

#[tokio::test(flavor = "multi_thread")]
async fn controllers_that_are_killed_at_each_place() {
    let Some((mut killing, mut leader, mut monitor)) = Killing::start(None).await else {
        return;
    };
    for (step, requests) in REQUESTS {
        for request in requests {
            for side in [Side::Before, Side::After] {
                leader = kill_at(&mut killing, leader, step, *request, side).await;
            }
        }
    }
    for step in [Step::Start, Step::StartAndAbort, Step::Undo] {
        leader = kill_with_late_call(&mut killing, leader, step).await;
    }
    let kills = std::env::var(RANDOM_KILLS).map_or(FEW, |kills| kills.parse().expect("a number"));
    for _ in 0..kills {
        leader = kill_at_random(&mut killing, leader).await;
    }
    killing.end(leader, &mut monitor).await;
}
