// SPDX-License-Identifier: Apache-2.0
//! The plan of a transaction: what to write where, computed while the guest runs.
//!
//! Operations on the same key are folded into one change, in order. If one operation is refused, so
//! is the whole transaction. A plan may be stale as soon as it is made; [`Plan::verify`] detects
//! that.

use std::sync::Arc;

use crate::busy::{Busy, Gate};
use crate::catalog::Catalog;
use crate::instruction::{Hex, Instruction, Nops, OutOfReach};
use crate::key::{Class, KeyChange, KeyId};
use crate::memory::{GuestMemory, ReadError, Width, Word};
use crate::records::RecordPlaces;
use crate::refcount::{Op, Refusal};

/// One operation of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The key to change.
    pub key: KeyId,
    /// The operation.
    pub op: Op,
}

/// The changes that the caller permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Permits changes of [`Class::Guarded`](crate::Class::Guarded) keys.
    pub allow_guarded: bool,
}

/// The transaction was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum PlanError {
    /// No registered image lists the key.
    #[error("no key is registered at {key}; list the keys again")]
    UnknownKey { key: KeyId },
    /// The key is guarded, and the caller did not permit changes of guarded keys.
    #[error(
        "key {key} is guarded: only the guest knows what else depends on it; permit guarded keys if you know that a change is safe"
    )]
    Guarded { key: Arc<str> },
    /// The class of the key forbids every change, regardless of what the caller permits.
    #[error(
        "key {key} gates a static call that may be NULL: switching it would crash the guest, so it is never changed, whatever is permitted; leave it to the guest's kernel"
    )]
    Never { key: Arc<str> },
    /// The guest's own functions for keys of this class expect a count of 0 or 1.
    #[error(
        "key {key} is of class {} and on already; a second reference from outside would make the guest's own static_key_disable() warn and leave it on; use enable, or wait until it is off",
        class.name()
    )]
    Boolean { key: Arc<str>, class: Class },
    /// The operation is refused at the key's count; see [`crate::refcount`].
    #[error("key {key}: {refusal}")]
    WouldWarn {
        key: Arc<str>,
        /// Never [`Refusal::Busy`].
        refusal: Refusal,
    },
    /// The key is constant after init.
    #[error(
        "key {key} is sealed: it cannot change after the kernel's init; set it by the kernel command line"
    )]
    Sealed { key: Arc<str> },
    /// The rules for tracepoints forbid the change.
    #[error("tracepoint {key}: {why}")]
    Tracepoint { key: Arc<str>, why: &'static str },
    /// The guest registered a site outside its text.
    #[error(
        "key {key}: its site at {site:#x} lies outside the registered text; the guest's tables are wrong and the key cannot be changed"
    )]
    SiteOutsideText { key: Arc<str>, site: u64 },
    /// The guest registered a target that a JMP of the site's size cannot reach.
    #[error("key {key}: {source}; the guest's tables are wrong and the key cannot be changed")]
    OutOfReach { key: Arc<str>, source: OutOfReach },
    /// A site to be repaired holds bytes that an interrupted change could not have left.
    #[error(
        "key {key}: the site at {site:#x} holds {}, which is no mixture of its NOP and its JMP; something else patches this kernel",
        Hex(&.found[..*.length])
    )]
    Foreign {
        key: Arc<str>,
        site: u64,
        length: usize,
        found: [u8; 5],
    },
    /// The guest registered two sites that share bytes.
    #[error(
        "key {key}: its site at {site:#x} overlaps the one at {other:#x}; the guest's tables are wrong and the keys cannot be changed"
    )]
    Overlap {
        key: Arc<str>,
        site: u64,
        other: u64,
    },
    /// A word or site of the guest cannot be read.
    #[error(
        "{what} at {address:#x} cannot be read: {error}; the guest's registration is wrong and the key cannot be changed"
    )]
    Unreadable {
        what: &'static str,
        address: u64,
        error: ReadError,
    },
    /// The guest is changing something that the plan depends on. Try again later.
    #[error("the guest is busy: {0}; try again")]
    Busy(#[from] Busy),
}

/// A gate of a plan. One that belongs to a key has the key's index.
#[derive(Clone, Debug)]
pub(crate) enum PlannedGate {
    /// A gate of the kernel, of a module or of a tracepoint.
    Named(Gate),
    /// The `type` word of a key.
    KeyType(usize),
    /// The chain of `static_key_mod` of a key.
    KeyChain(usize),
}

impl PlannedGate {
    pub fn named(&self, changes: &[KeyChange]) -> Gate {
        let name = |index: usize| changes[index].name.clone();
        match *self {
            Self::Named(ref gate) => gate.clone(),
            Self::KeyType(key) => Gate::KeyType { key: name(key) },
            Self::KeyChain(key) => Gate::KeyChain { key: name(key) },
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct PlannedSite<P> {
    pub address: u64,
    pub place: P,
    /// Index of the site's key.
    pub key: usize,
    pub before: Instruction,
    pub after: Instruction,
}

fn count_word<P>(change: &KeyChange, place: P) -> Word<P> {
    let [before, after] = [change.before, change.after];
    let [before, after] = [before, after].map(|count| count.cast_unsigned().into());
    Word::new(place, Width::U32.bytes(), before, after)
}

impl<P: Copy> PlannedSite<P> {
    fn word(&self) -> Word<P> {
        let [before, after] = [self.before, self.after].map(Instruction::number);
        Word::new(self.place, self.before.size().bytes(), before, after)
    }
}

/// A site that held neither its NOP nor its JMP while the guest ran. Either the guest was changing
/// it, or the bytes are foreign. Only a check of the stopped guest can distinguish the two.
#[derive(Clone, Debug)]
pub(crate) struct Suspect<P> {
    pub address: u64,
    pub target: u64,
    pub place: P,
    pub length: usize,
    pub nops: Nops,
    pub key: usize,
}

/// A site of a plan, with its bytes before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteChange<'a> {
    /// Guest-virtual address of the instruction.
    pub address: u64,
    /// The bytes that the site must hold when the plan is committed.
    pub before: &'a [u8],
    /// The bytes that replace them, of the same length.
    pub after: &'a [u8],
}

/// A transaction that is ready to commit. The crate's documentation describes its life cycle.
#[derive(Clone, Debug)]
pub struct Plan<P> {
    /// The changes, one per key, in the order of the keys' first operations.
    pub(crate) changes: Arc<[KeyChange]>,
    /// The index in `changes` of each operation's key.
    pub(crate) folded: Vec<usize>,
    /// The sites to write, ordered by address.
    pub(crate) sites: Vec<PlannedSite<P>>,
    /// The writes in order: first the sites, then the counts of the keys. While the guest is
    /// stopped, verification and commit iterate over this compact list and over `gate_words`.
    pub(crate) words: Vec<Word<P>>,
    /// The number of keys whose count changes.
    pub(crate) changed: usize,
    pub(crate) suspects: Vec<Suspect<P>>,
    pub(crate) gates: Vec<PlannedGate>,
    /// The word of each gate.
    pub(crate) gate_words: Vec<Word<P>>,
    pub(crate) needs_pause: bool,
    /// A site may hold several instructions, so a vCPU may be stopped inside it.
    pub(crate) needs_rips: bool,
    /// `None` until the changes are known, and always in a repair.
    pub(crate) records: Option<RecordPlaces<P>>,
}

impl<P: Copy> Plan<P> {
    /// Plans a transaction.
    ///
    /// # Errors
    /// [`PlanError`]. If several operations are refused, the error of the first.
    pub fn new<M: GuestMemory<Place = P>>(
        catalog: &Catalog,
        memory: &M,
        updates: &[Update],
        options: &Options,
    ) -> Result<Self, PlanError> {
        crate::planner::plan(catalog, memory, updates, options)
    }

    /// Plans the repair of a key whose sites do not match its count. The plan writes sites and no
    /// count. It has no sites if there is nothing to repair.
    ///
    /// # Errors
    /// [`PlanError`]; [`PlanError::Foreign`] for bytes that an interrupted change of the site could
    /// not have left.
    pub fn repair<M: GuestMemory<Place = P>>(
        catalog: &Catalog,
        memory: &M,
        key: KeyId,
    ) -> Result<Self, PlanError> {
        crate::repair::plan(catalog, memory, key)
    }

    /// Locates the places of the plan's records again if other changes were recorded since the plan
    /// was made. The caller calls this before it stops the guest. Otherwise the changes of such a
    /// plan are not recorded.
    pub fn locate_records<M: GuestMemory<Place = P>>(&mut self, memory: &M) {
        let total = self.changed;
        if let Some(records) = &mut self.records {
            records.relocate(memory, total);
        }
    }

    /// Returns whether the vCPUs must be stopped. If not, [`Plan::commit_running`] commits the
    /// plan.
    #[must_use]
    pub fn needs_pause(&self) -> bool {
        self.needs_pause
    }

    /// Returns whether the instruction pointers of all vCPUs must be known. A site that is repaired
    /// may hold several instructions, so no gate tells whether a vCPU is inside it.
    #[must_use]
    pub fn needs_rips(&self) -> bool {
        self.needs_rips
    }

    /// Returns the changes, one per key, in the order of their first operation.
    #[must_use]
    pub fn changes(&self) -> &Arc<[KeyChange]> {
        &self.changes
    }

    /// Returns, for each operation, the index of its change in [`Plan::changes`].
    #[must_use]
    pub fn folded(&self) -> &[usize] {
        &self.folded
    }

    /// Returns the number of sites that the plan writes.
    #[must_use]
    pub fn site_count(&self) -> usize {
        self.sites.len()
    }

    /// Returns the sites that the plan writes, ordered by address.
    pub fn sites(&self) -> impl ExactSizeIterator<Item = SiteChange<'_>> {
        self.sites.iter().map(|site| SiteChange {
            address: site.address,
            before: site.before.as_bytes(),
            after: site.after.as_bytes(),
        })
    }

    /// Returns a site that held neither its NOP nor its JMP. A plan with such a site is never
    /// committed: only [`Plan::verify`] on the stopped guest tells whether the bytes are foreign.
    #[must_use]
    pub fn unrecognised_site(&self) -> Option<(&str, u64)> {
        let suspect = self.suspects.first()?;
        Some((&*self.changes[suspect.key].name, suspect.address))
    }

    /// Returns the memory that the plan uses, in bytes, without the names that it shares with the
    /// catalog.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        fn of<T>(items: &Vec<T>) -> usize {
            items.capacity().saturating_mul(size_of::<T>())
        }
        [
            of(&self.folded),
            of(&self.sites),
            of(&self.words),
            of(&self.suspects),
            of(&self.gates),
            of(&self.gate_words),
        ]
        .into_iter()
        .fold(
            size_of::<Self>() + size_of_val(&*self.changes),
            usize::saturating_add,
        )
    }

    /// Computes the writes when the sites are known. `counts` has the place of each key's count.
    pub(crate) fn finish(&mut self, changes: Vec<KeyChange>, counts: &[P]) {
        self.words.reserve(self.sites.len() + changes.len());
        self.words.extend(self.sites.iter().map(PlannedSite::word));
        let counts = changes.iter().zip(counts);
        self.words
            .extend(counts.map(|(change, place)| count_word(change, *place)));
        self.changes = changes.into();
        self.changed = self.keys_changed().count();
    }

    /// Adds a gate that is open while the masked bits of its word have the expected value.
    pub(crate) fn add_gate(
        &mut self,
        gate: PlannedGate,
        place: P,
        width: Width,
        mask: u64,
        expected: u64,
    ) {
        self.gates.push(gate);
        self.gate_words.push(Word {
            place,
            length: width.bytes(),
            mask,
            before: expected,
            after: expected,
        });
    }

    /// Returns the words of the counts, one per key.
    pub(crate) fn count_words(&self) -> &[Word<P>] {
        &self.words[self.sites.len()..]
    }

    pub(crate) fn key_name(&self, index: usize) -> Arc<str> {
        Arc::clone(&self.changes[index].name)
    }
}
