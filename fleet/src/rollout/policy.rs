// SPDX-License-Identifier: Apache-2.0
//! The terms of a rollout, as its spec gives them.

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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GateKind {
    /// At most this share of a wave's guests has failed.
    Errors { max_percent: u32 },
    /// The 99th percentile of a wave's pauses.
    PauseP99 { budget_us: u64 },
    /// An external command that must end with 0 in time.
    Command { argv: Vec<String>, timeout_ms: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gate {
    pub kind: GateKind,
    pub on_failure: OnFailure,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    pub caps: Caps,
    pub gates: Vec<Gate>,
    pub freezes: Vec<Freeze>,
    /// Distinct principals that must start it.
    pub approvals: usize,
}

impl Policy {
    /// The freeze that `now` lies in; of several the one that ends last.
    pub fn frozen(&self, now: Millis) -> Option<&Freeze> {
        let inside = |freeze: &&Freeze| freeze.from <= now && now < freeze.until;
        let frozen = self.freezes.iter().filter(inside);
        frozen.max_by_key(|freeze| freeze.until)
    }
}
