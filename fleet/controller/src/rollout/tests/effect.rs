// SPDX-License-Identifier: Apache-2.0
//! Tests guests on which claims have no effect any more.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::*;
use crate::hosts::{KeysChanged, News};

/// Returns the number of entries about drift in the timeline.
fn drift(rollout: &Rollout) -> usize {
    let timeline = rollout.header().timeline.iter();
    timeline.filter(|one| one.event == Event::Drift).count()
}

#[test]
fn a_guest_on_which_claims_have_no_effect_is_asked_until_they_have() {
    let mut rollout = started(&[2], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    let held = || FoundClaims::Ineffective("key alpha: another claim or a hold decides".to_owned());
    for index in [0, 1] {
        rollout.checked(index, 1, found("boot-1", held()), 2000);
        let state = &rollout.members()[index].state;
        assert!(!state.is_late(), "{state:?} after one answer");
    }
    let asked = rollout.step(4000).actions;
    assert_eq!(asked.len(), 2, "{asked:?}");
    for index in [0, 1] {
        rollout.checked(index, 1, found("boot-1", held()), 4000);
        let state = &rollout.members()[index].state;
        assert!(state.is_late() && state.is_ineffective(), "{state:?}");
    }
    assert_eq!(drift(&rollout), 1, "not one for each guest");
    // The guests are only asked, also in a freeze or a pause, and with a growing delay.
    let (mut now, mut asked) = (4000, Vec::new());
    while asked.len() < 12 {
        let step = rollout.step(now);
        for action in step.actions {
            let Action::Check { member, generation } = action else {
                panic!("{action:?}")
            };
            if member == 0 {
                asked.push(now);
                let answer = (asked.len() % 2 == 0).then(|| found("boot-1", held()));
                rollout.checked(member, generation, answer.flatten(), now);
            }
        }
        now += 100;
    }
    let waits: Vec<u64> = asked.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(waits.is_sorted() && waits[10] == 300_000, "{waits:?}");
    // A new leader goes on.
    let (header, members) = (rollout.header().clone(), rollout.members().to_vec());
    let mut next = Rollout::stored(header, members, BTreeSet::new()).expect("as stored");
    let check = |member| Action::Check {
        member,
        generation: 1,
    };
    next.look_again(&News::default());
    assert_eq!(next.step(now).actions, [check(0), check(1)]);
    next.checked(0, 1, found("boot-1", FoundClaims::Made), now);
    let as_wanted = State::AsWanted { pause_us: 10 };
    assert_eq!(next.members()[0].state, as_wanted);
    // The other guest has booted again.
    next.checked(1, 1, found("boot-2", FoundClaims::None), now);
    assert_eq!(claims(&next.step(now)), [1]);
    claimed(&mut next, 1, made(1), now);
    next.undo("alice", now);
    assert_eq!(releases(&next.step(now)), [0, 1]);
}

#[test]
fn a_guest_whose_keys_have_changed_is_asked_at_once() {
    let mut rollout = started(&[3], Policy::default());
    let keys = ["guest-1", "of no rollout"].map(|guest| KeysChanged {
        host: "host-0".to_owned(),
        guest: guest.to_owned(),
    });
    let news = News {
        records: Some(vec![]),
        keys: keys.to_vec(),
    };
    assert_eq!(claims(&rollout.step(0)), [0, 1, 2]);
    claimed(&mut rollout, 0, made(10), 0);
    claimed(&mut rollout, 1, failed(Failure::Busy), 0);
    claimed(&mut rollout, 2, made(10), 0);
    // A guest that refuses its claims waits, although its keys change.
    let waits = rollout.step(0);
    rollout.look_again(&news);
    assert_eq!(rollout.step(0), waits);
    assert_eq!(claims(&rollout.step(1000)), [1]);
    claimed(&mut rollout, 1, made(10), 1000);
    assert_eq!(rollout.step(1000).actions, []);
    rollout.look_again(&news);
    let check = Action::Check {
        member: 1,
        generation: 2,
    };
    assert_eq!(rollout.step(1000).actions, [check.clone()]);
    // The answer may have been given before the next change, so the guest is asked again.
    rollout.look_again(&news);
    assert_eq!(rollout.step(1000).actions, []);
    rollout.checked(1, 2, found("boot-1", FoundClaims::Made), 1000);
    assert_eq!(rollout.step(1000).actions, [check]);
    rollout.checked(1, 2, found("boot-1", FoundClaims::Made), 1000);
    assert_eq!(rollout.step(1000).actions, []);
}

#[test]
fn a_guest_that_does_not_answer_again_does_not_delay_the_gates() {
    let kind = WaveGateKind::Errors {
        max_percent: 100,
        of: ErrorsOf::Wave,
    };
    let policy = Policy {
        gates: vec![WaveGate {
            kind,
            on_failure: OnFailure::Pause,
            interval_ms: 100,
            patience_ms: 1000,
        }],
        ..Policy::default()
    };
    let mut rollout = started(&[1, 1], policy);
    assert_eq!(claim_all(&mut rollout, 0), 1);
    let check = |step: &Step| {
        let is_check = |action: &Action| matches!(action, Action::Check { member: 0, .. });
        step.actions.iter().any(is_check)
    };
    assert!(check(&rollout.step(1000)), "after the bake time");
    let changed = FoundClaims::Ineffective("key alpha: the guest has changed it".to_owned());
    rollout.checked(0, 1, found("boot-1", changed), 1000);
    assert_eq!(claims(&rollout.step(1000)), Vec::<usize>::new());
    assert!(check(&rollout.step(4000)));
    rollout.checked(0, 1, None, 4000);
    assert_eq!(claims(&rollout.step(4000)), [1]);
}

/// Checks that no command but a fix sends anything to a guest that is only asked.
#[test]
fn a_resume_sends_nothing_to_guests_that_are_only_asked() {
    let mut rollout = started(&[3, 1], Policy::default());
    rollout.step(0);
    for (index, outcome) in [(0, made(10)), (1, made(10)), (2, failed(Failure::Refused))] {
        claimed(&mut rollout, index, outcome, 0);
    }
    rollout.pause("alice", 10).expect("it runs");
    let changed = || FoundClaims::Ineffective("key alpha: the guest has changed it".to_owned());
    for _ in 0..2 {
        rollout.checked(0, 1, found("boot-1", changed()), 20);
    }
    // The service of the second guest has lost its record, and a late message has made a claim.
    let claim = |key: &str| Claim {
        key: key.to_owned(),
        want: Want::On,
    };
    let set = KeySet::new(vec![claim("alpha"), claim("beta")], vec![]);
    rollout.members[1].plan.set = Arc::new(set);
    let partly = Found {
        total: Some(1),
        ..found("boot-1", FoundClaims::Made).expect("found")
    };
    rollout.checked(1, 1, Some(partly), 20);
    assert!(rollout.members()[1].state.has_lost_record());
    rollout.checked(1, 1, found("boot-1", FoundClaims::None), 30);
    assert!(rollout.members()[1].state.has_lost_record());
    assert_eq!(drift(&rollout), 2, "one for each failure");
    rollout.resume("alice", 1000).expect("it is paused");
    assert_eq!(claims(&rollout.step(1000)), [2]);
    assert!(rollout.members()[0].state.is_ineffective());
    assert!(rollout.members()[1].state.has_lost_record());
}

/// Checks that what happens to guests of a completed rollout does not take back a guest that joins.
#[test]
fn an_added_wave_is_not_judged_by_earlier_guests_that_another_rollout_has_changed() {
    let kind = WaveGateKind::Errors {
        max_percent: 10,
        of: ErrorsOf::Rollout,
    };
    let mut rollout = started(&[4], gate(kind, OnFailure::Abort));
    claim_all(&mut rollout, 0);
    step_and_answer(&mut rollout, 1000);
    assert_eq!(rollout.header().phase, Phase::Completed);
    let held = || FoundClaims::Ineffective("key alpha: another claim decides".to_owned());
    for _ in 0..2 {
        for index in [0, 1] {
            rollout.checked(index, 1, found("boot-1", held()), 2000);
        }
    }
    let added = rollout.extend(one_wave, vec![member(9)], "alice", 3000);
    added.expect("it is completed");
    assert_eq!(claims(&rollout.step(3000)), [4]);
    claimed(&mut rollout, 4, made(10), 3000);
    rollout.step(3000);
    let until = rollout.header().waves[1].bakes_until.expect("it bakes");
    step_and_answer(&mut rollout, until);
    assert_eq!(rollout.header().phase, Phase::Completed);
    assert!(matches!(rollout.members()[4].state, State::AsWanted { .. }));
}

/// Checks that guests are asked after the bake time: the interval of the other queries is longer
/// than most bake times.
#[test]
fn a_gate_waits_until_the_guests_have_been_asked_after_the_bake_time() {
    let kind = WaveGateKind::Errors {
        max_percent: 10,
        of: ErrorsOf::Wave,
    };
    let mut rollout = started(&[3, 1], gate(kind, OnFailure::Pause));
    claim_all(&mut rollout, 0);
    rollout.step(0);
    let until = rollout.header().waves[0].bakes_until.expect("it bakes");
    let asked = rollout.step(until).actions;
    assert!(!asked.is_empty(), "the guests are asked");
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Gating));
    let changed = || FoundClaims::Ineffective("key alpha: the guest has changed it".to_owned());
    rollout.checked(0, 1, found("boot-1", changed()), until);
    for index in 1..asked.len() {
        rollout.checked(index, 1, found("boot-1", FoundClaims::Made), until);
    }
    let again = rollout.step(until + 2000).actions;
    assert_eq!(again.len(), 1, "{again:?}");
    assert_eq!(rollout.header().phase, Phase::Running(Stage::Gating));
    rollout.checked(0, 1, found("boot-1", changed()), until + 2000);
    rollout.step(until + 2000);
    assert_eq!(rollout.header().phase, Phase::Paused);
}

#[test]
fn claims_that_a_module_took_along_are_made_again_under_the_caps() {
    let caps = Caps {
        count: Some(1),
        ..Caps::default()
    };
    let mut rollout = started(
        &[2],
        Policy {
            caps,
            ..Policy::default()
        },
    );
    claim_all(&mut rollout, 0);
    rollout.step(1000);
    let replaced = || {
        let why = "the module of key m:a was loaded again".to_owned();
        found("boot-1", FoundClaims::Replaced(why))
    };
    let mut now = 1_000_000;
    rollout.checked(0, 1, replaced(), now);
    rollout.checked(1, 1, replaced(), now);
    assert_eq!(claims(&rollout.step(now)), [0]);
    claimed(&mut rollout, 0, made(1), now);
    assert_eq!(claims(&rollout.step(now)), [1]);
    claimed(&mut rollout, 1, made(1), now);
    // Each time that the claims are made, the module is loaded again.
    let mut times = 0;
    loop {
        let generation = rollout.members()[0].generation;
        rollout.checked(0, generation, replaced(), now);
        if rollout.members()[0].state.is_ineffective() {
            break;
        }
        while claims(&rollout.step(now)).is_empty() {
            now += 1000;
        }
        times += 1;
        claimed(&mut rollout, 0, made(1), now);
    }
    assert_eq!(times, 2);
    // Some time later it is tried again.
    now += 600_000;
    let generation = rollout.members()[0].generation;
    rollout.step(now);
    rollout.checked(0, generation, replaced(), now);
    assert_eq!(claims(&rollout.step(now + 300_000)), [0]);
}

#[test]
fn claims_in_another_record_are_not_those_that_were_confirmed() {
    let mut rollout = started(&[3], Policy::default());
    rollout.step(0);
    for (index, ttl) in [(0, None), (1, None), (2, Some(500))] {
        let made = ClaimOutcome::Made {
            boot: "boot-1".to_owned(),
            ledger: "record-1".to_owned(),
            pause_us: 10,
            ttl,
        };
        claimed(&mut rollout, index, made, 0);
    }
    let found_made = |ledger: &str, made, claims| {
        let record = Record::new(ledger, made);
        found("boot-1", claims).map(|found| Found { record, ..found })
    };
    let found = |ledger: &str, claims| found_made(ledger, 1, claims);
    rollout.checked(0, 1, found("record-1", FoundClaims::Made), 10);
    assert!(matches!(rollout.members()[0].state, State::AsWanted { .. }));
    rollout.checked(0, 1, found("record-2", FoundClaims::Made), 20);
    assert!(rollout.members()[0].state.has_lost_record());
    assert_eq!(drift(&rollout), 1);
    // An earlier state of the record, which has none of the claims, or some that are void.
    rollout.checked(2, 1, found_made("record-1", 0, FoundClaims::None), 30);
    assert!(rollout.members()[2].state.has_lost_record());
    let replaced = FoundClaims::Replaced("the module was loaded again".to_owned());
    rollout.checked(2, 1, found_made("record-1", 0, replaced), 40);
    assert!(
        rollout.members()[2].state.has_lost_record(),
        "not sent again"
    );
    // The claims had ended before the record was lost.
    rollout.members[2].state = State::AsWanted { pause_us: 10 };
    rollout.checked(2, 1, found("record-2", FoundClaims::None), 600);
    let ended = State::Released { void: true };
    assert_eq!(rollout.members()[2].state, ended);
    // The service refuses new claims, because it does not have the earlier ones.
    rollout.members[1].state = State::Claiming { again: true };
    claimed(&mut rollout, 1, failed(Failure::NoRecord), 600);
    assert!(rollout.members()[1].state.has_lost_record());
    assert_eq!(drift(&rollout), 1, "one for each failure");
}

/// Checks that a guest whose claims were confirmed before its service named its record is known by
/// the record from then on.
#[test]
fn the_record_of_confirmed_claims_is_learned() {
    let mut rollout = started(&[1], Policy::default());
    claim_all(&mut rollout, 0);
    rollout.take_changes();
    assert_eq!(rollout.members()[0].record, None);
    let all = rollout.members()[0].plan.set.claims().len();
    for (ledger, total) in [("record-1", all), ("record-2", all)] {
        let found = found("boot-1", FoundClaims::Made).map(|found| Found {
            record: Record::new(ledger, 1),
            total: Some(total),
            ..found
        });
        rollout.checked(0, 1, found, 10);
    }
    assert_eq!(rollout.take_changes().members, [0]);
    let record = rollout.members()[0].record.as_ref();
    let known = record.map(|record| (record.ledger.as_str(), record.generation));
    assert_eq!(known, Some(("record-1", 1)));
    assert!(rollout.members()[0].state.has_lost_record());
}

/// Checks that a fix continues the record of the earlier member, so that new claims are refused if
/// the guest's service has lost it.
#[test]
fn a_member_that_replaces_another_continues_its_record() {
    for (ttl, now, is_confirmed) in [
        (None, 1000, true),
        (Some(500_000), 1000, true),
        (Some(500), 1000, false),
    ] {
        let mut rollout = started(&[1], Policy::default());
        rollout.step(0);
        let made = ClaimOutcome::Made {
            boot: "boot-1".to_owned(),
            ledger: "record-1".to_owned(),
            pause_us: 10,
            ttl,
        };
        claimed(&mut rollout, 0, made, 0);
        rollout.step(0);
        rollout.step(now);
        assert_eq!(rollout.header().phase, Phase::Completed);
        let added = Member {
            boot: "boot-1".to_owned(),
            ..member(0)
        };
        rollout
            .extend(one_wave, vec![added], "alice", now)
            .expect("it is completed");
        let added = &rollout.members()[1];
        assert_eq!(added.is_confirmed, is_confirmed, "{ttl:?}");
        let record = added.record.as_ref().map(|record| record.generation);
        assert_eq!(record, Some(1));
    }
}
