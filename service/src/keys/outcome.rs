// SPDX-License-Identifier: Apache-2.0
//! Results of a transaction.

use std::sync::Arc;
use std::time::Duration;

use super::Known;

/// The result of an update.
#[derive(Clone, Debug, Default)]
pub struct UpdateOutcome {
    /// One per key, in the order of its first op; empty if only the summary was requested.
    pub results: Vec<KeyOutcome>,
    /// Totals.
    pub summary: UpdateSummary,
    /// The journal's newest revision after the update.
    pub revision: u64,
    /// What the change cost; `None` if it was only validated.
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
    /// Id of the hold that took the references; empty if none was taken.
    pub hold_id: String,
    /// What is known about a guarded key.
    pub known: Option<Known>,
}

/// Totals of an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// The cost of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlipReport {
    /// `None` if the guest was not stopped.
    pub pause: Option<PauseTimes>,
    /// Sites of all keys.
    pub sites_patched: u32,
    /// 1 plus the attempts that found a gate closed.
    pub attempts: u32,
}

/// The parts of a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PauseTimes {
    /// From the request to stop until the last vCPU had stopped.
    pub stop: Duration,
    /// Verifying and writing, all vCPUs stopped.
    pub patch: Duration,
    /// From the end of patching until the last vCPU was on its way back.
    pub resume: Duration,
}
