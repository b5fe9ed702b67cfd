// SPDX-License-Identifier: Apache-2.0
//! Who keeps keys on: the references that clients of this monitor have taken.
//!
//! The rules stand at the head of `StaticKeysService` in `static_keys.proto`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use foldhash::fast::RandomState;
use smallvec::SmallVec;
use static_keys::KeyId;

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
pub struct KeyHolds(SmallVec<[Hold; 1]>);

impl KeyHolds {
    /// Each of them.
    pub fn as_slice(&self) -> &[Hold] {
        &self.0
    }

    /// References held by anyone.
    pub fn references(&self) -> u32 {
        self.0.iter().map(|hold| hold.references).sum()
    }

    /// Takes one more reference; it joins a hold that differs in nothing else.
    pub fn take(&mut self, hold: &Hold) {
        let same = |other: &&mut Hold| {
            other.owner == hold.owner
                && other.reason == hold.reason
                && other.expires == hold.expires
        };
        match self.0.iter_mut().find(same) {
            Some(other) => other.references = other.references.saturating_add(hold.references),
            None => self.0.push(hold.clone()),
        }
    }

    /// Drops one reference of `owner`, or with `None` one of anybody: that which lapses first.
    /// False if there is none.
    pub fn drop_one(&mut self, owner: Option<&str>) -> bool {
        let first = self
            .0
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
        self.0[index].references -= 1;
        if self.0[index].references == 0 {
            self.0.remove(index);
        }
        true
    }

    /// Forgets references until at most `count` are left: the guest has dropped the others itself.
    pub fn trim(&mut self, count: i32) {
        let count = u32::try_from(count).unwrap_or(0);
        for _ in count..self.references() {
            self.drop_one(None);
        }
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

    /// Replaces the holds on one key.
    pub fn put(&mut self, key: KeyInstance, holds: KeyHolds) {
        if holds.0.is_empty() {
            self.by_key.remove(&key);
        } else {
            self.by_key.insert(key, holds);
        }
    }

    /// References held on `key` by anyone.
    pub fn references(&self, key: KeyInstance) -> u32 {
        self.of(key).iter().map(|hold| hold.references).sum()
    }

    /// As [`KeyHolds::trim`].
    pub fn trim(&mut self, key: KeyInstance, count: i32) {
        let mut holds = self.copy(key);
        holds.trim(count);
        self.put(key, holds);
    }

    /// Forgets holds on keys that are no more.
    pub fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) {
        self.by_key.retain(|key, _| exists(*key));
    }

    /// When the next hold lapses.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.by_key
            .values()
            .flat_map(KeyHolds::as_slice)
            .filter_map(|hold| hold.expires.map(|(at, _)| at))
            .min()
    }

    /// Keys with lapsed holds, and how many references have lapsed on each.
    pub fn lapsed(&self, now: Instant) -> Vec<(KeyInstance, u32)> {
        let lapsed = |hold: &&Hold| hold.expires.is_some_and(|(at, _)| at <= now);
        let mut keys: Vec<_> = self
            .by_key
            .iter()
            .map(|(key, holds)| {
                (
                    *key,
                    holds
                        .as_slice()
                        .iter()
                        .filter(lapsed)
                        .map(|hold| hold.references)
                        .sum(),
                )
            })
            .filter(|(_, references)| *references > 0)
            .collect();
        keys.sort_unstable();
        keys
    }

    /// References on `key` that have lapsed.
    pub fn lapsed_of(&self, key: KeyInstance, now: Instant) -> u32 {
        let lapsed = |hold: &&Hold| hold.expires.is_some_and(|(at, _)| at <= now);
        self.of(key)
            .iter()
            .filter(lapsed)
            .map(|hold| hold.references)
            .sum()
    }

    /// Moves the expiry of what has lapsed, because it could not be given back yet.
    pub fn postpone(&mut self, now: Instant, until: Instant) {
        for hold in self.by_key.values_mut().flat_map(|holds| &mut holds.0) {
            if let Some((at, _)) = &mut hold.expires
                && *at <= now
            {
                *at = until;
            }
        }
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
        assert_eq!(with(holds.clone()).next_expiry(), Some(now));
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
    fn lapses_and_postponement() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", Some(now)));
        holds.take(&hold("a", Some(later)));
        let mut holds = with(holds);
        assert_eq!(holds.lapsed(now), [(KEY, 1)]);
        assert_eq!(holds.lapsed(later), [(KEY, 2)]);
        holds.postpone(now, later);
        assert!(holds.lapsed(now).is_empty());
    }

    #[test]
    fn trim_follows_the_guest() {
        let mut holds = KeyHolds::default();
        holds.take(&hold("a", None));
        holds.take(&hold("b", None));
        let mut holds = with(holds);
        holds.trim(KEY, 1);
        assert_eq!(holds.references(KEY), 1);
        holds.trim(KEY, -1);
        assert_eq!(holds.references(KEY), 0);
    }
}
