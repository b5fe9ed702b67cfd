// SPDX-License-Identifier: Apache-2.0
//! Writes a change, reads it back, and undoes all of it if one write fails.
//!
//! | method           | guest      | writes                                                      |
//! |------------------|------------|-------------------------------------------------------------|
//! | `commit`         | is stopped | sites by address, then counts                               |
//! | `commit_running` | runs       | counts alone, each by compare-and-exchange                  |
//!
//! After its writes, each method records the changes for the guest (see [`crate::records`]).

use std::sync::Arc;

use crate::busy::{Busy, Gate};
use crate::instruction::{Hex, Size, replace};
use crate::key::KeyChange;
use crate::memory::{AccessFault, GuestMemory, Word, first_bytes};
use crate::plan::{Plan, PlannedGate, Update};
use crate::refcount::{Op, crosses_zero};
use crate::verify::VerifyError;

/// The result of a successful commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitOutcome {
    /// Number of keys whose count was changed.
    pub keys: usize,
    /// Number of sites that were written.
    pub sites: usize,
}

/// Result of the undo after a failed commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum Undo {
    /// Every byte has its previous value again.
    Complete,
    /// Some writes could not be undone.
    Incomplete { left: usize },
}

impl Undo {
    fn of(left: usize) -> Self {
        if left == 0 {
            Self::Complete
        } else {
            Self::Incomplete { left }
        }
    }

    fn sentence(self) -> &'static str {
        match self {
            Self::Complete => "every write before it was undone, nothing has changed",
            Self::Incomplete { .. } => {
                "not every write could be undone, the guest's keys are inconsistent; restart the guest"
            }
        }
    }
}

/// One write of a plan, in a form that can be stored outside this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write<P> {
    /// Index of the key in the plan's keys.
    pub key: usize,
    /// Place of the bytes.
    pub place: P,
    /// Number of bytes, at most 5.
    pub length: usize,
    /// The bytes before the commit. Only the first `length` bytes are valid.
    pub before: [u8; 5],
    /// The bytes after the commit.
    pub after: [u8; 5],
}

/// A word of the kernel that has a known value while the kernel changes neither its keys nor its
/// text, in a form that can be stored outside this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateWord<P> {
    /// Place of the word.
    pub place: P,
    /// Length in bytes: 1, 2, 4 or 8.
    pub length: usize,
    /// The bits that are compared.
    pub mask: u64,
    /// The value of these bits while the gate is open.
    pub open: u64,
}

/// The reason why a write failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum WriteError {
    /// The access was refused.
    #[error(transparent)]
    Fault(#[from] AccessFault),
    /// The bytes read back are not the bytes written.
    #[error("read back {}, wrote {}", Hex(&.found[..*.length]), Hex(&.written[..*.length]))]
    ReadBack {
        length: usize,
        written: [u8; 5],
        found: [u8; 5],
    },
}

/// A commit failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key {key}: writing {address:#x} failed ({cause}); {}", .undo.sentence())]
#[allow(missing_docs, reason = "the message names the fields")]
pub struct CommitError {
    pub key: Arc<str>,
    pub address: u64,
    pub cause: WriteError,
    pub undo: Undo,
}

/// A change of the running guest was not made, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunningError {
    /// The guest changed a key first, or a gate is closed. This commit changed nothing; plan again.
    #[error(transparent)]
    Raced(#[from] VerifyError),
    /// A write failed. The error says whether the undo was complete.
    #[error(transparent)]
    Failed(#[from] CommitError),
    /// The guest changed a key before this commit could change it. The guest also changed a key
    /// that this commit had already changed, and that key can be rolled back only by crossing zero,
    /// which needs a pause.
    #[error(
        "key {key}: the guest dropped a reference that was to be rolled back; {} references are still held",
        .left.len()
    )]
    Entangled {
        /// Full name of the key that could not be changed.
        key: Arc<str>,
        /// The operations that drop the leftover references.
        left: Vec<Update>,
    },
}

impl<P: Copy> Plan<P> {
    /// Writes the sites and the counts of a verified plan. The guest must still be stopped.
    /// Allocates nothing.
    ///
    /// # Errors
    /// [`CommitError`], which says whether the undo was complete.
    pub fn commit<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
    ) -> Result<CommitOutcome, CommitError> {
        let mut index = 0;
        // The number of words that may have been written.
        let mut reached = 0;
        while let Some(rest) = self.words.get(index..) {
            let leading = memory.write_leading(rest);
            reached = index.saturating_add(leading.touched).max(reached);
            index += leading.written;
            let Some(word) = self.words.get(index) else {
                break;
            };
            let result = match leading.differs {
                Some(found) => Err(read_back(word, word.after, found)),
                None => put(memory, word, word.after),
            };
            if let Err(cause) = result {
                let end = reached.clamp(index + 1, self.words.len());
                let undo = undo(memory, &self.words[..end]);
                let (key, address) = self.written(index);
                return Err(CommitError {
                    key: self.key_name(key),
                    address,
                    cause,
                    undo,
                });
            }
            index += 1;
        }
        if let Some(records) = &self.records {
            records.append(memory, self.keys_changed(), self.changed);
        }
        Ok(CommitOutcome {
            keys: self.changed,
            sites: self.sites.len(),
        })
    }

    /// Returns whether memory still holds everything that [`Plan::commit`] wrote. If not, the
    /// guest's memory was replaced, and [`Plan::revert`] would write to a state for which the plan
    /// was not made. Allocates nothing.
    pub fn is_in_place<M: GuestMemory<Place = P>>(&self, memory: &M) -> bool {
        let mut words = self.words.iter();
        words.all(|word| holds(memory, word, word.after).is_ok())
    }

    /// Undoes a whole commit. The guest must still be stopped. Allocates nothing.
    pub fn revert<M: GuestMemory<Place = P>>(&self, memory: &M) -> Undo {
        undo(memory, &self.words)
    }

    /// Returns the index of the key that a write belongs to, and the address of its site or count.
    fn written(&self, index: usize) -> (usize, u64) {
        match self.sites.get(index) {
            Some(site) => (site.key, site.address),
            None => {
                let key = index - self.sites.len();
                (key, self.changes[key].key.0)
            }
        }
    }

    /// Returns the writes that [`Plan::commit`] makes, in order.
    pub fn writes(&self) -> impl Iterator<Item = Write<P>> + '_ {
        self.words
            .iter()
            .enumerate()
            .map(move |(index, word)| Write {
                key: self.written(index).0,
                place: word.place,
                length: word.length,
                before: first_bytes(word.before),
                after: first_bytes(word.after),
            })
    }

    /// Returns those kernel gates of the plan for which a rollback waits (see
    /// [`opens_again`](crate::GateKind::opens_again)). Gates of modules and keys are not included:
    /// a rollback checks the bytes of the sites instead, and would wait forever for such a gate
    /// after a module was loaded or unloaded.
    pub fn gates(&self) -> impl Iterator<Item = GateWord<P>> + '_ {
        let opens_again = |gate: &PlannedGate| match gate {
            PlannedGate::Named(Gate::Kernel(listed)) => listed.kind.opens_again(),
            _ => false,
        };
        let gates = self.gates.iter().zip(&self.gate_words);
        gates
            .filter(move |(gate, _)| opens_again(gate))
            .map(|(_, word)| GateWord {
                place: word.place,
                length: word.length,
                mask: word.mask,
                open: word.before,
            })
    }

    pub(crate) fn keys_changed(&self) -> impl Iterator<Item = &KeyChange> + Clone {
        self.changes
            .iter()
            .filter(|change| change.before != change.after)
    }

    /// Commits a plan that needs no pause while the guest runs. Each count is written by
    /// compare-and-exchange, which fails if the guest changed it. The counts that were already
    /// written are then rolled back by the difference that this plan made, because the guest may
    /// have changed them too.
    ///
    /// # Errors
    /// [`RunningError`]. A plan that needs a pause is refused as [`VerifyError::Busy`].
    pub fn commit_running<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
    ) -> Result<CommitOutcome, RunningError> {
        if let Some(change) = self.changes.first().filter(|_| self.needs_pause) {
            let why = "it needs a pause";
            return Err(VerifyError::from(Busy::Users {
                key: change.name.clone(),
                why,
            })
            .into());
        }
        self.verify_gates(memory)?;
        for (index, (change, word)) in self.changes.iter().zip(self.count_words()).enumerate() {
            let KeyChange { before, after, .. } = *change;
            let exchanged = memory.compare_exchange_u32(
                word.place,
                before.cast_unsigned(),
                after.cast_unsigned(),
            );
            let failure = match exchanged {
                Ok(Ok(_)) => continue,
                Ok(Err(found)) => Ok(found.cast_signed()),
                Err(fault) => Err(fault),
            };
            let left = self.undo_running(memory, index);
            let name = change.name.clone();
            return Err(match failure {
                Ok(_) if !left.is_empty() => RunningError::Entangled {
                    key: name,
                    left: left.into_iter().flat_map(back).collect(),
                },
                Ok(found) => VerifyError::from(Busy::Count {
                    key: name,
                    expected: before,
                    found,
                })
                .into(),
                Err(fault) => CommitError {
                    key: name,
                    address: change.key.0,
                    cause: fault.into(),
                    undo: Undo::of(left.len()),
                }
                .into(),
            });
        }
        if let Some(records) = &self.records {
            records.append(memory, self.keys_changed(), self.changed);
        }
        Ok(CommitOutcome {
            keys: self.changed,
            sites: 0,
        })
    }

    /// Rolls back the counts of the keys before index `failed`. Returns the changes that could not
    /// be rolled back.
    fn undo_running<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
        failed: usize,
    ) -> Vec<&KeyChange> {
        let words = self.count_words();
        let keys = self.changes.iter().zip(words).take(failed).rev();
        let made = keys.filter(|(change, _)| change.before != change.after);
        made.filter(|(change, word)| !give_back(memory, word.place, change))
            .map(|(change, _)| change)
            .collect()
    }
}

/// Returns the operations that undo a change, one per reference.
fn back(change: &KeyChange) -> impl Iterator<Item = Update> {
    let key = change.key;
    let op = if change.after > change.before {
        Op::Dec
    } else {
        Op::Inc
    };
    let references = change.after.abs_diff(change.before);
    (0..references).map(move |_| Update { key, op })
}

/// The maximum number of attempts to roll back one change while the guest changes the same count.
const GIVE_BACK_ATTEMPTS: usize = 1000;

fn give_back<M: GuestMemory>(memory: &M, place: M::Place, change: &KeyChange) -> bool {
    let mut current = change.after;
    for _ in 0..GIVE_BACK_ATTEMPTS {
        // A negative count means that the guest's own change is in progress.
        let Some(back) = current
            .checked_sub(change.after)
            .filter(|_| current >= 0)
            .and_then(|drift| change.before.checked_add(drift))
        else {
            return false;
        };
        // The rollback may cross zero only if the change itself crossed zero, which happens only
        // without jump labels.
        if back < 0 || crosses_zero(current, back) && !crosses_zero(change.before, change.after) {
            return false;
        }
        match memory.compare_exchange_u32(place, current.cast_unsigned(), back.cast_unsigned()) {
            Ok(Ok(_)) => return true,
            Ok(Err(found)) => current = found.cast_signed(),
            Err(AccessFault) => return false,
        }
    }
    false
}

/// Undoes writes in reverse order. Some of them may be partly done or not made.
fn undo<M: GuestMemory>(memory: &M, words: &[Word<M::Place>]) -> Undo {
    let words = words.iter().rev();
    let left = words.filter(|word| put(memory, word, word.before).is_err());
    Undo::of(left.count())
}

/// Writes a value to a word and reads it back. No vCPU can execute a partly written instruction,
/// even if this process is killed.
fn put<M: GuestMemory>(memory: &M, word: &Word<M::Place>, value: u64) -> Result<(), WriteError> {
    let bytes = value.to_le_bytes();
    let bytes = &bytes[..word.length];
    let is_instruction = Size::of(word.length).is_some();
    if is_instruction && !memory.writes_whole(word.place, word.length) {
        replace(bytes, |bytes| memory.write(word.place, bytes))?;
    } else {
        memory.write(word.place, bytes)?;
    }
    holds(memory, word, value)
}

/// Checks that a word of at most 5 bytes has this value.
fn holds<M: GuestMemory>(memory: &M, word: &Word<M::Place>, value: u64) -> Result<(), WriteError> {
    let found = memory.load(word.place, word.length)?;
    if found == value {
        return Ok(());
    }
    Err(read_back(word, value, found))
}

/// Returns the error of a word that was written and read back as another value.
fn read_back<P>(word: &Word<P>, written: u64, found: u64) -> WriteError {
    WriteError::ReadBack {
        length: word.length,
        written: first_bytes(written),
        found: first_bytes(found),
    }
}
