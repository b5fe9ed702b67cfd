// SPDX-License-Identifier: Apache-2.0
//! Makes a transaction for an update: replays, plans, writes the intent, commits.

use std::collections::BTreeMap;
use std::sync::Arc;

use patchbay_guest::guest::Guest;

use super::command::Reply;
use super::report::made;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Flip, Transaction};
use crate::keys::audit::{AuditOutcome, IntendedKeys, IntendedOp, Intent};
use crate::keys::declared::Declaration;
use crate::keys::draft::Terms;
use crate::keys::error::KeysError;
use crate::keys::outcome::UpdateOutcome;
use crate::keys::planned::Planned;
use crate::keys::registry::Registration;
use crate::keys::replay::RequestId;
use crate::keys::request::{Target, UpdateRequest};
use crate::keys::scope::Caller;

impl<G: Guest> Executor<G> {
    pub(super) fn update(
        &mut self,
        request: &UpdateRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        if let Some(earlier) = self.replayed(&request.caller, request.request_id.as_ref())? {
            return Ok(earlier);
        }
        let transaction = Transaction {
            request,
            terms: Terms::new(request, self.shared.clock.now()),
            plan: None,
        };
        let outcome = self.transact(&transaction, standstill, || reply.is_closed())?;
        if request.validate_only {
            return Ok(Arc::new(outcome));
        }
        Ok(self.remember(request, outcome))
    }

    /// Keeps the answer to a request, for repeats of the request.
    pub(super) fn remember(
        &mut self,
        request: &UpdateRequest,
        outcome: UpdateOutcome,
    ) -> Arc<UpdateOutcome> {
        let results = outcome.results.len();
        let outcome = Arc::new(outcome);
        let (principal, id) = (&request.caller.name, request.request_id.as_ref());
        self.replay.remember(principal, id, &outcome, results);
        outcome
    }

    /// Returns the answer to an earlier request with this id, unless the request was made in
    /// another boot. If an earlier process has made the request, the answer contains only the
    /// summary.
    pub(super) fn replayed(
        &mut self,
        caller: &Caller,
        request_id: Option<&RequestId>,
    ) -> Result<Option<Arc<UpdateOutcome>>, KeysError> {
        let Some(request_id) = request_id else {
            return Ok(None);
        };
        self.adopt_ledger()?;
        let boot = self.shared.registry.boot();
        if self.replayed_boot != boot {
            self.replay.clear();
            self.replayed_boot = boot;
        }
        if let Some(earlier) = self.replay.find(&caller.name, Some(request_id))? {
            return Ok(Some(earlier));
        }
        let made = self.ledger.made(&caller.name, request_id)?;
        Ok(made.map(|summary| {
            Arc::new(UpdateOutcome {
                summary,
                revision: self.shared.registry.journal().latest(),
                ..UpdateOutcome::default()
            })
        }))
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
        let result = self.persist(transaction.request.deadline, standstill, cancelled, attempt);
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
                if !transaction.request.validate_only {
                    // A client that gets no answer may repeat the request, and a later process may
                    // get it.
                    let made = made(transaction.request, outcome.summary);
                    self.ledger.remember(made);
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

    /// Writes the intent before the first attempt that may change something. `selected` contains
    /// the number of keys of each selection.
    pub(super) fn intend(
        &mut self,
        transaction: &Transaction<'_>,
        registration: &Registration,
        planned: &Planned,
        intent: &mut Option<u64>,
    ) -> Result<(), KeysError> {
        if intent.is_none() {
            let mut selected = planned.resolved.selected.iter().copied();
            // Without declarations no key is looked up.
            let keys = planned.resolved.updates.iter();
            let keys = keys.take_while(|_| !registration.declared.is_empty());
            let declared: BTreeMap<&str, &Declaration> = keys
                .filter_map(|update| registration.declared.get(&update.key))
                .map(|declaration| (declaration.key.as_str(), &**declaration))
                .collect();
            let request_id = transaction.request.request_id.as_ref();
            *intent = Some(
                self.audit.intent(&Intent {
                    owner: transaction.terms.holder(),
                    reason: &transaction.request.reason,
                    request_id: request_id.map_or("", RequestId::as_str),
                    force: transaction.terms.is_forced(),
                    plan: transaction.plan,
                    updates: transaction
                        .request
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
        Target::Name { name: key, .. } => IntendedKeys::Name { key },
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
