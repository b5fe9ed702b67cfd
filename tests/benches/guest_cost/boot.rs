// SPDX-License-Identifier: Apache-2.0
//! Compares the boot log of an unpatched kernel with and without the monitor's CPUID leaf.

use anyhow::{Result, ensure};
use patchbay_tests::{Environment, Guest};

use crate::Kernels;

/// Words that mark lines whose numbers come from a clock or depend on its speed.
const MEASURED: [&str; 5] = ["MHz", "BogoMIPS", "lpj=", "max_cycles", "sched_clock"];

/// Prints the lines that differ; returns whether there are none.
pub async fn compare(environment: &Environment, kernels: &Kernels) -> Result<bool> {
    let with = log(environment, kernels, &[]).await?;
    let again = log(environment, kernels, &[]).await?;
    let without = log(environment, kernels, &["--no-patchbay"]).await?;
    ensure!(with.len() > 50, "the boot log is too short: {with:?}");
    println!(
        "\nThe unpatched kernel's boot log, {} lines, times and addresses set aside:\n",
        with.len()
    );
    println!("| with the CPUID leaf, beside | lines that differ |");
    println!("|---|---|");
    let noise = differences(&with, &again);
    let found = differences(&with, &without);
    println!("| itself, another boot | {} |", noise.len());
    println!("| without the leaf | {} |", found.len());
    for line in noise.iter().chain(&found) {
        println!("\n    {line}");
    }
    println!();
    Ok(found.is_empty())
}

async fn log(
    environment: &Environment,
    kernels: &Kernels,
    arguments: &[&str],
) -> Result<Vec<String>> {
    let mut builder = Guest::builder(environment)
        .kernel(&kernels.unpatched.kernel)
        .command_line("nokaslr");
    for argument in arguments {
        builder = builder.argument(argument);
    }
    let mut guest = builder.boot().await?;
    let log = guest.shell("dmesg").await?;
    guest.power_off().await?;
    Ok(log.lines().map(without_numbers).collect())
}

/// Returns a line without its time, without addresses and without numbers that depend on a clock.
fn without_numbers(line: &str) -> String {
    let text = line.split_once("] ").map_or(line, |(_, text)| text);
    let measured = MEASURED.iter().any(|word| text.contains(word));
    let is_address = |word: &str| {
        let digits = word.trim_start_matches("0x");
        digits.len() >= 8 && digits.chars().all(|c| c.is_ascii_hexdigit())
    };
    let words = text.split(' ').map(|word| {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_address(bare) || measured && word.contains(|c: char| c.is_ascii_digit()) {
            "#"
        } else {
            word
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the lines that occur more often in one log than in the other.
fn differences(first: &[String], second: &[String]) -> Vec<String> {
    let only = |sign: &str, lines: &[String], others: &[String]| {
        let mut others = others.to_vec();
        let mut only = Vec::new();
        for line in lines {
            match others.iter().position(|other| other == line) {
                Some(at) => drop(others.remove(at)),
                None => only.push(format!("{sign} {line}")),
            }
        }
        only
    };
    let mut found = only("-", first, second);
    found.extend(only("+", second, first));
    found
}
