// SPDX-License-Identifier: Apache-2.0
//! The gates: words of the guest that must have a certain value before its keys may be touched.
//!
//! | word                          | must be              | looked at for         |
//! |-------------------------------|----------------------|-----------------------|
//! | `system_state`                | SYSTEM_RUNNING       | every change          |
//! | state of each module touched  | MODULE_STATE_LIVE    | every change          |
//! | `type` of the key             | as planned           | every change          |
//! | `jump_label_mutex`            | free                 | changes with a pause  |
//! | `text_mutex`                  | free                 | changes with a pause  |
//! | `tp_vec_nr`, `bp_desc.refs`   | 0                    | changes with a pause  |
//! | chain of `static_key_mod`     | as planned           | keys that cross zero  |
//! | `tracepoints_mutex`           | free                 | tracepoint keys       |
//! | `funcs` of the tracepoint     | as planned           | tracepoint keys       |
//! | `funcs` of the tracepoint     | not NULL             | firing a tracepoint   |
//! | its `regfunc`, `unregfunc`    | NULL                 | tracepoint keys       |
//!
//! A closed gate changes nothing about the request: resume, wait, plan anew.

use std::fmt;
use std::sync::Arc;

use crate::memory::{AccessFault, GuestMemory, Width, read_word};

/// Which word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The kernel is booting or going down.
    SystemState,
    /// The kernel changes a key, or loads or unloads a module.
    JumpLabelMutex,
    /// The kernel changes its text.
    TextMutex,
    /// The kernel has text changes queued.
    TextPokeQueue,
    /// The kernel has a breakpoint in its text that it is about to replace.
    TextPoke,
    /// The kernel attaches or detaches a probe.
    TracepointsMutex,
    /// A module is loading or unloading.
    ModuleState {
        /// Its name.
        module: Arc<str>,
    },
    /// The word next to a key's count.
    KeyType {
        /// Full name of the key.
        key: Arc<str>,
    },
    /// A `struct static_key_mod`.
    KeyChain {
        /// Full name of the key.
        key: Arc<str>,
    },
    /// Probes of a tracepoint.
    TracepointProbes {
        /// Full name of the key.
        key: Arc<str>,
    },
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SystemState => f.write_str("system_state is not SYSTEM_RUNNING"),
            Self::JumpLabelMutex => f.write_str("jump_label_mutex is held"),
            Self::TextMutex => f.write_str("text_mutex is held"),
            Self::TextPokeQueue => f.write_str("text changes are queued (tp_vec_nr)"),
            Self::TextPoke => f.write_str("a text change is under way (bp_desc.refs)"),
            Self::TracepointsMutex => f.write_str("tracepoints_mutex is held"),
            Self::ModuleState { module } => write!(f, "module {module} is not LIVE"),
            Self::KeyType { key } => write!(f, "the type word of key {key} has changed"),
            Self::KeyChain { key } => write!(f, "the module chain of key {key} has changed"),
            Self::TracepointProbes { key } => {
                write!(f, "the probes of tracepoint {key} have changed")
            }
        }
    }
}

/// The guest is at work on what is to be changed. Nothing was changed; try again a little later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Busy {
    /// A word has another value.
    #[error("{gate} (found {found:#x})")]
    Gate {
        /// Which.
        gate: Gate,
        /// Its value.
        found: u64,
    },
    /// The count is −1.
    #[error("the guest is just taking the first reference of key {key}")]
    FirstReference {
        /// Full name.
        key: Arc<str>,
    },
    /// The count is not the one that was planned with.
    #[error("the count of key {key} has changed from {expected} to {found}")]
    Count {
        /// Full name.
        key: Arc<str>,
        /// When it was planned.
        expected: i32,
        /// Now.
        found: i32,
    },
    /// The key's own words do not fit the registered tables: a module is just coming or going.
    #[error("key {key} does not fit the registered tables: {why}")]
    Users {
        /// Full name.
        key: Arc<str>,
        /// In a few words.
        why: &'static str,
    },
    /// The key's chain names a module that is not registered: it is just coming or going, or its
    /// registration was refused.
    #[error("key {key} is used by a module at {module:#x} that is not registered")]
    UnknownModule {
        /// Full name.
        key: Arc<str>,
        /// Address of the `struct module`.
        module: u64,
    },
    /// A vCPU has stopped inside an instruction that would be replaced.
    #[error("a vCPU stopped at {rip:#x}, inside the site at {site:#x}")]
    InsideSite {
        /// Its instruction pointer.
        rip: u64,
        /// Address of the site.
        site: u64,
    },
    /// A site held other bytes when it was planned.
    #[error("the guest has just changed the site at {site:#x} of key {key}")]
    SiteChanging {
        /// Full name.
        key: Arc<str>,
        /// Address.
        site: u64,
    },
}

impl Busy {
    /// Whether any other change would find the same in its way, whatever its keys; any other change
    /// of tracepoints, if it is their mutex.
    #[must_use]
    pub fn blocks_every_key(&self) -> bool {
        matches!(
            self,
            Self::Gate {
                gate: Gate::SystemState
                    | Gate::JumpLabelMutex
                    | Gate::TextMutex
                    | Gate::TextPokeQueue
                    | Gate::TextPoke
                    | Gate::TracepointsMutex,
                ..
            }
        )
    }

    /// Whether a plan that finds this is out of date: waiting does not help, only another plan does.
    /// A gate that opens again leaves the plan as it is.
    #[must_use]
    pub fn outdates_plan(&self) -> bool {
        match self {
            Self::Gate { gate, .. } => match gate {
                Gate::KeyType { .. } | Gate::KeyChain { .. } | Gate::TracepointProbes { .. } => {
                    true
                }
                Gate::SystemState
                | Gate::JumpLabelMutex
                | Gate::TextMutex
                | Gate::TextPokeQueue
                | Gate::TextPoke
                | Gate::TracepointsMutex
                | Gate::ModuleState { .. } => false,
            },
            // At -1 static_key_slow_inc() is at work, and may still fail.
            Self::Count { found, .. } => *found >= 0,
            Self::Users { .. } | Self::UnknownModule { .. } | Self::SiteChanging { .. } => true,
            Self::FirstReference { .. } | Self::InsideSite { .. } => false,
        }
    }
}

/// A word located, with the value that it must have.
#[derive(Clone, Debug)]
pub(crate) struct Guard<P> {
    pub gate: Gate,
    pub place: P,
    pub width: Width,
    pub mask: u64,
    pub expected: u64,
}

impl<P: Copy> Guard<P> {
    /// The value found, if it is not as it must be.
    pub fn closed<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
    ) -> Result<Option<u64>, AccessFault> {
        let found = read_word(memory, self.place, self.width)?;
        Ok((found & self.mask != self.expected).then_some(found))
    }
}
