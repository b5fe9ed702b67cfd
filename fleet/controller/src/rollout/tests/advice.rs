// SPDX-License-Identifier: Apache-2.0
//! Checks that explanations and next steps name exactly the commands that the phase and the policy
//! allow.

use patchbay_access::policy::LivePolicy;

use super::*;
use crate::authority::{Authority, Verdicts, terms};
use crate::rollout::{Claim, KeySet, Want};
use crate::runner::Command;
use crate::view;

/// Policies that demand no approvals, approvals for the key of the first guest, and for the key of
/// another guest.
const DEMANDS: [&str; 3] = [
    "",
    "approvals: [{keys: [key-0], min: 2, planner_may_approve: false}]",
    "approvals: [{keys: [key-1], min: 2}]",
];

fn authority(demand: &str) -> Authority {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let rules = "rules: [{name: all, principals: ['*'], role: operator}]";
    std::fs::write(file.path(), format!("{rules}\n{demand}\n")).expect("written");
    let policy = LivePolicy::read(file.path().to_owned()).expect("good");
    Authority::new(policy, None)
}

fn with_keys(mut rollout: Rollout) -> Rollout {
    for (index, member) in rollout.members.iter_mut().enumerate() {
        let claim = Claim {
            key: format!("key-{index}"),
            want: Want::On,
        };
        member.plan.set = std::sync::Arc::new(KeySet::new(vec![claim], vec![]));
    }
    rollout
}

/// Returns a rollout in each phase. Its first guest has confirmed the claims.
fn in_each_phase() -> Vec<Rollout> {
    let mut running = with_keys(started(&[1, 1], Policy::default()));
    running.step(0);
    claimed(&mut running, 0, made(10), 0);
    running.step(0);
    let mut paused = running.clone();
    paused.pause("alice", 0).expect("it runs");
    let mut completed = running.clone();
    for _ in 0..2 {
        completed.promote("alice", 0).expect("it bakes");
        claim_all(&mut completed, 0);
    }
    let mut reverting = running.clone();
    reverting.undo("alice", 0);
    let mut undone = reverting.clone();
    undone.members[0].state = State::Released { void: false };
    undone.step(0);
    let planned = with_keys(planned(&[1, 1], Policy::default()));
    let all = vec![planned, running, paused, completed, reverting, undone];
    let phases: Vec<&str> = all.iter().map(|one| one.header().phase.name()).collect();
    assert_eq!(
        phases,
        [
            "planned",
            "baking",
            "paused",
            "completed",
            "reverting",
            "undone"
        ]
    );
    all
}

/// Returns the states for which the rollout waits in its phase.
fn states(phase: Phase) -> Vec<(State, Option<Millis>)> {
    let not_yet = |failure| State::NotYet {
        failure,
        why: "no".to_owned(),
    };
    let waits = [
        Failure::NoRecord,
        Failure::Ineffective,
        Failure::Refused,
        Failure::Busy,
        Failure::Unknown,
    ];
    let releasing = State::Releasing {
        why: "no answer".to_owned(),
    };
    match phase {
        Phase::Planned | Phase::Ended(_) => vec![],
        Phase::Reverting(_) => vec![(State::no_record(), None), (releasing, None)],
        Phase::Running(_) | Phase::Paused | Phase::Completed => {
            let waits = waits.into_iter().map(|failure| (not_yet(failure), None));
            // The guest does not answer any more.
            let unknown = (State::AsWanted { pause_us: 1 }, Some(0));
            // A wave that was taken back has guests that are being released.
            let more = [(State::no_record(), None), (releasing, None), unknown];
            waits.chain(more).collect()
        }
    }
}

#[test]
fn an_explanation_advises_what_the_phase_and_the_policy_allow() {
    for demand in DEMANDS {
        let authority = authority(demand);
        let policy = authority.policy().current();
        for rollout in in_each_phase() {
            for (state, since) in states(rollout.header().phase) {
                let mut rollout = rollout.clone();
                rollout.members[0].state = state.clone();
                rollout.members[0].since = since;
                let text = view::explain(&rollout, 0, 0, &policy).join("; ");
                let case = format!("{demand:?}, {}: {text}", rollout.header().phase.name());
                let allows = |command: Command| authority.decide("bob", &rollout, &command).is_ok();

                let forgets = allows(Command::Forget { member: 0 })
                    && rollout.clone().forget(0, "bob", 0).is_ok();
                let is_lost = state.failure() == Some(Failure::Ineffective);
                let advises = text.contains("`rollout forget`");
                assert_eq!(advises, forgets, "{case}");

                let is_drift = state.is_ineffective();
                let accepts = authority
                    .may_adopt("bob", &rollout, &rollout.members[0])
                    .is_ok()
                    && rollout.clone().adopt(&[0], vec![], "bob", 0).is_ok();
                let advises = text.contains("`rollout drift --adopt`");
                assert_eq!(advises, is_drift && accepts, "{case}");

                let fixes = rollout.clone().extend(one_wave, vec![], "bob", 0).is_ok();
                let advises = text.contains("`rollout drift --fix`");
                assert_eq!(advises, is_lost, "{case}");
                let resumes = text.contains("resume the rollout, and then `rollout drift --fix`");
                assert_eq!(resumes, is_lost && !fixes, "{case}");
            }
        }
    }
}

#[test]
fn next_steps_are_commands_that_the_phase_and_the_policy_allow() {
    for demand in DEMANDS {
        let authority = authority(demand);
        let policy = authority.policy().current();
        for mut rollout in in_each_phase() {
            rollout.members[1].since = Some(0);
            let steps = rollout.next_steps(0, &terms(&policy, &rollout));
            for verb in Verb::ALL {
                if steps.iter().any(|step| step.command == verb.name()) {
                    let case = format!("{demand:?}, {verb:?}, {}", rollout.header().phase.name());
                    let verdict = Verdicts::new(&policy, "bob", &rollout).of(verb);
                    assert_eq!(verdict, Ok(()), "{case}");
                    assert_eq!(rollout.would_change(verb, "bob"), Ok(()), "{case}");
                }
            }
            if steps.iter().any(|step| step.command == "forget") {
                let forget = Command::Forget { member: 1 };
                assert!(authority.decide("bob", &rollout, &forget).is_ok());
                rollout.clone().forget(1, "bob", 0).expect("legal");
            }
        }
    }
}

/// Checks the advice for a plan of which the policy demands two approvals, and does not count that
/// of the person who planned it.
#[test]
fn a_plan_is_to_be_approved_until_enough_approvals_count() {
    let authority = authority(DEMANDS[1]);
    let policy = authority.policy().current();
    let mut rollout = with_keys(planned(&[1, 1], Policy::default()));
    rollout.note("alice", 0, "planned".to_owned());
    for (by, given, next) in [
        ("alice", 0, "approve"),
        ("bob", 1, "start"),
        ("carol", 2, "start"),
    ] {
        rollout.approve(by, "digest", 0).expect("planned");
        let steps = rollout.next_steps(0, &terms(&policy, &rollout));
        assert_eq!(steps[0].command, next, "{by}: {steps:?}");
        let text = view::explain(&rollout, 0, 0, &policy).join("; ");
        let expected = format!("has {given} of 2 approvals; {next} it");
        assert!(text.ends_with(&expected), "{by}: {text}");
    }
}

#[test]
fn the_text_of_a_lost_record_ends_with_its_advice() {
    assert!(NO_RECORD.ends_with(NO_RECORD_ADVICE));
}
