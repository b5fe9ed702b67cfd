// SPDX-License-Identifier: Apache-2.0
//! Implements the transitions that the parent module's documentation shows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::state::{
    Changes, End, Event, Header, Member, Millis, Phase, Rollout, Run, Stage, State, TimelineEntry,
};

/// The number of calls without an answer after which the wave does not wait for the guest any more.
pub const MAX_ATTEMPTS: u32 = 5;
/// The delay after the first call that failed. It doubles with each further failure.
pub(super) const BACKOFF: Millis = 500;
/// The longest delay between two calls. The number of calls is not limited.
pub(super) const MAX_BACKOFF: Millis = 300_000;
/// The interval between two queries whether the guests still have the claims.
const CHECK_INTERVAL: Millis = 300_000;
/// The highest generation of a guest that is continued.
pub(super) const MAX_GENERATION: u64 = u64::MAX / 2;
/// The maximum number of entries of a timeline, and of bytes in their texts.
const MAX_TIMELINE: usize = 500;
const MAX_TIMELINE_BYTES: usize = 256 << 10;
/// The maximum length of a reason, in bytes. Reasons come from hosts and gates.
const MAX_TEXT_BYTES: usize = 1024;

/// An action for a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the member's claims in this generation.
    Claim { member: usize, generation: u64 },
    /// Send the empty set of claims in this generation.
    Release { member: usize, generation: u64 },
    /// Get the report of the member's agent, before the member's first claims.
    Observe { member: usize, generation: u64 },
    /// Get the guest's boot, and what it has of the rollout's claims.
    Check { member: usize, generation: u64 },
    /// Evaluate this gate for the wave.
    RunGate {
        wave: usize,
        gate: usize,
        asked: Millis,
    },
}

/// The actions to perform now, and the latest time of the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub actions: Vec<Action>,
    pub wake_at: Option<Millis>,
}

impl Step {
    pub(super) fn wake(&mut self, at: Millis) {
        self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
    }
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
        // Any program could have written the number, and room is needed for later ones.
        let too_late = members
            .iter()
            .find(|member| member.generation > MAX_GENERATION + (1 << 32));
        if let Some(member) = too_late {
            let (guest, generation) = (&member.guest, member.generation);
            return Err(format!("guest {guest} has generation {generation}"));
        }
        let run = Run {
            stored_sets,
            stored_members: members.len(),
            ..Run::default()
        };
        let mut rollout = Self {
            header,
            members,
            run,
        };
        rollout.supersede_earlier();
        rollout.take_back();
        Ok(rollout)
    }

    /// Releases the guests that the header says are taken back. The driver that wrote the header
    /// may have ended before it stored their states.
    fn take_back(&mut self) {
        if matches!(self.header.phase, Phase::Reverting(_)) {
            for index in 0..self.members.len() {
                self.release(index);
            }
        }
        for wave in 0..self.header.waves.len() {
            if self.header.waves[wave].is_taken_back {
                self.release_wave(wave);
            }
        }
    }

    /// Supersedes members whose guest has a later one, which their driver may not have stored. A
    /// guest that the plan skipped replaces none: it may be the place to which a planned guest was
    /// moving.
    fn supersede_earlier(&mut self) {
        let mut later = BTreeSet::new();
        for index in (0..self.members.len()).rev() {
            let member = &self.members[index];
            if matches!(member.state, State::Skipped { .. }) {
                continue;
            }
            let is_first = later.insert((member.host.clone(), member.guest.clone()));
            if !is_first && member.state != State::Superseded {
                self.set(index, State::Superseded);
            }
        }
    }

    /// Returns why guests that joined wait. If none wait, returns why the rollout is in its phase;
    /// may be empty.
    pub fn message(&self) -> &str {
        match self.header.phase {
            Phase::Completed if !self.run.late.is_empty() => &self.run.late,
            _ => &self.header.message,
        }
    }

    /// Returns the reason why guests that joined are not changed; empty if there is none.
    pub fn late(&self) -> &str {
        &self.run.late
    }

    /// Sets the reason why guests that joined are not changed; empty if there is none.
    pub fn set_late(&mut self, why: String) {
        self.run.late = why;
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
            stored_members: std::mem::replace(&mut self.run.stored_members, self.members.len()),
            header: std::mem::take(&mut self.run.header_changed),
        }
    }

    /// Advances the rollout as far as possible, and returns the actions to perform.
    pub fn step(&mut self, now: Millis) -> Step {
        let mut step = Step::default();
        loop {
            let before = (self.header.phase, self.header.wave);
            match self.header.phase {
                Phase::Planned | Phase::Paused | Phase::Completed | Phase::Ended(_) => {}
                Phase::Running(Stage::Changing) => self.change_wave(now),
                Phase::Running(Stage::Baking) => self.bake(now, &mut step),
                Phase::Running(Stage::Gating) => self.gate(now, &mut step),
                Phase::Reverting(end) => self.end(end, now),
            }
            if (self.header.phase, self.header.wave) == before {
                break;
            }
        }
        // After the loop, because a gate that closes in this step keeps claims from being sent.
        self.release_members(now, &mut step);
        self.send_unanswered(now, &mut step);
        if matches!(self.header.phase, Phase::Running(_) | Phase::Completed) {
            self.admit(now, &mut step);
        }
        if self.header.phase.has_desired_state() {
            self.check(now, &mut step);
        }
        self.date(now);
        step
    }

    /// Wants nothing of a wave's guests any more.
    pub(super) fn release_wave(&mut self, wave: usize) {
        let name = self.header.waves[wave].name.clone();
        for index in self.header.waves[wave].members() {
            self.release(index);
            if self.members[index].state == State::Pending {
                let why = format!("wave {name} was taken back before it was changed");
                self.set(index, State::Skipped { why });
            }
        }
    }

    /// Sends the claims whose outcome is unknown, in any phase.
    fn send_unanswered(&mut self, now: Millis, step: &mut Step) {
        for member in self.reached() {
            if matches!(self.members[member].state, State::Claiming { .. }) {
                let generation = self.members[member].generation;
                self.send(Action::Claim { member, generation }, member, now, step);
            }
        }
    }

    /// Returns whether the member's next call is due. If it is not, the step's `wake_at` is at the
    /// latest the time when it is.
    fn is_due(&self, member: usize, now: Millis, step: &mut Step) -> bool {
        match self.run.retries.get(&member) {
            // A time beyond the longest delay means that the clock was set back.
            Some(&(_, at)) if now < at && at <= now.saturating_add(MAX_BACKOFF) => {
                step.wake(at);
                false
            }
            _ => true,
        }
    }

    /// Adds the action to the step, unless an action of the same generation is in progress or the
    /// member's next call is not yet due.
    fn send(&mut self, action: Action, member: usize, now: Millis, step: &mut Step) {
        let generation = self.members[member].generation;
        if self.run.in_flight.get(&member) == Some(&generation) || !self.is_due(member, now, step) {
            return;
        }
        self.run.in_flight.insert(member, generation);
        step.actions.push(action);
    }

    /// Sends the claims of guests that are pending or not yet as wanted, as far as the caps allow.
    fn admit(&mut self, now: Millis, step: &mut Step) {
        if let Some(freeze) = self.header.policy.frozen(now) {
            let is_waiting =
                |member: &Member| member.state == State::Pending || member.state.is_retried();
            if self.members[self.reached()].iter().any(is_waiting) {
                step.wake(freeze.until);
            }
            return;
        }
        let members = self.members.iter();
        let guests = members.filter(|member| !member.state.is_left_out()).count();
        let caps = self.header.policy.caps;
        let (most, most_per_domain) = (caps.total(guests), caps.per_domain());
        let observes = self.header.policy.observes_agents();
        let mut total = 0;
        let mut domains: BTreeMap<String, usize> = BTreeMap::new();
        for member in &self.members {
            if matches!(member.state, State::Claiming { .. }) {
                total += 1;
                *domains.entry(member.domain.clone()).or_default() += 1;
            }
        }
        let is_pending = |index: &usize| self.members[*index].state == State::Pending;
        let is_late = |index: &usize| self.members[*index].state.is_retried();
        let pending: Vec<usize> = self.reached().filter(is_pending).collect();
        let mut late: Vec<usize> = self.reached().filter(is_late).collect();
        // Guests whose calls time out must not keep those behind them from their turn.
        late.sort_by_key(|index| self.run.retries.get(index).map_or(0, |(_, at)| *at));
        // Guests that do not answer must not keep those that wait for their first call.
        let most_late = if pending.is_empty() {
            most
        } else {
            (most / 2).max(1)
        };
        let (pending_len, mut retries) = (pending.len(), 0);
        for (position, index) in pending.into_iter().chain(late).enumerate() {
            let again = position >= pending_len;
            if total >= most || (again && retries >= most_late) {
                return;
            }
            if !self.is_due(index, now, step) {
                continue;
            }
            if self.has_expired(index, now) {
                // The guest may have to be asked for its release.
                step.wake(now);
                continue;
            }
            let member = &self.members[index];
            let domain = domains.entry(member.domain.clone()).or_default();
            if *domain >= most_per_domain {
                continue;
            }
            if observes && member.health.is_none() {
                let generation = member.generation;
                let action = Action::Observe {
                    member: index,
                    generation,
                };
                self.send(action, index, now, step);
                continue;
            }
            (total, *domain) = (total + 1, *domain + 1);
            retries += usize::from(again);
            let generation = self.raise(index);
            self.set(index, State::Claiming { again });
            let action = Action::Claim {
                member: index,
                generation,
            };
            self.send(action, index, now, step);
        }
    }

    /// Leaves a guest whose claims have ended by themselves. Returns whether it does. A guest that
    /// is not as wanted may have made claims again after it has booted, although its answer was
    /// lost: it is asked for their release.
    pub(super) fn has_expired(&mut self, index: usize, now: Millis) -> bool {
        let has_expired = self.members[index].has_expired(now);
        if has_expired {
            match self.members[index].state {
                State::AsWanted { .. } => self.set(index, State::Released { void: true }),
                _ => self.release(index),
            }
        }
        has_expired
    }

    /// Begins a new generation of the member. Outcomes of calls of earlier ones no longer count.
    pub(super) fn raise(&mut self, index: usize) -> u64 {
        let generation = &mut self.members[index].generation;
        *generation = generation.saturating_add(1);
        *generation
    }

    /// Asks the guests that have the claims what has become of them: all at an interval, those
    /// that may have changed at once, and those on which claims have no effect with a growing
    /// delay.
    fn check(&mut self, now: Millis, step: &mut Step) {
        let has_claims = |member: &Member| member.state.has_claims();
        if !self.members.iter().any(has_claims) {
            return;
        }
        let latest = now.saturating_add(CHECK_INTERVAL);
        // The rollouts of a new leader do not ask all at once.
        let run = u64::from_str_radix(&self.header.run, 16).unwrap_or(0);
        let from = *self
            .run
            .check_from
            .get_or_insert(latest - run % CHECK_INTERVAL);
        let mut members = std::mem::take(&mut self.run.check_now);
        self.hurry(&members);
        // The answer to a query in progress may be older than the change that is to be found.
        let is_asked = |index: &usize| {
            let member = &self.members[*index];
            has_claims(member) && self.run.in_flight.get(index) == Some(&member.generation)
        };
        let again = members.iter().copied().filter(is_asked).collect();
        self.run.check_now = again;
        // A time beyond the interval means that the clock was set back.
        if now >= from || from > latest {
            members.extend(self.reached());
            self.run.check_from = Some(latest);
        }
        members.extend(self.unknown());
        step.wake(self.run.check_from.unwrap_or(latest));
        // A new driver asks the guests without effect with all others first.
        let is_ineffective = |member: &usize| {
            self.run.retries.contains_key(member) && self.members[*member].state.is_ineffective()
        };
        members.extend(self.reached().filter(is_ineffective));
        members.extend(&self.run.suspects);
        for member in members {
            if has_claims(&self.members[member]) {
                let generation = self.members[member].generation;
                self.send(Action::Check { member, generation }, member, now, step);
            }
        }
    }

    /// Ends the claims of guests that the rollout wants nothing of any more, in any phase.
    fn release_members(&mut self, now: Millis, step: &mut Step) {
        for member in 0..self.members.len() {
            if matches!(self.members[member].state, State::Releasing { .. }) {
                let generation = self.members[member].generation;
                let action = Action::Release { member, generation };
                self.send(action, member, now, step);
            }
        }
    }

    /// Ends the rollout once every guest has confirmed that it has no claims.
    fn end(&mut self, end: End, now: Millis) {
        let is_left = |member: &Member| matches!(member.state, State::Releasing { .. });
        if self.members.iter().any(is_left) {
            return;
        }
        let is_forgotten = |member: &&Member| member.state == State::Forgotten;
        let text = match self.members.iter().filter(is_forgotten).count() {
            0 => "every change is undone".to_owned(),
            forgotten => format!("every change is undone, except on {forgotten} forgotten guests"),
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
        if let State::NotYet { why, .. } | State::Releasing { why } = &mut state {
            *why = bounded(why);
        }
        let member = &mut self.members[index];
        if !state.is_late() && !state.is_stuck() {
            member.since = None;
        }
        member.pause_us = member.pause();
        member.state = state;
        self.run.changed.insert(index);
    }

    pub(super) fn enter(&mut self, phase: Phase, principal: &str, now: Millis, text: &str) {
        self.enter_for(Event::Phase, phase, principal, now, text);
    }

    /// Enters the phase because of an event. The timeline records the event if `text` is not empty.
    pub(super) fn enter_for(
        &mut self,
        event: Event,
        phase: Phase,
        principal: &str,
        now: Millis,
        text: &str,
    ) {
        self.header.phase = phase;
        self.header.closed_gate = None;
        self.run.header_changed = true;
        if !text.is_empty() {
            self.header.message = bounded(text);
            self.note_of(event, principal, now, text.to_owned());
        }
    }

    pub(super) fn note(&mut self, principal: &str, time: Millis, text: String) {
        self.note_of(Event::Other, principal, time, text);
    }

    pub(super) fn note_of(&mut self, event: Event, principal: &str, time: Millis, text: String) {
        self.run.header_changed = true;
        self.header.entries = self.header.entries.saturating_add(1);
        let timeline = &mut self.header.timeline;
        timeline.push(TimelineEntry {
            time,
            principal: principal.to_owned(),
            text: bounded(&text),
            event,
            number: self.header.entries,
            phase: self.header.phase,
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
    // A text from outside may have megabytes. Controls become no longer.
    let kept = &text[..text.floor_char_boundary(2 * MAX_TEXT_BYTES + 2)];
    let mut line = kept.replace(char::is_control, " ");
    if line.len() > MAX_TEXT_BYTES {
        line.truncate(line.floor_char_boundary(MAX_TEXT_BYTES - 3));
        line.push_str("...");
    }
    line
}

impl Phase {
    /// Returns the name of the phase that users see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Running(Stage::Changing) => "running",
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
