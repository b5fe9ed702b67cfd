// SPDX-License-Identifier: Apache-2.0
//! `patchbay ci run`: boots a guest, runs a command in it, and ends with its status.
//!
//! ```text
//!   overlay   the initramfs: our init, busybox, the agent, the copied files and their libraries
//!   monitor   the monitor's command; vsock port 1025 arrives at a unix socket of the guest's
//!             directory, where the agent connects
//!   guest     the monitor as a child, whose standard output is the console
//!   session   commands over that connection
//!   console   finds the kernel's reports, and the marks around a command that the agent logs
//!   keys      the monitor's API, for --set and --matrix
//!   runner    runs the command with keys flipped, restores them; reboots after a crash or a report
//!   matrix    key by key, or together with ddmin
//!   report    JUnit XML, KTAP
//!   place     this machine's KVM, or the lab
//!   programs  monitor, agent and busybox
//! ```
//!
//! `patchbay-testing` boots its guests with the same `monitor`, `overlay` and `session`.
//!
//! The guest is not trusted. It can fake the result of its own run and nothing else.
#![forbid(unsafe_code)]

mod args;
pub mod console;
mod ddmin;
mod guest;
mod keys;
mod libraries;
mod matrix;
pub mod monitor;
pub mod overlay;
pub mod place;
pub mod programs;
mod report;
mod runner;
pub mod session;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::signal::unix::{SignalKind, signal};

pub use crate::args::RunArgs;
use crate::console::printable;
use crate::guest::{Config, Outcome};
use crate::matrix::Progress;
use crate::overlay::Overlay;
use crate::report::{Case, Verdict};
use crate::runner::{Kept, Runner};
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
const BOOT_LIMIT: Duration = Duration::from_secs(100);

/// Runs the command, each time for at most `limit` or 10 minutes, and returns the exit status for
/// this process. Prints the reason if it could not be run.
pub async fn run(mut arguments: RunArgs, limit: Option<Duration>) -> u8 {
    if let Some(why) = place::needs_lab() {
        // Errors are reported now, not after the lab has booted.
        if let Err(error) = Parts::gather(&arguments) {
            return print_error(Err(error));
        }
        eprintln!("patchbay: the guest runs in the lab, an emulated computer, and is slow: {why}");
        return print_error(place::run_in_lab(&arguments));
    }
    place::redirect(&mut arguments);
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    // The guest is killed when the future is dropped.
    tokio::select! {
        // Signals are polled first, so that none comes before its handler: the default action
        // leaves files behind.
        biased;
        status = interrupted() => status,
        status = run_here(&arguments, limit) => print_error(status),
    }
}

fn print_error(status: Result<u8>) -> u8 {
    status.unwrap_or_else(|error| {
        eprintln!("patchbay: {}", printable(&format!("{error:#}")));
        UNABLE
    })
}

/// Waits for a signal that ends this process, and returns the status that a shell would show.
async fn interrupted() -> u8 {
    let (Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
        _ = hangup.recv() => 129,
    }
}

async fn run_here(arguments: &RunArgs, limit: Duration) -> Result<u8> {
    let start = Instant::now();
    let files = tempfile::Builder::new()
        .prefix("patchbay-ci-")
        .tempdir()
        .context("cannot create a temporary directory")?;
    // A separate thread reads the files to copy, because that may take long and a signal must be
    // able to end the run meanwhile.
    let (of_thread, folder) = (arguments.clone(), files.path().to_owned());
    let config = tokio::task::spawn_blocking(move || prepare(&of_thread, &folder)).await??;
    let preparation = start.elapsed();
    let mut runner = Runner::new(
        config,
        arguments.command.clone(),
        limit,
        arguments.set.clone(),
    );
    let (cases, status) = if arguments.matrix.is_empty() {
        run_once(&mut runner, arguments).await?
    } else {
        let mut progress = Terminal;
        let cases = match arguments.together {
            true => matrix::together(&mut runner, &arguments.matrix, &mut progress).await?,
            false => matrix::each(&mut runner, &arguments.matrix, &mut progress).await?,
        };
        let failed = cases.iter().any(Case::failed);
        summarize(&cases);
        (cases, if failed { FAILED } else { 0 })
    };
    if !arguments.collect.is_empty() {
        collect(&mut runner, arguments).await?;
    }
    runner.discard().await;
    if arguments.ktap {
        print!("{}", report::ktap(&cases));
    }
    if let Some(path) = &arguments.junit {
        let xml = report::junit(&arguments.command.join(" "), &cases);
        std::fs::write(path, xml).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let (whole, times) = (start.elapsed(), runner.times);
    eprintln!(
        "patchbay: {:.2} s: preparation {:.2} s, {} boot{} {:.2} s, commands {:.2} s, the rest {:.2} s",
        whole.as_secs_f64(),
        preparation.as_secs_f64(),
        times.boots,
        if times.boots == 1 { "" } else { "s" },
        times.boot.as_secs_f64(),
        times.commands.as_secs_f64(),
        whole
            .saturating_sub(preparation + times.boot + times.commands)
            .as_secs_f64()
    );
    Ok(status)
}

/// The files that a guest boots from, in memory.
struct Parts {
    overlay: Overlay,
    monitor: PathBuf,
    directory: PathBuf,
}

impl Parts {
    /// Reads every file that the arguments name.
    ///
    /// # Errors
    /// A file is missing or malformed, or the results cannot be written.
    fn gather(arguments: &RunArgs) -> Result<Self> {
        guest::check_kernel(&arguments.kernel)?;
        if let Some(junit) = &arguments.junit {
            check_folder_of(junit)?;
        }
        let directory = std::env::current_dir().context("the current directory does not exist")?;
        let overlay = overlay::make(&overlay::Contents {
            initrd: arguments.initrd.as_deref(),
            busybox: &programs::busybox()?,
            agent: &programs::agent(arguments.agent.as_deref())?,
            copies: arguments.copy.clone(),
            modules: arguments.modules.as_deref(),
            directory: &directory,
        })?;
        let monitor = programs::monitor(arguments.monitor.as_deref())?;
        ensure!(
            monitor.is_file(),
            "the monitor {} does not exist; name another with --monitor",
            monitor.display()
        );
        Ok(Self {
            overlay,
            monitor,
            directory,
        })
    }
}

/// Fails before the run if its results cannot be written at the end.
fn check_folder_of(file: &Path) -> Result<()> {
    let folder = file.parent().filter(|path| !path.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir(),
        "cannot write {}: {} is not a folder",
        file.display(),
        folder.display()
    );
    Ok(())
}

/// Makes the initramfs and the guest's configuration.
fn prepare(arguments: &RunArgs, files: &Path) -> Result<Config> {
    let Parts {
        overlay,
        monitor,
        directory,
    } = Parts::gather(arguments)?;
    let initramfs = files.join("initramfs");
    std::fs::write(&initramfs, &overlay.bytes)
        .with_context(|| format!("cannot write the initramfs {}", initramfs.display()))?;
    Ok(Config {
        monitor,
        kernel: arguments.kernel.clone(),
        initramfs,
        vcpus: arguments.vcpus,
        memory: arguments.memory.clone(),
        command_line: format!("{}{}", arguments.append, place::kernel_words()),
        allow_guarded: arguments.allow_guarded,
        acpi_devices: overlay.acpi_devices,
        boot_limit: place::patience(BOOT_LIMIT),
        show_console: arguments.show_console,
        environment: overlay.environment()?,
        directory,
    })
}

/// Runs the command once and copies its output to this process's.
async fn run_once(runner: &mut Runner, arguments: &RunArgs) -> Result<(Vec<Case>, u8)> {
    let mut kept = Kept::default();
    let mut streams = Streams {
        // In KTAP the output is a comment.
        pass_on: !arguments.ktap,
        kept: &mut kept,
    };
    let (outcome, failure) = runner.run(&mut streams).await?;
    let mut output = kept.text();
    for report in &outcome.reports {
        let report = printable(report);
        eprintln!("patchbay: the guest's kernel reported:\n{report}");
        output.push_str(&format!("{report}\n"));
    }
    let status = status(&outcome);
    if let Some(failure) = &failure
        && !matches!(outcome.end, End::Exited(_) | End::Signal(_))
    {
        eprintln!("patchbay: {}", printable(failure));
    }
    let case = Case {
        name: arguments.command.join(" "),
        verdict: failure.map_or(Verdict::Passed, Verdict::Failed),
        time: outcome.time,
        output,
    };
    Ok((vec![case], status))
}

/// Returns the exit status that represents an outcome.
fn status(outcome: &Outcome) -> u8 {
    let status = match outcome.end {
        End::Exited(code) => u8::try_from(code).unwrap_or(FAILED),
        End::Signal(signal) => u8::try_from(128 + signal).unwrap_or(FAILED),
        End::TimedOut => TIMED_OUT,
        End::NotStarted(_) => NOT_FOUND,
        End::Lost => UNABLE,
    };
    match status {
        0 if !outcome.reports.is_empty() => FAILED,
        status => status,
    }
}

async fn collect(runner: &mut Runner, arguments: &RunArgs) -> Result<()> {
    let into = &arguments.collect_into;
    std::fs::create_dir_all(into).with_context(|| format!("cannot create {}", into.display()))?;
    for path in &arguments.collect {
        let Some(guest) = runner.booted() else {
            eprintln!("patchbay: nothing is collected: the guest has ended");
            return Ok(());
        };
        // A missing file does not hide why the run failed.
        if let Err(error) = guest.collect(path, into).await {
            eprintln!("patchbay: {}", printable(&format!("{error:#}")));
        }
    }
    Ok(())
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
        // A reader that has ended, such as head(1), does not end the command.
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

/// Prints each case of a matrix.
struct Terminal;

impl Progress for Terminal {
    fn case(&mut self, case: &Case) {
        let seconds = case.time.as_secs_f64();
        match &case.verdict {
            Verdict::Passed => eprintln!("  ok    {} ({seconds:.2} s)", case.name),
            Verdict::Skipped(why) => eprintln!("  skip  {}: {}", case.name, printable(why)),
            Verdict::Failed(why) => {
                eprintln!("  FAIL  {} ({seconds:.2} s): {}", case.name, printable(why));
                for line in case.output.lines() {
                    eprintln!("        {line}");
                }
            }
        }
    }

    fn note(&mut self, text: &str) {
        eprintln!("patchbay: {}", printable(text));
    }
}

fn summarize(cases: &[Case]) {
    let count = |wanted: fn(&Verdict) -> bool| cases.iter().filter(|c| wanted(&c.verdict)).count();
    eprintln!(
        "{} passed, {} failed, {} skipped",
        count(|verdict| *verdict == Verdict::Passed),
        count(|verdict| matches!(verdict, Verdict::Failed(_))),
        count(|verdict| matches!(verdict, Verdict::Skipped(_)))
    );
    let skipped = |case: &Case| matches!(case.verdict, Verdict::Skipped(_));
    // The first case is the run with no key flipped.
    if let Some(keys @ [_, ..]) = cases.get(1..)
        && keys.iter().all(skipped)
    {
        eprintln!("patchbay: no key was flipped: the globs select none that can be");
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
            (End::NotStarted(String::new()), &[], 127),
            (End::Lost, &["BUG: x"], 125),
        ] {
            assert_eq!(status(&outcome(end.clone(), reports)), expected, "{end:?}");
        }
    }
}
