// SPDX-License-Identifier: Apache-2.0
//! Checks that waves begin in order, each after the bake time and the gates of the one before, and
//! that claims have the time and the consent that the spec gives them. The checks use the right
//! time and the answers that the simulation gave, not what the rollout stores of them.

use std::collections::BTreeMap;

use patchbay_fleet::rollout::{
    AfterReboot, ErrorsOf, Member, Millis, Phase, Policy, Rollout, Stage, State, Wave, WaveGate,
    WaveGateKind,
};
use patchbay_fleet::runner::Command;
use patchbay_fleet::spec::Duration;

use super::driver::Driver;
use super::network::{Call, Sent};
use super::world::World;

/// The largest difference between a wait by the replicas' clocks, none of which is set, and by the
/// right time.
pub const SLACK: Millis = 4_000;

/// The course of a rollout as far as it was saved.
#[derive(Default)]
pub struct Course {
    at: Option<(Phase, usize)>,
    /// The times at which the bake times of waves began, at the latest.
    baking: BTreeMap<usize, Millis>,
    /// The members that were as wanted.
    made: Vec<bool>,
    /// The times at which members' claims were confirmed first, at the latest.
    confirmed: BTreeMap<usize, Millis>,
}

/// The latest answer to a gate.
pub struct Asked {
    at: Millis,
    answer: Answer,
    /// The time since which every answer was inconclusive.
    unclear: Option<Millis>,
    /// The time of the step that has asked for the first of these answers.
    pub asked_since: Option<Millis>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Passed,
    Failed,
    Inconclusive,
}

impl Course {
    /// Begins with a state that was loaded. The times before are not known.
    pub fn loaded(&mut self, rollout: &Rollout) {
        let header = rollout.header();
        self.at = Some((header.phase, header.wave));
        for (index, wave) in header.waves.iter().enumerate() {
            if wave.bakes_until.is_some() {
                self.baking.entry(index).or_default();
            }
        }
        for (index, member) in rollout.members().iter().enumerate() {
            if member.expires.is_some() {
                self.confirmed.entry(index).or_insert(Millis::MAX);
            }
        }
        self.made = rollout.members().iter().map(is_made).collect();
    }

    /// Returns whether the time of a member's claims is over at this time.
    pub fn is_over(&self, member: usize, ttl: Option<Duration>, now: Millis) -> bool {
        let (Some(ttl), Some(first)) = (ttl, self.confirmed.get(&member)) else {
            return false;
        };
        now > first.saturating_add(ttl.millis() + SLACK)
    }
}

fn is_made(member: &Member) -> bool {
    matches!(member.state, State::AsWanted { .. })
}

fn is_at_gates(phase: Phase) -> bool {
    matches!(phase, Phase::Running(Stage::Baking | Stage::Gating))
}

/// Returns whether the rollout waits for the member, before anything was tried.
fn is_open(member: &Member) -> bool {
    matches!(
        member.state,
        State::Pending | State::Claiming { again: false }
    )
}

impl World {
    /// Checks the waves of a rollout that was saved after a step at this right time.
    pub fn check_waves(&mut self, driver: &mut Driver, now: Millis) {
        let rollout = &driver.rollout;
        let (header, members) = (rollout.header(), rollout.members());
        let (phase, wave) = (header.phase, header.wave);
        let is_told = |wanted: fn(&Command) -> bool| {
            let mut replies = driver.replies.iter();
            replies.any(|(command, result)| wanted(command) && result.is_ok())
        };
        let is_exact = !self.is_clock_set;
        let course = &mut self.oracle.of(rollout).course;

        let begun = header.waves.iter().take(wave + 1);
        let end = begun.map(|wave| wave.members().end).max().unwrap_or(0);
        for (index, member) in members.iter().enumerate().skip(end) {
            let is_claiming = matches!(member.state, State::Claiming { .. });
            assert!(!is_claiming, "member {index} is claimed in wave {wave}");
        }
        for (index, member) in members.iter().enumerate() {
            let was_made = course.made.get(index) == Some(&true);
            let mut guests = self.guests.iter().enumerate();
            let may_be_again = guests.any(|(number, guest)| {
                guest.name == member.guest && (guest.loads > 1 || self.liar == Some(number))
            });
            let leaves = header.policy.after_reboot == AfterReboot::Leave;
            let is_left = leaves && was_made && !may_be_again;
            let is_again = matches!(member.state, State::Pending | State::Claiming { .. });
            assert!(
                !is_left || !is_again,
                "member {index} is to be left after a reboot, and is {:?}",
                member.state
            );
        }
        for (index, member) in members.iter().enumerate() {
            if member.expires.is_some() {
                course.confirmed.entry(index).or_insert(now);
            }
        }
        course.made = members.iter().map(is_made).collect();

        let baking = header.waves.iter().enumerate();
        for (index, _) in baking.filter(|(_, wave)| wave.bakes_until.is_some()) {
            course.baking.entry(index).or_insert(now);
        }
        let Some((before, from)) = course.at.replace((phase, wave)) else {
            return;
        };
        if phase.reverts() {
            return;
        }
        // A guest that boots again during the bake time does not keep the next wave from beginning.
        let is_next = is_at_gates(before) && wave == from + 1 && !is_at_gates(phase);
        let settled = match is_at_gates(phase) {
            true => wave + 1,
            false => wave,
        };
        let has_left = wave > from || is_at_gates(phase) && !is_at_gates(before);
        let is_taken_back = header
            .waves
            .get(from)
            .is_some_and(|wave| wave.is_taken_back);
        if has_left && !is_next && !is_taken_back {
            let settled = header.waves.iter().take(settled);
            let end = settled.map(|wave| wave.members().end).max().unwrap_or(0);
            let open = members[..end].iter().position(is_open);
            assert_eq!(open, None, "{phase:?} of wave {wave} does not wait for it");
        }
        let is_promoted = is_told(|one| matches!(one, Command::Promote));
        for left in from + usize::from(is_promoted)..wave {
            let of = &header.waves[left];
            if of.is_taken_back {
                continue;
            }
            let begin = course.baking.get(&left).copied();
            assert!(begin.is_some(), "wave {left} ends without its bake time");
            let end = begin.unwrap_or(0).saturating_add(of.bake_ms);
            assert!(
                !is_exact || now + SLACK >= end,
                "wave {left} ends at {now}, and its bake time at {end}"
            );
            let end = if is_exact { end } else { 0 };
            check_gates(driver, left, of, end);
        }
        if phase == Phase::Paused {
            driver.gates.clear();
        }
    }

    /// Records the answer to a gate that a step at the right time `asked` has asked.
    pub fn asked(
        &mut self,
        driver: &mut Driver,
        (wave, gate): (usize, usize),
        asked: Millis,
        answer: Answer,
    ) {
        let at = self.now;
        let patience = driver.rollout.header().policy.gates[gate].patience_ms;
        let before = driver.gates.get(&(wave, gate));
        let unclear = before.and_then(|before| before.unclear);
        if let (Some(before), Some(since)) = (before, unclear) {
            let is_over = before.at >= since + patience + SLACK;
            assert!(
                self.is_clock_set || !is_over,
                "gate {gate} is inconclusive since {since}, and asked again"
            );
        }
        let asked_since = before.and_then(|before| before.asked_since);
        let (unclear, asked_since) = match answer {
            Answer::Inconclusive => (unclear.or(Some(at)), asked_since.or(Some(asked))),
            _ => (None, None),
        };
        let asked = Asked {
            at,
            answer,
            unclear,
            asked_since,
        };
        driver.gates.insert((wave, gate), asked);
    }

    /// Checks a call that a driver sends.
    pub fn check_sent(&self, driver: &Driver, sent: &Sent) {
        let Call::SetClaims(request) = &sent.call else {
            return;
        };
        let (header, spec) = (driver.rollout.header(), &driver.spec);
        let has_claims = !request.claims.is_empty();
        let ttl = spec.ttl.filter(|_| has_claims);
        assert_eq!(
            request.ttl.as_ref().map(millis),
            ttl.map(|ttl| ttl.millis()),
            "the time of the claims is not the spec's"
        );
        let consents = header.policy.allow_guarded && has_claims;
        assert_eq!(request.allow_guarded, consents, "consent to guarded keys");
        assert_eq!(request.owner, header.owner());
    }
}

/// Checks the times of a rollout before and after a jump of the clock by `by`.
pub fn check_jump(before: &Rollout, after: &Rollout, by: i64) {
    let end = |rollout: &Rollout| {
        let wave = rollout.header().waves.get(rollout.header().wave)?;
        wave.bakes_until
    };
    let expected = end(before).map(|at| at.saturating_add_signed(by));
    assert_eq!(
        end(after),
        expected,
        "the end of the bake time after {by} ms"
    );
    let members = before.members().iter().zip(after.members());
    for (index, (before, after)) in members.enumerate() {
        let by = if before.may_be_changed() { by } else { 0 };
        let expected = before.expires.map(|at| at.saturating_add_signed(by));
        assert_eq!(after.expires, expected, "member {index} after {by} ms");
    }
}

pub fn millis(time: &prost_types::Duration) -> Millis {
    time.seconds.unsigned_abs() * 1_000 + u64::from(time.nanos.unsigned_abs()) / 1_000_000
}

/// Returns the number of these guests that the rollout wants changed.
fn wanted(members: &[Member]) -> usize {
    let wanted = members.iter();
    let wanted = wanted.filter(|one| is_open(one) || is_made(one) || one.state.is_late());
    wanted.count()
}

/// Returns the number of guests of a wave that must be as wanted.
pub fn least(policy: &Policy, members: &[Member]) -> usize {
    policy.min_success.min(wanted(members))
}

/// Checks that the gates of a wave whose bake time ends at this time let the next wave begin.
fn check_gates(driver: &Driver, index: usize, wave: &Wave, end: Millis) {
    let (header, members) = (driver.rollout.header(), driver.rollout.members());
    let of = &members[wave.members()];
    let made = of.iter().filter(|one| is_made(one)).count();
    let least = least(&header.policy, of);
    assert!(
        made >= least,
        "wave {index} ends, and {made} of {least} guests are as wanted"
    );
    for (gate, WaveGate { kind, .. }) in header.policy.gates.iter().enumerate() {
        match kind {
            WaveGateKind::Errors {
                max_percent,
                of: whose,
            } => {
                let range = wave.members();
                let of = match whose {
                    ErrorsOf::Wave => of,
                    ErrorsOf::Rollout => members,
                };
                // What has become of guests of earlier waves does not concern a wave that was
                // added, and a guest without a record may be as wanted.
                let late = of.iter().enumerate().filter(|(index, one)| {
                    let is_of_wave = matches!(whose, ErrorsOf::Wave) || range.contains(index);
                    let counts = is_of_wave || !wave.is_added || !one.state.is_ineffective();
                    counts && one.state.is_late() && !one.state.has_lost_record()
                });
                let late = late.count();
                assert!(
                    late * 100 <= wanted(of) * *max_percent as usize,
                    "wave {index} ends, and {late} guests of the {whose:?} are late"
                );
            }
            WaveGateKind::PauseP99 { budget_us } => {
                let pauses = of.iter().filter(|one| is_made(one)).map(Member::pause);
                let longest = pauses.max().flatten();
                assert!(
                    longest.is_none_or(|longest| longest <= *budget_us),
                    "wave {index} ends, and one of its pauses is {longest:?} us"
                );
            }
            _ => {
                let asked = driver.gates.get(&(index, gate));
                let answer = asked.map(|asked| (asked.answer, asked.at + SLACK >= end));
                assert_eq!(
                    answer,
                    Some((Answer::Passed, true)),
                    "wave {index} ends, and this is the answer of gate {gate}"
                );
            }
        }
    }
}
