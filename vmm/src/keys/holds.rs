// SPDX-License-Identifier: Apache-2.0
//! Who keeps keys on: the references that clients of this monitor have taken.
//!
//! The rules stand at the head of `StaticKeysService` in `static_keys.proto`.

use std::collections::HashMap;
use std::time::{Instant, SystemTime};

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
    pub owner: String,
    /// Why.
    pub reason: String,
    /// How many, at least 1.
    pub references: u32,
    /// When the first was taken.
    pub since: SystemTime,
    /// When they lapse, for the monitor's clock and for people.
    pub expires: Option<(Instant, SystemTime)>,
}

/// All holds.
#[derive(Clone, Debug, Default)]
pub struct Holds {
    by_key: HashMap<KeyInstance, Vec<Hold>>,
}

impl Holds {
    /// Holds on one key.
    pub fn of(&self, key: KeyInstance) -> &[Hold] {
        self.by_key.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Every held key with its holds.
    pub fn iter(&self) -> impl Iterator<Item = (KeyInstance, &[Hold])> {
        self.by_key
            .iter()
            .map(|(key, holds)| (*key, holds.as_slice()))
    }

    /// References held on `key` by anyone.
    pub fn references(&self, key: KeyInstance) -> u32 {
        self.of(key).iter().map(|hold| hold.references).sum()
    }

    /// References held on `key` by `owner`.
    pub fn references_of(&self, key: KeyInstance, owner: &str) -> u32 {
        self.of(key)
            .iter()
            .filter(|hold| hold.owner == owner)
            .map(|hold| hold.references)
            .sum()
    }

    /// Takes one more reference; it joins a hold that differs in nothing else.
    pub fn take(&mut self, key: KeyInstance, hold: &Hold) {
        let holds = self.by_key.entry(key).or_default();
        let same = |other: &&mut Hold| {
            other.owner == hold.owner
                && other.reason == hold.reason
                && other.expires == hold.expires
        };
        match holds.iter_mut().find(same) {
            Some(other) => other.references = other.references.saturating_add(hold.references),
            None => holds.push(hold.clone()),
        }
    }

    /// Drops one reference of `owner`, or with `None` one of anybody: that which lapses first.
    /// False if there is none.
    pub fn drop_one(&mut self, key: KeyInstance, owner: Option<&str>) -> bool {
        let Some(holds) = self.by_key.get_mut(&key) else {
            return false;
        };
        let first = holds
            .iter()
            .enumerate()
            .filter(|(_, hold)| owner.is_none_or(|owner| hold.owner == owner))
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
        holds[index].references -= 1;
        if holds[index].references == 0 {
            holds.remove(index);
        }
        if holds.is_empty() {
            self.by_key.remove(&key);
        }
        true
    }

    /// Forgets references until at most `count` are left: the guest has dropped the others itself.
    pub fn trim(&mut self, key: KeyInstance, count: i32) {
        let count = u32::try_from(count).unwrap_or(0);
        for _ in count..self.references(key) {
            self.drop_one(key, None);
        }
    }

    /// Forgets holds on keys that are no more.
    pub fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) {
        self.by_key.retain(|key, _| exists(*key));
    }

    /// When the next hold lapses.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.by_key
            .values()
            .flatten()
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
        for hold in self.by_key.values_mut().flatten() {
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
            owner: owner.to_owned(),
            reason: String::new(),
            references: 1,
            since: SystemTime::UNIX_EPOCH,
            expires: expires.map(|at| (at, SystemTime::UNIX_EPOCH)),
        }
    }

    #[test]
    fn equal_holds_are_joined() {
        let mut holds = Holds::default();
        holds.take(KEY, &hold("a", None));
        holds.take(KEY, &hold("a", None));
        holds.take(KEY, &hold("b", None));
        assert_eq!(holds.of(KEY).len(), 2);
        assert_eq!(
            (holds.references(KEY), holds.references_of(KEY, "a")),
            (3, 2)
        );
    }

    #[test]
    fn a_drop_takes_what_lapses_first_and_only_the_owners() {
        let now = Instant::now();
        let mut holds = Holds::default();
        holds.take(KEY, &hold("a", None));
        holds.take(KEY, &hold("a", Some(now + Duration::from_secs(9))));
        holds.take(KEY, &hold("b", Some(now)));
        assert!(holds.drop_one(KEY, Some("a")));
        assert_eq!(holds.next_expiry(), Some(now));
        assert!(
            holds
                .of(KEY)
                .iter()
                .any(|hold| hold.owner == "a" && hold.expires.is_none())
        );
        assert!(holds.drop_one(KEY, Some("a")));
        assert!(!holds.drop_one(KEY, Some("a")));
        assert!(holds.drop_one(KEY, None));
        assert_eq!(holds.iter().count(), 0);
    }

    #[test]
    fn lapses_and_postponement() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let mut holds = Holds::default();
        holds.take(KEY, &hold("a", Some(now)));
        holds.take(KEY, &hold("a", Some(later)));
        assert_eq!(holds.lapsed(now), [(KEY, 1)]);
        assert_eq!(holds.lapsed(later), [(KEY, 2)]);
        holds.postpone(now, later);
        assert!(holds.lapsed(now).is_empty());
    }

    #[test]
    fn trim_follows_the_guest() {
        let mut holds = Holds::default();
        holds.take(KEY, &hold("a", None));
        holds.take(KEY, &hold("b", None));
        holds.trim(KEY, 1);
        assert_eq!(holds.references(KEY), 1);
        holds.trim(KEY, -1);
        assert_eq!(holds.references(KEY), 0);
    }
}
