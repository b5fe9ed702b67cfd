// SPDX-License-Identifier: Apache-2.0
//! Ends claims that have expired, and retries keys whose references could not be returned before.
//!
//! If a set is refused because of some of its keys, the set is halved until only those keys are
//! left, and the claims on all others end. [Expired holds](super::expiry) are released in the same
//! way. Between two sets the executor serves a command.

use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::guest::Guest;

use super::claims::Wanted;
use super::standstill::Standstill;
use super::state::Executor;
use crate::keys::claims::Owner;

/// The delay before another attempt to end expired claims.
const AGAIN: Duration = Duration::from_secs(5);

/// Keys on which claims end.
#[derive(Debug)]
pub(super) struct Ending {
    /// The owner whose claims have expired, and the time of the next attempt to end them. `None` if
    /// the references of the keys are only adapted to the claims.
    owner: Option<(Owner, (Instant, SystemTime))>,
    /// Ordered by name.
    keys: Vec<String>,
}

impl<G: Guest> Executor<G> {
    /// Ends one set of claims if one is due. Returns whether one was due.
    pub(super) fn end_claims(&mut self, now: Instant, standstill: &mut Standstill<'_, G>) -> bool {
        if self.expiries.endings.is_empty() {
            self.collect_endings(now);
        }
        let Some(mut ending) = self.expiries.endings.pop() else {
            return false;
        };
        let owner = ending.owner.as_ref();
        // The owner may have made other claims meanwhile, or the same claims with a later expiry.
        if owner.is_some_and(|(owner, again)| !self.is_ending(owner, *again)) {
            return true;
        }
        let owner = owner.map(|(owner, _)| owner);
        let wanted = Wanted::end(owner, &ending.keys, self.ledger.boot());
        let Err(error) = self.make_claims(&wanted, || false, standstill) else {
            return true;
        };
        if ending.keys.len() > 1 && !error.is_of_every_key() {
            let keys = ending.keys.split_off(ending.keys.len() / 2);
            let owner = ending.owner.clone();
            let half = Ending { owner, keys };
            self.expiries.endings.extend([half, ending]);
            return true;
        }
        tracing::debug!(%error, keys = ending.keys.len(), "claims cannot be ended yet");
        if ending.owner.is_none() {
            let mut book = self.shared.book();
            for (name, claims) in book.claims.keys_mut() {
                if ending.keys.binary_search(name).is_ok() {
                    claims.put_off(now);
                }
            }
        }
        true
    }

    /// Returns whether the owner's claims still have the expiry `again` that `collect_endings` gave
    /// them. The generation does not show this, because it is raised before the claims of a request
    /// are made.
    fn is_ending(&self, owner: &Owner, again: (Instant, SystemTime)) -> bool {
        let book = self.shared.book();
        let state = book.claims.owner(owner);
        state.is_some_and(|state| state.expires == Some(again))
    }

    /// Collects the claims and keys that are due. Claims that cannot be ended become due again
    /// later.
    fn collect_endings(&mut self, now: Instant) {
        let again = (now + AGAIN, SystemTime::now() + AGAIN);
        let mut book = self.shared.book();
        for owner in book.claims.expired(now) {
            let keys = book.claims.keys_of(&owner);
            let claims_any = !keys.is_empty();
            book.claims
                .expire_again(&owner, claims_any.then_some(again));
            if claims_any {
                let owner = Some((owner, again));
                self.expiries.endings.push(Ending { owner, keys });
            }
        }
        let keys = book.claims.unsettled(now);
        if !keys.is_empty() {
            let owner = None;
            self.expiries.endings.push(Ending { owner, keys });
        }
    }
}
