// SPDX-License-Identifier: Apache-2.0
//! What a transaction did, and what it cost the guest.

use std::sync::Arc;
use std::time::Duration;

/// What a transaction did, or would do.
#[derive(Clone, Debug, Default)]
pub struct UpdateOutcome {
    /// One per key, in the order of its first op; none if the request wants the summary only.
    pub results: Vec<KeyOutcome>,
    /// The same in numbers.
    pub summary: UpdateSummary,
    /// The journal's newest revision after the transaction.
    pub revision: u64,
    /// `None` if the transaction was only validated.
    pub report: Option<FlipReport>,
}

/// What a transaction did to one key, or would do.
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
    /// After the transaction; as it is now if nothing was changed.
    pub etag: Arc<str>,
    /// The hold that has the references taken; empty if none was taken.
    pub hold_id: String,
}

/// A transaction in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateSummary {
    /// Keys of all ops.
    pub keys: u32,
    /// Keys whose count changed.
    pub keys_changed: u32,
    /// Sites of all keys that were patched.
    pub sites_patched: u32,
    /// Keys that matched patterns and were left out, guarded or sealed.
    pub keys_left_out: u32,
}

/// What a transaction cost the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlipReport {
    /// `None` if the guest ran on: nothing had to be patched.
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
