// SPDX-License-Identifier: Apache-2.0
//! Verifies that sites agree with their keys' counts, and repairs the keys whose sites do not.
//!
//! A process that changes keys in a guest of another monitor may be killed in the middle of a
//! change, together with the watchdog that rolls the change back. A later discovery names the torn
//! keys and serves all other keys.

use std::sync::Arc;
use std::time::Instant;

use patchbay_guest::guest::Guest;
use static_keys::{Op, Plan, PlanError};

use super::command::Reply;
use super::opening::await_opening;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Transaction};
use crate::keys::audit::{AuditOutcome, AuditedChange, IntendedKeys, IntendedOp, Intent};
use crate::keys::draft::Terms;
use crate::keys::error::KeysError;
use crate::keys::outcome::{FlipReport, RepairOutcome, RepairedSite};
use crate::keys::request::{KeyUpdate, RepairRequest, UpdateRequest};

impl<G: Guest> Executor<G> {
    /// Serves [`Keys::repair`].
    pub(super) fn repair<'g>(
        &mut self,
        request: &RepairRequest,
        reply: &Reply<RepairOutcome>,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<RepairOutcome, KeysError> {
        // The op has no effect, because the plan is that of a repair.
        let update = UpdateRequest {
            validate_only: request.validate_only,
            allow_guarded: true,
            reason: request.reason.clone(),
            ..UpdateRequest::new(
                vec![KeyUpdate::new(&*request.name, Op::Enable)],
                request.caller.clone(),
                request.stop_timeout,
                request.deadline,
            )
        };
        let transaction = Transaction {
            request: &update,
            terms: Terms::new(&update, self.shared.clock.now()),
            plan: None,
        };
        let mut intent = None;
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            executor.attempt_repair(&transaction, &request.name, standstill, &mut intent)
        };
        let cancelled = || reply.is_closed();
        let result = self.persist(request.deadline, standstill, cancelled, attempt);
        if let Some(id) = intent {
            let outcome = match &result {
                Ok((outcome, _)) => AuditOutcome::Committed {
                    changes: vec![AuditedChange {
                        key: &outcome.name,
                        before: outcome.count,
                        after: outcome.count,
                        sites: u32::try_from(outcome.sites.len()).unwrap_or(u32::MAX),
                    }],
                },
                Err(error) => AuditOutcome::Failed {
                    reason: error.reason(),
                    error: error.to_string(),
                },
            };
            self.audit.outcome(id, &outcome);
        }
        let (mut outcome, attempts) = result?;
        outcome.report = outcome
            .report
            .map(|report| FlipReport { attempts, ..report });
        Ok(outcome)
    }

    fn attempt_repair(
        &mut self,
        transaction: &Transaction<'_>,
        name: &str,
        standstill: &mut Standstill<'_, G>,
        intent: &mut Option<u64>,
    ) -> Result<RepairOutcome, Failure> {
        let snapshot = self.snapshot()?;
        let registration = &*snapshot.registration;
        let key = registration.find(name)?;
        self.permit(transaction, || vec![&key.full_name])?;
        let memory = registration.memory(self.guest.ram());
        let left = transaction
            .request
            .deadline
            .saturating_duration_since(Instant::now());
        let planned = await_opening(left, || {
            Plan::repair(&registration.catalog, &memory, key.id)
        });
        let plan = match planned {
            Ok(plan) => plan,
            Err(PlanError::Busy(busy)) => {
                registration.check_refused(&busy)?;
                return Err(Blocker::from(&busy).into());
            }
            Err(error) => return Err(KeysError::from(&error).into()),
        };
        let sites = plan.sites().map(|site| RepairedSite {
            address: site.address,
            before: site.before.to_vec(),
            after: site.after.to_vec(),
        });
        let mut outcome = RepairOutcome {
            name: Arc::clone(&key.full_name),
            count: plan.changes().first().map_or(0, |change| change.before),
            sites: sites.collect(),
            report: None,
        };
        if transaction.request.validate_only {
            return Ok(outcome);
        }
        if !outcome.sites.is_empty() {
            let plan = self.check_text_checker(registration, plan)?;
            if intent.is_none() {
                *intent = Some(self.audit.intent(&Intent {
                    owner: transaction.terms.holder(),
                    reason: &transaction.request.reason,
                    request_id: "",
                    force: false,
                    plan: None,
                    updates: vec![IntendedOp {
                        keys: IntendedKeys::Name { key: name },
                        op: "repair",
                    }],
                    declared: Vec::new(),
                })?);
            }
            // A change may still be pending in the ledger. It is not this one.
            let report = self.change(transaction, &snapshot, &plan, None, standstill)?;
            outcome.report = Some(report);
        }
        // Every site was read and agrees with the count.
        let instance = registration.instance(key);
        self.shared.book().quarantine.remove(&instance);
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests;
