// SPDX-License-Identifier: Apache-2.0
//! Changes in two steps: prepare a plan, commit it later.
//!
//! A prepare ends where an update writes the intent. A commit starts there with the kept plan, and
//! then proceeds like an update. A commit does not plan: if the guest has changed, it is refused as
//! PLAN_STALE.
//!
//! A kept plan does not contain the holds after the change; a commit computes them. Between the two
//! steps other clients take and release holds and holds expire, without a change of the
//! registration's version. The time and the expiry of a hold that the commit takes are not known
//! before the commit.
//! then.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::Place;
use static_keys::Plan;

use super::command::Reply;
use super::report::summary;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Flip, Transaction};
use crate::keys::audit::IntendedPlan;
use crate::keys::draft::Terms;
use crate::keys::error::KeysError;
use crate::keys::gate::ClosedGate;
use crate::keys::outcome::{PrepareOutcome, UpdateOutcome};
use crate::keys::plans::{Kept, Prepared, State, digest};
use crate::keys::request::{CommitRequest, PrepareRequest};

impl<G: Guest> Executor<G> {
    /// Plans a change and keeps the plan.
    pub(super) fn prepare<'g>(
        &mut self,
        mut request: PrepareRequest,
        reply: &Reply<Arc<PrepareOutcome>>,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<Arc<PrepareOutcome>, KeysError> {
        let update = &mut request.update;
        if let Some(earlier) = self.plans.repeated(update)? {
            return Ok(earlier);
        }
        update.validate_only = true;
        let transaction = Transaction {
            request: update,
            terms: Terms::new(update, self.shared.clock.now()),
            plan: None,
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
            self.persist(update.deadline, standstill, cancelled, attempt)?;
        let flip = Flip::new(&planned, draft, None);
        let outcome = UpdateOutcome {
            results: self.predicted(&transaction, &flip),
            summary: summary(&flip),
            revision: self.shared.registry.journal().latest(),
            report: None,
        };
        let answer = Arc::new(PrepareOutcome {
            plan_id: self.plans.next_id(&self.shared.incarnation),
            digest: digest(&planned.plan),
            outcome: Arc::new(outcome),
            predicted_pause: self.predict_pause(&planned.plan),
            expires_at: SystemTime::now() + request.plan_ttl,
        });
        let kept = Kept {
            principal: update.caller.name.clone(),
            request_id: update.request_id.clone(),
            expires: self.shared.clock.now() + request.plan_ttl,
            version: snapshot.version,
            generation: snapshot.registration.generation,
            answer: Arc::clone(&answer),
            state: State::Prepared(Box::new(Prepared {
                planned,
                request: request.update,
            })),
            bytes: 0,
        };
        self.plans.insert(kept, snapshot.version)?;
        Ok(answer)
    }

    /// Returns the predicted pause of a plan: zero if it needs none, `None` before the first pause
    /// of this guest.
    pub(super) fn predict_pause(&self, plan: &Plan<Place>) -> Option<Duration> {
        match plan.needs_pause() {
            true => self.pauses.predict(plan.site_count()),
            false => Some(Duration::ZERO),
        }
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
        if request
            .digest
            .as_ref()
            .is_some_and(|digest| *digest != kept.answer.digest)
        {
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
        let Prepared {
            planned,
            request: update,
        } = &mut **prepared;
        planned.plan.locate_records(&memory);
        update.caller = request.caller.clone();
        update.validate_only = false;
        update.summary_only = request.summary_only;
        update.stop_timeout = request.stop_timeout;
        update.deadline = request.deadline;
        let transaction = Transaction {
            request: update,
            terms: Terms::new(update, self.shared.clock.now()),
            plan: Some(IntendedPlan {
                id: plan_id,
                digest: &kept.answer.digest,
            }),
        };
        let mut intent = None;
        let planned = &*planned;
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
                let changes = planned.plan.changes().iter();
                changes.map(|change| &*change.name).collect()
            })?;
            executor.check_quarantine(&snapshot.registration, &planned.resolved.updates)?;
            let outdated = |failure| match failure {
                Failure::Busy(gate) if gate.outdates_plan => stale(gate.name).into(),
                failure => failure,
            };
            let terms = &transaction.terms;
            let draft = executor.follow(&snapshot.registration, planned, terms);
            let draft = draft.map_err(outdated)?;
            executor.intend(&transaction, &snapshot.registration, planned, &mut intent)?;
            let changes = planned.plan.changes().iter();
            let kept = executor.keep_pending(changes, draft.holds(), None, || None)?;
            let plan = &planned.plan;
            let report = executor.change(&transaction, &snapshot, plan, kept, standstill);
            Ok(Flip::new(planned, draft, Some(report.map_err(outdated)?)))
        };
        let cancelled = || reply.is_closed();
        let result = self.persist(request.deadline, standstill, cancelled, attempt);
        let outcome = Arc::new(self.conclude(&transaction, result, intent)?);
        kept.state = State::Committed(Arc::clone(&outcome));
        Ok(outcome)
    }
}

/// Returns the blocker for a site of a running guest that holds other bytes. Either the guest is
/// patching the site, or the bytes are foreign.
fn unrecognised(key: &str, site: u64) -> Blocker {
    Blocker {
        kind: ClosedGate::KeyChanged,
        name: format!("the site at {site:#x} of key {key} holds neither its NOP nor its JMP"),
        every_key: false,
        outdates_plan: true,
    }
}
