// SPDX-License-Identifier: Apache-2.0
//! Writes a change, reads it back, and undoes all of it if one write fails.
//!
//! | method           | guest      | writes                                                      |
//! |------------------|------------|-------------------------------------------------------------|
//! | `commit`         | is stopped | sites by address, then counts                               |
//! | `commit_running` | runs       | counts alone, each by compare-and-exchange                  |
//!
//! After its writes, each records the changes for the guest (see [`crate::records`]).

use std::sync::Arc;

use crate::busy::{Busy, Gate, Guard};
use crate::instruction::{Hex, replace};
use crate::key::KeyChange;
use crate::memory::{AccessFault, GuestMemory};
use crate::plan::{Plan, Update};
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

/// One write of a plan, for a record that outlives this process.
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
/// text, for a record that outlives this process.
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
    /// The guest changed the key first. Nothing has changed; plan again.
    #[error(transparent)]
    Raced(#[from] VerifyError),
    /// A write failed, or could not be undone.
    #[error(transparent)]
    Failed(#[from] CommitError),
    /// The guest changed a key before this commit could, and also a key that this commit had
    /// already changed. The latter can be rolled back only by crossing zero, which needs a pause.
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

/// One write of a plan.
#[derive(Clone, Copy)]
struct Step<'a, P> {
    place: P,
    address: u64,
    key: usize,
    before: Bytes<'a>,
    after: Bytes<'a>,
}

/// Bytes of an instruction or of a count.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    Instruction(&'a [u8]),
    Count([u8; 4]),
}

impl Bytes<'_> {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Instruction(bytes) => bytes,
            Self::Count(bytes) => bytes,
        }
    }
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
        for index in 0..self.step_count() {
            let step = self.step(index);
            if let Err(cause) = put(memory, step.place, step.after) {
                let undo = self.undo(memory, index);
                return Err(CommitError {
                    key: self.key_name(step.key),
                    address: step.address,
                    cause,
                    undo,
                });
            }
        }
        if let Some(records) = &self.records {
            records.append(memory, self.keys_changed());
        }
        Ok(CommitOutcome {
            keys: self.keys_changed().count(),
            sites: self.sites.len(),
        })
    }

    /// Returns whether memory still holds everything that [`Plan::commit`] wrote. If not, the
    /// guest's memory was replaced, and [`Plan::revert`] would write to a state for which the plan
    /// was not made. Allocates nothing.
    pub fn is_in_place<M: GuestMemory<Place = P>>(&self, memory: &M) -> bool {
        (0..self.step_count()).all(|index| {
            let step = self.step(index);
            holds(memory, step.place, step.after.as_slice()).is_ok()
        })
    }

    /// Undoes a whole commit. The guest must still be stopped. Allocates nothing.
    pub fn revert<M: GuestMemory<Place = P>>(&self, memory: &M) -> Undo {
        match self.step_count().checked_sub(1) {
            Some(last) => self.undo(memory, last),
            None => Undo::Complete,
        }
    }

    /// Undoes the steps up to `failed` in reverse order. The failed step may be partly written.
    fn undo<M: GuestMemory<Place = P>>(&self, memory: &M, failed: usize) -> Undo {
        let left = (0..=failed).rev().filter(|&index| {
            let step = self.step(index);
            put(memory, step.place, step.before).is_err()
        });
        Undo::of(left.count())
    }

    fn step_count(&self) -> usize {
        self.sites.len() + self.keys.len()
    }

    fn step(&self, index: usize) -> Step<'_, P> {
        match self.sites.get(index) {
            Some(site) => Step {
                place: site.place,
                address: site.address,
                key: site.key,
                before: Bytes::Instruction(site.before.as_bytes()),
                after: Bytes::Instruction(site.after.as_bytes()),
            },
            None => {
                let key = index - self.sites.len();
                let planned = &self.keys[key];
                let KeyChange { before, after, .. } = planned.change;
                Step {
                    place: planned.place,
                    address: planned.change.key.0,
                    key,
                    before: Bytes::Count(before.to_le_bytes()),
                    after: Bytes::Count(after.to_le_bytes()),
                }
            }
        }
    }

    /// Returns the writes that [`Plan::commit`] makes, in order.
    pub fn writes(&self) -> impl Iterator<Item = Write<P>> + '_ {
        let padded = |bytes: &[u8]| {
            let mut padded = [0; 5];
            padded[..bytes.len()].copy_from_slice(bytes);
            padded
        };
        (0..self.step_count()).map(move |index| {
            let step = self.step(index);
            Write {
                key: step.key,
                place: step.place,
                length: step.before.as_slice().len(),
                before: padded(step.before.as_slice()),
                after: padded(step.after.as_slice()),
            }
        })
    }

    /// Returns the gates of the whole kernel that concern the plan and open again once closed.
    /// Gates of modules and keys are not included: a later rollback checks the bytes of the sites
    /// instead, and would wait forever for such a gate after a module was loaded or unloaded.
    pub fn gates(&self) -> impl Iterator<Item = GateWord<P>> + '_ {
        let opens_again = |guard: &&Guard<P>| match &guard.gate {
            Gate::Kernel(listed) => listed.kind.opens_again(),
            _ => false,
        };
        self.guards
            .iter()
            .filter(opens_again)
            .map(|guard| GateWord {
                place: guard.place,
                length: guard.width.bytes(),
                mask: guard.mask,
                open: guard.expected,
            })
    }

    pub(crate) fn keys_changed(&self) -> impl Iterator<Item = &KeyChange> + Clone {
        self.changes()
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
        if let Some(key) = self.keys.iter().find(|_| self.needs_pause) {
            let why = "it needs a pause";
            return Err(VerifyError::from(Busy::Users {
                key: key.change.name.clone(),
                why,
            })
            .into());
        }
        self.verify_gates(memory)?;
        for (index, key) in self.keys.iter().enumerate() {
            let KeyChange { before, after, .. } = key.change;
            let exchanged = memory.compare_exchange_u32(
                key.place,
                before.cast_unsigned(),
                after.cast_unsigned(),
            );
            let failure = match exchanged {
                Ok(Ok(_)) => continue,
                Ok(Err(found)) => Ok(found.cast_signed()),
                Err(fault) => Err(fault),
            };
            let left = self.undo_running(memory, index);
            let name = key.change.name.clone();
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
                    address: key.change.key.0,
                    cause: fault.into(),
                    undo: Undo::of(left.len()),
                }
                .into(),
            });
        }
        if let Some(records) = &self.records {
            records.append(memory, self.keys_changed());
        }
        Ok(CommitOutcome {
            keys: self.keys_changed().count(),
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
        let made = self.keys[..failed]
            .iter()
            .rev()
            .filter(|key| key.change.before != key.change.after);
        made.filter(|key| !give_back(memory, key.place, &key.change))
            .map(|key| &key.change)
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
        // The rollback may cross zero only if the change did, which happens only without jump
        // labels.
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

/// Writes `bytes` and reads them back. No vCPU can execute a partly written instruction, even if
/// this process is killed.
fn put<M: GuestMemory>(memory: &M, place: M::Place, bytes: Bytes<'_>) -> Result<(), WriteError> {
    match bytes {
        Bytes::Instruction(new) if !memory.writes_whole(place, new.len()) => {
            replace(new, |bytes| memory.write(place, bytes))?;
        }
        Bytes::Instruction(_) | Bytes::Count(_) => memory.write(place, bytes.as_slice())?,
    }
    holds(memory, place, bytes.as_slice())
}

/// Checks that memory holds these bytes, at most 5.
fn holds<M: GuestMemory>(memory: &M, place: M::Place, bytes: &[u8]) -> Result<(), WriteError> {
    let length = bytes.len();
    let mut found = [0; 5];
    memory.read(place, &mut found[..length])?;
    if found[..length] == *bytes {
        return Ok(());
    }
    let mut written = [0; 5];
    written[..length].copy_from_slice(bytes);
    Err(WriteError::ReadBack {
        length,
        written,
        found,
    })
}
