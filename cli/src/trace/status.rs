// SPDX-License-Identifier: Apache-2.0
//! Prints `stat` and `agent`.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::time::Duration;

use patchbay_proto::v1;
use serde::Serialize;

use super::view::{Losses, Tracepoint};
use crate::print::{self, Printable, Rows};
use crate::text::one_line;

/// Rates and losses.
#[derive(Debug, Serialize)]
pub struct Stat {
    pub tracepoints: Vec<Rate>,
    /// The rate of all events in the interval, per second.
    pub events_per_second: f64,
    pub page_bytes_per_second: f64,
    /// The losses since the monitor started.
    pub losses: Losses,
    pub streams: u32,
    /// The reader of the figures of the guest's ring buffer: "memory" or "agent".
    pub source: &'static str,
    pub buffered_events: u64,
    pub buffer_bytes: u64,
    pub overwritten_events: u64,
    /// Events that the guest has written to the ring buffer and that its own readers have consumed,
    /// since the ring buffer was emptied; only in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<Ring>,
    /// The uncertainty of the guest's clock: half of the shortest round trip, in nanoseconds.
    pub clock_error_ns: Option<i64>,
    pub stale: String,
}

#[derive(Debug, Serialize)]
pub struct Ring {
    pub written_events: u64,
    pub consumed_events: u64,
    pub written_per_second: f64,
}

#[derive(Debug, Serialize)]
pub struct Rate {
    #[serde(flatten)]
    pub tracepoint: Tracepoint,
    pub events_per_second: f64,
}

#[allow(clippy::cast_precision_loss)]
fn per_second(before: u64, after: u64, time: Duration) -> f64 {
    after.saturating_sub(before) as f64 / time.as_secs_f64()
}

/// The counters at one time.
pub struct Sample {
    pub stats: v1::GetTracepointStatsResponse,
    /// The armed tracepoints.
    pub tracepoints: Vec<v1::Tracepoint>,
}

impl Stat {
    pub fn new(before: &Sample, after: Sample, time: Duration) -> Self {
        let events: HashMap<&str, u64> = before
            .tracepoints
            .iter()
            .map(|tracepoint| (tracepoint.name.as_str(), tracepoint.events))
            .collect();
        let rate = |tracepoint: v1::Tracepoint| Rate {
            events_per_second: per_second(
                events.get(tracepoint.name.as_str()).copied().unwrap_or(0),
                tracepoint.events,
                time,
            ),
            tracepoint: tracepoint.into(),
        };
        let ring = |before: &v1::GetTracepointStatsResponse,
                    after: &v1::GetTracepointStatsResponse| Ring {
            written_events: after.written_events,
            consumed_events: after.consumed_events,
            written_per_second: per_second(before.written_events, after.written_events, time),
        };
        let is_memory = after.stats.source() == v1::TraceSource::Memory;
        Self {
            source: match is_memory {
                true => "memory",
                false => "agent",
            },
            ring: is_memory.then(|| ring(&before.stats, &after.stats)),
            tracepoints: after.tracepoints.into_iter().map(rate).collect(),
            events_per_second: per_second(before.stats.events, after.stats.events, time),
            page_bytes_per_second: per_second(
                before.stats.page_bytes,
                after.stats.page_bytes,
                time,
            ),
            losses: after.stats.losses.unwrap_or_default().into(),
            streams: after.stats.streams,
            buffered_events: after.stats.buffered_events,
            buffer_bytes: after.stats.buffer_bytes,
            overwritten_events: after.stats.overwritten_events,
            clock_error_ns: after.stats.clock_error.map(|error| {
                error
                    .seconds
                    .saturating_mul(1_000_000_000)
                    .saturating_add(error.nanos.into())
            }),
            stale: after.stats.stale,
        }
    }
}

impl Printable for Stat {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "STATE", "EVENTS", "PER SECOND"]);
        for Rate {
            tracepoint,
            events_per_second,
        } in &self.tracepoints
        {
            rows.push([
                tracepoint.name.clone(),
                tracepoint.state.to_owned(),
                tracepoint.events.to_string(),
                format!("{events_per_second:.0}"),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        let lost = match self.losses.sentence() {
            lost if lost.is_empty() => "none".to_owned(),
            lost => lost,
        };
        let clock = self.clock_error_ns.map_or("unknown".to_owned(), |error| {
            format!("±{} µs", error / 1000)
        });
        let mut text = format!(
            "{:.0} events/s and {:.0} bytes/s to {}; lost: {lost}\n\
             {} events {} in the guest's ring buffer of {} KiB, {} were overwritten; clocks agree to {clock}\n",
            self.events_per_second,
            self.page_bytes_per_second,
            print::counted(self.streams.into(), "stream"),
            self.buffered_events,
            // The events in the ring buffer of the agent's instance have yet to be sent.
            if self.ring.is_some() { "are" } else { "wait" },
            self.buffer_bytes >> 10,
            self.overwritten_events,
        );
        if let Some(ring) = &self.ring {
            let _ = writeln!(
                text,
                "{:.0} events/s are written to it, {} in all, of which readers in the guest took {}",
                ring.written_per_second, ring.written_events, ring.consumed_events,
            );
        }
        if !self.stale.is_empty() {
            let stale = one_line(&self.stale);
            let _ = writeln!(text, "the guest's figures are missing: {stale}");
        }
        text
    }

    fn names(&self) -> Vec<&str> {
        self.tracepoints
            .iter()
            .map(|rate| rate.tracepoint.name.as_str())
            .collect()
    }
}

/// The agent and the guest's health.
#[derive(Debug, Serialize)]
pub struct Agent {
    pub agent_version: String,
    pub protocol_version: u32,
    pub silent: String,
    pub no_tracing: String,
    pub kernel_release: String,
    pub build_id: String,
    pub labels: BTreeMap<String, String>,
    pub uptime_seconds: i64,
    pub load: Vec<f64>,
    pub pressure: BTreeMap<String, [f64; 2]>,
    pub memory_total_bytes: u64,
    pub memory_available_bytes: u64,
    pub agent_memory_bytes: u64,
    pub boot_id: String,
    pub kernel_warnings: u64,
    pub warnings: Vec<String>,
}

impl From<v1::DescribeAgentResponse> for Agent {
    fn from(agent: v1::DescribeAgentResponse) -> Self {
        let pressure = |pressure: v1::Pressure| {
            (
                pressure.resource,
                [pressure.average_10s, pressure.average_60s],
            )
        };
        Self {
            agent_version: agent.agent_version,
            protocol_version: agent.protocol_version,
            silent: agent.absent,
            no_tracing: agent.no_tracing,
            kernel_release: agent.kernel_release,
            build_id: agent.build_id,
            labels: agent.labels.into_iter().collect(),
            uptime_seconds: agent.uptime.map_or(0, |uptime| uptime.seconds),
            load: agent.load,
            pressure: agent.pressure.into_iter().map(pressure).collect(),
            memory_total_bytes: agent.memory_total_bytes,
            memory_available_bytes: agent.memory_available_bytes,
            agent_memory_bytes: agent.agent_memory_bytes,
            boot_id: agent.boot_id,
            kernel_warnings: agent.kernel_warnings,
            warnings: agent.warnings,
        }
    }
}

impl Printable for Agent {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["AGENT", "KERNEL", "UPTIME", "LOAD", "MEMORY AVAILABLE"]);
        let load = self.load.first().map(|load| format!("{load:.2}"));
        rows.push([
            self.agent_version.clone(),
            self.kernel_release.clone(),
            format!("{} s", self.uptime_seconds),
            load.unwrap_or_default(),
            format!("{} MiB", self.memory_available_bytes >> 20),
        ]);
        rows
    }

    fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            if !value.is_empty() {
                let _ = writeln!(text, "{name:<10} {}", one_line(&value));
            }
        };
        row(
            "Agent",
            format!(
                "{} (protocol {}, {} KiB)",
                self.agent_version,
                self.protocol_version,
                self.agent_memory_bytes >> 10
            ),
        );
        row("Silent", self.silent.clone());
        row("Tracing", self.no_tracing.clone());
        row("Kernel", self.kernel_release.clone());
        row("Build id", self.build_id.clone());
        row(
            "Labels",
            self.labels
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect::<Vec<_>>()
                .join(" "),
        );
        row("Uptime", format!("{} s", self.uptime_seconds));
        row(
            "Load",
            self.load
                .iter()
                .map(|load| format!("{load:.2}"))
                .collect::<Vec<_>>()
                .join(" "),
        );
        row(
            "Memory",
            format!(
                "{} of {} MiB available",
                self.memory_available_bytes >> 20,
                self.memory_total_bytes >> 20
            ),
        );
        for (resource, [short, long]) in &self.pressure {
            row(
                "Pressure",
                format!("{resource:<12} {short:.2} % over 10 s, {long:.2} % over 60 s"),
            );
        }
        if self.kernel_warnings > 0 {
            let count = self.kernel_warnings;
            row(
                "Errors",
                format!("{count} reported by the kernel since boot"),
            );
        }
        for warning in &self.warnings {
            row("Warning", warning.clone());
        }
        text
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.kernel_release]
    }
}
