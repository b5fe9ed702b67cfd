// SPDX-License-Identifier: Apache-2.0
//! Measures QEMU with the same kernel and initramfs, stopped and continued over QMP.

use std::time::Instant;

use anyhow::Result;
use patchbay_tests::{Environment, Qemu};
use serde_json::json;

use crate::figures::Samples;

/// Durations of QMP commands, from sending the command to its answer.
#[derive(Debug, Default)]
pub struct Times {
    pub stop: Samples,
    pub cont: Samples,
    pub both: Samples,
}

/// Measures `stop` and `cont`; `None` if QEMU is not installed.
pub async fn measure(
    environment: &Environment,
    vcpus: u32,
    rounds: usize,
) -> Result<Option<Times>> {
    let vcpus = vcpus.to_string();
    let options = [
        &["-accel", "kvm", "-cpu", "host", "-M", "q35", "-m", "256"][..],
        &["-smp", &vcpus],
    ];
    let append = "quiet noxsave";
    let (kernel, initramfs) = (&environment.kernel, &environment.initramfs);
    let Some(mut qemu) = Qemu::start(kernel, initramfs, append, &options.concat())? else {
        return Ok(None);
    };
    qemu.guest.wait_for_shell().await?;
    // The first command also connects.
    qemu.command("query-status", json!({})).await?;
    let mut times = Times::default();
    for _ in 0..rounds {
        let began = Instant::now();
        qemu.command("stop", json!({})).await?;
        let stopped = Instant::now();
        qemu.command("cont", json!({})).await?;
        let continued = Instant::now();
        times.stop.add(stopped - began);
        times.cont.add(continued - stopped);
        times.both.add(continued - began);
        // The guest continues its work in this time.
        tokio::time::sleep(super::BETWEEN).await;
    }
    Ok(Some(times))
}
