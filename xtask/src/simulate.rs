// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask simulate` runs the simulation of a fleet with more seeds than the tests do, or one
//! seed with its events.

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::cargo::{self, TestBinary};
use crate::host;

/// The test that runs the seeds.
const TEST: &str = "every_seed_ends_as_its_last_intent_says";

/// Runs `seeds` seeds from `first` on. One seed prints its events.
pub fn run(first: Option<u64>, seeds: Option<u64>) -> Result<ExitCode> {
    let test = cargo::build_simulation(&host::repository(), &["--release"])?;
    let seeds = seeds.unwrap_or(if first.is_some() { 1 } else { 10_000 });
    let status = command(&test, first.unwrap_or(0), seeds).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Returns the command that runs these seeds.
pub fn command(test: &TestBinary, first: u64, seeds: u64) -> Command {
    let mut command = Command::new(&test.path);
    command
        .args(["--exact", TEST, "--nocapture"])
        .env("PATCHBAY_SIMULATE_SEED", first.to_string())
        .env("PATCHBAY_SIMULATE_SEEDS", seeds.to_string())
        .current_dir(&test.folder);
    command
}
