// SPDX-License-Identifier: Apache-2.0
//! Parses the gates of a spec.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::values::{Duration, HttpUrl, Number, Percent, checked_from};
use crate::gates::commands;
use crate::rollout::{AgentLimits, ErrorsOf, OnFailure, WaveGate, WaveGateKind};

/// The timeout of a gate if the spec gives none.
const DEFAULT_TIMEOUT_MS: u64 = 60_000;
/// The time between two evaluations of a gate, and the time for which it may be inconclusive, if
/// the spec gives none.
const DEFAULT_INTERVAL_MS: u64 = 60_000;
const DEFAULT_PATIENCE_MS: u64 = 600_000;
/// The shortest interval.
const MIN_INTERVAL_MS: u64 = 10;

checked_from!(GateSpec: GateFields);
checked_from!(AgentHealth: AgentHealthFields);
checked_from!(Prometheus: PrometheusFields);

#[derive(Clone, Debug, PartialEq)]
pub struct GateSpec(pub WaveGate);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GateFields {
    max_errors: Option<Percent>,
    pause_p99: Option<Duration>,
    command: Option<Command>,
    agent_health: Option<AgentHealth>,
    grpc: Option<Grpc>,
    prometheus: Option<Prometheus>,
    timeout: Option<Duration>,
    interval: Option<Duration>,
    patience: Option<Duration>,
    of: Option<ErrorsOf>,
    on_failure: Failure,
}

/// The name of a command, or a command line in a spec of an earlier version.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a gate's `command` is a name")]
enum Command {
    Named(String),
    Inline(Vec<String>),
}

struct AgentHealth(AgentLimits);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AgentHealthFields {
    max_new_warnings: Option<u64>,
    #[serde(default)]
    max_pressure: Pressure,
    max_unhealthy: Option<Percent>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pressure {
    cpu: Option<Percent>,
    memory: Option<Percent>,
    io: Option<Percent>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Grpc {
    url: HttpUrl,
    #[serde(default)]
    service: String,
}

struct Prometheus(PrometheusFields);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrometheusFields {
    url: HttpUrl,
    query: String,
    above: Option<Number>,
    below: Option<Number>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Failure {
    Pause,
    Abort,
}

impl TryFrom<AgentHealthFields> for AgentHealth {
    type Error = &'static str;

    fn try_from(fields: AgentHealthFields) -> Result<Self, Self::Error> {
        let Pressure { cpu, memory, io } = fields.max_pressure;
        let limits = [("cpu", cpu), ("memory", memory), ("io", io)];
        let pressure: BTreeMap<String, u32> = limits
            .into_iter()
            .filter_map(|(resource, limit)| Some((resource.to_owned(), limit?.0)))
            .collect();
        let new_warnings = fields.max_new_warnings;
        if new_warnings.is_none() && pressure.is_empty() {
            return Err(
                "agent_health limits nothing; give max_new_warnings, or max_pressure of cpu, \
                        memory or io",
            );
        }
        Ok(Self(AgentLimits {
            new_warnings,
            pressure,
            unhealthy_percent: fields.max_unhealthy.map_or(0, |Percent(percent)| percent),
        }))
    }
}

impl TryFrom<PrometheusFields> for Prometheus {
    type Error = &'static str;

    fn try_from(fields: PrometheusFields) -> Result<Self, Self::Error> {
        if fields.query.is_empty() {
            return Err("the query is empty");
        }
        match (&fields.above, &fields.below) {
            (None, None) => Err("a query is compared; give above, below or both"),
            (Some(above), Some(below)) if above.0 >= below.0 => {
                Err("no number is above and below these; above must be less than below")
            }
            _ => Ok(Self(fields)),
        }
    }
}

impl TryFrom<GateFields> for GateSpec {
    type Error = &'static str;

    fn try_from(fields: GateFields) -> Result<Self, Self::Error> {
        let timeout_ms = fields.timeout.map_or(DEFAULT_TIMEOUT_MS, Duration::millis);
        let errors = fields
            .max_errors
            .map(|Percent(max_percent)| WaveGateKind::Errors {
                max_percent,
                of: fields.of.unwrap_or_default(),
            });
        let pause = fields.pause_p99.map(|budget| WaveGateKind::PauseP99 {
            budget_us: budget.micros(),
        });
        let command = match fields.command {
            Some(Command::Named(name)) if !commands::is_name(&name) => {
                return Err("a gate's `command` is a name of 1 to 64 letters, digits, '-' and '_'");
            }
            Some(Command::Named(name)) => Some(WaveGateKind::NamedCommand { name, timeout_ms }),
            Some(Command::Inline(argv)) => Some(WaveGateKind::Command { argv, timeout_ms }),
            None => None,
        };
        let agent = fields
            .agent_health
            .map(|AgentHealth(limits)| WaveGateKind::AgentHealth { limits, timeout_ms });
        let grpc = fields.grpc.map(|grpc| WaveGateKind::Grpc {
            url: grpc.url.0,
            service: grpc.service,
            timeout_ms,
        });
        let query = fields
            .prometheus
            .map(|Prometheus(query)| WaveGateKind::Prometheus {
                url: query.url.0,
                query: query.query,
                above: query.above.map(|number| number.0),
                below: query.below.map(|number| number.0),
                timeout_ms,
            });
        let mut kinds = [errors, pause, command, agent, grpc, query]
            .into_iter()
            .flatten();
        let (Some(kind), None) = (kinds.next(), kinds.next()) else {
            return Err(
                "a gate is one of max_errors, pause_p99, command, agent_health, grpc and \
                        prometheus",
            );
        };
        let times = [fields.timeout, fields.interval, fields.patience];
        if times.iter().any(Option::is_some) && kind.timeout_ms().is_none() {
            return Err(
                "timeout, interval and patience belong to command, agent_health, grpc and \
                 prometheus",
            );
        }
        if fields.of.is_some() && !kind.is_of_errors() {
            return Err("`of` belongs to max_errors");
        }
        let interval_ms = fields
            .interval
            .map_or(DEFAULT_INTERVAL_MS, Duration::millis);
        let patience_ms = fields
            .patience
            .map_or(DEFAULT_PATIENCE_MS, Duration::millis);
        let on_failure = match fields.on_failure {
            Failure::Pause => OnFailure::Pause,
            Failure::Abort => OnFailure::Abort,
        };
        Ok(Self(WaveGate {
            kind,
            on_failure,
            interval_ms: interval_ms.max(MIN_INTERVAL_MS),
            patience_ms,
        }))
    }
}
