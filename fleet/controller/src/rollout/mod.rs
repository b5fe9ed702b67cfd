// SPDX-License-Identifier: Apache-2.0
//! A rollout as a state machine: no I/O, no clock, no threads.
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
//! A driver calls [`Rollout::step`], saves what [`Rollout::take_changes`] names, performs the
//! actions, and reports each outcome. It may die between any two of these. Another then loads what
//! was saved and calls `step`: every action whose outcome was not saved is returned again. All
//! actions are idempotent, because a commit names its plan and an inverse carries a request id. So
//! no op is applied twice.
//!
//! A driver's calls must end with it: the runner drops its connections when it loses the election.
//!
//! What is guaranteed, whatever order the calls come in (`tests.rs` tries them):
//!
//! * A guest is `Committing` in the store before its commit is sent. At most as many guests as the
//!   caps allow are `Committing`, in all and in each failure domain.
//! * Nothing is committed while the rollout is planned, paused or frozen, or for the first time
//!   while it reverts. Reverting is subject to no cap and no freeze.
//! * Abort and undo are legal in every phase. When they end, no guest is `Committed`.
//! * With a gate on the agents' health, a guest is not committed before what its agent reports is
//!   saved.
//! * A guest whose commit has an unknown outcome is never taken for unchanged: it is committed
//!   again before it is reverted, which says what the first commit did.

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
    /// Waits for the gates that ask somebody else; another driver asks them again.
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
    /// Whether the rollout owns the keys of its guests, so that another may not plan with them.
    pub fn is_active(self) -> bool {
        !matches!(self, Self::Completed | Self::Ended(_))
    }

    /// Whether the rollout wants its changed guests to stay as they are.
    pub fn has_desired_state(self) -> bool {
        matches!(self, Self::Running(_) | Self::Paused | Self::Completed)
    }
}

/// Why a commit changed nothing, or may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The plan can never be committed: it is stale, or gone with its guest.
    Final,
    /// The guest was busy; resume tries again.
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
    /// The commit may have been sent. `attempt` counts the answers that said nothing about it.
    Committing {
        attempt: u32,
        not_before: Millis,
    },
    /// Failed with an unknown outcome, and waits for its commit to be sent again.
    Unresolved,
    Committed {
        pause_us: u64,
    },
    Failed {
        failure: Failure,
        why: String,
    },
    /// `void`: the guest had dropped the change by itself (TTL, reboot).
    Reverted {
        void: bool,
    },
    RevertFailed {
        why: String,
        pause_us: u64,
    },
    /// It drifted, and an operator took it as it is. Abort and undo leave it.
    Adopted,
}

/// An op of the inverse, as `patchbay.v1.KeyUpdate` has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InverseOp {
    pub key: String,
    pub op: i32,
    pub times: u32,
}

/// A tracepoint that an op of the spec selected on the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracepoint {
    /// Index of the op.
    pub op: usize,
    /// "system:name"
    pub event: String,
    pub key: String,
}

/// What the guest has prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedPlan {
    pub plan_id: String,
    /// What it was prepared with.
    pub request_id: String,
    pub digest: String,
    pub incarnation: String,
    pub keys: u32,
    pub sites: u32,
    pub predicted_pause_us: u64,
    /// The request that prepared it named the keys of these.
    pub tracepoints: Vec<Tracepoint>,
    pub inverse: Vec<InverseOp>,
}

impl PreparedPlan {
    /// Names of the tracepoints that the plan changes.
    pub fn changed_tracepoints(&self) -> Vec<String> {
        let keys: BTreeSet<&str> = self.inverse.iter().map(|op| op.key.as_str()).collect();
        let changed = self.tracepoints.iter();
        let changed = changed.filter(|tracepoint| keys.contains(tracepoint.key.as_str()));
        changed.map(|tracepoint| tracepoint.event.clone()).collect()
    }
}

/// What a guest's agent reported when its wave began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub boot_id: String,
    pub kernel_warnings: u64,
}

/// A guest of a rollout. Members of a wave lie side by side, skipped ones after the last wave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub host: String,
    pub guest: String,
    /// Its value of the label that caps count by; empty if they count by none.
    pub domain: String,
    pub plan: PreparedPlan,
    /// Set before the commit if a gate compares with it.
    pub health: Option<Health>,
    pub state: State,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wave {
    pub name: String,
    /// Index of its first member.
    pub first: usize,
    pub count: usize,
    pub bake_ms: u64,
    /// Set when its members have settled for the first time.
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
    /// Empty if the controller did it by itself.
    pub principal: String,
    pub text: String,
}

/// What is stored of a rollout beside its members.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub name: String,
    pub title: String,
    /// Identifies the request that planned it.
    pub spec_digest: String,
    /// Over the spec, the waves and the plans.
    pub digest: String,
    pub phase: Phase,
    /// Why it is in this phase; empty if there is nothing to say.
    pub message: String,
    /// Index of the wave under way.
    pub wave: usize,
    pub waves: Vec<Wave>,
    pub policy: Policy,
    pub approvals: Vec<String>,
    pub timeline: Vec<TimelineEntry>,
    pub members: usize,
    pub created: Millis,
    /// The trace of the call that planned it, 32 hexadecimal digits; empty if it named none.
    pub trace_id: String,
}

impl Header {
    /// The trace that all changes of the rollout belong to: that of the call that planned it, or
    /// else the first half of the plan's digest.
    pub fn trace(&self) -> u128 {
        let id = match self.trace_id.as_str() {
            "" => self.digest.get(..32).unwrap_or_default(),
            id => id,
        };
        u128::from_str_radix(id, 16).unwrap_or(0)
    }
}

/// The header, the members, and what only the driver that runs it knows.
#[derive(Clone, Debug)]
pub struct Rollout {
    header: Header,
    members: Vec<Member>,
    run: machine::Run,
}
