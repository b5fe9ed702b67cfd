// SPDX-License-Identifier: Apache-2.0
//! Measures system calls with `cost_tool`, in guests whose kernels alternate.

use std::path::Path;

use anyhow::{Context, Result};
use patchbay_proto::v1::{KeyOp, KeyUpdate, UpdateStaticKeysRequest};
use patchbay_tests::{Environment, Guest};

use crate::Kernels;

/// The number of turns of each guest.
const ROUNDS: usize = 3;
const SAMPLES: u32 = 60;

/// The system calls, and the number that makes one sample: small enough to end before the next
/// timer tick.
const WORKS: [(&str, u32); 4] = [("getppid", 100), ("lock", 50), ("mmap", 20), ("pipe", 10)];

/// The activity of the host during the measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HostActivity {
    Idle,
    /// All keys of the test module are on.
    KeysOn,
    /// The host flips the keys one after another.
    Flips,
}

struct Case<'a> {
    name: &'static str,
    kernel: &'a Path,
    leaf: bool,
    host: HostActivity,
}

/// The ticks per operation.
#[derive(Clone, Default)]
struct Ticks {
    least: Vec<f64>,
    median: Vec<f64>,
}

/// Measures and prints. Always returns true, because it checks no claim.
pub async fn measure(environment: &Environment, kernels: &Kernels) -> Result<bool> {
    let case = |name, kernel, leaf, host| Case {
        name,
        kernel,
        leaf,
        host,
    };
    let (on, plain) = (&*kernels.selected.kernel, &*kernels.unpatched.kernel);
    let without = &*kernels.without_jump_labels.kernel;
    let cases = [
        case("unpatched, no CPUID leaf", plain, false, HostActivity::Idle),
        case("unpatched, CPUID leaf", plain, true, HostActivity::Idle),
        case(
            "series applied, symbol off",
            &kernels.not_selected.kernel,
            true,
            HostActivity::Idle,
        ),
        case("series on, idle", on, true, HostActivity::Idle),
        case(
            "series on, 1,056 branches turned on by the host",
            on,
            true,
            HostActivity::KeysOn,
        ),
        case(
            "series on, while the host flips",
            on,
            true,
            HostActivity::Flips,
        ),
        case(
            "series on, no jump labels",
            without,
            true,
            HostActivity::Idle,
        ),
    ];
    let mut guests = Vec::new();
    for case in &cases {
        guests.push(boot(environment, case).await.context(case.name)?);
    }
    let mut ticks = vec![vec![Ticks::default(); WORKS.len()]; cases.len()];
    for _ in 0..ROUNDS {
        for ((case, guest), ticks) in cases.iter().zip(&mut guests).zip(&mut ticks) {
            for ((work, batch), ticks) in WORKS.iter().zip(ticks) {
                let (least, median) = run(guest, case, work, *batch).await?;
                ticks.least.push(least);
                ticks.median.push(median);
            }
        }
    }
    println!(
        "Ticks of the time-stamp counter per operation (in the lab: instructions of guest and lab), least / \
         median of {ROUNDS} turns of {SAMPLES} samples, and in brackets the least as a multiple of the first row:\n"
    );
    let heads = WORKS.map(|(work, _)| work);
    println!("| | {} |", heads.join(" | "));
    println!("|---{}|", "|---".repeat(WORKS.len()));
    for (case, row) in cases.iter().zip(&ticks) {
        let cells = row.iter().zip(&ticks[0]).map(|(ticks, first)| {
            let [least, base] = [ticks, first].map(|ticks| smallest(&ticks.least));
            let median = middle(&ticks.median);
            format!("{least:.1} / {median:.1} ({:.4})", least / base)
        });
        println!(
            "| {} | {} |",
            case.name,
            cells.collect::<Vec<_>>().join(" | ")
        );
    }
    for mut guest in guests {
        guest.assert_no_warnings().await?;
    }
    Ok(true)
}

async fn boot(environment: &Environment, case: &Case<'_>) -> Result<Guest> {
    // KASLR is off, because the addresses determine the number of page tables.
    let mut builder = Guest::builder(environment)
        .kernel(case.kernel)
        .command_line("nokaslr");
    if !case.leaf {
        builder = builder.argument("--no-patchbay");
    }
    let mut guest = builder.boot().await?;
    if case.host != HostActivity::Idle {
        guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
        guest.assert_registered().await?;
    }
    if case.host == HostActivity::KeysOn {
        let mut names: Vec<String> = (0..1000).map(key).collect();
        names.push("patchbay_test:many_key".to_owned());
        flip(&mut guest, &names, KeyOp::Enable).await?;
    }
    Ok(guest)
}

fn key(number: usize) -> String {
    format!("patchbay_test:bench_key_{number:03}")
}

async fn flip(guest: &mut Guest, names: &[String], op: KeyOp) -> Result<()> {
    let update = |name: &String| KeyUpdate {
        name: name.clone(),
        op: op.into(),
        ..Default::default()
    };
    let request = UpdateStaticKeysRequest {
        updates: names.iter().map(update).collect(),
        ..Default::default()
    };
    guest.static_keys().update_static_keys(request).await?;
    Ok(())
}

/// Returns the minimum and the median of an operation's ticks.
async fn run(guest: &mut Guest, case: &Case<'_>, work: &str, batch: u32) -> Result<(f64, f64)> {
    let command = format!("cost_tool {work} {batch} {SAMPLES}");
    let answer = if case.host == HostActivity::Flips {
        let mut keys = guest.static_keys();
        let flips = async {
            for number in (0..1000).cycle() {
                for op in [KeyOp::Enable, KeyOp::Disable] {
                    let request = UpdateStaticKeysRequest {
                        updates: vec![KeyUpdate {
                            name: key(number),
                            op: op.into(),
                            ..Default::default()
                        }],
                        ..Default::default()
                    };
                    keys.update_static_keys(request).await?;
                }
            }
            Ok::<_, anyhow::Error>(())
        };
        tokio::select! {
            answer = guest.shell(&command) => answer?,
            failed = flips => {
                failed?;
                anyhow::bail!("the flips have ended")
            }
        }
    } else {
        guest.shell(&command).await?
    };
    let context = || format!("cost_tool says {answer}");
    let (least, median) = answer.trim().split_once(' ').with_context(context)?;
    let each = |ticks: &str| Ok::<_, anyhow::Error>(ticks.parse::<f64>()? / f64::from(batch));
    Ok((each(least)?, each(median)?))
}

fn smallest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn middle(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
