// SPDX-License-Identifier: Apache-2.0
//! Others in the guest who trace what is armed here: ftrace, perf, BPF, modules.
//!
//! The kernel turns a parked tracepoint on for a probe that is attached to it (`tracepoint_add_func()`
//! in the kernel series). The event must not be parked again while that probe is there, and is to be
//! parked when it is gone. Who stays when the agent's probe goes would see nothing if the event were
//! left parked.

//!
//! Each switch for others stops the guest and writes to the audit log, and the guest decides when: so
//! an event that others come to and leave again and again is switched ever more seldom, and all
//! events together only as often as there are [`TOKENS`].

use std::sync::{Arc, PoisonError};

use super::{SwitchTerms, Tracer};
use crate::keys::{KeysError, TracepointUpdate};
use crate::log_limit::limited;
use crate::trace::select;

/// The client for whom an event fires that others in the guest trace.
pub const OTHERS: &str = "others in the guest";

/// An event is switched for others at least every 2^9 ticks, 9 minutes.
const SELDOM: u32 = 9;
/// Ticks without a change of the others after which an event is switched twice as often again.
const QUIET: u32 = 128;
/// Switches that may follow each other tick by tick.
const TOKENS: u32 = 32;
/// Ticks until there is one more.
const TOKEN_TICKS: u64 = 64;

/// How often an event is switched for others: in the ticks that are multiples of a power of two, which
/// grows with each switch and shrinks in quiet.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    shift: u32,
    quiet: u32,
}

impl Backoff {
    /// Whether what is wanted may be done in this tick.
    fn allows(&mut self, tick: u64, wanted: bool) -> bool {
        if wanted {
            self.quiet = 0;
            return tick.is_multiple_of(1 << self.shift);
        }
        self.quiet += 1;
        if self.quiet >= QUIET {
            self.quiet = 0;
            self.shift = self.shift.saturating_sub(1);
        }
        false
    }

    fn switched(&mut self) {
        self.shift = (self.shift + 1).min(SELDOM);
    }
}

/// Ticks, and switches that are left.
#[derive(Debug)]
pub struct Heed {
    tick: u64,
    tokens: u32,
}

impl Default for Heed {
    fn default() -> Self {
        Self {
            tick: 0,
            tokens: TOKENS,
        }
    }
}

impl Heed {
    fn next_tick(&mut self) -> u64 {
        self.tick += 1;
        if self.tick.is_multiple_of(TOKEN_TICKS) {
            self.tokens = (self.tokens + 1).min(TOKENS);
        }
        self.tick
    }

    fn take_token(&mut self) -> bool {
        let left = self.tokens.checked_sub(1);
        self.tokens = left.unwrap_or(0);
        left.is_some()
    }
}

impl Tracer {
    fn heed(&self) -> std::sync::MutexGuard<'_, Heed> {
        self.heed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets armed events fire that others in the guest have begun to trace, unless a client has said
    /// that they may be silenced, and parks those that they trace no longer. Called once per tick.
    pub async fn heed_others(&self) {
        let tick = self.heed().next_tick();
        let (names, keys): (Vec<String>, Vec<String>) = {
            let book = self.book();
            let heeded = book
                .events
                .iter()
                .filter(|(_, armed)| !armed.even_if_others);
            heeded
                .map(|(name, armed)| (name.clone(), armed.key.clone()))
                .unzip()
        };
        if names.is_empty() {
            return;
        }
        // A guest that has not registered again has no events to heed.
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
                let changed = now.is_some_and(|now| now != fires);
                if armed.backoff.allows(tick, changed && !armed.even_if_others) {
                    match now {
                        Some(true) => come.push(name),
                        _ => gone.push(name),
                    }
                }
            }
        }
        for (names, on) in [(come, true), (gone, false)] {
            if names.is_empty() || !self.heed().take_token() {
                continue;
            }
            {
                let mut book = self.book();
                for name in &names {
                    if let Some(armed) = book.events.get_mut(name) {
                        armed.backoff.switched();
                    }
                }
            }
            if on {
                self.fire_for_others(&names).await;
            } else {
                self.park_after_others(&names).await;
            }
        }
    }

    /// The probes of the tracepoints of these keys, and who holds them; `None` if they cannot be looked
    /// at now.
    async fn look(&self, keys: Vec<String>) -> Option<(Vec<Option<u32>>, Vec<Vec<Arc<str>>>)> {
        let of = Arc::clone(&self.keys);
        let look = move || Ok::<_, KeysError>((of.probes(&keys)?, of.holders(&keys)?));
        tokio::task::spawn_blocking(look).await.ok()?.ok()
    }

    async fn fire_for_others(&self, names: &[String]) {
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
            Ok(report) => self.mark("fired", names, OTHERS, report.as_ref()),
            Err(error) => limited!(
                warn,
                ?names,
                %error,
                "others in the guest trace events that are parked and could not be fired"
            ),
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

    /// Those of the events that somebody in the guest still traces when the agent's probe is gone,
    /// and the rest. Those that cannot be looked at now are among the rest.
    pub(super) async fn split_by_others(&self, names: &[String]) -> (Vec<String>, Vec<String>) {
        let facts = self.facts().await.map(|facts| facts.by_name);
        let facts = facts.unwrap_or_default();
        let has_others = |name: &&String| {
            let facts = facts.get(select::split(name).1);
            facts.is_some_and(|facts| facts.probes.is_some_and(|probes| probes > 1))
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
    fn who_comes_and_goes_is_heeded_ever_more_seldom_and_again_after_a_quiet() {
        let mut backoff = Backoff::default();
        let mut at = vec![];
        for tick in 1..4096 {
            if backoff.allows(tick, true) {
                backoff.switched();
                at.push(tick);
            }
        }
        assert_eq!(at[..9], [1, 2, 4, 8, 16, 32, 64, 128, 256]);
        assert_eq!(at[9..], [512, 1024, 1536, 2048, 2560, 3072, 3584]);
        for tick in 0..u64::from(QUIET * SELDOM) {
            assert!(!backoff.allows(tick, false));
        }
        assert!(backoff.allows(1, true));
    }

    #[test]
    fn all_events_together_have_so_many_switches() {
        let mut heed = Heed::default();
        let mut switches = 0;
        for _ in 0..6400 {
            heed.next_tick();
            switches += u32::from(heed.take_token());
        }
        assert_eq!(switches, TOKENS + 100);
    }
}
