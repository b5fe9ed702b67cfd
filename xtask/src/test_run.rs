// SPDX-License-Identifier: Apache-2.0
//! Runs planned tests, prints their results and counts them.
//!
//! A test that fails in a lab or beside other tests runs once more, alone, after all others. It
//! passes if the second attempt passes. An emulated machine sometimes stands still for many
//! seconds, a guest in it sometimes does not boot, and tests beside each other can exhaust the
//! machine. None of these shows a fault of the code. The summary names each such test and shows
//! the output of its first attempt. The failure of a test that ran alone here is final.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::test_durations::Durations;
use crate::test_runner::{LabWorker, Report, SharingSnapshots, Test, Verdict};
use crate::{cargo, clients, deny, guest, test_runner};

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    fn add_report(&mut self, report: &Report) {
        match report.verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(_) => self.failed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
        }
    }

    fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// The place where tests run, and how many run at the same time.
#[derive(Clone, Copy)]
pub enum Location {
    Here { jobs: usize },
    Lab { labs: usize },
}

/// The maximum number of failures for which tests are repeated. More failures probably have a
/// common cause, and repeating the tests would only delay the report.
const MAX_REPEATED: usize = 12;

/// The names of the places where tests run, as the headings of the counts show them.
const HERE: &str = "here";
const IN_LABS: &str = "in the lab";

/// A test, and the heading under which it is counted.
pub struct Planned {
    heading: String,
    pub test: Test,
}

/// A run of the selected tests.
pub struct TestRun {
    timeout: Duration,
    /// The environment of the tests that are planned next.
    pub variables: guest::Variables,
    durations: Durations,
    /// The counts of each kind of test, by its heading.
    counts: Vec<(String, Counts)>,
    /// The tests that failed in a lab or beside others and have not run again yet, with their
    /// places.
    in_doubt: Vec<(Planned, Report, &'static str)>,
    /// The parts of the run that could not begin, by their headings, with the reasons.
    not_begun: Vec<(String, String)>,
    failures: Vec<(Test, Report)>,
    /// The tests that passed only on the second attempt, with the reports of their first.
    repeated: Vec<(Test, Report)>,
    /// The rows of tables that tests printed.
    rows: Vec<String>,
    /// The parts of the run with the time that each took.
    phases: Vec<(&'static str, Duration)>,
    phase_began: Instant,
}

impl TestRun {
    pub fn new(timeout: Duration) -> Result<Self> {
        Ok(Self::with(timeout, Durations::of_the_last_run()?))
    }

    fn with(timeout: Duration, durations: Durations) -> Self {
        Self {
            timeout,
            variables: guest::Variables::new(),
            durations,
            counts: Vec::new(),
            in_doubt: Vec::new(),
            not_begun: Vec::new(),
            failures: Vec::new(),
            repeated: Vec::new(),
            rows: Vec::new(),
            phases: Vec::new(),
            phase_began: Instant::now(),
        }
    }

    /// Adds the time since the end of the previous phase to this phase.
    pub fn end_phase(&mut self, name: &'static str) {
        let time = std::mem::replace(&mut self.phase_began, Instant::now()).elapsed();
        match self.phases.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += time,
            None => self.phases.push((name, time)),
        }
    }

    /// Plans the tests under a heading, with the variables that are set now.
    pub fn plan(&self, heading: &str, tests: Vec<Test>) -> Vec<Planned> {
        let variables = self.variables.iter();
        let variables: Vec<_> = variables
            .map(|(name, path)| ((*name).to_owned(), path.clone()))
            .collect();
        let planned = |mut test: Test| {
            test.variables.clone_from(&variables);
            Planned {
                heading: heading.to_owned(),
                test,
            }
        };
        tests.into_iter().map(planned).collect()
    }

    /// Counts tests as skipped for this reason.
    pub fn skip(&mut self, tests: Vec<Planned>, why: &str) {
        println!();
        for Planned { heading, test } in tests {
            let report = Report::skipped(why);
            print_report("", &test, &report);
            self.counts_of(heading).add_report(&report);
        }
    }

    /// Runs tests, the longest first, with as many workers as the place allows.
    pub fn run_tests(&mut self, tests: Vec<Planned>, place: Location) {
        let timeout = self.timeout;
        match place {
            Location::Here { jobs } => {
                let sharing = SharingSnapshots::new().ok();
                let run = |test: &Test| match &sharing {
                    Some(sharing) => sharing.run(test, timeout),
                    None => test_runner::run_here(test, timeout),
                };
                self.run_with(HERE, tests, jobs, || run);
            }
            Location::Lab { labs } => self.run_with(IN_LABS, tests, labs, || {
                let mut lab = LabWorker::new(timeout);
                move |test: &Test| lab.run(test)
            }),
        }
    }

    /// Runs tests with workers that `worker` makes. Each worker takes the next test when it has
    /// finished one.
    fn run_with<W: FnMut(&Test) -> Report>(
        &mut self,
        where_: &'static str,
        mut tests: Vec<Planned>,
        workers: usize,
        worker: impl Fn() -> W + Sync,
    ) {
        if tests.is_empty() {
            return;
        }
        let mut headings: Vec<String> = tests.iter().map(|test| test.heading.clone()).collect();
        headings.dedup();
        println!("\n{}: {} tests, {where_}", headings.join("; "), tests.len());
        for heading in headings {
            self.counts_of(format!("{heading}, {where_}"));
        }
        let workers = workers.clamp(1, tests.len());
        tests.sort_by(|one, other| self.durations.compare(&one.test, &other.test));
        let queue = Mutex::new(VecDeque::from(tests));
        let done = Mutex::new(Vec::new());
        let repeats = where_ == IN_LABS || workers > 1;
        let attempt = if repeats { "TRY 1 " } else { "" };
        let work = || {
            let mut run = worker();
            // The lock is held only while a test is taken.
            let next = || queue.lock().ok()?.pop_front();
            while let Some(planned) = next() {
                let report = run(&planned.test);
                let attempt = if report.failed() { attempt } else { "" };
                print_report(attempt, &planned.test, &report);
                if let Ok(mut done) = done.lock() {
                    done.push((planned, report));
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(work);
            }
        });
        for (mut planned, report) in done.into_inner().unwrap_or_default() {
            planned.heading = format!("{}, {where_}", planned.heading);
            if repeats && report.failed() {
                self.in_doubt.push((planned, report, where_));
            } else {
                self.count(planned, report);
            }
        }
    }

    /// Runs each test that failed in a lab or beside others once more: alone, and in a lab of its
    /// own if it ran in one.
    pub fn repeat_failures(&mut self) {
        let timeout = self.timeout;
        self.repeat_with(|test, where_| match where_ {
            IN_LABS => LabWorker::new(timeout).run(test),
            _ => test_runner::run_here(test, timeout),
        });
    }

    fn repeat_with(&mut self, run: impl Fn(&Test, &str) -> Report) {
        let in_doubt = std::mem::take(&mut self.in_doubt);
        let repeats = in_doubt.len() <= MAX_REPEATED;
        match (in_doubt.len(), repeats) {
            (0, _) => {}
            (count, true) => println!("\nonce more, each alone: {count} tests"),
            (count, false) => println!("\n{count} tests failed, too many to repeat"),
        }
        for (planned, mut first, where_) in in_doubt {
            if !repeats {
                self.count(planned, first);
                continue;
            }
            let second = run(&planned.test, where_);
            print_report("TRY 2 ", &planned.test, &second);
            if second.verdict == Verdict::Passed {
                self.repeated.push((planned.test.clone(), first));
                self.count(planned, second);
            } else {
                if !first.output.is_empty() && !first.output.ends_with('\n') {
                    first.output.push('\n');
                }
                let why = match &second.verdict {
                    Verdict::Failed(why) => why.as_str(),
                    Verdict::Skipped(_) | Verdict::Passed => "skipped",
                };
                first.output += &format!("--- second attempt: {why} ---\n");
                first.output += &second.output;
                self.count(planned, first);
            }
        }
    }

    fn count(&mut self, Planned { heading, test }: Planned, report: Report) {
        if !report.failed() {
            self.rows
                .extend(report.output.lines().filter_map(row).map(str::to_owned));
        }
        self.durations.add(&test, report.time);
        self.counts_of(heading).add_report(&report);
        if report.failed() {
            self.failures.push((test, report));
        }
    }

    /// Returns the counts of a heading, which are zero at first.
    fn counts_of(&mut self, heading: String) -> &mut Counts {
        let known = self.counts.iter().position(|(known, _)| *known == heading);
        let at = known.unwrap_or(self.counts.len());
        if known.is_none() {
            self.counts.push((heading, Counts::default()));
        }
        &mut self.counts[at].1
    }

    /// Counts a part of the run that could not begin as one failure, so that the other parts still
    /// run and are reported.
    pub fn record(&mut self, heading: &str, outcome: Result<()>) {
        let Err(error) = outcome else { return };
        println!("\n{heading}: {error:#}");
        self.not_begun
            .push((heading.to_owned(), format!("{error:#}")));
        self.counts_of(heading.to_owned()).failed += 1;
    }

    pub fn run_doc_tests(&mut self) -> Result<()> {
        println!("\nexamples in the documentation");
        let (success, output) = cargo::run_doc_tests()?;
        let mut counts = count_doc_tests(&output);
        if !success {
            println!("{output}");
            // An example that does not compile, for instance, has no result line.
            counts.failed = counts.failed.max(1);
        }
        self.counts
            .push(("examples in the documentation".into(), counts));
        Ok(())
    }

    pub fn run_clients(&mut self, filter: Option<&str>) -> Result<()> {
        let outcomes = clients::run(filter)?.into_iter();
        for outcome in outcomes.chain(deny::run(filter)?) {
            if outcome.failed > 0 || outcome.passed == 0 {
                println!("\n{}\n{}", outcome.heading, outcome.output.trim_end());
            }
            let counts = Counts {
                passed: outcome.passed,
                failed: outcome.failed,
                skipped: outcome.skipped,
            };
            self.counts.push((outcome.heading, counts));
        }
        Ok(())
    }

    /// Prints the tables, the failures, the duration of each phase, and the counts; the last line
    /// is the sum.
    pub fn summarize(&self) -> bool {
        self.durations.save();
        if !self.rows.is_empty() {
            println!("\n{}", self.rows.join("\n"));
        }
        for (test, report) in &self.repeated {
            // The indentation distinguishes this output from that of a failed test.
            let output = report.output.trim_end().replace('\n', "\n    ");
            println!("\nfirst attempt of {}:\n    {output}", test.full_name());
        }
        for (test, report) in &self.failures {
            let (name, output) = (test.full_name(), report.output.trim_end());
            println!("\n--- {name} ---\n{output}");
            if let Verdict::Failed(reason) = &report.verdict {
                println!("--- {name}: {reason}");
            }
        }
        for (heading, reason) in &self.not_begun {
            println!("\n--- {heading}: {reason}");
        }
        println!();
        for (phase, time) in &self.phases {
            println!("{:5.0} s  {phase}", time.as_secs_f64());
        }
        println!();
        let mut sum = Counts::default();
        for (heading, counts) in &self.counts {
            println!("{heading}: {counts}");
            sum.add(counts);
        }
        println!();
        for line in self.passed_later() {
            println!("{line}");
        }
        println!("{sum}");
        sum.failed == 0
    }

    /// Returns a line for each test that passed only on the second attempt.
    fn passed_later(&self) -> impl Iterator<Item = String> {
        self.repeated.iter().map(|(test, first)| {
            let name = test.full_name();
            let reason = match &first.verdict {
                Verdict::Failed(reason) => reason.as_str(),
                _ => "",
            };
            format!("passed on a second attempt: {name} (first: {reason})")
        })
    }
}

fn print_report(attempt: &str, test: &Test, report: &Report) {
    let (verdict, reason) = match &report.verdict {
        Verdict::Passed => ("PASS", ""),
        Verdict::Failed(reason) => ("FAIL", reason.as_str()),
        Verdict::Skipped(reason) => ("SKIP", reason.as_str()),
    };
    let separator = if reason.is_empty() { "" } else { ": " };
    let seconds = report.time.as_secs_f64();
    println!(
        "{attempt}{verdict} [{seconds:8.3} s] {}{separator}{reason}",
        test.full_name()
    );
}

/// Adds up libtest's "test result:" lines.
fn count_doc_tests(output: &str) -> Counts {
    let mut counts = Counts::default();
    for line in output
        .lines()
        .filter(|line| line.starts_with("test result:"))
    {
        let number_before = |word: &str| -> usize {
            let words: Vec<&str> = line.split([' ', ';']).collect();
            let at = words.iter().position(|candidate| *candidate == word);
            at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok())
                .unwrap_or(0)
        };
        counts.passed += number_before("passed");
        counts.failed += number_before("failed");
        counts.skipped += number_before("ignored");
    }
    counts
}

/// Returns the row of a table in a line of a test's output. The test's own name comes before its
/// first line.
fn row(line: &str) -> Option<&str> {
    let rest = match line.split_once(" ... ") {
        Some((name, rest)) if name.starts_with("test ") => rest,
        _ => line,
    };
    rest.starts_with("| ").then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    /// Returns a test whose program is a shell script. The script gets libtest's arguments.
    fn scripted(folder: &Path, name: &str, script: &str) -> Planned {
        let binary = folder.join(name);
        std::fs::write(&binary, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
        let test = Test {
            suite: "s".into(),
            name: name.into(),
            binary,
            folder: folder.to_owned(),
            ..Test::default()
        };
        Planned {
            heading: "h".into(),
            test,
        }
    }

    /// Runs tests that fail once, always and never, and returns the run and the order in which the
    /// scripts ran.
    fn run_scripts(where_: &'static str) -> (TestRun, String) {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let pass = "echo 'test result: ok. 1 passed'";
        let once = format!("[ -e mark ] && {pass} && exit; touch mark; echo first; exit 3");
        let scripts = [
            ("once", once.as_str()),
            ("always", "echo '| row'; printf why; exit 4"),
            ("never", pass),
        ];
        let scripts = scripts.map(|(name, script)| {
            let recorded = format!("echo {name} >>order; {script}");
            scripted(folder, name, &recorded)
        });
        let timeout = Duration::from_secs(60);
        let durations = Durations::of(&folder.join("durations"));
        let mut run = TestRun::with(timeout, durations);
        let run_one = move |test: &Test| test_runner::run_here(test, timeout);
        run.run_with(where_, scripts.into(), 1, || run_one);
        run.repeat_with(|test, repeated_where| {
            assert_eq!(repeated_where, where_);
            run_one(test)
        });
        let order = std::fs::read_to_string(folder.join("order")).unwrap();
        (run, order.replace('\n', " "))
    }

    #[test]
    fn a_test_that_fails_in_a_lab_runs_again_after_all_others_and_fails_if_it_fails_twice() {
        let (run, order) = run_scripts(IN_LABS);
        assert_eq!(order, "once always never once always ");
        let counts: Vec<String> = run
            .counts
            .iter()
            .map(|(h, c)| format!("{h}: {c}"))
            .collect();
        assert_eq!(counts, ["h, in the lab: 2 passed, 1 failed, 0 skipped"]);
        let [(failed, report)] = &run.failures[..] else {
            panic!("one failure");
        };
        assert_eq!(failed.name, "always");
        let expected = "| row\nwhy\n--- second attempt: exit status: 4 ---\n| row\nwhy";
        assert_eq!(report.output, expected);
        assert!(run.rows.is_empty());
        let [(_, first)] = &run.repeated[..] else {
            panic!("one that passed on the second attempt");
        };
        assert_eq!(first.output, "first\n");
        let lines: Vec<String> = run.passed_later().collect();
        let line = "passed on a second attempt: s once (first: exit status: 3)";
        assert_eq!(lines, [line]);
    }

    #[test]
    fn the_failure_of_a_test_that_ran_alone_here_is_final() {
        let (run, order) = run_scripts(HERE);
        assert_eq!(order, "once always never ");
        assert_eq!(run.counts[0].1.to_string(), "1 passed, 2 failed, 0 skipped");
        assert_eq!(run.failures.len(), 2);
        assert!(run.repeated.is_empty());
    }

    #[test]
    fn a_test_that_fails_beside_others_runs_again_here() {
        let folder = tempfile::tempdir().unwrap();
        let durations = Durations::of(&folder.path().join("durations"));
        let mut run = TestRun::with(Duration::ZERO, durations);
        let tests = ["one", "two"].map(|name| Planned {
            heading: "h".into(),
            test: Test {
                name: name.into(),
                ..Test::default()
            },
        });
        run.run_with(HERE, tests.into(), 2, || |_: &Test| Report::not_run("busy"));
        run.repeat_with(|test, where_| {
            assert_eq!(where_, HERE);
            match &*test.name {
                "one" => Report {
                    verdict: Verdict::Passed,
                    ..Report::not_run("")
                },
                _ => Report::not_run("broken"),
            }
        });
        assert_eq!(run.counts[0].1.to_string(), "1 passed, 1 failed, 0 skipped");
        assert_eq!(run.passed_later().count(), 1);
    }

    #[test]
    fn a_part_that_cannot_begin_fails_and_keeps_the_other_results() {
        let folder = tempfile::tempdir().unwrap();
        let durations = Durations::of(&folder.path().join("durations"));
        let mut run = TestRun::with(Duration::ZERO, durations);
        run.record("one", Ok(()));
        run.record("two", Err(anyhow::anyhow!("there is no kernel")));
        assert_eq!(run.counts.len(), 1);
        assert!(!run.summarize());
    }

    #[test]
    fn many_failures_are_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let durations = Durations::of(&folder.path().join("durations"));
        let mut run = TestRun::with(Duration::ZERO, durations);
        let tests = (0..=MAX_REPEATED).map(|number| Planned {
            heading: "h".into(),
            test: Test {
                name: number.to_string(),
                ..Test::default()
            },
        });
        let fail = |_: &Test| Report::not_run("the lab cannot start");
        run.run_with(IN_LABS, tests.collect(), 2, || fail);
        run.repeat_with(|_, _| panic!("a test runs again"));
        assert_eq!(run.failures.len(), MAX_REPEATED + 1);
    }

    #[test]
    fn rows_of_tables_are_found() {
        let lines = [
            "| a | 1 |",
            "test one::two ... | b | 2 |",
            "| is a pipe",
            "x | y",
            "test a ... ok",
        ];
        let rows: Vec<_> = lines.into_iter().filter_map(row).collect();
        assert_eq!(rows, ["| a | 1 |", "| b | 2 |", "| is a pipe"]);
    }

    #[test]
    fn doc_test_results_add_up() {
        let counts = count_doc_tests(
            "running 3 tests\n\
             test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished\n\
             test result: FAILED. 2 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(counts.to_string(), "5 passed, 4 failed, 1 skipped");
    }
}
