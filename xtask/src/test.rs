// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask test` runs the three tiers of tests, each where it can run.
//!
//! | tier | test targets | where |
//! |---|---|---|
//! | 1 | all others | here; those of [`ALONE`] one at a time |
//! | 2 | `kvm_*`: bare-metal guests | here if /dev/kvm works, otherwise in the lab |
//! | 3 | `linux`, `linux_*`: Linux guests | here on hardware KVM, otherwise in the lab |
//!
//! Some tests of tier 3 are repeated with the oldest kernel that has a series, and with the newest
//! on request.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::cargo::TestBinary;
use crate::kernel::{self, Recipe};
use crate::test_run::{Location, Planned, TestRun};
use crate::test_runner::Test;
use crate::{
    cargo, clients, deny, guest, host, installed, lab_image, root_disk, stock, test_runner,
};

/// Prefixes of the tests in [`GUESTS`] that are repeated with the oldest and the newest kernel. The
/// structures that the monitor reads from a guest differ most between these two.
const WITH_OTHER_KERNELS: &[&str] = &[
    "boot::bzimage_with_4_vcpus",
    "counts::",
    "gates::",
    "kinds::",
    "life::a_hibernation_that_does_not_happen_keeps_holds_and_quarantines",
    "life::a_panicked_kernel_has_taken_its_registration_back",
    "series::the_guest_sees_what_was_changed",
    "trace::armed_is_silent_firing_streams_and_parked_is_silent",
];

/// Test targets of tier 1 that run one at a time, because they count instructions. The threads of a
/// call interleave differently while other tests run, which changes the counts.
const ALONE: &[&str] = &["patchbay-vmm::instructions"];

/// Test targets of tier 2 that run in parallel with others, because they do not measure time.
const WITH_OTHERS: &[&str] = &[
    "patchbay-attach::kvm_process",
    "patchbay-attach::kvm_qemu",
    "patchbay-host-kernel::kvm_slots",
    "patchbay-node::kvm_unit",
    "patchbay-vmm::kvm_attacks",
    "patchbay-vmm-program::kvm_monitor",
    "patchbay-vmm::kvm_panic",
    "patchbay-vmm::kvm_registers",
    "patchbay-vmm::kvm_snapshot",
    "patchbay-vmm-program::kvm_snapshot",
    "patchbay-vmm-program::kvm_unit",
];

/// The test target with most of the Linux guests.
const GUESTS: &str = "patchbay-tests::linux";

/// The tests that need stock kernels, by target and prefix.
const STOCK: &[(&str, &str)] = &[
    ("patchbay-tests::stock", ""),
    (GUESTS, "stock::"),
    ("patchbay-examples::linux_overcommit", ""),
];

/// The tests that need kernels as Debian installs them.
const INSTALLED: (&str, &str) = (GUESTS, "stock::installed::");

/// The targets whose guests run in QEMU with the lab's kernel.
const ATTACHES: &[&str] = &[
    "patchbay-attach::linux_qemu",
    "patchbay-attach::linux_host",
    "patchbay-attach::linux_process",
    "patchbay-host-kernel::linux_slots",
];

/// The environment variable that names a folder with the programs of other monitors.
const MONITORS: &str = "PATCHBAY_TEST_MONITORS";

/// The tests with a guest of libkrun.
const LIBKRUN: &[(&str, &str)] = &[
    ("patchbay-attach::linux_process", "a_guest_of_libkrun"),
    ("patchbay-attach::kvm_process", "a_guest_of_libkrun"),
    ("patchbay-attach::kvm_process", "kill_with_libkrun"),
];

/// The tests of a project outside of the workspace.
const OUTSIDE: &str = "patchbay-example-ci::linux_guest";

/// Selects the tests to run.
pub struct Selection {
    /// Tiers; all if empty.
    pub tiers: Vec<u8>,
    /// A substring of "suite name"; `None` selects all tests.
    pub filter: Option<String>,
    /// Repeat tests with the oldest and the newest kernel that have a series. Without a filter,
    /// tests are also repeated with the oldest kernel if it has been built before.
    pub other_kernels: bool,
    /// Discover the keys of every stock kernel that the archive has.
    pub all_kernels: bool,
    /// Timeout of a test, here and in the lab.
    pub timeout: Duration,
    /// Number of labs that run at the same time.
    pub labs: usize,
}

impl Selection {
    fn wants(&self, tier: u8) -> bool {
        self.tiers.is_empty() || self.tiers.contains(&tier)
    }
}

/// Runs the tests and prints a summary; returns whether none failed.
pub fn run(selection: &Selection) -> Result<bool> {
    let of_clients = |filter: &str| {
        let headings = [clients::HEADING, deny::HEADING];
        headings.iter().any(|heading| filter.starts_with(heading))
    };
    let only_clients = selection.wants(1) && selection.filter.as_deref().is_some_and(of_clients);
    let mut outcome = TestRun::new(selection.timeout)?;
    let [tier_1, tier_2, tier_3] = match only_clients {
        // No Rust test matches a filter with such a name.
        true => [const { Vec::new() }; 3],
        false => build(selection)?,
    };
    if tier_1.is_empty() && tier_2.is_empty() && tier_3.is_empty() && !only_clients {
        bail!("no test matches");
    }
    let kvm = host::Kvm::probe();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    outcome.variables = variables(selection, kvm, &tier_1, &tier_3)?;
    let needs_libkrun = |test: &Test| LIBKRUN.iter().any(|part| is_part(test, *part));
    if tier_2.iter().chain(&tier_3).any(needs_libkrun) {
        outcome.variables.push(guest::libkrun());
    }
    outcome.end_phase("building");
    let runs_bare_metal = kvm.runs_bare_metal();
    let is_of = |suites: &[&str], test: &Test| suites.contains(&&*test.suite);
    let (counted, tier_1): (Vec<_>, Vec<_>) =
        tier_1.into_iter().partition(|test| is_of(ALONE, test));
    // These tests measure time, so they run alone.
    let (tier_2, alone): (Vec<_>, Vec<_>) = tier_2
        .into_iter()
        .partition(|test| is_of(WITH_OTHERS, test));
    let counted = outcome.plan("tier 1, counted instructions", counted);
    let mut here = outcome.plan("tier 1, no KVM", tier_1);
    let bare_metal = outcome.plan("tier 2, bare-metal guests", tier_2);
    let alone = outcome.plan("tier 2, bare-metal guests that are measured", alone);
    let mut guests = Vec::new();
    outcome.run_tests(counted, Location::Here { jobs: 1 });
    match runs_bare_metal {
        true => outcome.run_tests(alone, Location::Here { jobs: 1 }),
        false => guests.extend(alone),
    }
    outcome.end_phase("tests one at a time");
    let kernels = match selection.wants(3) && selection.filter.is_none() {
        // An error is ignored here, because the code that prepares a kernel for its tests reports
        // it.
        true => guest::start_to_build_kernels(selection.other_kernels).ok(),
        false => None,
    };
    let place = if runs_bare_metal {
        &mut here
    } else {
        &mut guests
    };
    place.extend(bare_metal);
    // Many tests wait for another process, so there are twice as many jobs as CPUs.
    outcome.run_tests(here, Location::Here { jobs: 2 * cpus });
    if selection.wants(1) && selection.filter.is_none() {
        let result = outcome.run_doc_tests();
        outcome.record("examples in the documentation", result);
    }
    if selection.wants(1) {
        let result = outcome.run_clients(selection.filter.as_deref());
        outcome.record("clients and dependencies", result);
    }
    outcome.end_phase("tests beside each other");
    let place = match kvm.runs_linux() {
        true => Location::Here {
            jobs: cpus.div_ceil(2),
        },
        false => Location::Lab {
            labs: selection.labs,
        },
    };
    if !tier_3.is_empty() {
        guest::announce_place();
    }
    // The tests of downloaded kernels do not wait for those that are built.
    let (downloaded, built) = match kernels {
        Some(kernels) if !kernels.is_finished() => tier_3.into_iter().partition(is_downloaded),
        _ => (Vec::new(), tier_3),
    };
    for tests in [downloaded, built] {
        if !tests.is_empty() {
            let planned = linux_guests(selection, &mut outcome, tests);
            outcome.record(
                "tier 3, Linux guests",
                planned.map(|planned| guests.extend(planned)),
            );
        }
        outcome.end_phase("kernels and the lab");
        outcome.run_tests(std::mem::take(&mut guests), place);
        outcome.end_phase("Linux guests");
    }
    outcome.repeat_failures();
    outcome.end_phase("second attempts");
    Ok(outcome.summarize())
}

/// Builds the selected tests, by tier.
fn build(selection: &Selection) -> Result<[Vec<Test>; 3]> {
    let mut binaries = Vec::new();
    // The target's name determines the tier, so only the targets of the selected tiers are built.
    if selection.wants(1) || selection.wants(3) {
        let mut targets = Vec::new();
        if selection.wants(1) {
            targets.extend([
                "api_service",
                "images",
                "instructions",
                "simulation",
                "stock",
            ]);
        }
        if selection.wants(3) {
            targets.extend(["linux", "linux_*"]);
        }
        binaries.extend(cargo::build_release_tests(&targets)?);
    }
    let mut others = Vec::new();
    if selection.wants(1) {
        others.extend(cargo::build_tests(&[])?);
    } else if selection.wants(2) {
        others.extend(cargo::build_tests(&["kvm_*"])?);
    }
    if selection.wants(1) || selection.wants(3) {
        others.extend(cargo::build_tests_outside()?);
    }
    let binaries = cargo::without_repeated_targets(binaries, others);
    let mut tests = [const { Vec::new() }; 3];
    for binary in &binaries {
        let tier = tier(&binary.target);
        if selection.wants(tier) {
            let found = tests_of(binary, selection.filter.as_deref())?;
            tests[usize::from(tier) - 1].extend(found);
        }
    }
    Ok(tests)
}

/// Returns the environment of the tests of tier 1 and of stock kernels, and installs the packages
/// that they need.
fn variables(
    selection: &Selection,
    kvm: host::Kvm,
    tier_1: &[Test],
    tier_3: &[Test],
) -> Result<guest::Variables> {
    let mut variables = guest::Variables::new();
    // Some tests read a stock kernel. They use the lab's kernel if it is cached or needed anyway.
    if (!tier_1.is_empty() || tier_3.iter().any(attaches))
        && (!kvm.runs_linux() || lab_image::is_cached()?)
    {
        host::ensure_packages(host::LAB)?;
        let stock = lab_image::get()?;
        variables.push(("PATCHBAY_TEST_DISTRO_KERNELS", stock.kernel));
        variables.push(("PATCHBAY_TEST_DISTRO_MODULES", stock.modules));
    }
    if tier_1.iter().chain(tier_3).any(needs_stock_kernels) {
        variables.extend(stock::variables(selection.all_kernels));
    }
    // Debian does not package these monitors, so the user provides a folder with their programs.
    if let Some(folder) = std::env::var_os(MONITORS) {
        variables.push((MONITORS, folder.into()));
    }
    for (suite, what, packages) in [
        ("patchbay-fleet", "etcd", host::ETCD),
        ("patchbay-store", "etcd", host::ETCD),
        ("patchbay-fleet", "Chromium", host::BROWSER),
        ("patchbay-fleet", "libfaketime", host::CLOCK),
        ("patchbay-fleet", "ip", host::NETWORK),
        ("patchbay-vmm::instructions", "valgrind", host::VALGRIND),
        ("patchbay-cli::commands", "trace-cmd", host::TRACE_CMD),
        ("patchbay-cli::commands", "journald", host::JOURNAL),
        ("patchbay-attach::libvirt", "libvirt", host::LIBVIRT),
        ("patchbay-attach::linux_host", "libvirt", host::LIBVIRT),
        ("patchbay-attach::linux_host", "etcd", host::ETCD),
        ("patchbay-attach::qemu", "qemu-img", host::SNAPSHOTS),
        ("patchbay-attach::kvm_qemu", "qemu-img", host::SNAPSHOTS),
    ] {
        let mut tests = tier_1.iter().chain(tier_3);
        let needed = tests.any(|test| test.suite.starts_with(suite));
        if needed && let Err(error) = host::ensure_packages(packages) {
            // The tests that need these packages then report that they are skipped.
            eprintln!("There is no {what}: {error:#}");
        }
    }
    Ok(variables)
}

/// Prepares everything for the tests with Linux guests, and plans some of them with other kernels
/// too.
fn linux_guests(
    selection: &Selection,
    outcome: &mut TestRun,
    tests: Vec<Test>,
) -> Result<Vec<Planned>> {
    let variables = &mut outcome.variables;
    if tests.iter().all(is_downloaded) {
        guest::prepare_lab()?;
        variables.extend(guest::paths_of_programs());
        variables.push(("PATCHBAY_AGENT", cargo::build_agent()?));
    } else {
        variables.extend(guest::prepare_tests()?);
    }
    let runs_any = |part| tests.iter().any(|test| is_part(test, part));
    let runs = |suite| runs_any((suite, ""));
    if runs(OUTSIDE) {
        let kernel = kernel::get(&Recipe::standard())?.bzimage();
        variables.push(("KERNEL", kernel));
    }
    if runs("patchbay-attach::linux_host") {
        variables.push(guest::controller());
    }
    if runs_any((GUESTS, "kernels::")) {
        variables.extend(guest::kernel_without_jump_labels()?);
    }
    let boots_installed = runs_any(INSTALLED);
    if boots_installed {
        variables.extend(installed::variables(selection.all_kernels));
    }
    if boots_installed || runs_any((GUESTS, "disk::")) {
        match root_disk::get() {
            Ok(disk) => variables.push(("PATCHBAY_TEST_ROOT_DISK", disk)),
            // The test then reports that it is skipped.
            Err(error) => eprintln!("There is no root disk for a Debian guest: {error:#}"),
        }
    }
    let again: Vec<Test> = match selection.other_kernels || selection.filter.is_none() {
        true => tests
            .iter()
            .filter(|test| runs_with_others(test))
            .cloned()
            .collect(),
        false => Vec::new(),
    };
    let mut planned = outcome.plan("tier 3, Linux guests", tests);
    let newest = selection.other_kernels.then(Recipe::newest);
    let recipes = [Some(Recipe::oldest()), newest];
    for recipe in recipes
        .into_iter()
        .flatten()
        .take_while(|_| !again.is_empty())
    {
        // Building a kernel takes as long as a quarter of all tests. The key of one whose sources
        // are not installed cannot be computed.
        let is_used = selection.other_kernels || kernel::is_cached(&recipe).unwrap_or(false);
        if is_used {
            // The last variable of the same name counts.
            outcome
                .variables
                .extend(guest::kernel_of_the_guest(&recipe)?);
        }
        let heading = format!("tier 3, Linux {} guests", recipe.version);
        let mut others = outcome.plan(&heading, again.clone());
        for planned in &mut others {
            planned.test.with = Some(format!("Linux {}", recipe.version));
        }
        match is_used {
            true => planned.extend(others),
            false => outcome.skip(
                others,
                "its kernel is not in the cache; `cargo xtask test --other-kernels` builds it",
            ),
        }
    }
    Ok(planned)
}

/// Returns whether a test is in a target and its name has a prefix.
fn is_part(test: &Test, (suite, prefix): (&str, &str)) -> bool {
    test.suite == suite && test.name.starts_with(prefix)
}

fn needs_stock_kernels(test: &Test) -> bool {
    STOCK.iter().any(|part| is_part(test, *part))
}

/// Returns whether the kernels of a test are downloaded and not built.
fn is_downloaded(test: &Test) -> bool {
    needs_stock_kernels(test) || attaches(test)
}

fn attaches(test: &Test) -> bool {
    ATTACHES.contains(&&*test.suite)
}

fn runs_with_others(test: &Test) -> bool {
    let mut prefixes = WITH_OTHER_KERNELS.iter();
    prefixes.any(|prefix| is_part(test, (GUESTS, prefix)))
}

fn tier(target: &str) -> u8 {
    match target {
        _ if target.starts_with("kvm_") => 2,
        _ if target == "linux" || target.starts_with("linux_") => 3,
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
        ..Test::default()
    });
    let matches = |test: &Test| filter.is_none_or(|f| test.full_name().contains(f));
    Ok(tests.filter(matches).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_follow_the_names_of_targets() {
        assert_eq!(tier("patchbay_vmm"), 1);
        assert_eq!(tier("kvm_flip"), 2);
        assert_eq!(tier("linux"), 3);
        assert_eq!(tier("linux_qemu"), 3);
        assert_eq!(tier("not_linux_qemu"), 1);
    }
}
