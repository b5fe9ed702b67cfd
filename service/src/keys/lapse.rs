// SPDX-License-Identifier: Apache-2.0
//! How the owner gives back what has lapsed.
//!
//! All that is due goes in one transaction, but for tracepoints, which have a gate of their own. If a
//! key is in the way, the lot is halved until the key is alone; the others of its lot have gone by then.
//! Between two lots the owner serves a command. What cannot be given back is tried again, each time
//! twice as late, and is logged as a warning the first time.

use std::time::{Duration, Instant};

use static_keys::{Class, Op};

use super::draft::{Drops, Terms};
use super::error::KeysError;
use super::flip::Transaction;
use super::holds::KeyInstance;
use super::owner::Owner;
use super::registry::Registration;
use super::standstill::Standstill;
use super::{KeyUpdate, MAX_UPDATES, Target};
use crate::guest::Guest;
use crate::log_limit::limited;

/// Owner of what the monitor does by itself.
const MONITOR: &str = "monitor";
/// Longest that a lot of lapsed holds may wait for a busy guest, and others for the lot.
const BUDGET: Duration = Duration::from_millis(200);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Keys with lapsed holds that are being given back, in lots that are tried one by one.
#[derive(Debug, Default)]
pub(super) struct Lapses {
    lots: Vec<Vec<KeyInstance>>,
}

impl<G: Guest> Owner<G> {
    /// How long until the next lot is to be tried.
    pub(super) fn next_lapse(&self) -> Option<Duration> {
        if !self.lapses.lots.is_empty() {
            return Some(Duration::ZERO);
        }
        let at = self.shared.book().holds.next_due()?;
        Some(at.saturating_duration_since(self.shared.clock.now()))
    }

    /// Tries one lot, if there is one.
    pub(super) fn lapse(&mut self, standstill: &mut Standstill<'_, G>) {
        let now = self.shared.clock.now();
        if self.lapses.lots.is_empty() {
            self.collect(now);
        }
        let Some(mut lot) = self.lapses.lots.pop() else {
            return;
        };
        let Err(error) = self.give_back(&lot, now, standstill) else {
            return;
        };
        if lot.len() > 1 && !error.is_of_every_key() {
            let half = lot.split_off(lot.len() / 2);
            self.lapses.lots.extend([half, lot]);
            return;
        }
        self.put_off(&lot, now, &error.to_string());
    }

    /// Makes lots of what is due.
    fn collect(&mut self, now: Instant) {
        let due = self.shared.book().holds.due(now);
        if due.is_empty() {
            return;
        }
        let (quarantined, due): (Vec<_>, Vec<_>) = {
            let book = self.shared.book();
            due.into_iter()
                .partition(|key| book.quarantine.contains_key(key))
        };
        self.put_off(&quarantined, now, "the key is quarantined");
        let snapshot = self.shared.registry.snapshot().ok();
        let is_tracepoint = |key: &KeyInstance| {
            let registration = &snapshot.as_ref()?.registration;
            Some(registration.catalog.key(key.id)?.class == Class::Tracepoint)
        };
        let (tracepoints, others): (Vec<_>, Vec<_>) = due
            .into_iter()
            .partition(|key| is_tracepoint(key) == Some(true));
        let lots = [tracepoints, others].into_iter();
        self.lapses.lots.extend(lots.filter(|lot| !lot.is_empty()));
    }

    fn put_off(&self, keys: &[KeyInstance], now: Instant, why: &str) {
        let mut new = 0;
        {
            let mut book = self.shared.book();
            for &key in keys {
                new += usize::from(book.holds.put_off(key, now));
            }
        }
        let Some(first) = keys.first() else { return };
        let (keys, first) = (keys.len(), first.id);
        match new {
            0 => tracing::debug!(keys, %first, why, "lapsed holds still cannot be given back"),
            new => limited!(warn, new, %first, why, "lapsed holds cannot be given back yet"),
        }
    }

    /// Gives back the references on these keys that have lapsed and that the guest has not voided.
    fn give_back(
        &mut self,
        lot: &[KeyInstance],
        now: Instant,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<(), KeysError> {
        let snapshot = self.shared.registry.snapshot()?;
        let live = self.shared.registry.live_epochs();
        let mut updates = Vec::with_capacity(lot.len());
        let mut waiting = Vec::new();
        for &key in lot {
            if !snapshot.registration.has(key) && live.contains(&key.epoch) {
                waiting.push(key);
                continue;
            }
            // What does not fit is still due, and makes the next lot.
            let room = MAX_UPDATES - updates.len();
            let lapsed = self.lapsed(&snapshot.registration, key, now);
            updates.extend(lapsed.into_iter().flatten().take(room));
        }
        self.put_off(&waiting, now, "its module is not registered yet");
        if updates.is_empty() {
            return Ok(());
        }
        let transaction = Transaction {
            updates: &updates,
            terms: Terms::new(MONITOR, "the hold lapsed", Drops::Held, None),
            plan: None,
            // Permission was given when the hold was taken.
            allow_guarded: true,
            validate_only: false,
            stop_timeout: STOP_TIMEOUT,
            deadline: Instant::now() + BUDGET,
            request_id: "",
            summary_only: true,
        };
        self.transact(&transaction, standstill, || false).map(drop)
    }

    /// An update for each reference on a key that has lapsed; none if the key is gone.
    fn lapsed(
        &self,
        registration: &Registration,
        instance: KeyInstance,
        now: Instant,
    ) -> Option<impl Iterator<Item = KeyUpdate> + use<G>> {
        let memory = registration.memory(self.guest.ram());
        let found = registration
            .has(instance)
            .then(|| registration.catalog.key(instance.id))
            .flatten()
            .and_then(|key| Some((key, registration.catalog.enabled(&memory, key.id).ok()?)));
        let mut book = self.shared.book();
        let Some((key, count)) = found else {
            // Its references have gone with it.
            book.holds.forget(instance);
            return None;
        };
        let probes = registration.probes(&memory, key.id);
        let references = match count {
            // The guest takes the first reference just now. The plan will find it so, and wait.
            ..0 => 1,
            count => book.holds.lapsed(instance, now, count, probes),
        };
        // Tracepoints are on or off.
        let op = match key.class {
            Class::Tracepoint => Op::Disable,
            Class::Ref | Class::Guarded => Op::Dec,
        };
        let update = KeyUpdate {
            keys: Target::Held {
                name: key.full_name.to_string(),
                instance,
            },
            op,
            etag: String::new(),
        };
        Some((0..references).map(move |_| update.clone()))
    }
}
