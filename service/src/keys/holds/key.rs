// SPDX-License-Identifier: Apache-2.0
//! Holds on one key.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use smallvec::{SmallVec, smallvec};
use static_keys::Probes;

use super::{FIRST_RETRY, Hold, KeyState, LAST_RETRY};

/// Holds on one key.
#[derive(Debug, Default)]
pub struct KeyHolds {
    /// "name" or "module:name". The name is kept while the key's module or kernel is not
    /// registered.
    name: Arc<str>,
    holds: SmallVec<[Hold; 1]>,
    /// Probes of the tracepoint when the first hold was taken, or when the
    /// tracepoint was last fired or parked; `None` for other keys.
    probes: Option<Probes>,
    /// Boxed, because few keys have it and the holds of many keys are copied for a change.
    retry: Option<Box<Retry>>,
}

/// The next attempt to release an expired hold, after one that failed.
#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    wait: Duration,
}

impl Clone for KeyHolds {
    fn clone(&self) -> Self {
        Self {
            name: Arc::clone(&self.name),
            holds: match &*self.holds {
                // Most keys have one hold, which is copied without a loop.
                [only] => smallvec![only.clone()],
                holds => holds.into(),
            },
            probes: self.probes,
            retry: self.retry.clone(),
        }
    }
}

impl KeyHolds {
    /// Returns all holds.
    pub fn as_slice(&self) -> &[Hold] {
        &self.holds
    }

    /// Returns the hold with this number.
    pub fn find(&self, number: u64) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.number == number)
    }

    /// Returns the key's name, "name" or "module:name".
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub fn set_name(&mut self, name: &Arc<str>) {
        self.name = Arc::clone(name);
    }

    /// Returns the number of references in all holds.
    pub fn references(&self) -> u32 {
        self.holds.iter().map(|hold| hold.references).sum()
    }

    /// Takes one reference. The reference joins a hold with the same holder, reason and expiry.
    pub fn take(&mut self, hold: &Hold) {
        match self.holds.iter_mut().find(|other| other.is_like(hold)) {
            Some(other) => other.references = other.references.saturating_add(hold.references),
            None => self.holds.push(hold.clone()),
        }
    }

    /// Takes or renews the hold by which its holder keeps the tracepoint firing for the
    /// tracepoint's current probes. An existing hold gets the new expiry.
    pub fn fire(&mut self, hold: &Hold, probes: Option<Probes>) {
        self.probes = probes;
        let own = |other: &&mut Hold| other.holder == hold.holder;
        match self.holds.iter_mut().find(own) {
            Some(own) => {
                let taking = own.taking_mut();
                taking.expires = hold.expires;
                taking.fired = true;
            }
            None => self.holds.push(hold.clone()),
        }
    }

    /// Returns the number of the hold that a reference like this one joined.
    pub fn number_of(&self, taken: &Hold) -> Option<u64> {
        let joined = self.holds.iter().find(|hold| hold.is_like(taken));
        joined.map(|hold| hold.number)
    }

    /// Drops one reference of the hold that expires first among those that `which` selects. Returns
    /// false if it selects none.
    pub fn drop_one(&mut self, which: impl Fn(&Hold) -> bool) -> bool {
        let index = match &*self.holds {
            // Most keys have one hold.
            [only] => which(only).then_some(0),
            // Holds without expiry come last. Of holds that expire at the same time, the newest
            // comes first.
            holds => holds
                .iter()
                .enumerate()
                .rev()
                .filter(|(_, hold)| which(hold))
                .min_by_key(|(_, hold)| (hold.expires.is_none(), hold.expires.map(|(at, _)| at)))
                .map(|(index, _)| index),
        };
        let Some(index) = index else { return false };
        let hold = &mut self.holds[index];
        hold.references -= 1;
        if hold.references == 0 {
            self.holds.remove(index);
        }
        true
    }

    /// Ends the tracepoint's holds that `which` selects. Returns whether the key must be turned
    /// off. The key stays on if other holds remain. It also stays on if all holds that end were
    /// taken by firing and the tracepoint's functions have changed since.
    pub fn end(&mut self, probes: Option<Probes>, which: impl Fn(&Hold) -> bool) -> bool {
        let is_own = self.is_for(probes);
        let mut may_turn_off = false;
        self.holds.retain(|hold| {
            let ends = which(hold);
            may_turn_off |= ends && (!hold.fired || is_own);
            !ends
        });
        may_turn_off && self.holds.is_empty()
    }

    /// Returns whether the tracepoint's key would stay on if all holds ended, because the guest
    /// itself has turned it on.
    pub fn would_leave_on(&self, state: &KeyState) -> bool {
        state.count > 0 && !self.clone().end(state.probes, |_| true)
    }

    /// Ends all holds.
    pub fn clear(&mut self) {
        self.holds.clear();
    }

    /// Binds the tracepoint's holds to its current probes.
    pub fn set_probes(&mut self, probes: Option<Probes>) {
        self.probes = probes;
    }

    /// Returns whether the tracepoint has the same functions as when it was fired.
    pub fn is_for(&self, probes: Option<Probes>) -> bool {
        match (&self.probes, &probes) {
            (Some(before), Some(now)) => before.same_functions(now),
            (before, now) => before == now,
        }
    }

    /// Drops the holds that the guest has voided. These are references above the count, which the
    /// guest has dropped itself, and holds on a tracepoint whose functions have changed, because
    /// the guest has turned such a key off and on again for other users. Holds that were taken by
    /// firing stay, because they serve the agent's probe.
    pub fn follow_guest(&mut self, state: &KeyState) {
        if self.holds.is_empty() {
            self.probes = state.probes;
            return;
        }
        if self.probes != state.probes {
            self.holds.retain(|hold| hold.fired);
        }
        match (state.tracepoint, u32::try_from(state.count).unwrap_or(0)) {
            (true, 0) => self.holds.clear(),
            (true, _) => {}
            (false, count) => {
                for _ in count..self.references() {
                    self.drop_one(|_| true);
                }
            }
        }
        if self.holds.is_empty() {
            self.probes = state.probes;
        }
    }

    /// Gives holds a new expiry. If a hold then equals an older one, it is merged into the older
    /// one. Returns the numbers of both.
    pub fn renew(
        &mut self,
        numbers: &HashSet<u64>,
        expires: Option<(Instant, SystemTime)>,
    ) -> Vec<(u64, u64)> {
        let mut joined = Vec::new();
        for mut hold in std::mem::take(&mut self.holds) {
            if numbers.contains(&hold.number) {
                hold.taking_mut().expires = expires;
            }
            match self.holds.iter_mut().find(|other| other.is_like(&hold)) {
                Some(other) => {
                    other.references = other.references.saturating_add(hold.references);
                    if hold.since < other.since {
                        other.taking_mut().since = hold.since;
                    }
                    joined.push((hold.number, other.number));
                }
                None => self.holds.push(hold),
            }
        }
        self.retry = None;
        joined
    }

    /// Numbers new holds.
    pub fn number(&mut self, newest: &mut u64) {
        for hold in self.holds.iter_mut().filter(|hold| hold.number == 0) {
            *newest += 1;
            hold.number = *newest;
        }
    }

    /// Returns the time at which the first hold expires.
    pub(super) fn due(&self) -> Option<Instant> {
        let expiries = self.holds.iter().filter_map(|hold| hold.expires);
        let first = expiries.map(|(at, _)| at).min()?;
        let retry = self.retry.as_ref();
        Some(retry.map_or(first, |retry| first.max(retry.at)))
    }

    /// Returns whether one of the holds expires.
    pub(super) fn expire(&self) -> bool {
        self.holds.iter().any(|hold| hold.expires.is_some())
    }

    pub(super) fn reset_retry(&mut self) {
        self.retry = None;
    }

    pub(super) fn put_off(&mut self, now: Instant) -> bool {
        let earlier = self.retry.as_ref().map(|retry| retry.wait);
        let wait = earlier.map_or(FIRST_RETRY, |wait| (wait * 2).min(LAST_RETRY));
        let at = now + wait;
        self.retry = Some(Box::new(Retry { at, wait }));
        earlier.is_none()
    }
}
