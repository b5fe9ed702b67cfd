// SPDX-License-Identifier: Apache-2.0
//! Implements the commands of people.

use super::legal::{self, NotLegal};
use super::state::{End, Failure, Millis, Phase, Rollout, Stage, State};

impl Rollout {
    /// Adds the principal's approval of the plan.
    ///
    /// # Errors
    /// [`NotLegal`] if the rollout is not planned, or the digest differs.
    pub fn approve(&mut self, principal: &str, digest: &str, now: Millis) -> Result<(), NotLegal> {
        self.check_plan("approve", digest)?;
        if !self.has_approved(principal) {
            self.header.approvals.push(principal.to_owned());
            let given = self.header.approvals.len();
            let needed = self.header.policy.approvals.max(1);
            self.note(principal, now, format!("approved, {given} of {needed}"));
        }
        Ok(())
    }

    /// Starts the plan. The principal counts as one of those who approve it.
    ///
    /// # Errors
    /// [`NotLegal`] if the rollout is not planned, the digest differs, or too few people approve.
    pub fn start(&mut self, principal: &str, digest: &str, now: Millis) -> Result<(), NotLegal> {
        self.check_plan("start", digest)?;
        self.check_approvals(principal)?;
        if !self.has_approved(principal) {
            self.header.approvals.push(principal.to_owned());
        }
        self.enter(Phase::Running(Stage::Committing), principal, now, "started");
        Ok(())
    }

    fn check_plan(&self, command: &'static str, digest: &str) -> Result<(), NotLegal> {
        if self.header.phase != Phase::Planned {
            return Err(self.not_legal(command, "planned"));
        }
        match digest == self.header.digest {
            true => Ok(()),
            false => Err(NotLegal::Digest {
                found: self.header.digest.clone(),
                given: digest.to_owned(),
            }),
        }
    }

    /// Pauses the rollout, so that no further commit is started.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout runs or is paused.
    pub fn pause(&mut self, principal: &str, now: Millis) -> Result<(), NotLegal> {
        match self.header.phase {
            Phase::Paused => Ok(()),
            Phase::Running(_) => {
                self.enter(Phase::Paused, principal, now, "paused");
                Ok(())
            }
            _ => Err(self.not_legal("pause", "running")),
        }
    }

    /// Continues the rollout, and retries guests that were busy or whose outcome is unknown.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout is paused or runs.
    pub fn resume(&mut self, principal: &str, now: Millis) -> Result<(), NotLegal> {
        match self.header.phase {
            Phase::Running(_) => return Ok(()),
            Phase::Paused => {}
            _ => return Err(self.not_legal("resume", "paused")),
        }
        for index in self.reached() {
            match &self.members[index].state {
                State::Failed {
                    failure: Failure::Busy,
                    ..
                } => self.set(index, State::Pending),
                State::Failed {
                    failure: Failure::Unknown,
                    ..
                } => self.set(index, State::Unresolved),
                _ => {}
            }
        }
        self.enter(Phase::Running(Stage::Committing), principal, now, "resumed");
        Ok(())
    }

    /// Skips the rest of the bake time and the gates of the wave.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout runs or is paused, or while guests of the wave are being
    /// changed.
    pub fn promote(&mut self, principal: &str, now: Millis) -> Result<(), NotLegal> {
        if !self.may_promote() {
            return Err(self.not_legal("promote", legal::PROMOTABLE));
        }
        self.enter(
            Phase::Running(Stage::Committing),
            principal,
            now,
            "promoted",
        );
        self.next_wave(now);
        Ok(())
    }

    /// Reverts all changes. This is legal in every phase.
    pub fn abort(&mut self, principal: &str, now: Millis) {
        self.revert(End::Aborted, principal, now, "aborted");
    }

    /// Reverts all changes. This is legal in every phase.
    pub fn undo(&mut self, principal: &str, now: Millis) {
        self.revert(End::Undone, principal, now, "undone");
    }

    pub(super) fn revert(&mut self, end: End, principal: &str, now: Millis, text: &str) {
        if !self.may_revert() {
            return;
        }
        for index in 0..self.members.len() {
            match self.members[index].state {
                State::RevertFailed { pause_us, .. } => {
                    self.set(index, State::Committed { pause_us });
                }
                State::Failed {
                    failure: Failure::Unknown,
                    ..
                } => self.set(index, State::Unresolved),
                _ => {}
            }
        }
        self.run.reverts.clear();
        self.enter(Phase::Reverting(end), principal, now, text);
    }
}
