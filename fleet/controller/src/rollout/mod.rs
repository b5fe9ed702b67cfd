// SPDX-License-Identifier: Apache-2.0
//! Implements a rollout as a state machine without I/O, clocks and threads.
//!
//! ```text
//!             start                      every wave is done
//!  Planned ──────────▶ Running ───────────────────────────────▶ Completed
//!     │                 │   ▲                                       │
//!     │   pause, a gate │   │ resume                                │
//!     │                 ▼   │                                       │
//!     │                Paused ──promote──▶ Running                  │
//!     │                   │                                         │
//!     └───────────────────┴── abort, undo, a gate ──────────────────┘
//!                               ▼
//!                           Reverting ──nothing is left──▶ Aborted, Undone
//!
//!  in a wave:  Committing ──all settled──▶ Baking ──over──▶ Gating ──passed──▶ next wave
//!
//!  a guest:    Pending ──▶ Committing ──▶ Committed ──▶ Reverted
//!                 ▲            │ ▲            └──▶ RevertFailed ──abort, undo──▶ Committed
//!                 │            ▼ └─────────────────────────────── Unresolved
//!                 └──resume── Failed ──resume, abort, undo if unknown──▶┘
//! ```
//!
//! A driver calls [`Rollout::step`], saves the changes that [`Rollout::take_changes`] names,
//! performs the actions, and reports each outcome. It may be killed between any two of these steps.
//! Another driver then loads the saved state and calls `step`, which returns again every action
//! whose outcome was not saved. All actions are idempotent, because a commit names its plan and an
//! inverse carries a request id. Therefore, no op is applied twice.
//!
//! A driver's calls must end with the driver. For that reason, the runner drops its connections
//! when it loses the election.
//!
//! The machine guarantees the following for any order of calls (tested in `tests.rs`):
//!
//! * A guest is `Committing` in the store before its commit is sent. At most as many guests as the
//!   caps allow are `Committing`, in all and in each failure domain.
//! * No commit is started while the rollout is planned, paused or frozen. While it reverts, no
//!   guest is committed for the first time. Reverting is subject to no cap and no freeze.
//! * Abort and undo are legal in every phase. When they end, no guest is `Committed`.
//! * With a gate on the agents' health, a guest is not committed before its agent's report is
//!   saved.
//! * A guest whose commit has an unknown outcome is never assumed to be unchanged. It is committed
//!   again before it is reverted, which reveals the outcome of the first commit.

mod amend;
mod gates;
mod legal;
mod machine;
mod policy;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use self::legal::{NotLegal, Verb};
pub use self::machine::{Action, CommitOutcome, RevertOutcome, Step};
pub use self::policy::{AgentLimits, Caps, Freeze, Gate, GateKind, OnFailure, Policy};

/// Milliseconds since the epoch, UTC.
pub type Millis = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    Committing,
    Baking,
    /// Waits for gates that need external information. Another driver evaluates them again.
    Gating,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    Aborted,
    Undone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    Planned,
    Running(Stage),
    Paused,
    Completed,
    Reverting(End),
    Ended(End),
}

impl Phase {
    /// Returns whether the rollout owns the keys of its guests, so that no other rollout may plan
    /// with them.
    pub fn is_active(self) -> bool {
        !matches!(self, Self::Completed | Self::Ended(_))
    }

    /// Returns whether the rollout requires that its changed guests stay changed.
    pub fn has_desired_state(self) -> bool {
        matches!(self, Self::Running(_) | Self::Paused | Self::Completed)
    }
}

/// The reason why a commit changed nothing, or may have changed the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The plan can never be committed, because it is stale or was lost with its guest.
    Final,
    /// The guest was busy; resume retries.
    Busy,
    /// No answer came. The commit may have been made.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Skipped {
        why: String,
    },
    Pending,
    /// The commit may have been sent. `attempt` counts the answers that did not reveal its outcome.
    Committing {
        attempt: u32,
        not_before: Millis,
    },
    /// The commit failed with an unknown outcome and waits to be sent again.
    Unresolved,
    Committed {
        pause_us: u64,
    },
    Failed {
        failure: Failure,
        why: String,
    },
    /// The change is undone. `void` means that the guest had already dropped it (TTL, reboot).
    Reverted {
        void: bool,
    },
    RevertFailed {
        why: String,
        pause_us: u64,
    },
    /// The guest drifted, and an operator accepted its state. Abort and undo do not change it.
    Adopted,
}

/// An op of the inverse, with the fields of `patchbay.v1.KeyUpdate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InverseOp {
    pub key: String,
    pub op: i32,
    pub times: u32,
}

/// A tracepoint that an op of the spec selected on the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracepoint {
    /// The index of the op.
    pub op: usize,
    /// The name, "system:name".
    pub event: String,
    pub key: String,
}

/// A plan that the guest has prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedPlan {
    pub plan_id: String,
    /// The id of the request that prepared it.
    pub request_id: String,
    pub digest: String,
    pub incarnation: String,
    pub keys: u32,
    pub sites: u32,
    pub predicted_pause_us: u64,
    /// The tracepoints whose keys the request named.
    pub tracepoints: Vec<Tracepoint>,
    pub inverse: Vec<InverseOp>,
}

impl PreparedPlan {
    /// Returns the names of the tracepoints that the plan changes.
    pub fn changed_tracepoints(&self) -> Vec<String> {
        let keys: BTreeSet<&str> = self.inverse.iter().map(|op| op.key.as_str()).collect();
        let changed = self.tracepoints.iter();
        let changed = changed.filter(|tracepoint| keys.contains(tracepoint.key.as_str()));
        changed.map(|tracepoint| tracepoint.event.clone()).collect()
    }
}

/// The report of a guest's agent when the guest's wave began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub boot_id: String,
    pub kernel_warnings: u64,
}

/// A guest of a rollout. The members of a wave are adjacent, and skipped ones come after the last
/// wave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub host: String,
    pub guest: String,
    /// The value of the label by which caps count; empty if there is no such label.
    pub domain: String,
    pub plan: PreparedPlan,
    /// The health before the commit, set if a gate compares with it.
    pub health: Option<Health>,
    pub state: State,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wave {
    pub name: String,
    /// The index of the wave's first member.
    pub first: usize,
    pub count: usize,
    pub bake_ms: u64,
    /// The end of the bake time, set when the members have settled for the first time.
    pub bakes_until: Option<Millis>,
}

impl Wave {
    pub fn members(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.count
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineEntry {
    pub time: Millis,
    /// The principal; empty for the controller's own actions.
    pub principal: String,
    pub text: String,
}

/// The stored state of a rollout without its members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub name: String,
    pub title: String,
    /// The digest of the spec's text, by which a repeated request is recognized.
    pub spec_digest: String,
    /// The digest of the spec, the waves and the plans.
    pub digest: String,
    pub phase: Phase,
    /// The reason why the rollout is in this phase; empty if there is none.
    pub message: String,
    /// The index of the present wave.
    pub wave: usize,
    pub waves: Vec<Wave>,
    pub policy: Policy,
    pub approvals: Vec<String>,
    pub timeline: Vec<TimelineEntry>,
    pub members: usize,
    pub created: Millis,
    /// The trace of the call that planned the rollout, 32 hexadecimal digits; empty if the call had
    /// none.
    pub trace_id: String,
}

impl Header {
    /// Returns the trace that all changes of the rollout belong to. It is the trace of the call
    /// that planned the rollout, or else the first half of the plan's digest.
    pub fn trace(&self) -> u128 {
        let id = match self.trace_id.as_str() {
            "" => self.digest.get(..32).unwrap_or_default(),
            id => id,
        };
        u128::from_str_radix(id, 16).unwrap_or(0)
    }
}

/// The header, the members, and the state that only the present driver has.
#[derive(Clone, Debug)]
pub struct Rollout {
    header: Header,
    members: Vec<Member>,
    run: machine::Run,
}
