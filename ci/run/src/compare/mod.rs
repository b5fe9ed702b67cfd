// SPDX-License-Identifier: Apache-2.0
//! `patchbay ci compare`: measures the effect of keys on a command.
//!
//! ```text
//!   schedule  the next run, and the decision about each key; runs nothing
//!   stats     medians, bootstrap, Holm's correction
//!   metric    the measurement in the output of a run
//!   plot      the SVG file
//! ```
//!
//! This module carries out the runs that the schedule requests.

mod metric;
mod plot;
mod schedule;
mod stats;

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

pub use self::metric::Metric;
use self::metric::in_range;
pub use self::plot::{percent, short};
pub use self::schedule::MIN_RUNS;
use self::schedule::{Finding, Schedule, Stage, Step, Turn};
use self::stats::{Pair, medians};
use crate::args::CompareArgs;
use crate::console::printable;
use crate::interrupt::Halt;
use crate::keys::{Selected, Setting, Side};
use crate::report::{Case, Verdict as CaseVerdict};
use crate::runner::{Attempt, Kept, Runner};
use crate::{FAILED, output, prepare, status, status_of};

/// The name of the measure without `--metric`.
const WALL_TIME: &str = "wall time in seconds";

/// The effects of keys on a command.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The seed of the order of the runs and of the resamples.
    pub seed: u64,
    /// The minimum probability that no difference is reported for any key without an effect.
    pub confidence: f64,
    /// The expression of `--metric`, or the wall time.
    pub measure: String,
    /// The number of runs of the command.
    pub runs: u32,
    /// The number of guests that were booted.
    pub boots: u32,
    /// The keys: those with a difference first, then by effect.
    pub keys: Vec<Compared>,
    /// The plot could not be written, and the reason was printed.
    #[serde(skip)]
    pub plot_failed: bool,
    /// The early end, whose reason was printed; `None` if the comparison is complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_early: Option<Early>,
}

/// The early end of a comparison.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Early {
    /// The sentence that says why the comparison ended, and after how many runs.
    pub why: String,
    /// The exit status for this process.
    #[serde(skip)]
    status: u8,
}

impl Comparison {
    /// Returns the exit status: if the comparison ended early, that of the signal, or 125 after an
    /// error; 1 if a key could not be compared because a run failed or printed no measurement, or
    /// if the plot could not be written.
    pub fn status(&self) -> u8 {
        if let Some(early) = &self.ended_early {
            return early.status;
        }
        match self.plot_failed || self.keys.iter().any(|key| key.result == Verdict::Failed) {
            true => FAILED,
            false => 0,
        }
    }
}

/// The result of one key.
#[derive(Debug, Serialize)]
pub struct Compared {
    pub name: String,
    pub result: Verdict,
    /// The reason why the key was not compared; empty if it was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub why: String,
    #[serde(flatten)]
    pub figures: Option<Figures>,
    /// The measurements, also those so far of a key that was not decided.
    #[serde(flatten)]
    pub measured: Option<Measured>,
}

impl Compared {
    pub fn is_difference(&self) -> bool {
        self.result == Verdict::Difference
    }

    fn without_figures(name: &str, result: Verdict, why: String) -> Self {
        Self {
            name: name.to_owned(),
            result,
            why,
            figures: None,
            measured: None,
        }
    }
}

/// The verdict on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The interval does not contain 1.
    Difference,
    /// The interval contains 1.
    NoDifference,
    /// The comparison ended before the key was decided.
    Undecided,
    /// A run failed or printed no measurement.
    Failed,
    /// The key cannot be flipped.
    Skipped,
}

/// The figures of a key.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// The ratio of the medians, on to off.
    pub ratio: f64,
    /// The lower limit of the interval; 0 if it is open.
    pub low: f64,
    /// The upper limit of the interval; `None` if it is open.
    pub high: Option<f64>,
    /// The confidence of the interval. Holm's correction makes it at least as high as that of the
    /// comparison.
    pub level: f64,
    /// The smallest error rate at which the interval does not contain 1, without Holm's correction.
    pub p: f64,
    /// True if the key did not pass the screening of a ranking. Its figures are then those of the
    /// screening.
    pub screened_out: bool,
}

impl From<&Finding> for Figures {
    fn from(finding: &Finding) -> Self {
        let high = finding.interval.high;
        Self {
            ratio: finding.ratio(),
            low: finding.interval.low,
            high: high.is_finite().then_some(high),
            level: 1.0 - finding.alpha,
            p: finding.p,
            screened_out: finding.screened_out,
        }
    }
}

/// The measurements of a key.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// The number of runs on each side.
    pub runs: usize,
    pub median_off: f64,
    pub median_on: f64,
    /// The measurements with the key off. The two measurements of a pair have the same index in
    /// `off` and `on`.
    pub off: Vec<f64>,
    /// The measurements with the key on.
    pub on: Vec<f64>,
}

impl Measured {
    fn new((median_off, median_on): (f64, f64), pairs: &[Pair]) -> Self {
        Self {
            runs: pairs.len(),
            median_off,
            median_on,
            off: pairs.iter().map(|pair| pair.off).collect(),
            on: pairs.iter().map(|pair| pair.on).collect(),
        }
    }
}

/// A comparison, or the exit status of a run without one.
pub(crate) enum Ended {
    Compared(Comparison),
    /// The first run failed with this status, and the reason was printed.
    Status(u8),
}

/// Runs the command with each key off and on, and compares the measurements.
///
/// # Errors
/// No guest boots, a named key cannot be flipped, or the agent breaks the protocol.
pub(crate) async fn here(arguments: &CompareArgs, limit: Duration, halt: Halt) -> Result<Ended> {
    let start = Instant::now();
    let (mut runner, preparation, _files) = prepare::runner(&arguments.guest, limit, halt).await?;
    let (patterns, named) = match arguments.matrix.is_empty() {
        true => (&arguments.key, true),
        false => (&arguments.matrix, false),
    };
    let allow_guarded = arguments.guest.allow_guarded;
    let keys = runner.keys().await?.select(patterns, allow_guarded).await?;
    let alpha = 1.0 - arguments.confidence;
    let stages = match named {
        true => schedule::comparison(arguments.runs, alpha),
        false => schedule::ranking(arguments.runs, alpha),
    };
    // The number of keys that pass a screening is not known yet.
    let tested = if named { keys.len() } else { 1 };
    schedule::check(&stages, tested).map_err(anyhow::Error::msg)?;
    if let Some(status) = first_run(&mut runner, arguments).await? {
        runner.discard().await;
        return Ok(Ended::Status(status));
    }
    let mut comparing = Comparing {
        runner,
        metric: arguments.metric.clone(),
        named,
        keys,
        excluded: vec![],
        undecided: vec![],
        runs: 1,
        ended_early: None,
    };
    comparing.runner.halt.keep_results();
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
    tell!("patchbay: seed {seed}");
    let schedule = Schedule::new(comparing.keys.len(), stages, alpha, seed);
    let findings = comparing.follow(schedule).await?;
    let mut comparison = Comparison {
        seed,
        confidence: arguments.confidence,
        measure: match &arguments.metric {
            Some(metric) => metric.text().to_owned(),
            None => WALL_TIME.to_owned(),
        },
        runs: comparing.runs,
        boots: comparing.runner.times.boots,
        keys: comparing.results(&findings),
        plot_failed: false,
        ended_early: comparing.ended_early,
    };
    comparing.runner.discard().await;
    if let Some(path) = &arguments.plot {
        // A plot that cannot be written must not discard the results of a long run.
        if let Err(error) = output::write(path, plot::forest(&comparison)).await {
            tell!("patchbay: {}", printable(&format!("{error:#}")));
            comparison.plot_failed = true;
        }
    }
    if comparison.keys.iter().all(|key| key.figures.is_none()) {
        tell!("patchbay: no key was compared");
    }
    prepare::print_times(start, preparation, &comparing.runner, 1);
    Ok(Ended::Compared(comparison))
}

/// Runs the command without a flipped key, which also fills the guest's caches. Returns the exit
/// status if the command fails. The comparison then ends, because a later failure could not be
/// attributed to a key.
async fn first_run(runner: &mut Runner, arguments: &CompareArgs) -> Result<Option<u8>> {
    let mut kept = Kept::default();
    let (outcome, failure) = runner.run(&mut kept).await?;
    let (why, status) = match (failure, &arguments.metric) {
        (Some(why), _) => (why, status(&outcome)),
        (None, Some(metric)) => match metric.measure(&kept.text(), kept.is_cut()) {
            Ok(_) => return Ok(None),
            Err(why) => (why, FAILED),
        },
        (None, None) => return Ok(None),
    };
    tell!(
        "patchbay: no key was compared, because the command fails without a flipped key: {}",
        printable(&why)
    );
    for line in kept.text().lines() {
        tell!("        {line}");
    }
    Ok(Some(status))
}

/// A comparison in progress.
struct Comparing {
    runner: Runner,
    metric: Option<Metric>,
    /// True if `--key` names the keys. A key that cannot be flipped is then an error.
    named: bool,
    keys: Vec<Selected>,
    /// The indices of the keys that are not compared, with the reasons.
    excluded: Vec<(usize, Verdict, String)>,
    /// The indices of the keys that were undecided at an early end, with their measurements.
    undecided: Vec<(usize, Vec<Pair>)>,
    runs: u32,
    ended_early: Option<Early>,
}

impl Comparing {
    /// Carries out the runs of a schedule. If a run cannot take place, or after a signal, keeps the
    /// results and the measurements so far.
    async fn follow(&mut self, mut schedule: Schedule) -> Result<Vec<Option<Finding>>> {
        for (number, key) in self.keys.iter().enumerate() {
            if let Some(why) = &key.obstacle {
                schedule.give_up(number);
                self.excluded.push((number, Verdict::Skipped, why.clone()));
            }
        }
        loop {
            // The bootstrap at the end of a stage takes time, and a signal must be able to
            // interrupt it.
            let halt = self.runner.halt.clone();
            let (step, back) = tokio::task::spawn_blocking(move || {
                let step = schedule.next(|| halt.cause().is_some());
                (step, schedule)
            })
            .await?;
            schedule = back;
            match step {
                None => {
                    if let Some(cause) = self.runner.halt.cause()
                        && !schedule.undecided().is_empty()
                    {
                        self.end_early(&mut schedule, &cause.into());
                    }
                    return Ok(schedule.findings());
                }
                Some(Step::Begin(stage, keys)) => announce(stage, keys),
                Some(Step::Untestable(keys, why)) => {
                    let why = format!("too many keys passed the screening: {why}");
                    tell!("patchbay: no key is compared further: {why}");
                    let failed = |key| (key, Verdict::Failed, why.clone());
                    self.excluded.extend(keys.into_iter().map(failed));
                }
                Some(Step::Run(turn)) => match self.turn(turn).await {
                    Err(error) => self.end_early(&mut schedule, &error),
                    Ok(Ok(pair)) => schedule.measured(turn.key, pair),
                    Ok(Err((verdict, why))) => {
                        schedule.give_up(turn.key);
                        let name = &self.keys[turn.key].setting.key;
                        tell!("patchbay: {name} is not compared: {}", printable(&why));
                        self.excluded.push((turn.key, verdict, why));
                    }
                },
            }
        }
    }

    /// Ends the comparison after an error or a signal. Prints the reason, and keeps it and the
    /// measurements of the undecided keys for the report.
    fn end_early(&mut self, schedule: &mut Schedule, error: &anyhow::Error) {
        let (runs, status) = (self.runs, status_of(error));
        let s = if runs == 1 { "" } else { "s" };
        let why = format!("the comparison ended early, after {runs} run{s}: {error:#}");
        tell!("patchbay: {}", printable(&why));
        for key in schedule.undecided() {
            self.undecided.push((key, schedule.abandon(key)));
        }
        self.ended_early = Some(Early { why, status });
    }

    /// Runs the command on both sides of a key. If a run fails, returns the verdict and the reason.
    async fn turn(&mut self, turn: Turn) -> Result<Result<Pair, (Verdict, String)>> {
        let flipped = self.keys[turn.key].setting.clone();
        let mut pair = Pair { off: 0.0, on: 0.0 };
        for side in [turn.first, turn.first.other()] {
            let wanted = Setting {
                key: flipped.key.clone(),
                side,
            };
            let name = wanted.to_string();
            let settings = match wanted == flipped {
                true => std::slice::from_ref(&flipped),
                // The key already has the state of this side.
                false => &[],
            };
            let case = match self.runner.attempt(&name, settings).await? {
                Attempt::Ran(case) | Attempt::NotFlipped(case) => case,
                Attempt::Refused(why) => {
                    let verdict = match self.named {
                        true => Verdict::Failed,
                        false => Verdict::Skipped,
                    };
                    return Ok(Err((verdict, why)));
                }
            };
            self.runs += 1;
            match self.measure(&case) {
                Ok(measurement) => match side {
                    Side::On => pair.on = measurement,
                    Side::Off => pair.off = measurement,
                },
                Err(why) => {
                    let why = format!("the command fails with {name}: {why}");
                    return Ok(Err((Verdict::Failed, why)));
                }
            }
        }
        Ok(Ok(pair))
    }

    fn measure(&self, case: &Case) -> Result<f64, String> {
        match (&case.verdict, &self.metric) {
            (CaseVerdict::Failed(why) | CaseVerdict::Skipped(why), _) => Err(why.clone()),
            (CaseVerdict::Passed, Some(metric)) => metric.measure(&case.output, case.cut),
            (CaseVerdict::Passed, None) => {
                in_range(case.time.as_secs_f64()).ok_or_else(|| "it took no time".to_owned())
            }
        }
    }

    /// Returns the results in the order of the report.
    fn results(&self, findings: &[Option<Finding>]) -> Vec<Compared> {
        let mut results: Vec<Compared> = self
            .keys
            .iter()
            .zip(findings)
            .filter_map(|(key, finding)| {
                let finding = finding.as_ref()?;
                Some(Compared {
                    name: key.setting.key.clone(),
                    result: match finding.difference {
                        true => Verdict::Difference,
                        false => Verdict::NoDifference,
                    },
                    why: String::new(),
                    figures: Some(finding.into()),
                    measured: Some(Measured::new(finding.medians, &finding.pairs)),
                })
            })
            .collect();
        let early = self.ended_early.as_ref();
        let why = early.map_or_else(String::new, |early| early.why.clone());
        for (number, pairs) in &self.undecided {
            let name = &self.keys[*number].setting.key;
            results.push(Compared {
                measured: (!pairs.is_empty()).then(|| Measured::new(medians(pairs), pairs)),
                ..Compared::without_figures(name, Verdict::Undecided, why.clone())
            });
        }
        for (number, verdict, why) in &self.excluded {
            let name = &self.keys[*number].setting.key;
            results.push(Compared::without_figures(name, *verdict, why.clone()));
        }
        sort(&mut results);
        results
    }
}

/// Sorts by verdict, then by descending effect. The sort is stable: ties stay in the order of the
/// keys.
fn sort(results: &mut [Compared]) {
    let effect = |key: &Compared| {
        let figures = key.figures.as_ref();
        figures.map_or(0.0, |figures| figures.ratio.ln().abs())
    };
    results.sort_by(|a, b| {
        let by_verdict = a.result.cmp(&b.result);
        by_verdict.then(effect(b).total_cmp(&effect(a)))
    });
}

fn announce(stage: Stage, keys: usize) {
    let s = if keys == 1 { "" } else { "s" };
    match stage {
        Stage::Screening { runs } => {
            tell!("patchbay: screening {keys} key{s} with {runs} runs on each side");
        }
        Stage::Look { runs, .. } => {
            tell!("patchbay: comparing {keys} key{s}, until {runs} runs on each side");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_come_first_and_the_largest_effect_leads() {
        let compared = |name: &str, result, ratio: f64| Compared {
            name: name.to_owned(),
            result,
            why: String::new(),
            figures: Some(Figures {
                ratio,
                ..Figures::default()
            }),
            measured: None,
        };
        let mut results = vec![
            Compared::without_figures("skipped", Verdict::Skipped, "sealed".to_owned()),
            compared("noise", Verdict::NoDifference, 1.2),
            compared("faster", Verdict::Difference, 0.5),
            Compared::without_figures("failed", Verdict::Failed, "exit status 1".to_owned()),
            compared("slower", Verdict::Difference, 1.9),
        ];
        sort(&mut results);
        let names: Vec<&str> = results.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["faster", "slower", "noise", "failed", "skipped"]);
    }
}
