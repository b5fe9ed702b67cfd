// SPDX-License-Identifier: Apache-2.0
//! Tests rollouts in which nothing fails.

use patchbay_fleet::rollout::{End, Phase};
use patchbay_fleet::runner::Command;

use super::support::{Fleet, is_over, spec, tell, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn waves_change_every_guest_once_and_undo_takes_all_back() {
    let fleet = Fleet::start(2, 3).await;
    let replica = fleet.replica("one");
    let text = spec("waves: [{size: 1}, {size: rest}]\nspread_over: rack");
    let running = replica.start("net", &text).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1; 6]);
    assert_eq!(fleet.counts("beta"), [0; 6]);
    tell(&running, Command::Undo).await;
    let ended = |phase| matches!(phase, Phase::Ended(_));
    assert_eq!(wait_for(&running, ended).await, Phase::Ended(End::Undone));
    assert_eq!(fleet.counts("alpha"), [0; 6]);
    let pauses: Vec<u64> = fleet.guests.iter().map(|guest| guest.pauses()).collect();
    assert_eq!(pauses, [2; 6], "one pause to change and one to take back");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_each_claim_changes_is_taken_back() {
    for (want, before, during) in [("on", 0, 1), ("off", 1, 1), ("held", 1, 2)] {
        let fleet = Fleet::start(1, 1).await;
        fleet.guests[0].set_count("beta", before);
        let replica = fleet.replica("one");
        let text = format!(
            "selector: {{guests: [\"*\"]}}\nclaims: [{{want: {want}, keys: [beta]}}]\nwaves: [{{size: rest}}]\n"
        );
        let leads = replica.lead().await;
        let planned = leads.plan("net", &text, "alice").await;
        if want == "off" {
            // The guest itself holds the reference, so no rollout may take it away.
            let error = planned.err().expect("refused").to_string();
            assert!(error.contains("NOT_HOLDER"), "{want}: {error}");
            continue;
        }
        let running = planned.expect("planned");
        let digest = running.rollout().header().digest.clone();
        tell(&running, Command::Start { digest }).await;
        wait_for(&running, is_over).await;
        assert_eq!(fleet.counts("beta"), [during], "{want}");
        tell(&running, Command::Abort).await;
        let ended = |phase| matches!(phase, Phase::Ended(_));
        wait_for(&running, ended).await;
        assert_eq!(fleet.counts("beta"), [before], "{want}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_command_takes_the_canary_back() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let text = spec(
        "waves: [{name: canary, size: 1}, {size: rest}]\n\
         gates: [{command: probe, on_failure: abort}]",
    );
    fleet.gate("probe", "command: [/bin/false]");
    let running = replica.start("net", &text).await;
    assert_eq!(
        wait_for(&running, is_over).await,
        Phase::Ended(End::Aborted)
    );
    assert_eq!(fleet.counts("alpha"), [0; 3]);
    let pauses: u64 = fleet.guests.iter().map(|guest| guest.pauses()).sum();
    assert_eq!(pauses, 2, "only the canary was changed");
    let timeline = running.rollout().header().timeline.clone();
    let closed = timeline
        .iter()
        .any(|entry| entry.text.contains("gate 1 of wave canary is closed"));
    assert!(closed, "{timeline:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_hangs_is_ended_and_pauses_after_its_patience() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let text = spec(
        "waves: [{size: rest}]\n\
         gates: [{command: probe, timeout: 10ms, interval: 10ms, patience: 1ms, on_failure: pause}]",
    );
    fleet.gate("probe", "command: [/bin/sleep, '3600']");
    let running = replica.start("net", &text).await;
    wait_for(&running, |phase| phase == Phase::Paused).await;
    let message = running.rollout().header().message.clone();
    assert!(message.contains("did not end within 10 ms"), "{message}");
    tell(&running, Command::Promote).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
}

/// Checks that the count of a key may change between the plan and its wave. People have approved
/// the reference of the rollout, not a count.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_whose_counts_have_changed_since_the_plan_is_changed_too() {
    let fleet = Fleet::start(1, 3).await;
    let replica = fleet.replica("one");
    let leads = replica.lead().await;
    let text = spec("waves: [{size: rest}]");
    let running = leads.plan("net", &text, "alice").await.expect("planned");
    fleet.guests[1].set_count("alpha", 7);
    let digest = running.rollout().header().digest.clone();
    tell(&running, Command::Start { digest }).await;
    assert_eq!(wait_for(&running, is_over).await, Phase::Completed);
    assert_eq!(fleet.counts("alpha"), [1, 8, 1]);
    tell(&running, Command::Undo).await;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await;
    assert_eq!(fleet.counts("alpha"), [0, 7, 0]);
}

/// Checks that the newest claim decides, and that the order of the undos does not matter.
#[tokio::test(flavor = "multi_thread")]
async fn rollouts_of_one_key_can_be_undone_in_any_order() {
    let fleet = Fleet::start(1, 1).await;
    let replica = fleet.replica("one");
    let text = |want: &str| spec("waves: [{size: rest}]").replace("held", want);
    let on = replica.start("on", &text("on")).await;
    wait_for(&on, is_over).await;
    let off = replica.start("off", &text("off")).await;
    wait_for(&off, is_over).await;
    assert_eq!(fleet.counts("alpha"), [0]);
    tell(&on, Command::Undo).await;
    wait_for(&on, |phase| matches!(phase, Phase::Ended(_))).await;
    assert_eq!(fleet.counts("alpha"), [0], "the other one decides");
    tell(&off, Command::Undo).await;
    wait_for(&off, |phase| matches!(phase, Phase::Ended(_))).await;
    assert_eq!(fleet.counts("alpha"), [0], "as before both");
}
