// SPDX-License-Identifier: Apache-2.0
//! Tests the states of gates and the next steps that a rollout reports.

use super::*;
use crate::rollout::{Event, Standing, Terms};

fn prometheus() -> Policy {
    let query = WaveGateKind::Prometheus {
        url: "http://prom".to_owned(),
        query: "errors".to_owned(),
        above: None,
        below: Some(0.5),
        timeout_ms: 1,
    };
    gate(query, OnFailure::Pause)
}

/// Starts a rollout with two waves, and changes the first, which then bakes until 1000.
fn baking(policy: Policy) -> Rollout {
    let mut rollout = started(&[1, 1], policy);
    assert_eq!(claims(&rollout.step(0)), [0]);
    claimed(&mut rollout, 0, made(10), 0);
    rollout.step(0);
    rollout
}

fn standing(rollout: &Rollout) -> Standing {
    let [gate] = &rollout.gate_standings()[..] else {
        panic!("one gate");
    };
    assert_eq!(gate.text, "prometheus errors below 0.5");
    gate.standing.clone()
}

/// Returns the conditions of a policy that demands nothing.
fn terms(rollout: &Rollout) -> Terms {
    Terms {
        needed: rollout.header().policy.approvals.max(1),
        approved: rollout.header().approvals.len(),
        may_promote: true,
        may_forget: true,
    }
}

fn next(rollout: &Rollout, now: Millis) -> Vec<(&'static str, String)> {
    let steps = rollout.next_steps(now, &terms(rollout)).into_iter();
    steps.map(|step| (step.command, step.effect)).collect()
}

/// Checks that every command that is offered is legal, and that undo is offered wherever it is.
fn check_offers(rollout: &Rollout, now: Millis) {
    let offered: Vec<_> = rollout
        .next_steps(now, &terms(rollout))
        .into_iter()
        .collect();
    for verb in Verb::ALL {
        let is_offered = offered.iter().any(|step| step.command == verb.name());
        let is_legal = rollout.would_change(verb, "alice").is_ok();
        assert!(
            !is_offered || is_legal,
            "{verb:?} in {:?}",
            rollout.header().phase
        );
        if verb == Verb::Undo && rollout.header().phase != Phase::Planned {
            assert_eq!(is_offered, is_legal, "{:?}", rollout.header().phase);
        }
    }
}

#[test]
fn a_gate_stands_as_it_answered_last_and_the_timeline_has_each_change_once() {
    let mut rollout = started(&[1, 1], prometheus());
    assert_eq!(standing(&rollout), Standing::NotAsked);
    rollout.step(0);
    claimed(&mut rollout, 0, made(10), 0);
    rollout.step(0);
    assert_eq!(standing(&rollout), Standing::NotAsked);
    let inconclusive = || GateAnswer::Inconclusive("no answer".to_owned());
    rollout.gate_ended(0, 0, 0, inconclusive(), 10);
    let (since, why) = (0, "no answer".to_owned());
    assert_eq!(standing(&rollout), Standing::Inconclusive { since, why });
    for asked in [100, 200] {
        rollout.step(asked);
        rollout.gate_ended(0, 0, asked, GateAnswer::Passed, asked + 10);
        assert_eq!(standing(&rollout), Standing::Passed(Some(asked)));
        check_offers(&rollout, asked);
    }
    rollout.step(300);
    rollout.gate_ended(0, 0, 300, GateAnswer::Failed("0.7".to_owned()), 310);
    assert!(matches!(standing(&rollout), Standing::Closed(why) if why.contains("0.7")));
    let events = rollout.header().timeline.iter();
    let events = events.filter(|entry| matches!(entry.event, Event::Gate | Event::GateClosed));
    let texts: Vec<&str> = events.map(|entry| &*entry.text).collect();
    assert_eq!(
        texts,
        [
            "gate 1 of wave wave-0 is inconclusive, and asked again: no answer",
            "gate 1 of wave wave-0 has passed",
            "gate 1 of wave wave-0 is closed: 0.7"
        ]
    );
    let last = rollout.header().timeline.last().expect("events");
    assert_eq!((last.event, last.phase), (Event::GateClosed, Phase::Paused));
}

#[test]
fn a_promotion_is_said_to_skip_the_closed_gate_and_undo_is_beside_it() {
    let mut rollout = baking(prometheus());
    let steps = next(&rollout, 400);
    assert_eq!(
        steps[0],
        (
            "promote",
            "begins wave wave-1 at once, and skips 1s of the bake time and the gates".to_owned()
        )
    );
    rollout.gate_ended(0, 0, 0, GateAnswer::Failed("0.7".to_owned()), 410);
    // Another driver knows the closed gate too.
    let rollout = Rollout::new(rollout.header().clone(), rollout.members().to_vec());
    assert!(matches!(standing(&rollout), Standing::Closed(_)));
    check_offers(&rollout, 410);
    let steps = next(&rollout, 410);
    assert_eq!(
        steps,
        [
            (
                "resume",
                "tries the guests again that are not as wanted and asks gate 1 again".to_owned()
            ),
            ("undo", "takes the change of 1 guest back".to_owned()),
            (
                "promote",
                "begins wave wave-1 at once, and SKIPS the closed gate 1".to_owned()
            ),
        ]
    );
    let mut resumed = rollout.clone();
    resumed.resume("alice", 420).expect("paused");
    assert_eq!(resumed.header().closed_gate, None);
    let mut undone = rollout;
    undone.undo("alice", 420);
    check_offers(&undone, 420);
    assert_eq!(next(&undone, 420), []);
}

#[test]
fn what_is_offered_is_legal_in_each_phase() {
    let mut rollout = planned(&[1, 1], Policy::default());
    check_offers(&rollout, 0);
    assert_eq!(next(&rollout, 0)[0].0, "start");
    rollout.start("alice", "digest", 0).expect("planned");
    rollout.step(0);
    check_offers(&rollout, 0);
    rollout.pause("alice", 0).expect("runs");
    check_offers(&rollout, 0);
    claimed(&mut rollout, 0, made(10), 0);
    check_offers(&rollout, 0);
    rollout.resume("alice", 0).expect("paused");
    for _ in 0..2 {
        rollout.step(0);
        rollout.promote("alice", 0).expect("it bakes");
        claim_all(&mut rollout, 0);
    }
    rollout.step(0);
    check_offers(&rollout, 0);
    assert_eq!(next(&rollout, 0)[0].0, "undo");
    rollout.members[0].since = Some(0);
    check_offers(&rollout, 0);
    let steps: Vec<&str> = next(&rollout, 0).into_iter().map(|step| step.0).collect();
    assert_eq!(steps, ["drift", "forget", "undo"]);
    let mut more = planned(
        &[1],
        Policy {
            approvals: 3,
            ..Policy::default()
        },
    );
    assert_eq!(next(&more, 0)[0].0, "approve");
    more.abort("alice", 0);
    more.step(0);
    check_offers(&more, 0);
    assert_eq!(next(&more, 0)[0].0, "delete");
}

#[test]
fn entries_are_numbered_also_when_earlier_ones_are_dropped() {
    let mut rollout = started(&[1], Policy::default());
    for _ in 0..600 {
        rollout.pause("alice", 0).expect("runs");
        rollout.resume("alice", 0).expect("paused");
    }
    let timeline = &rollout.header().timeline;
    let numbers: Vec<u64> = timeline.iter().map(|entry| entry.number).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    assert_eq!(numbers.last(), Some(&rollout.header().entries));
    assert!(rollout.header().entries > 1200);
}
