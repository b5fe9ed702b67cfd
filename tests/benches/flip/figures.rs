// SPDX-License-Identifier: Apache-2.0
//! Collects samples and computes their statistics.

use std::fmt;
use std::time::Duration;

/// Repeated measurements of one duration.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<Duration>);

impl Samples {
    pub fn add(&mut self, sample: Duration) {
        let at = self.0.partition_point(|other| *other <= sample);
        self.0.insert(at, sample);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the sample at this percentile.
    pub fn percentile(&self, percent: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0
            .get((last * percent).div_ceil(100))
            .copied()
            .unwrap_or_default()
    }

    /// Returns the ratio of the medians of `self` and `other`.
    pub fn times(&self, other: &Self) -> f64 {
        self.percentile(50).as_secs_f64() / other.percentile(50).as_secs_f64()
    }
}

/// Formats p50 / p99 / max in microseconds.
impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |percent| self.percentile(percent).as_secs_f64() * 1e6;
        let text = format!("{:.0} / {:.0} / {:.0}", us(50), us(99), us(100));
        f.pad(&text)
    }
}

/// Describes the host in one line: processor, cores, load, nesting.
pub fn host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_once(':'));
        value.map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?");
    let nesting = if field("flags").split(' ').any(|flag| flag == "hypervisor") {
        "itself virtual"
    } else {
        "bare metal"
    };
    let release = read("/proc/sys/kernel/osrelease");
    format!(
        "{}, {cores} cores, load {load}, {nesting}, Linux {}",
        field("model name"),
        release.trim()
    )
}
