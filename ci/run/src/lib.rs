// SPDX-License-Identifier: Apache-2.0
//! `patchbay ci run` boots a guest, runs a command in it, and ends with the command's status.
//! `patchbay ci compare` measures the effect of keys on a command.
//!
//! ```text
//!   prepare   the guest's configuration and files, from the command line
//!   overlay   the initramfs: our init, busybox, the agent, the copied files and their libraries
//!   monitor   the monitor's command; vsock port 1025 arrives at a unix socket of the guest's
//!             directory, where the agent connects
//!   guest     the monitor as a child, whose standard output is the console
//!   session   commands over that connection
//!   console   finds the kernel's reports, and the marks around a command that the agent logs
//!   keys      the monitor's API, for --set and --matrix
//!   runner    runs the command with keys flipped, restores them; reboots after a crash or a
//!             report, or starts each run in a copy of a saved guest
//!   collect   copies files of the guest to this machine
//!   matrix    key by key, or together with ddmin
//!   pairs     two keys at a time: all pairs, or the runs of a covering array
//!   cases     the cases of a run as they become known, and the reason for an early end
//!   causes    the pairs that make a run of a covering array fail
//!   workers   shares the runs of a matrix among runners, and keeps their order
//!   compare   the effect of keys on a command, with an interval
//!   report    JUnit XML, KTAP
//!   output    writes the files of results as a whole
//!   interrupt signals: the first one leaves a report
//!   place     this machine's KVM, or the lab
//!   programs  monitor, agent and busybox
//! ```
//!
//! `patchbay-testing` boots its guests with the same `monitor`, `overlay` and `session`.
//!
//! The guest is not trusted. It can fake the result of its own run and nothing else.
#![forbid(unsafe_code)]

/// Prints a line on standard error. `eprintln!` would panic if that is closed.
macro_rules! tell {
    ($($line:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($line)*);
    }};
}

mod args;
mod cases;
mod causes;
mod collect;
pub mod compare;
pub mod console;
mod covering;
mod ddmin;
mod guest;
mod interrupt;
mod keys;
mod libraries;
mod matrix;
pub mod monitor;
mod output;
pub mod overlay;
mod pairs;
pub mod place;
mod prepare;
pub mod programs;
mod report;
mod runner;
pub mod session;
mod workers;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::io::AsyncWriteExt;

use crate::args::Arguments;
pub use crate::args::{CompareArgs, RunArgs};
use crate::cases::Cases;
use crate::collect::Collect;
use crate::compare::{Comparison, Ended};
use crate::console::printable;
use crate::guest::Outcome;
use crate::interrupt::{Cause, Halt};
use crate::prepare::Parts;
use crate::report::{Case, Verdict};
use crate::runner::{Kept, Runner, Stopped};
use crate::session::{End, Sink};

/// Exit status if a run could not take place, as in docker-run(1).
const UNABLE: u8 = 125;
/// Exit status if the command did not end in time, as in timeout(1).
const TIMED_OUT: u8 = 124;
/// Exit status of a command that was not found, as in a shell.
const NOT_FOUND: u8 = 127;
/// Exit status if the kernel reported a problem, or a run of a matrix failed.
const FAILED: u8 = 1;

/// Time limit of a command unless another is given.
const DEFAULT_LIMIT: Duration = Duration::from_secs(600);

/// Runs the command, each time for at most `limit` or 10 minutes, and returns the exit status for
/// this process. Prints the reason if it could not be run.
pub async fn run(arguments: RunArgs, limit: Option<Duration>) -> u8 {
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    let here = async |arguments: RunArgs, halt| run_here(&arguments, limit, halt).await;
    match in_place(arguments, here).await {
        Ok(status) | Err(status) => status,
    }
}

/// Runs the command with each key off and on, each time for at most `limit` or 10 minutes, prints
/// the comparison as `render` formats it, and returns the exit status for this process. Prints the
/// reason if there is no comparison.
pub async fn compare(
    arguments: CompareArgs,
    limit: Option<Duration>,
    render: impl FnOnce(&Comparison) -> Result<String, String>,
) -> u8 {
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    let here = async move |arguments: CompareArgs, halt| {
        let comparison = match compare::here(&arguments, limit, halt).await? {
            Ended::Compared(comparison) => comparison,
            Ended::Status(status) => return Ok(status),
        };
        let text = render(&comparison).map_err(anyhow::Error::msg)?;
        let status = comparison.status();
        match output::print(text).await {
            Err(error) => {
                print_error(&error);
                // The status of an early end stays.
                Ok(if status == 0 { FAILED } else { status })
            }
            Ok(()) => Ok(status),
        }
    };
    match in_place(arguments, here).await {
        Ok(status) | Err(status) => status,
    }
}

/// Calls `here` if guests run on this machine. Otherwise runs this command again in the lab.
///
/// # Errors
/// The exit status for this process, if `here` failed or was interrupted, or ran in the lab.
async fn in_place<A: Arguments, T>(
    mut arguments: A,
    here: impl AsyncFnOnce(A, Halt) -> Result<T>,
) -> Result<T, u8> {
    let needs_lab = place::needs_lab();
    if needs_lab.is_none() {
        place::redirect(&mut arguments.results());
    }
    // Errors are reported now, not after the lab has booted or the command has run.
    let mut checked = arguments.file().map_or(Ok(()), prepare::check_folder_of);
    if needs_lab.is_some() {
        checked = checked.and_then(|()| Parts::gather(arguments.guest()).map(drop));
    }
    checked.map_err(|error| print_error(&error))?;
    if let Some(why) = needs_lab {
        tell!("patchbay: the guest runs in the lab, an emulated computer, and is slow: {why}");
        let status = place::run_in_lab(&arguments.results()).await;
        return Err(status.unwrap_or_else(|error| print_error(&error)));
    }
    let halt = Halt::default();
    // The guest is killed when the future is dropped.
    tokio::select! {
        // `end_at_once` is polled first, so that its handlers are registered before files are
        // created. The default action of a signal would leave files behind.
        biased;
        status = interrupt::end_at_once(&halt) => Err(status),
        result = here(arguments, halt.clone()) => result.map_err(|error| print_error(&error)),
    }
}

/// Prints an error and returns its exit status.
fn print_error(error: &anyhow::Error) -> u8 {
    tell!("patchbay: {}", printable(&format!("{error:#}")));
    status_of(error)
}

/// Returns the exit status for an error: that of the signal which caused it, and otherwise 125.
fn status_of(error: &anyhow::Error) -> u8 {
    match Cause::of(error) {
        Some(Cause::Signal(signal)) => signal.status(),
        Some(Cause::AnotherJob) | None => UNABLE,
    }
}

async fn run_here(arguments: &RunArgs, limit: Duration, halt: Halt) -> Result<u8> {
    let start = Instant::now();
    let (mut runner, preparation, files) = prepare::runner(&arguments.guest, limit, halt).await?;
    let jobs = usize::from(arguments.jobs);
    let collect = Collect {
        paths: arguments.collect.clone(),
        into: arguments.collect_into.clone(),
    };
    if arguments.fresh {
        let snapshot = files.path().join("snapshot");
        runner.save(&snapshot, collect.clone()).await?;
    }
    let (cases, mut status) = match arguments.matrix.is_empty() {
        true => run_once(&mut runner, arguments).await?,
        false => run_matrix(&mut runner, arguments).await?,
    };
    let collected = match arguments.fresh {
        // The files of each run were collected.
        true => Ok(()),
        false => collect_at_end(&mut runner, &collect).await,
    };
    runner.discard().await;
    let reported = match &arguments.junit {
        Some(path) => {
            let suite = arguments.guest.command.join(" ");
            output::write(path, report::junit(&suite, &cases)).await
        }
        None => Ok(()),
    };
    let printed = match arguments.ktap {
        true => output::print(report::ktap(&cases)).await,
        false => Ok(()),
    };
    // An error of one result must not discard the others.
    for error in [collected, reported, printed]
        .into_iter()
        .filter_map(Result::err)
    {
        status = print_error(&error);
    }
    prepare::print_times(start, preparation, &runner, jobs);
    Ok(status)
}

/// Copies the files of the guest in which the last run took place, if there is one.
///
/// # Errors
/// The folder cannot be created, or a signal arrived. The files that were copied before it are
/// kept.
async fn collect_at_end(runner: &mut Runner, collect: &Collect) -> Result<()> {
    if collect.paths.is_empty() || runner.booted().is_none() {
        return collect.from(None, None).await;
    }
    let halt = runner.halt.clone();
    let collecting = halt.cut_short(collect.from(runner.booted(), None));
    collecting.await.context("not all files were collected")?
}

/// Runs the command with no key flipped and with keys of the matrix. If a run cannot take place, or
/// after a signal, prints the reason and keeps the cases so far.
///
/// # Errors
/// No run was planned.
async fn run_matrix(runner: &mut Runner, arguments: &RunArgs) -> Result<(Cases, u8)> {
    let (patterns, jobs) = (&arguments.matrix, usize::from(arguments.jobs));
    let mut cases = Cases::default();
    let ended = match arguments.pairs {
        _ if arguments.together => matrix::together(runner, patterns, &mut cases).await,
        Some(how) => pairs::pairs(runner, patterns, how, jobs, &mut cases).await,
        None => matrix::each(runner, patterns, jobs, &mut cases).await,
    };
    if let Err(stopped) = ended {
        cases.end_early(stopped)?;
    }
    cases.summarize();
    let status = match runner.lacks_files {
        true => UNABLE,
        false => cases.status(),
    };
    Ok((cases, status))
}

/// Runs the command once and copies its output to this process's standard output and error. After a
/// signal, prints the reason and returns no case.
///
/// # Errors
/// The run cannot take place.
async fn run_once(runner: &mut Runner, arguments: &RunArgs) -> Result<(Cases, u8)> {
    let mut kept = Kept::default();
    let mut streams = Streams {
        // In KTAP the output is a comment.
        pass_on: !arguments.ktap,
        kept: &mut kept,
    };
    let name = arguments.guest.command.join(" ");
    runner.halt.keep_results();
    let (outcome, failure) = match runner.run(&mut streams).await {
        Err(error) if Cause::of(&error).is_some() => {
            let mut cases = Cases::default();
            cases.plan(1);
            cases.end_early(Stopped::from(error.context(name)))?;
            let status = cases.status();
            return Ok((cases, status));
        }
        ran => ran?,
    };
    let mut output = kept.text();
    for report in &outcome.reports {
        let report = printable(report);
        tell!("patchbay: the guest's kernel reported:\n{report}");
        output.push_str(&format!("{report}\n"));
    }
    let status = status(&outcome);
    if let Some(failure) = &failure
        && !matches!(outcome.end, End::Exited(_) | End::Signal(_))
    {
        tell!("patchbay: {}", printable(failure));
    }
    let case = Case {
        name,
        verdict: failure.map_or(Verdict::Passed, Verdict::Failed),
        time: outcome.time,
        output,
        cut: kept.is_cut(),
    };
    Ok((Cases::one(case), status))
}

/// Returns the exit status that represents an outcome.
fn status(outcome: &Outcome) -> u8 {
    let status = match outcome.end {
        End::Exited(code) => u8::try_from(code).unwrap_or(FAILED),
        End::Signal(signal) => u8::try_from(128 + signal).unwrap_or(FAILED),
        End::TimedOut | End::Hung => TIMED_OUT,
        End::NotStarted(_) => NOT_FOUND,
        End::Lost => UNABLE,
    };
    match status {
        0 if !outcome.reports.is_empty() => FAILED,
        status => status,
    }
}

/// Forwards output and keeps its end.
struct Streams<'a> {
    pass_on: bool,
    kept: &'a mut Kept,
}

impl Sink for Streams<'_> {
    async fn take(&mut self, descriptor: u32, data: &[u8]) {
        self.kept.take(descriptor, data).await;
        if !self.pass_on {
            return;
        }
        // A closed standard output, for example after head(1) has ended, does not end the command.
        let _ = match descriptor {
            1 => {
                let mut out = tokio::io::stdout();
                async { out.write_all(data).await.and(out.flush().await) }.await
            }
            _ => {
                let mut err = tokio::io::stderr();
                async { err.write_all(data).await.and(err.flush().await) }.await
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_fails_a_command_that_succeeds() {
        let outcome = |end, reports: &[&str]| Outcome {
            end,
            reports: reports.iter().map(|&report| report.to_owned()).collect(),
            time: Duration::ZERO,
        };
        for (end, reports, expected) in [
            (End::Exited(0), &[][..], 0),
            (End::Exited(0), &["WARNING: x"], 1),
            (End::Exited(3), &["WARNING: x"], 3),
            (End::Exited(256), &[], 1),
            (End::Signal(9), &[], 137),
            (End::TimedOut, &[], 124),
            (End::Hung, &["watchdog: BUG: x"], 124),
            (End::NotStarted(String::new()), &[], 127),
            (End::Lost, &["BUG: x"], 125),
        ] {
            assert_eq!(status(&outcome(end.clone(), reports)), expected, "{end:?}");
        }
    }
}
