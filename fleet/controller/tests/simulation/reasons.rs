// SPDX-License-Identifier: Apache-2.0
//! Checks that a rollout is paused, aborted or takes a wave back only for a reason, and that a
//! guest counts as late only after a failure. The reasons are what people, guests and gates have
//! told the driver, not what the rollout stores of it.

use std::collections::BTreeSet;

use patchbay_fleet::rollout::{
    ErrorsOf, Found, FoundClaims, GateAnswer, Member, Millis, OnFailure, Phase, Record, Rollout,
    State, WaveGateKind,
};
use patchbay_fleet::runner::Command;
use patchbay_fleet::runner::guests::Outcome;
use patchbay_proto::v1;
use tonic::Status;

use super::driver::Driver;
use super::guest::Guest;
use super::network;
use super::waves::{Answer, SLACK, least};
use super::world::World;

/// A call for which a driver waits.
pub struct Open {
    pub driver: u32,
    /// The request, if it has claims.
    pub request: Option<v1::SetClaimsRequest>,
}

/// The answer of a guest to claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Some claims are not made, or this is not known.
    Failed,
    Made {
        /// The guest was stopped for the change.
        is_paused: bool,
    },
}

/// A fact that goes into a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The guest of a member has answered.
    Guest(usize, Told),
    /// The gate of a wave has answered.
    Gate(usize, usize, Answer),
}

/// The reasons that a rollout has, and its state as it was saved last.
#[derive(Default)]
pub struct Reasons {
    phase: Phase,
    /// The members that the rollout wanted changed.
    wanted: Vec<bool>,
    /// The waves that are taken back.
    taken_back: BTreeSet<usize>,
    /// The members for which a call has failed since they were last saved as not late.
    failed: BTreeSet<usize>,
    /// The members whose guests have told that they were stopped for a change.
    paused: BTreeSet<usize>,
}

impl Reasons {
    /// Records a state that was saved or loaded.
    pub fn saved(&mut self, rollout: &Rollout) {
        let (header, members) = (rollout.header(), rollout.members());
        self.phase = header.phase;
        self.wanted = members.iter().map(is_wanted).collect();
        let waves = header.waves.iter().enumerate();
        let taken_back = waves.filter(|(_, wave)| wave.is_taken_back);
        self.taken_back = taken_back.map(|(index, _)| index).collect();
    }

    fn learn(&mut self, fact: Fact) {
        match fact {
            Fact::Guest(member, Told::Failed) => _ = self.failed.insert(member),
            Fact::Guest(member, Told::Made { is_paused: true }) => {
                self.paused.insert(member);
            }
            Fact::Guest(..) | Fact::Gate(..) => {}
        }
    }
}

/// Returns whether a service with this record does not have the claims that the member has
/// confirmed in this boot.
fn has_lost(member: &Member, found: &Found) -> bool {
    let has = |record: &Record| {
        let mut present = found.record.iter();
        present.any(|one| one.ledger == record.ledger && one.generation >= record.generation)
    };
    let is_here = member.is_confirmed && member.boot == found.boot;
    is_here && member.record.as_ref().is_some_and(|record| !has(record))
}

fn is_wanted(member: &Member) -> bool {
    matches!(
        member.state,
        State::Pending | State::Claiming { .. } | State::AsWanted { .. } | State::NotYet { .. }
    )
}

impl Driver {
    /// Records what an outcome that is reported tells.
    pub fn note(&mut self, outcome: &Outcome) {
        let fact = match outcome {
            Outcome::Claim(of) => {
                let guest = self.rollout.members()[of.member].guest.clone();
                let told = self.answers.remove(&(guest, of.generation));
                told.map(|told| Fact::Guest(of.member, told))
            }
            Outcome::Checked(of) => of.outcome.as_ref().and_then(|found| {
                let member = &self.rollout.members()[of.member];
                let has_failed = match found.claims {
                    _ if has_lost(member, found) => true,
                    FoundClaims::Ineffective(_) | FoundClaims::Replaced(_) => true,
                    FoundClaims::None => found.boot == member.boot,
                    FoundClaims::Made | FoundClaims::Unclear => {
                        let all = member.plan.set.claims().len();
                        found.total.is_some_and(|total| total < all)
                    }
                };
                has_failed.then_some(Fact::Guest(of.member, Told::Failed))
            }),
            Outcome::Observed { member, health, .. } if health.is_err() => {
                Some(Fact::Guest(*member, Told::Failed))
            }
            Outcome::Gate {
                wave, gate, answer, ..
            } => {
                let answer = match answer {
                    GateAnswer::Passed => Answer::Passed,
                    GateAnswer::Failed(_) => Answer::Failed,
                    GateAnswer::Inconclusive(_) => Answer::Inconclusive,
                };
                Some(Fact::Gate(*wave, *gate, answer))
            }
            _ => None,
        };
        self.facts.extend(fact);
    }
}

impl World {
    /// Records what an answer to claims tells a driver.
    pub fn hear(&mut self, open: &Open, answer: &Result<network::Answer, Status>) {
        let (Some(request), Some(driver)) = (&open.request, self.drivers.get_mut(&open.driver))
        else {
            return;
        };
        let told = match answer {
            Ok(network::Answer::SetClaims(answer)) => {
                let is_made = |claim: &v1::KeyClaim| {
                    let mut results = answer.results.iter();
                    let result = results.find(|result| result.key == claim.key);
                    result.is_some_and(|result| result.state() == v1::ClaimState::Made)
                };
                match request.claims.iter().all(is_made) {
                    true => Told::Made {
                        is_paused: answer.report.is_some(),
                    },
                    false => Told::Failed,
                }
            }
            _ => Told::Failed,
        };
        let call = (request.guest.clone(), request.generation);
        driver.answers.insert(call, told);
    }

    /// Records the facts that go into a driver's step.
    pub fn learn(&mut self, driver: &Driver) {
        let reasons = &mut self.oracle.of(&driver.rollout).reasons;
        driver.facts.iter().for_each(|fact| reasons.learn(*fact));
    }

    /// Checks a state that a driver has saved after a step at this right time.
    pub fn check_reasons(&mut self, driver: &Driver, now: Millis) {
        let rollout = &driver.rollout;
        let header = rollout.header();
        let is_told = |wanted: fn(&Command) -> bool| {
            let mut replies = driver.replies.iter();
            replies.any(|(command, result)| wanted(command) && result.is_ok())
        };
        let owner = header.owner();
        let reasons = std::mem::take(&mut self.oracle.of(rollout).reasons);
        let (phase, wave, before) = (header.phase, header.wave, reasons.phase);
        let of = |on_failure| self.is_closed(driver, &reasons, wave, on_failure);

        let ran = before != Phase::Paused
            || is_told(|one| matches!(one, Command::Resume | Command::Promote));
        if phase == Phase::Paused && ran {
            let by_person = is_told(|one| matches!(one, Command::Pause));
            assert!(
                by_person
                    || of(OnFailure::Pause)
                    || self.is_unclear(driver, now)
                    || self.has_too_few(rollout),
                "{owner} is paused in wave {wave}, and nothing asks for it: {}",
                header.message
            );
        }
        if phase.reverts() && !before.reverts() {
            let by_person = is_told(|one| matches!(one, Command::Abort | Command::Undo));
            let is_added = header.waves.get(wave).is_none_or(|wave| wave.is_added);
            assert!(
                by_person || !is_added && of(OnFailure::Abort),
                "{owner} reverts in wave {wave}, and nothing asks for it: {}",
                header.message
            );
        }
        for (index, wave) in header.waves.iter().enumerate() {
            if wave.is_taken_back && !reasons.taken_back.contains(&index) {
                assert!(
                    wave.is_added && self.is_closed(driver, &reasons, index, OnFailure::Abort),
                    "wave {index} of {owner} is taken back, and nothing asks for it"
                );
            }
        }
        for (index, member) in rollout.members().iter().enumerate() {
            assert!(
                !member.state.is_late() || self.has_failed(&reasons, index, member),
                "member {index} of {owner} is {:?}, and no call for it has failed",
                member.state
            );
        }

        let mut reasons = reasons;
        reasons.saved(rollout);
        let members = rollout.members();
        let is_late = |index: &usize| members.get(*index).is_some_and(|one| one.state.is_late());
        reasons.failed.retain(is_late);
        self.oracle.of(rollout).reasons = reasons;
    }

    /// Returns whether the member's host answers with invalid data, which may mean anything.
    fn is_of_liar(&self, member: &Member) -> bool {
        let liar = self.liar.map(|index| &self.guests[index].name);
        liar == Some(&member.guest)
    }

    fn has_failed(&self, reasons: &Reasons, index: usize, member: &Member) -> bool {
        reasons.failed.contains(&index) || self.is_of_liar(member)
    }

    /// Returns whether a gate with this consequence is closed in a wave, by what the driver was
    /// told.
    fn is_closed(
        &self,
        driver: &Driver,
        reasons: &Reasons,
        wave: usize,
        on_failure: OnFailure,
    ) -> bool {
        let (header, all) = (driver.rollout.header(), driver.rollout.members());
        let Some(of) = header.waves.get(wave) else {
            return false;
        };
        // The step itself may have released the members that the rollout wanted until then.
        let is_wanted = |index: &usize| {
            let is_over = matches!(
                all[*index].state,
                State::Released { .. } | State::Forgotten | State::Adopted | State::Superseded
            );
            !is_over && reasons.wanted.get(*index).is_none_or(|wanted| *wanted)
        };
        let gates = header.policy.gates.iter().enumerate();
        let mut gates = gates.filter(|(_, gate)| gate.on_failure == on_failure);
        gates.any(|(number, gate)| match gate.kind {
            WaveGateKind::Errors {
                max_percent,
                of: whose,
            } => {
                let range = match whose {
                    ErrorsOf::Wave => of.members(),
                    ErrorsOf::Rollout => 0..all.len(),
                };
                let wanted: Vec<usize> = range.filter(is_wanted).collect();
                let failed = wanted.iter();
                let failed = failed.filter(|one| self.has_failed(reasons, **one, &all[**one]));
                failed.count() * 100 > wanted.len() * max_percent as usize
            }
            WaveGateKind::PauseP99 { budget_us } => of.members().any(|index| {
                let is_paused = reasons.paused.contains(&index);
                self.is_of_liar(&all[index]) || budget_us == 0 && is_paused
            }),
            _ => {
                let closed = Fact::Gate(wave, number, Answer::Failed);
                driver.facts.contains(&closed)
            }
        })
    }

    /// Returns whether a gate of the present wave was inconclusive for longer than its patience,
    /// also by the latest answer.
    fn is_unclear(&self, driver: &Driver, now: Millis) -> bool {
        let header = driver.rollout.header();
        let wave = header.wave;
        let mut gates = header.policy.gates.iter().enumerate();
        gates.any(|(number, gate)| {
            let unclear = Fact::Gate(wave, number, Answer::Inconclusive);
            let asked = driver.gates.get(&(wave, number));
            let since = asked.and_then(|asked| asked.asked_since);
            let is_over = |since| self.is_clock_set || now + SLACK >= since + gate.patience_ms;
            driver.facts.contains(&unclear) && since.is_some_and(is_over)
        })
    }

    /// Returns whether fewer guests of the present wave are as wanted than must be, because the
    /// others have failed, have booted again or have loaded a module again.
    fn has_too_few(&self, rollout: &Rollout) -> bool {
        let header = rollout.header();
        let Some(wave) = header.waves.get(header.wave) else {
            return false;
        };
        let of = &rollout.members()[wave.members()];
        let is_made = |member: &Member| matches!(member.state, State::AsWanted { .. });
        let made = of.iter().filter(|one| is_made(one)).count();
        let is_explained = |member: &Member| {
            let mut guests = self.guests.iter();
            let has_lost = |guest: &Guest| guest.boots > 1 || guest.loads > 1;
            let has_lost = guests.any(|guest| guest.name == member.guest && has_lost(guest));
            member.state.is_late() || has_lost || self.is_of_liar(member)
        };
        let mut others = of.iter().filter(|one| is_wanted(one) && !is_made(one));
        made < least(&header.policy, of) && others.all(is_explained)
    }
}
