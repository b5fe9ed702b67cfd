// SPDX-License-Identifier: Apache-2.0
//! Plans the runs of a comparison and decides about the keys. This module starts no run: the caller
//! carries out the steps of the schedule and passes the measurements back.
//!
//! A stage consists of rounds. In each round, every undecided key has one turn: a run on each side,
//! one directly after the other. The order of the keys and of the sides is random.
//!
//! A comparison of named keys tests all of them once, after the last round, with Holm's correction.
//!
//! A ranking first screens all keys with few runs, and continues with those that may have an
//! effect. The measurements of the screening are discarded, so that the selection does not bias the
//! result. There are then up to three looks. A look tests the undecided keys, with Holm's
//! correction and a share of the error rate. A key with a difference gets no further runs.
//!
//! The probability that a ranking reports a difference for any key without an effect is at most the
//! error rate. Until the first false report, all keys without an effect that passed the screening
//! are undecided. So the probability that a look makes the first false report is at most its share
//! of the error rate, and the shares add up to 1.

use fastrand::Rng;

use super::stats::{
    Bootstrap, Interval, Pair, SMALLEST_ALPHA, holm, is_testable, medians, resamples,
};
use crate::keys::Side;

/// The minimum number of runs on each side of a key. With fewer, the bootstrap exceeds small error
/// rates; `stats/tests.rs` measures this.
pub const MIN_RUNS: u32 = 20;
/// The number of runs on each side of a key in a screening.
const SCREENING_RUNS: usize = 10;
/// The largest p with which a key passes the screening.
pub const SCREENING_P: f64 = 0.2;
/// The looks of a ranking: the fraction of the runs after which each takes place, and its share of
/// the error rate.
const LOOKS: [(f64, f64); 3] = [(1.0 / 3.0, 0.2), (2.0 / 3.0, 0.3), (1.0, 0.5)];

/// A stage of the schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    Screening {
        runs: usize,
    },
    /// A look after `runs` runs on each side, with this error rate.
    Look {
        runs: usize,
        alpha: f64,
    },
}

impl Stage {
    fn runs(self) -> usize {
        match self {
            Self::Screening { runs } | Self::Look { runs, .. } => runs,
        }
    }
}

/// Returns the only stage of a comparison of named keys.
pub fn comparison(runs: u32, alpha: f64) -> Vec<Stage> {
    let runs = runs as usize;
    vec![Stage::Look { runs, alpha }]
}

/// Returns the stages of a ranking. Looks after the same number of runs are merged into one with
/// the sum of their shares.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn ranking(runs: u32, alpha: f64) -> Vec<Stage> {
    let mut stages = vec![Stage::Screening {
        runs: SCREENING_RUNS,
    }];
    for (part, share) in LOOKS {
        let at = (f64::from(runs) * part).ceil() as usize;
        let at = at.clamp(MIN_RUNS as usize, (runs as usize).max(MIN_RUNS as usize));
        match stages.last_mut() {
            Some(Stage::Look { runs, alpha: sum }) if *runs == at => *sum += share * alpha,
            _ => stages.push(Stage::Look {
                runs: at,
                alpha: share * alpha,
            }),
        }
    }
    stages
}

/// Checks that keys can be tested at the error rate of the last look, which is the largest of all
/// looks. The others are tested at most at this rate.
///
/// # Errors
/// The error rate of each key would be too small. The message names the remedies.
pub fn check(stages: &[Stage], keys: usize) -> Result<(), String> {
    let Some(&Stage::Look { alpha, .. }) = stages.last() else {
        return Ok(());
    };
    if is_testable(alpha, keys) {
        return Ok(());
    }
    // A single key has no smaller number.
    let fewer = if keys > 1 { "fewer keys or " } else { "" };
    let s = if keys == 1 { "" } else { "s" };
    Err(format!(
        "{keys} key{s} would be tested at an error rate of {:.1e} each, and the resamples are \
         reliable down to {SMALLEST_ALPHA:e}; give {fewer}a lower --confidence",
        alpha / keys.max(1) as f64
    ))
}

/// A run on each side of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The index of the key.
    pub key: usize,
    /// The side of the first run.
    pub first: Side,
}

/// The next step of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A stage begins with this number of keys.
    Begin(Stage, usize),
    /// These keys passed the screening, but are too many to be tested. They are given up for
    /// this reason.
    Untestable(Vec<usize>, String),
    Run(Turn),
}

/// The result of a key.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// True if a difference was found, which is equivalent to an interval that does not contain 1.
    pub difference: bool,
    /// The key did not pass the screening.
    pub screened_out: bool,
    /// The medians, off and on.
    pub medians: (f64, f64),
    pub interval: Interval,
    /// The error rate of the interval.
    pub alpha: f64,
    pub p: f64,
    /// The measurements of this result.
    pub pairs: Vec<Pair>,
}

impl Finding {
    /// Returns the ratio of the medians, on to off.
    pub fn ratio(&self) -> f64 {
        self.medians.1 / self.medians.0
    }
}

#[derive(Debug)]
enum State {
    Undecided(Vec<Pair>),
    Decided(Finding),
    /// The key cannot be compared.
    GivenUp,
}

/// A schedule in progress.
#[derive(Debug)]
pub struct Schedule {
    stages: std::vec::IntoIter<Stage>,
    stage: Option<Stage>,
    keys: Vec<State>,
    /// The error rate of the whole comparison.
    alpha: f64,
    /// The remaining turns of this round.
    round: Vec<Turn>,
    rounds: usize,
    order: Rng,
    bootstrap: Rng,
}

impl Schedule {
    /// Creates the schedule of `keys` keys. The seed determines the order of the runs and the
    /// resamples.
    pub fn new(keys: usize, stages: Vec<Stage>, alpha: f64, seed: u64) -> Self {
        let mut order = Rng::with_seed(seed);
        let bootstrap = order.fork();
        Self {
            stages: stages.into_iter(),
            stage: None,
            keys: (0..keys).map(|_| State::Undecided(vec![])).collect(),
            alpha,
            round: vec![],
            rounds: 0,
            order,
            bootstrap,
        }
    }

    /// Returns the next step; `None` at the end. Also returns `None` when `halted` becomes true
    /// during the resamples at the end of a stage. Keys are then undecided.
    pub fn next(&mut self, halted: impl Fn() -> bool) -> Option<Step> {
        loop {
            while let Some(turn) = self.round.pop() {
                if matches!(self.keys[turn.key], State::Undecided(_)) {
                    return Some(Step::Run(turn));
                }
            }
            let undecided = self.undecided();
            match self.stage {
                Some(stage) if self.rounds < stage.runs() && !undecided.is_empty() => {
                    self.rounds += 1;
                    self.begin_round(undecided);
                }
                _ => {
                    if let Some(stage) = self.stage
                        && !self.close(stage, &undecided, &halted)
                    {
                        return None;
                    }
                    let left = self.undecided();
                    self.stage = self.stages.next();
                    let stage = self.stage.filter(|_| !left.is_empty())?;
                    if let Stage::Look { .. } = stage
                        && let Err(why) = self.check(stage, left.len())
                    {
                        left.iter().for_each(|&key| self.give_up(key));
                        return Some(Step::Untestable(left, why));
                    }
                    return Some(Step::Begin(stage, left.len()));
                }
            }
        }
    }

    /// Accepts the measurements of the last turn.
    pub fn measured(&mut self, key: usize, pair: Pair) {
        if let State::Undecided(pairs) = &mut self.keys[key] {
            pairs.push(pair);
        }
    }

    /// Excludes a key that cannot be compared.
    pub fn give_up(&mut self, key: usize) {
        self.keys[key] = State::GivenUp;
    }

    /// Returns the result of each key; `None` for a key that was excluded.
    pub fn findings(self) -> Vec<Option<Finding>> {
        let finding = |state| match state {
            State::Decided(finding) => Some(finding),
            State::Undecided(_) | State::GivenUp => None,
        };
        self.keys.into_iter().map(finding).collect()
    }

    /// Excludes an undecided key, and returns its measurements so far. In a ranking they are those
    /// of the screening or those after it, and not both.
    pub fn abandon(&mut self, key: usize) -> Vec<Pair> {
        match std::mem::replace(&mut self.keys[key], State::GivenUp) {
            State::Undecided(pairs) => pairs,
            State::Decided(_) | State::GivenUp => vec![],
        }
    }

    /// Returns the keys without a result that are still compared.
    pub fn undecided(&self) -> Vec<usize> {
        let undecided = |&key: &usize| matches!(self.keys[key], State::Undecided(_));
        (0..self.keys.len()).filter(undecided).collect()
    }

    /// Checks that keys can be tested at the end of this stage or of a later one.
    fn check(&self, stage: Stage, keys: usize) -> Result<(), String> {
        let stages = self.stages.as_slice();
        match stages.is_empty() {
            true => check(&[stage], keys),
            false => check(stages, keys),
        }
    }

    fn begin_round(&mut self, mut keys: Vec<usize>) {
        self.order.shuffle(&mut keys);
        for key in keys {
            let first = match self.order.bool() {
                true => Side::On,
                false => Side::Off,
            };
            self.round.push(Turn { key, first });
        }
    }

    /// Decides about the keys at the end of a stage. Returns false if it was halted.
    fn close(&mut self, stage: Stage, keys: &[usize], halted: &impl Fn() -> bool) -> bool {
        match stage {
            Stage::Screening { .. } => {
                for &key in keys {
                    if halted() {
                        return false;
                    }
                    let bootstrap = self.resample(key, self.alpha);
                    if bootstrap.p() > SCREENING_P {
                        self.decide(key, &bootstrap, self.alpha, false, true);
                    } else {
                        self.keys[key] = State::Undecided(vec![]);
                    }
                }
                self.rounds = 0;
            }
            // At the error rate of this look, no key can be tested. Those of the later looks are
            // larger.
            Stage::Look { alpha, .. } if !is_testable(alpha, keys.len()) => {}
            Stage::Look { alpha, .. } => {
                let smallest = alpha / keys.len().max(1) as f64;
                // The bootstraps of many keys at once would take gigabytes. So only the state of
                // the random numbers is kept, and the bootstrap of a decided key is made again.
                let mut tested = Vec::with_capacity(keys.len());
                let mut p = Vec::with_capacity(keys.len());
                for &key in keys {
                    if halted() {
                        return false;
                    }
                    tested.push((key, self.bootstrap.clone()));
                    p.push(self.resample(key, smallest).p());
                }
                let after = self.bootstrap.clone();
                let is_last = self.stages.len() == 0;
                for ((key, before), decision) in tested.into_iter().zip(holm(&p, alpha)) {
                    if decision.rejected || is_last {
                        self.bootstrap = before;
                        let bootstrap = self.resample(key, smallest);
                        self.decide(key, &bootstrap, decision.alpha, decision.rejected, false);
                    }
                }
                self.bootstrap = after;
            }
        }
        true
    }

    fn resample(&mut self, key: usize, alpha: f64) -> Bootstrap {
        let State::Undecided(pairs) = &self.keys[key] else {
            unreachable!("only undecided keys are looked at");
        };
        Bootstrap::new(pairs, resamples(alpha), &mut self.bootstrap)
    }

    fn decide(
        &mut self,
        key: usize,
        bootstrap: &Bootstrap,
        alpha: f64,
        difference: bool,
        screened_out: bool,
    ) {
        let State::Undecided(pairs) = &mut self.keys[key] else {
            return;
        };
        let pairs = std::mem::take(pairs);
        self.keys[key] = State::Decided(Finding {
            difference,
            screened_out,
            medians: medians(&pairs),
            interval: bootstrap.interval(alpha),
            alpha,
            p: bootstrap.p(),
            pairs,
        });
    }
}

#[cfg(test)]
mod tests;
