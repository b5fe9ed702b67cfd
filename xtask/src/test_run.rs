// SPDX-License-Identifier: Apache-2.0
//! Runs planned tests, prints their results and counts them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::test_durations::Durations;
use crate::test_runner::{LabWorker, Report, Test, Verdict};
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

/// Where tests run, and how many of them at the same time.
#[derive(Clone, Copy)]
pub enum Location {
    Here { jobs: usize },
    Lab { labs: usize },
}

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
    failures: Vec<(Test, Report)>,
    /// The rows of tables that tests printed.
    rows: Vec<String>,
    /// The parts of the run with the time that each took.
    phases: Vec<(&'static str, Duration)>,
    phase_began: Instant,
}

impl TestRun {
    pub fn new(timeout: Duration) -> Result<Self> {
        Ok(Self {
            timeout,
            variables: guest::Variables::new(),
            durations: Durations::of_the_last_run()?,
            counts: Vec::new(),
            failures: Vec::new(),
            rows: Vec::new(),
            phases: Vec::new(),
            phase_began: Instant::now(),
        })
    }

    pub fn end_phase(&mut self, name: &'static str) {
        self.phases.push((name, self.phase_began.elapsed()));
        self.phase_began = Instant::now();
    }

    /// Returns the tests with the variables known so far.
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

    /// Runs tests, the longest first, with as many workers as the place allows. Each worker takes
    /// the next test when it has finished one.
    pub fn run_tests(&mut self, mut tests: Vec<Planned>, place: Location) {
        if tests.is_empty() {
            return;
        }
        let (workers, where_) = match place {
            Location::Here { jobs } => (jobs, "here"),
            Location::Lab { labs } => (labs, "in the lab"),
        };
        let mut headings: Vec<String> = tests.iter().map(|test| test.heading.clone()).collect();
        headings.dedup();
        println!("\n{}: {} tests, {where_}", headings.join("; "), tests.len());
        let workers = workers.clamp(1, tests.len());
        tests.sort_by(|one, other| self.durations.compare(&one.test, &other.test));
        let queue = Mutex::new(VecDeque::from(tests));
        let done = Mutex::new(Vec::new());
        let timeout = self.timeout;
        let work = || {
            let mut lab = LabWorker::new(timeout);
            // The lock is held only while a test is taken.
            let next = || queue.lock().ok()?.pop_front();
            while let Some(planned) = next() {
                let report = match place {
                    Location::Here { .. } => test_runner::run_here(&planned.test, timeout),
                    Location::Lab { .. } => lab.run(&planned.test),
                };
                print_report(&planned.test, &report);
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
        let mut counts: Vec<Counts> = headings.iter().map(|_| Counts::default()).collect();
        for (Planned { heading, test }, report) in done.into_inner().unwrap_or_default() {
            let rows = report.output.lines().filter(|line| line.starts_with("| "));
            self.rows.extend(rows.map(str::to_owned));
            self.durations.add(&test, report.time);
            let at = headings.iter().position(|known| *known == heading);
            counts[at.unwrap_or_default()].add_report(&report);
            if matches!(report.verdict, Verdict::Failed(_)) {
                self.failures.push((test, report));
            }
        }
        for (heading, counts) in headings.into_iter().zip(counts) {
            self.counts.push((format!("{heading}, {where_}"), counts));
        }
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
        for (test, report) in &self.failures {
            println!(
                "\n--- {} ---\n{}",
                test.full_name(),
                report.output.trim_end()
            );
            if let Verdict::Failed(reason) = &report.verdict {
                println!("--- {}: {reason}", test.full_name());
            }
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
        println!("\n{sum}");
        sum.failed == 0
    }
}

fn print_report(test: &Test, report: &Report) {
    let (verdict, reason) = match &report.verdict {
        Verdict::Passed => ("PASS", ""),
        Verdict::Failed(reason) => ("FAIL", reason.as_str()),
        Verdict::Skipped(reason) => ("SKIP", reason.as_str()),
    };
    let separator = if reason.is_empty() { "" } else { ": " };
    let seconds = report.time.as_secs_f64();
    println!(
        "{verdict} [{seconds:8.3} s] {}{separator}{reason}",
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

#[cfg(test)]
mod tests {
    use super::*;

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
