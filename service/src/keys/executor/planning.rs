// SPDX-License-Identifier: Apache-2.0
//! Plans a request while the guest runs: resolves names and checks that each key permits its op.

use std::time::Instant;

use patchbay_guest::guest::Guest;
use static_keys::{Class, KeyChange, Op, Options, Plan, PlanError, Update};

use super::opening::await_opening;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Transaction};
use crate::keys::draft::{Draft, Terms, Unfollowed};
use crate::keys::error::{KeyRefusal, KeysError, way_out};
use crate::keys::gate::ClosedGate;
use crate::keys::holds::KeyInstance;
use crate::keys::planned::{Planned, Resolved};
use crate::keys::quarantine::Quarantine;
use crate::keys::registry::{Registration, Snapshot};
use crate::keys::selection;
use crate::keys::shared::Book;
use patchbay_guest::kernel_memory::Place;

impl<G: Guest> Executor<G> {
    /// Plans a transaction on the current registration.
    pub(super) fn plan(
        &self,
        snapshot: &Snapshot,
        transaction: &Transaction<'_>,
    ) -> Result<Planned, Failure> {
        let registration = &*snapshot.registration;
        let memory = registration.memory(self.guest.ram());
        let request = transaction.request;
        // A caller who may change no key at all must not have its patterns compared with keys.
        self.permit(transaction, Vec::new)?;
        let mut resolved = selection::resolve(
            registration,
            &request.updates,
            request.allow_guarded,
            request.deadline,
        )?;
        self.permit(transaction, || {
            let keys = resolved.updates.iter();
            let keys = keys.filter_map(|update| registration.catalog.key(update.key));
            keys.map(|key| &*key.full_name).collect()
        })?;
        self.leave_on(registration, &mut resolved, &transaction.terms);
        let updates = &resolved.updates;
        self.check_quarantine(registration, updates)?;
        let options = Options {
            allow_guarded: request.allow_guarded && self.settings.allow_guarded,
        };
        let left = request.deadline.saturating_duration_since(Instant::now());
        let planned = await_opening(left, || {
            Plan::new(&registration.catalog, &memory, updates, &options)
        });
        match planned {
            Ok(plan) => Ok(Planned {
                plan: self.check_text_checker(registration, plan)?,
                resolved,
            }),
            Err(PlanError::Busy(busy)) => {
                registration.check_refused(&busy)?;
                let mut gate = Blocker::from(&busy);
                if let Some(name) = registration.name_user(&busy) {
                    gate.name = name;
                }
                Err(gate.into())
            }
            // The call permits the change, but the monitor does not.
            Err(PlanError::Guarded { key }) if request.allow_guarded => {
                Err(KeysError::guarded_by_monitor(&key).into())
            }
            Err(error) => Err(KeysError::from(&error).into()),
        }
    }

    /// Refuses keys that the caller may not change.
    pub(super) fn permit<'k>(
        &self,
        transaction: &Transaction<'_>,
        keys: impl FnOnce() -> Vec<&'k str>,
    ) -> Result<(), KeysError> {
        let request = transaction.request;
        self.shared.permit(&request.caller, keys, request.uses())
    }

    /// Refuses a plan that writes kernel text if the guest checks its text.
    pub(super) fn check_text_checker(
        &self,
        registration: &Registration,
        plan: Plan<Place>,
    ) -> Result<Plan<Place>, KeysError> {
        let checked = plan.needs_pause() && !self.settings.allow_text_checker;
        let first = plan.changes().first().filter(|_| checked);
        match (first, registration.text_checker()) {
            (Some(change), Some(checker)) => Err(checker.refusal(&change.name)),
            _ => Ok(plan),
        }
    }

    /// Turns the DISABLE of a tracepoint that another principal fires, or that is claimed on, into
    /// an ENABLE, which has no effect.
    fn leave_on(&self, registration: &Registration, resolved: &mut Resolved, terms: &Terms) {
        if !terms.may_leave_on() {
            return;
        }
        let memory = registration.memory(self.guest.ram());
        let book = self.shared.book();
        for (update, of) in resolved.updates.iter_mut().zip(&resolved.keys) {
            if update.op == Op::Disable
                && of.class == Class::Tracepoint
                && let Some(key) = registration.catalog.key(update.key)
                && let Some(state) = registration.state(&memory, key)
                && terms.leave_on(&book, &key.full_name, of.instance, &state)
            {
                update.op = Op::Enable;
            }
        }
    }

    /// Refuses quarantined keys.
    pub(super) fn check_quarantine(
        &self,
        registration: &Registration,
        updates: &[Update],
    ) -> Result<(), KeysError> {
        let refused = |name: &str, why: &Quarantine, way_out: &str| KeysError::KeyRefused {
            key: name.into(),
            reason: KeyRefusal::Quarantined,
            message: format!("key {name} is quarantined ({}){way_out}", why.message),
        };
        let keys = updates
            .iter()
            .filter_map(|update| registration.catalog.key(update.key));
        let discovery = registration.discovery.as_ref();
        if discovery.is_some_and(|discovery| !discovery.torn.is_empty()) {
            for key in keys.clone() {
                let Some(why) = registration.torn_quarantine(self.guest.ram(), key) else {
                    continue;
                };
                // If the guest itself is changing the key, this change waits for the key's gates.
                let memory = registration.memory(self.guest.ram());
                let repair = Plan::repair(&registration.catalog, &memory, key.id);
                let is_whole = repair.as_ref().is_ok_and(|plan| plan.site_count() == 0);
                if !is_whole && !matches!(repair, Err(PlanError::Busy(_))) {
                    return Err(refused(&key.full_name, &why, ""));
                }
            }
        }
        let book = self.shared.book();
        if book.quarantine.is_empty() {
            return Ok(());
        }
        for key in keys {
            let Some(why) = book.quarantine.get(&registration.instance(key)) else {
                continue;
            };
            let way_out = format!("; {}", way_out(key.module()));
            return Err(refused(&key.full_name, why, &way_out));
        }
        Ok(())
    }

    /// Checks etags and holds against the planned counts. Returns the holds after the change, or
    /// the reason why the ops no longer fit.
    pub(super) fn follow(
        &self,
        registration: &Registration,
        planned: &Planned,
        terms: &Terms,
    ) -> Result<Draft, Failure> {
        let memory = registration.memory(self.guest.ram());
        let changes = planned.plan.changes();
        let book = self.shared.book();
        let mut draft = Draft::with_capacity(changes.len());
        let mut etags = planned.resolved.etags.iter().peekable();
        let updates = &planned.resolved.updates;
        let ops = updates.iter().zip(&planned.resolved.keys);
        for (number, ((update, of), &index)) in ops.zip(planned.plan.folded()).enumerate() {
            let change = &changes[index];
            if index == draft.len() {
                // The count in memory may have changed since the plan. The plan's gate on the count
                // detects this.
                let state = registration.state_at(&memory, update.key, of.class, change.before);
                draft.open(&book, of.instance, &change.name, state);
            }
            if let Some((_, etag)) = etags.next_if(|(of, _)| *of == number) {
                self.check_etag(&book, etag, draft.key(index), change)?;
            }
            match draft.follow(index, &change.name, update.op, terms) {
                Ok(()) => {}
                Err(Unfollowed::Refused(error)) => return Err(error.into()),
                Err(Unfollowed::Raced) => {
                    return Err(Blocker {
                        kind: ClosedGate::KeyChanged,
                        name: format!("the holds on key {} have just changed", change.name),
                        every_key: false,
                        outdates_plan: true,
                    }
                    .into());
                }
            }
        }
        Ok(draft)
    }

    /// Checks an etag, which describes the key before the first op.
    fn check_etag(
        &self,
        book: &Book,
        given: &str,
        key: KeyInstance,
        change: &KeyChange,
    ) -> Result<(), KeysError> {
        let count = change.before;
        let current = self.shared.incarnation.etag(key, book.revision(key), count);
        if *given == current {
            return Ok(());
        }
        Err(KeysError::EtagMismatch {
            key: change.name.to_string(),
            given: given.to_owned(),
            current,
            count,
        })
    }
}
