// SPDX-License-Identifier: Apache-2.0
//! Makes sets of claims: one transaction, in which keys that are refused are left out.
//!
//! Each attempt computes the references that the claims need from the current counts and holds. The
//! change then goes through the same steps as every other change: plan, intent, gates, commit,
//! report.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::guest::Guest;
use static_keys::{Class, Key};

use super::claim_checks::{check_boot, check_intent, check_ledger, too_many};
use super::claim_patterns;
use super::claim_step::{Refused, Step};
use super::command::Reply;
use super::ledger::Touched;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Flip, Transaction};
use crate::auth::MONITOR;
use crate::keys::advice::{self, Known};
use crate::keys::audit::{ClaimSet, millis};
use crate::keys::claims::{
    Answer, Claims, ClaimsOutcome, ClaimsRequest, Owner, OwnerState, Want, intent_digest,
};
use crate::keys::draft::{Draft, Terms};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::gate::ClosedGate;
use crate::keys::holds::{Hold, Taking};
use crate::keys::outcome::FlipReport;
use crate::keys::planned::Planned;
use crate::keys::plans::digest;
use crate::keys::registry::{Registration, Snapshot};
use crate::keys::request::{KeyUpdate, MAX_UPDATES, UpdateRequest};
use crate::keys::scope::Use;

/// The longest time for which the end of claims waits for a busy guest.
const BUDGET: Duration = Duration::from_millis(200);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// A change of claims.
pub(super) struct Wanted<'a> {
    /// The owner whose set is replaced; `None` if the references of keys are only adapted to the
    /// claims.
    pub owner: Option<&'a Owner>,
    /// The keys of the set with the state that the owner wants, and with `None` the keys whose
    /// claims end. Ordered by name.
    pub keys: Vec<(&'a str, Option<Want>)>,
    pub allow_guarded: bool,
    pub force: bool,
    pub expires: Option<(Instant, SystemTime)>,
    /// Time of the new claims; `None` if they are to be the newest.
    pub made_at: Option<SystemTime>,
    /// The time of the request, which all attempts use.
    pub now: SystemTime,
    /// The hold that each claim of the owner takes. Its copies share one `Taking`.
    hold: Option<Hold>,
    /// The boot that the claims are for.
    boot: String,
    /// The claims end without a request, so the owner's last answer is kept.
    ends: bool,
    reason: String,
    validate_only: bool,
    stop_timeout: Duration,
    deadline: Instant,
}

/// A change of claims that was made, or validated.
#[derive(Default)]
pub(super) struct Made {
    answer: Arc<Answer>,
    report: Option<FlipReport>,
    /// The number of sites that are patched.
    sites: u32,
    predicted_pause: Option<Duration>,
}

/// One attempt that succeeded.
struct Attempt<'a> {
    answer: Arc<Answer>,
    /// The state of the owner after the change, if the answer is kept.
    owner: Option<OwnerState>,
    steps: Vec<Step<'a>>,
    flip: Option<Flip>,
    /// The number of sites that are patched.
    sites: u32,
    predicted_pause: Option<Duration>,
}

impl<'a> Wanted<'a> {
    /// Creates the end of claims without a request.
    pub fn end(owner: Option<&'a Owner>, keys: &'a [String], boot: &str) -> Self {
        Self {
            owner,
            boot: boot.to_owned(),
            keys: keys.iter().map(|name| (name.as_str(), None)).collect(),
            allow_guarded: false,
            force: false,
            expires: None,
            made_at: None,
            now: SystemTime::now(),
            hold: None,
            ends: true,
            reason: match owner {
                Some(owner) => format!("the claims of {} expired", owner.holder()),
                None => "claims ended".to_owned(),
            },
            validate_only: false,
            stop_timeout: STOP_TIMEOUT,
            deadline: Instant::now() + BUDGET,
        }
    }

    /// Returns the state after the change of the owner with whom the answer is kept. The owner's
    /// generation was raised before.
    fn answered(
        &self,
        claims: &Claims,
        answer: &Arc<Answer>,
    ) -> Result<Option<OwnerState>, KeysError> {
        let is_answered = !self.ends && !self.validate_only;
        let Some(owner) = self.owner.filter(|_| is_answered) else {
            return Ok(None);
        };
        let state = claims.answered(owner, Arc::clone(answer), self.expires);
        let unknown = || KeysError::ClaimsRefused {
            reason: ClaimRefusal::BootChanged,
            generation: None,
            message: format!(
                "the owner {} was forgotten during the call, so nothing was changed; send the claims again",
                owner.name
            ),
        };
        state.map(Some).ok_or_else(unknown)
    }

    /// Returns a new hold of one reference that a claim takes.
    pub fn hold(&self, holder: &Arc<str>) -> Hold {
        let of_owner = self.hold.as_ref().filter(|hold| hold.holder == *holder);
        of_owner.cloned().unwrap_or_else(|| hold(holder, self.now))
    }

    /// Returns the keys that are claimed.
    fn claimed(&self) -> impl Iterator<Item = &'a str> {
        let claimed = self.keys.iter().filter(|(_, want)| want.is_some());
        claimed.map(|(name, _)| *name)
    }

    /// Returns the change of keys by these updates. It permits everything, because permissions were
    /// checked for the claims: each new one was checked, and the others were made with their
    /// permission.
    fn request(&self, updates: Vec<KeyUpdate>) -> UpdateRequest {
        let owner = self.owner.filter(|_| !self.ends);
        let principal = owner.map_or(MONITOR, |owner| &owner.principal);
        UpdateRequest {
            validate_only: self.validate_only,
            allow_guarded: true,
            force: self.force,
            summary_only: true,
            reason: self.reason.clone(),
            ..UpdateRequest::new(updates, principal, self.stop_timeout, self.deadline)
        }
    }
}

fn hold(holder: &Arc<str>, since: SystemTime) -> Hold {
    let taking = Taking {
        holder: Arc::clone(holder),
        reason: "claim".into(),
        since,
        expires: None,
        fired: false,
    };
    Hold::new(0, 1, taking)
}

/// Returns the guarded keys among the claimed ones, ordered by name.
fn guarded(registration: &Registration, wanted: &Wanted<'_>) -> Vec<(String, Option<Known>)> {
    let claimed = wanted.claimed();
    let keys = claimed.filter_map(|name| registration.catalog.find(name));
    let guarded = keys.filter(|key| key.class == Class::Guarded);
    let known = |key: &Key| advice::of(key, &registration.release);
    guarded
        .map(|key| (key.full_name.to_string(), known(key)))
        .collect()
}

impl<G: Guest> Executor<G> {
    /// Replaces the claims of an owner.
    pub(super) fn set_claims(
        &mut self,
        mut request: ClaimsRequest,
        reply: &Reply<Arc<ClaimsOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<ClaimsOutcome>, KeysError> {
        let owner = Owner::new(&*request.caller.name, &*request.name);
        // This adopts the ledger, and forgets claims of an earlier boot.
        let snapshot = self.snapshot()?;
        let mut left_out = Vec::new();
        if !request.selections.is_empty() {
            // A caller who may claim no key at all must not have its patterns compared with keys.
            // `Use::GiveBack` counts nothing: a repeat of made claims needs no room in a cap.
            self.shared
                .permit(&request.caller, Vec::new, Use::GiveBack)?;
            left_out = claim_patterns::resolve(&snapshot.registration, &mut request)?;
        }
        let request = &request;
        let mut outcome = ClaimsOutcome {
            intent_digest: intent_digest(&request.claims),
            left_out,
            ..ClaimsOutcome::default()
        };
        check_intent(request, &outcome.intent_digest)?;
        self.ledger.boot().clone_into(&mut outcome.boot);
        if !request.boot.is_empty() {
            check_boot(&request.boot, &outcome.boot)?;
        }
        let earlier = |state: &OwnerState| state.made_before(request.generation);
        outcome.generation_before = self.shared.book().claims.owner(&owner).map_or(0, earlier);
        if let Some(after) = &request.after {
            let ledger = self.shared.incarnation.ledger();
            check_ledger(after, (ledger, outcome.generation_before))?;
        }
        if let Some(answer) = self.fence(&owner, request)? {
            outcome.plan_digest.clone_from(&answer.plan_digest);
            outcome.keys.clone_from(&answer.keys);
            outcome.repeated = true;
            outcome.revision = self.shared.registry.journal().latest();
            return Ok(Arc::new(outcome));
        }
        let (owner, claimed) = {
            let book = self.shared.book();
            // Copies of the known owner share its names, so most comparisons are of addresses.
            let known = book.claims.owner(&owner).map(|state| state.owner.clone());
            let owner = known.unwrap_or(owner);
            let claimed = book.claims.keys_of(&owner);
            (owner, claimed)
        };
        self.permit_claims(&snapshot.registration, &owner, request)?;
        if !request.validate_only {
            self.audit.claims(&ClaimSet {
                person: request.caller.person.as_deref(),
                owner: &owner.principal,
                name: &owner.name,
                generation: request.generation,
                intent_digest: &outcome.intent_digest,
                keys: request.claims.len(),
                force: request.force,
                allow_guarded: request.allow_guarded,
                ttl_ms: request.ttl.map(millis),
                reason: &request.reason,
            })?;
        }
        if let Err(error) = self.raise(&owner, request) {
            // An owner that is not known has nothing to end.
            if request.claims.is_empty() && claimed.is_empty() {
                outcome.revision = self.shared.registry.journal().latest();
                return Ok(Arc::new(outcome));
            }
            return Err(too_many(error));
        }
        let now = self.shared.clock.now();
        let time = SystemTime::now();
        let wants = request.claims.iter();
        let wants = wants.map(|(name, want)| (name.as_str(), Some(*want)));
        let ends = claimed.iter().map(|name| (name.as_str(), None));
        let mut keys: Vec<(&str, Option<Want>)> = wants.chain(ends).collect();
        // The sort is stable: a key that is claimed again comes before the same key of `ends`.
        keys.sort_by_key(|(name, _)| *name);
        keys.dedup_by_key(|(name, _)| *name);
        let wanted = Wanted {
            owner: Some(&owner),
            keys,
            now: time,
            hold: Some(hold(owner.holder(), time)),
            allow_guarded: request.allow_guarded,
            force: request.force,
            boot: outcome.boot.clone(),
            ends: false,
            expires: request.ttl.map(|ttl| (now + ttl, time + ttl)),
            // The ledger keeps no earlier time, and a time in the future counts as now.
            made_at: request
                .made_at
                .map(|at| at.max(SystemTime::UNIX_EPOCH).min(time)),
            reason: format!(
                "claims of {} in generation {}{}{}",
                request.name,
                request.generation,
                if request.reason.is_empty() { "" } else { ": " },
                request.reason
            ),
            validate_only: request.validate_only,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
        };
        let made = self.make_claims(&wanted, || reply.is_closed(), standstill)?;
        outcome.plan_digest.clone_from(&made.answer.plan_digest);
        outcome.keys.clone_from(&made.answer.keys);
        outcome.report = made.report;
        outcome.sites_patched = made.sites;
        outcome.predicted_pause = made.predicted_pause;
        if request.validate_only && request.allow_guarded {
            outcome.guarded = guarded(&snapshot.registration, &wanted);
        }
        outcome.revision = self.shared.registry.journal().latest();
        Ok(Arc::new(outcome))
    }

    fn transaction<'r>(&self, request: &'r UpdateRequest) -> Transaction<'r> {
        Transaction {
            request,
            terms: Terms::new(request, self.shared.clock.now()),
            plan: None,
        }
    }

    pub(super) fn make_claims<'g>(
        &mut self,
        wanted: &Wanted<'_>,
        cancelled: impl Fn() -> bool,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<Made, KeysError> {
        let (mut refused, mut intent) = (HashMap::new(), None);
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            executor.attempt_claims(wanted, &mut refused, &mut intent, standstill)
        };
        let result = self.persist(wanted.deadline, standstill, cancelled, attempt);
        let request = wanted.request(Vec::new());
        let transaction = self.transaction(&request);
        let (attempt, attempts) = match result {
            Ok(done) => done,
            Err(error) => {
                if !wanted.validate_only {
                    // From now on the generation refuses earlier ones.
                    self.keep_outcome();
                }
                let failed = self.conclude(&transaction, Err(error), intent);
                return failed.map(|_| Made::default());
            }
        };
        let mut made = Made {
            answer: attempt.answer,
            report: None,
            sites: attempt.sites,
            predicted_pause: attempt.predicted_pause,
        };
        if wanted.validate_only {
            return Ok(made);
        }
        let before = {
            let mut book = self.shared.book();
            // `keep` fails only with a ledger, and only a set without a flip is undone then.
            let can_fail = attempt.flip.is_none() && self.ledger.is_kept();
            let before = can_fail.then(|| (book.holds.clone(), book.claims.clone()));
            for step in attempt.steps {
                if let Some(instance) = step.instance.filter(|_| step.ops.is_empty()) {
                    book.holds.put(instance, step.holds);
                }
                book.claims.put(step.name, step.claims);
            }
            if let Some(owner) = attempt.owner {
                book.claims.answer(owner);
            }
            before
        };
        match attempt.flip {
            Some(flip) => {
                let outcome = self.conclude(&transaction, Ok((flip, attempts)), intent)?;
                made.report = outcome.report;
            }
            None => {
                if let Err(error) = self.keep() {
                    // The guest is unchanged, so the state before is still right.
                    if let Some(before) = before {
                        let mut book = self.shared.book();
                        (book.holds, book.claims) = before;
                    }
                    // The generation was raised and must be kept, so the state before is written as
                    // soon as there is room.
                    self.keep_outcome();
                    return Err(error);
                }
            }
        }
        Ok(made)
    }

    fn attempt_claims<'a>(
        &mut self,
        wanted: &Wanted<'a>,
        refused: &mut HashMap<String, Refused>,
        intent: &mut Option<u64>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Attempt<'a>, Failure> {
        let snapshot = self.snapshot()?;
        // If the guest has booted again since the last attempt, its owners are forgotten.
        check_boot(&wanted.boot, self.ledger.boot())?;
        if Instant::now() >= wanted.deadline {
            // No time would be left for a pause.
            let how = "the guest's tables were read until the deadline";
            return Err(Blocker::time_is_over(how).into());
        }
        let registration = &*snapshot.registration;
        let memory = registration.memory(self.guest.ram());
        loop {
            let steps = wanted.keys.iter();
            let steps = steps.map(|key| self.step(registration, &memory, wanted, *key, refused));
            let steps = steps.collect::<Result<Vec<Step<'a>>, Failure>>()?;
            let updates: Vec<KeyUpdate> = steps.iter().flat_map(Step::updates).collect();
            if updates.len() > MAX_UPDATES {
                let message = format!(
                    "the claims change more than {MAX_UPDATES} references; make them in several sets"
                );
                return Err(KeysError::invalid("claims", message).into());
            }
            if updates.is_empty() {
                return self.claimed(wanted, steps, String::new());
            }
            let request = wanted.request(updates);
            let transaction = self.transaction(&request);
            let planned = match self.plan(&snapshot, &transaction) {
                Ok(planned) => planned,
                Err(Failure::Refused(error)) if Refused::of(&error).is_some() => {
                    // Each pass refuses at least one more key, or blocks a key that was refused.
                    match self.find_refused(&snapshot, wanted, &steps, refused) {
                        true => continue,
                        false => return Err(error.into()),
                    }
                }
                Err(failure) => return Err(failure),
            };
            check_counts(&planned, &steps)?;
            let mut attempt = self.claimed(wanted, steps, digest(&planned.plan))?;
            let changes = planned.plan.changes().iter();
            attempt.sites = changes.map(|change| change.sites).sum();
            if wanted.validate_only {
                attempt.predicted_pause = self.predict_pause(&planned.plan);
                return Ok(attempt);
            }
            self.intend(&transaction, &snapshot.registration, &planned, intent)?;
            let steps = attempt.steps.iter();
            let changed = steps.clone().filter(|step| !step.ops.is_empty());
            let silent = steps.filter(|step| step.ops.is_empty());
            let holds = changed.chain(silent);
            let holds = holds.filter_map(|step| Some((step.instance?, &step.holds)));
            let touched = Touched {
                steps: &attempt.steps,
                owner: wanted.owner,
                answered: attempt.owner.as_ref(),
                ends: wanted.claimed().next().is_none(),
            };
            let changes = planned.plan.changes().iter();
            let kept = self.keep_pending(changes, holds, Some(touched), || None)?;
            let mut draft = Draft::with_capacity(planned.plan.changes().len());
            let changed = attempt.steps.iter_mut();
            for step in changed.filter(|step| !step.ops.is_empty()) {
                if let (Some(instance), Some(state)) = (step.instance, step.state) {
                    draft.set(instance, state, std::mem::take(&mut step.holds));
                }
            }
            let report = self.change(&transaction, &snapshot, &planned.plan, kept, standstill)?;
            attempt.flip = Some(Flip::new(&planned, draft, Some(report)));
            return Ok(attempt);
        }
    }

    /// Returns the owner's state after these steps, and the answer about the claims. `plan_digest`
    /// is the digest of the plan that makes the steps; empty if no count changes.
    ///
    /// # Errors
    /// The owner is not known.
    fn claimed<'a>(
        &self,
        wanted: &Wanted<'a>,
        steps: Vec<Step<'a>>,
        plan_digest: String,
    ) -> Result<Attempt<'a>, Failure> {
        let mut answer = Answer {
            plan_digest,
            ..Answer::default()
        };
        if let Some(owner) = wanted.owner {
            let set = steps.iter().filter(|step| step.want.is_some());
            let gone = steps.iter().filter(|step| step.want.is_none());
            answer.keys = set.chain(gone).map(|step| step.answer(owner)).collect();
        }
        let answer = Arc::new(answer);
        let owner = wanted.answered(&self.shared.book().claims, &answer)?;
        Ok(Attempt {
            answer,
            owner,
            steps,
            flip: None,
            sites: 0,
            predicted_pause: None,
        })
    }

    /// Plans each key alone to find the ones that are refused. Returns whether there are new ones.
    fn find_refused(
        &self,
        snapshot: &Snapshot,
        wanted: &Wanted<'_>,
        steps: &[Step<'_>],
        refused: &mut HashMap<String, Refused>,
    ) -> bool {
        let mut news = false;
        for step in steps.iter().filter(|step| !step.ops.is_empty()) {
            let request = wanted.request(step.updates().collect());
            let Err(Failure::Refused(error)) = self.plan(snapshot, &self.transaction(&request))
            else {
                continue;
            };
            if let Some(mut why) = Refused::of(&error) {
                news = true;
                // If the claim was already left out, the key cannot be changed at all.
                why.blocked = step.want.is_none() || refused.contains_key(step.name);
                refused.insert(step.name.to_owned(), why);
            }
        }
        news
    }
}

/// Compares the plan with the counts from which the references were computed.
fn check_counts(planned: &Planned, steps: &[Step<'_>]) -> Result<(), Failure> {
    let steps = steps.iter().filter(|step| !step.ops.is_empty());
    for (change, step) in planned.plan.changes().iter().zip(steps) {
        if (change.before, change.after) != (step.before, step.after) {
            return Err(Blocker {
                kind: ClosedGate::KeyChanged,
                name: format!("the count of key {} has just changed", change.name),
                every_key: false,
                outdates_plan: true,
            }
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
