// SPDX-License-Identifier: Apache-2.0
//! Changes in two steps: prepare a plan, commit it later.
//!
//! A prepare ends where an update writes the intent. A commit starts there with the kept plan and
//! then proceeds as an update. It does not plan: if the guest has changed, it is refused as
//! PLAN_STALE.
//!
//! The plan does not keep the holds after the change; a commit computes them. Between the two steps
//! other clients take and release holds and holds expire, and none of that changes the
//! registration's version. The time and the expiry of a hold that the commit takes are only known
//! then.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use patchbay_guest::guest::Guest;

use super::command::Reply;
use super::report::summary;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Flip, Transaction};
use crate::keys::audit::IntendedPlan;
use crate::keys::draft::{Drops, Terms};
use crate::keys::error::KeysError;
use crate::keys::gate::ClosedGate;
use crate::keys::outcome::{PrepareOutcome, UpdateOutcome};
use crate::keys::plans::{Kept, Prepared, State, digest};
use crate::keys::request::{CommitRequest, KeyUpdate, PrepareRequest};
use crate::keys::scope::Use;

impl<G: Guest> Executor<G> {
    /// Plans a change and keeps the plan.
    pub(super) fn prepare<'g>(
        &mut self,
        request: PrepareRequest,
        reply: &Reply<Arc<PrepareOutcome>>,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<Arc<PrepareOutcome>, KeysError> {
        if let Some(earlier) = self.plans.repeated(&request)? {
            return Ok(earlier);
        }
        let drops = Drops::Request {
            force: request.force,
        };
        let transaction = Transaction {
            updates: &request.updates,
            caller: Some(&request.caller),
            how: match KeyUpdate::uses(&request.updates, request.force) {
                Use::Change => Use::Check,
                how => how,
            },
            terms: Terms::new(&request.caller.name, &request.reason, drops, None),
            plan: None,
            allow_guarded: request.allow_guarded,
            validate_only: true,
            stop_timeout: Duration::ZERO,
            deadline: request.deadline,
            request_id: &request.request_id,
            summary_only: request.summary_only,
        };
        let attempt = |executor: &mut Self, _: &mut Standstill<'g, G>| {
            let snapshot = executor.snapshot()?;
            let planned = executor.plan(&snapshot, &transaction)?;
            if let Some((key, site)) = planned.plan.unrecognised_site() {
                return Err(unrecognised(key, site).into());
            }
            let terms = &transaction.terms;
            let draft = executor.follow(&snapshot.registration, &planned, terms)?;
            Ok((snapshot, planned, draft))
        };
        let cancelled = || reply.is_closed();
        let ((snapshot, planned, draft), _) =
            self.persist(request.deadline, standstill, cancelled, attempt)?;
        let flip = Flip::new(&planned, draft, None);
        let outcome = UpdateOutcome {
            results: self.results(&transaction, &flip, &[], None),
            summary: summary(&flip),
            revision: self.shared.registry.journal().latest(),
            report: None,
        };
        let predicted_pause = if planned.plan.needs_pause() {
            self.pauses.predict(planned.plan.site_count())
        } else {
            Some(Duration::ZERO)
        };
        let answer = Arc::new(PrepareOutcome {
            plan_id: self.plans.next_id(&self.shared.incarnation),
            digest: digest(&planned.plan),
            outcome: Arc::new(outcome),
            predicted_pause,
            expires_at: SystemTime::now() + request.plan_ttl,
        });
        let kept = Kept {
            principal: request.caller.name,
            request_id: request.request_id,
            content: request.content,
            expires: self.shared.clock.now() + request.plan_ttl,
            version: snapshot.version,
            generation: snapshot.registration.generation,
            answer: Arc::clone(&answer),
            state: State::Prepared(Box::new(Prepared {
                planned,
                updates: request.updates,
                force: request.force,
                reason: request.reason,
                hold_ttl: request.hold_ttl,
            })),
            bytes: 0,
        };
        self.plans.insert(kept, snapshot.version)?;
        Ok(answer)
    }

    /// Commits a plan once. A repeat returns the first answer.
    pub(super) fn commit(
        &mut self,
        request: &CommitRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        let mut kept = self.plans.take(&request.plan_id, &request.caller.name)?;
        let result = self.commit_kept(&mut kept, request, reply, standstill);
        if !matches!(result, Err(KeysError::PlanNotFound { .. })) {
            self.plans.put_back(kept);
        }
        result
    }

    fn commit_kept<'g>(
        &mut self,
        kept: &mut Kept,
        request: &CommitRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        let plan_id = &request.plan_id;
        let stale = |why: String| KeysError::PlanStale {
            plan_id: plan_id.clone(),
            why,
        };
        if !request.digest.is_empty() && request.digest != kept.answer.digest {
            return Err(stale(format!(
                "its digest is {}, and not the one in the request",
                kept.answer.digest
            )));
        }
        let prepared = match &mut kept.state {
            State::Committed(first) => return Ok(Arc::clone(first)),
            State::Prepared(prepared) => prepared,
        };
        // Changes since the prepare have advanced the ring of records.
        let registration = self.shared.registry.snapshot()?.registration;
        let memory = registration.memory(self.guest.ram());
        prepared.planned.plan.locate_records(&memory);
        let now = self.shared.clock.now();
        let expires = prepared
            .hold_ttl
            .map(|ttl| (now + ttl, SystemTime::now() + ttl));
        let drops = Drops::Request {
            force: prepared.force,
        };
        let transaction = Transaction {
            updates: &prepared.updates,
            caller: Some(&request.caller),
            how: KeyUpdate::uses(&prepared.updates, prepared.force),
            terms: Terms::new(&kept.principal, &prepared.reason, drops, expires),
            plan: Some(IntendedPlan {
                id: plan_id,
                digest: &kept.answer.digest,
            }),
            // The prepare has checked the permission.
            allow_guarded: true,
            validate_only: false,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
            request_id: &kept.request_id,
            summary_only: request.summary_only,
        };
        let mut intent = None;
        let planned = &prepared.planned;
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            let snapshot = executor.snapshot()?;
            if snapshot.registration.generation != kept.generation {
                let plan_id = plan_id.clone();
                return Err(KeysError::PlanNotFound { plan_id }.into());
            }
            if snapshot.version != kept.version {
                let why = "the guest's registration or modules have changed";
                return Err(stale(why.to_owned()).into());
            }
            executor.permit(&transaction, || {
                planned.plan.changes().map(|change| &*change.name).collect()
            })?;
            executor.check_quarantine(&snapshot.registration, &planned.resolved.ops)?;
            let outdated = |failure| match failure {
                Failure::Busy(gate) if gate.outdates_plan => stale(gate.name).into(),
                failure => failure,
            };
            let terms = &transaction.terms;
            let draft = executor.follow(&snapshot.registration, planned, terms);
            let draft = draft.map_err(outdated)?;
            executor.intend(&transaction, &snapshot.registration, planned, &mut intent)?;
            let report = executor.change(&transaction, &snapshot, &planned.plan, standstill);
            Ok(Flip::new(planned, draft, Some(report.map_err(outdated)?)))
        };
        let cancelled = || reply.is_closed();
        let result = self.persist(request.deadline, standstill, cancelled, attempt);
        let outcome = Arc::new(self.conclude(&transaction, result, intent)?);
        kept.state = State::Committed(Arc::clone(&outcome));
        Ok(outcome)
    }
}

/// Returns a site of a running guest with other bytes: the guest is patching it, or the bytes are
/// foreign.
fn unrecognised(key: &str, site: u64) -> Blocker {
    Blocker {
        kind: ClosedGate::KeyChanged,
        name: format!("the site at {site:#x} of key {key} holds neither its NOP nor its JMP"),
        every_key: false,
        outdates_plan: true,
    }
}
