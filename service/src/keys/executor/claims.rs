// SPDX-License-Identifier: Apache-2.0
//! Makes sets of claims: one transaction, in which keys that are refused are left out.
//!
//! Each attempt computes the references that the claims need from the current counts and holds. The
//! change then goes through the same steps as every other change: plan, intent, gates, commit,
//! report.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::guest::Guest;
use static_keys::Class;

use super::claim_patterns;
use super::claim_step::{Refused, Step};
use super::command::Reply;
use super::expiry::MONITOR;
use super::ledger::Touched;
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Flip, Transaction};
use crate::keys::advice::{self, Known};
use crate::keys::audit::{ClaimSet, millis};
use crate::keys::claims::{
    Answer, Claims, ClaimsOutcome, ClaimsRequest, Fence, Fenced, Owner, TooMany, Want,
    intent_digest,
};
use crate::keys::draft::{Draft, Terms};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::gate::ClosedGate;
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
    /// The owner's claims.
    pub claims: HashMap<&'a str, Want>,
    /// The keys of the set, and the keys whose claims end.
    pub keys: Vec<String>,
    pub allow_guarded: bool,
    pub force: bool,
    pub expires: Option<(Instant, SystemTime)>,
    /// Time of the new claims; `None` if they are to be the newest.
    pub made_at: Option<SystemTime>,
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
    answer: Answer,
    report: Option<FlipReport>,
    /// The number of sites that are patched.
    sites: u32,
    predicted_pause: Option<Duration>,
}

/// One attempt that succeeded.
struct Attempt {
    answer: Answer,
    claims: Claims,
    /// Keys whose holds change but whose counts do not.
    silent: Vec<Step>,
    flip: Option<Flip>,
    /// The number of sites that are patched.
    sites: u32,
    predicted_pause: Option<Duration>,
}

impl<'a> Wanted<'a> {
    /// Creates the end of claims without a request.
    pub fn end(owner: Option<&'a Owner>, keys: Vec<String>, boot: &str) -> Self {
        Self {
            owner,
            boot: boot.to_owned(),
            claims: HashMap::new(),
            keys,
            allow_guarded: false,
            force: false,
            expires: None,
            made_at: None,
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

    /// Keeps the answer with its owner. The owner's generation was raised before.
    fn keep(&self, claims: &mut Claims, answer: &Answer) -> Result<(), KeysError> {
        let is_answered = !self.ends && !self.validate_only;
        let Some(owner) = self.owner.filter(|_| is_answered) else {
            return Ok(());
        };
        if claims.answer(owner, answer.clone(), self.expires) {
            return Ok(());
        }
        Err(KeysError::ClaimsRefused {
            reason: ClaimRefusal::BootChanged,
            generation: None,
            message: format!(
                "the owner {} was forgotten during the call, so nothing was changed; send the claims again",
                owner.name
            ),
        })
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

/// Returns the guarded keys among the claimed ones, ordered by name.
fn guarded(
    registration: &Registration,
    claims: &HashMap<&str, Want>,
) -> Vec<(String, Option<Known>)> {
    let keys = claims
        .keys()
        .filter_map(|name| registration.catalog.find(name));
    let guarded = keys.filter(|key| key.class == Class::Guarded);
    let mut guarded: Vec<_> = guarded
        .map(|key| {
            (
                key.full_name.to_string(),
                advice::of(key, &registration.release),
            )
        })
        .collect();
    guarded.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    guarded
}

impl<G: Guest> Executor<G> {
    /// Replaces the claims of an owner.
    pub(super) fn set_claims(
        &mut self,
        mut request: ClaimsRequest,
        reply: &Reply<Arc<ClaimsOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<ClaimsOutcome>, KeysError> {
        let owner = Owner {
            principal: request.caller.name.clone(),
            name: request.name.clone(),
        };
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
        if let Some(answer) = self.fence(&owner, request)? {
            outcome.plan_digest = answer.plan_digest;
            outcome.keys = answer.keys;
            outcome.repeated = true;
            outcome.revision = self.shared.registry.journal().latest();
            return Ok(Arc::new(outcome));
        }
        let claimed = self.shared.book().claims.keys_of(&owner);
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
        let names = request.claims.iter().map(|(name, _)| name.clone());
        let keys: BTreeSet<String> = names.chain(claimed).collect();
        let wanted = Wanted {
            owner: Some(&owner),
            claims: request
                .claims
                .iter()
                .map(|(name, want)| (name.as_str(), *want))
                .collect(),
            keys: keys.into_iter().collect(),
            allow_guarded: request.allow_guarded,
            force: request.force,
            boot: outcome.boot.clone(),
            ends: false,
            expires: request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl)),
            // The ledger keeps no earlier time, and a time in the future counts as now.
            made_at: request
                .made_at
                .map(|at| at.max(SystemTime::UNIX_EPOCH).min(SystemTime::now())),
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
        outcome.plan_digest = made.answer.plan_digest;
        outcome.keys = made.answer.keys;
        outcome.report = made.report;
        outcome.sites_patched = made.sites;
        outcome.predicted_pause = made.predicted_pause;
        if request.validate_only && request.allow_guarded {
            outcome.guarded = guarded(&snapshot.registration, &wanted.claims);
        }
        outcome.revision = self.shared.registry.journal().latest();
        Ok(Arc::new(outcome))
    }

    /// Raises the owner's generation, or checks in a validation that there is room for this.
    fn raise(&self, owner: &Owner, request: &ClaimsRequest) -> Result<(), TooMany> {
        let (claims, now) = (request.claims.len(), SystemTime::now());
        let book = &mut self.shared.book().claims;
        match request.validate_only {
            true => book.room(owner, claims, now).map(|_| ()),
            false => book.raise(owner, request.generation, request.content, claims, now),
        }
    }

    /// Returns the answer to an earlier request with this generation.
    fn fence(&self, owner: &Owner, request: &ClaimsRequest) -> Result<Option<Answer>, KeysError> {
        let generation = request.generation;
        let book = self.shared.book();
        match book.claims.fence(owner, generation, &request.content) {
            Ok(Fenced::New) => Ok(None),
            Ok(Fenced::Answered(answer)) => Ok(Some(answer)),
            Err(Fence::Stale { current }) => {
                let claimed = book.claims.keys_of(owner).len();
                Err(KeysError::ClaimsRefused {
                    reason: ClaimRefusal::GenerationStale,
                    generation: Some(current),
                    message: format!(
                        "the claims of {} have generation {current}, and {claimed} keys in it; generation {generation} is past, so it does nothing",
                        owner.name
                    ),
                })
            }
            Err(Fence::Reused) => Err(KeysError::ClaimsRefused {
                reason: ClaimRefusal::GenerationStale,
                generation: Some(generation),
                message: format!(
                    "generation {generation} of {} was used for other claims; raise it",
                    owner.name
                ),
            }),
        }
    }

    /// Refuses keys that the caller may not change. One rule must cover all keys for which the
    /// caller wants something new. For each other key any rule is sufficient and no cap applies,
    /// because the key is changed already. An owner may always end its own claims, so an abort
    /// cannot be refused.
    fn permit_claims(
        &self,
        registration: &Registration,
        owner: &Owner,
        request: &ClaimsRequest,
    ) -> Result<(), KeysError> {
        if request.caller.scope.is_none() {
            return Ok(());
        }
        let memory = registration.memory(self.guest.ram());
        // A claim that the guest has voided would be made again, and this would change the key.
        let has = |name: &str, want: Want| {
            let claim = self.observed(registration, &memory, owner, name);
            claim.is_some_and(|claim| claim.want == want && !claim.void)
        };
        let all = request.claims.iter();
        let all = all.map(|(name, want)| (name.as_str(), has(name, *want)));
        let (kept, new): (Vec<_>, Vec<_>) = all.partition(|(_, has)| *has);
        for (name, _) in kept {
            self.shared
                .permit(&request.caller, || vec![name], Use::GiveBack)?;
        }
        let how = match request.validate_only {
            true => Use::Check,
            false => Use::Change,
        };
        let new: Vec<&str> = new.into_iter().map(|(name, _)| name).collect();
        match new.is_empty() {
            true => Ok(()),
            false => self.shared.permit(&request.caller, || new, how),
        }
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
            let holds = book.holds.clone();
            for step in attempt.silent {
                if let Some(instance) = step.instance {
                    book.holds.put(instance, step.holds);
                }
            }
            (holds, std::mem::replace(&mut book.claims, attempt.claims))
        };
        match attempt.flip {
            Some(flip) => {
                let outcome = self.conclude(&transaction, Ok((flip, attempts)), intent)?;
                made.report = outcome.report;
            }
            None => {
                if let Err(error) = self.keep() {
                    // The guest is unchanged, so the state before is still right.
                    let mut book = self.shared.book();
                    (book.holds, book.claims) = before;
                    return Err(error);
                }
            }
        }
        Ok(made)
    }

    fn attempt_claims(
        &mut self,
        wanted: &Wanted<'_>,
        refused: &mut HashMap<String, Refused>,
        intent: &mut Option<u64>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Attempt, Failure> {
        let snapshot = self.snapshot()?;
        // If the guest has booted again since the last attempt, its owners are forgotten.
        check_boot(&wanted.boot, self.ledger.boot())?;
        if Instant::now() >= wanted.deadline {
            // No time would be left for a pause.
            let how = "the guest's tables were read until the deadline";
            return Err(Blocker::time_is_over(how).into());
        }
        loop {
            let steps = wanted.keys.iter();
            let steps = steps.map(|name| self.step(&snapshot, wanted, name, refused));
            let steps = steps.collect::<Result<Vec<Step>, Failure>>()?;
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
            let mut draft = Draft::with_capacity(attempt.silent.len());
            let silent = std::mem::take(&mut attempt.silent);
            let (changed, silent): (Vec<Step>, Vec<Step>) =
                silent.into_iter().partition(|step| !step.ops.is_empty());
            let holds = changed.iter().chain(&silent);
            let holds = holds.filter_map(|step| Some((step.instance?, &step.holds)));
            let touched = Touched {
                claims: &attempt.claims,
                keys: &wanted.keys,
                owner: wanted.owner,
                ends: wanted.claims.is_empty(),
            };
            let changes = planned.plan.changes().iter();
            let kept = self.keep_pending(changes, holds, Some(touched), || None)?;
            for step in changed {
                if let (Some(instance), Some(state)) = (step.instance, step.state) {
                    draft.set(instance, state, step.holds);
                }
            }
            attempt.silent = silent;
            let report = self.change(&transaction, &snapshot, &planned.plan, kept, standstill)?;
            attempt.flip = Some(Flip::new(&planned, draft, Some(report)));
            return Ok(attempt);
        }
    }

    /// Returns the claims after these steps, and the answer about the claims. `plan_digest` is the
    /// digest of the plan that makes the steps; empty if no count changes.
    ///
    /// # Errors
    /// The owner is not known.
    fn claimed(
        &self,
        wanted: &Wanted<'_>,
        steps: Vec<Step>,
        plan_digest: String,
    ) -> Result<Attempt, Failure> {
        let mut claims = self.shared.book().claims.clone();
        for step in &steps {
            claims.put(&step.name, step.claims.clone());
        }
        let mut answer = Answer {
            plan_digest,
            ..Answer::default()
        };
        if let Some(owner) = wanted.owner {
            let (set, gone): (Vec<&Step>, Vec<&Step>) =
                steps.iter().partition(|step| step.want.is_some());
            let answers = set.into_iter().chain(gone);
            answer.keys = answers.map(|step| step.answer(owner)).collect();
        }
        wanted.keep(&mut claims, &answer)?;
        Ok(Attempt {
            answer,
            claims,
            silent: steps,
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
        steps: &[Step],
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
                why.blocked = step.want.is_none() || refused.contains_key(&step.name);
                refused.insert(step.name.clone(), why);
            }
        }
        news
    }
}

/// Compares the plan with the counts from which the references were computed.
fn check_counts(planned: &Planned, steps: &[Step]) -> Result<(), Failure> {
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

fn check_intent(request: &ClaimsRequest, digest: &str) -> Result<(), KeysError> {
    if request.intent_digest.is_empty() || request.intent_digest == digest {
        return Ok(());
    }
    Err(KeysError::ClaimsRefused {
        reason: ClaimRefusal::IntentMismatch,
        generation: None,
        message: format!(
            "the digest of these claims is {digest}, and not the one in the request; approve these claims, or send the ones that were approved"
        ),
    })
}

fn check_boot(wanted: &str, boot: &str) -> Result<(), KeysError> {
    if wanted == boot {
        return Ok(());
    }
    Err(KeysError::ClaimsRefused {
        reason: ClaimRefusal::BootChanged,
        generation: None,
        message: format!(
            "the guest's boot is {boot}, and not the one in the request; look at its keys again, and send the claims for this boot"
        ),
    })
}

fn too_many(error: TooMany) -> KeysError {
    KeysError::ClaimsRefused {
        reason: ClaimRefusal::TooMany,
        generation: None,
        message: error.to_string(),
    }
}

#[cfg(test)]
pub(super) mod tests;
