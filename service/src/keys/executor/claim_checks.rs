// SPDX-License-Identifier: Apache-2.0
//! Checks sets of claims, and raises the generations of their owners. No key is changed here.

use std::sync::Arc;
use std::time::SystemTime;

use patchbay_guest::guest::Guest;

use super::state::Executor;
use crate::keys::claims::{Answer, ClaimsRequest, Fence, Fenced, Owner, TooMany, Want};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::registry::Registration;
use crate::keys::scope::Use;

impl<G: Guest> Executor<G> {
    /// Raises the owner's generation, or checks in a validation that there is room for this.
    pub(super) fn raise(&self, owner: &Owner, request: &ClaimsRequest) -> Result<(), TooMany> {
        let (claims, now) = (request.claims.len(), SystemTime::now());
        let book = &mut self.shared.book().claims;
        match request.validate_only {
            true => book.room(owner, claims, now).map(|_| ()),
            false => book.raise(owner, request.generation, request.content, claims, now),
        }
    }

    /// Returns the answer to an earlier request with this generation.
    pub(super) fn fence(
        &self,
        owner: &Owner,
        request: &ClaimsRequest,
    ) -> Result<Option<Arc<Answer>>, KeysError> {
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
    pub(super) fn permit_claims(
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
}

pub(super) fn check_intent(request: &ClaimsRequest, digest: &str) -> Result<(), KeysError> {
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

pub(super) fn check_boot(wanted: &str, boot: &str) -> Result<(), KeysError> {
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

/// Checks that the ledger with its owner's highest generation that was made is the one that the
/// request needs.
pub(super) fn check_ledger(
    (wanted, after): &(String, u64),
    (ledger, made): (&str, u64),
) -> Result<(), KeysError> {
    if wanted == ledger && *after <= made {
        return Ok(());
    }
    Err(KeysError::ClaimsRefused {
        reason: ClaimRefusal::LedgerLost,
        generation: None,
        message: format!(
            "the ledger is {ledger}, in which generation {made} of the owner was made last, and not {wanted} with generation {after}, so nobody knows whether the earlier claims are still in effect; look at the keys"
        ),
    })
}

pub(super) fn too_many(error: TooMany) -> KeysError {
    KeysError::ClaimsRefused {
        reason: ClaimRefusal::TooMany,
        generation: None,
        message: error.to_string(),
    }
}
