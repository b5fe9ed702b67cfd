// SPDX-License-Identifier: Apache-2.0
//! The plan: what a transaction would write where, worked out while the guest runs.
//!
//! Operations on the same key are folded in order. One refusal refuses the whole transaction. What a
//! plan says may be out of date as soon as it is made; [`Plan::verify`] finds out.

use std::sync::Arc;

use crate::KeyId;
use crate::busy::{Busy, Guard};
use crate::catalog::Catalog;
use crate::instruction::{Instruction, OutOfReach};
use crate::memory::{GuestMemory, ReadError};
use crate::refcount::{Op, Refusal};

/// One operation of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// On which key.
    pub key: KeyId,
    /// What.
    pub op: Op,
}

/// What the caller permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Changes of [`Class::Guarded`](crate::Class::Guarded) keys.
    pub allow_guarded: bool,
}

/// A transaction was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No registered image lists it.
    #[error("no key is registered at {key}; list the keys again")]
    UnknownKey {
        /// As asked for.
        key: KeyId,
    },
    /// The class forbids it.
    #[error(
        "key {key} is guarded: what else depends on it is known to the guest alone; permit guarded keys if you know"
    )]
    Guarded {
        /// Full name.
        key: Arc<str>,
    },
    /// The guest's own functions for such keys expect a count of 0 or 1.
    #[error(
        "key {key} is guarded and on already; a second reference from outside would make the guest's own static_key_disable() warn and leave it on; use enable, or wait until it is off"
    )]
    GuardedCount {
        /// Full name.
        key: Arc<str>,
    },
    /// The refcount table forbids it.
    #[error("key {key}: {refusal}")]
    WouldWarn {
        /// Full name.
        key: Arc<str>,
        /// Never [`Refusal::Busy`].
        refusal: Refusal,
    },
    /// The key is constant since the end of init.
    #[error(
        "key {key} is sealed: it cannot change after the kernel's init; set it by the kernel command line"
    )]
    Sealed {
        /// Full name.
        key: Arc<str>,
    },
    /// The rules of tracepoints forbid it.
    #[error("tracepoint {key}: {why}")]
    Tracepoint {
        /// Full name.
        key: Arc<str>,
        /// And what to do.
        why: &'static str,
    },
    /// The guest has registered a site where no text is.
    #[error(
        "key {key}: its site at {site:#x} lies outside the registered text; the guest's tables are wrong, nothing can be changed"
    )]
    SiteOutsideText {
        /// Full name.
        key: Arc<str>,
        /// Address.
        site: u64,
    },
    /// The guest has registered a target that no jump can reach.
    #[error("key {key}: {source}; the guest's tables are wrong, nothing can be changed")]
    OutOfReach {
        /// Full name.
        key: Arc<str>,
        /// Site, size and target.
        source: OutOfReach,
    },
    /// The guest has registered two sites on the same bytes.
    #[error(
        "key {key}: its site at {site:#x} overlaps the one at {other:#x}; the guest's tables are wrong, nothing can be changed"
    )]
    Overlap {
        /// Full name.
        key: Arc<str>,
        /// Address.
        site: u64,
        /// Address of the site before it.
        other: u64,
    },
    /// A word or site of the guest cannot be read.
    #[error(
        "{what} at {address:#x} cannot be read: {error}; the guest's registration is wrong, nothing can be changed"
    )]
    Unreadable {
        /// What is there.
        what: &'static str,
        /// Guest-virtual.
        address: u64,
        /// Why.
        error: ReadError,
    },
    /// Not now.
    #[error("the guest is busy: {0}; try again")]
    Busy(#[from] Busy),
}

/// What a transaction does to one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// Which key.
    pub key: KeyId,
    /// Full name.
    pub name: Arc<str>,
    /// `enabled` before, never negative.
    pub before: i32,
    /// `enabled` after, never negative.
    pub after: i32,
    /// Number of sites that change.
    pub sites: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct PlannedKey<P> {
    pub change: KeyChange,
    pub place: P,
}

#[derive(Clone, Debug)]
pub(crate) struct PlannedSite<P> {
    pub address: u64,
    pub place: P,
    /// Index of its key.
    pub key: usize,
    pub before: Instruction,
    pub after: Instruction,
}

/// A site that held neither its NOP nor its JMP while the guest was running: either the guest was
/// just changing it, or the bytes are foreign. Only a stopped guest can tell.
#[derive(Clone, Debug)]
pub(crate) struct Suspect<P> {
    pub address: u64,
    pub target: u64,
    pub place: P,
    pub length: usize,
    pub key: usize,
}

/// A site of a plan, with its bytes before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteChange<'a> {
    /// Guest-virtual address of the instruction.
    pub address: u64,
    /// What must stand there when the plan is made.
    pub before: &'a [u8],
    /// As many bytes.
    pub after: &'a [u8],
}

/// A transaction, ready to be made; see the crate's head for its life.
#[derive(Clone, Debug)]
pub struct Plan<P> {
    /// In the order of their first operation.
    pub(crate) keys: Vec<PlannedKey<P>>,
    /// The index of its key in `keys`, for each operation.
    pub(crate) folded: Vec<usize>,
    /// By address.
    pub(crate) sites: Vec<PlannedSite<P>>,
    pub(crate) suspects: Vec<Suspect<P>>,
    pub(crate) guards: Vec<Guard<P>>,
    pub(crate) needs_pause: bool,
}

impl<P: Copy> Plan<P> {
    /// Plans a transaction.
    ///
    /// # Errors
    /// [`PlanError`]; of several refusals the first that is met.
    pub fn new<M: GuestMemory<Place = P>>(
        catalog: &Catalog,
        memory: &M,
        updates: &[Update],
        options: &Options,
    ) -> Result<Self, PlanError> {
        crate::planner::plan(catalog, memory, updates, options)
    }

    /// Whether the vCPUs must be stopped for it. If not, [`Plan::commit_running`] makes it.
    #[must_use]
    pub fn needs_pause(&self) -> bool {
        self.needs_pause
    }

    /// What it does, one item per key, in the order of their first operation.
    pub fn changes(&self) -> impl ExactSizeIterator<Item = &KeyChange> {
        self.keys.iter().map(|key| &key.change)
    }

    /// For each operation, in order, which of [`Plan::changes`] it went into.
    #[must_use]
    pub fn folded(&self) -> &[usize] {
        &self.folded
    }

    /// Number of sites that it writes.
    #[must_use]
    pub fn site_count(&self) -> usize {
        self.sites.len()
    }

    /// The sites that it writes, by address.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = SiteChange<'_>> {
        self.sites.iter().map(|site| SiteChange {
            address: site.address,
            before: site.before.as_bytes(),
            after: site.after.as_bytes(),
        })
    }

    /// A site that held neither its NOP nor its JMP. A plan with such a site is never committed:
    /// only [`Plan::verify`] on the stopped guest tells whether the bytes are foreign.
    #[must_use]
    pub fn unrecognised_site(&self) -> Option<(&str, u64)> {
        let suspect = self.suspects.first()?;
        Some((&*self.keys[suspect.key].change.name, suspect.address))
    }

    /// Bytes of memory that it takes, without the names that it shares with the catalog.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        fn of<T>(items: &Vec<T>) -> usize {
            items.capacity().saturating_mul(size_of::<T>())
        }
        [
            of(&self.keys),
            of(&self.folded),
            of(&self.sites),
            of(&self.suspects),
            of(&self.guards),
        ]
        .into_iter()
        .fold(size_of::<Self>(), usize::saturating_add)
    }

    pub(crate) fn key_name(&self, index: usize) -> Arc<str> {
        Arc::clone(&self.keys[index].change.name)
    }
}
