// SPDX-License-Identifier: Apache-2.0
//! Counts the instructions that the discovery of a stock kernel takes, by step: the first one, the
//! next one, and the check that the kernel still runs.
//!
//! The kernel boots in QEMU without KVM and loads modules. Its memory is copied to a file, and
//! callgrind runs this program again with the copy. The end of a step is the call of
//! `live::parts::Clock::part`, so the counts need no code in the engine. DHAT, another tool of
//! valgrind, counts the bytes that are kept for the next discovery.
//!
//! Run it as `cargo xtask bench discovery`. It prints Markdown tables.

mod copy;
mod kept;
#[path = "../../tests/stock/qemu.rs"]
#[allow(dead_code, reason = "the tests also run commands in the guest")]
mod qemu;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use patchbay_kernel_image::live::{Finder, Kernel, Way};

use copy::Copy;

/// The environment variable that names the folder of the copy, and makes this program discover the
/// kernel in it.
const COPY: &str = "PATCHBAY_DISCOVERY_COPY";
/// The environment variable that names the kernel.
const KERNEL: &str = "PATCHBAY_TEST_STOCK_6_12";
/// The beginning of a line that names a step of a discovery.
const STEP: &str = "step ";
/// The functions that end a step, and those that are counted.
const ENDS_STEP: &str = "patchbay_kernel_image::live::parts::Clock::part*";
const COUNTED: &str = "*discovery::counted*";

fn main() -> Result<()> {
    if let Some(folder) = std::env::var_os(COPY) {
        return discover(folder.as_ref());
    }
    let Some(kernel) = std::env::var_os(KERNEL) else {
        bail!("{KERNEL} names no kernel; run `cargo xtask bench discovery`");
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let folder = tempfile::tempdir()?;
    runtime.block_on(async {
        let guest = qemu::Guest::boot(kernel.as_ref(), "").await?;
        let mut guest = guest.context("there is no qemu-system-x86_64")?;
        guest.stop().await?;
        let cpus = guest.cpus().await?;
        copy::write(folder.path(), &guest.ram, &cpus)
    })?;
    count(folder.path())?;
    kept::count(folder.path())
}

/// Discovers the kernel in the copy: the work that is counted.
fn discover(folder: &Path) -> Result<()> {
    let copy = Copy::read(folder)?;
    let mut finder = Finder::default();
    let first = counted(&mut finder, &copy)?;
    if std::env::var_os(kept::KEEP).is_some() {
        // Nothing is freed.
        std::process::exit(0);
    }
    let again = counted(&mut finder, &copy)?;
    ensure!(!first.evidence.again && again.evidence.again);
    counted_confirmation(&finder, &copy)?;
    println!("kernel {}, {} keys", first.release, first.keys.len());
    for (which, kernel) in [("first", &first), ("again", &again)] {
        for part in &kernel.evidence.parts {
            println!("{STEP}{which}: {}, {} bytes", part.name, part.bytes);
        }
        println!("{STEP}{which}: end");
    }
    println!("{STEP}confirmation");
    Ok(())
}

#[inline(never)]
fn counted(finder: &mut Finder, copy: &Copy) -> Result<Kernel> {
    Ok(finder.find(copy, &copy.cpus, Way::Image)?)
}

#[inline(never)]
fn counted_confirmation(finder: &Finder, copy: &Copy) -> Result<()> {
    Ok(finder.confirm(copy, &copy.cpus)?)
}

/// Runs this program in callgrind, and prints the instructions of each step.
fn count(folder: &Path) -> Result<()> {
    let out = folder.join("out");
    let output = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(format!("--toggle-collect={COUNTED}"))
        .arg(format!("--dump-before={ENDS_STEP}"))
        .arg(format!("--dump-after={COUNTED}"))
        .arg(std::env::current_exe()?)
        .env(COPY, folder)
        .output()
        .context("valgrind cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!(
            "{}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let mut counts = BTreeMap::new();
    for file in std::fs::read_dir(folder)? {
        let name = file?.file_name().to_string_lossy().into_owned();
        let Some(number) = name
            .strip_prefix("out.")
            .and_then(|number| number.parse::<u32>().ok())
        else {
            continue;
        };
        let dump = std::fs::read_to_string(folder.join(&name))?;
        let total = dump.lines().find_map(|line| line.strip_prefix("totals: "));
        let total: u64 = total.context("a dump without a total")?.trim().parse()?;
        counts.insert(number, total);
    }
    let (steps, others): (Vec<&str>, _) = text.lines().partition(|line| line.starts_with(STEP));
    ensure!(
        steps.len() == counts.len(),
        "there are {} steps and {} counts; is {ENDS_STEP} inlined?",
        steps.len(),
        counts.len()
    );
    println!("{}\n", others.join("\n"));
    println!("| step | instructions |\n|---|---|");
    let mut sums = BTreeMap::<&str, u64>::new();
    for (step, count) in steps.iter().zip(counts.values()) {
        let step = step.trim_start_matches(STEP);
        let which = step.split(':').next().unwrap_or(step);
        *sums.entry(which).or_default() += count;
        println!("| {step} | {count} |");
    }
    for (which, sum) in sums {
        println!("| {which}: all | {sum} |");
    }
    Ok(())
}
