// SPDX-License-Identifier: Apache-2.0
//! Amends a rollout for guests that drifted or joined after the plan.

use std::sync::Arc;

use super::keys::KeySets;
use super::legal::NotLegal;
use super::state::{Failure, Member, Millis, Phase, Rollout, Stage, State, Wave};

/// The number of waves from which on no further one is added, so that the header stays small.
pub(super) const MAX_WAVES: usize = 2048;

impl Rollout {
    /// Adds a wave of these members after the last one. An earlier member of the same guest stays,
    /// and abort and undo revert both.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout runs or is completed, and if it has [`MAX_WAVES`] waves.
    pub fn extend(
        &mut self,
        wave: &str,
        added: Vec<Member>,
        principal: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        if !matches!(self.header.phase, Phase::Running(_) | Phase::Completed) {
            return Err(self.not_legal("drift --fix", "running or completed"));
        }
        let (first, count) = (self.members.len(), added.len());
        if count == 0 {
            return Ok(());
        }
        let waves = self.header.waves.len();
        if waves >= MAX_WAVES {
            let rollout = self.header.name.clone();
            return Err(NotLegal::Waves { rollout, waves });
        }
        self.header.waves.push(Wave {
            name: wave.to_owned(),
            first,
            count,
            bake_ms: 0,
            bakes_until: None,
        });
        self.append(added);
        let text = format!("wave {wave} is added, with {count} guests");
        if self.header.phase == Phase::Completed {
            self.enter(Phase::Running(Stage::Committing), principal, now, &text);
        } else {
            self.note(principal, now, text);
        }
        Ok(())
    }

    /// Accepts the present state of guests. The rollout no longer controls the members with these
    /// indices, except those whose outcome is unknown. `joined` guests are left out permanently.
    ///
    /// # Errors
    /// [`NotLegal`] if the rollout is planned, reverts or has ended.
    pub fn adopt(
        &mut self,
        drifted: &[usize],
        joined: Vec<Member>,
        principal: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        if !self.header.phase.has_desired_state() {
            return Err(self.not_legal("drift --adopt", "running, paused or completed"));
        }
        for &index in drifted {
            // A guest whose outcome is unknown must be queried first.
            let is_known = matches!(
                self.members[index].state,
                State::Committed { .. }
                    | State::Failed {
                        failure: Failure::Final | Failure::Busy,
                        ..
                    }
            );
            if is_known {
                self.set(index, State::Adopted);
            }
        }
        let count = drifted.len() + joined.len();
        self.append(joined);
        self.note(
            principal,
            now,
            format!("{count} guests are taken as they are"),
        );
        Ok(())
    }

    fn append(&mut self, mut added: Vec<Member>) {
        let mut sets = KeySets::default();
        for member in self.members.iter_mut().chain(&mut added) {
            member.plan.set = sets.shared(Arc::clone(&member.plan.set));
        }
        let first = self.members.len();
        self.members.extend(added);
        self.run.changed.extend(first..self.members.len());
        self.header.members = self.members.len();
        self.run.header_changed = true;
    }
}
