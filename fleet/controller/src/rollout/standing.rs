// SPDX-License-Identifier: Apache-2.0
//! Reports the state of the current wave's gates, and the commands that a person can give next.

use serde::Serialize;

use super::describe::lasting;
use super::gates;
use super::state::{Member, Millis, Phase, Rollout, Stage};

/// The latest result of a gate in the current wave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// This leader has no result of the gate for this wave yet.
    NotAsked,
    /// The gate passed at this time; `None` if it needs no external information.
    Passed(Option<Millis>),
    Inconclusive {
        since: Millis,
        why: String,
    },
    /// The gate paused the rollout, or is about to close.
    Closed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateStanding {
    /// The gate in words.
    pub text: String,
    /// True if the gate aborts the rollout when it closes. Otherwise it pauses the rollout.
    pub aborts: bool,
    pub standing: Standing,
}

/// A command that is legal now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NextStep {
    pub command: &'static str,
    /// The effect, as the rest of a sentence that begins with the command.
    pub effect: String,
}

/// The conditions that the controller's policy imposes on the commands for a rollout, in addition
/// to its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The number of approvals that the rollout needs.
    pub needed: usize,
    /// The number of given approvals that count.
    pub approved: usize,
    pub may_promote: bool,
    pub may_forget: bool,
}

impl Rollout {
    /// Returns the state of each gate of the spec in the current wave.
    pub fn gate_standings(&self) -> Vec<GateStanding> {
        let gates = self.header.policy.gates.iter().enumerate();
        let standings = gates.map(|(index, gate)| GateStanding {
            text: gate.to_string(),
            aborts: gate.on_failure == super::OnFailure::Abort,
            standing: self.standing(index),
        });
        standings.collect()
    }

    fn standing(&self, index: usize) -> Standing {
        if self.header.closed_gate == Some(index) {
            return Standing::Closed(self.header.message.clone());
        }
        let gate = &self.header.policy.gates[index];
        let Some(wave) = self.header.waves.get(self.header.wave) else {
            return Standing::NotAsked;
        };
        if !matches!(self.header.phase, Phase::Running(_) | Phase::Paused) {
            return Standing::NotAsked;
        }
        if gate.kind.timeout_ms().is_none() {
            return match gates::closed(gate, wave, &self.members) {
                Some(why) => Standing::Closed(why),
                None => Standing::Passed(None),
            };
        }
        // Until this wave bakes, the stored results are those of the previous wave.
        if wave.bakes_until.is_none() {
            return Standing::NotAsked;
        }
        if let Some((since, why)) = self.run.inconclusive.get(&index) {
            let (since, why) = (*since, why.clone());
            return Standing::Inconclusive { since, why };
        }
        match self.run.answered.get(&index) {
            Some(&(asked, true)) => Standing::Passed(Some(asked)),
            _ => Standing::NotAsked,
        }
    }

    /// Returns the commands that are legal now and change something, the most likely one first.
    pub fn next_steps(&self, now: Millis, terms: &Terms) -> Vec<NextStep> {
        let may_promote = terms.may_promote && self.may_promote();
        let step = |command, effect: String| NextStep { command, effect };
        let undo = || step("undo", self.undo_effect());
        let forget = || {
            let effect = "gives up a guest that will not answer again; it may keep the change";
            step("forget", effect.to_owned())
        };
        let pause = || step("pause", "starts no further changes".to_owned());
        match self.header.phase {
            Phase::Planned => self.next_of_a_plan(terms),
            Phase::Running(Stage::Changing) => vec![pause(), undo()],
            Phase::Running(Stage::Baking | Stage::Gating) => {
                let mut steps = vec![pause(), undo()];
                if may_promote {
                    steps.insert(0, step("promote", self.promote_effect(now)));
                }
                steps
            }
            Phase::Paused => {
                let gates = match self.header.closed_gate {
                    Some(gate) => format!(" and asks gate {} again", gate + 1),
                    None => String::new(),
                };
                let resume = format!("tries the guests again that are not as wanted{gates}");
                let mut steps = vec![step("resume", resume), undo()];
                if may_promote {
                    steps.push(step("promote", self.promote_effect(now)));
                }
                steps
            }
            Phase::Completed => {
                let is_late = |member: &Member| member.is_unknown() || member.state.is_late();
                match self.members.iter().any(is_late) {
                    true => {
                        let effect = "reads the guests; --fix makes claims again where they were \
                                      lost, and --adopt accepts the guests as they are";
                        vec![step("drift", effect.to_owned()), forget(), undo()]
                    }
                    false => vec![undo()],
                }
            }
            Phase::Reverting(_) => {
                let is_late = self.members.iter().any(|member| member.state.is_stuck());
                is_late.then(forget).into_iter().collect()
            }
            Phase::Ended(_) => {
                let effect = "writes the rollout to the archive and deletes it";
                vec![step("delete", effect.to_owned())]
            }
        }
    }

    fn next_of_a_plan(&self, terms: &Terms) -> Vec<NextStep> {
        let (given, needed) = (terms.approved, terms.needed);
        let wave = self.header.waves.first();
        let (name, guests) = wave.map_or(("", 0), |wave| (&*wave.name, wave.count));
        let first = match given + 1 < needed {
            true => NextStep {
                command: "approve",
                effect: format!("adds your approval; {given} of {needed} people have approved"),
            },
            false => NextStep {
                command: "start",
                effect: format!("changes the {guests} guests of wave {name}"),
            },
        };
        let abort = NextStep {
            command: "abort",
            effect: "discards the plan; nothing was changed".to_owned(),
        };
        vec![first, abort]
    }

    fn undo_effect(&self) -> String {
        let changed = self.members.iter().filter(|member| member.may_be_changed());
        match changed.count() {
            0 => "ends the rollout; no guest was changed".to_owned(),
            1 => "takes the change of 1 guest back".to_owned(),
            count => format!("takes the changes of {count} guests back"),
        }
    }

    /// Describes what a promotion would do and skip.
    fn promote_effect(&self, now: Millis) -> String {
        let (wave, waves) = (self.header.wave, &self.header.waves);
        let then = match waves.get(wave + 1) {
            Some(next) => format!("begins wave {} at once", next.name),
            None => "completes the rollout at once".to_owned(),
        };
        let until = waves.get(wave).and_then(|wave| wave.bakes_until);
        let left = until.map_or(0, |until| until.saturating_sub(now));
        match (self.header.closed_gate, left) {
            (Some(gate), _) => format!("{then}, and SKIPS the closed gate {}", gate + 1),
            (None, 0) => format!("{then}, and skips the gates"),
            (None, left) => {
                let left = lasting(left);
                format!("{then}, and skips {left} of the bake time and the gates")
            }
        }
    }
}
