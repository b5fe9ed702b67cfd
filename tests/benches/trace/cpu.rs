// SPDX-License-Identifier: Apache-2.0
//! Reads the CPU time of a guest's monitor, of this process and of programs in the guest.

use std::time::Duration;

use anyhow::{Context, Result};
use patchbay_tests::Guest;

use crate::process;

/// CPU times, or differences of them.
#[derive(Clone, Copy, Default)]
pub struct Cpu {
    /// The vCPUs' threads, the guest's own work included.
    pub vcpus: Duration,
    /// The other threads of the monitor, which read and serve events.
    pub monitor: Duration,
    /// This process, which is the client.
    pub client: Duration,
    /// The program in the guest that reads events.
    pub in_guest: Duration,
}

impl Cpu {
    /// Reads the times of the monitor, of this process, and of the program `name` in the guest.
    pub async fn read(guest: &mut Guest, name: Option<&str>) -> Result<Self> {
        let in_guest = match name {
            Some(name) => time_in_guest(guest, name).await?,
            None => Duration::ZERO,
        };
        let pid = guest.monitor_pid().context("the monitor runs")?;
        Ok(Self {
            vcpus: vcpus(pid)?,
            monitor: without_vcpus(pid)?,
            client: process::time("self")?,
            in_guest,
        })
    }

    /// Returns the times since `before`.
    pub fn since(&self, before: &Self) -> Self {
        self.with(before, Duration::saturating_sub)
    }

    pub fn plus(&self, more: &Self) -> Self {
        self.with(more, Duration::saturating_add)
    }

    fn with(&self, other: &Self, combine: impl Fn(Duration, Duration) -> Duration) -> Self {
        Self {
            vcpus: combine(self.vcpus, other.vcpus),
            monitor: combine(self.monitor, other.monitor),
            client: combine(self.client, other.client),
            in_guest: combine(self.in_guest, other.in_guest),
        }
    }
}

/// Returns the time of the other threads of a monitor, or of an attacher, which has no vCPUs.
pub fn without_vcpus(pid: u32) -> Result<Duration> {
    let all = process::time(&pid.to_string())?;
    Ok(all.saturating_sub(vcpus(pid)?))
}

/// Returns the time of the vCPUs' threads of a monitor.
fn vcpus(pid: u32) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let folder = thread?.path();
        let Ok(name) = std::fs::read_to_string(folder.join("comm")) else {
            continue;
        };
        if name.starts_with("vcpu") {
            sum += run_time(&std::fs::read_to_string(folder.join("schedstat"))?)?;
        }
    }
    Ok(sum)
}

/// Returns the time of all processes with this name in the guest.
async fn time_in_guest(guest: &mut Guest, name: &str) -> Result<Duration> {
    let command =
        format!("for pid in $(pidof {name}); do cat /proc/$pid/task/*/schedstat; done; true");
    let lines = guest.shell(&command).await?;
    lines.lines().map(run_time).sum()
}

/// Parses the time on a CPU, the first number of a line of schedstat.
fn run_time(line: &str) -> Result<Duration> {
    let first = line.split_whitespace().next().context("no number")?;
    Ok(Duration::from_nanos(first.parse()?))
}
