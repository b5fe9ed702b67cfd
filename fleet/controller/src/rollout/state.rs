// SPDX-License-Identifier: Apache-2.0
//! Defines the saved state of a rollout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::keys::KeySet;
use super::policy::Policy;

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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    #[default]
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

/// The kinds of failed commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The guest refused the commit and would refuse a repeat, for example because the plan is
    /// stale.
    Final,
    /// The guest was busy, or could not be observed before the commit. Resume retries.
    Busy,
    /// No answer revealed the outcome, so the commit may have been made.
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

/// A plan that the guest has prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedPlan {
    pub plan_id: String,
    /// The id of the request that prepared it. The first rollouts have none.
    #[serde(default)]
    pub request_id: String,
    pub digest: String,
    pub incarnation: String,
    pub keys: u32,
    pub sites: u32,
    pub predicted_pause_us: u64,
    /// It is stored by itself.
    #[serde(skip)]
    pub set: Arc<KeySet>,
}

/// The report of a guest's agent when the guest's wave began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub boot_id: String,
    pub kernel_warnings: u64,
}

/// A guest of a rollout. The members of a wave are adjacent, and skipped ones come after the last
/// wave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub host: String,
    pub guest: String,
    /// The value of the host's label that names the failure domain; empty if there is none.
    pub domain: String,
    pub plan: PreparedPlan,
    /// The health before the commit. It is set if a gate compares with it.
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    #[serde(default)]
    pub trace_id: String,
    /// A random text by which the requests of rollouts with the same name are told apart. It is
    /// empty in version 1, whose requests keep their ids.
    #[serde(default)]
    pub run: String,
}

impl Header {
    /// Returns the beginning of the ids of all requests of the rollout.
    pub fn request_prefix(&self) -> String {
        match &*self.run {
            "" => format!("fleet/{}", self.name),
            run => format!("fleet/{}/{run}", self.name),
        }
    }

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
    pub(super) header: Header,
    pub(super) members: Vec<Member>,
    pub(super) run: Run,
}

/// The state that is not stored. It is empty when a driver starts.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// Members for which `step` has returned an action whose outcome is not reported yet.
    pub(super) in_flight: BTreeSet<usize>,
    /// The gates of the wave for which `step` has returned an action whose outcome is not reported
    /// yet. `passed` contains the gates that have passed.
    pub(super) asked: BTreeSet<usize>,
    pub(super) passed: BTreeSet<usize>,
    /// The number of failed attempts to revert a member, and the time of the next attempt.
    pub(super) reverts: BTreeMap<usize, (u32, Millis)>,
    /// The parts that are to be stored.
    pub(super) changed: BTreeSet<usize>,
    pub(super) header_changed: bool,
    /// The digests of the sets of keys that are stored.
    pub(super) stored_sets: BTreeSet<String>,
}

/// The parts of a rollout that are to be stored.
#[derive(Debug, Default)]
pub struct Changes {
    /// Sets of keys that no earlier change contained.
    pub sets: Vec<Arc<KeySet>>,
    /// The indices of members.
    pub members: Vec<usize>,
    pub header: bool,
}
