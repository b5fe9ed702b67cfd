// SPDX-License-Identifier: Apache-2.0
//! The requests of clients to the executor and the readers, as the API hands them on.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use static_keys::{Class, Op, Patterns};

use super::debug::DebugQueries;
use super::holds::KeyInstance;
use super::replay;

/// One op on one key or on every key of a selection.
#[derive(Clone, Debug)]
pub struct KeyUpdate {
    /// The key or keys.
    pub keys: Target,
    /// The op.
    pub op: Op,
    /// Etag of a single key; `None` skips the check.
    pub etag: Option<String>,
}

/// The key or keys of an op.
#[derive(Clone, Debug)]
pub enum Target {
    /// "name" or "module:name".
    Name(String),
    /// This instance of the key, not a later key of the same name.
    Held {
        /// "name" or "module:name".
        name: Arc<str>,
        /// The instance.
        instance: KeyInstance,
    },
    /// Every matching key that may be changed, determined when the change is made.
    Selection(Selection),
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

/// What a switch of tracepoints does to the holds on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracepointUpdate {
    /// Enable, and also hold what is already on. An existing hold of the caller gets the new
    /// expiry.
    Fire,
    /// Disable what no other principal holds, even if the caller does not hold it.
    Park,
    /// End the caller's holds. Disable what no other principal holds and no other probe uses.
    Leave,
    /// Disable and end all holds.
    Silence,
    /// Enable for other users in the guest, and end all holds.
    HandOver,
}

/// An update of keys.
#[derive(Clone, Debug)]
pub struct UpdateRequest {
    /// In the order of the request; at least one.
    pub updates: Vec<KeyUpdate>,
    /// "uid:N".
    pub principal: String,
    /// Request id; empty if the request cannot be repeated.
    pub request_id: String,
    /// Digest of the request without its id.
    pub content: replay::Content,
    /// Check only.
    pub validate_only: bool,
    /// Permit guarded keys, if the monitor does.
    pub allow_guarded: bool,
    /// Drop references of other holders.
    pub force: bool,
    /// A switch of tracepoints; `None` for plain ops.
    pub tracepoints: Option<TracepointUpdate>,
    /// Omit the per-key results.
    pub summary_only: bool,
    /// Reason, stored with the holds.
    pub reason: String,
    /// When new references expire.
    pub ttl: Option<Duration>,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

impl KeyUpdate {
    /// Creates an op on a key, whatever the key's etag.
    #[must_use]
    pub fn new(name: impl Into<String>, op: Op) -> Self {
        Self {
            keys: Target::Name(name.into()),
            op,
            etag: None,
        }
    }
}

impl UpdateRequest {
    /// Creates an update without options: no request id, reason, expiry, force or guarded keys.
    #[must_use]
    pub fn new(
        updates: Vec<KeyUpdate>,
        principal: String,
        stop_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            updates,
            principal,
            request_id: String::new(),
            content: replay::Content::default(),
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
}

/// A pause that lasts until it is resumed or expires.
#[derive(Clone, Copy, Debug)]
pub struct PauseRequest {
    /// Time that the vCPUs have to stop.
    pub timeout: Duration,
    /// When the guest is resumed automatically.
    pub ttl: Duration,
}

/// Result of a pause.
#[derive(Clone, Copy, Debug)]
pub struct PauseOutcome {
    /// Time that the vCPUs took; 0 if they were stopped already.
    pub stop_time: Duration,
    /// When the guest is resumed automatically; `None` if it is held because an undo is incomplete.
    pub expires_at: Option<SystemTime>,
}

/// Whether the guest is held paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseState {
    /// The guest is not held.
    #[default]
    Running,
    /// An operator's pause, which expires.
    Until(SystemTime),
    /// An undo is incomplete: the guest is held until an operator resumes it.
    UntilResumed,
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
