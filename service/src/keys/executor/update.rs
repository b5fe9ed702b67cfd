// SPDX-License-Identifier: Apache-2.0
//! Makes a transaction for an update: replays, plans, writes the intent, commits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use patchbay_guest::guest::Guest;

use super::command::Reply;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Flip, Transaction};
use crate::keys::audit::{AuditOutcome, IntendedKeys, IntendedOp, Intent};
use crate::keys::declared::Declaration;
use crate::keys::draft::{Drops, Terms};
use crate::keys::error::KeysError;
use crate::keys::outcome::UpdateOutcome;
use crate::keys::planned::Planned;
use crate::keys::registry::Registration;
use crate::keys::replay::Content;
use crate::keys::request::{KeyUpdate, Target, UpdateRequest};
use crate::keys::scope::Use;

impl<G: Guest> Executor<G> {
    pub(super) fn update(
        &mut self,
        request: &UpdateRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        let (principal, id) = (&request.caller.name, &request.request_id);
        if let Some(earlier) = self.replayed(principal, id, &request.content)? {
            return Ok(earlier);
        }
        let now = self.shared.clock.now();
        let force = request.force;
        let drops = request
            .tracepoints
            .map_or(Drops::Request { force }, Drops::Tracepoints);
        let expires = request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl));
        let terms = Terms::new(&request.caller.name, &request.reason, drops, expires);
        let transaction = Transaction {
            updates: &request.updates,
            caller: Some(&request.caller),
            how: match KeyUpdate::uses(&request.updates, request.force) {
                // A switch of tracepoints may end holds of others.
                Use::GiveBack if request.tracepoints.is_none() => Use::GiveBack,
                _ if request.validate_only => Use::Check,
                _ => Use::Change,
            },
            terms,
            plan: None,
            allow_guarded: request.allow_guarded,
            validate_only: request.validate_only,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
            request_id: &request.request_id,
            summary_only: request.summary_only,
        };
        let outcome = Arc::new(self.transact(&transaction, standstill, || reply.is_closed())?);
        if !request.validate_only {
            self.replay.remember(
                &request.caller.name,
                &request.request_id,
                request.content,
                &outcome,
                outcome.results.len(),
            );
        }
        Ok(outcome)
    }

    /// Returns the answer to an earlier request with this id, unless it was made in another boot.
    pub(super) fn replayed(
        &mut self,
        principal: &str,
        request_id: &str,
        content: &Content,
    ) -> Result<Option<Arc<UpdateOutcome>>, KeysError> {
        let boot = self.shared.registry.boot();
        if self.replayed_boot != boot {
            self.replay.clear();
            self.replayed_boot = boot;
        }
        self.replay.find(principal, request_id, content)
    }

    /// Plans and makes a transaction.
    pub(super) fn transact<'g>(
        &mut self,
        transaction: &Transaction<'_>,
        standstill: &mut Standstill<'g, G>,
        cancelled: impl Fn() -> bool,
    ) -> Result<UpdateOutcome, KeysError> {
        let mut intent = None;
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            executor.attempt(transaction, standstill, &mut intent)
        };
        let result = self.persist(transaction.deadline, standstill, cancelled, attempt);
        self.conclude(transaction, result, intent)
    }

    /// Records a transaction that was made, or logs its failure.
    pub(super) fn conclude(
        &mut self,
        transaction: &Transaction<'_>,
        result: Result<(Flip, u32), KeysError>,
        intent: Option<u64>,
    ) -> Result<UpdateOutcome, KeysError> {
        match result {
            Ok((flip, attempts)) => {
                let outcome = self.report(transaction, flip, attempts, intent);
                if !transaction.validate_only {
                    self.keep_outcome();
                }
                Ok(outcome)
            }
            Err(error) => {
                if let Some(id) = intent {
                    self.audit.outcome(
                        id,
                        &AuditOutcome::Failed {
                            reason: error.reason(),
                            error: error.to_string(),
                        },
                    );
                }
                self.drop_pending();
                Err(error)
            }
        }
    }

    /// Writes the intent before the first attempt that may change something. `selected` has the
    /// number of keys of each selection.
    pub(super) fn intend(
        &mut self,
        transaction: &Transaction<'_>,
        registration: &Registration,
        planned: &Planned,
        intent: &mut Option<u64>,
    ) -> Result<(), KeysError> {
        if intent.is_none() {
            let mut selected = planned.resolved.selected.iter().copied();
            let declared: BTreeMap<&str, &Declaration> = planned
                .resolved
                .ops
                .iter()
                .filter_map(|op| registration.declared.get(&op.key.id))
                .map(|declaration| (declaration.key.as_str(), &**declaration))
                .collect();
            *intent = Some(
                self.audit.intent(&Intent {
                    owner: transaction.terms.holder(),
                    reason: transaction.terms.reason(),
                    request_id: transaction.request_id,
                    force: transaction.terms.drops.is_forced(),
                    plan: transaction.plan,
                    updates: transaction
                        .updates
                        .iter()
                        .map(|update| IntendedOp {
                            keys: intended(&update.keys, &mut selected),
                            op: update.op.name(),
                        })
                        .collect(),
                    declared: declared.into_values().collect(),
                })?,
            );
        }
        Ok(())
    }
}

/// Returns the keys of an op, for the audit log.
fn intended<'a>(
    target: &'a Target,
    selected: &mut impl Iterator<Item = usize>,
) -> IntendedKeys<'a> {
    match target {
        Target::Name(key) => IntendedKeys::Name { key },
        Target::Held { name: key, .. } => IntendedKeys::Name { key },
        Target::Selection(selection) => IntendedKeys::Selection {
            patterns: selection.patterns.texts(),
            classes: selection.class_names(),
            keys: selected.next().unwrap_or_default(),
        },
        Target::Debug(queries) => IntendedKeys::Debug {
            debug_queries: queries.texts(),
            keys: selected.next().unwrap_or_default(),
        },
    }
}
