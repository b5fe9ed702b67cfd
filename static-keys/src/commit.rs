// SPDX-License-Identifier: Apache-2.0
//! The change itself: write, read back, and take everything back if one write fails.
//!
//! | way              | guest      | what is written                                             |
//! |------------------|------------|-------------------------------------------------------------|
//! | `commit`         | is stopped | sites by address, then counts                               |
//! | `commit_running` | runs       | counts alone, each by compare-and-exchange                  |

use std::sync::Arc;

use crate::busy::Busy;
use crate::instruction::Hex;
use crate::memory::{AccessFault, GuestMemory};
use crate::plan::{KeyChange, Plan, Update};
use crate::refcount::{Op, crosses_zero};
use crate::verify::VerifyError;

/// What a commit has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Keys whose count was written.
    pub keys: usize,
    /// Sites that were written.
    pub sites: usize,
}

/// Whether the guest is as it was before a failed commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    /// Every byte.
    Complete,
    /// Some writes could not be taken back.
    Incomplete {
        /// How many.
        left: usize,
    },
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
            Self::Complete => "everything written before it was taken back, nothing has changed",
            Self::Incomplete { .. } => {
                "not all could be taken back, the guest's keys are inconsistent; restart the guest"
            }
        }
    }
}

/// Why a write counts as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The access itself.
    #[error(transparent)]
    Fault(#[from] AccessFault),
    /// Other bytes came back.
    #[error("read back {}, wrote {}", Hex(&.found[..*.length]), Hex(&.written[..*.length]))]
    ReadBack {
        /// Number of bytes that count.
        length: usize,
        /// As written.
        written: [u8; 5],
        /// As read.
        found: [u8; 5],
    },
}

/// A commit has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key {key}: writing {address:#x} failed ({cause}); {}", .undo.sentence())]
pub struct CommitError {
    /// Full name.
    pub key: Arc<str>,
    /// Of the site or the count.
    pub address: u64,
    /// What went wrong.
    pub cause: Cause,
    /// Whether the guest is as before.
    pub undo: Undo,
}

/// A commit beside the running guest was not made, or has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunningError {
    /// The guest was faster. Nothing has changed; plan anew.
    #[error(transparent)]
    Raced(#[from] VerifyError),
    /// A write has failed, or could not be taken back.
    #[error(transparent)]
    Failed(#[from] CommitError),
    /// The guest was faster with one key, and then with another one that had been changed before it
    /// and can only be taken back by crossing zero, which needs a pause.
    #[error(
        "key {key}: the guest has used up a reference that was to be given back; {} references are left over",
        .left.len()
    )]
    Entangled {
        /// Full name of the key that could not be changed.
        key: Arc<str>,
        /// What gives back the references that are left over.
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

/// Of an instruction or of a count.
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
    /// Writes the sites and the counts of a plan that was verified, the guest still being stopped.
    /// Allocates nothing.
    ///
    /// # Errors
    /// [`CommitError`], which says whether the guest is as before.
    pub fn commit<M: GuestMemory<Place = P>>(&self, memory: &M) -> Result<Outcome, CommitError> {
        for index in 0..self.step_count() {
            let step = self.step(index);
            if let Err(cause) = put(memory, step.place, step.after.as_slice()) {
                let undo = self.undo(memory, index);
                return Err(CommitError {
                    key: self.key_name(step.key),
                    address: step.address,
                    cause,
                    undo,
                });
            }
        }
        Ok(Outcome {
            keys: self.keys_changed().count(),
            sites: self.sites.len(),
        })
    }

    /// Takes back a whole commit, the guest still being stopped. Allocates nothing.
    pub fn revert<M: GuestMemory<Place = P>>(&self, memory: &M) -> Undo {
        match self.step_count().checked_sub(1) {
            Some(last) => self.undo(memory, last),
            None => Undo::Complete,
        }
    }

    /// Takes back the steps up to `failed`, which may have been made in part, in reverse.
    fn undo<M: GuestMemory<Place = P>>(&self, memory: &M, failed: usize) -> Undo {
        let left = (0..=failed).rev().filter(|&index| {
            let step = self.step(index);
            put(memory, step.place, step.before.as_slice()).is_err()
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

    fn keys_changed(&self) -> impl Iterator<Item = &KeyChange> {
        self.changes()
            .filter(|change| change.before != change.after)
    }

    /// Makes a plan that needs no pause, beside the running guest: each count by compare-and-exchange,
    /// which loses against the guest's own change of the same count. Then those before it are taken
    /// back by the difference, since the guest may have counted on meanwhile.
    ///
    /// # Errors
    /// [`RunningError`]. A plan that needs a pause is refused as [`VerifyError::Busy`].
    pub fn commit_running<M: GuestMemory<Place = P>>(
        &self,
        memory: &M,
    ) -> Result<Outcome, RunningError> {
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
        Ok(Outcome {
            keys: self.keys_changed().count(),
            sites: 0,
        })
    }

    /// Takes back the counts before `failed`; answers those that could not be.
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

/// The operations that take a change back, one for each reference.
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

/// Attempts to give back one change against a guest that counts at the same time.
const GIVE_BACK_ATTEMPTS: usize = 1000;

fn give_back<M: GuestMemory>(memory: &M, place: M::Place, change: &KeyChange) -> bool {
    let mut current = change.after;
    for _ in 0..GIVE_BACK_ATTEMPTS {
        // A negative count is the guest's own change in progress.
        let Some(back) = current
            .checked_sub(change.after)
            .filter(|_| current >= 0)
            .and_then(|drift| change.before.checked_add(drift))
        else {
            return false;
        };
        // A crossing is right only where the change itself has crossed: without jump labels.
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

/// Writes and reads back.
fn put<M: GuestMemory>(memory: &M, place: M::Place, bytes: &[u8]) -> Result<(), Cause> {
    memory.write(place, bytes)?;
    let length = bytes.len();
    let mut found = [0; 5];
    memory.read(place, &mut found[..length])?;
    if found[..length] == *bytes {
        return Ok(());
    }
    let mut written = [0; 5];
    written[..length].copy_from_slice(bytes);
    Err(Cause::ReadBack {
        length,
        written,
        found,
    })
}
