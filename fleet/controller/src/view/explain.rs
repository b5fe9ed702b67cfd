// SPDX-License-Identifier: Apache-2.0
//! Explains why a guest is in its state. The advice names only commands that the rollout's phase
//! and the policy allow at present.

use patchbay_access::policy::Policy;

use super::UNANSWERED;
use crate::authority::{may_accept, terms};
use crate::clock::timestamp;
use crate::rollout::{
    Failure, Member, Millis, NO_RECORD, NO_RECORD_ADVICE, Phase, Rollout, State, Terms,
};

/// The advice for a guest that only a person can remove from the rollout, while the policy does not
/// allow this.
const STAYS: &str = "the policy demands approvals, so the guest can leave the rollout only after the \
                     rollout is completed or an abort or undo has begun";

/// Explains why the guest is in its state, and how that can change.
pub fn explain(rollout: &Rollout, index: usize, now: Millis, policy: &Policy) -> Vec<String> {
    let member = &rollout.members()[index];
    let terms = terms(policy, rollout);
    let mut reasons = Vec::new();
    match &member.state {
        State::Skipped { why } => reasons.push(format!("the plan leaves it out: {why}")),
        State::Pending => explain_pending(rollout, index, now, &terms, &mut reasons),
        State::Superseded => reasons.push("it is in a later wave too, which counts".to_owned()),
        State::Claiming { again: false } => reasons.push("it is being changed".to_owned()),
        State::Claiming { again: true } => reasons.push(format!(
            "it is not yet as wanted{}, and is tried again",
            since(member)
        )),
        State::AsWanted { .. } if member.is_unknown() => reasons.push(format!(
            "{UNANSWERED}{}; it is asked again at growing intervals, and at once when its host \
             registers{}",
            since(member),
            or_forget(&terms)
        )),
        State::AsWanted { pause_us } => {
            reasons.push(format!("it is as wanted; it was stopped for {pause_us} us"));
        }
        State::NotYet { failure, why } => {
            let may_accept = may_accept(policy, rollout, member);
            let next = next(rollout.header().phase, *failure, may_accept, &terms);
            let since = since(member);
            reasons.push(format!("it is not yet as wanted{since}: {why}; {next}"));
        }
        State::Releasing { why } if why.is_empty() => {
            reasons.push("its claims are being ended".to_owned());
        }
        State::Releasing { why } => {
            let why = match why == NO_RECORD && !terms.may_forget {
                true => why.trim_end_matches(NO_RECORD_ADVICE),
                false => why,
            };
            reasons.push(format!(
                "its claims are not ended yet{}: {why}; this is tried again until the guest \
                 confirms it{}",
                since(member),
                or_forget(&terms)
            ));
        }
        State::Released { void: true } => {
            reasons.push("the claims had ended before, with their TTL or a reboot".to_owned());
        }
        State::Released { void: false } => reasons.push("its claims have ended".to_owned()),
        State::Adopted => reasons.push(
            "it drifted and was taken as it is; the rollout wants nothing of it any more"
                .to_owned(),
        ),
        State::Forgotten => {
            reasons.push("a person has given it up; it may still have the change".to_owned())
        }
    }
    reasons
}

/// Returns the time since when the member is in its state, as the rest of a sentence; empty if it
/// is not known.
fn since(member: &Member) -> String {
    let since = member.since.map(timestamp);
    since.map_or_else(String::new, |since| format!(" since {since}"))
}

/// Returns the end of a sentence about a guest for which the rollout waits.
fn or_forget(terms: &Terms) -> String {
    match terms.may_forget {
        true => ", or `rollout forget` gives it up".to_owned(),
        false => format!("; {STAYS}"),
    }
}

/// Returns what follows for a guest that is not yet as wanted.
fn next(phase: Phase, failure: Failure, may_accept: bool, terms: &Terms) -> String {
    let fix = match phase {
        Phase::Paused => "resume the rollout, and then `rollout drift --fix` makes them again",
        _ => "`rollout drift --fix` makes them again",
    };
    match failure {
        Failure::NoRecord => {
            let advice = match (may_accept, terms.may_forget) {
                (true, true) => {
                    ", and then accept them with `rollout drift --adopt` or give the guest up with \
                     `rollout forget`"
                }
                (true, false) => ", and then accept them with `rollout drift --adopt`",
                (false, true) => ", and then give the guest up with `rollout forget`",
                (false, false) => return format!("nothing is sent to it; {STAYS}"),
            };
            format!("nothing is sent to it; look at its keys{advice}")
        }
        Failure::Ineffective => {
            let accept = match may_accept {
                true => ", `rollout drift --adopt` accepts the keys as they are",
                false => "",
            };
            let forget = or_forget(terms);
            format!(
                "nothing is sent to it while it has the claims, and it is asked again at growing \
                 intervals; {fix}{accept}{forget}"
            )
        }
        _ if phase == Phase::Paused => {
            format!("it is tried again after a resume{}", or_forget(terms))
        }
        Failure::Refused => format!(
            "it is tried again at growing intervals, and at once when a host or guest registers{}",
            or_forget(terms)
        ),
        Failure::Busy | Failure::Unknown => format!("it is tried again{}", or_forget(terms)),
    }
}

fn explain_pending(
    rollout: &Rollout,
    index: usize,
    now: Millis,
    terms: &Terms,
    reasons: &mut Vec<String>,
) {
    let header = rollout.header();
    let wave = header.wave_of(index).unwrap_or_default();
    match header.phase {
        Phase::Planned => {
            let (given, needed) = (terms.approved, terms.needed);
            // The person who starts the rollout approves it too.
            let next = match given + 1 < needed {
                true => "approve it",
                false => "start it",
            };
            reasons.push(format!(
                "the rollout is planned and has {given} of {needed} approvals; {next}"
            ));
        }
        Phase::Paused => {
            let next = match terms.may_promote && rollout.may_promote() {
                true => "resume or promote it",
                false => "resume it",
            };
            reasons.push(format!("the rollout is paused: {}; {next}", header.message));
        }
        Phase::Completed | Phase::Ended(_) | Phase::Reverting(_) => {
            reasons.push(format!("the rollout is {}", header.phase.name()));
        }
        Phase::Running(_) if wave > header.wave => {
            let (its, current) = (&header.waves[wave].name, &header.waves[header.wave]);
            let mut reason = format!(
                "it is in wave {its}, and wave {} is in progress",
                current.name
            );
            if let Some(until) = current.bakes_until.filter(|&until| now < until) {
                reason += &format!(
                    "; that bakes for another {} s",
                    (until - now).div_ceil(1000)
                );
            }
            reasons.push(reason);
        }
        Phase::Running(_) => reasons
            .push("the caps do not allow one more guest to change at the same time".to_owned()),
    }
    if let Some(freeze) = header.policy.frozen(now) {
        let seconds = (freeze.until - now).div_ceil(1000);
        reasons.push(format!("a freeze ends in {seconds} s: {}", freeze.reason));
    }
    if rollout.members()[index].may_be_changed() {
        reasons.push(format!(
            "an earlier call may have changed it; an undo asks for its release{}",
            or_forget(terms)
        ));
    }
}
