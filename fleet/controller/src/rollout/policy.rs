// SPDX-License-Identifier: Apache-2.0
//! The terms of a rollout, as its spec gives them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Millis;

/// How many guests may be `Committing` at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    pub count: Option<u32>,
    /// Share of the rollout's guests, rounded down, but at least one guest.
    pub percent: Option<u32>,
    pub per_domain: Option<u32>,
}

impl Caps {
    /// The most guests at once of a rollout with this many.
    pub fn total(&self, guests: usize) -> usize {
        let count = self.count.map_or(usize::MAX, |count| count as usize);
        let percent = self.percent.map_or(usize::MAX, |percent| {
            (guests.saturating_mul(percent as usize) / 100).max(1)
        });
        count.min(percent)
    }

    /// The most guests at once in one failure domain.
    pub fn per_domain(&self) -> usize {
        self.per_domain.map_or(usize::MAX, |count| count as usize)
    }
}

/// No guest is changed from `from` up to `until`. Reverting goes on.
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

/// What the agents of a wave's guests may report. A guest that has booted since its wave began is
/// refused in any case.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLimits {
    /// Kernel warnings since the wave began.
    pub new_warnings: Option<u64>,
    /// Percent of the last 60 s in which some task waited for the resource, "cpu", "memory" or
    /// "io".
    pub pressure: BTreeMap<String, u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GateKind {
    /// At most this share of a wave's guests has failed.
    Errors { max_percent: u32 },
    /// The 99th percentile of a wave's pauses.
    PauseP99 { budget_us: u64 },
    /// An external command that must end with 0 in time.
    Command { argv: Vec<String>, timeout_ms: u64 },
    /// The agents of the wave's guests.
    AgentHealth {
        limits: AgentLimits,
        timeout_ms: u64,
    },
    /// `grpc.health.v1.Health/Check` of a service must answer SERVING; an empty name is the whole
    /// server.
    Grpc {
        url: String,
        service: String,
        timeout_ms: u64,
    },
    /// Every sample of an instant query must lie between the bounds, and there must be one.
    Prometheus {
        url: String,
        query: String,
        above: Option<f64>,
        below: Option<f64>,
        timeout_ms: u64,
    },
}

impl GateKind {
    /// Whether a driver asks somebody else, and for how long at most.
    pub fn timeout_ms(&self) -> Option<u64> {
        match self {
            Self::Errors { .. } | Self::PauseP99 { .. } => None,
            Self::Command { timeout_ms, .. }
            | Self::AgentHealth { timeout_ms, .. }
            | Self::Grpc { timeout_ms, .. }
            | Self::Prometheus { timeout_ms, .. } => Some(*timeout_ms),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gate {
    pub kind: GateKind,
    pub on_failure: OnFailure,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    pub caps: Caps,
    pub gates: Vec<Gate>,
    pub freezes: Vec<Freeze>,
    /// Distinct principals that must start it.
    pub approvals: usize,
}

impl Policy {
    /// Whether a gate compares each guest with what its agent reported before the change.
    pub fn observes_agents(&self) -> bool {
        let is_observing = |gate: &Gate| matches!(gate.kind, GateKind::AgentHealth { .. });
        self.gates.iter().any(is_observing)
    }

    /// The freeze that `now` lies in; of several the one that ends last.
    pub fn frozen(&self, now: Millis) -> Option<&Freeze> {
        let inside = |freeze: &&Freeze| freeze.from <= now && now < freeze.until;
        let frozen = self.freezes.iter().filter(inside);
        frozen.max_by_key(|freeze| freeze.until)
    }
}
