// SPDX-License-Identifier: Apache-2.0
//! Plans a request while the guest runs: resolves names and checks that each key permits its op.

use std::time::Instant;

use patchbay_guest::guest::Guest;
use static_keys::{KeyChange, Op, Options, Plan, PlanError, Update, split_name};

use super::opening::await_opening;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Transaction};
use crate::keys::draft::{Draft, Terms, Unfollowed};
use crate::keys::error::{KeyRefusal, KeysError, way_out};
use crate::keys::gate::ClosedGate;
use crate::keys::planned::{Planned, PlannedOp, Resolved};
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
        let mut resolved =
            selection::resolve(registration, transaction.updates, transaction.allow_guarded)?;
        self.permit(transaction, || {
            let keys = resolved.ops.iter().map(|op| op.key.id);
            let keys = keys.filter_map(|id| registration.catalog.key(id));
            keys.map(|key| &*key.full_name).collect()
        })?;
        self.leave_on(registration, &mut resolved, &transaction.terms);
        let updates: Vec<Update> = resolved.ops.iter().map(PlannedOp::update).collect();
        self.check_quarantine(registration, &resolved.ops)?;
        let options = Options {
            allow_guarded: transaction.allow_guarded && self.settings.allow_guarded,
        };
        let left = transaction
            .deadline
            .saturating_duration_since(Instant::now());
        let planned = await_opening(left, || {
            Plan::new(&registration.catalog, &memory, &updates, &options)
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
            // The call permits it; the monitor does not.
            Err(PlanError::Guarded { key }) if transaction.allow_guarded => {
                Err(KeysError::KeyRefused {
                    key: key.to_string(),
                    reason: KeyRefusal::Guarded,
                    message: format!(
                        "key {key} is guarded, and its monitor was started without permission for such keys; start it with permission"
                    ),
                }
                .into())
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
        match transaction.caller {
            Some(caller) => self.shared.permit(caller, keys, transaction.how),
            None => Ok(()),
        }
    }

    /// Refuses a plan that writes text which the guest checks.
    pub(super) fn check_text_checker(
        &self,
        registration: &Registration,
        plan: Plan<Place>,
    ) -> Result<Plan<Place>, KeysError> {
        match registration.text_checker() {
            Some(checker) if plan.needs_pause() && !self.settings.allow_text_checker => {
                let name = plan.changes().next().map(|change| change.name.to_string());
                Err(checker.refusal(name.unwrap_or_default()))
            }
            _ => Ok(plan),
        }
    }

    /// A tracepoint that is to be disabled and that another principal fires is enabled instead,
    /// which changes nothing.
    fn leave_on(&self, registration: &Registration, resolved: &mut Resolved, terms: &Terms) {
        let memory = registration.memory(self.guest.ram());
        let book = self.shared.book();
        for op in &mut resolved.ops {
            if op.is_tracepoint
                && op.op == Op::Disable
                && let Some(key) = registration.catalog.key(op.key.id)
                && let Some(state) = registration.state(&memory, key)
                && terms.leave_on(&book.holds, op.key, &state)
            {
                op.op = Op::Enable;
            }
        }
    }

    /// Refuses quarantined keys.
    pub(super) fn check_quarantine(
        &self,
        registration: &Registration,
        ops: &[PlannedOp],
    ) -> Result<(), KeysError> {
        let refused = |name: &str, why: &Quarantine, way_out: &str| KeysError::KeyRefused {
            key: name.to_owned(),
            reason: KeyRefusal::Quarantined,
            message: format!("key {name} is quarantined ({}){way_out}", why.message),
        };
        let discovery = registration.discovery.as_ref();
        if discovery.is_some_and(|discovery| !discovery.torn.is_empty()) {
            let keys = ops
                .iter()
                .filter_map(|op| registration.catalog.key(op.key.id));
            for key in keys {
                let Some(why) = registration.torn_quarantine(self.guest.ram(), key) else {
                    continue;
                };
                // The guest itself may be changing the key. Then this change waits for its gates.
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
        for PlannedOp { key, .. } in ops {
            let Some(why) = book.quarantine.get(key) else {
                continue;
            };
            let key = registration.catalog.key(key.id);
            let name = key.map_or("", |key| &*key.full_name);
            let way_out = format!("; {}", way_out(split_name(name).0));
            return Err(refused(name, why, &way_out));
        }
        Ok(())
    }

    /// Checks etags and holds against the planned counts. Returns the holds after the change, or
    /// what changed since the ops were chosen.
    pub(super) fn follow(
        &self,
        registration: &Registration,
        planned: &Planned,
        terms: &Terms,
    ) -> Result<Draft, Failure> {
        let memory = registration.memory(self.guest.ram());
        let changes: Vec<&KeyChange> = planned.plan.changes().collect();
        let book = self.shared.book();
        let mut draft = Draft::with_capacity(changes.len());
        for (op, &index) in planned.resolved.ops.iter().zip(planned.plan.folded()) {
            let change = changes[index];
            self.check_etag(&book, op, change)?;
            if index == draft.len() {
                // The count changed after the plan, whose gate on the count detects it.
                let state =
                    registration.state_at(&memory, op.key.id, op.is_tracepoint, change.before);
                draft.open(&book.holds, op.key, &change.name, state);
            }
            match draft.follow(index, &change.name, op.op, terms) {
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

    /// The etag describes the key before the first op.
    fn check_etag(&self, book: &Book, op: &PlannedOp, change: &KeyChange) -> Result<(), KeysError> {
        let Some(given) = &op.etag else {
            return Ok(());
        };
        let count = change.before;
        let revision = book.revision(op.key);
        let current = self.shared.incarnation.etag(op.key, revision, count);
        if *given == current {
            return Ok(());
        }
        Err(KeysError::EtagMismatch {
            key: change.name.to_string(),
            given: given.clone(),
            current,
            count,
        })
    }
}
