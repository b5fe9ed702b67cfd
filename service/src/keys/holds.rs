// SPDX-License-Identifier: Apache-2.0
//! The ledger: the references that clients of this service have taken on keys.
//!
//! The comment of `StaticKeysService` in `static_keys.proto` has the rules. A tracepoint's key is
//! on or off, so its holds share one reference: each holder has one hold, and the key is turned off
//! when the last hold ends.

mod key;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use foldhash::fast::RandomState;
use static_keys::{KeyId, Probes};

pub use self::key::KeyHolds;

/// Delay before an expired hold is retried: first and maximum.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(64);

/// A key for as long as it exists. The keys of another module at the same address are other
/// instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyInstance {
    /// Number of the registration or module load that defines the key. Never reused.
    pub epoch: u64,
    /// Index of the key.
    pub id: KeyId,
}

/// The state in guest memory on which a key's holds depend.
#[derive(Clone, Copy, Debug)]
pub struct KeyState {
    /// The raw count.
    pub count: i32,
    /// The key belongs to a tracepoint, so its holds share one reference.
    pub tracepoint: bool,
    /// Probes attached to the tracepoint; `None` for other keys.
    pub probes: Option<Probes>,
}

/// References of one holder on one key with the same reason and expiry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Number in its id; 0 until the transaction that takes it is made. Never reused.
    pub number: u64,
    /// Number of references, at least 1.
    pub references: u32,
    /// The holds that one transaction takes share it.
    taking: Arc<Taking>,
}

/// The act that took references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taking {
    /// The principal that took the references.
    pub holder: Arc<str>,
    /// Reason that the holder gave.
    pub reason: Arc<str>,
    /// The time at which the first reference was taken.
    pub since: SystemTime,
    /// Expiry by the service's clock, and as wall-clock time.
    pub expires: Option<(Instant, SystemTime)>,
    /// The hold was taken by firing an armed event. It serves the agent's probe, regardless of
    /// other probes.
    pub fired: bool,
}

/// A hold has the fields of its [`Taking`].
impl Deref for Hold {
    type Target = Taking;

    fn deref(&self) -> &Taking {
        &self.taking
    }
}

impl Hold {
    /// Creates a hold of this many references.
    pub fn new(number: u64, references: u32, taking: Taking) -> Self {
        Self {
            number,
            references,
            taking: Arc::new(taking),
        }
    }

    /// Returns whether the hold has expired.
    pub fn has_expired(&self, now: Instant) -> bool {
        self.expires.is_some_and(|(at, _)| at <= now)
    }

    /// Returns whether the references of both can be one hold.
    fn is_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.taking, &other.taking)
            || self.holder == other.holder
                && self.fired == other.fired
                && (self.fired || self.reason == other.reason && self.expires == other.expires)
    }

    /// Returns the taking of this hold alone, to be changed.
    fn taking_mut(&mut self) -> &mut Taking {
        Arc::make_mut(&mut self.taking)
    }
}

/// All holds.
#[derive(Clone, Debug, Default)]
pub struct Holds {
    /// No entry is empty.
    by_key: HashMap<KeyInstance, KeyHolds, RandomState>,
    /// Number of the keys with a hold that expires.
    expiring: usize,
    /// Number of the newest hold.
    newest: u64,
}

impl Holds {
    /// Returns the holds on one key.
    pub fn of(&self, key: KeyInstance) -> &[Hold] {
        self.get(key).map_or(&[], KeyHolds::as_slice)
    }

    /// Returns the holds on one key, with the key's name.
    pub fn get(&self, key: KeyInstance) -> Option<&KeyHolds> {
        self.by_key.get(&key)
    }

    /// Returns the keys that have holds.
    pub fn iter(&self) -> impl Iterator<Item = (KeyInstance, &KeyHolds)> {
        self.by_key.iter().map(|(key, holds)| (*key, holds))
    }

    /// Returns a copy of the holds on a key, to be changed and put back with [`Holds::put`].
    pub fn copy(&self, key: KeyInstance) -> KeyHolds {
        self.by_key.get(&key).cloned().unwrap_or_default()
    }

    /// Replaces the holds on a key that was just changed, numbers new ones, and clears a failed
    /// expiry. Returns the holds, unless there are none.
    pub fn put(&mut self, key: KeyInstance, mut holds: KeyHolds) -> Option<&KeyHolds> {
        if holds.as_slice().is_empty() {
            self.forget(key);
            return None;
        }
        holds.number(&mut self.newest);
        holds.reset_retry();
        self.expiring += usize::from(holds.expire());
        Some(match self.by_key.entry(key) {
            Entry::Vacant(entry) => entry.insert(holds),
            Entry::Occupied(mut entry) => {
                self.expiring -= usize::from(entry.insert(holds).expire());
                entry.into_mut()
            }
        })
    }

    /// Returns the number of the newest hold.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Makes the numbers of new holds greater than this one.
    pub fn number_after(&mut self, newest: u64) {
        self.newest = self.newest.max(newest);
    }

    /// Returns the number of references on `key` in all holds.
    pub fn references(&self, key: KeyInstance) -> u32 {
        self.of(key).iter().map(|hold| hold.references).sum()
    }

    /// Returns the keys of these holds. Unknown holds are skipped.
    pub fn find(&self, numbers: &HashSet<u64>) -> HashMap<u64, KeyInstance> {
        let all = self.iter();
        let numbered = all.flat_map(|(key, holds)| {
            let holds = holds.as_slice().iter();
            holds.map(move |hold| (hold.number, key))
        });
        numbered
            .filter(|(number, _)| numbers.contains(number))
            .collect()
    }

    /// Drops holds on keys that no longer exist. Returns whether there were any.
    pub fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) -> bool {
        let before = self.by_key.len();
        self.by_key.retain(|key, holds| {
            let exists = exists(*key);
            self.expiring -= usize::from(!exists && holds.expire());
            exists
        });
        self.by_key.len() != before
    }

    /// Returns whether there are no holds.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Drops the holds on one key.
    pub fn forget(&mut self, key: KeyInstance) {
        let gone = self.by_key.remove(&key);
        self.expiring -= usize::from(gone.is_some_and(|holds| holds.expire()));
    }

    /// Returns the time at which the next hold expires.
    pub fn next_due(&self) -> Option<Instant> {
        // The executor asks after each command, and most holds do not expire.
        if self.expiring == 0 {
            return None;
        }
        self.by_key.values().filter_map(KeyHolds::due).min()
    }

    /// Returns the keys whose expired holds are due now.
    pub fn due(&self, now: Instant) -> Vec<KeyInstance> {
        let is_due = |holds: &KeyHolds| holds.due().is_some_and(|at| at <= now);
        let due = self.by_key.iter().filter(|(_, holds)| is_due(holds));
        let mut keys: Vec<KeyInstance> = due.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys
    }

    /// Drops the holds on `key` that the guest has voided. Returns the number of dropped references
    /// that `which` selects.
    pub fn follow_guest(
        &mut self,
        key: KeyInstance,
        state: &KeyState,
        which: impl Fn(&Hold) -> bool,
    ) -> u32 {
        let Some(holds) = self.by_key.get_mut(&key) else {
            return 0;
        };
        self.expiring -= usize::from(holds.expire());
        holds.follow_guest(state);
        self.expiring += usize::from(holds.expire());
        let left = holds.as_slice().iter().filter(|hold| which(hold));
        let references = left.map(|hold| hold.references).sum();
        if holds.as_slice().is_empty() {
            self.forget(key);
        }
        references
    }

    /// Schedules another attempt to release a key's expired holds, with twice the delay. Returns
    /// whether this was the first failure.
    pub fn put_off(&mut self, key: KeyInstance, now: Instant) -> bool {
        let holds = self.by_key.get_mut(&key);
        holds.is_some_and(|holds| holds.put_off(now))
    }
}

#[cfg(test)]
mod tests;
