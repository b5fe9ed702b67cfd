// SPDX-License-Identifier: Apache-2.0
//! Plans a request while the guest runs: resolves names and checks that each key permits its op.

use std::time::Instant;

use patchbay_guest::guest::Guest;
use static_keys::{Class, KeyChange, Op, Options, Plan, PlanError, Update, split_name};

use super::Executor;
use super::flip::{Blocker, Failure, Flip, Transaction, refused, way_out};
use super::opening::await_opening;
use crate::keys::address_space::Place;
use crate::keys::draft::{Draft, Raced, Terms};
use crate::keys::error::{KeyRefusal, KeysError};
use crate::keys::etag;
use crate::keys::holds::KeyInstance;
use crate::keys::registry::{Instances, Registration, Snapshot};
use crate::keys::selection::{KeyOp, Resolved};
use crate::keys::{Book, ClosedGate, FlipReport, Quarantine};

/// A plan that may be made. Holds and etags are checked at each attempt.
pub(in crate::keys) struct Planned {
    pub plan: Plan<Place>,
    /// In the order of the request.
    pub ops: Vec<PlannedOp>,
    /// Number of keys of each selection, in order.
    pub selected: Vec<usize>,
    /// Keys that a selection matched and left out.
    pub left_out: usize,
}

/// One op on one key.
pub(in crate::keys) struct PlannedOp {
    pub key: KeyInstance,
    pub op: Op,
    pub is_tracepoint: bool,
    /// `None` skips the check.
    pub etag: Option<String>,
}

impl Planned {
    /// Returns the planned keys, and the holds after the change.
    pub(super) fn flip(&self, draft: Draft, report: Option<FlipReport>) -> Flip {
        Flip {
            changes: self.plan.changes().cloned().collect(),
            keys: draft.keys().collect(),
            draft,
            left_out: self.left_out,
            report,
        }
    }
}

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
            Resolved::new(registration, transaction.updates, transaction.allow_guarded)?;
        self.leave_on(registration, &mut resolved, &transaction.terms);
        let updates = resolved.ops.iter().map(|op| Update {
            key: op.key.id,
            op: op.op,
        });
        let updates: Vec<Update> = updates.collect();
        let mut instances = Instances::of(registration);
        let ops = resolved.ops.into_iter().map(|of| PlannedOp {
            key: instances.instance(of.key),
            op: of.op,
            is_tracepoint: of.key.class == Class::Tracepoint,
            etag: of.etag.map(str::to_owned),
        });
        let ops: Vec<PlannedOp> = ops.collect();
        self.check_quarantine(registration, &ops)?;
        let options = Options {
            allow_guarded: transaction.allow_guarded && self.allow_guarded,
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
                ops,
                selected: resolved.selected,
                left_out: resolved.left_out,
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
            Err(error) => Err(refused(&error).into()),
        }
    }

    /// Refuses a plan that writes text which the guest checks.
    pub(super) fn check_text_checker(
        &self,
        registration: &Registration,
        plan: Plan<Place>,
    ) -> Result<Plan<Place>, KeysError> {
        match registration.text_checker() {
            Some(checker) if plan.needs_pause() && !self.allow_text_checker => {
                let name = plan.changes().next().map(|change| change.name.to_string());
                Err(checker.refusal(name.unwrap_or_default()))
            }
            _ => Ok(plan),
        }
    }

    /// A tracepoint that is to be disabled and that another principal fires is enabled instead,
    /// which changes nothing.
    fn leave_on(&self, registration: &Registration, resolved: &mut Resolved<'_>, terms: &Terms) {
        let memory = registration.memory(self.guest.ram());
        let book = self.shared.book();
        for KeyOp { key, op, .. } in &mut resolved.ops {
            if key.class == Class::Tracepoint
                && *op == Op::Disable
                && let Some(state) = registration.state(&memory, key)
                && terms.leave_on(&book.holds, registration.instance(key), &state)
            {
                *op = Op::Enable;
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
        for (op, &index) in planned.ops.iter().zip(planned.plan.folded()) {
            let change = changes[index];
            self.check_etag(&book, op, change)?;
            if index == draft.len() {
                // The count changed after the plan, whose gate on the count detects it.
                let state =
                    registration.state_at(&memory, op.key.id, op.is_tracepoint, change.before);
                draft.open(&book.holds, op.key, &change.name, state);
            }
            if draft.follow(index, &change.name, op.op, terms)? == Err(Raced) {
                let raced = Blocker {
                    kind: ClosedGate::KeyChanged,
                    name: format!("the holds on key {} have just changed", change.name),
                    every_key: false,
                    outdates_plan: true,
                };
                return Err(raced.into());
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
        let current = etag(&self.shared.incarnation, op.key, revision, count);
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
