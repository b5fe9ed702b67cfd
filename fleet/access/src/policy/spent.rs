// SPDX-License-Identifier: Apache-2.0
//! Counts the recent changes of each principal under each rule with a cap.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::file::Rule;
use super::lack::Lack;

/// The time for which a change counts against a cap.
pub const WINDOW: Duration = Duration::from_hours(1);

/// The changes of the last [`WINDOW`]. They are kept by the names of rules, so they survive a
/// reload of the policy, but not a restart of the daemon.
#[derive(Clone, Debug, Default)]
pub struct Spent(Arc<Mutex<HashMap<Id, Changed>>>);

/// The rule and the principal.
type Id = (String, String);

/// The time of the last change of each guest and key, by name.
#[derive(Debug, Default)]
struct Changed {
    guests: HashMap<String, Instant>,
    keys: HashMap<String, Instant>,
}

impl Changed {
    fn forget(&mut self, now: Instant) {
        for names in [&mut self.guests, &mut self.keys] {
            names.retain(|_, at| now.duration_since(*at) < WINDOW);
        }
    }

    fn is_empty(&self) -> bool {
        self.guests.is_empty() && self.keys.is_empty()
    }
}

/// Returns the number of different names in `known` and `names` together.
fn with(known: &HashMap<String, Instant>, names: &[&str]) -> usize {
    let new: std::collections::HashSet<_> = names
        .iter()
        .filter(|name| !known.contains_key(**name))
        .collect();
    known.len() + new.len()
}

impl Spent {
    /// Counts a change that `rule` allows. If the change exceeds a cap of the rule, nothing is
    /// counted.
    pub(super) fn charge(
        &self,
        rule: &Rule,
        principal: &str,
        guests: &[&str],
        keys: &[&str],
        now: Instant,
    ) -> Result<(), Lack> {
        if rule.max_guests.is_none() && rule.max_keys.is_none() {
            return Ok(());
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, changed| {
            changed.forget(now);
            !changed.is_empty()
        });
        let id = (rule.name.clone(), principal.to_owned());
        let changed = all.entry(id).or_default();
        let given = with(&changed.guests, guests);
        if let Some(most) = rule.max_guests.filter(|&most| given > most) {
            return Err(Lack::TooManyGuests { given, most });
        }
        let given = with(&changed.keys, keys);
        if let Some(most) = rule.max_keys.filter(|&most| given > most) {
            return Err(Lack::TooManyKeys { given, most });
        }
        // Names are kept only where a cap counts them.
        if rule.max_guests.is_some() {
            let guests = guests.iter().map(|guest| ((*guest).to_owned(), now));
            changed.guests.extend(guests);
        }
        if rule.max_keys.is_some() {
            let keys = keys.iter().map(|key| ((*key).to_owned(), now));
            changed.keys.extend(keys);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    fn rule(caps: &str) -> Policy {
        let text = format!("rules: [{{name: a, principals: ['**'], role: operator, {caps}}}]");
        Policy::parse(&text).expect("a policy")
    }

    #[test]
    fn names_are_counted_once_for_each_principal_and_leave_with_the_window() {
        let policy = rule("max_guests: 2, max_keys: 3");
        let (rule, spent, start) = (&policy.rules()[0], Spent::default(), Instant::now());
        let charge = |principal: &str, guest: &str, keys: &[&str], minutes: u64| {
            let now = start + Duration::from_mins(minutes);
            spent.charge(rule, principal, &[guest], keys, now)
        };
        assert_eq!(charge("alice", "web-1", &["a", "b", "a"], 0), Ok(()));
        assert_eq!(charge("alice", "web-2", &["a", "b"], 1), Ok(()));
        let too_many = Lack::TooManyGuests { given: 3, most: 2 };
        assert_eq!(charge("alice", "web-3", &["a"], 1), Err(too_many));
        let too_many = Lack::TooManyKeys { given: 4, most: 3 };
        assert_eq!(charge("alice", "web-1", &["c", "d"], 1), Err(too_many));
        // Refused changes are not counted.
        assert_eq!(charge("alice", "web-1", &["c"], 2), Ok(()));
        assert_eq!(charge("bob", "web-3", &["d", "e", "f"], 2), Ok(()));
        // An hour is counted from the last change of a guest, so web-1, which was changed again at
        // minute 2, still counts at minute 61.
        assert_eq!(charge("alice", "web-3", &["a"], 61), Ok(()));
        let too_many = Lack::TooManyGuests { given: 3, most: 2 };
        assert_eq!(charge("alice", "web-2", &["a"], 61), Err(too_many));
        assert_eq!(charge("alice", "web-2", &["d"], 62), Ok(()));
    }

    #[test]
    fn nothing_is_kept_without_a_cap_or_after_the_window() {
        let (capped, free) = (rule("max_guests: 2"), rule("guests: ['*']"));
        let (spent, now) = (Spent::default(), Instant::now());
        let charge = |policy: &Policy, now| {
            let charged = spent.charge(&policy.rules()[0], "alice", &["web-1"], &["a"], now);
            charged.expect("little");
            let all = spent.0.lock().expect("free");
            let names = |changed: &Changed| changed.guests.len() + changed.keys.len();
            all.values().map(names).sum::<usize>()
        };
        assert_eq!(charge(&free, now), 0);
        assert_eq!(charge(&capped, now), 1);
        let later = now + WINDOW;
        let charged = spent.charge(&capped.rules()[0], "bob", &[], &[], later);
        assert_eq!(charged, Ok(()));
        let all = spent.0.lock().expect("free");
        assert!(
            all.keys().all(|(_, principal)| principal == "bob"),
            "{all:?}"
        );
    }
}
