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
use static_keys::{KeyChange, KeyId};

use super::state::Executor;
use crate::keys::claims::file::{Ledger, LedgerPlace, Pending, SavedHolds, SavedKey, State};
use crate::keys::claims::{Claims, LedgerFile, MadeRequest, MadeRequests};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::holds::{Holds, KeyHolds, KeyInstance};
use crate::keys::outcome::UpdateSummary;
use crate::keys::registry::{Registration, Snapshot};
use crate::keys::replay::RequestId;

/// Time between two looks for the kernel of the guest whose ledger was found.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The ledger, and whether its content is this process's already.
#[derive(Debug, Default)]
pub(in crate::keys) struct Keeper {
    place: Option<Box<dyn LedgerPlace>>,
    /// The content that an earlier process has left.
    found: Option<Ledger>,
    /// The process that runs the guest.
    process: String,
    next_look: Option<Instant>,
    /// The boot that the state belongs to.
    boot: String,
    /// The first part of the ids of holds.
    holds_of: String,
    /// Requests that were made in this boot.
    made: MadeRequests,
    /// Digest of the pending change that was written last.
    pending: Option<[u8; 32]>,
}

impl Keeper {
    /// Creates the keeper of a ledger file; of none, it keeps nothing.
    pub fn new(file: Option<LedgerFile>, holds_of: &str) -> Self {
        let Some(file) = file else {
            return Self::default();
        };
        Self {
            place: Some(file.place),
            found: file.found,
            process: file.process,
            holds_of: holds_of.to_owned(),
            ..Self::default()
        }
    }

    /// Returns whether the content that an earlier process has left is not adopted yet.
    pub fn waits(&self) -> bool {
        self.found.is_some()
    }

    /// Remembers a request that was made.
    pub(super) fn remember(&mut self, made: Option<MadeRequest>) {
        if self.place.is_some() {
            made.into_iter().for_each(|made| self.made.push(made));
        }
    }

    /// Returns the answer to a request that was made, maybe by an earlier process.
    ///
    /// # Errors
    /// [`KeysError::RequestIdReused`].
    pub(super) fn made(
        &self,
        principal: &str,
        request: &RequestId,
    ) -> Result<Option<UpdateSummary>, KeysError> {
        self.made.find(principal, request)
    }

    /// Returns the name of the boot that the holds and claims belong to.
    pub(super) fn boot(&self) -> &str {
        &self.boot
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
            process: self.process.clone(),
            boot: self.boot.clone(),
            holds_of: self.holds_of.clone(),
            now,
            pending,
            requests: self.made.clone(),
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
    /// them, the claims. `request` returns what is kept of the request that asks for the change.
    /// Without a ledger it is not called.
    ///
    /// # Errors
    /// LEDGER_UNWRITABLE: the change must not be made.
    pub(super) fn keep_pending<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a KeyChange>,
        holds: impl Iterator<Item = (KeyInstance, &'a KeyHolds)>,
        claims: Option<&Claims>,
        request: impl FnOnce() -> Option<MadeRequest>,
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
            request: request(),
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

    /// Makes holds and claims those of the running kernel: adopts the ledger of an earlier process,
    /// if there is one.
    ///
    /// # Errors
    /// There is one, and the guest's kernel is not known.
    pub(super) fn adopt_ledger(&mut self) -> Result<(), KeysError> {
        let waits = self.ledger.waits();
        match self.snapshot() {
            Err(error) if waits => Err(error),
            _ => Ok(()),
        }
    }

    /// Adopts the ledger of an earlier process once the guest's kernel is known.
    pub(super) fn look_for_ledgers_kernel(&mut self, now: Instant) {
        self.ledger.next_look = Some(now + LOOK_INTERVAL);
        if let Err(error) = self.adopt_ledger() {
            tracing::debug!(%error, "the ledger waits for the guest's kernel");
        }
    }

    /// Lets holds and claims follow a new registration, and adopts the ledger of an earlier
    /// process.
    pub(super) fn follow_registration(&mut self, snapshot: &Snapshot) {
        let registration = &*snapshot.registration;
        let (boot, epoch) = (registration.boot_identity(), Some(registration.epoch));
        let live = self.shared.registry.live_epochs();
        if self.shared.registry.boot() != epoch {
            // There is a newer registration already, which the next attempt follows.
            return;
        }
        self.pruned = snapshot.version;
        let is_same_kernel = boot == self.ledger.boot;
        let is_set_back = is_same_kernel && self.shared.book().boot != epoch;
        let dropped = match is_set_back {
            // Another client has stopped and resumed the guest, and may have loaded an earlier
            // state of it.
            true => {
                let (holds, claims) = {
                    let mut book = self.shared.book();
                    let holds = book.holds.take_all();
                    book.retain(|_| false);
                    (holds, book.claims.clone())
                };
                let holds = holds.into_iter();
                let holds = holds.map(|(key, holds)| (key.id, holds, false));
                self.adopt(registration, holds, claims);
                true
            }
            false => self.shared.book().retain(|key| live.contains(&key.epoch)),
        };
        self.shared.book().boot = epoch;
        if !is_same_kernel {
            self.ledger.boot.clone_from(&boot);
            self.ledger.made = MadeRequests::default();
            // Claims belong to a boot, and so do the generations of their owners.
            self.shared.book().claims = Claims::default();
        }
        let Some(ledger) = self.ledger.found.take() else {
            // Otherwise the next process would find the holds again.
            if dropped {
                self.keep_outcome();
            }
            return;
        };
        // Ids of holds are never used again, in whatever boot.
        self.shared.book().holds.number_after(ledger.newest_hold());
        if ledger.boot == boot {
            self.adopt_found(registration, ledger);
            self.keep_outcome();
        } else {
            tracing::warn!("the ledger belongs to an earlier boot of the guest, and is forgotten");
        }
        self.shared.book().ledger_waits = false;
    }

    fn adopt_found(&mut self, registration: &Registration, ledger: Ledger) {
        let memory = registration.memory(self.guest.ram());
        let (state, made) = ledger.settled(|saved| {
            let key = registration.catalog.find(&saved.name)?;
            let key = Some(key).filter(|key| key.id.0 == saved.address)?;
            let state = registration.state(&memory, key)?;
            Some(state.count)
        });
        self.ledger.made = made;
        let holds = state.holds.iter();
        let holds = holds.map(|saved| (KeyId(saved.key.address), saved.restored(), true));
        self.adopt(registration, holds, state.claims);
    }

    /// Binds holds and claims to the keys of the running kernel, and drops references that the
    /// guest no longer has. Holds from a file, marked with true, are bound to the probes that their
    /// tracepoints have now.
    fn adopt(
        &self,
        registration: &Registration,
        holds: impl Iterator<Item = (KeyId, KeyHolds, bool)>,
        mut claims: Claims,
    ) {
        let memory = registration.memory(self.guest.ram());
        let now = self.shared.clock.now();
        let mut book = self.shared.book();
        let (mut kept, mut gone) = (0_usize, 0_usize);
        for (id, mut holds, is_from_file) in holds {
            let key = registration.catalog.find(holds.name());
            let Some(key) = key.filter(|key| key.id == id) else {
                gone += 1;
                continue;
            };
            if let Some(state) = registration.state(&memory, key) {
                if is_from_file {
                    holds.set_probes(state.probes);
                }
                if state.count >= 0 {
                    holds.follow_guest(&state);
                }
            }
            book.holds.put(registration.instance(key), holds);
            kept += 1;
        }
        for (name, claims) in claims.keys_mut() {
            match registration.catalog.find(name) {
                Some(key) if claims.is_of(key.id) => {
                    claims.bind(registration.instance(key));
                    // The key may not have been returned yet.
                    claims.put_off(now);
                }
                _ => claims.lose(),
            }
        }
        book.claims = claims;
        drop(book);
        tracing::info!(kept, gone, "holds and claims continue");
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
