// SPDX-License-Identifier: Apache-2.0
//! Implements the commands of people.

use super::legal::{self, NotLegal};
use super::machine::bounded;
use super::state::{End, Event, Millis, Phase, Rollout, STARTED, Stage, State};

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
        self.begin(principal, now, STARTED);
        Ok(())
    }

    /// Starts the plan without the required approvals.
    ///
    /// # Errors
    /// [`NotLegal`] if the rollout is not planned, or the digest differs.
    pub fn start_unapproved(
        &mut self,
        principal: &str,
        digest: &str,
        now: Millis,
    ) -> Result<(), NotLegal> {
        self.check_plan("start", digest)?;
        self.begin(principal, now, "started with broken glass");
        Ok(())
    }

    fn begin(&mut self, principal: &str, now: Millis, text: &str) {
        principal.clone_into(&mut self.header.started_by);
        self.enter(Phase::Running(Stage::Changing), principal, now, text);
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

    /// Pauses the rollout, so that no further guest is changed.
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

    /// Continues the rollout, and tries the guests again that are not yet as wanted, except those
    /// that are only asked. The wave waits for them again.
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
            if self.members[index].state.is_retried() {
                self.members[index].health = None;
                self.set(index, State::Pending);
                self.run.retries.remove(&index);
            }
        }
        self.header
            .decide(self.header.wave..self.header.waves.len(), principal);
        self.enter(Phase::Running(Stage::Changing), principal, now, "resumed");
        Ok(())
    }

    /// Skips the rest of the bake time and the gates of the wave.
    ///
    /// # Errors
    /// [`NotLegal`] unless the rollout runs or is paused, or while guests of the wave are being
    /// changed.
    pub fn promote(&mut self, principal: &str, now: Millis) -> Result<(), NotLegal> {
        self.skip(principal, now, "promoted")
    }

    /// Promotes the rollout although the policy demands approvals.
    ///
    /// # Errors
    /// The same as for [`Rollout::promote`].
    pub fn promote_unapproved(&mut self, principal: &str, now: Millis) -> Result<(), NotLegal> {
        self.skip(principal, now, "promoted with broken glass")
    }

    fn skip(&mut self, principal: &str, now: Millis, text: &str) -> Result<(), NotLegal> {
        if !self.may_promote() {
            return Err(self.not_legal("promote", legal::PROMOTABLE));
        }
        self.enter(Phase::Running(Stage::Changing), principal, now, text);
        self.next_wave(now);
        let next = self.header.wave;
        self.header.decide(next..next + 1, principal);
        Ok(())
    }

    /// Undoes all changes. Has no effect on a rollout that is already being undone or has ended.
    pub fn abort(&mut self, principal: &str, now: Millis) {
        self.revert(End::Aborted, principal, now, "aborted");
    }

    /// Undoes all changes. Has no effect on a rollout that is already being undone or has ended.
    pub fn undo(&mut self, principal: &str, now: Millis) {
        self.revert(End::Undone, principal, now, "undone");
    }

    pub(super) fn revert(&mut self, end: End, principal: &str, now: Millis, text: &str) {
        self.revert_for(Event::Phase, end, principal, now, text);
    }

    pub(super) fn revert_for(
        &mut self,
        event: Event,
        end: End,
        principal: &str,
        now: Millis,
        text: &str,
    ) {
        if !self.may_revert() {
            return;
        }
        self.run.retries.clear();
        self.header.ended_by = principal.to_owned();
        for index in 0..self.members.len() {
            self.release(index);
        }
        self.enter_for(event, Phase::Reverting(end), principal, now, text);
    }

    /// Returns the person for whom the member's next call is made: whoever aborted or undid the
    /// rollout, otherwise whoever decided about the member's wave, otherwise whoever started the
    /// rollout. Empty before the start.
    pub fn person(&self, member: usize) -> &str {
        let header = &self.header;
        if !header.ended_by.is_empty() {
            return &header.ended_by;
        }
        let wave = header.wave_of(member).map(|wave| &header.waves[wave]);
        match wave.map(|wave| wave.decided_by.as_str()) {
            Some(by) if !by.is_empty() => by,
            _ => header.starter(),
        }
    }

    /// Wants nothing of the guest any more.
    pub(super) fn release(&mut self, index: usize) {
        let member = &self.members[index];
        if matches!(member.state, State::Releasing { .. }) {
            // It was released before, and the guest has not confirmed it.
        } else if member.may_be_changed() {
            self.raise(index);
            self.run.retries.remove(&index);
            self.set(index, State::Releasing { why: String::new() });
        } else if matches!(member.state, State::NotYet { .. }) {
            // The guest could not be observed, so no claims were sent.
            self.set(index, State::Pending);
        }
    }

    /// Records that a webhook has accepted the entry with this number and all earlier ones, or
    /// that delivery of the next one was attempted. The latter may be recorded late.
    pub fn delivered(&mut self, webhook: String, number: u64) {
        let latest = self.header.delivered.entry(webhook).or_default();
        *latest = number.max(*latest);
        self.run.header_changed = true;
    }

    /// Records that guests differ from the state that the rollout set, unless the timeline contains
    /// the same entry since the last change of the phase.
    pub fn drifted(&mut self, principal: &str, text: String, now: Millis) {
        let timeline = self.header.timeline.iter().rev();
        let mut since = timeline.take_while(|entry| entry.event != Event::Phase);
        let text = bounded(&text);
        let last = since.find(|entry| entry.event == Event::Drift);
        if last.is_none_or(|last| last.text != text) {
            self.note_of(Event::Drift, principal, now, text);
        }
    }

    /// Gives up a guest. Nothing is sent to it any more.
    ///
    /// # Errors
    /// [`NotLegal`] unless the guest may have claims, is not yet as wanted or already forgotten.
    pub fn forget(&mut self, index: usize, principal: &str, now: Millis) -> Result<(), NotLegal> {
        let member = &self.members[index];
        let name = format!("{} on {}", member.guest, member.host);
        match member.state {
            State::Forgotten => return Ok(()),
            // Claims may never have been sent to it.
            State::NotYet { .. } => {}
            _ if member.may_be_changed() => {}
            _ => return Err(NotLegal::Forget { guest: name }),
        }
        self.raise(index);
        self.set(index, State::Forgotten);
        self.note(principal, now, format!("guest {name} is forgotten"));
        Ok(())
    }
}
