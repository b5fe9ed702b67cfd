// SPDX-License-Identifier: Apache-2.0
//! The requests of clients that the API passes to the executor and the readers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::snapshot::MemorySink;
use static_keys::{Class, Op, Patterns};

use super::debug::DebugQueries;
use super::holds::KeyInstance;
use super::replay::RequestId;
use super::scope::{Caller, Use};

/// Maximum number of ops in one transaction.
pub const MAX_UPDATES: usize = 65_536;

/// One op on one key or on every key of a selection.
#[derive(Clone, Debug)]
pub struct KeyUpdate {
    /// The key or keys.
    pub keys: Target,
    /// The op.
    pub op: Op,
}

/// The key or keys of an op.
#[derive(Clone, Debug)]
pub enum Target {
    /// The key of this name.
    Name {
        /// "name" or "module:name".
        name: String,
        /// The etag that the key must have; `None` skips the check.
        etag: Option<String>,
    },
    /// This instance of the key, not a later key of the same name.
    Held {
        /// "name" or "module:name".
        name: Arc<str>,
        /// The instance.
        instance: KeyInstance,
    },
    /// Every matching key that may be changed, determined when the change is made. It is boxed,
    /// because most requests have many names and no selection.
    Selection(Box<Selection>),
    /// The keys of the lines of dynamic debug that queries select, determined when the change is
    /// made.
    Debug(DebugQueries),
}

/// Keys that match patterns and classes.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Glob patterns of names.
    pub patterns: Patterns,
    /// Classes; empty for all.
    pub classes: Vec<Class>,
}

/// The effect of a switch of tracepoints on their holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracepointUpdate {
    /// Enable the tracepoints, and also hold those that are on. An existing hold of the caller gets
    /// the new expiry.
    Fire,
    /// Disable the tracepoints that no other principal holds, even if the caller does not hold
    /// them.
    Park,
    /// End the caller's holds. Disable the tracepoints that no other principal holds and no other
    /// probe uses.
    Leave,
    /// Disable the tracepoints and end all holds.
    Silence,
    /// Enable the tracepoints for other users in the guest, and end all holds.
    HandOver,
}

/// A change of keys.
#[derive(Clone, Debug)]
pub struct UpdateRequest {
    /// The updates, at least one, in the order of the request.
    pub updates: Vec<KeyUpdate>,
    /// The client that changes the keys.
    pub caller: Caller,
    /// Identifies a repeat of the request; `None` if it is not repeated.
    pub request_id: Option<RequestId>,
    /// Check the request only.
    pub validate_only: bool,
    /// Permit guarded keys if the monitor permits them too.
    pub allow_guarded: bool,
    /// Drop references of other holders.
    pub force: bool,
    /// A switch of tracepoints; `None` for plain ops.
    pub tracepoints: Option<TracepointUpdate>,
    /// Omit the per-key results.
    pub summary_only: bool,
    /// Reason, stored with the holds.
    pub reason: String,
    /// Time to live of new references, counted from the change.
    pub ttl: Option<Duration>,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

impl KeyUpdate {
    /// Creates an op on a key, regardless of the key's etag.
    #[must_use]
    pub fn new(name: impl Into<String>, op: Op) -> Self {
        Self {
            keys: Target::Name {
                name: name.into(),
                etag: None,
            },
            op,
        }
    }
}

impl UpdateRequest {
    /// Creates an update without options: no request id, reason, expiry, force or guarded keys.
    #[must_use]
    pub fn new(
        updates: Vec<KeyUpdate>,
        caller: impl Into<Caller>,
        stop_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            updates,
            caller: caller.into(),
            request_id: None,
            validate_only: false,
            allow_guarded: false,
            force: false,
            tracepoints: None,
            summary_only: false,
            reason: String::new(),
            ttl: None,
            stop_timeout,
            deadline,
        }
    }

    /// Returns the use that the request makes of its keys. DEC and DISABLE without `force` drop
    /// only references of the caller, but a switch of tracepoints may end holds of other
    /// principals.
    pub(super) fn uses(&self) -> Use {
        let drops = |update: &KeyUpdate| matches!(update.op, Op::Dec | Op::Disable);
        let gives_back = !self.force && self.tracepoints.is_none();
        match gives_back && self.updates.iter().all(drops) {
            true => Use::GiveBack,
            false if self.validate_only => Use::Check,
            false => Use::Change,
        }
    }
}

/// A pause that lasts until it is resumed or expires.
#[derive(Clone, Copy, Debug)]
pub struct PauseRequest {
    /// Time that the vCPUs have to stop.
    pub timeout: Duration,
    /// Time after which the guest is resumed automatically.
    pub ttl: Duration,
}

/// A request to save the guest.
pub struct SaveRequest {
    /// Time that the vCPUs have to stop.
    pub timeout: Duration,
    /// Receiver of the memory.
    pub sink: Box<dyn MemorySink + Send>,
}

#[cfg(any(test, feature = "testing"))]
impl SaveRequest {
    /// Creates a request whose memory nobody takes.
    pub fn to_nobody() -> Self {
        use patchbay_guest::snapshot::SinkClosed;

        struct Nobody;

        impl MemorySink for Nobody {
            fn take(&mut self, _: u64, _: Vec<u8>) -> Result<(), SinkClosed> {
                Err(SinkClosed)
            }

            fn check(&mut self) -> Result<(), SinkClosed> {
                Ok(())
            }
        }

        Self {
            timeout: Duration::from_secs(10),
            sink: Box::new(Nobody),
        }
    }
}

/// A query for keys.
#[derive(Clone, Debug, Default)]
pub struct ListQuery {
    /// Page size, at least 1.
    pub page_size: usize,
    /// Page token; empty for the first page.
    pub page_token: String,
    /// Patterns and classes.
    pub keys: Selection,
    /// Keys that are on or off; `None` for both.
    pub enabled: Option<bool>,
}

/// A request to prepare a change.
#[derive(Clone, Debug)]
pub struct PrepareRequest {
    /// The change. Only its caller may commit the plan.
    pub update: UpdateRequest,
    /// Time to live of the plan.
    pub plan_ttl: Duration,
}

/// A request to commit a plan.
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// [`PrepareOutcome::plan_id`].
    pub plan_id: String,
    /// Digest that the plan must have; `None` skips the check.
    pub digest: Option<String>,
    /// The client that makes the change.
    pub caller: Caller,
    /// Omit the per-key results.
    pub summary_only: bool,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

/// A request to discard a plan.
#[derive(Clone, Debug)]
pub struct DiscardRequest {
    /// [`PrepareOutcome::plan_id`].
    pub plan_id: String,
    /// The principal.
    pub principal: String,
}

/// A request to release holds.
#[derive(Clone, Debug)]
pub struct ReleaseRequest {
    /// Hold ids, 1 to [`MAX_UPDATES`].
    pub ids: Vec<String>,
    /// The client that makes the change.
    pub caller: Caller,
    /// Also release holds of other principals.
    pub force: bool,
    /// Identifies a repeat of the request; `None` if it is not repeated.
    pub request_id: Option<RequestId>,
    /// Omit the per-key results.
    pub summary_only: bool,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

/// A request to renew holds.
#[derive(Clone, Debug)]
pub struct RenewRequest {
    /// Hold ids, 1 to [`MAX_UPDATES`].
    pub ids: Vec<String>,
    /// The client that renews the holds. It must be their holder.
    pub caller: Caller,
    /// New time to live from now; `None` if the holds no longer expire.
    pub ttl: Option<Duration>,
}

/// A request to repair a key.
#[derive(Clone, Debug)]
pub struct RepairRequest {
    /// "name" or "module:name".
    pub name: String,
    /// The client that changes the keys.
    pub caller: Caller,
    /// Reason, for the audit log.
    pub reason: String,
    /// Check the request only.
    pub validate_only: bool,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_request_that_drops_the_callers_references_gives_back() {
        let request = |ops: &[Op]| {
            let updates = ops.iter().map(|op| KeyUpdate::new("alpha", *op));
            UpdateRequest::new(updates.collect(), "a", Duration::ZERO, Instant::now())
        };
        let mut drops = request(&[Op::Dec, Op::Disable]);
        assert_eq!(drops.uses(), Use::GiveBack);
        drops.validate_only = true;
        assert_eq!(drops.uses(), Use::GiveBack);
        drops.force = true;
        assert_eq!(drops.uses(), Use::Check);
        drops.validate_only = false;
        assert_eq!(drops.uses(), Use::Change);
        let mut switch = request(&[Op::Disable]);
        switch.tracepoints = Some(TracepointUpdate::Park);
        assert_eq!(switch.uses(), Use::Change);
        assert_eq!(request(&[Op::Dec, Op::Inc]).uses(), Use::Change);
    }
}
