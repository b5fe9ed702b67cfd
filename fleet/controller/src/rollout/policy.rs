// SPDX-License-Identifier: Apache-2.0
//! Defines the conditions of a rollout, which come from its spec.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::state::Millis;

/// Limits on the number of guests that are `Claiming` at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    pub count: Option<u32>,
    /// The percentage of the rollout's guests, rounded down, but at least one guest.
    pub percent: Option<u32>,
    pub per_domain: Option<u32>,
}

impl Caps {
    /// Returns the maximum number of guests at the same time in a rollout with `guests` guests.
    pub fn total(&self, guests: usize) -> usize {
        let count = self.count.map_or(usize::MAX, |count| count as usize);
        let percent = self.percent.map_or(usize::MAX, |percent| {
            (guests.saturating_mul(percent as usize) / 100).max(1)
        });
        count.min(percent)
    }

    /// Returns the maximum number of guests at the same time in one failure domain.
    pub fn per_domain(&self) -> usize {
        self.per_domain.map_or(usize::MAX, |count| count as usize)
    }
}

/// A period in which no guest is changed. It begins at `from` and ends immediately before `until`.
/// Undoing changes continues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    pub from: Millis,
    pub until: Millis,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnFailure {
    Pause,
    Abort,
}

/// The treatment of a guest that was changed and has booted again, without the claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AfterReboot {
    /// The guest is changed again, as far as the caps allow.
    #[default]
    Again,
    Leave,
}

/// Limits on the reports of a wave's agents. A guest that has booted since its wave began always
/// breaks them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLimits {
    /// The maximum number of kernel warnings since the wave began.
    pub new_warnings: Option<u64>,
    /// The maximum percentage of the last 60 s in which some task waited for the resource, "cpu",
    /// "memory" or "io".
    pub pressure: BTreeMap<String, u32>,
    /// The maximum percentage of the wave's changed guests that may break the limits.
    pub unhealthy_percent: u32,
}

/// The guests of which [`WaveGateKind::Errors`] takes the percentage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorsOf {
    #[default]
    Wave,
    Rollout,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WaveGateKind {
    /// The maximum percentage of the guests that are not as wanted although the rollout has tried.
    Errors { max_percent: u32, of: ErrorsOf },
    /// The maximum of the 99th percentile of a wave's pauses.
    PauseP99 { budget_us: u64 },
    /// A command line from a spec of an earlier version. It is never run.
    Command { argv: Vec<String>, timeout_ms: u64 },
    /// A command in the controller's configuration. It must exit with status 0 before the timeout.
    NamedCommand { name: String, timeout_ms: u64 },
    /// The health that the agents of the wave's guests report.
    AgentHealth {
        limits: AgentLimits,
        timeout_ms: u64,
    },
    /// `grpc.health.v1.Health/Check` of a service must answer SERVING. An empty name denotes the
    /// whole server.
    Grpc {
        url: String,
        service: String,
        timeout_ms: u64,
    },
    /// Every sample of an instant query must lie between the bounds, and there must be at least one
    /// sample.
    Prometheus {
        url: String,
        query: String,
        above: Option<f64>,
        below: Option<f64>,
        timeout_ms: u64,
    },
}

impl WaveGateKind {
    /// Returns whether the gate closes as soon as too many guests have failed.
    pub fn is_of_errors(&self) -> bool {
        matches!(self, Self::Errors { .. })
    }

    /// Returns the timeout of a gate that needs external information; `None` for other gates.
    pub fn timeout_ms(&self) -> Option<u64> {
        match self {
            Self::Errors { .. } | Self::PauseP99 { .. } => None,
            Self::Command { timeout_ms, .. }
            | Self::NamedCommand { timeout_ms, .. }
            | Self::AgentHealth { timeout_ms, .. }
            | Self::Grpc { timeout_ms, .. }
            | Self::Prometheus { timeout_ms, .. } => Some(*timeout_ms),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaveGate {
    pub kind: WaveGateKind,
    pub on_failure: OnFailure,
    /// The time between two evaluations of a gate that needs external information.
    pub interval_ms: u64,
    /// The time for which the gate may be inconclusive before the rollout is paused.
    pub patience_ms: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    pub caps: Caps,
    pub gates: Vec<WaveGate>,
    pub freezes: Vec<Freeze>,
    /// The number of distinct principals that must approve before the start.
    pub approvals: usize,
    /// The number of guests of each wave that must be as wanted before the next wave begins.
    pub min_success: usize,
    pub after_reboot: AfterReboot,
    /// True if guarded keys may be claimed. Commands for the rollout then require the role admin.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_guarded: bool,
}

impl Policy {
    /// Returns whether a gate compares each guest with its agent's report before the change.
    pub fn observes_agents(&self) -> bool {
        let is_observing = |gate: &WaveGate| matches!(gate.kind, WaveGateKind::AgentHealth { .. });
        self.gates.iter().any(is_observing)
    }

    /// Returns the freeze that contains `now`. If there are several, it is the one that ends last.
    pub fn frozen(&self, now: Millis) -> Option<&Freeze> {
        let inside = |freeze: &&Freeze| freeze.from <= now && now < freeze.until;
        let frozen = self.freezes.iter().filter(inside);
        frozen.max_by_key(|freeze| freeze.until)
    }
}
