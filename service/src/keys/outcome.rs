// SPDX-License-Identifier: Apache-2.0
//! Results of requests.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::advice::Known;
use super::error::KeyRefusal;
use super::holds::Hold;
use super::incarnation::{HoldId, Incarnation};

/// The result of an update.
#[derive(Clone, Debug, Default)]
pub struct UpdateOutcome {
    /// One per key, in the order of its first op; empty if only the summary was requested.
    pub results: Vec<KeyOutcome>,
    /// Totals.
    pub summary: UpdateSummary,
    /// The journal's newest revision after the update.
    pub revision: u64,
    /// The cost of the change; `None` if it was only validated.
    pub report: Option<FlipReport>,
}

/// The result for one key.
#[derive(Clone, Debug)]
pub struct KeyOutcome {
    /// "name" or "module:name".
    pub key: Arc<str>,
    /// `static_key_count()` before.
    pub count_before: i32,
    /// `static_key_count()` after.
    pub count_after: i32,
    /// Sites of this key that were patched.
    pub sites_patched: u32,
    /// Etag after the update, or the current one if nothing was changed.
    pub etag: Arc<str>,
    /// Id of the hold that took the references; `None` if none was taken.
    pub hold_id: Option<HoldId>,
    /// The catalogue's entry for a guarded key.
    pub known: Option<Known>,
}

/// Totals of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateSummary {
    /// Keys of all ops.
    pub keys: u32,
    /// Keys whose count changed.
    pub keys_changed: u32,
    /// Sites that were patched.
    pub sites_patched: u32,
    /// Guarded or sealed keys that patterns matched and the update left out.
    pub keys_left_out: u32,
}

/// Keys that selections matched and left out for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Guarded, sealed or never.
    pub reason: KeyRefusal,
    /// Number of keys.
    pub count: usize,
    /// The first names in alphabetical order.
    pub names: Vec<Arc<str>>,
}

/// The cost of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlipReport {
    /// The parts of the pause; `None` if the guest was not stopped.
    pub pause: Option<PauseTimes>,
    /// Number of sites of all keys that were patched.
    pub sites_patched: u32,
    /// 1 plus the attempts that found a gate closed.
    pub attempts: u32,
}

/// The parts of a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PauseTimes {
    /// Time from the request to stop until the last vCPU had stopped.
    pub stop: Duration,
    /// Time of verifying and writing, during which all vCPUs are stopped.
    pub patch: Duration,
    /// Time from the end of the writes until the last vCPU had left the pause.
    pub resume: Duration,
}

/// A prepared change.
#[derive(Clone, Debug)]
pub struct PrepareOutcome {
    /// Id for commit and discard.
    pub plan_id: String,
    /// SHA-256 of the effect of the plan, in hexadecimal.
    pub digest: String,
    /// The predicted outcome of the commit.
    pub outcome: Arc<UpdateOutcome>,
    /// Predicted pause. Zero if no pause is needed; `None` before the first pause of this guest.
    pub predicted_pause: Option<Duration>,
    /// The time at which the plan expires.
    pub expires_at: SystemTime,
}

/// A number of plans and the memory that they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanUsage {
    /// Number of plans.
    pub plans: usize,
    /// Bytes that the plans take.
    pub bytes: usize,
}

/// The writes of a repair, made or only planned.
#[derive(Clone, Debug, Default)]
pub struct RepairOutcome {
    /// "name" or "module:name".
    pub name: Arc<str>,
    /// The key's count, which does not change.
    pub count: i32,
    /// The sites, by address.
    pub sites: Vec<RepairedSite>,
    /// The cost of the repair; `None` if nothing was written.
    pub report: Option<FlipReport>,
}

/// A site of a [`RepairOutcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairedSite {
    /// Guest-virtual address.
    pub address: u64,
    /// The bytes that the site held.
    pub before: Vec<u8>,
    /// The bytes that the count requires.
    pub after: Vec<u8>,
}

/// Result of a pause.
#[derive(Clone, Copy, Debug)]
pub struct PauseOutcome {
    /// Time until the vCPUs had stopped; 0 if they were stopped already.
    pub stop_time: Duration,
    /// The time at which the guest is resumed automatically; `None` if it is held because an undo
    /// is incomplete.
    pub expires_at: Option<SystemTime>,
}

/// The state of an operator's pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseState {
    /// The guest is not held.
    #[default]
    Running,
    /// An operator's pause, which expires.
    Until(SystemTime),
    /// An undo is incomplete, so the guest is held until an operator resumes it.
    UntilResumed,
}

/// A hold as it is listed.
#[derive(Clone, Debug)]
pub struct HoldView {
    /// Hold id.
    pub id: String,
    /// "name" or "module:name".
    pub key: Arc<str>,
    /// The principal that took the references.
    pub holder: Arc<str>,
    /// Reason that the holder gave.
    pub reason: Arc<str>,
    /// Number of references, at least 1.
    pub references: u32,
    /// The time at which the first reference was taken.
    pub since: SystemTime,
    /// The time at which the hold expires; `None` if it does not.
    pub expires_at: Option<SystemTime>,
}

impl HoldView {
    pub(super) fn new(incarnation: &Incarnation, key: &Arc<str>, hold: &Hold) -> Self {
        Self {
            id: incarnation.hold_id(hold.number).text(),
            key: Arc::clone(key),
            holder: Arc::clone(&hold.holder),
            reason: Arc::clone(&hold.reason),
            references: hold.references,
            since: hold.since,
            expires_at: hold.expires.map(|(_, at)| at),
        }
    }

    pub(super) fn text_bytes(&self) -> usize {
        self.id.len() + self.key.len() + self.holder.len() + self.reason.len()
    }
}
