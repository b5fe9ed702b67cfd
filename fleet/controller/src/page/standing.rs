// SPDX-License-Identifier: Apache-2.0
//! Builds the head of a rollout's page, which shows whether the guests are safe and what a person
//! can do, and the marks of those rollouts in the list that wait for a person.

use serde::Serialize;

use super::sight::Hidden;
use crate::rollout::{GateStanding, Member, Millis, Phase, Rollout, Standing, State};
use crate::view;

/// The assessment of whether the guests are safe.
#[derive(Serialize)]
pub struct Safety {
    /// "safe", "attention" or "danger".
    pub level: &'static str,
    pub text: String,
    /// The time since when the first of the guests that the text counts is in its state.
    since: Option<Millis>,
}

/// The keys that are wanted in one state.
#[derive(Serialize)]
pub struct Keys {
    want: String,
    count: u32,
    /// The names of the first of these keys.
    names: Vec<String>,
}

#[derive(Serialize)]
pub struct Gate {
    text: String,
    state: &'static str,
    message: String,
    asked: Option<Millis>,
}

/// The numbers of members that are not in their final state, by the reason.
struct Waits {
    not_yet: usize,
    /// Members that were as wanted and do not answer any more.
    unknown: usize,
    releasing: usize,
    /// Members that have not confirmed their release although they were asked.
    stuck: usize,
    forgotten: usize,
    /// Members of which the rollout wants nothing more: released or adopted.
    left: usize,
    /// The earliest time since when one of the members is not yet as wanted, unknown or stuck.
    since: Option<Millis>,
}

impl Waits {
    fn of<'m>(members: impl Iterator<Item = &'m Member>) -> Self {
        let mut waits = Self {
            not_yet: 0,
            unknown: 0,
            releasing: 0,
            stuck: 0,
            forgotten: 0,
            left: 0,
            since: None,
        };
        for member in members {
            waits.since = waits.since.into_iter().chain(member.since).min();
            waits.unknown += usize::from(member.is_unknown());
            match &member.state {
                state @ State::Releasing { .. } => {
                    waits.releasing += 1;
                    waits.stuck += usize::from(state.is_stuck());
                }
                State::Forgotten => waits.forgotten += 1,
                State::Released { .. } | State::Adopted => waits.left += 1,
                state => waits.not_yet += usize::from(state.is_late()),
            }
        }
        waits
    }

    /// Describes the guests that are not as wanted; `None` if there are none.
    fn troubled(&self) -> Option<String> {
        match (self.not_yet, self.unknown) {
            (0, 0) => None,
            (not_yet, 0) => Some(guests(not_yet, "not yet as wanted.")),
            (0, unknown) => Some(unanswered(unknown) + "."),
            (not_yet, unknown) => {
                let not_yet = guests(not_yet, "not yet as wanted");
                Some(format!("{not_yet}, and {}.", unanswered(unknown)))
            }
        }
    }
}

fn guests(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 guest {what}"),
        _ => format!("{count} guests {what}"),
    }
}

fn unanswered(count: usize) -> String {
    match count {
        1 => "1 guest does not answer, so its state is unknown".to_owned(),
        _ => format!("{count} guests do not answer, so their state is unknown"),
    }
}

/// Assesses whether the guests that the principal may see are safe.
pub fn safety<'m>(rollout: &Rollout, members: impl Iterator<Item = &'m Member>) -> Safety {
    let waits = Waits::of(members);
    let gates = rollout.gate_standings();
    let doubtful = gates.iter().position(|gate| !is_open(&gate.standing));
    let say = |level, text: String| Safety {
        level,
        text,
        since: None,
    };
    let dated = |level, text: String| Safety {
        level,
        text,
        since: waits.since,
    };
    let given_up = || {
        let text = guests(waits.forgotten, "given up; the change may still be there.");
        say("attention", text)
    };
    let safe = |text: &str| say("safe", text.to_owned());
    let phase = rollout.header().phase;
    if let (Phase::Running(_) | Phase::Completed, Some(text)) = (phase, waits.troubled()) {
        return dated("attention", text);
    }
    match phase {
        Phase::Planned => safe("Nothing is changed yet."),
        Phase::Paused => match rollout.header().closed_gate {
            Some(gate) => say(
                "danger",
                format!(
                    "Gate {} is closed. What is changed stays until you decide.",
                    gate + 1
                ),
            ),
            None => say(
                "attention",
                "Paused. What is changed stays until you decide.".to_owned(),
            ),
        },
        Phase::Running(_) => match doubtful {
            Some(gate) => say(
                "attention",
                format!("Gate {} gives no clear answer.", gate + 1),
            ),
            None => safe("No guest has failed, and no gate is closed."),
        },
        Phase::Completed if waits.forgotten > 0 => given_up(),
        Phase::Completed if waits.left > 0 => say(
            "safe",
            guests(waits.left, "left as found; every other one is as wanted."),
        ),
        Phase::Completed => safe("Every guest is as wanted."),
        Phase::Reverting(_) if waits.stuck > 0 => dated(
            "danger",
            guests(waits.stuck, "did not confirm that the change is undone."),
        ),
        Phase::Reverting(_) => say(
            "attention",
            guests(
                waits.releasing,
                "still to confirm that the change is undone.",
            ),
        ),
        Phase::Ended(_) if waits.forgotten > 0 => given_up(),
        Phase::Ended(_) => safe("No guest has the change."),
    }
}

/// Returns the reason why the rollout waits for a person; `None` if it does not.
pub fn needs<'m>(
    rollout: &Rollout,
    members: impl Iterator<Item = &'m Member>,
) -> Option<&'static str> {
    let waits = Waits::of(members);
    match rollout.header().phase {
        Phase::Planned => Some("approve or start the plan"),
        Phase::Paused if rollout.header().closed_gate.is_some() => Some("a gate is closed"),
        Phase::Paused => Some("it is paused"),
        Phase::Reverting(_) if waits.stuck > 0 => Some("guests are not released"),
        Phase::Running(_) | Phase::Completed if waits.not_yet > 0 => {
            Some("guests are not yet as wanted")
        }
        Phase::Running(_) | Phase::Completed if waits.unknown > 0 => Some("guests do not answer"),
        _ => None,
    }
}

fn is_open(standing: &Standing) -> bool {
    matches!(standing, Standing::NotAsked | Standing::Passed(_))
}

pub fn keys<'m>(members: impl Iterator<Item = &'m Member>) -> Vec<Keys> {
    let keys = view::keys(members).into_iter().map(|keys| Keys {
        want: keys.want,
        count: keys.count,
        names: keys.names,
    });
    keys.collect()
}

pub fn gates(rollout: &Rollout, hidden: &Hidden<'_>) -> Vec<Gate> {
    let gate = |gate: GateStanding| {
        let (state, message, asked) = match gate.standing {
            Standing::NotAsked => ("not asked", String::new(), None),
            Standing::Passed(asked) => ("passed", String::new(), asked),
            Standing::Inconclusive { since, why } => ("inconclusive", why, Some(since)),
            Standing::Closed(why) => ("closed", why, None),
        };
        Gate {
            text: gate.text,
            state,
            message: hidden.shown(&message),
            asked,
        }
    };
    rollout.gate_standings().into_iter().map(gate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::{Action, ClaimOutcome, Header, Wave};

    #[test]
    fn a_completed_rollout_tells_of_guests_that_were_given_up() {
        let members = vec![Member::new("host", "one"), Member::new("host", "two")];
        let header = Header {
            digest: "digest".to_owned(),
            waves: vec![Wave {
                count: 2,
                ..Wave::default()
            }],
            members: 2,
            ..Header::default()
        };
        let mut rollout = Rollout::new(header, members);
        rollout.start("alice", "digest", 0).expect("planned");
        while rollout.header().phase != Phase::Completed {
            for action in rollout.step(0).actions {
                if let Action::Claim { member, generation } = action {
                    let made = ClaimOutcome::Made {
                        boot: "boot".to_owned(),
                        ledger: String::new(),
                        pause_us: 1,
                        ttl: None,
                    };
                    rollout.claimed(member, generation, made, 0);
                }
            }
        }
        let said = |rollout: &Rollout| {
            let safety = safety(rollout, rollout.members().iter());
            (safety.level, safety.text)
        };
        let as_wanted = "Every guest is as wanted.".to_owned();
        assert_eq!(said(&rollout), ("safe", as_wanted));
        rollout.forget(0, "alice", 0).expect("it has claims");
        let given_up = "1 guest given up; the change may still be there.".to_owned();
        assert_eq!(said(&rollout), ("attention", given_up));
    }
}
