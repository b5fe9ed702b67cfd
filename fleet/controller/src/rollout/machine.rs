// SPDX-License-Identifier: Apache-2.0
//! Implements the transitions that the parent module's documentation shows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::policy::{OnFailure, WaveGateKind};
use super::state::{
    Changes, End, Failure, Header, Member, Millis, Phase, Rollout, Run, Stage, State, TimelineEntry,
};
use super::{gates, legal};

/// The maximum number of attempts at a commit whose answers do not reveal its outcome.
pub const MAX_ATTEMPTS: u32 = 5;
/// The delay after the first of these attempts. It doubles with each further one.
const BACKOFF: Millis = 500;
const MAX_BACKOFF: Millis = BACKOFF << MAX_ATTEMPTS;
/// The maximum number of entries of a timeline, and of bytes in their texts.
const MAX_TIMELINE: usize = 500;
const MAX_TIMELINE_BYTES: usize = 256 << 10;
/// The maximum length of a text that says why, in bytes. Such texts come from hosts and gates.
const MAX_TEXT_BYTES: usize = 1024;

/// An action for a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Commit the member's plan.
    Commit(usize),
    /// Apply the member's inverse.
    Revert(usize),
    /// Get the report of the member's agent, before the member's commit.
    Observe(usize),
    /// Evaluate this gate for the wave.
    RunGate { wave: usize, gate: usize },
}

/// The actions to perform now, and the latest time of the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub actions: Vec<Action>,
    pub wake_at: Option<Millis>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    Committed { pause_us: u64 },
    Failed { failure: Failure, why: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevertOutcome {
    Reverted { void: bool },
    Failed { again: bool, why: String },
}

impl Rollout {
    /// Creates the machine from a rollout that was planned. No part of it is stored yet.
    pub fn new(header: Header, members: Vec<Member>) -> Self {
        let run = Run {
            changed: (0..members.len()).collect(),
            header_changed: true,
            ..Run::default()
        };
        Self {
            header,
            members,
            run,
        }
    }

    /// Creates the machine from a rollout as another driver left it. `stored_sets` are the digests
    /// of the sets of keys that are stored.
    ///
    /// # Errors
    /// The reason why no driver leaves this state. Running it could panic.
    pub fn stored(
        header: Header,
        members: Vec<Member>,
        stored_sets: BTreeSet<String>,
    ) -> Result<Self, String> {
        let mut end = 0;
        for wave in &header.waves {
            if wave.first < end {
                let name = &wave.name;
                return Err(format!("wave {name} begins within the wave before it"));
            }
            end = wave.first.saturating_add(wave.count);
        }
        if end > members.len() {
            let guests = members.len();
            return Err(format!(
                "the waves end at guest {end}, and there are {guests}"
            ));
        }
        let is_in_wave = header.wave < header.waves.len();
        if !is_in_wave && matches!(header.phase, Phase::Running(Stage::Baking | Stage::Gating)) {
            let (wave, waves) = (header.wave, header.waves.len());
            return Err(format!("wave {wave} of {waves} waves is in progress"));
        }
        let run = Run {
            stored_sets,
            ..Run::default()
        };
        Ok(Self {
            header,
            members,
            run,
        })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the parts that changed since the last call.
    pub fn take_changes(&mut self) -> Changes {
        let members: Vec<usize> = std::mem::take(&mut self.run.changed).into_iter().collect();
        let mut sets = Vec::new();
        for &index in &members {
            let set = &self.members[index].plan.set;
            if !self.run.stored_sets.contains(set.digest()) {
                self.run.stored_sets.insert(set.digest().to_owned());
                sets.push(Arc::clone(set));
            }
        }
        Changes {
            sets,
            members,
            header: std::mem::take(&mut self.run.header_changed),
        }
    }

    /// Records the outcome of [`Action::Commit`].
    pub fn committed(&mut self, index: usize, outcome: CommitOutcome, now: Millis) {
        self.run.in_flight.remove(&index);
        let State::Committing { attempt, .. } = self.members[index].state else {
            return;
        };
        let state = match outcome {
            CommitOutcome::Committed { pause_us } => State::Committed { pause_us },
            CommitOutcome::Failed {
                failure: Failure::Unknown,
                ..
            } if attempt + 1 < MAX_ATTEMPTS => State::Committing {
                attempt: attempt + 1,
                not_before: now + (BACKOFF << attempt),
            },
            CommitOutcome::Failed { failure, why } => State::Failed { failure, why },
        };
        self.set(index, state);
        self.check_errors(now);
    }

    /// Records the outcome of [`Action::Revert`].
    pub fn reverted(&mut self, index: usize, outcome: RevertOutcome, now: Millis) {
        self.run.in_flight.remove(&index);
        let State::Committed { pause_us } = self.members[index].state else {
            return;
        };
        match outcome {
            RevertOutcome::Reverted { void } => self.set(index, State::Reverted { void }),
            RevertOutcome::Failed { again, why } => {
                let attempt = self
                    .run
                    .reverts
                    .get(&index)
                    .map_or(0, |&(attempt, _)| attempt);
                if again && attempt + 1 < MAX_ATTEMPTS {
                    let next = (attempt + 1, now + (BACKOFF << attempt));
                    self.run.reverts.insert(index, next);
                } else {
                    self.set(index, State::RevertFailed { why, pause_us });
                }
            }
        }
    }

    /// Records the outcome of [`Action::RunGate`].
    pub fn gate_ended(
        &mut self,
        wave: usize,
        gate: usize,
        result: Result<(), String>,
        now: Millis,
    ) {
        if wave != self.header.wave || !self.run.asked.remove(&gate) {
            return;
        }
        if self.header.phase != Phase::Running(Stage::Gating) {
            return;
        }
        match result {
            Ok(()) => {
                self.run.passed.insert(gate);
            }
            Err(why) => self.close(gate, &why, now),
        }
    }

    /// Adapts the stored times after the wall clock jumped by `by` milliseconds, so that every wait
    /// keeps its length. Freezes are wall-clock times and are not adapted.
    pub fn clock_jumped(&mut self, by: i64) {
        if let Some(wave) = self.header.waves.get_mut(self.header.wave)
            && let Some(until) = &mut wave.bakes_until
        {
            *until = until.saturating_add_signed(by);
            self.run.header_changed = true;
        }
        for (_, not_before) in self.run.reverts.values_mut() {
            *not_before = not_before.saturating_add_signed(by);
        }
        for index in 0..self.members.len() {
            if let State::Committing {
                attempt,
                not_before,
            } = self.members[index].state
                && attempt > 0
            {
                let not_before = not_before.saturating_add_signed(by);
                let state = State::Committing {
                    attempt,
                    not_before,
                };
                self.set(index, state);
            }
        }
    }

    /// Advances the rollout as far as possible, and returns the actions to perform.
    pub fn step(&mut self, now: Millis) -> Step {
        let mut step = Step::default();
        self.send_unanswered(now, &mut step);
        loop {
            let before = (self.header.phase, self.header.wave);
            match self.header.phase {
                Phase::Planned | Phase::Paused | Phase::Completed | Phase::Ended(_) => {}
                Phase::Running(Stage::Committing) => self.commit_wave(now, &mut step),
                Phase::Running(Stage::Baking) => self.bake(now, &mut step),
                Phase::Running(Stage::Gating) => self.gate(now, &mut step),
                Phase::Reverting(end) => self.revert_members(end, now, &mut step),
            }
            if (self.header.phase, self.header.wave) == before {
                return step;
            }
        }
    }

    /// Sends the commits whose outcome is unknown, in any phase.
    fn send_unanswered(&mut self, now: Millis, step: &mut Step) {
        for index in self.reached() {
            if let State::Committing { not_before, .. } = self.members[index].state {
                self.send(Action::Commit(index), index, not_before, now, step);
            }
        }
    }

    /// Adds the action to the step, unless it is in progress or not yet due.
    fn send(&mut self, action: Action, index: usize, from: Millis, now: Millis, step: &mut Step) {
        // A deadline beyond MAX_BACKOFF means that the clock was set back.
        if now < from && from <= now.saturating_add(MAX_BACKOFF) {
            step.wake_at = Some(step.wake_at.map_or(from, |at| at.min(from)));
        } else if self.run.in_flight.insert(index) {
            step.actions.push(action);
        }
    }

    fn commit_wave(&mut self, now: Millis, step: &mut Step) {
        if self.header.wave >= self.header.waves.len() {
            self.enter(Phase::Completed, "", now, "completed");
            return;
        }
        if let Some(freeze) = self.header.policy.frozen(now) {
            let is_waiting =
                |member: &Member| matches!(member.state, State::Pending | State::Unresolved);
            if self.members[self.reached()].iter().any(is_waiting) {
                let until = freeze.until;
                step.wake_at = Some(step.wake_at.map_or(until, |at| at.min(until)));
                return;
            }
        }
        self.admit(self.reached(), now, step);
        if self.is_settled() {
            self.enter(Phase::Running(Stage::Baking), "", now, "");
        }
    }

    /// Starts commits as far as the caps allow. While the rollout reverts, only commits with an
    /// unknown outcome are started, to learn the outcome.
    fn admit(&mut self, candidates: std::ops::Range<usize>, now: Millis, step: &mut Step) {
        let reverting = matches!(self.header.phase, Phase::Reverting(_));
        let is_skipped = |member: &&Member| matches!(member.state, State::Skipped { .. });
        let guests = self.members.len() - self.members.iter().filter(is_skipped).count();
        let caps = self.header.policy.caps;
        let (most, most_per_domain) = (caps.total(guests), caps.per_domain());
        let observes = self.header.policy.observes_agents();
        let mut total = 0;
        let mut domains: BTreeMap<String, usize> = BTreeMap::new();
        for member in &self.members {
            if matches!(member.state, State::Committing { .. }) {
                total += 1;
                *domains.entry(member.domain.clone()).or_default() += 1;
            }
        }
        for index in candidates {
            let member = &self.members[index];
            let is_wanted = match &member.state {
                State::Pending => !reverting,
                State::Unresolved => true,
                _ => false,
            };
            if total >= most {
                return;
            }
            let domain = domains.entry(member.domain.clone()).or_default();
            if !is_wanted || *domain >= most_per_domain {
                continue;
            }
            if observes && member.health.is_none() && member.state == State::Pending {
                self.send(Action::Observe(index), index, now, now, step);
                continue;
            }
            (total, *domain) = (total + 1, *domain + 1);
            self.set(
                index,
                State::Committing {
                    attempt: 0,
                    not_before: now,
                },
            );
            self.send(Action::Commit(index), index, now, now, step);
        }
    }

    /// Returns whether every member of the waves that have begun has settled, so that none is
    /// pending, unresolved or being committed.
    pub(super) fn is_settled(&self) -> bool {
        let is_open = |member: &Member| {
            matches!(
                member.state,
                State::Pending | State::Unresolved | State::Committing { .. }
            )
        };
        let has_wave = self.header.wave < self.header.waves.len();
        has_wave && !self.members[self.reached()].iter().any(is_open)
    }

    fn bake(&mut self, now: Millis, step: &mut Step) {
        let wave = &mut self.header.waves[self.header.wave];
        let end = now.saturating_add(wave.bake_ms);
        // A stored end after this one means that the clock was set back.
        let until = match wave.bakes_until {
            Some(until) if until <= end => until,
            _ => {
                wave.bakes_until = Some(end);
                self.run.header_changed = true;
                end
            }
        };
        if now < until {
            step.wake_at = Some(step.wake_at.map_or(until, |at| at.min(until)));
            return;
        }
        self.run.asked.clear();
        self.run.passed.clear();
        self.enter(Phase::Running(Stage::Gating), "", now, "");
    }

    fn gate(&mut self, now: Millis, step: &mut Step) {
        let wave = self.header.wave;
        let members = self.header.waves[wave].members();
        for gate in 0..self.header.policy.gates.len() {
            if let Some(why) = gates::closed(
                &self.header.policy.gates[gate],
                &self.members[members.clone()],
            ) {
                self.close(gate, &why, now);
                return;
            }
            let kind = &self.header.policy.gates[gate].kind;
            let is_external = kind.timeout_ms().is_some();
            if is_external && !self.run.passed.contains(&gate) && self.run.asked.insert(gate) {
                step.actions.push(Action::RunGate { wave, gate });
            }
        }
        if self.run.asked.is_empty() {
            self.enter(Phase::Running(Stage::Committing), "", now, "");
            self.next_wave(now);
        }
    }

    pub(super) fn next_wave(&mut self, now: Millis) {
        let name = self.header.waves[self.header.wave].name.clone();
        self.note("", now, format!("wave {name} is done"));
        self.header.wave += 1;
    }

    /// Closes a gate on errors as soon as too many guests have failed, even before the wave has
    /// settled.
    pub(super) fn check_errors(&mut self, now: Millis) {
        if self.header.phase != Phase::Running(Stage::Committing) {
            return;
        }
        let members = self.header.waves[self.header.wave].members();
        let gates = &self.header.policy.gates;
        let closed = gates.iter().enumerate().find_map(|(index, gate)| {
            let is_errors = matches!(gate.kind, WaveGateKind::Errors { .. });
            let why = gates::closed(gate, &self.members[members.clone()]).filter(|_| is_errors);
            Some((index, why?))
        });
        if let Some((gate, why)) = closed {
            self.close(gate, &why, now);
        }
    }

    /// Handles a closed gate as the spec requires.
    fn close(&mut self, gate: usize, why: &str, now: Millis) {
        let wave = &self.header.waves[self.header.wave].name;
        let text = format!("gate {} of wave {wave} is closed: {why}", gate + 1);
        match self.header.policy.gates[gate].on_failure {
            OnFailure::Pause => self.enter(Phase::Paused, "", now, &text),
            OnFailure::Abort => self.revert(End::Aborted, "", now, &text),
        }
    }

    fn revert_members(&mut self, end: End, now: Millis, step: &mut Step) {
        self.admit(0..self.members.len(), now, step);
        for index in 0..self.members.len() {
            if matches!(self.members[index].state, State::Committed { .. }) {
                let from = self.run.reverts.get(&index).map_or(now, |&(_, from)| from);
                self.send(Action::Revert(index), index, from, now, step);
            }
        }
        if self.members.iter().any(is_left) {
            return;
        }
        let failed = self.members.iter();
        let text = match failed
            .filter(|member| legal::is_to_be_tried_again(member))
            .count()
        {
            0 => "everything is taken back".to_owned(),
            failed => format!("{failed} guests are not taken back; abort or undo tries again"),
        };
        self.enter(Phase::Ended(end), "", now, &text);
    }

    /// Returns the members of the waves that have begun.
    pub(super) fn reached(&self) -> std::ops::Range<usize> {
        let last = self
            .header
            .wave
            .min(self.header.waves.len().saturating_sub(1));
        0..self
            .header
            .waves
            .get(last)
            .map_or(0, |wave| wave.members().end)
    }

    pub(super) fn set(&mut self, index: usize, mut state: State) {
        if let State::Failed { why, .. } | State::RevertFailed { why, .. } = &mut state {
            *why = bounded(why);
        }
        self.members[index].state = state;
        self.run.changed.insert(index);
    }

    pub(super) fn enter(&mut self, phase: Phase, principal: &str, now: Millis, text: &str) {
        self.header.phase = phase;
        self.run.header_changed = true;
        if !text.is_empty() {
            self.header.message = bounded(text);
            self.note(principal, now, text.to_owned());
        }
    }

    pub(super) fn note(&mut self, principal: &str, time: Millis, text: String) {
        self.run.header_changed = true;
        let timeline = &mut self.header.timeline;
        timeline.push(TimelineEntry {
            time,
            principal: principal.to_owned(),
            text: bounded(&text),
        });
        let bytes = |entry: &TimelineEntry| entry.principal.len() + entry.text.len();
        while timeline.len() > MAX_TIMELINE
            || timeline.iter().map(bytes).sum::<usize>() > MAX_TIMELINE_BYTES
        {
            // The first entries stay, because they record how the rollout was planned and started.
            timeline.remove(timeline.len() / 10);
        }
    }
}

/// Returns the text in one line of at most [`MAX_TEXT_BYTES`].
pub(crate) fn bounded(text: &str) -> String {
    let mut line = text.replace(char::is_control, " ");
    if line.len() > MAX_TEXT_BYTES {
        line.truncate(line.floor_char_boundary(MAX_TEXT_BYTES - 3));
        line.push_str("...");
    }
    line
}

/// Returns whether the member must still be handled before reverting can end.
pub(super) fn is_left(member: &Member) -> bool {
    matches!(
        member.state,
        State::Committed { .. } | State::Committing { .. } | State::Unresolved
    )
}

impl Phase {
    /// Returns the name of the phase that users see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Running(Stage::Committing) => "running",
            Self::Running(Stage::Baking) => "baking",
            Self::Running(Stage::Gating) => "at its gates",
            Self::Paused => "paused",
            Self::Completed => "completed",
            Self::Reverting(_) => "reverting",
            Self::Ended(End::Aborted) => "aborted",
            Self::Ended(End::Undone) => "undone",
        }
    }
}
