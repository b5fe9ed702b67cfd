// SPDX-License-Identifier: Apache-2.0
//! Records the outcomes of actions, and schedules the next ones.

use std::collections::BTreeSet;

use super::answers::{ClaimOutcome, Found, FoundClaims, GateAnswer, ReleaseOutcome};
use super::machine::{BACKOFF, MAX_ATTEMPTS, MAX_BACKOFF, MAX_GENERATION, bounded};
use super::policy::AfterReboot;
use super::state::{Event, Failure, Millis, Phase, Record, Rollout, Stage, State};
use crate::hosts::News;

/// The time within which a guest boots, or loads a module again, soon after its change.
const SOON: Millis = 600_000;
/// The number of such events after which the guest is left as it is.
const MAX_LOSSES: u32 = 3;
/// The reason for a guest whose service has lost its record of claims confirmed in this boot.
const LOST_LEDGER: &str =
    "its service has lost its record of the claims, so nobody knows whether they still hold";

impl Rollout {
    /// Ends the action of a member. Returns whether its outcome counts. An outcome of an earlier
    /// generation does not.
    pub(super) fn ends(&mut self, index: usize, generation: u64) -> bool {
        let counts = self.members[index].generation == generation;
        if counts {
            self.run.in_flight.remove(&index);
        }
        counts
    }

    /// Records the outcome of [`super::Action::Claim`].
    pub fn claimed(&mut self, index: usize, generation: u64, outcome: ClaimOutcome, now: Millis) {
        if !self.ends(index, generation) {
            return;
        }
        let State::Claiming { again } = self.members[index].state else {
            return;
        };
        let state = match outcome {
            ClaimOutcome::Made {
                boot,
                ledger,
                pause_us,
                ttl,
            } => {
                self.run.retries.remove(&index);
                self.run.made.entry(index).or_default().0 = now;
                let member = &mut self.members[index];
                member.boot = bounded(&boot);
                member.confirm(&ledger, ttl, now);
                State::AsWanted { pause_us }
            }
            // The guest has refused the claims, and nothing was changed.
            ClaimOutcome::Failed {
                failure: Failure::NoRecord,
                ..
            } => {
                self.put_off(index, now);
                self.ineffective(index, Failure::NoRecord, LOST_LEDGER, now);
                self.check_errors(now);
                return;
            }
            ClaimOutcome::Failed { failure, why } => {
                let attempts = self.put_off(index, now);
                if failure == Failure::Unknown && attempts < MAX_ATTEMPTS && !again {
                    return;
                }
                State::NotYet { failure, why }
            }
            ClaimOutcome::NotMade {
                has_claims,
                is_ineffective,
                ledger,
                ttl,
                why,
            } => {
                self.put_off(index, now);
                if has_claims {
                    self.run.made.entry(index).or_default().0 = now;
                }
                // The set has replaced the one that the guest confirmed, so a guest that refuses
                // all of it has no record.
                let member = &mut self.members[index];
                match has_claims {
                    true => member.confirm(&ledger, ttl, now),
                    false => member.is_confirmed = false,
                }
                let failure = match is_ineffective {
                    true => Failure::Ineffective,
                    false => Failure::Refused,
                };
                State::NotYet { failure, why }
            }
            // The boot is stored before a call names it. A later generation makes the claims.
            ClaimOutcome::Booted { boot } => {
                self.set_boot(index, &boot);
                // A host may report another boot each time, so the attempts are limited.
                let failed = self.put_off(index, now);
                match again || failed >= MAX_ATTEMPTS {
                    true => State::NotYet {
                        failure: Failure::Busy,
                        why: "the guest has booted again".to_owned(),
                    },
                    false => State::Pending,
                }
            }
            // This call has changed nothing. A later generation makes the claims, as soon as the
            // guest may be changed: the rollout may be paused or frozen by now.
            ClaimOutcome::Stale { seen } => {
                let why = format!("the guest has seen generation {seen}");
                match self.catch_up(index, seen, now) {
                    failed if failed >= MAX_ATTEMPTS => State::NotYet {
                        failure: Failure::Refused,
                        why: format!("{why}, and refuses later ones"),
                    },
                    _ if again => State::NotYet {
                        failure: Failure::Busy,
                        why,
                    },
                    _ => State::Pending,
                }
            }
        };
        // The check reads all guests, and a guest that is as wanted closes no gate.
        let is_late = state.is_late();
        self.set(index, state);
        if is_late {
            self.check_errors(now);
        }
    }

    /// Records the outcome of [`super::Action::Release`].
    pub fn released(
        &mut self,
        index: usize,
        generation: u64,
        outcome: ReleaseOutcome,
        now: Millis,
    ) {
        if !self.ends(index, generation) {
            return;
        }
        let State::Releasing { why: before } = &self.members[index].state else {
            return;
        };
        let outcome = match outcome {
            // The service has ended the claims by its own clock.
            ReleaseOutcome::Unknown if self.members[index].has_expired(now) => {
                ReleaseOutcome::Released { void: true }
            }
            outcome => outcome,
        };
        match outcome {
            ReleaseOutcome::Released { void } => {
                self.run.retries.remove(&index);
                self.set(index, State::Released { void });
            }
            ReleaseOutcome::Failed { why } => {
                // What a person has to do about a guest without a record stays true.
                let is_news = *before != bounded(&why) && !self.members[index].has_no_record();
                self.put_off(index, now);
                if is_news {
                    self.set(index, State::Releasing { why });
                }
            }
            ReleaseOutcome::Unknown => {
                // The answer to a repeat would be taken for a confirmation.
                self.raise(index);
                self.put_off(index, now);
                self.set(index, State::no_record());
            }
            ReleaseOutcome::Stale { seen } => {
                self.catch_up(index, seen, now);
                self.raise(index);
            }
        }
    }

    /// Lets later generations follow the one that the guest has seen. The guest may report any
    /// number, so the number is limited to half of the range, which leaves room for later
    /// generations. Returns the number of consecutive calls that failed.
    fn catch_up(&mut self, index: usize, seen: u64, now: Millis) -> u32 {
        let failed = self.put_off(index, now);
        let generation = &mut self.members[index].generation;
        *generation = (*generation).max(seen.min(MAX_GENERATION));
        self.run.changed.insert(index);
        failed
    }

    /// Records that the member's guest runs on another host now.
    pub fn moved(&mut self, index: usize, host: String, now: Millis) {
        let member = &mut self.members[index];
        let guest = member.guest.clone();
        let from = std::mem::replace(&mut member.host, host.clone());
        self.run.changed.insert(index);
        self.note(
            "",
            now,
            format!("guest {guest} moved from {from} to {host}"),
        );
    }

    /// Records the outcome of [`super::Action::Check`]; `None` if the guest did not answer.
    pub fn checked(&mut self, index: usize, generation: u64, found: Option<Found>, now: Millis) {
        if !self.ends(index, generation) || !self.members[index].state.has_claims() {
            return;
        }
        let was_ineffective = self.members[index].state.is_ineffective();
        let Some(Found {
            boot,
            record,
            claims,
            total,
        }) = found
        else {
            // A guest that does not answer does not delay the gates.
            self.run.suspects.remove(&index);
            match was_ineffective {
                true => _ = self.put_off(index, now),
                false => self.lose_sight(index, now),
            }
            return;
        };
        // The delay of a guest that is only asked is not that of its next claims.
        let retry = self.run.retries.remove(&index);
        if !was_ineffective {
            self.regain_sight(index);
        }
        let is_suspect = self.run.suspects.remove(&index);
        if !boot.is_empty() {
            let has_booted = boot != self.members[index].boot;
            let all = self.members[index].plan.set.claims().len();
            let is_recorded = self.members[index].is_recorded(&boot, record.as_ref());
            match claims {
                // A late message may have made the claims again, in another record.
                _ if is_recorded == Some(false) => {
                    if !self.has_expired(index, now) {
                        self.ineffective(index, Failure::NoRecord, LOST_LEDGER, now);
                    }
                }
                FoundClaims::None => self.has_none(index, &boot, now),
                // The guest has booted between the reads of its claims and of its boot.
                FoundClaims::Ineffective(_) | FoundClaims::Replaced(_) if has_booted => {
                    self.has_none(index, &boot, now);
                }
                // A service that does not name its record has lost it, and a late message of an
                // earlier generation has made some of the claims again.
                FoundClaims::Made | FoundClaims::Replaced(_)
                    if total.is_some_and(|total| total < all) =>
                {
                    self.ineffective(index, Failure::NoRecord, LOST_LEDGER, now);
                }
                FoundClaims::Made if was_ineffective => {
                    let pause_us = self.members[index].pause().unwrap_or(0);
                    self.set(index, State::AsWanted { pause_us });
                }
                // Claims that were confirmed before their service named its record.
                FoundClaims::Made if total == Some(all) && self.members[index].record.is_none() => {
                    let member = &mut self.members[index];
                    let generation = member.generation;
                    member.record = record.map(|record| Record {
                        generation,
                        ..record
                    });
                    self.run.changed.insert(index);
                }
                FoundClaims::Made | FoundClaims::Unclear => {}
                // The cause may be short-lived, such as a module that is being loaded again.
                FoundClaims::Ineffective(_) if !was_ineffective && !is_suspect => {
                    self.run.suspects.insert(index);
                    self.put_off_by(index, 3, now);
                }
                FoundClaims::Ineffective(why) => {
                    self.ineffective(index, Failure::Ineffective, &why, now);
                }
                FoundClaims::Replaced(why) => self.replaced(index, &why, now),
            }
        }
        // The check reads all guests, and a guest that is as wanted closes no gate.
        if !was_ineffective && self.members[index].state.is_late() {
            self.check_errors(now);
        }
        if self.members[index].state.is_ineffective() {
            let retry = retry.filter(|_| was_ineffective);
            self.run.retries.extend(retry.map(|retry| (index, retry)));
            self.put_off(index, now);
        }
    }

    /// Records that the claims of a guest have no effect. The timeline has an entry for the first
    /// guest of each failure: a person or a later rollout may have changed all of them.
    fn ineffective(&mut self, index: usize, failure: Failure, why: &str, now: Millis) {
        let why = bounded(why);
        match &self.members[index].state {
            State::NotYet { why: before, .. } if *before == why => return,
            State::NotYet { .. } => {}
            _ => {
                let mut failures = self.members.iter().map(|one| one.state.failure());
                if failures.all(|other| other != Some(failure)) {
                    let guest = &self.members[index].guest;
                    let text = format!("guest {guest} is no longer as wanted: {why}");
                    self.note_of(Event::Drift, "", now, text);
                }
            }
        }
        self.set(index, State::NotYet { failure, why });
    }

    /// Sends the claims again because a claimed key's module was loaded again. If the module is
    /// reloaded soon after each change, the change may be the cause.
    fn replaced(&mut self, index: usize, why: &str, now: Millis) {
        let losses = self.count_loss(index, now);
        if losses >= MAX_LOSSES {
            let why = format!(
                "{why}; its claims were lost {MAX_LOSSES} times or more soon after a change"
            );
            self.ineffective(index, Failure::Ineffective, &why, now);
            return;
        }
        self.put_off_by(index, losses * 4, now);
        self.set(index, State::Pending);
    }

    /// Records that a guest has no claims. One that has booted since has lost them.
    fn has_none(&mut self, index: usize, boot: &str, now: Millis) {
        if self.has_expired(index, now) {
            return;
        }
        if boot != self.members[index].boot {
            self.set_boot(index, boot);
            self.rebooted(index, now);
        } else if self.members[index].expires.is_some() {
            // The guest ends the claims by its own clock.
            self.set(index, State::Released { void: true });
        } else {
            self.ineffective(index, Failure::NoRecord, LOST_LEDGER, now);
        }
    }

    /// Records the boot of a guest that has booted again.
    fn set_boot(&mut self, index: usize, boot: &str) {
        let member = &mut self.members[index];
        member.boot = bounded(boot);
        member.is_confirmed = false;
        self.run.changed.insert(index);
    }

    /// Changes a guest that has booted again, unless it is to be left. A guest that boots soon
    /// after each change may do so because of the change.
    fn rebooted(&mut self, index: usize, now: Millis) {
        let losses = self.count_loss(index, now);
        let name = self.members[index].guest.clone();
        if self.header.policy.after_reboot == AfterReboot::Leave {
            self.set(index, State::Released { void: true });
        } else if losses >= MAX_LOSSES {
            let text = format!(
                "guest {name} has lost its claims {MAX_LOSSES} times or more soon after its \
                 change, by boots or reloads of a module, and is left as it is"
            );
            self.note_of(Event::Drift, "", now, text);
            self.set(index, State::Released { void: true });
        } else {
            self.put_off_by(index, losses * 4, now);
            self.members[index].health = None;
            self.set(index, State::Pending);
        }
    }

    /// Counts an event that ended claims of a member. Returns the number of those in sequence that
    /// followed soon after a change.
    fn count_loss(&mut self, index: usize, now: Millis) -> u32 {
        let (at, losses) = self.run.made.entry(index).or_default();
        *losses = match now.saturating_sub(*at) < SOON {
            true => losses.saturating_add(1),
            false => 0,
        };
        *losses
    }

    /// Schedules the next call for a member after one that failed. Returns the number of
    /// consecutive calls that failed.
    pub(super) fn put_off(&mut self, index: usize, now: Millis) -> u32 {
        let failed = self.run.retries.get(&index).map_or(0, |retry| retry.0);
        let delay = BACKOFF.saturating_mul(1 << failed.min(20)).min(MAX_BACKOFF);
        let failed = failed.saturating_add(1);
        let retry = (failed, now.saturating_add(delay));
        self.run.retries.insert(index, retry);
        failed
    }

    /// Delays the next call for a member as if `failed` more calls had failed.
    fn put_off_by(&mut self, index: usize, failed: u32, now: Millis) {
        for _ in 0..failed {
            self.put_off(index, now);
        }
    }

    /// Makes the next step ask each guest that has changed whether it has the claims. Also repeats
    /// failed calls at once, unless only the guest's keys have changed.
    pub fn look_again(&mut self, news: &News) {
        let (mut hosts, mut guests) = (BTreeSet::new(), BTreeSet::new());
        for one in news.records.iter().flatten() {
            match &one.guest {
                Some(guest) => guests.insert(guest),
                None => hosts.insert(&one.host),
            };
        }
        let keys = news.keys.iter();
        let keys: BTreeSet<_> = keys.map(|one| (&*one.host, &*one.guest)).collect();
        for (index, member) in self.members.iter().enumerate() {
            // A guest may appear on another host.
            let is_meant = news.records.is_none()
                || guests.contains(&member.guest)
                || hosts.contains(&member.host);
            if is_meant || keys.contains(&(&*member.host, &*member.guest)) {
                self.run.check_now.insert(index);
            }
            // A guest that boots after each change registers each time, and has to wait.
            let losses = self.run.made.get(&index).map_or(0, |made| made.1);
            if is_meant
                && losses == 0
                && let Some(retry) = self.run.retries.get_mut(&index)
            {
                retry.1 = 0;
            }
        }
    }

    /// Forgets which actions are in progress, so that the next step returns them again.
    pub fn send_all_again(&mut self) {
        self.run.in_flight.clear();
        self.run.asked.clear();
    }

    /// Records the outcome of [`super::Action::RunGate`].
    pub fn gate_ended(
        &mut self,
        wave: usize,
        gate: usize,
        asked: Millis,
        answer: GateAnswer,
        now: Millis,
    ) {
        // The gate may have been asked again since.
        if wave != self.header.wave || self.run.asked.get(&gate) != Some(&asked) {
            return;
        }
        self.run.asked.remove(&gate);
        if !matches!(
            self.header.phase,
            Phase::Running(Stage::Baking | Stage::Gating)
        ) {
            return;
        }
        match answer {
            GateAnswer::Passed => {
                let before = self.run.answered.insert(gate, (asked, true));
                self.run.inconclusive.remove(&gate);
                if before.is_none_or(|(_, passed)| !passed) {
                    let wave = &self.header.waves[wave].name;
                    let text = format!("gate {} of wave {wave} has passed", gate + 1);
                    self.note_of(Event::Gate, "", now, text);
                }
            }
            GateAnswer::Failed(why) => self.close(gate, &why, now),
            GateAnswer::Inconclusive(why) => {
                self.run.answered.insert(gate, (asked, false));
                self.wait_for_gate(gate, asked, &why, now);
            }
        }
    }

    /// Waits for a gate that is inconclusive, and pauses the rollout when that takes too long.
    fn wait_for_gate(&mut self, gate: usize, asked: Millis, why: &str, now: Millis) {
        let entry = self.run.inconclusive.entry(gate);
        let entry = entry.or_insert_with(|| (asked, String::new()));
        entry.1 = bounded(why);
        let since = entry.0;
        let wave = &self.header.waves[self.header.wave].name;
        let what = format!("gate {} of wave {wave} is inconclusive", gate + 1);
        if now.saturating_sub(since) >= self.header.policy.gates[gate].patience_ms {
            self.pause_at(gate, &format!("{what}: {why}"), now);
        } else if since == asked {
            let text = format!("{what}, and asked again: {why}");
            self.note_of(Event::Gate, "", now, text);
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
        for (_, at) in self.run.retries.values_mut() {
            *at = at.saturating_add_signed(by);
        }
        if let Some(from) = &mut self.run.check_from {
            *from = from.saturating_add_signed(by);
        }
        // The answers to what is asked now would not be recognised by their times.
        self.run.asked.clear();
        let answered = self.run.answered.values_mut().map(|(asked, _)| asked);
        let inconclusive = self.run.inconclusive.values_mut().map(|(since, _)| since);
        let made = self.run.made.values_mut().map(|(at, _)| at);
        for at in answered.chain(inconclusive).chain(made) {
            *at = at.saturating_add_signed(by);
        }
        // The guests measure the time of their claims by other clocks.
        for (index, member) in self.members.iter_mut().enumerate() {
            if member.may_be_changed()
                && let Some(expires) = &mut member.expires
            {
                *expires = expires.saturating_add_signed(by);
                self.run.changed.insert(index);
            }
        }
    }
}
