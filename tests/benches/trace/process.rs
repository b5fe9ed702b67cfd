// SPDX-License-Identifier: Apache-2.0
//! Reads the CPU time and the memory of a process.

use std::time::Duration;

use anyhow::{Context, Result};

/// The length of a tick in /proc/PID/stat. Linux reports 100 ticks per second on x86
/// (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// Returns the CPU time of all threads of a process, including those that have ended.
pub fn time(pid: &str) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name of the program, which may contain spaces, is in parentheses.
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let fields: Vec<_> = fields.split_whitespace().collect();
    let ticks = |field: usize| {
        let ticks = fields.get(field).context("too few fields")?;
        Ok::<u32, anyhow::Error>(ticks.parse()?)
    };
    // These are utime and stime, the 14th and 15th field of the file.
    Ok(TICK * (ticks(11)? + ticks(12)?))
}
