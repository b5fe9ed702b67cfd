// SPDX-License-Identifier: Apache-2.0
//! The effect of a transaction on counts and holds, computed before anything is written.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use static_keys::{Op, apply};

use super::error::{KeyRefusal, KeysError};
use super::holds::{Hold, Holds, KeyHolds, KeyInstance, KeyState, Taking};
use super::request::{TracepointUpdate, UpdateRequest};
use super::shared::Book;

/// The holds whose references a transaction may drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The caller's holds. An op that would drop another reference is refused.
    Caller,
    /// All holds: first the caller's, then all others, then the references of the guest.
    Everyone,
    /// The holds that have expired at this time.
    Expired(Instant),
    /// The holds with these numbers.
    Numbered(HashSet<u64>),
}

impl Whose {
    /// Returns whether a transaction may drop the references of a hold.
    fn includes(&self, hold: &Hold, caller: &str) -> bool {
        match self {
            Self::Caller => *hold.holder == *caller,
            Self::Everyone => true,
            Self::Expired(now) => hold.has_expired(*now),
            Self::Numbered(numbers) => numbers.contains(&hold.number),
        }
    }
}

/// The effect of an op on the holds of a tracepoint's key. All holds of such a key share one
/// reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTracepoint {
    /// ENABLE takes a reference. DISABLE turns the key off, and is refused while other holders than
    /// [`Whose`] permits hold the key.
    Follow,
    /// ENABLE also holds a key that is on.
    Fire,
    /// The holds end. The key stays on for other holders and for probes of the guest.
    Leave,
    /// The holds end. The key stays on for other holders.
    Park,
    /// ENABLE leaves the key to the guest: all holds end.
    HandOver,
}

/// The principal of a transaction, and its permissions.
#[derive(Clone, Debug)]
pub struct Terms {
    whose: Whose,
    on_tracepoint: OnTracepoint,
    /// Template for the holds that the transaction adds.
    hold: Hold,
}

impl Terms {
    /// Creates the terms of a client's request that is made at `now`.
    pub fn new(request: &UpdateRequest, now: Instant) -> Self {
        let (whose, on_tracepoint) = match request.tracepoints {
            None if request.force => (Whose::Everyone, OnTracepoint::Follow),
            None => (Whose::Caller, OnTracepoint::Follow),
            Some(TracepointUpdate::Silence) => (Whose::Everyone, OnTracepoint::Follow),
            Some(TracepointUpdate::Fire) => (Whose::Caller, OnTracepoint::Fire),
            Some(TracepointUpdate::Park) => (Whose::Caller, OnTracepoint::Park),
            Some(TracepointUpdate::Leave) => (Whose::Caller, OnTracepoint::Leave),
            Some(TracepointUpdate::HandOver) => (Whose::Caller, OnTracepoint::HandOver),
        };
        Self {
            whose,
            on_tracepoint,
            hold: Hold::new(
                0,
                1,
                Taking {
                    holder: request.caller.name.as_str().into(),
                    reason: request.reason.as_str().into(),
                    since: SystemTime::now(),
                    expires: request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl)),
                    fired: on_tracepoint == OnTracepoint::Fire,
                },
            ),
        }
    }

    /// Creates the terms of a request that ends these holds.
    pub fn ending(whose: Whose, request: &UpdateRequest, now: Instant) -> Self {
        Self {
            whose,
            on_tracepoint: OnTracepoint::Leave,
            ..Self::new(request, now)
        }
    }

    /// Returns the holder of the references taken and dropped.
    pub fn holder(&self) -> &Arc<str> {
        &self.hold.holder
    }

    /// Returns whether references of other principals, and the guest's, are dropped.
    pub fn is_forced(&self) -> bool {
        self.whose == Whose::Everyone
    }

    fn includes(&self, hold: &Hold) -> bool {
        self.whose.includes(hold, self.holder())
    }

    fn is_own(&self, hold: &Hold) -> bool {
        hold.holder == *self.holder()
    }

    /// Returns whether a tracepoint that is to be disabled may stay on.
    pub fn may_leave_on(&self) -> bool {
        matches!(self.on_tracepoint, OnTracepoint::Leave | OnTracepoint::Park)
    }

    /// Returns whether a tracepoint that is to be disabled stays on.
    pub fn leave_on(&self, book: &Book, name: &str, key: KeyInstance, state: &KeyState) -> bool {
        // A key that is off stays off.
        if state.count == 0 || !self.may_leave_on() {
            return false;
        }
        let mut holds = book.holds.copy(key);
        holds.follow_guest(state);
        !self.end(&mut holds, state) || book.is_claimed_on(name, key, state)
    }

    /// Ends holds on a tracepoint by [`OnTracepoint::Leave`] or [`OnTracepoint::Park`]. Returns
    /// whether its key must be turned off.
    fn end(&self, holds: &mut KeyHolds, state: &KeyState) -> bool {
        let off = holds.end(state.probes, |hold| self.includes(hold));
        if self.on_tracepoint != OnTracepoint::Park {
            return off;
        }
        holds.set_probes(state.probes);
        holds.as_slice().is_empty()
    }
}

/// The keys of one transaction in the order of their first op, with the holds after the
/// transaction.
#[derive(Debug, Default)]
pub struct Draft {
    keys: Vec<DraftKey>,
}

#[derive(Debug)]
struct DraftKey {
    key: KeyInstance,
    state: KeyState,
    holds: KeyHolds,
    /// True if a claim keeps the tracepoint on without a hold.
    is_claimed_on: bool,
    /// The transaction took references.
    taken: bool,
}

/// The reason for which the holds do not follow an op.
#[derive(Debug)]
pub enum Unfollowed {
    /// The holds changed after the op was chosen, so another op may now be the right one.
    Raced,
    /// The op drops a reference that [`Whose`] excludes.
    Refused(KeysError),
}

impl From<KeysError> for Unfollowed {
    fn from(error: KeysError) -> Self {
        Self::Refused(error)
    }
}

impl Draft {
    /// Reserves room for this many keys.
    pub fn with_capacity(keys: usize) -> Self {
        Self {
            keys: Vec::with_capacity(keys),
        }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the keys.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = KeyInstance> {
        self.keys.iter().map(|of| of.key)
    }

    /// Returns the key with this index, which was added before.
    pub fn key(&self, index: usize) -> KeyInstance {
        self.keys[index].key
    }

    /// Adds the next key with its state in guest memory, and with its holds except those that the
    /// guest has voided.
    pub fn open(&mut self, book: &Book, key: KeyInstance, name: &Arc<str>, state: KeyState) {
        let mut holds = book.holds.copy(key);
        holds.set_name(name);
        holds.follow_guest(&state);
        self.keys.push(DraftKey {
            key,
            state,
            holds,
            is_claimed_on: book.is_claimed_on(name, key, &state),
            taken: false,
        });
    }

    /// Adds the next key with its state in guest memory, and with its holds after the transaction.
    pub fn set(&mut self, key: KeyInstance, state: KeyState, holds: KeyHolds) {
        self.keys.push(DraftKey {
            key,
            state,
            holds,
            is_claimed_on: false,
            taken: false,
        });
    }

    /// Returns the keys and their holds after the transaction.
    pub fn holds(&self) -> impl Iterator<Item = (KeyInstance, &KeyHolds)> {
        self.keys.iter().map(|of| (of.key, &of.holds))
    }

    /// Applies one op to the key with this index. An op that the engine will refuse is not refused
    /// here, so that the caller gets the engine's error.
    ///
    /// # Errors
    /// [`Unfollowed`]; NOT_HOLDER if the op is refused.
    pub fn follow(
        &mut self,
        index: usize,
        name: &str,
        op: Op,
        terms: &Terms,
    ) -> Result<(), Unfollowed> {
        let Some(of) = self.keys.get_mut(index) else {
            return Ok(());
        };
        let count = of.state.count;
        let Ok(after) = apply(count, op) else {
            return Ok(());
        };
        if of.state.tracepoint {
            of.follow_tracepoint(name, op, after, terms)?;
        } else if after > count {
            of.holds.take(&terms.hold);
            of.taken = true;
        } else if after < count {
            let forced = terms.is_forced();
            let dropped = (forced && of.holds.drop_one(|hold| terms.is_own(hold)))
                || of.holds.drop_one(|hold| terms.includes(hold));
            // References that no client holds belong to the guest.
            if !dropped && !forced {
                return Err(not_holder(name, &of.holds, count).into());
            }
        }
        of.state.count = after;
        Ok(())
    }

    /// Records the holds after the transaction. Returns each key with the number of the hold that
    /// took its references; `None` if none was taken.
    pub fn book(self, holds: &mut Holds, terms: &Terms) -> Vec<(KeyInstance, Option<u64>)> {
        let book = |of: DraftKey| {
            let holds = holds.put(of.key, of.holds);
            let number = || holds?.number_of(&terms.hold);
            (of.key, of.taken.then(number).flatten())
        };
        self.keys.into_iter().map(book).collect()
    }
}

impl DraftKey {
    /// Turns a tracepoint's key on or off, whether or not the caller holds it.
    fn follow_tracepoint(
        &mut self,
        name: &str,
        op: Op,
        after: i32,
        terms: &Terms,
    ) -> Result<(), Unfollowed> {
        let Self {
            state,
            holds,
            is_claimed_on,
            ..
        } = self;
        match (op, terms.on_tracepoint) {
            (Op::Enable, OnTracepoint::Fire) => {
                holds.fire(&terms.hold, state.probes);
                self.taken = true;
            }
            (Op::Enable, OnTracepoint::Follow) => {
                if after > state.count {
                    holds.take(&terms.hold);
                    self.taken = true;
                }
            }
            (Op::Enable, OnTracepoint::HandOver) => holds.clear(),
            // The op leaves the key on, for other holders or other probes.
            (Op::Enable, OnTracepoint::Leave | OnTracepoint::Park) => {
                if state.count == 0 || terms.end(holds, state) && !*is_claimed_on {
                    return Err(Unfollowed::Raced);
                }
            }
            (Op::Disable, OnTracepoint::Leave | OnTracepoint::Park) => {
                let off = terms.end(holds, state) && !*is_claimed_on;
                if !off && state.count > 0 {
                    return Err(Unfollowed::Raced);
                }
            }
            (Op::Disable, _) if terms.is_forced() => holds.clear(),
            (Op::Disable, _) => {
                let is_own = |hold: &Hold| terms.is_own(hold);
                let others = holds.as_slice().iter().any(|hold| !is_own(hold));
                let mut stays = || others || !holds.end(state.probes, is_own) || *is_claimed_on;
                if after < state.count && stays() {
                    return Err(not_holder(name, holds, state.count).into());
                }
            }
            // Tracepoints are not counted: the engine refuses inc and dec.
            (Op::Inc | Op::Dec, _) => {}
        }
        Ok(())
    }
}

fn not_holder(name: &str, holds: &KeyHolds, count: i32) -> KeysError {
    let mut holders: Vec<&str> = holds.as_slice().iter().map(|hold| &*hold.holder).collect();
    holders.sort_unstable();
    holders.dedup();
    let whose = if holders.is_empty() {
        "the guest's own code".to_owned()
    } else {
        format!("{} and perhaps the guest's own code", holders.join(", "))
    };
    KeysError::KeyRefused {
        key: name.into(),
        reason: KeyRefusal::NotHolder,
        message: format!(
            "key {name}: you hold none of its {count} references that the op could drop, they belong to {whose}; take one first, or drop theirs with force"
        ),
    }
}

#[cfg(test)]
mod tests;
