// SPDX-License-Identifier: Apache-2.0
//! Tests guests that were as wanted and do not answer any more, and the times since when guests are
//! not as they should be.

use patchbay_access::policy::Policy as AccessPolicy;
use patchbay_proto::fleet::v1::GuestPhase;

use super::*;
use crate::authority::terms;
use crate::hosts::News;
use crate::sight::Sight;
use crate::view;

fn checks(step: &Step) -> Vec<usize> {
    let member = |action: &Action| match action {
        Action::Check { member, .. } => Some(*member),
        _ => None,
    };
    step.actions.iter().filter_map(member).collect()
}

/// Returns a completed rollout of two guests, as of 1000.
fn completed() -> Rollout {
    let mut rollout = started(&[2], Policy::default());
    for member in claims(&rollout.step(0)) {
        claimed(&mut rollout, member, made(10), 0);
    }
    rollout.step(0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    rollout
}

#[test]
fn a_guest_that_does_not_answer_is_unknown_until_it_does() {
    let mut rollout = completed();
    rollout.look_again(&News::default());
    assert_eq!(checks(&rollout.step(2000)), [0, 1]);
    let boot = rollout.members()[1].boot.clone();
    rollout.take_changes();
    rollout.checked(0, 1, None, 3000);
    rollout.checked(1, 1, found(&boot, FoundClaims::Made), 3000);
    assert!(rollout.members()[0].is_unknown());
    assert!(!rollout.members()[1].is_unknown());
    assert_eq!(rollout.take_changes().members, [0], "the time is stored");
    // It is asked again before the interval of the others, with a growing delay.
    let step = rollout.step(3000);
    assert_eq!((checks(&step), step.wake_at), (vec![], Some(3500)));
    assert_eq!(checks(&rollout.step(3500)), [0]);
    rollout.checked(0, 1, None, 4000);
    let step = rollout.step(4000);
    assert_eq!((checks(&step), step.wake_at), (vec![], Some(5000)));
    assert_eq!(rollout.members()[0].since, Some(3000), "the first time");
    assert!(rollout.take_changes().members.is_empty(), "nothing is new");
    assert_eq!(checks(&rollout.step(5000)), [0]);
    rollout.checked(0, 1, found(&boot, FoundClaims::Made), 6000);
    assert_eq!(rollout.members()[0].since, None);
    assert_eq!(rollout.take_changes().members, [0]);
    assert!(checks(&rollout.step(6000)).is_empty());
    assert_eq!(rollout.header().phase, Phase::Completed);
}

/// Checks that only changes of a guest that boots after each one are delayed, and not queries.
#[test]
fn a_guest_that_registers_is_asked_at_once_even_if_it_boots_often() {
    let mut rollout = completed();
    let generation = |rollout: &Rollout| rollout.members()[0].generation;
    rollout.look_again(&News::default());
    assert_eq!(checks(&rollout.step(2000)), [0, 1]);
    let booted = found("boot-2", FoundClaims::None);
    rollout.checked(0, generation(&rollout), booted, 2000);
    assert_eq!(claims(&rollout.step(30_000)), [0]);
    claimed(&mut rollout, 0, made(10), 30_000);
    for now in [40_000, 40_001] {
        rollout.look_again(&News::default());
        assert!(checks(&rollout.step(now)).contains(&0), "{now}");
        rollout.checked(0, generation(&rollout), None, now);
        assert!(rollout.members()[0].is_unknown());
    }
}

#[test]
fn a_guest_that_is_late_or_stuck_has_the_time_since_when() {
    let mut rollout = started(&[2], Policy::default());
    let since = |rollout: &Rollout| rollout.members()[0].since;
    assert_eq!(claims(&rollout.step(0)), [0, 1]);
    claimed(&mut rollout, 1, made(10), 0);
    claimed(&mut rollout, 0, failed(Failure::Refused), 10);
    rollout.step(20);
    assert_eq!(since(&rollout), Some(20));
    // It is late since its first failure, and not while it is as wanted.
    assert_eq!(claims(&rollout.step(510)), [0]);
    claimed(&mut rollout, 0, failed(Failure::Refused), 600);
    rollout.step(600);
    assert_eq!(since(&rollout), Some(20));
    assert_eq!(claims(&rollout.step(1600)), [0]);
    assert_eq!(since(&rollout), Some(20));
    claimed(&mut rollout, 0, made(10), 1700);
    rollout.step(1700);
    assert_eq!(since(&rollout), None);
    rollout.undo("alice", 20_000);
    assert_eq!(releases(&rollout.step(20_000)), [0, 1]);
    assert_eq!(since(&rollout), None);
    released(&mut rollout, 0, not_released(), 20_000);
    rollout.step(20_100);
    assert_eq!(since(&rollout), Some(20_100));
    assert_eq!(rollout.members()[1].since, None);
}

#[test]
fn the_api_tells_what_is_unknown_from_what_is_as_wanted() {
    let mut rollout = completed();
    let policy = AccessPolicy::parse("rules: [{name: a, principals: ['*'], role: viewer}]");
    let policy = policy.expect("a policy");
    rollout.look_again(&News::default());
    assert_eq!(checks(&rollout.step(2000)), [0, 1]);
    rollout.checked(0, 1, None, 3000);
    let shown = view::rollout(
        &rollout,
        true,
        &Sight::new(&policy, "alice"),
        &terms(&policy, &rollout),
    );
    let wave = &shown.waves[0];
    assert_eq!((wave.as_wanted, wave.unknown, wave.not_yet), (1, 1, 0));
    let guest = &shown.guests[0];
    assert_eq!(guest.phase(), GuestPhase::Unknown);
    assert_eq!(guest.message, view::UNANSWERED);
    let since = guest.since.expect("a time");
    assert_eq!(since.seconds, 3);
    let reasons = view::explain(&rollout, 0, 4000, &policy).join("; ");
    let expected = format!("{} since {since}; it is asked again", view::UNANSWERED);
    assert!(reasons.starts_with(&expected), "{reasons}");
}
