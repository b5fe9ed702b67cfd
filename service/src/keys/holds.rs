// SPDX-License-Identifier: Apache-2.0
//! Who keeps keys on: the references that clients of this monitor have taken.
//!
//! The rules stand at the head of `StaticKeysService` in `static_keys.proto`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use foldhash::fast::RandomState;
use smallvec::SmallVec;
use static_keys::{KeyId, Probes};

/// When a lapsed hold that could not be given back is tried again: first, and at the most.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(64);

/// A key for as long as it exists: another module loaded at the same address has other keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyInstance {
    /// Number of the registration or module load that brought the key; never used twice.
    pub epoch: u64,
    /// The key.
    pub id: KeyId,
}

/// References of one owner on one key with the same reason and expiry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Who took them.
    pub owner: Arc<str>,
    /// Why.
    pub reason: Arc<str>,
    /// How many, at least 1.
    pub references: u32,
    /// When the first was taken.
    pub since: SystemTime,
    /// When they lapse, for the monitor's clock and for people.
    pub expires: Option<(Instant, SystemTime)>,
}

/// Holds on one key.
#[derive(Clone, Debug, Default)]
pub struct KeyHolds {
    holds: SmallVec<[Hold; 1]>,
    /// For whom the tracepoint fired when the first of them was taken; `None` for other keys.
    probes: Option<Probes>,
    retry: Option<Retry>,
}

/// What has lapsed could not be given back.
#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    wait: Duration,
}

impl Hold {
    fn has_lapsed(&self, now: Instant) -> bool {
        self.expires.is_some_and(|(at, _)| at <= now)
    }
}

impl KeyHolds {
    /// Each of them.
    pub fn as_slice(&self) -> &[Hold] {
        &self.holds
    }

    /// References held by anyone.
    pub fn references(&self) -> u32 {
        self.holds.iter().map(|hold| hold.references).sum()
    }

    /// Takes one more reference; it joins a hold that differs in nothing else.
    pub fn take(&mut self, hold: &Hold) {
        let same = |other: &&mut Hold| {
            other.owner == hold.owner
                && other.reason == hold.reason
                && other.expires == hold.expires
        };
        match self.holds.iter_mut().find(same) {
            Some(other) => other.references = other.references.saturating_add(hold.references),
            None => self.holds.push(hold.clone()),
        }
    }

    /// Drops one reference of `owner`, or with `None` one of anybody: that which lapses first.
    /// False if there is none.
    pub fn drop_one(&mut self, owner: Option<&str>) -> bool {
        let first = self
            .holds
            .iter()
            .enumerate()
            .filter(|(_, hold)| owner.is_none_or(|owner| *hold.owner == *owner))
            // Those that never lapse come last; among equals the newest goes.
            .min_by_key(|(index, hold)| {
                (
                    hold.expires.is_none(),
                    hold.expires.map(|(at, _)| at),
                    usize::MAX - index,
                )
            })
            .map(|(index, _)| index);
        let Some(index) = first else { return false };
        self.holds[index].references -= 1;
        if self.holds[index].references == 0 {
            self.holds.remove(index);
        }
        true
    }

    /// Forgets what the guest has voided: references beyond `count`, which it has dropped itself, and
    /// all of a tracepoint that fires for others than when they were taken. The key of such a
    /// tracepoint was turned off by the guest and on again for the others.
    pub fn follow_guest(&mut self, count: i32, probes: Option<Probes>) {
        if self.probes != probes {
            self.holds.clear();
            self.probes = probes;
        }
        self.trim(count);
    }

    /// Forgets references until at most `count` are left.
    fn trim(&mut self, count: i32) {
        let count = u32::try_from(count).unwrap_or(0);
        for _ in count..self.references() {
            self.drop_one(None);
        }
    }

    /// References that have lapsed.
    fn lapsed(&self, now: Instant) -> u32 {
        let lapsed = self.holds.iter().filter(|hold| hold.has_lapsed(now));
        lapsed.map(|hold| hold.references).sum()
    }

    /// When the first of them is to be given back.
    fn due(&self) -> Option<Instant> {
        let expiries = self.holds.iter().filter_map(|hold| hold.expires);
        let first = expiries.map(|(at, _)| at).min()?;
        Some(self.retry.map_or(first, |retry| first.max(retry.at)))
    }
}

/// All holds.
#[derive(Clone, Debug, Default)]
pub struct Holds {
    /// None is empty.
    by_key: HashMap<KeyInstance, KeyHolds, RandomState>,
}

impl Holds {
    /// Holds on one key.
    pub fn of(&self, key: KeyInstance) -> &[Hold] {
        self.by_key.get(&key).map_or(&[], KeyHolds::as_slice)
    }

    /// The same, to be changed and put back with [`Holds::put`].
    pub fn copy(&self, key: KeyInstance) -> KeyHolds {
        self.by_key.get(&key).cloned().unwrap_or_default()
    }

    /// Replaces the holds on one key, which has just been changed: what was in the way is not any more.
    pub fn put(&mut self, key: KeyInstance, holds: KeyHolds) {
        if holds.holds.is_empty() {
            self.by_key.remove(&key);
        } else {
            let retry = None;
            self.by_key.insert(key, KeyHolds { retry, ..holds });
        }
    }

    /// References held on `key` by anyone.
    pub fn references(&self, key: KeyInstance) -> u32 {
        self.of(key).iter().map(|hold| hold.references).sum()
    }

    /// Forgets holds on keys that are no more.
    pub fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) {
        self.by_key.retain(|key, _| exists(*key));
    }

    /// Forgets the holds on one key.
    pub fn forget(&mut self, key: KeyInstance) {
        self.by_key.remove(&key);
    }

    /// When lapsed references are next to be given back.
    pub fn next_due(&self) -> Option<Instant> {
        self.by_key.values().filter_map(KeyHolds::due).min()
    }

    /// Keys of which lapsed references are to be given back now.
    pub fn due(&self, now: Instant) -> Vec<KeyInstance> {
        let is_due = |holds: &KeyHolds| holds.due().is_some_and(|at| at <= now);
        let due = self.by_key.iter().filter(|(_, holds)| is_due(holds));
        let mut keys: Vec<KeyInstance> = due.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys
    }

    /// References on `key` that have lapsed and that the guest, as it is now, has not voided. What it
    /// has voided is forgotten.
    pub fn lapsed(
        &mut self,
        key: KeyInstance,
        now: Instant,
        count: i32,
        probes: Option<Probes>,
    ) -> u32 {
        let Some(holds) = self.by_key.get_mut(&key) else {
            return 0;
        };
        holds.follow_guest(count, probes);
        let lapsed = holds.lapsed(now);
        if holds.holds.is_empty() {
            self.by_key.remove(&key);
        }
        lapsed
    }

    /// Tries a key's lapsed references again later, and each time twice as late; whether this is the
    /// first time.
    pub fn put_off(&mut self, key: KeyInstance, now: Instant) -> bool {
        let Some(holds) = self.by_key.get_mut(&key) else {
            return false;
        };
        let earlier = holds.retry;
        let wait = earlier.map_or(FIRST_RETRY, |retry| (retry.wait * 2).min(LAST_RETRY));
        let at = now + wait;
        holds.retry = Some(Retry { at, wait });
        earlier.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const KEY: KeyInstance = KeyInstance {
        epoch: 1,
        id: KeyId(0x1000),
    };

    fn hold(owner: &str, expires: Option<Instant>) -> Hold {
        Hold {
            owner: owner.into(),
            reason: "".into(),
            references: 1,
            since: SystemTime::UNIX_EPOCH,
            expires: expires.map(|at| (at, SystemTime::UNIX_EPOCH)),
        }
    }

    fn with(holds: KeyHolds) -> Holds {
        let mut all = Holds::default();
        all.put(KEY, holds);
        all
    }

    #[test]
    fn equal_holds_are_joined() {
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", None));
        holds.take(&hold("a", None));
        holds.take(&hold("b", None));
        assert_eq!(holds.as_slice().len(), 2);
        assert_eq!(holds.as_slice()[0].references, 2);
        assert_eq!(with(holds).references(KEY), 3);
    }

    #[test]
    fn a_drop_takes_what_lapses_first_and_only_the_owners() {
        let now = Instant::now();
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", None));
        holds.take(&hold("a", Some(now + Duration::from_secs(9))));
        holds.take(&hold("b", Some(now)));
        assert!(holds.drop_one(Some("a")));
        assert_eq!(with(holds.clone()).next_due(), Some(now));
        assert!(
            holds
                .as_slice()
                .iter()
                .any(|hold| *hold.owner == *"a" && hold.expires.is_none())
        );
        assert!(holds.drop_one(Some("a")));
        assert!(!holds.drop_one(Some("a")));
        assert!(holds.drop_one(None));
        // A key without holds is not kept.
        assert!(with(holds).by_key.is_empty());
    }

    #[test]
    fn what_cannot_be_given_back_is_tried_less_and_less_often() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1000);
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", Some(start)));
        holds.take(&hold("a", Some(later)));
        let mut holds = with(holds);
        assert_eq!(holds.due(start), [KEY]);
        assert_eq!(holds.lapsed(KEY, start, 2, None), 1);
        assert_eq!(holds.lapsed(KEY, later, 2, None), 2);

        let mut now = start;
        for (time, wait) in [1, 2, 4, 8, 16, 32, 64, 64, 64].into_iter().enumerate() {
            assert_eq!(holds.put_off(KEY, now), time == 0, "the first is told");
            assert!(holds.due(now).is_empty());
            now += Duration::from_secs(wait);
            assert_eq!(holds.next_due(), Some(now));
        }
        // A change resets the retry.
        holds.put(KEY, holds.copy(KEY));
        assert_eq!(holds.next_due(), Some(start));
    }

    #[test]
    fn the_guest_voids_what_it_has_dropped() {
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", None));
        holds.take(&hold("b", None));
        holds.follow_guest(1, None);
        assert_eq!(holds.references(), 1);
        let mut holds = with(holds);
        let now = Instant::now();
        assert_eq!(holds.lapsed(KEY, now, -1, None), 0);
        assert!(holds.by_key.is_empty());
    }
}
