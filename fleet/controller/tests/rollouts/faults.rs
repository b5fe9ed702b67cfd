// SPDX-License-Identifier: Apache-2.0
//! Tests leaders that end, and hosts that do not answer.

use patchbay_fleet::rollout::{End, Phase, State};
use patchbay_fleet::runner::{Command, NoAnswer};

use super::support::{Fleet, is_over, spec, tell, wait_for};

/// Ends the leader after each saved change in turn, until a run is completed before its leader
/// ends.
#[tokio::test(flavor = "multi_thread")]
async fn another_replica_finishes_what_a_dead_leader_began() {
    let text = spec("waves: [{size: 1}, {size: 2}, {size: rest}]\nmax_concurrent: {count: 2}");
    for death in 1.. {
        let fleet = Fleet::start(2, 3).await;
        let first = fleet.replica("one");
        let running = first.start("net", &text).await;
        let mut version = running.version();
        let survived = tokio::select! {
            _ = version.wait_for(|&version| version >= death) => false,
            _ = wait_for(&running, is_over) => true,
        };
        drop(first);
        let second = fleet.replica("two");
        let running = second.lead().await.rollout("net").expect("stored");
        assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
        assert_eq!(
            fleet.counts("alpha"),
            [1; 6],
            "the leader died after change {death}"
        );
        tell(&running, Command::Abort).await;
        let ended = |phase| matches!(phase, Phase::Ended(_));
        wait_for(&running, ended).await;
        assert_eq!(
            fleet.counts("alpha"),
            [0; 6],
            "the leader died after change {death}"
        );
        if survived {
            assert!(death > 3, "the rollout took {death} changes");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_finishes_an_abort() {
    let text = spec("waves: [{size: 4, bake: 1h}, {size: rest}]");
    for death in 1..4 {
        let fleet = Fleet::start(2, 3).await;
        let first = fleet.replica("one");
        let running = first.start("net", &text).await;
        let baking = |phase| matches!(phase, Phase::Running(stage) if stage != patchbay_fleet::rollout::Stage::Changing);
        wait_for(&running, baking).await;
        let mut version = running.version();
        let begun = *version.borrow_and_update();
        tell(&running, Command::Abort).await;
        tokio::select! {
            _ = version.wait_for(|&version| version >= begun + death) => {}
            _ = wait_for(&running, is_over) => {}
        }
        drop(first);
        let second = fleet.replica("two");
        let running = second.lead().await.rollout("net").expect("stored");
        assert_eq!(
            wait_for(&running, is_over).await,
            Phase::Ended(End::Aborted)
        );
        assert_eq!(fleet.counts("alpha"), [0; 6]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deposed_leader_changes_nothing() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    // The leader's key is deleted, as when its lease expires, and this replica has not noticed.
    let usurped = patchbay_fleet::store::Transaction::new().delete("leader");
    fleet.store.commit(usurped).await.expect("deleted");
    let digest = running.rollout().header().digest.clone();
    let answer = running.command(Command::Start { digest }, "alice").await;
    assert_eq!(
        answer,
        Err(NoAnswer::Lost),
        "the start is not saved, so it is not confirmed"
    );
    assert_eq!(fleet.counts("alpha"), [0; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_that_are_gone_do_not_hold_up_the_others() {
    let fleet = Fleet::start(2, 2).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]\ngates: [{max_errors: 50, on_failure: abort}]");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    fleet.take_away(3);
    let digest = running.rollout().header().digest.clone();
    tell(&running, Command::Start { digest }).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1, 1, 1, 0]);
    let rollout = running.rollout();
    let state = rollout.members()[3].state.clone();
    assert!(matches!(&state, State::NotYet { why, .. } if why.contains("GUEST_NOT_FOUND")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undo_whose_answer_is_lost_is_not_made_again() {
    let fleet = Fleet::start(1, 1).await;
    let first = fleet.replica("one");
    let running = first.start("net", &spec("waves: [{size: rest}]")).await;
    wait_for(&running, is_over).await;
    let (flipped, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let (go_on, held) = std::sync::mpsc::channel::<()>();
    fleet.guests[0].on_resume(move || {
        let _ = flipped.send(());
        // The answer is held back until the leader has ended.
        let _ = held.recv();
    });
    tell(&running, Command::Abort).await;
    seen.recv().await.expect("taken back");
    drop(first);
    drop(go_on);
    let second = fleet.replica("two");
    let running = second.lead().await.rollout("net").expect("stored");
    assert_eq!(
        wait_for(&running, is_over).await,
        Phase::Ended(End::Aborted)
    );
    assert_eq!(fleet.counts("alpha"), [0]);
    let state = running.rollout().members()[0].state.clone();
    assert_eq!(
        state,
        State::Released { void: false },
        "the first answer was given again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_guest_dropped_by_itself_does_not_keep_the_rest() {
    let fleet = Fleet::start(1, 2).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: rest}]").replace("[alpha]", "[alpha, beta]");
    let running = replica.start("net", &text).await;
    wait_for(&running, is_over).await;
    fleet.guests[0].set_count("alpha", 0);
    fleet.guests[1].set_count("alpha", 0);
    fleet.guests[1].set_count("beta", 0);
    tell(&running, Command::Abort).await;
    let ended = |phase| matches!(phase, Phase::Ended(_));
    wait_for(&running, ended).await;
    assert_eq!(
        (fleet.counts("alpha"), fleet.counts("beta")),
        (vec![0; 2], vec![0; 2])
    );
    let rollout = running.rollout();
    let states: Vec<&State> = rollout
        .members()
        .iter()
        .map(|member| &member.state)
        .collect();
    assert_eq!(
        states,
        [
            &State::Released { void: false },
            &State::Released { void: true }
        ]
    );
}
