// SPDX-License-Identifier: Apache-2.0
//! Prepared changes that are kept until they are committed, discarded or expire.
//!
//! ```text
//!  prepare ──▶ Prepared ── commit ──▶ Committed (its answer)
//!                 │                       │
//!                 └── discard, expiry ────┴──▶ gone
//! ```
//!
//! A plan keeps no registration: a guest that loads modules would else have one kept for each plan.
//! It keeps the registration's version, which a commit compares.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};
use static_keys::{KeyChange, Plan};

use super::address_space::Place;
use super::error::KeysError;
use super::incarnation::Incarnation;
use super::planning::{Planned, PlannedOp};
use super::replay::Content;
use super::{KeyOutcome, KeyUpdate, Target, UpdateOutcome};

/// Characters of an unknown id that an error shows; every id is shorter.
const MAX_SHOWN: usize = 64;

/// A change to be prepared.
#[derive(Clone, Debug)]
pub struct PrepareRequest {
    /// In order, at least one.
    pub updates: Vec<KeyUpdate>,
    /// Who asks, and who alone may commit.
    pub principal: String,
    /// Empty: cannot be repeated.
    pub request_id: String,
    /// Digest of everything but the request id.
    pub content: Content,
    /// Allow guarded keys, if the monitor does.
    pub allow_guarded: bool,
    /// Drop references of others.
    pub force: bool,
    /// Answer with the summary alone.
    pub summary_only: bool,
    /// Kept with the holds.
    pub reason: String,
    /// When the references taken expire, from the commit on.
    pub hold_ttl: Option<Duration>,
    /// How long the plan is kept.
    pub plan_ttl: Duration,
    /// When to stop trying.
    pub deadline: Instant,
}

/// A plan to be made.
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// As [`PrepareOutcome`] has it.
    pub plan_id: String,
    /// If not empty, the plan's.
    pub digest: String,
    /// Who asks.
    pub principal: String,
    /// Answer with the summary alone.
    pub summary_only: bool,
    /// How long the vCPUs may take to stop.
    pub stop_timeout: Duration,
    /// When to stop trying.
    pub deadline: Instant,
}

/// A plan to be forgotten.
#[derive(Clone, Debug)]
pub struct DiscardRequest {
    /// As [`PrepareOutcome`] has it.
    pub plan_id: String,
    /// Who asks.
    pub principal: String,
}

/// A change that may be committed.
#[derive(Clone, Debug)]
pub struct PrepareOutcome {
    /// For the commit.
    pub plan_id: String,
    /// SHA-256 in hexadecimal.
    pub digest: String,
    /// What the commit will do.
    pub outcome: Arc<UpdateOutcome>,
    /// Zero if no pause is needed; `None` if no change has paused this guest yet.
    pub predicted_pause: Option<Duration>,
    /// When the plan is forgotten.
    pub expires_at: SystemTime,
}

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanLimits {
    pub plans: usize,
    pub bytes: usize,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self {
            plans: 256,
            bytes: 64 << 20,
        }
    }
}

/// A plan, or the answer of its commit.
pub(super) struct Kept {
    pub principal: String,
    pub request_id: String,
    pub content: Content,
    pub expires: Instant,
    /// Of the registration that it was planned on.
    pub version: u64,
    pub generation: u64,
    pub answer: Arc<PrepareOutcome>,
    pub state: State,
    /// Counted when it is put in.
    pub bytes: usize,
}

pub(super) enum State {
    Prepared(Box<Prepared>),
    Committed(Arc<UpdateOutcome>),
}

/// What a commit needs.
pub(super) struct Prepared {
    pub planned: Planned,
    /// For the audit log.
    pub updates: Vec<KeyUpdate>,
    pub force: bool,
    pub reason: String,
    pub hold_ttl: Option<Duration>,
}

impl Kept {
    /// Bytes of memory that it takes, about.
    fn count_bytes(&self) -> usize {
        let state = match &self.state {
            State::Prepared(prepared) => prepared.bytes(),
            State::Committed(outcome) => outcome_bytes(outcome),
        };
        size_of::<Self>() + outcome_bytes(&self.answer.outcome) + state
    }
}

impl Prepared {
    fn bytes(&self) -> usize {
        let target = |update: &KeyUpdate| match &update.keys {
            Target::Name(name) => name.len(),
            Target::Held { name, .. } => name.len(),
            // The texts, and the globs that are made of them.
            Target::Selection(selection) => {
                let texts = selection.patterns.texts().iter();
                texts.map(|text| 2 * text.len() + 128).sum()
            }
        };
        let update =
            |update: &KeyUpdate| size_of::<KeyUpdate>() + update.etag.len() + target(update);
        let op = |op: &PlannedOp| size_of::<PlannedOp>() + op.etag.len();
        self.planned.plan.memory_bytes()
            + self.planned.ops.iter().map(op).sum::<usize>()
            + self.updates.iter().map(update).sum::<usize>()
    }
}

fn outcome_bytes(outcome: &UpdateOutcome) -> usize {
    let result = |of: &KeyOutcome| size_of::<KeyOutcome>() + of.etag.len() + of.hold_id.len();
    outcome.results.iter().map(result).sum()
}

/// The plans of one guest, in the order of their last use.
#[derive(Default)]
pub(super) struct Plans {
    kept: Vec<Kept>,
    made: u64,
    limits: PlanLimits,
}

impl Plans {
    /// An id that no plan has had.
    pub fn next_id(&mut self, incarnation: &Incarnation) -> String {
        self.made += 1;
        format!("{}-p{}", incarnation.short(), self.made)
    }

    /// Keeps a plan. To make room, committed ones and those of another `version` of the registration
    /// than the present are forgotten first.
    ///
    /// # Errors
    /// [`KeysError::TooManyPlans`].
    pub fn insert(&mut self, mut plan: Kept, version: u64) -> Result<(), KeysError> {
        plan.bytes = plan.count_bytes();
        let needed = plan.bytes;
        while !self.has_room(needed) {
            let dead =
                |kept: &Kept| matches!(kept.state, State::Committed(_)) || kept.version != version;
            match self.kept.iter().position(dead) {
                Some(index) => drop(self.kept.remove(index)),
                None => {
                    return Err(KeysError::TooManyPlans {
                        plans: self.kept.len(),
                        bytes: self.bytes(),
                        needed,
                        max_plans: self.limits.plans,
                        max_bytes: self.limits.bytes,
                    });
                }
            }
        }
        self.kept.push(plan);
        Ok(())
    }

    fn has_room(&self, needed: usize) -> bool {
        self.kept.len() < self.limits.plans
            && self.bytes().saturating_add(needed) <= self.limits.bytes
    }

    fn bytes(&self) -> usize {
        self.kept.iter().map(|kept| kept.bytes).sum()
    }

    /// Takes a plan out, to be given to [`Plans::put_back`].
    ///
    /// # Errors
    /// [`KeysError::PlanNotFound`], [`KeysError::PlanNotOwned`].
    pub fn take(&mut self, plan_id: &str, principal: &str) -> Result<Kept, KeysError> {
        let index = self.find(plan_id, principal)?;
        let index = index.ok_or_else(|| KeysError::PlanNotFound {
            // The error goes into a header of limited size.
            plan_id: plan_id.chars().take(MAX_SHOWN).collect(),
        })?;
        Ok(self.kept.remove(index))
    }

    /// Keeps a plan again that was taken out.
    pub fn put_back(&mut self, mut plan: Kept) {
        plan.bytes = plan.count_bytes();
        self.kept.push(plan);
    }

    /// Forgets a plan. One that is not kept is forgotten already.
    ///
    /// # Errors
    /// [`KeysError::PlanNotOwned`].
    pub fn discard(&mut self, request: &DiscardRequest) -> Result<(), KeysError> {
        if let Some(index) = self.find(&request.plan_id, &request.principal)? {
            self.kept.remove(index);
        }
        Ok(())
    }

    fn find(&self, plan_id: &str, principal: &str) -> Result<Option<usize>, KeysError> {
        let is_it = |kept: &Kept| kept.answer.plan_id == plan_id;
        match self.kept.iter().position(is_it) {
            Some(index) if self.kept[index].principal != principal => {
                Err(KeysError::PlanNotOwned {
                    plan_id: plan_id.to_owned(),
                })
            }
            found => Ok(found),
        }
    }

    /// The plan that was prepared under this request id, if it is kept.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if it is of another change.
    pub fn repeated(
        &self,
        request: &PrepareRequest,
    ) -> Result<Option<Arc<PrepareOutcome>>, KeysError> {
        if request.request_id.is_empty() {
            return Ok(None);
        }
        let same = |kept: &&Kept| {
            kept.request_id == request.request_id && kept.principal == request.principal
        };
        match self.kept.iter().find(same) {
            None => Ok(None),
            Some(kept) if kept.content == request.content => Ok(Some(Arc::clone(&kept.answer))),
            Some(_) => Err(KeysError::RequestIdReused {
                request_id: request.request_id.clone(),
            }),
        }
    }

    /// Forgets what has expired.
    pub fn expire(&mut self, now: Instant) {
        self.kept.retain(|kept| kept.expires > now);
    }

    /// When the next one expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.kept.iter().map(|kept| kept.expires).min()
    }
}

/// SHA-256 over what a plan does: its keys by name with their counts, and its sites by address with
/// their bytes, each before and after.
pub(super) fn digest(plan: &Plan<Place>) -> String {
    use std::fmt::Write;
    let mut keys: Vec<&KeyChange> = plan.changes().collect();
    keys.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut sum = Sha256::new();
    sum.update((keys.len() as u64).to_le_bytes());
    for key in keys {
        // A length before what has no fixed one: no two lists have the same bytes.
        sum.update((key.name.len() as u64).to_le_bytes());
        sum.update(key.name.as_bytes());
        sum.update(key.before.to_le_bytes());
        sum.update(key.after.to_le_bytes());
    }
    for site in plan.sites() {
        sum.update(site.address.to_le_bytes());
        sum.update((site.before.len() as u64).to_le_bytes());
        sum.update(site.before);
        sum.update(site.after);
    }
    let mut text = String::with_capacity(64);
    for byte in sum.finalize() {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests;
