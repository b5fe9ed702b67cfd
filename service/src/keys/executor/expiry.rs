// SPDX-License-Identifier: Apache-2.0
//! Releases holds that have expired.
//!
//! Expired holds are released in one transaction, except holds on tracepoints, which have a
//! separate gate. If a key cannot be changed, the batch is halved, and its halves again, until that
//! key is in a separate batch and does not block the others. A batch that failed for a reason
//! independent of its keys is not halved. Between two batches the executor serves a command. A key
//! that cannot be released is retried with a delay that doubles each time, up to a maximum. The
//! first failure is logged as a warning.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use patchbay_guest::log_limit::limited;
use static_keys::{Class, Op};

use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::Transaction;
use crate::auth::MONITOR;
use crate::keys::draft::{Terms, Whose};
use crate::keys::error::KeysError;
use crate::keys::holds::{Hold, KeyInstance};
use crate::keys::registry::Registration;
use crate::keys::request::{KeyUpdate, MAX_UPDATES, Target, UpdateRequest};

/// Longest time that a batch of expired holds waits for a busy guest.
const BUDGET: Duration = Duration::from_millis(200);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

impl<G: Guest> Executor<G> {
    /// Returns the time until the next batch is tried.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        if !self.expiries.batches.is_empty() || !self.expiries.endings.is_empty() {
            return Some(Duration::ZERO);
        }
        let now = self.shared.clock.now();
        let (holds, claims, is_used) = {
            let book = self.shared.book();
            let (holds, claims) = (book.holds.next_due(), book.claims.next_due());
            (holds, claims, book.is_used())
        };
        let due = [holds, claims, self.ledger.due(now, is_used)];
        let at = due.into_iter().flatten().min()?;
        Some(at.saturating_duration_since(now))
    }

    /// Tries one batch if one is due.
    pub(super) fn expire(&mut self, standstill: &mut Standstill<'_, G>) {
        let now = self.shared.clock.now();
        let is_used = self.shared.book().is_used();
        if self.ledger.due(now, is_used).is_some_and(|at| at <= now) {
            return self.look_for_ledgers_kernel(now);
        }
        self.expiries.is_claims_turn ^= true;
        match self.expiries.is_claims_turn {
            true => self.end_claims(now, standstill) || self.end_holds(now, standstill),
            false => self.end_holds(now, standstill) || self.end_claims(now, standstill),
        };
    }

    /// Tries one batch of expired holds. Returns whether a batch was due.
    fn end_holds(&mut self, now: Instant, standstill: &mut Standstill<'_, G>) -> bool {
        if self.expiries.batches.is_empty() {
            self.collect(now);
        }
        let Some(mut batch) = self.expiries.batches.pop() else {
            return false;
        };
        let Err(error) = self.release_expired(&batch, now, standstill) else {
            return true;
        };
        if batch.len() > 1 && !error.is_of_every_key() {
            let half = batch.split_off(batch.len() / 2);
            self.expiries.batches.extend([half, batch]);
            return true;
        }
        self.put_off(&batch, now, &error.to_string());
        true
    }

    /// Splits the keys that are due into batches.
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
        let batches = [tracepoints, others].into_iter();
        self.expiries
            .batches
            .extend(batches.filter(|batch| !batch.is_empty()));
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
            0 => tracing::debug!(keys, %first, why, "expired holds still cannot be released"),
            new => limited!(warn, new, %first, why, "expired holds cannot be released yet"),
        }
    }

    /// Releases the expired holds on these keys, except those that the guest has voided.
    fn release_expired(
        &mut self,
        batch: &[KeyInstance],
        now: Instant,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<(), KeysError> {
        let snapshot = self.snapshot()?;
        let live = self.shared.registry.live_epochs();
        let mut updates = Vec::with_capacity(batch.len());
        let mut waiting = Vec::new();
        for &key in batch {
            if !snapshot.registration.has(key) && live.contains(&key.epoch) {
                waiting.push(key);
                continue;
            }
            // The other keys stay due and are in the next batch.
            let room = MAX_UPDATES - updates.len();
            let expired = |hold: &Hold| hold.has_expired(now);
            updates.extend(self.releases(&snapshot.registration, key, room, expired));
        }
        self.put_off(&waiting, now, "its module is not registered yet");
        if updates.is_empty() {
            return Ok(());
        }
        let request = UpdateRequest {
            // The hold was taken with this permission.
            allow_guarded: true,
            summary_only: true,
            reason: "the hold expired".to_owned(),
            ..UpdateRequest::new(updates, MONITOR, STOP_TIMEOUT, Instant::now() + BUDGET)
        };
        let transaction = Transaction {
            request: &request,
            terms: Terms::ending(Whose::Expired(now), &request, now),
            plan: None,
        };
        self.transact(&transaction, standstill, || false).map(drop)
    }

    /// Returns one update for each reference on the key that `which` selects and that the guest has
    /// not voided, but at most `at_most`. Returns none if the key no longer exists.
    pub(super) fn releases(
        &self,
        registration: &Registration,
        instance: KeyInstance,
        at_most: usize,
        which: impl Fn(&Hold) -> bool,
    ) -> Vec<KeyUpdate> {
        let memory = registration.memory(self.guest.ram());
        let found = registration
            .has(instance)
            .then(|| registration.catalog.key(instance.id))
            .flatten()
            .and_then(|key| Some((key, registration.state(&memory, key)?)));
        let mut book = self.shared.book();
        let Some((key, state)) = found else {
            // The references ended with the key.
            book.holds.forget(instance);
            return Vec::new();
        };
        let references = match state.count {
            // The guest is taking the first reference (count -1). The plan finds the gate closed
            // and waits.
            ..0 => 1,
            _ => book.holds.follow_guest(instance, &state, which),
        };
        // A tracepoint's key is on or off: one update ends all its references.
        let (op, references) = match key.class {
            Class::Tracepoint => (Op::Disable, references.min(1)),
            Class::Ref | Class::Guarded | Class::DynamicDebug | Class::Never => {
                (Op::Dec, references)
            }
        };
        let name = Arc::clone(&key.full_name);
        let update = |_| KeyUpdate {
            keys: Target::Held {
                name: Arc::clone(&name),
                instance,
            },
            op,
        };
        (0..references).take(at_most).map(update).collect()
    }
}
