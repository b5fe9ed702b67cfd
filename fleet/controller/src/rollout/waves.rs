// SPDX-License-Identifier: Apache-2.0
//! Takes a wave from its first claims through the bake time and the gates to the next wave.

use std::ops::Range;

use super::describe::lasting;
use super::gates;
use super::machine::{Action, Step};
use super::policy::{OnFailure, WaveGate, WaveGateKind};
use super::state::{End, Event, Member, Millis, Phase, Rollout, Stage};

impl Rollout {
    pub(super) fn change_wave(&mut self, now: Millis) {
        if self.header.wave >= self.header.waves.len() {
            self.enter(Phase::Completed, "", now, "completed");
        } else if self.is_settled() {
            self.run.asked.clear();
            self.run.answered.clear();
            self.run.inconclusive.clear();
            self.enter(Phase::Running(Stage::Baking), "", now, "");
        }
    }

    /// Returns whether the rollout waits for no member of the waves that have begun.
    pub(super) fn is_settled(&self) -> bool {
        let is_open = |member: &Member| member.state.is_awaited();
        let has_wave = self.header.wave < self.header.waves.len();
        has_wave && !self.members[self.reached()].iter().any(is_open)
    }

    pub(super) fn bake(&mut self, now: Millis, step: &mut Step) {
        let wave = &mut self.header.waves[self.header.wave];
        let end = now.saturating_add(wave.bake_ms);
        // A stored end after this one means that the clock was set back.
        let until = match wave.bakes_until {
            Some(until) if until <= end => until,
            _ => {
                let is_first = wave.bakes_until.replace(end).is_none();
                self.run.header_changed = true;
                if is_first && wave.bake_ms > 0 {
                    let text = format!("wave {} bakes for {}", wave.name, lasting(wave.bake_ms));
                    self.note("", now, text);
                }
                end
            }
        };
        if now >= until {
            self.run.looked_at = None;
            self.enter(Phase::Running(Stage::Gating), "", now, "");
        } else if self.evaluate(now, step).is_some() {
            step.wake(until);
        }
    }

    /// Begins the next wave once every gate has passed after the bake time.
    pub(super) fn gate(&mut self, now: Millis, step: &mut Step) {
        let wave = &mut self.header.waves[self.header.wave];
        if wave.bakes_until.is_some_and(|end| end > now) {
            // The bake time is over. The clock of the leader that stored its end was ahead.
            wave.bakes_until = Some(now);
            self.run.header_changed = true;
        }
        let (from, members) = (wave.bakes_until.unwrap_or(0), wave.members());
        let is_errors = |gate: &WaveGate| matches!(gate.kind, WaveGateKind::Errors { .. });
        let policy = &self.header.policy;
        let judges = policy.min_success > 0 || policy.gates.iter().any(is_errors);
        if judges && wave.bake_ms > 0 && self.is_looking(members.clone()) {
            return;
        }
        let Some(external) = self.evaluate(now, step) else {
            return;
        };
        let has_passed = |gate: &usize| {
            let answer = self.run.answered.get(gate);
            answer.is_some_and(|&(asked, passed)| passed && asked >= from)
        };
        if !external.iter().all(has_passed) {
            return;
        }
        let wanted = self.header.policy.min_success;
        if let Some(why) = gates::too_few(wanted, &self.members[members]) {
            let text = format!("wave {}: {why}", self.header.waves[self.header.wave].name);
            self.enter(Phase::Paused, "", now, &text);
            return;
        }
        self.enter(Phase::Running(Stage::Changing), "", now, "");
        self.next_wave(now);
    }

    /// Asks the guests of the wave once after its bake time which of their claims hold. Returns
    /// whether an answer is missing. A guest that cannot be reached counts as answered.
    fn is_looking(&mut self, members: Range<usize>) -> bool {
        let wave = self.header.wave;
        if self.run.looked_at != Some(wave) {
            self.run.looked_at = Some(wave);
            self.run.check_now.extend(members.clone());
        }
        let is_open = |index: &usize| {
            let run = &self.run;
            let is_asked = run.check_now.contains(index) || run.in_flight.contains_key(index);
            self.members[*index].state.has_claims() && (is_asked || run.suspects.contains(index))
        };
        members.into_iter().any(|index| is_open(&index))
    }

    /// Evaluates the gates, and asks those that need external information when they are due.
    /// Returns these gates, or `None` if a gate is closed.
    fn evaluate(&mut self, now: Millis, step: &mut Step) -> Option<Vec<usize>> {
        if let Some((gate, why)) = self.closed_gate(|_| true) {
            self.close(gate, &why, now);
            return None;
        }
        let wave = self.header.wave;
        let bakes_until = self.header.waves[wave].bakes_until.unwrap_or(0);
        let mut external = Vec::new();
        for (index, gate) in self.header.policy.gates.iter().enumerate() {
            if gate.kind.timeout_ms().is_none() {
                continue;
            }
            external.push(index);
            if self.run.asked.contains_key(&index) {
                continue;
            }
            let due = match self.run.answered.get(&index) {
                // The answer after the bake time counts, and is asked for at once.
                Some(&(asked, _)) if asked < bakes_until && now >= bakes_until => now,
                Some(&(_, true)) if now >= bakes_until => continue,
                Some(&(asked, _)) => asked.saturating_add(gate.interval_ms),
                None => now,
            };
            // A time beyond one interval means that the clock was set back.
            if now < due && due <= now.saturating_add(gate.interval_ms) {
                step.wake(due);
                continue;
            }
            self.run.asked.insert(index, now);
            step.actions.push(Action::RunGate {
                wave,
                gate: index,
                asked: now,
            });
        }
        Some(external)
    }

    /// Returns a gate that the members close, and the reason.
    fn closed_gate(&self, counts: fn(&WaveGateKind) -> bool) -> Option<(usize, String)> {
        let wave = &self.header.waves[self.header.wave];
        let gates = self.header.policy.gates.iter().enumerate();
        let mut gates = gates.filter(|(_, gate)| counts(&gate.kind));
        gates.find_map(|(index, gate)| Some((index, gates::closed(gate, wave, &self.members)?)))
    }

    pub(super) fn next_wave(&mut self, now: Millis) {
        let name = self.header.waves[self.header.wave].name.clone();
        self.note("", now, format!("wave {name} is done"));
        self.header.wave += 1;
    }

    /// Closes a gate on errors as soon as too many guests are not yet as wanted, even before the
    /// wave has settled.
    pub(super) fn check_errors(&mut self, now: Millis) {
        // After the last wave, no wave is current until the next step completes the rollout.
        let is_over = self.header.wave >= self.header.waves.len();
        if self.header.phase != Phase::Running(Stage::Changing) || is_over {
            return;
        }
        if let Some((gate, why)) = self.closed_gate(WaveGateKind::is_of_errors) {
            self.close(gate, &why, now);
        }
    }

    /// Handles a closed gate as the spec requires.
    pub(super) fn close(&mut self, gate: usize, why: &str, now: Millis) {
        let wave = &self.header.waves[self.header.wave].name;
        let text = format!("gate {} of wave {wave} is closed: {why}", gate + 1);
        let is_added = self.header.waves[self.header.wave].is_added;
        match self.header.policy.gates[gate].on_failure {
            OnFailure::Pause => self.pause_at(gate, &text, now),
            OnFailure::Abort if is_added => self.leave_wave(&text, now),
            OnFailure::Abort => {
                self.revert_for(Event::GateClosed, End::Aborted, "", now, &text);
            }
        }
    }

    /// Pauses the rollout because of this gate.
    pub(super) fn pause_at(&mut self, gate: usize, text: &str, now: Millis) {
        self.enter_for(Event::GateClosed, Phase::Paused, "", now, text);
        self.header.closed_gate = Some(gate);
    }

    /// Takes an added wave back, and continues with the next one.
    fn leave_wave(&mut self, why: &str, now: Millis) {
        self.header.waves[self.header.wave].is_taken_back = true;
        self.release_wave(self.header.wave);
        let changing = Phase::Running(Stage::Changing);
        self.enter_for(Event::GateClosed, changing, "", now, why);
        self.next_wave(now);
    }
}
