// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask simulate` runs the simulation of a fleet with more seeds than the tests do, or one
//! seed with its events.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::cargo;

/// The test that runs the seeds.
const TEST: &str = "every_seed_ends_as_its_last_intent_says";

/// Runs `seeds` seeds from `first` on. One seed prints its events.
pub fn run(first: Option<u64>, seeds: Option<u64>) -> Result<ExitCode> {
    let built = cargo::build_simulation()?;
    let test = built.first().context("cargo built no simulation")?;
    let seeds = seeds.unwrap_or(if first.is_some() { 1 } else { 10_000 });
    let status = Command::new(&test.path)
        .args(["--exact", TEST, "--nocapture"])
        .env("PATCHBAY_SIMULATE_SEED", first.unwrap_or(0).to_string())
        .env("PATCHBAY_SIMULATE_SEEDS", seeds.to_string())
        .current_dir(&test.folder)
        .status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
