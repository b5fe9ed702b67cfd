// SPDX-License-Identifier: Apache-2.0
//! Other users in the guest who trace an armed event: ftrace, perf, BPF, modules.
//!
//! With the kernel series, the kernel turns a parked tracepoint on when a probe is attached to it.
//! A stock kernel turns the key on for the first probe only (`tracepoint_add_func()`,
//! kernel/tracepoint.c), and the agent's probe is the first. So the event stays silent for the
//! other user until the service fires it. The event is parked again when the other probe is gone.
//! If the agent's probe is removed first, the event must stay on for the other probe.
//!
//! Each such switch stops the guest and writes to the audit log, at times that the guest chooses. A
//! new user must not miss events, so firing is not delayed. Parking is delayed: an event whose
//! other users come and go repeatedly is parked less and less often, and [`TOKENS`] limits all
//! events together. This limits firing too, because an event must be parked before it is fired
//! again.

use std::sync::{Arc, PoisonError};

use patchbay_guest::log_limit::limited;

use super::{SwitchTerms, Tracer};
use crate::auth::OTHERS;
use crate::keys::{KeysError, TracepointUpdate};
use crate::trace::backoff::Backoff;
use crate::trace::select;

/// The maximum burst of parkings.
const TOKENS: u32 = 32;
/// Ticks until a token is added.
const TOKEN_TICKS: u64 = 64;

/// The tick counter and the tokens that are left.
#[derive(Debug)]
pub struct SwitchBudget {
    tick: u64,
    tokens: u32,
}

impl Default for SwitchBudget {
    fn default() -> Self {
        Self {
            tick: 0,
            tokens: TOKENS,
        }
    }
}

impl SwitchBudget {
    fn next_tick(&mut self) -> u64 {
        self.pass(1);
        self.tick
    }

    /// Counts ticks in which no event was checked.
    fn pass(&mut self, ticks: u64) {
        let before = self.tick / TOKEN_TICKS;
        self.tick = self.tick.saturating_add(ticks);
        let added = u32::try_from(self.tick / TOKEN_TICKS - before).unwrap_or(TOKENS);
        self.tokens = self.tokens.saturating_add(added).min(TOKENS);
    }

    fn take_token(&mut self) -> bool {
        let left = self.tokens.checked_sub(1);
        self.tokens = left.unwrap_or(0);
        left.is_some()
    }
}

impl Tracer {
    fn switch_budget(&self) -> std::sync::MutexGuard<'_, SwitchBudget> {
        self.switch_budget
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there are events that are fired and parked for other users.
    pub fn is_checked_for_others(&self) -> bool {
        let book = self.book();
        book.events.values().any(|armed| !armed.even_if_others)
    }

    /// Counts ticks that passed while there were no such events.
    pub fn pass_ticks(&self, ticks: u64) {
        self.switch_budget().pass(ticks);
    }

    /// Fires armed events that other users have begun to trace, unless a client armed them with
    /// `even_if_others`, and parks those without other users. Called once per tick.
    pub async fn fire_and_park_for_others(&self) {
        let tick = self.switch_budget().next_tick();
        let (names, keys): (Vec<String>, Vec<String>) = {
            let book = self.book();
            let checked = book
                .events
                .iter()
                .filter(|(_, armed)| !armed.even_if_others);
            checked
                .map(|(name, armed)| (name.clone(), armed.key.clone()))
                .unzip()
        };
        if names.is_empty() {
            return;
        }
        // A guest that has not registered again has no tracepoints to check.
        let Some((probes, holders)) = self.look(keys).await else {
            return;
        };
        let _turn = self.turn.lock().await;
        let (mut come, mut gone) = (vec![], vec![]);
        {
            let mut book = self.book();
            for ((name, probes), holders) in names.into_iter().zip(probes).zip(holders) {
                let Some(armed) = book.events.get_mut(&name) else {
                    continue;
                };
                let now = probes.map(|probes| probes > 1);
                let fires = holders.iter().any(|holder| **holder == *OTHERS);
                let changed = now.is_some_and(|now| now != fires) && !armed.even_if_others;
                if changed && !fires {
                    if armed.backoff.allows_firing(tick) {
                        come.push(name);
                    }
                } else if armed.backoff.allows_parking(tick, changed) {
                    gone.push(name);
                }
            }
        }
        if !come.is_empty() {
            let done = self.fire_for_others(&come).await;
            self.each_backoff(&come, |backoff| backoff.fired(done));
        }
        if !gone.is_empty() && self.switch_budget().take_token() {
            self.each_backoff(&gone, Backoff::parked);
            self.park_after_others(&gone).await;
        }
    }

    fn each_backoff(&self, names: &[String], change: impl Fn(&mut Backoff)) {
        let mut book = self.book();
        for name in names {
            if let Some(armed) = book.events.get_mut(name) {
                change(&mut armed.backoff);
            }
        }
    }

    /// Returns the probes on the tracepoints of these keys, and the holders of the keys; `None` if
    /// they cannot be read now.
    async fn look(&self, keys: Vec<String>) -> Option<(Vec<Option<u32>>, Vec<Vec<Arc<str>>>)> {
        let of = Arc::clone(&self.keys);
        let look = move || Ok::<_, KeysError>((of.probes(&keys)?, of.holders(&keys)?));
        tokio::task::spawn_blocking(look).await.ok()?.ok()
    }

    /// Fires the events for other users in the guest. Returns false if that fails.
    async fn fire_for_others(&self, names: &[String]) -> bool {
        let keys = self.book().keys(names);
        let terms = SwitchTerms::default();
        match self
            .switch(
                keys,
                TracepointUpdate::Fire,
                OTHERS,
                "fire tracepoints",
                &terms,
            )
            .await
        {
            Ok(report) => {
                self.mark("fired", names, OTHERS, report.as_ref());
                true
            }
            Err(error) => {
                limited!(
                    warn,
                    ?names,
                    %error,
                    "others in the guest trace events that are parked and could not be fired"
                );
                false
            }
        }
    }

    async fn park_after_others(&self, names: &[String]) {
        let to_park = self.without_others(names, OTHERS);
        let keys = self.book().keys(names);
        let terms = SwitchTerms::default();
        match self
            .switch(
                keys,
                TracepointUpdate::Park,
                OTHERS,
                "park tracepoints",
                &terms,
            )
            .await
        {
            Ok(report) => self.mark("parked", &to_park, OTHERS, report.as_ref()),
            Err(error) => {
                limited!(warn, ?to_park, %error, "events that nobody keeps firing could not be parked");
            }
        }
    }

    /// Splits the events into those whose tracepoints keep a probe after the disarming, and the
    /// rest. An event that cannot be read now is in the rest if the agent has armed it.
    pub(super) async fn split_by_others(&self, names: &[String]) -> (Vec<String>, Vec<String>) {
        let facts = self.facts().await.map(|facts| facts.by_name);
        let facts = facts.unwrap_or_default();
        let has_others = |name: &&String| {
            let facts = select::of_event(&facts, name);
            match self.book().is_agents(name) {
                true => facts.is_some_and(|facts| facts.probes.is_some_and(|probes| probes > 1)),
                // A key without a probe cannot be turned on.
                false => facts.is_none_or(|facts| facts.probes != Some(0)),
            }
        };
        let (theirs, ours): (Vec<_>, Vec<_>) = names.iter().partition(has_others);
        (
            theirs.into_iter().cloned().collect(),
            ours.into_iter().cloned().collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_events_together_have_so_many_switches() {
        let mut budget = SwitchBudget::default();
        let mut switches = 0;
        for _ in 0..6400 {
            budget.next_tick();
            switches += u32::from(budget.take_token());
        }
        assert_eq!(switches, TOKENS + 100);
    }

    #[test]
    fn ticks_without_events_count_too() {
        let mut budget = SwitchBudget::default();
        while budget.take_token() {}
        budget.pass(TOKEN_TICKS - 1);
        assert!(!budget.take_token());
        assert_eq!(budget.next_tick(), TOKEN_TICKS);
        assert!(budget.take_token() && !budget.take_token());
        budget.pass(u64::MAX - TOKEN_TICKS);
        assert_eq!(budget.tokens, TOKENS);
    }
}
