// SPDX-License-Identifier: Apache-2.0
//! Tests gates that are asked during the bake time, and those that the guests decide.

use std::collections::BTreeSet;

use super::*;

fn command(on_failure: OnFailure) -> Policy {
    let command = WaveGateKind::Command {
        argv: vec!["true".to_owned()],
        timeout_ms: 1,
    };
    gate(command, on_failure)
}

fn asked(asked: Millis) -> [Action; 1] {
    [Action::RunGate {
        wave: 0,
        gate: 0,
        asked,
    }]
}

fn failed_gate() -> GateAnswer {
    GateAnswer::Failed("exit status 1".to_owned())
}

fn inconclusive() -> GateAnswer {
    GateAnswer::Inconclusive("no answer".to_owned())
}

/// Starts a rollout with two waves, and changes the first, which then bakes until 1000.
fn baking(policy: Policy) -> Rollout {
    let mut rollout = started(&[1, 1], policy);
    assert_eq!(claims(&rollout.step(0)), [0]);
    claimed(&mut rollout, 0, made(10), 0);
    rollout
}

#[test]
fn a_gate_is_asked_all_through_the_bake_time_and_once_after_it() {
    let mut rollout = baking(command(OnFailure::Abort));
    let mut times = Vec::new();
    for now in (0..=1000).step_by(50) {
        if rollout.step(now).actions == asked(now) {
            times.push(now);
            rollout.gate_ended(0, 0, now, GateAnswer::Passed, now + 10);
        }
    }
    let expected: Vec<Millis> = (0..=1000).step_by(100).collect();
    assert_eq!(times, expected);
    assert_eq!(claims(&rollout.step(1010)), [1]);
}

#[test]
fn a_gate_that_fails_in_the_bake_time_takes_the_rollout_back_at_once() {
    let mut rollout = baking(command(OnFailure::Abort));
    assert_eq!(rollout.step(0).actions, asked(0));
    assert_eq!(rollout.step(0).actions, [], "asked once");
    rollout.gate_ended(0, 0, 0, failed_gate(), 10);
    assert_eq!(releases(&rollout.step(10)), [0]);
    // An answer that comes too late, or is of another wave, counts for nothing.
    let mut late = baking(command(OnFailure::Abort));
    late.step(0);
    late.gate_ended(1, 0, 0, failed_gate(), 10);
    late.gate_ended(0, 0, 5, failed_gate(), 10);
    late.pause("alice", 10).expect("runs");
    late.gate_ended(0, 0, 0, failed_gate(), 10);
    assert_eq!(late.header().phase, Phase::Paused);
}

#[test]
fn an_answer_of_before_the_end_of_the_bake_time_does_not_open_the_gate() {
    let mut rollout = baking(command(OnFailure::Abort));
    rollout.step(0);
    rollout.gate_ended(0, 0, 0, GateAnswer::Passed, 10);
    assert_eq!(rollout.step(990).actions, asked(990));
    let step = rollout.step(1000);
    assert_eq!(
        (claims(&step), step.actions.len()),
        (vec![], 0),
        "it is being asked"
    );
    rollout.gate_ended(0, 0, 990, GateAnswer::Passed, 1010);
    assert_eq!(
        rollout.step(1010).actions,
        asked(1010),
        "it was asked before the end"
    );
    rollout.gate_ended(0, 0, 1010, GateAnswer::Passed, 1020);
    assert_eq!(claims(&rollout.step(1020)), [1]);
}

/// Checks that another driver asks again, because answers are not stored.
#[test]
fn another_driver_asks_the_gate_again() {
    let mut rollout = baking(command(OnFailure::Abort));
    assert_eq!(rollout.step(1000).actions, asked(1000));
    let mut other = Rollout::new(rollout.header().clone(), rollout.members().to_vec());
    assert_eq!(other.step(1000).actions, asked(1000));
    other.gate_ended(0, 0, 1000, failed_gate(), 1000);
    assert_eq!(releases(&other.step(1000)), [0]);
}

#[test]
fn an_inconclusive_gate_never_reverts_and_pauses_after_its_patience() {
    let mut rollout = baking(command(OnFailure::Abort));
    let mut now = 0;
    while rollout.header().phase != Phase::Paused {
        assert!(now < 3000, "{:?}", rollout.header());
        let step = rollout.step(now);
        if step.actions == asked(now) {
            rollout.gate_ended(0, 0, now, inconclusive(), now);
        }
        now += 50;
    }
    assert!((1000..1200).contains(&now), "{now}");
    assert!(rollout.header().message.contains("inconclusive"));
    let notes = rollout.header().timeline.iter();
    let notes = notes.filter(|entry| entry.text.contains("asked again"));
    assert_eq!(notes.count(), 1, "not once for each answer");
    rollout.resume("alice", now).expect("paused");
    assert_eq!(
        rollout.step(now).actions,
        asked(now),
        "patience begins anew"
    );
    rollout.gate_ended(0, 0, now, inconclusive(), now);
    rollout.step(now);
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Gating));
    assert_eq!(rollout.step(now + 100).actions, asked(now + 100));
    rollout.gate_ended(0, 0, now + 100, GateAnswer::Passed, now + 100);
    assert_eq!(claims(&rollout.step(now + 100)), [1]);
}

#[test]
fn a_wave_of_which_too_few_guests_are_as_wanted_pauses_the_rollout() {
    let policy = Policy {
        min_success: 2,
        ..Policy::default()
    };
    let mut rollout = started(&[3, 1], policy);
    rollout.step(0);
    claimed(&mut rollout, 0, made(1), 0);
    claimed(&mut rollout, 1, failed(Failure::Refused), 0);
    claimed(&mut rollout, 2, failed(Failure::Refused), 0);
    rollout.step(0);
    // The retries fail too.
    for index in claims(&rollout.step(999)) {
        claimed(&mut rollout, index, failed(Failure::Refused), 999);
    }
    step_and_answer(&mut rollout, 1000);
    assert_eq!(rollout.header().phase, Phase::Paused);
    let message = &rollout.header().message;
    assert!(
        message.contains("1 of its guests are as wanted, and 2 must be"),
        "{message}"
    );
    rollout.resume("alice", 2000).expect("paused");
    assert_eq!(claims(&rollout.step(2000)), [1, 2]);
    claimed(&mut rollout, 1, made(1), 2000);
    claimed(&mut rollout, 2, failed(Failure::Refused), 2000);
    assert_eq!(claims(&step_and_answer(&mut rollout, 2000)), [3]);
}

#[test]
fn a_budget_of_errors_of_the_whole_rollout_closes_the_gate_in_a_later_wave() {
    let kind = WaveGateKind::Errors {
        max_percent: 25,
        of: ErrorsOf::Rollout,
    };
    let mut rollout = started(&[2, 2], gate(kind, OnFailure::Pause));
    rollout.step(0);
    claimed(&mut rollout, 0, made(1), 0);
    claimed(&mut rollout, 1, failed(Failure::Refused), 0);
    assert_eq!(
        rollout.header().phase,
        Phase::Running(Stage::Changing),
        "1 of 4"
    );
    rollout.promote("alice", 10).expect("it is settled");
    assert_eq!(claims(&rollout.step(10)), [2, 3]);
    claimed(&mut rollout, 2, failed(Failure::Refused), 10);
    assert_eq!(rollout.header().phase, Phase::Paused);
    let message = &rollout.header().message;
    assert!(
        message.contains("2 of the rollout's 4 guests are not yet as wanted"),
        "{message}"
    );
}

#[test]
fn a_late_wave_that_fails_takes_back_itself_alone() {
    let kind = WaveGateKind::Errors {
        max_percent: 50,
        of: ErrorsOf::Wave,
    };
    let mut rollout = started(&[2], gate(kind, OnFailure::Abort));
    claim_all(&mut rollout, 0);
    step_and_answer(&mut rollout, 1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    let added = vec![member(2), member(3), member(4)];
    rollout
        .extend(one_wave, added, "", 2000)
        .expect("completed");
    assert_eq!(claims(&rollout.step(2000)), [2, 3, 4]);
    claimed(&mut rollout, 2, made(1), 2000);
    claimed(&mut rollout, 3, failed(Failure::Refused), 2000);
    claimed(&mut rollout, 4, failed(Failure::Refused), 2000);
    let step = rollout.step(2000);
    assert_eq!(releases(&step), [2, 3, 4]);
    assert_eq!(rollout.header().phase, Phase::Completed);
    let is_made = |index: usize| matches!(rollout.members()[index].state, State::AsWanted { .. });
    assert!(is_made(0) && is_made(1));
    released(&mut rollout, 3, not_released(), 2000);
    assert_eq!(releases(&rollout.step(2500)), [3], "until it confirms it");
}

#[test]
fn a_leader_whose_clock_was_ahead_does_not_hold_up_the_gates_of_the_next_one() {
    let ahead = 10_800_000;
    let mut rollout = baking(command(OnFailure::Abort));
    rollout.step(0);
    rollout.clock_jumped(10_800_000);
    rollout.step(ahead + 10_000);
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Gating));
    let (header, members) = (rollout.header().clone(), rollout.members().to_vec());
    let stored = Rollout::stored(header, members, BTreeSet::default());
    let mut next = stored.expect("a state that a driver leaves");
    assert_eq!(next.step(20_000).actions, asked(20_000));
    next.gate_ended(0, 0, 20_000, GateAnswer::Passed, 20_000);
    assert_eq!(claims(&next.step(20_000)), [1]);
}
