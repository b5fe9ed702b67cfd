// SPDX-License-Identifier: Apache-2.0
//! The gates: words of the guest that must have a certain value before a key may be changed.
//!
//! | word                          | must be              | checked for           |
//! |-------------------------------|----------------------|-----------------------|
//! | each gate that is listed      | as the guest says    | what it [`Concerns`]  |
//! | state of each module touched  | MODULE_STATE_LIVE    | every change          |
//! | `type` of the key             | as planned           | every change          |
//! | chain of `static_key_mod`     | as planned           | every change          |
//! | `funcs` of the tracepoint     | as planned           | switching a tracepoint |
//! | `funcs` of the tracepoint     | not NULL             | switching a tracepoint on |
//!
//! A closed gate is not a refusal: the caller resumes the guest, waits, and tries again
//! ([`Busy::outdates_plan`] says whether it needs a new plan). The exception is a NULL `funcs`, for
//! which the transaction is refused.
//!
//! [`Concerns`]: crate::Concerns

use std::fmt;
use std::sync::Arc;

use crate::gates::KernelGate;

/// Identifies a gate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum Gate {
    /// A gate that the guest listed.
    Kernel(KernelGate),
    /// A module is loading or unloading.
    ModuleState { module: Arc<str> },
    /// The `type` word of a key.
    KeyType { key: Arc<str> },
    /// A `struct static_key_mod`.
    KeyChain { key: Arc<str> },
    /// The probes of a tracepoint.
    TracepointProbes { key: Arc<str> },
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(gate) => gate.fmt(f),
            Self::ModuleState { module } => write!(f, "module {module} is not LIVE"),
            Self::KeyType { key } => write!(f, "the type word of key {key} has changed"),
            Self::KeyChain { key } => write!(f, "the module chain of key {key} has changed"),
            Self::TracepointProbes { key } => {
                write!(f, "the probes of tracepoint {key} have changed")
            }
        }
    }
}

/// The guest is changing something that the plan depends on. The plan was not committed; try again
/// later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum Busy {
    /// A gate word does not have its required value.
    #[error("{gate} (found {found:#x})")]
    Gate { gate: Gate, found: u64 },
    /// The count is −1.
    #[error("the guest is taking the first reference of key {key}")]
    FirstReference { key: Arc<str> },
    /// The count changed since the plan was made.
    #[error("the count of key {key} has changed from {expected} to {found}")]
    Count {
        key: Arc<str>,
        expected: i32,
        found: i32,
    },
    /// The key's words do not match the registered tables: a module is being loaded or unloaded.
    #[error("key {key} does not fit the registered tables: {why}")]
    Users { key: Arc<str>, why: &'static str },
    /// The key's chain names a module that is not registered. It is being loaded or unloaded, or
    /// its registration was refused.
    #[error("key {key} is used by a module at {module:#x} that is not registered")]
    UnknownModule { key: Arc<str>, module: u64 },
    /// A vCPU stopped inside an instruction that the plan replaces.
    #[error("a vCPU stopped at {rip:#x}, inside the site at {site:#x}")]
    InsideSite { rip: u64, site: u64 },
    /// The site held different bytes when the plan was made.
    #[error("the guest changed the site at {site:#x} of key {key} meanwhile")]
    SiteChanging { key: Arc<str>, site: u64 },
}

impl Busy {
    /// Returns whether the same cause may also block changes of other keys.
    #[must_use]
    pub fn blocks_every_key(&self) -> bool {
        matches!(
            self,
            Self::Gate {
                gate: Gate::Kernel(_),
                ..
            }
        )
    }

    /// Returns whether the plan is out of date, so that the caller must plan again instead of
    /// waiting. A plan stays valid while the caller waits for a lock or for the state of a module.
    #[must_use]
    pub fn outdates_plan(&self) -> bool {
        match self {
            Self::Gate { gate, .. } => match gate {
                Gate::KeyType { .. } | Gate::KeyChain { .. } | Gate::TracepointProbes { .. } => {
                    true
                }
                Gate::Kernel(_) | Gate::ModuleState { .. } => false,
            },
            // At -1 static_key_slow_inc() is in progress and may still fail.
            Self::Count { found, .. } => *found >= 0,
            Self::Users { .. } | Self::UnknownModule { .. } | Self::SiteChanging { .. } => true,
            Self::FirstReference { .. } | Self::InsideSite { .. } => false,
        }
    }
}
