// SPDX-License-Identifier: Apache-2.0
//! Runs the command in a guest with keys turned on or off, and boots a new guest after a crash or a
//! report of the kernel. With a saved guest, runs the command each time in a fresh copy.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::collect::Collect;
use crate::console::printable;
use crate::guest::{Config, Guest, Outcome};
use crate::interrupt::{Cause, Halt};
use crate::keys::{self, Keys, Setting};
use crate::print_error;
use crate::report::{Case, Verdict};
use crate::session::{End, Sink};

/// The number of bytes that are kept of a run's output when it exceeds [`WHOLE`]. The beginning is
/// then dropped.
const KEPT: usize = 256 << 10;
/// The maximum number of bytes of an output of which nothing is dropped.
pub const WHOLE: usize = 2 * KEPT;

/// Keeps the end of a command's output.
#[derive(Debug, Default)]
pub struct Kept {
    bytes: Vec<u8>,
    dropped: bool,
}

impl Sink for Kept {
    async fn take(&mut self, _: u32, data: &[u8]) {
        self.bytes.extend(data);
        if self.bytes.len() > WHOLE {
            self.bytes.drain(..self.bytes.len() - KEPT);
            self.dropped = true;
        }
    }
}

impl Kept {
    /// Returns whether the beginning of the output was dropped.
    pub fn is_cut(&self) -> bool {
        self.dropped
    }

    pub fn text(&self) -> String {
        let text = printable(&String::from_utf8_lossy(&self.bytes));
        match self.dropped {
            true => format!("[the beginning is left out]\n{text}"),
            false => text,
        }
    }
}

/// The times of the parts of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub boots: u32,
    /// The time from the start of the monitor until the agent is connected.
    pub boot: Duration,
    /// The time to save the guest of which the others are copies.
    pub save: Duration,
    pub copies: u32,
    /// The time from the start of a copy's monitor until its agent is connected.
    pub copy: Duration,
    /// The time spent in commands.
    pub commands: Duration,
}

impl Times {
    /// Adds the times of a runner that ran at the same time.
    fn add(&mut self, other: &Self) {
        self.boots += other.boots;
        self.boot += other.boot;
        self.save += other.save;
        self.copies += other.copies;
        self.copy += other.copy;
        self.commands += other.commands;
    }
}

/// A saved guest, of which each run of the command gets a copy.
#[derive(Clone, Debug)]
struct Origin {
    snapshot: PathBuf,
    /// The files to copy from the guest of each run.
    collect: Collect,
}

/// Runs commands in guests of one configuration.
#[derive(Debug)]
pub struct Runner {
    pub config: Arc<Config>,
    pub command: Vec<String>,
    pub limit: Duration,
    /// The keys that are set in each guest, and their sides.
    pub base: Vec<Setting>,
    pub times: Times,
    /// The folder for the files of a run could not be created.
    pub lacks_files: bool,
    /// Ends the run in progress.
    pub halt: Halt,
    guest: Option<(Guest, Option<Keys>)>,
    origin: Option<Origin>,
    /// The reports of the saved guest's kernel. They count for the first run.
    reports: Vec<String>,
}

/// The result of an attempt to run the command.
pub enum Attempt {
    /// The monitor refused to flip the keys; the text is a sentence.
    Refused(String),
    /// The monitor did not answer, so the command did not run. The case has failed.
    NotFlipped(Case),
    Ran(Case),
}

/// The reason why no further run can take place.
#[derive(Debug)]
pub struct Stopped {
    pub error: anyhow::Error,
    /// The cases that were in progress when the error occurred and are known to fail.
    pub cases: Vec<Case>,
}

impl Stopped {
    /// Combines the errors of jobs that ran at once, each with the number of its case. The error is
    /// that of a signal, or the one for which the other jobs were ended. If several jobs have such
    /// an error, it is that of the first case.
    pub fn of_jobs(mut stopped: Vec<(usize, Self)>) -> Option<Self> {
        let rank = |error: &anyhow::Error| match Cause::of(error) {
            Some(Cause::Signal(_)) => 0,
            None => 1,
            Some(Cause::AnotherJob) => 2,
        };
        stopped.sort_by_key(|(number, _)| *number);
        let mut all = stopped.into_iter().map(|(_, stopped)| stopped);
        let mut first = all.next()?;
        for other in all {
            first.cases.extend(other.cases);
            if rank(&other.error) < rank(&first.error) {
                first.error = other.error;
            }
        }
        Some(first)
    }
}

impl From<anyhow::Error> for Stopped {
    fn from(error: anyhow::Error) -> Self {
        let cases = vec![];
        Self { error, cases }
    }
}

impl Runner {
    pub fn new(
        config: impl Into<Arc<Config>>,
        command: Vec<String>,
        limit: Duration,
        base: Vec<Setting>,
        halt: Halt,
    ) -> Self {
        Self {
            config: config.into(),
            command,
            limit,
            base,
            times: Times::default(),
            lacks_files: false,
            halt,
            guest: None,
            origin: None,
            reports: vec![],
        }
    }

    /// Boots a guest, sets its keys and saves it in a new folder. From now on each run of
    /// [`Runner::attempt`] has a copy of it, and the run's files are collected.
    ///
    /// # Errors
    /// The guest does not boot or cannot be saved, or the folder cannot be written.
    pub async fn save(&mut self, folder: &Path, collect: Collect) -> Result<()> {
        let guest = self.guest().await?;
        let start = Instant::now();
        let saved = guest.save(folder).await;
        saved.context("the guest cannot be saved, which --fresh needs")?;
        self.times.save = start.elapsed();
        self.reports = self.discard().await;
        self.origin = Some(Origin {
            snapshot: folder.to_owned(),
            collect,
        });
        Ok(())
    }

    /// Returns a runner whose guests are copies of the same saved guest.
    #[must_use]
    pub fn another(&self) -> Self {
        let (config, command) = (Arc::clone(&self.config), self.command.clone());
        let (base, halt) = (self.base.clone(), self.halt.clone());
        Self {
            origin: self.origin.clone(),
            ..Self::new(config, command, self.limit, base, halt)
        }
    }

    /// Ends another runner.
    pub async fn join(&mut self, mut other: Self) {
        other.discard().await;
        self.times.add(&other.times);
        self.lacks_files |= other.lacks_files;
    }

    /// Returns the guest. If there is none, boots one or starts a copy.
    pub async fn guest(&mut self) -> Result<&mut Guest> {
        if self.guest.is_none() {
            let start = Instant::now();
            let snapshot = self.origin.as_ref().map(|origin| &*origin.snapshot);
            let guest = Guest::start(&self.config, snapshot).await?;
            let (count, time) = match snapshot {
                Some(_) => (&mut self.times.copies, &mut self.times.copy),
                None => (&mut self.times.boots, &mut self.times.boot),
            };
            *count += 1;
            *time += start.elapsed();
            let mut connected = None;
            // A copy has the keys of the saved guest.
            if self.origin.is_none() && !self.base.is_empty() {
                let mut known = guest.keys().await?;
                let set = known.set(&self.base, self.config.allow_guarded).await;
                set.map_err(keys::sentence)?;
                connected = Some(known);
            }
            self.guest = Some((guest, connected));
        }
        match &mut self.guest {
            Some((guest, _)) => Ok(guest),
            None => unreachable!("it was booted above"),
        }
    }

    /// Returns the keys of the guest.
    pub async fn keys(&mut self) -> Result<&mut Keys> {
        self.guest().await?;
        match &mut self.guest {
            Some((guest, keys)) => {
                if keys.is_none() {
                    *keys = Some(guest.keys().await?);
                }
                Ok(keys.as_mut().expect("connected above"))
            }
            None => unreachable!("it was booted above"),
        }
    }

    /// Does the work with the guest. If the run is halted before the work is done, ends the guest.
    ///
    /// # Errors
    /// The error of the work, or the [`Cause`] of the halt.
    async fn until_halted<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let halt = self.halt.clone();
        match halt.cut_short(work(self)).await {
            Ok(done) => done,
            Err(cause) => {
                self.discard().await;
                Err(cause.into())
            }
        }
    }

    /// Runs the command in the guest's current state.
    ///
    /// # Errors
    /// No guest boots, the agent breaks the protocol, or the run has to end.
    pub async fn run(
        &mut self,
        sink: &mut (impl Sink + Send),
    ) -> Result<(Outcome, Option<String>)> {
        self.until_halted(async |runner| runner.run_to_end(sink).await)
            .await
    }

    async fn run_to_end(
        &mut self,
        sink: &mut (impl Sink + Send),
    ) -> Result<(Outcome, Option<String>)> {
        let (command, limit) = (self.command.clone(), self.limit);
        let earlier = std::mem::take(&mut self.reports);
        let guest = self.guest().await?;
        let mut outcome = guest.run(&command, limit, sink).await?;
        outcome.reports.splice(0..0, earlier);
        let failure = failure(&outcome, limit, || guest.loss());
        self.times.commands += outcome.time;
        Ok((outcome, failure))
    }

    /// Flips keys, runs the command, and restores the keys. With a saved guest, each run has a new
    /// copy, so the keys are not restored.
    ///
    /// # Errors
    /// No guest boots any longer, the agent breaks the protocol, or the run has to end.
    pub async fn attempt(&mut self, name: &str, settings: &[Setting]) -> Result<Attempt> {
        let attempt = self
            .until_halted(async |runner| runner.try_to_run(name, settings).await)
            .await;
        attempt.with_context(|| name.to_owned())
    }

    async fn try_to_run(&mut self, name: &str, settings: &[Setting]) -> Result<Attempt> {
        let allow_guarded = self.config.allow_guarded;
        if !settings.is_empty() {
            // If no guest boots, no run can take place.
            self.guest().await?;
            let set = match self.keys().await {
                Ok(keys) => keys.set(settings, allow_guarded).await,
                Err(error) => return Ok(self.not_flipped(name, &format!("{error:#}")).await),
            };
            match set {
                Err(error) if keys::is_refusal(&error) => {
                    return Ok(Attempt::Refused(format!("{:#}", keys::sentence(error))));
                }
                Err(error) => return Ok(self.not_flipped(name, error.message()).await),
                Ok(()) => {}
            }
        }
        let mut kept = Kept::default();
        let ran = self.run_to_end(&mut kept).await;
        // The reports after the end of the command. They belong to this run, not to the next one.
        let mut late = vec![];
        if let Some(Origin { collect, .. }) = self.origin.clone() {
            if !self.is_connected() {
                late = self.discard().await;
            }
            let collect = collect.of_run(name);
            if let Err(error) = collect.from(self.booted(), Some(name)).await {
                print_error(&error);
                self.lacks_files = true;
            }
        }
        let (outcome, failure) = ran?;
        // A report changes the kernel's state: for example, WARN_ONCE() does not warn again.
        let mut intact = self.origin.is_none() && self.is_connected() && outcome.reports.is_empty();
        let mut not_restored = None;
        if intact && !settings.is_empty() {
            let back: Vec<Setting> = settings.iter().map(Setting::reversed).collect();
            if let Err(error) = self.keys().await?.set(&back, allow_guarded).await {
                let why = printable(error.message());
                not_restored = Some(format!("the keys could not be flipped back: {why}"));
            }
            late.extend(
                self.booted()
                    .map(|guest| guest.take_reports())
                    .unwrap_or_default(),
            );
            intact = not_restored.is_none() && late.is_empty();
        }
        if !intact {
            late.extend(self.discard().await);
        }
        let mut output = kept.text();
        for report in outcome.reports.iter().chain(&late) {
            output.push_str(&printable(report));
            output.push('\n');
        }
        // The failure names the first report of the run, if there is one.
        let late = late.first().filter(|_| outcome.reports.is_empty());
        let reasons: Vec<String> = failure
            .into_iter()
            .chain(not_restored)
            .chain(late.map(|report| reported(report)))
            .collect();
        let verdict = match reasons.is_empty() {
            true => Verdict::Passed,
            false => Verdict::Failed(reasons.join("; ")),
        };
        Ok(Attempt::Ran(Case {
            name: name.to_owned(),
            verdict,
            time: outcome.time,
            output,
            cut: kept.is_cut(),
        }))
    }

    /// Discards a guest whose monitor did not flip the keys: the monitor may be gone, or the keys
    /// may have been flipped. Returns the failed case.
    async fn not_flipped(&mut self, name: &str, why: &str) -> Attempt {
        let reports = self.discard().await;
        Attempt::NotFlipped(Case {
            name: name.to_owned(),
            verdict: Verdict::Failed(format!("the monitor did not flip the keys: {why}")),
            time: Duration::ZERO,
            output: printable(&reports.join("\n")),
            cut: false,
        })
    }

    /// Returns whether there is a guest in which another command can run.
    fn is_connected(&self) -> bool {
        let guest = self.guest.as_ref();
        guest.is_some_and(|(guest, _)| guest.is_connected())
    }

    /// Returns the guest, if there is one.
    pub fn booted(&mut self) -> Option<&mut Guest> {
        self.guest.as_mut().map(|(guest, _)| guest)
    }

    /// Ends the guest, and returns its kernel's reports since the last run.
    pub async fn discard(&mut self) -> Vec<String> {
        match self.guest.take() {
            Some((guest, _)) => guest.end().await,
            None => vec![],
        }
    }
}

/// Returns the reason why a run failed; `None` if it passed.
pub fn failure(
    outcome: &Outcome,
    limit: Duration,
    loss: impl FnOnce() -> String,
) -> Option<String> {
    let seconds = limit.as_secs_f32();
    let end = match &outcome.end {
        End::Exited(0) => None,
        End::Exited(code) => Some(format!("exit status {code}")),
        End::Signal(signal) => Some(format!("ended by signal {signal}")),
        End::TimedOut => Some(format!("did not end within {seconds} s")),
        End::Hung => Some(format!(
            "did not end within {seconds} s and could not be killed: the guest hangs"
        )),
        End::NotStarted(error) => Some(error.clone()),
        End::Lost => Some(loss()),
    };
    let report = outcome.reports.first().map(|report| reported(report));
    match (end, report) {
        (Some(end), Some(report)) => Some(format!("{end}; {report}")),
        (end, report) => end.or(report),
    }
}

/// Returns the reason of a failure with the first line of a kernel's report.
fn reported(report: &str) -> String {
    let line = report.lines().next().unwrap_or_default();
    format!("the kernel reported: {}", printable(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(end: End, reports: &[&str]) -> Outcome {
        Outcome {
            end,
            reports: reports.iter().map(|&report| report.to_owned()).collect(),
            time: Duration::ZERO,
        }
    }

    #[test]
    fn only_status_zero_without_a_report_passes() {
        let limit = Duration::from_secs(3);
        let why = |end, reports: &[&str]| failure(&outcome(end, reports), limit, || "gone".into());
        assert_eq!(why(End::Exited(0), &[]), None);
        for (end, reports, expected) in [
            (End::Exited(1), &[][..], "exit status 1"),
            (End::Signal(11), &[], "signal 11"),
            (End::TimedOut, &[], "within 3 s"),
            (
                End::Hung,
                &[],
                "within 3 s and could not be killed: the guest hangs",
            ),
            (End::NotStarted("no program x".into()), &[], "no program x"),
            (End::Lost, &[], "gone"),
            (
                End::Exited(0),
                &["WARNING: x\nmore"],
                "the kernel reported: WARNING: x",
            ),
            (
                End::Exited(2),
                &["BUG: y"],
                "exit status 2; the kernel reported: BUG: y",
            ),
        ] {
            let why = why(end, reports).unwrap();
            assert!(why.contains(expected) && !why.contains('\n'), "{why}");
        }
    }

    #[tokio::test]
    async fn a_flood_keeps_its_end() {
        let mut kept = Kept::default();
        for _ in 0..64 {
            kept.take(1, &[b'x'; 64 << 10]).await;
        }
        kept.take(2, b"the end\x1b[2J").await;
        let text = kept.text();
        assert!(text.len() <= 2 * KEPT + 64 && text.ends_with("the end[2J"));
        assert!(text.starts_with("[the beginning is left out]") && kept.is_cut());
    }
}
