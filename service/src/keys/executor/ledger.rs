// SPDX-License-Identifier: Apache-2.0
//! Keeps the claims and holds of a guest that outlives this process.
//!
//! The state is written before the first byte of a change, as it is and as it will be, and after
//! its outcome. A service that finds the ledger of an earlier one waits until the guest's kernel is
//! known, adopts the ledger if it belongs to this boot, and forgets it otherwise.

use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use patchbay_guest::log_limit::limited;
use sha2::{Digest, Sha256};
use static_keys::KeyChange;

use super::state::Executor;
use crate::keys::claims::file::{Ledger, LedgerPlace, Pending, SavedHolds, SavedKey, State};
use crate::keys::claims::{Claims, LedgerFile};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::holds::{Holds, KeyHolds, KeyInstance};
use crate::keys::registry::{Registration, Snapshot};

/// Time between two looks for the kernel of the guest whose ledger was found.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The ledger, and whether its content is this process's already.
#[derive(Debug, Default)]
pub(in crate::keys) struct Keeper {
    place: Option<Box<dyn LedgerPlace>>,
    /// The content that an earlier process has left.
    found: Option<Ledger>,
    next_look: Option<Instant>,
    /// The boot that the state belongs to.
    boot: String,
    /// The first part of the ids of holds.
    holds_of: String,
    /// Digest of the pending change that was written last.
    pending: Option<[u8; 32]>,
}

impl Keeper {
    /// Creates the keeper of a ledger file; of none, it keeps nothing.
    pub fn new(file: Option<LedgerFile>, holds_of: &str) -> Self {
        let (place, found) = match file {
            Some(file) => (Some(file.place), file.found),
            None => (None, None),
        };
        Self {
            place,
            found,
            holds_of: holds_of.to_owned(),
            ..Self::default()
        }
    }

    /// Returns whether the content that an earlier process has left is not adopted yet.
    pub fn waits(&self) -> bool {
        self.found.is_some()
    }

    /// Returns when the next look for the guest's kernel is due.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.found.as_ref().map(|_| self.next_look.unwrap_or(now))
    }

    fn write(&mut self, now: State, pending: Option<Pending>) -> Result<(), KeysError> {
        let Some(place) = &mut self.place else {
            return Ok(());
        };
        if self.found.is_some() {
            return Err(KeysError::ClaimsRefused {
                reason: ClaimRefusal::LedgerUnwritable,
                generation: None,
                message: format!(
                    "the ledger {} of an earlier process is not adopted yet, so nothing was changed; try again",
                    place.name()
                ),
            });
        }
        let is_pending = pending.is_some();
        let ledger = Ledger {
            boot: self.boot.clone(),
            holds_of: self.holds_of.clone(),
            now,
            pending,
        };
        let name = place.name();
        let unwritable = |error: std::io::Error| KeysError::ClaimsRefused {
            reason: ClaimRefusal::LedgerUnwritable,
            generation: None,
            message: format!(
                "the ledger {name} cannot be written ({error}), so nothing was changed; make room or repair it"
            ),
        };
        let bytes = ledger.encode().map_err(unwritable)?;
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        if is_pending && self.pending == Some(digest) {
            return Ok(());
        }
        place.replace(&bytes).map_err(unwritable)?;
        self.pending = is_pending.then_some(digest);
        Ok(())
    }
}

impl<G: Guest> Executor<G> {
    /// Writes what a change is about to do: the counts, the holds on its keys and, if it changes
    /// them, the claims.
    ///
    /// # Errors
    /// LEDGER_UNWRITABLE: the change must not be made.
    pub(super) fn keep_pending<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a KeyChange>,
        holds: impl Iterator<Item = (KeyInstance, &'a KeyHolds)>,
        claims: Option<&Claims>,
    ) -> Result<(), KeysError> {
        if self.ledger.place.is_none() {
            return Ok(());
        }
        let (now, after) = {
            let book = self.shared.book();
            let mut after = book.holds.clone();
            for (key, holds) in holds {
                after.put(key, holds.clone());
            }
            let claimed = claims.unwrap_or(&book.claims);
            (
                state_of(&book.holds, &book.claims),
                state_of(&after, claimed),
            )
        };
        let count = |change: &KeyChange| {
            let key = SavedKey {
                name: change.name.to_string(),
                address: change.key.0,
            };
            (key, change.before, change.after)
        };
        let pending = Pending {
            counts: changes.map(count).collect(),
            after,
        };
        self.ledger.write(now, Some(pending))
    }

    /// Writes the state as it is.
    ///
    /// # Errors
    /// LEDGER_UNWRITABLE: the file has the state before, and the pending change if there was one.
    pub(super) fn keep(&mut self) -> Result<(), KeysError> {
        if self.ledger.place.is_none() {
            return Ok(());
        }
        let now = {
            let book = self.shared.book();
            state_of(&book.holds, &book.claims)
        };
        self.ledger.write(now, None)
    }

    /// Writes the state after a change, or after one that failed. The file has both states if this
    /// fails, and the guest tells which is true.
    pub(super) fn keep_outcome(&mut self) {
        if let Err(error) = self.keep() {
            limited!(error, %error, "the outcome of a change is not in the ledger yet");
        }
    }

    /// Writes the state after a change that was not made, if the change was written before.
    pub(super) fn drop_pending(&mut self) {
        if self.ledger.pending.is_some() {
            self.keep_outcome();
        }
    }

    /// Adopts the ledger of an earlier process, if there is one.
    ///
    /// # Errors
    /// The guest's kernel is not known.
    pub(super) fn adopt_ledger(&mut self) -> Result<(), KeysError> {
        match self.ledger.waits() {
            true => self.snapshot().map(drop),
            false => Ok(()),
        }
    }

    /// Adopts the ledger of an earlier process once the guest's kernel is known.
    pub(super) fn look_for_ledgers_kernel(&mut self, now: Instant) {
        self.ledger.next_look = Some(now + LOOK_INTERVAL);
        if let Err(error) = self.adopt_ledger() {
            tracing::debug!(%error, "the ledger waits for the guest's kernel");
        }
    }

    /// Compares the ledger of an earlier process, and the claims, with the guest's boot.
    pub(super) fn follow_boot(&mut self, snapshot: &Snapshot) {
        let Some(boot) = self.shared.registry.boot_identity() else {
            return;
        };
        if self.ledger.boot != boot {
            let had = !std::mem::replace(&mut self.ledger.boot, boot.clone()).is_empty();
            // Claims belong to a boot, and so do the generations of their owners.
            if had {
                self.shared.book().claims = Claims::default();
            }
        }
        let Some(ledger) = self.ledger.found.take() else {
            return;
        };
        if ledger.boot == boot {
            self.adopt(&snapshot.registration, ledger);
            self.keep_outcome();
        } else {
            tracing::warn!("the ledger belongs to an earlier boot of the guest, and is forgotten");
        }
        self.shared.book().ledger_waits = false;
    }

    fn adopt(&mut self, registration: &Registration, ledger: Ledger) {
        let memory = registration.memory(self.guest.ram());
        let find = |saved: &SavedKey| {
            let key = registration.catalog.find(&saved.name)?;
            (key.id.0 == saved.address).then_some(key)
        };
        let newest = match &ledger.pending {
            Some(pending) => pending.after.newest_hold.max(ledger.now.newest_hold),
            None => ledger.now.newest_hold,
        };
        let mut state = ledger.settled(|saved| {
            let state = registration.state(&memory, find(saved)?)?;
            Some(state.count)
        });
        let now = self.shared.clock.now();
        let mut book = self.shared.book();
        book.holds.number_after(newest);
        let mut left = 0_usize;
        for saved in &state.holds {
            let Some(key) = find(&saved.key) else {
                left += 1;
                continue;
            };
            let mut holds = saved.restored();
            if let Some(state) = registration.state(&memory, key) {
                holds.set_probes(state.probes);
                if state.count >= 0 {
                    holds.follow_guest(&state);
                }
            }
            book.holds.put(registration.instance(key), holds);
        }
        for (name, claims) in state.claims.keys_mut() {
            match registration.catalog.find(name) {
                Some(key) if claims.is_of(key.id) => {
                    claims.bind(registration.instance(key));
                    // The earlier process may not have returned the key yet.
                    claims.put_off(now);
                }
                _ => claims.lose(),
            }
        }
        book.claims = state.claims;
        drop(book);
        tracing::info!(
            keys = state.holds.len(),
            gone = left,
            "the holds and claims of an earlier process continue"
        );
    }
}

fn state_of(holds: &Holds, claims: &Claims) -> State {
    let saved = |(key, holds): (KeyInstance, &KeyHolds)| {
        let key = SavedKey {
            name: holds.name().to_string(),
            address: key.id.0,
        };
        SavedHolds::of(key, holds)
    };
    let mut saved: Vec<SavedHolds> = holds.iter().map(saved).collect();
    // The same state has the same bytes.
    saved.sort_unstable_by(|one, other| one.key.name.cmp(&other.key.name));
    State {
        newest_hold: holds.newest(),
        holds: saved,
        claims: claims.clone(),
    }
}

#[cfg(test)]
mod tests;
