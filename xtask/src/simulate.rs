// SPDX-License-Identifier: Apache-2.0
//! `cargo xtask simulate` runs the simulation of a fleet with more seeds than the tests do, or one
//! seed with its events.

use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::Args;

use crate::cargo::{self, TestBinary};
use crate::{host, mutants};

/// The test that runs the seeds.
const TEST: &str = "every_seed_ends_as_its_last_intent_says";

/// The test's variables for the first seed and the number of seeds.
const VARIABLES: [&str; 2] = ["PATCHBAY_SIMULATE_SEED", "PATCHBAY_SIMULATE_SEEDS"];

#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The number of seeds [default: 10000, or 1 with --seed]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed; a single one prints its events
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Apply each mutant in fleet/controller/tests/simulation/mutants to a copy of the code, one at
    /// a time, and check that its seed finds the fault
    #[arg(long, conflicts_with_all = ["seeds", "seed"])]
    mutants: bool,
}

impl Options {
    /// Returns the values of [`VARIABLES`].
    fn values(self) -> [String; 2] {
        let count = self.seeds.unwrap_or(match self.seed {
            Some(_) => 1,
            None => 10_000,
        });
        [self.seed.unwrap_or(0), count].map(|value| value.to_string())
    }
}

/// Builds the simulation and runs the seeds.
pub fn run(options: Options) -> Result<ExitCode> {
    if options.mutants {
        return mutants::run();
    }
    let test = cargo::build_simulation(&host::repository(), &["--release"])?;
    let status = command(&test, options.values()).status()?;
    Ok(match status.success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Returns the command that runs the seeds with these values of [`VARIABLES`].
pub fn command(test: &TestBinary, values: [String; 2]) -> Command {
    let mut command = Command::new(&test.path);
    command
        .args(["--exact", TEST, "--nocapture"])
        .envs(VARIABLES.into_iter().zip(values))
        .current_dir(&test.folder);
    command
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const SIMULATION: &str = include_str!("../../fleet/controller/tests/simulation.rs");

    #[derive(Parser)]
    struct Simulate {
        #[command(flatten)]
        options: Options,
    }

    fn parse(words: &[&str]) -> Result<Options, clap::Error> {
        let words = ["simulate"].iter().chain(words);
        Simulate::try_parse_from(words).map(|parsed| parsed.options)
    }

    #[test]
    fn the_options_name_the_first_seed_and_the_number_of_seeds() {
        for (words, values) in [
            (&[][..], ["0", "10000"]),
            (&["--seed", "4155"], ["4155", "1"]),
            (&["--seeds", "1000000"], ["0", "1000000"]),
            (&["--seeds=20", "--seed=7"], ["7", "20"]),
        ] {
            let seeds = parse(words).expect("good");
            assert_eq!(seeds.values(), values, "{words:?}");
        }
        assert!(parse(&["--mutants"]).expect("good").mutants);
        parse(&["--mutants", "--seed", "1"]).expect_err("each mutant has its seed");
    }

    /// A run without a seed would check nothing and succeed.
    #[test]
    fn no_seeds_at_all_are_refused() {
        let refused = parse(&["--seeds", "0"]).expect_err("no seed");
        let text = refused.to_string();
        assert!(text.contains("'0' for '--seeds <N>'"), "{text}");
    }

    #[test]
    fn the_simulation_has_the_test_and_reads_its_variables() {
        assert!(SIMULATION.contains(&format!("\nfn {TEST}()")));
        for variable in VARIABLES {
            assert!(
                SIMULATION.contains(&format!("\"{variable}\"")),
                "{variable}"
            );
        }
    }
}
