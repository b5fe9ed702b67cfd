// SPDX-License-Identifier: Apache-2.0
//! Tests guests that answer late, in part or not at all, and those that boot again.

use std::collections::BTreeSet;

use super::super::machine::{MAX_ATTEMPTS, MAX_BACKOFF};
use super::*;
use crate::hosts::News;

#[test]
fn the_wave_goes_on_without_a_guest_that_does_not_answer() {
    let mut rollout = started(&[1], Policy::default());
    let mut now = 0;
    for _ in 0..MAX_ATTEMPTS {
        assert!(matches!(
            rollout.members()[0].state,
            State::Pending | State::Claiming { .. }
        ));
        assert_eq!(claims(&rollout.step(now)), [0]);
        assert_eq!(rollout.members()[0].generation, 1, "it is the same call");
        claimed(&mut rollout, 0, failed(Failure::Unknown), now);
        now += MAX_BACKOFF;
    }
    assert!(matches!(rollout.members()[0].state, State::NotYet { .. }));
    assert_eq!(claims(&rollout.step(now)), [0]);
    assert_eq!(rollout.members()[0].generation, 2);
}

#[test]
fn abort_does_not_wait_for_an_unknown_outcome_and_ignores_what_comes_late() {
    let mut rollout = started(&[1, 1], Policy::default());
    rollout.step(0);
    rollout.abort("alice", 0);
    let release = Action::Release {
        member: 0,
        generation: 2,
    };
    assert_eq!(rollout.step(0).actions, [release.clone()]);
    rollout.claimed(0, 1, made(1), 0);
    assert!(matches!(
        rollout.members()[0].state,
        State::Releasing { .. }
    ));
    assert_eq!(rollout.step(0).actions, [], "it is still in progress");
    let mut now = 0;
    for _ in 0..20 {
        released(&mut rollout, 0, not_released(), now);
        assert_eq!(rollout.step(now).actions, []);
        now += MAX_BACKOFF;
        assert_eq!(rollout.step(now).actions, [release.clone()]);
    }
    assert_eq!(rollout.header().phase, Phase::Reverting(End::Aborted));
    released(&mut rollout, 0, RELEASED, now);
    rollout.step(now);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Aborted));
    assert_eq!(rollout.members()[1].state, State::Pending, "never changed");
}

/// Checks that a guest that waits for a resume is not taken for one that was never changed.
#[test]
fn abort_takes_back_what_a_guest_that_failed_may_have_in_part() {
    let mut rollout = started(&[1], Policy::default());
    rollout.step(0);
    claimed(&mut rollout, 0, failed(Failure::Refused), 0);
    rollout.pause("alice", 0).expect("runs");
    rollout.resume("alice", 0).expect("paused");
    assert_eq!(rollout.members()[0].state, State::Pending);
    rollout.abort("alice", 0);
    assert_eq!(releases(&rollout.step(0)), [0]);
}

#[test]
fn a_guest_that_is_given_up_ends_the_undo() {
    let mut rollout = started(&[3], Policy::default());
    rollout.step(0);
    claimed(&mut rollout, 0, made(1), 0);
    claimed(&mut rollout, 1, failed(Failure::Refused), 0);
    rollout.undo("alice", 0);
    assert_eq!(releases(&rollout.step(0)), [0, 1, 2]);
    released(&mut rollout, 0, RELEASED, 0);
    released(&mut rollout, 1, RELEASED, 0);
    released(&mut rollout, 2, not_released(), 0);
    rollout.step(0);
    assert_eq!(rollout.header().phase, Phase::Reverting(End::Undone));
    rollout.forget(2, "alice", 1).expect("it does not answer");
    assert_eq!(rollout.step(1).actions, []);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Undone));
    assert!(rollout.header().message.contains("1 forgotten"));
    assert_eq!(rollout.check_deletable(), Ok(()));
}

#[test]
fn a_guest_that_booted_again_is_changed_again_under_the_caps_or_left() {
    for (after_reboot, leaves) in [(AfterReboot::Again, false), (AfterReboot::Leave, true)] {
        let caps = Caps {
            count: Some(1),
            ..Caps::default()
        };
        let policy = Policy {
            caps,
            after_reboot,
            ..Policy::default()
        };
        let mut rollout = started(&[3], policy);
        claim_all(&mut rollout, 0);
        rollout.step(1000);
        assert_eq!(rollout.header().phase, Phase::Completed);
        rollout.look_again(&News::default());
        let checks = rollout.step(700_000).actions;
        let check = |member| Action::Check {
            member,
            generation: 1,
        };
        assert_eq!(checks, [check(0), check(1), check(2)]);
        rollout.checked(0, 1, found("boot-2", FoundClaims::None), 700_000);
        rollout.checked(1, 1, found("boot-2", FoundClaims::None), 700_000);
        rollout.checked(2, 1, found("boot-2", FoundClaims::Made), 700_000);
        let again = claims(&rollout.step(700_000));
        match leaves {
            true => {
                assert!(again.is_empty());
                let left = State::Released { void: true };
                assert_eq!(rollout.members()[0].state, left);
            }
            false => {
                assert_eq!(again, [0]);
                claimed(&mut rollout, 0, made(1), 700_000);
                assert_eq!(claims(&rollout.step(700_000)), [1]);
            }
        }
    }
}

#[test]
fn a_store_that_is_older_than_the_guests_catches_up() {
    let mut rollout = started(&[1], Policy::default());
    rollout.step(0);
    claimed(&mut rollout, 0, ClaimOutcome::Stale { seen: 7 }, 0);
    assert_eq!(rollout.take_changes().members, [0], "before it is sent");
    let claim = Action::Claim {
        member: 0,
        generation: 8,
    };
    assert_eq!(rollout.step(500).actions, [claim]);
    let seen = u64::MAX;
    claimed(&mut rollout, 0, ClaimOutcome::Stale { seen }, 500);
    assert!(
        rollout.members()[0].generation < u64::MAX,
        "room for an undo"
    );
    assert_eq!(claims(&rollout.step(2000)), [0]);
    claimed(&mut rollout, 0, made(1), 2000);
    rollout.undo("alice", 2000);
    assert_eq!(releases(&rollout.step(2000)), [0]);
    let generation = rollout.members()[0].generation;
    rollout.released(0, generation, ReleaseOutcome::Stale { seen }, 2000);
    assert_eq!(releases(&rollout.step(3000)), [0]);
    assert!(rollout.members()[0].generation > generation);
}

#[test]
fn a_guest_that_refuses_a_generation_is_not_changed_in_a_pause_or_freeze() {
    let freeze = Freeze {
        from: 1000,
        until: 100_000,
        reason: String::new(),
    };
    for (pauses, freezes) in [(true, vec![]), (false, vec![freeze])] {
        let policy = Policy {
            freezes,
            ..Policy::default()
        };
        let mut rollout = started(&[1], policy);
        assert_eq!(claims(&rollout.step(0)), [0]);
        if pauses {
            rollout.pause("alice", 900).expect("runs");
        }
        claimed(&mut rollout, 0, ClaimOutcome::Stale { seen: 7 }, 1000);
        let waits = claims(&rollout.step(90_000));
        assert!(waits.is_empty(), "it is known that nothing was changed");
        if pauses {
            rollout.resume("alice", 100_000).expect("paused");
        }
        let claim = Action::Claim {
            member: 0,
            generation: 8,
        };
        assert_eq!(rollout.step(100_000).actions, [claim]);
    }
}

/// Checks that a guest which waits for another attempt is given up like one that is being changed,
/// and that a guest to which nothing was sent is not.
#[test]
fn a_guest_that_waits_for_another_attempt_can_be_given_up_in_a_pause() {
    let booted = ClaimOutcome::Booted {
        boot: "boot-2".to_owned(),
    };
    for refusal in [ClaimOutcome::Stale { seen: 7 }, booted] {
        let mut rollout = started(&[1, 1], Policy::default());
        assert_eq!(claims(&rollout.step(0)), [0]);
        rollout.pause("alice", 0).expect("runs");
        claimed(&mut rollout, 0, refusal, 0);
        assert_eq!(rollout.members()[0].state, State::Pending);
        let policy = patchbay_access::policy::Policy::parse(
            "rules: [{name: a, principals: ['*'], role: operator}]",
        );
        let policy = policy.expect("a policy");
        let reasons = |index| crate::view::explain(&rollout, index, 0, &policy).join("; ");
        assert!(reasons(0).contains("rollout forget"), "{}", reasons(0));
        assert!(!reasons(1).contains("rollout forget"), "{}", reasons(1));
        let generation = rollout.members()[0].generation;
        rollout.forget(0, "alice", 0).expect("it may have claims");
        assert_eq!(rollout.members()[0].state, State::Forgotten);
        assert!(rollout.members()[0].generation > generation);
        rollout.resume("alice", 0).expect("paused");
        assert_eq!(claims(&rollout.step(MAX_BACKOFF)), [] as [usize; 0]);
        let refused = rollout.forget(1, "alice", 0).expect_err("nothing was sent");
        assert!(matches!(refused, NotLegal::Forget { .. }), "{refused}");
        rollout.undo("alice", MAX_BACKOFF);
        rollout.step(MAX_BACKOFF);
        assert_eq!(rollout.header().phase, Phase::Ended(End::Undone));
    }
}

#[test]
fn what_failed_is_tried_again_for_ever_and_resume_waits_for_it() {
    let mut rollout = started(&[2, 1], Policy::default());
    rollout.step(0);
    claimed(&mut rollout, 0, failed(Failure::Busy), 0);
    claimed(&mut rollout, 1, failed(Failure::Refused), 0);
    let step = rollout.step(0);
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Baking));
    assert_eq!((claims(&step), step.wake_at), (vec![], Some(500)));
    assert_eq!(claims(&rollout.step(500)), [0, 1], "in the bake time too");
    assert_eq!(rollout.members()[0].generation, 2);
    claimed(&mut rollout, 0, failed(Failure::Busy), 500);
    claimed(&mut rollout, 1, made(1), 500);
    rollout.pause("alice", 600).expect("runs");
    let paused = claims(&rollout.step(10_000));
    assert!(paused.is_empty(), "not while it is paused");
    rollout.resume("alice", 10_000).expect("paused");
    assert_eq!(claims(&rollout.step(10_000)), [0]);
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Changing));
    claimed(&mut rollout, 0, failed(Failure::Refused), 10_000);
    let mut now = 10_000;
    for _ in 0..30 {
        now = now + MAX_BACKOFF + 1;
        for index in claims(&rollout.step(now)) {
            let outcome = match index {
                0 => failed(Failure::Refused),
                _ => made(1),
            };
            claimed(&mut rollout, index, outcome, now);
        }
    }
    assert_eq!(rollout.header().phase, Phase::Completed);
    let wake = rollout.step(now).wake_at.expect("it is tried again");
    assert!(wake <= now + MAX_BACKOFF, "{wake}");
    assert_eq!(claims(&rollout.step(wake)), [0], "after the end too");
    claimed(&mut rollout, 0, made(3), wake);
    let as_wanted = |member: &Member| matches!(member.state, State::AsWanted { .. });
    assert!(rollout.members().iter().all(as_wanted));
}

/// Checks that a guest that boots after each change is left as it is in the end.
#[test]
fn a_guest_that_boots_soon_after_each_change_is_tried_more_slowly_and_then_left() {
    let mut rollout = started(&[1], Policy::default());
    let mut now = 0;
    let mut waits = Vec::new();
    for boot in 0.. {
        let generation = rollout.members()[0].generation;
        let mut wait = 0;
        while claims(&rollout.step(now)).is_empty() {
            if matches!(rollout.members()[0].state, State::Released { .. }) {
                assert_eq!(waits.len(), 3, "{waits:?}");
                assert!(waits[0] < waits[1] && waits[1] < waits[2], "{waits:?}");
                let mut notes = rollout.header().timeline.iter();
                let is_of_boots =
                    |note: &TimelineEntry| note.text.contains("lost its claims 3 times or more");
                assert!(notes.any(is_of_boots), "{:?}", rollout.header().timeline);
                return;
            }
            wait += 100;
            now += 100;
            assert!(wait < 400_000, "it is tried again");
        }
        waits.push(wait);
        assert!(rollout.members()[0].generation > generation);
        claimed(&mut rollout, 0, made(1), now);
        let generation = rollout.members()[0].generation;
        let found = found(&format!("boot-{}", boot + 2), FoundClaims::None);
        rollout.checked(0, generation, found, now);
        // The guest registers.
        rollout.look_again(&News::default());
    }
}

#[test]
fn claims_that_have_ended_by_themselves_are_not_made_again() {
    let mut rollout = started(&[2], Policy::default());
    rollout.step(0);
    for index in [0, 1] {
        let made = ClaimOutcome::Made {
            boot: "boot-1".to_owned(),
            ledger: String::new(),
            pause_us: 1,
            ttl: Some(500_000),
        };
        claimed(&mut rollout, index, made, 0);
    }
    rollout.step(1000);
    let rebooted = || found("boot-2", FoundClaims::None);
    rollout.checked(0, 1, rebooted(), 4000);
    assert_eq!(claims(&rollout.step(400_000)), [0]);
    // The guest may have made the claims, which would last for as long again.
    claimed(&mut rollout, 0, failed(Failure::Unknown), 400_000);
    assert!(
        claims(&rollout.step(1_000_000)).is_empty(),
        "it waited too long"
    );
    assert_eq!(releases(&rollout.step(1_000_000)), [0]);
    released(&mut rollout, 0, RELEASED, 1_000_000);
    rollout.checked(1, 1, rebooted(), 1_000_000);
    let states = rollout.members().iter().map(|member| &member.state);
    let left = [false, true].map(|void| State::Released { void });
    assert!(states.eq(&left), "{:?}", rollout.members());
}

/// Checks what a driver stores of an undo: the phase first, from which the rest follows.
#[test]
fn an_undo_of_which_only_the_header_was_stored_goes_on() {
    let mut rollout = started(&[2], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.take_changes();
    let members = rollout.members().to_vec();
    rollout.undo("alice", 0);
    let stored = Rollout::stored(rollout.header().clone(), members, BTreeSet::default());
    let mut next = stored.expect("a state that a driver leaves");
    assert_eq!(releases(&next.step(0)), [0, 1]);
    assert_eq!(next.take_changes().members, [0, 1]);
}

#[test]
fn a_later_member_counts_if_the_earlier_one_was_not_stored_as_superseded() {
    let mut rollout = started(&[1], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    let mut members = rollout.members().to_vec();
    rollout
        .extend(one_wave, vec![member(0)], "", 1000)
        .expect("completed");
    members.push(rollout.members()[1].clone());
    let stored = Rollout::stored(rollout.header().clone(), members, BTreeSet::default());
    let mut next = stored.expect("a state that a driver leaves");
    assert_eq!(next.members()[0].state, State::Superseded);
    assert_eq!(claims(&next.step(1000)), [1]);
    assert_eq!(next.members()[1].generation, 2);
}

/// Checks that guests that do not answer leave room for those that wait for their first call.
#[test]
fn retries_take_at_most_half_of_the_cap() {
    let policy = Policy {
        caps: Caps {
            count: Some(2),
            ..Caps::default()
        },
        ..Policy::default()
    };
    let mut rollout = started(&[2, 4], policy);
    rollout.step(0);
    claimed(&mut rollout, 0, failed(Failure::Refused), 0);
    claimed(&mut rollout, 1, failed(Failure::Refused), 0);
    rollout.promote("alice", 0).expect("settled");
    assert_eq!(claims(&rollout.step(600)), [2, 3]);
    claimed(&mut rollout, 2, made(1), 600);
    assert_eq!(claims(&rollout.step(600)), [4], "not 0 and 1");
}

#[test]
fn a_guest_that_confirmed_and_knows_nothing_any_more_is_not_taken_for_released() {
    let mut rollout = started(&[1], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.undo("alice", 0);
    assert_eq!(releases(&rollout.step(0)), [0]);
    for now in [0, MAX_BACKOFF, 2 * MAX_BACKOFF] {
        let before = rollout.members()[0].generation;
        released(&mut rollout, 0, ReleaseOutcome::Unknown, now);
        assert!(rollout.members()[0].generation > before, "no repeat");
        assert_eq!(releases(&rollout.step(now + MAX_BACKOFF)), [0]);
        let why = "no answer".to_owned();
        released(&mut rollout, 0, ReleaseOutcome::Failed { why }, now);
        assert_eq!(rollout.members()[0].state, State::no_record());
        assert_eq!(releases(&rollout.step(now + 2 * MAX_BACKOFF)), [0]);
    }
    rollout.forget(0, "alice", 0).expect("it waits for it");
    rollout.step(0);
    assert_eq!(rollout.header().phase, Phase::Ended(End::Undone));
}

#[test]
fn a_guest_that_refuses_every_call_does_not_hold_up_the_wave() {
    let stale = |seen: u64| ClaimOutcome::Stale { seen: seen * 100 };
    let booted = |boot| ClaimOutcome::Booted {
        boot: format!("boot-{boot}"),
    };
    for refusal in [&stale as &dyn Fn(u64) -> ClaimOutcome, &booted] {
        let mut rollout = started(&[1], Policy::default());
        let mut now = 0;
        for call in 1..=u64::from(MAX_ATTEMPTS) {
            assert_eq!(claims(&rollout.step(now)), [0]);
            claimed(&mut rollout, 0, refusal(call), now);
            assert!(claims(&rollout.step(now)).is_empty(), "it waits");
            now += MAX_BACKOFF;
        }
        let state = &rollout.members()[0].state;
        assert!(matches!(state, State::NotYet { .. }), "{state:?}");
    }
}

#[test]
fn a_guest_confirms_its_claims_until_it_refuses_all_of_them_and_their_time_begins_once() {
    let mut rollout = started(&[1], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    let added = Member {
        boot: "boot-1".to_owned(),
        ..member(0)
    };
    rollout
        .extend(one_wave, vec![added], "alice", 1000)
        .expect("it is completed");
    assert_eq!(claims(&rollout.step(1000)), [1]);
    assert!(rollout.members()[1].is_confirmed, "the same boot");
    let mut now = 1000;
    let ends = Some(511_000);
    for (has_claims, expires) in [(false, None), (true, ends), (false, ends), (true, ends)] {
        let outcome = ClaimOutcome::NotMade {
            has_claims,
            is_ineffective: false,
            ledger: String::new(),
            ttl: Some(500_000),
            why: "refused".to_owned(),
        };
        claimed(&mut rollout, 1, outcome, now);
        let member = &rollout.members()[1];
        assert!(matches!(member.state, State::NotYet { .. }), "{member:?}");
        assert_eq!((member.is_confirmed, member.expires), (has_claims, expires));
        assert!(claims(&rollout.step(now)).is_empty(), "it waits");
        now += 10_000;
        assert_eq!(claims(&rollout.step(now)), [1]);
    }
}

#[test]
fn claims_that_end_by_themselves_do_so_as_late_after_a_jump_of_the_clock() {
    const DAY: i64 = 86_400_000;
    for by in [DAY, -DAY] {
        let mut rollout = started(&[2], Policy::default());
        let now = 1_000_000_000;
        rollout.step(now);
        let ends = ClaimOutcome::Made {
            boot: "boot-1".to_owned(),
            ledger: String::new(),
            pause_us: 1,
            ttl: Some(500_000),
        };
        claimed(&mut rollout, 0, ends, now);
        claimed(&mut rollout, 1, made(1), now);
        rollout.take_changes();
        rollout.clock_jumped(by);
        let changed = rollout.take_changes().members;
        assert_eq!(changed, [0], "another driver knows it");
        let expires = now.saturating_add_signed(by) + 500_000;
        assert_eq!(rollout.members()[0].expires, Some(expires));
    }
}

#[test]
fn guests_whose_calls_time_out_take_turns() {
    let caps = Caps {
        count: Some(1),
        ..Caps::default()
    };
    let policy = Policy {
        caps,
        ..Policy::default()
    };
    let mut rollout = started(&[3], policy);
    let mut call = |index, from, until| {
        assert_eq!(claims(&rollout.step(from)), [index], "at {from}");
        claimed(&mut rollout, index, failed(Failure::Busy), until);
    };
    for index in 0..3 {
        call(index, 0, 0);
    }
    call(0, 10_000, 45_000);
    call(1, 45_000, 80_000);
    // The first guest is due again, and the third one has waited longer.
    call(2, 80_000, 115_000);
}

#[test]
fn a_guest_that_was_skipped_does_not_replace_one_that_has_moved_to_its_host() {
    let mut rollout = started(&[1], Policy::default());
    claim_all(&mut rollout, 0);
    let (header, mut members) = (rollout.header().clone(), rollout.members().to_vec());
    let why = "its monitor does not answer".to_owned();
    members.push(Member {
        state: State::Skipped { why },
        ..members[0].clone()
    });
    let header = Header {
        members: members.len(),
        ..header
    };
    let mut next = Rollout::stored(header, members, BTreeSet::new()).expect("as stored");
    assert!(next.members()[0].state.has_claims());
    next.undo("alice", 0);
    assert_eq!(releases(&next.step(0)), [0]);
}
