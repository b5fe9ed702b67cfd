// SPDX-License-Identifier: Apache-2.0
//! The owners of claims, their generations, and the claims of all keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Answer, Content, KeyAnswer, KeyClaims, Owner, expiry, shared};

/// The maximum number of claims on the keys of a guest.
pub const MAX_CLAIMS: usize = 65_536;
/// The maximum number of owners, including those whose claims have ended.
pub const MAX_OWNERS: usize = 4_096;
/// The maximum number of owners of one principal. Without this limit one principal could keep all
/// others from making claims.
const MAX_OWNERS_EACH: usize = 1_024;
/// The time after which the generation of an owner without claims may be forgotten. No message is
/// on its way for so long.
const IDLE: Duration = Duration::from_hours(24);

/// The maximum number of bytes of the answers that are kept. The ledger contains them and is
/// written before and after each change.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// The bytes that a key takes in the ledger besides its texts.
const KEY_BYTES: usize = 128;

/// All claims of one boot of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// The owners, ordered by their last answer: the one that was answered last is at the end.
    owners: Vec<OwnerState>,
    /// The claims on each key, by the key's name. A key without claims has no entry.
    keys: BTreeMap<String, KeyClaims>,
}

/// The state of an owner. It is kept after the owner's last claim has ended, because its generation
/// refuses late messages. It is forgotten after [`IDLE`] if there is no room for another owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerState {
    /// The owner.
    pub owner: Owner,
    /// The highest generation that was seen.
    pub generation: u64,
    /// Digest of the request with this generation.
    pub content: Content,
    /// Time at which the claims expire.
    #[serde(with = "expiry")]
    pub expires: Option<(Instant, SystemTime)>,
    /// The answer to this request; `None` until the request was made.
    #[serde(with = "shared")]
    pub answer: Option<Arc<Answer>>,
    /// Time of this request; `None` if an earlier program has written the ledger.
    #[serde(default)]
    pub last: Option<SystemTime>,
    /// The request with this generation has no claims.
    #[serde(default)]
    pub is_empty: bool,
    /// The highest generation before this one whose claims were made; 0 if there was none.
    #[serde(default)]
    pub before: u64,
}

impl OwnerState {
    /// Returns the highest generation before this one whose claims were made; 0 if there was none.
    /// An empty set does not count: a ledger that has lost the claims takes one, too.
    pub fn made_before(&self, generation: u64) -> u64 {
        match self.answer {
            Some(_) if self.generation < generation && !self.is_empty => self.generation,
            _ => self.before,
        }
    }
}

/// The relation of a request to the earlier ones of its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// The request is new, or was not made yet.
    New,
    /// The request was made, with this answer.
    Answered(Arc<Answer>),
}

/// The reason why a request of an owner is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// A later generation was seen.
    Stale {
        /// The highest generation that was seen.
        current: u64,
    },
    /// The generation was used for other claims.
    Reused,
}

/// There are too many owners or claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooMany {
    /// Owners, including those whose claims have ended.
    #[error(
        "{MAX_OWNERS} owners have claims or have changed them within a day, and no more are kept; use the name of an earlier owner"
    )]
    Owners,
    /// Owners of one principal.
    #[error(
        "{MAX_OWNERS_EACH} owners of your principal have claims or have changed them within a day, and no more are kept; use the name of an earlier owner"
    )]
    OwnersOfPrincipal,
    /// Claims.
    #[error("the claims on this guest's keys would be more than {MAX_CLAIMS}; clear some first")]
    Claims,
}

impl Claims {
    /// Returns the claims on a key.
    pub fn key(&self, name: &str) -> Option<&KeyClaims> {
        self.keys.get(name)
    }

    /// Returns the claimed keys from this name on, ordered by name.
    pub fn keys_from(&self, name: &str) -> impl Iterator<Item = (&String, &KeyClaims)> {
        self.keys.range(name.to_owned()..)
    }

    /// Returns the owners, ordered by their last answer.
    pub fn owners(&self) -> &[OwnerState] {
        &self.owners
    }

    /// Returns all claimed keys, to be changed in place.
    pub fn keys_mut(&mut self) -> impl Iterator<Item = (&String, &mut KeyClaims)> {
        self.keys.iter_mut()
    }

    /// Creates the state of owners that have no claims.
    #[cfg(test)]
    pub fn with_owners(owners: impl Iterator<Item = Owner>) -> Self {
        let state = |owner| OwnerState {
            owner,
            generation: 1,
            content: Content::default(),
            expires: None,
            answer: None,
            last: None,
            is_empty: false,
            before: 0,
        };
        Self {
            owners: owners.map(state).collect(),
            ..Self::default()
        }
    }

    /// Returns whether the numbers of claims are within the limits. A change that was made in part
    /// may leave more claims than [`MAX_CLAIMS`].
    pub fn is_plausible(&self) -> bool {
        self.owners.len() <= MAX_OWNERS && self.keys.values().all(KeyClaims::is_plausible)
    }

    /// Returns whether there are no claims and no owners.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.owners.is_empty()
    }

    /// Replaces the claims on a key.
    pub fn put(&mut self, name: &str, claims: KeyClaims) {
        match claims.is_empty() {
            true => self.keys.remove(name),
            false => self.keys.insert(name.to_owned(), claims),
        };
    }

    /// Replaces or adds the state of an owner, who then counts as the one answered last.
    pub fn put_owner(&mut self, state: OwnerState) {
        self.owners.retain(|other| other.owner != state.owner);
        self.owners.push(state);
    }

    /// Returns the highest generation of these owners whose claims were made; 0 if there is none.
    pub fn made_last(&self, is_meant: impl Fn(&Owner) -> bool) -> u64 {
        let owners = self.owners.iter().filter(|state| is_meant(&state.owner));
        let made = owners.map(|state| state.made_before(u64::MAX));
        made.max().unwrap_or(0)
    }

    /// Returns all owners, and all claims by key.
    pub fn into_parts(self) -> (Vec<OwnerState>, BTreeMap<String, KeyClaims>) {
        (self.owners, self.keys)
    }

    /// Returns an owner's state.
    pub fn owner(&self, owner: &Owner) -> Option<&OwnerState> {
        self.owners.iter().find(|state| state.owner == *owner)
    }

    /// Returns the keys that an owner claims, ordered by name.
    pub fn keys_of(&self, owner: &Owner) -> Vec<String> {
        let claimed = self.keys.iter();
        let claimed = claimed.filter(|(_, claims)| claims.of(owner).is_some());
        claimed.map(|(name, _)| name.clone()).collect()
    }

    /// Compares a request with the owner's earlier ones.
    ///
    /// # Errors
    /// [`Fence`]: the request must not act.
    pub fn fence(
        &self,
        owner: &Owner,
        generation: u64,
        content: &Content,
    ) -> Result<Fenced, Fence> {
        let Some(state) = self.owner(owner) else {
            return Ok(Fenced::New);
        };
        let current = state.generation;
        match generation.cmp(&current) {
            std::cmp::Ordering::Less => Err(Fence::Stale { current }),
            std::cmp::Ordering::Equal if state.content != *content => Err(Fence::Reused),
            std::cmp::Ordering::Equal => Ok(match &state.answer {
                Some(answer) => Fenced::Answered(Arc::clone(answer)),
                None => Fenced::New,
            }),
            std::cmp::Ordering::Greater => Ok(Fenced::New),
        }
    }

    /// Raises an owner's generation. From now on lower generations are refused, whether or not the
    /// request succeeds. `claims` is the number of claims that the request makes.
    ///
    /// # Errors
    /// [`TooMany`]: nothing has changed.
    pub fn raise(
        &mut self,
        owner: &Owner,
        generation: u64,
        content: Content,
        claims: usize,
        now: SystemTime,
    ) -> Result<(), TooMany> {
        if let Some(idle) = self.room(owner, claims, now)? {
            self.owners.remove(idle);
        }
        match self.owners.iter_mut().find(|state| state.owner == *owner) {
            Some(state) => {
                state.last = Some(now);
                if state.generation != generation {
                    state.before = state.made_before(generation);
                    state.is_empty = claims == 0;
                    state.generation = generation;
                    state.content = content;
                    state.answer = None;
                }
            }
            None => self.owners.push(OwnerState {
                owner: owner.clone(),
                generation,
                content,
                expires: None,
                answer: None,
                last: Some(now),
                is_empty: claims == 0,
                before: 0,
            }),
        }
        Ok(())
    }

    /// Checks that there is room for this many claims of an owner. Returns the index of an owner
    /// that must be forgotten for it.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn room(
        &self,
        owner: &Owner,
        claims: usize,
        now: SystemTime,
    ) -> Result<Option<usize>, TooMany> {
        let others = self.keys.values().flat_map(KeyClaims::stack);
        let others = others.filter(|claim| claim.owner != *owner).count();
        if claims > 0 && others.saturating_add(claims) > MAX_CLAIMS {
            return Err(TooMany::Claims);
        }
        if self.owner(owner).is_some() {
            return Ok(None);
        }
        let is_own = |state: &OwnerState| state.owner.principal == owner.principal;
        let own = self.owners.iter().filter(|state| is_own(state)).count();
        let too_many = match self.owners.len() >= MAX_OWNERS {
            true => TooMany::Owners,
            false if own >= MAX_OWNERS_EACH => TooMany::OwnersOfPrincipal,
            false => return Ok(None),
        };
        let claims = self.keys.values().flat_map(KeyClaims::stack);
        let claiming: BTreeSet<&Owner> = claims.map(|claim| &claim.owner).collect();
        let is_idle = |state: &OwnerState| {
            let idle = state.last.and_then(|last| now.duration_since(last).ok());
            let makes_room = own < MAX_OWNERS_EACH || is_own(state);
            makes_room && idle > Some(IDLE) && !claiming.contains(&state.owner)
        };
        let idle = self.owners.iter().position(is_idle);
        idle.map(Some).ok_or(too_many)
    }

    /// Returns the state of an owner after its last request was answered; `None` if the owner is
    /// not known. The answer has no keys if it alone takes more than [`MAX_ANSWER_BYTES`].
    pub fn answered(
        &self,
        owner: &Owner,
        answer: Arc<Answer>,
        expires: Option<(Instant, SystemTime)>,
    ) -> Option<OwnerState> {
        let mut after = OwnerState {
            expires,
            answer: Some(answer),
            ..self.owner(owner)?.clone()
        };
        let mut left = MAX_ANSWER_BYTES;
        after.limit_answer(&mut left);
        Some(after)
    }

    /// Keeps the state of an owner whose last request was answered. If all answers take more than
    /// [`MAX_ANSWER_BYTES`], the oldest lose their keys. If the newest alone takes more, it loses
    /// its keys too.
    pub fn answer(&mut self, state: OwnerState) {
        self.put_owner(state);
        let mut left = MAX_ANSWER_BYTES;
        let newest_first = self.owners.iter_mut().rev();
        newest_first.for_each(|state| state.limit_answer(&mut left));
    }

    /// Ends the expiry of an owner's claims, or sets the time at which ending the claims is tried
    /// again.
    pub fn expire_again(&mut self, owner: &Owner, expires: Option<(Instant, SystemTime)>) {
        let mut owners = self.owners.iter_mut();
        if let Some(state) = owners.find(|state| state.owner == *owner) {
            state.expires = expires;
        }
    }

    /// Returns when the next claims expire or the next attempt at a key is due.
    pub fn next_due(&self) -> Option<Instant> {
        let expiries = self.owners.iter().filter_map(|state| state.expires);
        let retries = self.keys.values().filter_map(KeyClaims::due);
        expiries.map(|(at, _)| at).chain(retries).min()
    }

    /// Returns the owners whose claims have expired.
    pub fn expired(&self, now: Instant) -> Vec<Owner> {
        let expired = |state: &&OwnerState| state.expires.is_some_and(|(at, _)| at <= now);
        let expired = self.owners.iter().filter(expired);
        expired.map(|state| state.owner.clone()).collect()
    }

    /// Returns the keys whose next attempt is due.
    pub fn unsettled(&self, now: Instant) -> Vec<String> {
        let due = |(_, claims): &(&String, &KeyClaims)| claims.due().is_some_and(|at| at <= now);
        let due = self.keys.iter().filter(due);
        due.map(|(name, _)| name.clone()).collect()
    }
}

impl OwnerState {
    /// Drops the keys of the answer if it takes more than `left` bytes, and reduces `left`
    /// otherwise.
    fn limit_answer(&mut self, left: &mut usize) {
        let Some(answer) = &mut self.answer else {
            return;
        };
        match left.checked_sub(answer.keys.iter().map(bytes).sum()) {
            Some(rest) => *left = rest,
            None => {
                *answer = Arc::new(Answer {
                    plan_digest: answer.plan_digest.clone(),
                    keys: Vec::new(),
                });
            }
        }
    }
}

/// Returns the approximate number of bytes that the answer about a key takes in the ledger.
fn bytes(answer: &KeyAnswer) -> usize {
    KEY_BYTES + answer.key.len() + answer.reason.len() + answer.message.len()
}
