// SPDX-License-Identifier: Apache-2.0
//! Prepared changes, kept until they are committed or discarded or until they expire.
//!
//! ```text
//!  prepare ──▶ Prepared ── commit ──▶ Committed (its answer)
//!                 │                       │
//!                 └── discard, expiry ────┴──▶ gone
//! ```
//!
//! A plan does not hold its registration. Otherwise, if the guest loads modules, each plan would
//! keep an outdated registration alive. A plan stores the registration's version, which a commit
//! compares.

use std::sync::Arc;
use std::time::Instant;

use patchbay_proto::text::hex;
use sha2::{Digest, Sha256};
use static_keys::{KeyChange, Plan, Update};

use super::error::KeysError;
use super::incarnation::Incarnation;
use super::outcome::{KeyOutcome, PlanUsage, PrepareOutcome, UpdateOutcome};
use super::planned::{Planned, ResolvedKey};
use super::replay::RequestId;
use super::request::{DiscardRequest, KeyUpdate, Selection, Target, UpdateRequest};
use patchbay_guest::kernel_memory::Place;

/// Number of characters of an unknown id that an error shows. Every valid id is shorter.
const MAX_SHOWN: usize = 64;

/// Bounds of the kept plans.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanLimits {
    /// The bounds for all principals together.
    pub all: PlanUsage,
    /// The bounds for each principal, so that no principal can keep the others from preparing.
    pub each: PlanUsage,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self {
            all: PlanUsage {
                plans: 256,
                bytes: 96 << 20,
            },
            each: PlanUsage {
                plans: 64,
                bytes: 48 << 20,
            },
        }
    }
}

/// A plan, or the answer of its commit.
pub(super) struct Kept {
    pub principal: String,
    pub request_id: Option<RequestId>,
    pub expires: Instant,
    /// Version of the registration on which the change was planned.
    pub version: u64,
    pub generation: u64,
    pub answer: Arc<PrepareOutcome>,
    pub state: State,
    /// Size in memory, computed when the plan is stored.
    pub bytes: usize,
}

pub(super) enum State {
    Prepared(Box<Prepared>),
    Committed(Arc<UpdateOutcome>),
}

/// The parts of a plan that a commit needs.
pub(super) struct Prepared {
    pub planned: Planned,
    /// The change, for the holds and for the audit log.
    pub request: UpdateRequest,
}

impl Kept {
    /// Returns the approximate size in memory, in bytes.
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
        let etag = |etag: &Option<String>| etag.as_ref().map_or(0, String::len);
        let target = |update: &KeyUpdate| match &update.keys {
            Target::Name { name, etag: given } => name.len() + etag(given),
            Target::Held { name, .. } => name.len(),
            // The texts, and the compiled globs.
            Target::Selection(selection) => {
                let texts = selection.patterns.texts().iter();
                size_of::<Selection>() + texts.map(|text| 2 * text.len() + 128).sum::<usize>()
            }
            Target::Debug(queries) => {
                let texts = queries.texts().iter();
                texts.map(|text| 2 * text.len() + 256).sum()
            }
        };
        let update = |update: &KeyUpdate| size_of::<KeyUpdate>() + target(update);
        let resolved = &self.planned.resolved;
        let etags = resolved.etags.iter();
        let etags = etags.map(|(_, etag)| size_of::<(usize, String)>() + etag.len());
        self.planned.plan.memory_bytes()
            + resolved.updates.len() * (size_of::<Update>() + size_of::<ResolvedKey>())
            + etags.sum::<usize>()
            + self.request.updates.iter().map(update).sum::<usize>()
    }
}

fn outcome_bytes(outcome: &UpdateOutcome) -> usize {
    let result = |of: &KeyOutcome| size_of::<KeyOutcome>() + of.etag.len();
    outcome.results.iter().map(result).sum()
}

/// The plans of one guest, least recently used first.
#[derive(Default)]
pub(super) struct Plans {
    kept: Vec<Kept>,
    made: u64,
    limits: PlanLimits,
}

impl Plans {
    /// Returns a plan id that has never been used.
    pub fn next_id(&mut self, incarnation: &Incarnation) -> String {
        self.made += 1;
        format!("{}-p{}", incarnation.short(), self.made)
    }

    /// Keeps a plan. To make room, committed plans and plans of a registration other than `version`
    /// are dropped first. If the principal's share is used up, only its own plans are dropped,
    /// otherwise anyone's.
    ///
    /// # Errors
    /// [`KeysError::TooManyPlans`].
    pub fn insert(&mut self, mut plan: Kept, version: u64) -> Result<(), KeysError> {
        plan.bytes = plan.count_bytes();
        let principal = plan.principal.as_str();
        self.make_room(Some(principal), plan.bytes, version)?;
        self.make_room(None, plan.bytes, version)?;
        self.kept.push(plan);
        Ok(())
    }

    /// Makes room within the limits of a principal or, if none is given, of the guest.
    fn make_room(
        &mut self,
        principal: Option<&str>,
        needed: usize,
        version: u64,
    ) -> Result<(), KeysError> {
        let max = match principal {
            Some(_) => self.limits.each,
            None => self.limits.all,
        };
        let counts = |kept: &Kept| principal.is_none_or(|principal| kept.principal == principal);
        loop {
            let used = self.usage(counts);
            if used.plans < max.plans && used.bytes.saturating_add(needed) <= max.bytes {
                return Ok(());
            }
            let dead =
                |kept: &Kept| matches!(kept.state, State::Committed(_)) || kept.version != version;
            let first = self.kept.iter().position(|kept| counts(kept) && dead(kept));
            let Some(first) = first else {
                return Err(KeysError::TooManyPlans {
                    principal: principal.map(str::to_owned),
                    used,
                    needed,
                    max,
                });
            };
            self.kept.remove(first);
        }
    }

    fn usage(&self, counts: impl Fn(&Kept) -> bool) -> PlanUsage {
        let counted = self.kept.iter().filter(|kept| counts(kept));
        let none = PlanUsage { plans: 0, bytes: 0 };
        counted.fold(none, |used, kept| PlanUsage {
            plans: used.plans + 1,
            bytes: used.bytes + kept.bytes,
        })
    }

    /// Takes a plan out; [`Plans::put_back`] returns it.
    ///
    /// # Errors
    /// [`KeysError::PlanNotFound`], [`KeysError::PlanNotOwned`].
    pub fn take(&mut self, plan_id: &str, principal: &str) -> Result<Kept, KeysError> {
        let index = self.find(plan_id, principal)?;
        let index = index.ok_or_else(|| KeysError::PlanNotFound {
            // Truncated because the error goes into a size-limited header.
            plan_id: plan_id.chars().take(MAX_SHOWN).collect(),
        })?;
        Ok(self.kept.remove(index))
    }

    /// Puts back a plan that was taken out.
    pub fn put_back(&mut self, mut plan: Kept) {
        plan.bytes = plan.count_bytes();
        self.kept.push(plan);
    }

    /// Drops a plan. Discarding an unknown plan succeeds.
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

    /// Returns the plan that this request id prepared, if it is kept.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`] if the id prepared another change.
    pub fn repeated(
        &self,
        request: &UpdateRequest,
    ) -> Result<Option<Arc<PrepareOutcome>>, KeysError> {
        let Some(id) = &request.request_id else {
            return Ok(None);
        };
        let same = |kept: &&Kept| {
            let known = kept.request_id.as_ref().map(RequestId::as_str);
            known == Some(id.as_str()) && kept.principal == request.caller.name
        };
        let Some(kept) = self.kept.iter().find(same) else {
            return Ok(None);
        };
        if let Some(earlier) = &kept.request_id {
            id.check_repeat(earlier)?;
        }
        Ok(Some(Arc::clone(&kept.answer)))
    }

    /// Drops expired plans.
    pub fn expire(&mut self, now: Instant) {
        self.kept.retain(|kept| kept.expires > now);
    }

    /// Returns the time at which the next plan expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.kept.iter().map(|kept| kept.expires).min()
    }
}

/// Returns the SHA-256 of a plan's effect: keys by name with their counts, and sites by address
/// with their bytes, each before and after the change.
pub(super) fn digest(plan: &Plan<Place>) -> String {
    let mut keys: Vec<&KeyChange> = plan.changes().iter().collect();
    keys.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut sum = Sha256::new();
    sum.update((keys.len() as u64).to_le_bytes());
    for key in keys {
        // The length of each field of variable length precedes the field, so that two different
        // lists cannot hash the same bytes.
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
    hex(&sum.finalize())
}

#[cfg(test)]
mod tests;
