// SPDX-License-Identifier: Apache-2.0
//! Tests a guest in which one process takes the CPU for ever, so that neither a shell nor an agent
//! runs: its log and its state are read, and its keys are flipped.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{CpuTask, KeyOp};
use patchbay_tests::{Guest, StockKernel, TestGuest, until};
use serde_json::Value;

use super::state::state;
use crate::snapshot::{patchbay, verify};

const KEY: &str = "sched_schedstats";
/// `examples/sick-guest/hog.c`. The time is longer than the test.
const HOG: &str = "hog 100000";
/// The guest's time for which nothing else may run.
const SECONDS: u64 = 5;

#[tokio::test]
async fn keys_of_debian_6_1_cloud_flip_while_no_other_process_runs() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_1") else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel)
        .argument("--allow-guarded")
        .boot()
        .await?;
    let ticks = "(while :; do echo tick >/dev/kmsg; sleep 0.2; done) &";
    guest.shell(ticks).await?;
    guest.console().type_line(HOG).await?;
    until(async || Ok(runs_the_hog(&state(&mut guest).await?.tasks))).await?;

    let ticks = count_ticks(&kernel, &guest).await?;
    ensure!(ticks > 0, "the log has no record of the loop");
    let began = uptime(&mut guest).await?;
    until(async || Ok(uptime(&mut guest).await? >= began + SECONDS)).await?;
    ensure!(
        count_ticks(&kernel, &guest).await? == ticks,
        "another process runs"
    );

    for (op, enabled) in [(KeyOp::Inc, true), (KeyOp::Dec, false)] {
        guest.update(&[(KEY, op)]).await?;
        let key = guest.key(KEY).await?;
        ensure!(key.enabled == enabled, "{key:?}");
        let verified = verify(&guest.channel()).await?;
        ensure!(
            verified.keys > 1000 && verified.torn_total == 0,
            "{verified:?}"
        );
    }

    let words = ["guest", "autopsy", "-o", "json"];
    let autopsy = patchbay(&kernel.cli, guest.socket(), &words).await?;
    let autopsy: Value = serde_json::from_str(&autopsy)?;
    ensure!(
        autopsy["missing"] == serde_json::json!({}),
        "{}",
        autopsy["missing"]
    );
    let tasks = autopsy["guest"]["details"]["tasks"].to_string();
    ensure!(tasks.contains("hog"), "{tasks}");
    ensure!(runs_the_hog(&state(&mut guest).await?.tasks));
    Ok(())
}

fn runs_the_hog(tasks: &[CpuTask]) -> bool {
    tasks.iter().any(|task| task.cpu == 0 && task.name == "hog")
}

async fn uptime(guest: &mut Guest) -> Result<u64> {
    state(guest).await?.uptime_seconds.context("no uptime")
}

/// Returns the number of records in the guest's log that the loop has written.
async fn count_ticks(kernel: &StockKernel, guest: &Guest) -> Result<usize> {
    let log = patchbay(&kernel.cli, guest.socket(), &["guest", "log"]).await?;
    Ok(log.lines().filter(|line| line.ends_with("tick")).count())
}
