// SPDX-License-Identifier: Apache-2.0
//! Decides whether a change was made that was pending when its writer ended.

use std::collections::{HashMap, HashSet};

use super::{Ledger, Pending, SavedHolds, SavedKey, State};
use crate::keys::claims::MadeRequests;
use crate::keys::claims::mark::Mark;

/// The fate of a pending change, key by key.
struct Fate {
    /// True if the change was made for the keys that are not in `others`. The opposite applies to
    /// the keys in `others`.
    is_made: bool,
    others: HashSet<String>,
    /// Number of keys of the change whose count was not changed.
    unmade: u32,
}

impl Ledger {
    /// Returns the state that the guest is in, and the requests that were made. `count` reads the
    /// count of a key, or returns `None` if the key no longer exists.
    ///
    /// With a mark, the change was made for all its keys or for none. The guest may have changed
    /// some of the keys itself since. Without a mark, each key's count tells whether its change was
    /// made. If a key's count is neither the one before nor the one after the change, the key
    /// follows the majority. If only a part of the change was made, the owners keep the new expiry
    /// and have no answer, so a repeat of the request makes the rest.
    pub fn settled(
        self,
        mark: Option<&Mark>,
        count: impl FnMut(&SavedKey) -> Option<i32>,
    ) -> (State, MadeRequests) {
        let newest_hold = self.newest_hold();
        let (mut state, mut requests) = (self.now, self.requests);
        // No number of a hold is used again, even if the change was not made.
        state.newest_hold = newest_hold;
        let Some(pending) = self.pending else {
            return (state, requests);
        };
        let fate = Fate::of(&pending, mark, count);
        let is_whole = fate.others.is_empty();
        if !fate.is_made && is_whole {
            return (state, requests);
        }
        let holds = pending.holds.into_iter();
        let holds = holds.filter(|holds| fate.has_made(&holds.key.name));
        let made: HashMap<String, SavedHolds> =
            holds.map(|holds| (holds.key.name.clone(), holds)).collect();
        state
            .holds
            .retain(|holds| !made.contains_key(&holds.key.name));
        let made = made.into_values();
        state
            .holds
            .extend(made.filter(|holds| !holds.holds.is_empty()));
        for (name, claims) in pending.claims {
            if fate.has_made(&name) {
                state.claims.put(&name, claims);
            }
        }
        for mut owner in pending.owners {
            // Some claims of the set were made.
            if !is_whole && owner.answer.take().is_some() && !owner.is_empty {
                owner.before = owner.generation;
            }
            state.claims.put_owner(owner);
        }
        if let Some(mut made) = pending.request {
            made.unmade = fate.unmade;
            made.summary.keys_changed = made.summary.keys_changed.saturating_sub(fate.unmade);
            requests.push(made);
        }
        (state, requests)
    }
}

impl Fate {
    fn of(
        pending: &Pending,
        mark: Option<&Mark>,
        mut count: impl FnMut(&SavedKey) -> Option<i32>,
    ) -> Self {
        let changed = pending.counts.iter().filter(|(_, one, other)| one != other);
        let changed = changed.map(|(key, before, after)| {
            let count = count(key);
            let is_made = count.filter(|count| [before, after].contains(&count));
            (&*key.name, is_made.map(|count| count == *after))
        });
        let changed: Vec<(&str, Option<bool>)> = changed.collect();
        let says = |made: bool| changed.iter().filter(|(_, of)| *of == Some(made)).count();
        let (made, not_made) = (says(true), says(false));
        let mark = mark.filter(|mark| {
            let (agree, contradict) = match mark.made {
                true => (made, not_made),
                false => (not_made, made),
            };
            // The guest may have been set back since, so the counts may be those of an earlier
            // state.
            let is_trusted = agree > 0 || contradict < 2;
            if contradict > 0 {
                tracing::warn!(
                    agree,
                    contradict,
                    is_trusted,
                    "the guest has changed keys since the change that an attacher was killed in"
                );
            }
            is_trusted
        });
        let is_made = mark.map_or(made > not_made, |mark| mark.made);
        let moved: Option<HashSet<&str>> =
            mark.map(|mark| mark.moved.iter().map(String::as_str).collect());
        let decides = |name: &str| moved.as_ref().is_none_or(|moved| moved.contains(name));
        let others = changed
            .iter()
            .filter(|(name, of)| *of == Some(!is_made) && decides(name));
        let others: HashSet<String> = others.map(|(name, _)| (*name).to_owned()).collect();
        let unmade = match is_made {
            true => others.len(),
            false => changed.len() - others.len(),
        };
        Self {
            is_made,
            others,
            unmade: u32::try_from(unmade).unwrap_or(u32::MAX),
        }
    }

    fn has_made(&self, name: &str) -> bool {
        self.is_made != self.others.contains(name)
    }
}

#[cfg(test)]
mod tests;
