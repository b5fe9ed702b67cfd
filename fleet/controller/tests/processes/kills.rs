// SPDX-License-Identifier: Apache-2.0
//! Kills leading controllers at named places of their work, and at random times.
//!
//! A proxy holds the request that saves a change, or the answer to it. So the controller is killed
//! exactly between two steps.

use std::time::Duration;

use patchbay_proto::fleet::v1;
use rustix::process::{Pid, Signal, kill_process};
use tonic::Status;

use super::fleet::Replica;
use super::killing::{GUESTS, Goal, Killing, Seat, start};
use super::proxy::{Place, Side};

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

/// A request to etcd: its name, the command that leads to it, a part of its text, and the number of
/// its occurrence.
type Request = (&'static str, Step, &'static str, usize);

/// The requests before and after which the leader is killed. Claims are sent to a guest once its
/// record contains `Claiming`, and its answer is saved as `AsWanted`. In the same way, the release
/// of a guest begins with `Releasing` and ends with `Released`.
const REQUESTS: [Request; 15] = [
    ("the plan", Step::Plan, r#""phase":"Planned""#, 1),
    (
        "the start",
        Step::Start,
        r#""phase":{"Running":"Changing"}"#,
        1,
    ),
    (
        "the claims of a guest",
        Step::Start,
        r#""state":{"Claiming""#,
        2,
    ),
    (
        "the answer of a guest",
        Step::Start,
        r#""state":{"AsWanted""#,
        2,
    ),
    (
        "the end of the last wave",
        Step::Start,
        r#""phase":"Completed""#,
        1,
    ),
    (
        "the undo",
        Step::Undo,
        r#""phase":{"Reverting":"Undone"}"#,
        1,
    ),
    (
        "the releases of the undo",
        Step::Undo,
        r#""state":{"Releasing""#,
        1,
    ),
    (
        "a released guest of the undo",
        Step::Undo,
        r#""state":{"Released""#,
        2,
    ),
    (
        "the end of the undo",
        Step::Undo,
        r#""phase":{"Ended":"Undone"}"#,
        1,
    ),
    (
        "the abort",
        Step::Abort,
        r#""phase":{"Reverting":"Aborted"}"#,
        1,
    ),
    (
        "the releases of the abort",
        Step::Abort,
        r#""state":{"Releasing""#,
        1,
    ),
    (
        "a released guest of the abort",
        Step::Abort,
        r#""state":{"Released""#,
        1,
    ),
    (
        "the end of the abort",
        Step::Abort,
        r#""phase":{"Ended":"Aborted"}"#,
        1,
    ),
    (
        "the claims of a guest, then an abort",
        Step::StartAndAbort,
        r#""state":{"Claiming""#,
        2,
    ),
    (
        "the answer of a guest, then an abort",
        Step::StartAndAbort,
        r#""state":{"AsWanted""#,
        2,
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
        Step::Start | Step::StartAndAbort => start(replica, name, digest).await,
        Step::Undo => client.undo(v1::UndoRequest { rollout }).await.map(drop),
        Step::Abort => client.abort(v1::AbortRequest { rollout }).await.map(drop),
    }
}

/// Brings the rollout to the point at which the command is given, and returns its digest.
async fn prepare(replica: &Replica, step: Step, name: &str) -> String {
    if step == Step::Plan {
        return String::new();
    }
    let digest = replica.plan(name, &step.goal().spec(), GUESTS).await;
    if matches!(step, Step::Undo | Step::Abort) {
        let started = start(replica, name, digest.clone()).await;
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
async fn kill_at(killing: &mut Killing, leader: Seat, request: Request, side: Side) -> Seat {
    let (what, step, text, occurrence) = request;
    let place = format!("{side:?} {what}");
    let name = killing.next_name();
    let next = killing.seat().await;
    let digest = prepare(&leader.replica, step, &name).await;
    let term = killing.fleet.etcd.term().await;
    leader.proxy.hold(Place {
        text,
        occurrence,
        side,
    });
    let held = async {
        leader.proxy.held().await;
        // A call that must not be made before the change is saved would arrive now.
        killing.fleet.ask_guests(0).await;
        if side == Side::After {
            killing.stored(&name, text, occurrence).await;
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
async fn kill_with_late_call(killing: &mut Killing, leader: Seat, step: Step) -> Seat {
    let text = match step {
        Step::Undo => r#""state":{"Releasing""#,
        _ => r#""state":{"Claiming""#,
    };
    let name = killing.next_name();
    let next = killing.seat().await;
    let digest = prepare(&leader.replica, step, &name).await;
    let term = killing.fleet.etcd.term().await;
    let host = &killing.fleet.hosts[0].as_ref().expect("started").0;
    let host = Pid::from_child(host);
    kill_process(host, Signal::STOP).expect("it runs");
    let answer = command(&leader.replica, step, &name, digest).await;
    answer.expect("legal");
    killing.stored(&name, text, 1).await;
    killing.take_over(leader, term, &next).await;
    kill_process(host, Signal::CONT).expect("it is stopped");
    let place = format!("{step:?}, its call is not read");
    killing.finish(&next, &name, step.goal(), &place).await;
    next
}

/// Kills the leader, and sometimes its host too, at a random time after the command.
async fn kill_at_random(killing: &mut Killing, leader: Seat) -> Seat {
    let step = fastrand::choice([Step::Start, Step::StartAndAbort, Step::Undo, Step::Abort])
        .expect("not empty");
    let delay = MAX_DELAY.mul_f64(fastrand::f64());
    let name = killing.next_name();
    let next = killing.seat().await;
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
    for request in REQUESTS {
        for side in [Side::Before, Side::After] {
            leader = kill_at(&mut killing, leader, request, side).await;
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
