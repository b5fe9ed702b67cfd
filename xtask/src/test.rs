// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test` runs the three tiers of tests, each where it can run.
//!
//! | tier | test targets | where |
//! |---|---|---|
//! | 1 | all others | here |
//! | 2 | `kvm_*`: bare-metal guests | here if /dev/kvm works, otherwise in the lab |
//! | 3 | `linux_*`: Linux guests | here on hardware KVM, otherwise in the lab |
//!
//! Some tests of tier 3 are repeated with the oldest kernel that has a series, and with the newest if
//! that is asked for.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::cargo::TestBinary;
use crate::kernel::{self, Recipe};
use crate::test_runner::{LabWorker, Report, Test, Verdict};
use crate::{cargo, clients, guest, host, lab_image, root_disk, stock, test_runner};

/// Package whose tests are built in the release profile, because the lab is slow.
const RELEASE: &str = "patchbay-tests";

/// Prefixes of the tests that are repeated with the oldest and the newest kernel. What the monitor
/// reads of a guest differs most between these.
const WITH_OTHER_KERNELS: &[&str] = &[
    "patchbay-tests::linux_boot bzimage_with_",
    "patchbay-tests::linux_counts ",
    "patchbay-tests::linux_gates ",
    "patchbay-tests::linux_kinds ",
    "patchbay-tests::linux_life a_hibernation_that_does_not_happen_keeps_holds_and_quarantines",
    "patchbay-tests::linux_life a_panicked_kernel_has_taken_its_registration_back",
    "patchbay-tests::linux_series the_guest_sees_what_was_changed",
    "patchbay-tests::linux_trace armed_is_silent_firing_streams_and_parked_is_silent",
];

/// Test targets that need stock kernels.
const STOCK: &[&str] = &["patchbay-tests::stock", "patchbay-tests::linux_stock"];

/// The targets whose guests QEMU runs, with the lab's kernel.
const ATTACHES: &[&str] = &["patchbay-attach::linux_qemu", "patchbay-attach::linux_host"];

/// The tests of a project outside of the workspace.
const OUTSIDE: &str = "patchbay-example-ci::linux_guest";

/// Selects the tests to run.
pub struct Selection {
    /// Tiers; all if empty.
    pub tiers: Vec<u8>,
    /// Substring of "suite name"; all tests if `None`.
    pub filter: Option<String>,
    /// Repeat tests also with the newest kernel, and with both if there is a filter. Without a filter
    /// they are always repeated with the oldest.
    pub other_kernels: bool,
    /// Discover the keys of every stock kernel that the archive has.
    pub all_kernels: bool,
    /// Timeout of a test, here and in the lab.
    pub timeout: Duration,
    /// Number of labs that run at the same time.
    pub labs: usize,
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
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

/// Runs the tests and prints a summary; returns whether none failed.
pub fn run(selection: &Selection) -> Result<bool> {
    let wants = |tier: u8| selection.tiers.is_empty() || selection.tiers.contains(&tier);
    let mut tests = [Vec::new(), Vec::new(), Vec::new()];
    let mut binaries = Vec::new();
    let of_clients = |filter: &str| filter.starts_with(clients::HEADING);
    let only_clients = wants(1) && selection.filter.as_deref().is_some_and(of_clients);
    if only_clients {
        // No test in Rust has such a name.
    } else if wants(1) {
        binaries.extend(cargo::build_tests(&[
            "test",
            "--release",
            "--package",
            RELEASE,
        ])?);
        binaries.extend(cargo::build_tests(&[
            "test",
            "--workspace",
            "--exclude",
            RELEASE,
        ])?);
    } else {
        // The tier is in the target's name, so only the selected targets are built.
        if wants(2) {
            binaries.extend(cargo::build_tests(&[
                "test",
                "--workspace",
                "--test",
                "kvm_*",
            ])?);
        }
        if wants(3) {
            let targets = [
                "test",
                "--release",
                "--package",
                RELEASE,
                "--test",
                "linux_*",
            ];
            binaries.extend(cargo::build_tests(&targets)?);
            let others = [
                "test",
                "--workspace",
                "--exclude",
                RELEASE,
                "--test",
                "linux_*",
            ];
            binaries.extend(cargo::build_tests(&others)?);
        }
    }
    if (wants(1) || wants(3)) && !only_clients {
        binaries.extend(cargo::build_tests_outside()?);
    }
    for binary in &binaries {
        let tier = tier(&binary.target);
        if wants(tier) {
            tests[usize::from(tier) - 1].extend(tests_of(binary, selection.filter.as_deref())?);
        }
    }
    if tests.iter().all(Vec::is_empty) && !only_clients {
        bail!("no test matches");
    }
    let mut outcome = TestRun::default();
    let kvm = host::Kvm::probe();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let here = |jobs| Location::Here { jobs };
    let lab = Location::Lab {
        labs: selection.labs,
    };

    let [tier_1, tier_2, tier_3] = tests;
    // Some tests read a stock kernel: use the lab's if it is cached or needed anyway.
    let attaches = |test: &Test| ATTACHES.contains(&&*test.suite);
    if (!tier_1.is_empty() || tier_3.iter().any(attaches))
        && (!kvm.runs_linux() || lab_image::is_cached()?)
    {
        host::ensure_packages(host::LAB)?;
        let stock = lab_image::get()?.kernel;
        outcome
            .variables
            .push(("PATCHBAY_TEST_DISTRO_KERNELS", stock));
    }
    if tier_1
        .iter()
        .chain(&tier_3)
        .any(|test| STOCK.contains(&&*test.suite))
    {
        let kernels = stock::variables(selection.all_kernels);
        outcome.variables.extend(kernels);
    }
    if tier_1
        .iter()
        .any(|test| test.suite.starts_with("patchbay-fleet"))
    {
        // Tests then report that they are skipped.
        for (what, packages) in [
            ("etcd", host::ETCD),
            ("Chromium", host::BROWSER),
            ("libfaketime", host::CLOCK),
        ] {
            if let Err(error) = host::ensure_packages(packages) {
                eprintln!("There is no {what}: {error:#}");
            }
        }
    }
    if tier_1
        .iter()
        .any(|test| test.suite == "patchbay-attach::libvirt")
        && let Err(error) = host::ensure_packages(host::LIBVIRT)
    {
        // The tests then report that they are skipped.
        eprintln!("There is no libvirt: {error:#}");
    }
    outcome.run_tier("tier 1, no KVM", tier_1, here(cpus), selection.timeout);
    if wants(1) && selection.filter.is_none() {
        outcome.run_doc_tests()?;
    }
    if wants(1) {
        outcome.run_clients(selection.filter.as_deref())?;
    }
    // One at a time, because these tests measure and use several CPUs each.
    let place = if kvm.runs_bare_metal() { here(1) } else { lab };
    outcome.run_tier(
        "tier 2, bare-metal guests",
        tier_2,
        place,
        selection.timeout,
    );
    if !tier_3.is_empty() {
        // A stock kernel is downloaded; the others are built.
        let downloaded = |test: &Test| test.suite == STOCK[1] || attaches(test);
        let builds = !tier_3.iter().all(downloaded);
        if builds {
            outcome.variables.extend(guest::prepare(true)?);
        } else {
            outcome.variables.extend(guest::programs()?);
            let agent = cargo::build_agent()?;
            outcome.variables.push(("PATCHBAY_AGENT", agent));
        }
        let runs = |suite| tier_3.iter().any(|test| test.suite == suite);
        if runs(OUTSIDE) {
            let kernel = kernel::get(&Recipe::standard())?.bzimage();
            outcome.variables.push(("KERNEL", kernel));
        }
        if runs("patchbay-tests::linux_kernels") {
            let more = guest::kernel_without_jump_labels()?;
            outcome.variables.extend(more);
        }
        if runs("patchbay-tests::linux_disk") {
            match root_disk::get() {
                Ok(disk) => outcome.variables.push(("PATCHBAY_TEST_ROOT_DISK", disk)),
                // The test then reports that it is skipped.
                Err(error) => eprintln!("There is no root disk for a Debian guest: {error:#}"),
            }
        }
        guest::announce_place();
    }
    let mut again = Vec::new();
    if selection.other_kernels || selection.filter.is_none() {
        again.extend(tier_3.iter().filter(|test| runs_with_others(test)).cloned());
    }
    let place = if kvm.runs_linux() {
        here(cpus.div_ceil(2))
    } else {
        lab
    };
    outcome.run_tier("tier 3, Linux guests", tier_3, place, selection.timeout);
    if !again.is_empty() {
        let newest = selection.other_kernels.then(Recipe::newest);
        for recipe in [Some(Recipe::oldest()), newest].into_iter().flatten() {
            // The last variable of the same name counts.
            let variables = guest::kernel_of_the_guest(&recipe)?;
            outcome.variables.extend(variables);
            let heading = format!("tier 3, Linux {} guests", recipe.version);
            outcome.run_tier(&heading, again.clone(), place, selection.timeout);
        }
    }
    Ok(outcome.summarize())
}

fn runs_with_others(test: &Test) -> bool {
    let name = full_name(test);
    WITH_OTHER_KERNELS.iter().any(|part| name.starts_with(part))
}

fn tier(target: &str) -> u8 {
    match target {
        _ if target.starts_with("kvm_") => 2,
        _ if target.starts_with("linux_") => 3,
        _ => 1,
    }
}

fn tests_of(binary: &TestBinary, filter: Option<&str>) -> Result<Vec<Test>> {
    let names = test_runner::list(&binary.path, &binary.folder)?;
    let tests = names.into_iter().map(|name| Test {
        suite: binary.suite.clone(),
        name,
        binary: binary.path.clone(),
        folder: binary.folder.clone(),
    });
    let matches = |test: &Test| filter.is_none_or(|f| full_name(test).contains(f));
    Ok(tests.filter(matches).collect())
}

fn full_name(test: &Test) -> String {
    format!("{} {}", test.suite, test.name)
}

#[derive(Clone, Copy)]
enum Location {
    Here { jobs: usize },
    Lab { labs: usize },
}

#[derive(Default)]
struct TestRun {
    tiers: Vec<(String, Counts)>,
    failures: Vec<(Test, Report)>,
    /// Rows of tables that tests printed.
    rows: Vec<String>,
    variables: guest::Variables,
}

impl TestRun {
    /// Runs tests with as many workers as the place allows. Each worker takes the next test when it
    /// has finished one.
    fn run_tier(&mut self, heading: &str, tests: Vec<Test>, place: Location, timeout: Duration) {
        if tests.is_empty() {
            return;
        }
        let (workers, where_) = match place {
            Location::Here { jobs } => (jobs, "here"),
            Location::Lab { labs } => (labs, "in the lab"),
        };
        println!("\n{heading}: {} tests, {where_}", tests.len());
        let workers = workers.clamp(1, tests.len());
        let start = Instant::now();
        let queue = Mutex::new(VecDeque::from(tests));
        let done = Mutex::new(Vec::new());
        let variables = &self.variables;
        let work = || {
            let mut lab = LabWorker::new(timeout, variables);
            // The lock is held only while a test is taken.
            let next = || queue.lock().ok()?.pop_front();
            while let Some(test) = next() {
                let report = match place {
                    Location::Here { .. } => test_runner::run_here(&test, timeout, variables),
                    Location::Lab { .. } => lab.run(&test),
                };
                print_report(&test, &report);
                if let Ok(mut done) = done.lock() {
                    done.push((test, report));
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(work);
            }
        });
        let mut counts = Counts::default();
        for (test, report) in done.into_inner().unwrap_or_default() {
            let rows = report.output.lines().filter(|line| line.starts_with("| "));
            self.rows.extend(rows.map(str::to_owned));
            match report.verdict {
                Verdict::Passed => counts.passed += 1,
                Verdict::Skipped(_) => counts.skipped += 1,
                Verdict::Failed(_) => {
                    counts.failed += 1;
                    self.failures.push((test, report));
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        self.tiers
            .push((format!("{heading}, {where_}, {seconds:.0} s"), counts));
    }

    fn run_doc_tests(&mut self) -> Result<()> {
        println!("\nexamples in the documentation");
        let (success, output) = cargo::run_doc_tests()?;
        let mut counts = count_doc_tests(&output);
        if !success {
            println!("{output}");
            // For example an example that does not compile, for which there is no line.
            counts.failed = counts.failed.max(1);
        }
        self.tiers
            .push(("examples in the documentation".into(), counts));
        Ok(())
    }

    fn run_clients(&mut self, filter: Option<&str>) -> Result<()> {
        for outcome in clients::run(filter)? {
            if outcome.failed > 0 || outcome.passed == 0 {
                println!("\n{}\n{}", outcome.heading, outcome.output.trim_end());
            }
            let counts = Counts {
                passed: outcome.passed,
                failed: outcome.failed,
                skipped: outcome.skipped,
            };
            self.tiers.push((outcome.heading, counts));
        }
        Ok(())
    }

    /// Prints the tables, the failures and the counts; the last line is the sum.
    fn summarize(&self) -> bool {
        if !self.rows.is_empty() {
            println!("\n{}", self.rows.join("\n"));
        }
        for (test, report) in &self.failures {
            println!(
                "\n--- {} ---\n{}",
                full_name(test),
                report.output.trim_end()
            );
            if let Verdict::Failed(reason) = &report.verdict {
                println!("--- {}: {reason}", full_name(test));
            }
        }
        println!();
        let mut sum = Counts::default();
        for (heading, counts) in &self.tiers {
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
        full_name(test)
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
    fn tiers_follow_the_names_of_targets() {
        assert_eq!(tier("patchbay_vmm"), 1);
        assert_eq!(tier("kvm_flip"), 2);
        assert_eq!(tier("linux_boot"), 3);
        assert_eq!(tier("not_linux_boot"), 1);
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
