// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask fuzz` runs a fuzz target with libFuzzer, guided by coverage.
//!
//! The targets in the `fuzz` directories have cargo-fuzz's layout, but cargo-fuzz needs a nightly
//! compiler. The coverage comes from LLVM's own pass, which the pinned compiler supports.
//! Sanitizers are left out; in code without `unsafe` they find little.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::{cargo, host};

/// Crates with fuzz targets.
const CRATES: [&str; 5] = [
    "engine/static-keys",
    "engine/kernel-image",
    "engine/observe",
    "service",
    "vmm",
];

/// The coverage that libFuzzer reads: edge counters, their table, and comparisons.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

const TARGET: &str = "x86_64-unknown-linux-gnu";

struct Target {
    /// Path of the fuzz crate, for example `vmm/fuzz`.
    folder: PathBuf,
    name: String,
}

/// Runs one target for this many seconds or until a failure; without a name, lists the targets.
pub fn run(name: Option<&str>, seconds: u64) -> Result<ExitCode> {
    let targets = targets()?;
    let Some(name) = name else {
        for target in targets {
            println!("{:16} {}", target.name, target.folder.display());
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(target) = targets.iter().find(|target| target.name == name) else {
        bail!("there is no fuzz target {name}; `cargo xtask fuzz` lists them");
    };
    let program = build(target)?;
    // The fuzzer writes new inputs to the first directory, which is not committed. Those that add
    // coverage are then merged into the second one.
    let found = host::target().join("fuzz/corpus").join(name);
    let committed = target.folder.join("corpus").join(name);
    let crashes = host::target().join("fuzz/crashes/");
    for folder in [&found, &committed, &crashes] {
        std::fs::create_dir_all(folder)?;
    }
    let status = fuzzer(&program, &crashes)
        .arg(format!("-max_total_time={seconds}"))
        .args([&found, &committed])
        .status()?;
    if !status.success() {
        eprintln!("The failing input is in {}.", crashes.display());
        return Ok(ExitCode::FAILURE);
    }
    let merged = fuzzer(&program, &crashes)
        .args(["-set_cover_merge=1", "-max_len=512"])
        .args([&committed, &found])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if !merged.success() {
        bail!("the new inputs in {} cannot be merged", found.display());
    }
    println!(
        "{} has {} inputs; commit the new ones that are worth keeping",
        committed.display(),
        std::fs::read_dir(&committed)?.count()
    );
    Ok(ExitCode::SUCCESS)
}

fn fuzzer(program: &Path, crashes: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .arg(format!("-artifact_prefix={}/", crashes.display()))
        .args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]);
    command
}

fn targets() -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for folder in CRATES {
        let folder = host::repository().join(folder).join("fuzz");
        for file in std::fs::read_dir(folder.join("fuzz_targets"))? {
            let path = file?.path();
            let name = path.file_stem().context("a file's name")?;
            targets.push(Target {
                folder: folder.clone(),
                name: name.to_string_lossy().into_owned(),
            });
        }
    }
    targets.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(targets)
}

fn build(target: &Target) -> Result<PathBuf> {
    let output = host::target().join("fuzz");
    let mut command = cargo::cargo("build");
    command
        .args(["--release", "--bin", &target.name, "--target", TARGET])
        .arg("--manifest-path")
        .arg(target.folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&output)
        // With an explicit target these flags do not apply to build scripts.
        .env("RUSTFLAGS", COVERAGE);
    cargo::run(&mut command)?;
    Ok(output.join(TARGET).join("release").join(&target.name))
}
