// SPDX-License-Identifier: Apache-2.0
//! Kills the daemon of a host at named places of its work, and starts it again.

use patchbay_proto::fleet::v1;
use rustix::process::Signal;

use super::fleet::Monitor;
use super::killing::{GUESTS, Goal, Killing, ProxiedReplica, answering, state};

/// The guest whose answers are held back.
const HELD: usize = 1;

/// The call of the controller during which the host is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Claims,
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The host is stopped before the leader saves that it begins to call it. So the host does not
    /// read the call, but nothing shows that the call was sent.
    Unread,
    /// The guest is changed. The next daemon starts after the guest's answer.
    Changed,
    /// The guest is changed. The next daemon starts before the guest's answer.
    Answering,
    /// The same as `Changed`, and the next daemon is killed as soon as it is started.
    Twice,
    /// The same as `Changed`, and the leading controller is killed too.
    WithController,
}

const PLACES: [Place; 5] = [
    Place::Unread,
    Place::Changed,
    Place::Answering,
    Place::Twice,
    Place::WithController,
];

/// Kills the host, and returns the replica that leads then.
async fn kill(
    killing: &mut Killing,
    leader: ProxiedReplica,
    monitor: &mut Option<Monitor>,
    call: Call,
    place: Place,
) -> ProxiedReplica {
    let name = killing.next_name();
    let replica = &leader.replica;
    let digest = replica.plan(&name, &Goal::Undone.spec(), GUESTS).await;
    if call == Call::Release {
        let changed = async {
            let started = replica.start_planned(&name, digest.clone()).await;
            started.expect("legal");
            replica.wait(&name, v1::Phase::Completed).await;
        };
        answering(monitor, changed).await;
    }
    if place == Place::Unread {
        killing.fleet.signal_host(0, Signal::STOP);
    }
    let term = killing.fleet.etcd.term().await;
    let rollout = name.clone();
    let text = match call {
        Call::Claims => {
            let started = replica.start_planned(&name, digest).await;
            started.expect("legal");
            state("Claiming")
        }
        Call::Release => {
            let undo = replica.rollouts().undo(v1::UndoRequest { rollout }).await;
            undo.expect("legal");
            state("Releasing")
        }
    };
    let held = monitor.as_mut().expect("its answers are held back");
    match place {
        Place::Unread => killing.stored(&name, &text, 1).await,
        _ => held.paused().await,
    }
    killing.fleet.hosts[0] = None;
    match place {
        Place::Answering => killing.restart_host().await,
        Place::Twice => {
            killing.fleet.start_host(0);
            killing.fleet.hosts[0] = None;
        }
        _ => {}
    }
    if place != Place::Unread {
        held.go_on();
    }
    let next = match place {
        Place::WithController => {
            let next = killing.start_replica().await;
            killing.take_over(leader, term, &next).await;
            next
        }
        _ => leader,
    };
    if place != Place::Answering {
        killing.restart_host().await;
    }
    let place = format!("{call:?}, {place:?}");
    let finished = killing.finish(&next, &name, Goal::Undone, &place);
    answering(monitor, finished).await;
    next
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_are_killed_at_each_place() {
    let Some((mut killing, mut leader, mut monitor)) = Killing::start(Some(HELD)).await else {
        return;
    };
    for call in [Call::Claims, Call::Release] {
        for place in PLACES {
            leader = kill(&mut killing, leader, &mut monitor, call, place).await;
        }
    }
    killing.end(leader, &mut monitor).await;
}
