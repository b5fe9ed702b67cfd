// SPDX-License-Identifier: Apache-2.0
//! Keeps the claims and holds of a guest that outlives this process.
//!
//! The state is written before the first byte of a change, together with the state after it, and
//! again after the outcome. A service that finds the ledger of an earlier process waits until the
//! guest's kernel is known. It adopts the ledger if that belongs to this boot, and forgets it
//! otherwise.

mod room;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use patchbay_guest::log_limit::limited;
use static_keys::{KeyChange, KeyId};

use self::room::Room;
use super::claim_step::Step;
use super::state::Executor;
use crate::keys::claims::file::{
    Ledger, LedgerPlace, Pending, SavedHolds, SavedKey, State, check_room,
};
use crate::keys::claims::{
    Claims, CopiedHolds, LedgerFile, MadeRequest, MadeRequests, Mark, Owner, OwnerState,
};
use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::holds::{Holds, KeyHolds, KeyInstance};
use crate::keys::incarnation::Incarnation;
use crate::keys::outcome::UpdateSummary;
use crate::keys::quarantine::{Quarantine, QuarantineCause};
use crate::keys::registry::{Registration, Snapshot};
use crate::keys::replay::RequestId;

/// Time between two looks for the kernel of the guest whose ledger was found, and between two looks
/// for a reset of a guest with holds or claims.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time until an outcome that could not be written is written again. It doubles with each attempt,
/// because each one encodes the whole ledger.
const FIRST_DELAY: Duration = Duration::from_millis(500);
/// The maximum of this time.
const LAST_DELAY: Duration = Duration::from_secs(30);

/// The ledger, and whether this process has adopted its content.
#[derive(Debug, Default)]
pub(in crate::keys) struct Keeper {
    place: Option<Box<dyn LedgerPlace>>,
    /// The content that an earlier process has left in the file, or that the guest has which this
    /// one is a copy of.
    found: Option<Ledger>,
    /// The fate of the change that is pending in this content.
    mark: Option<Mark>,
    /// The process that runs the guest.
    process: String,
    /// Number of outcomes that were written.
    serial: u64,
    next_look: Option<Instant>,
    /// The boot that the state belongs to.
    boot: String,
    /// The boot's name in the file.
    kept_boot: String,
    /// The first part of the ids of holds.
    holds_of: String,
    /// Requests that were made in this boot.
    made: MadeRequests,
    /// Digest of the pending change that was written last.
    pending: Option<[u8; 32]>,
    /// The outcome of a change that could not be written yet.
    late: Option<Late>,
}

/// The next attempt to write an outcome.
#[derive(Clone, Copy, Debug)]
struct Late {
    next: Instant,
    /// Time from the last attempt to the next one.
    delay: Duration,
}

/// Claims that a change touches.
pub(super) struct Touched<'a> {
    /// The keys, with their claims after the change.
    pub steps: &'a [Step<'a>],
    /// The owner whose set is replaced.
    pub owner: Option<&'a Owner>,
    /// The owner's state after the change, if its answer is kept.
    pub answered: Option<&'a OwnerState>,
    /// The change only ends claims. So it is written even if a claim that then decides adds holds.
    pub ends: bool,
}

impl Keeper {
    /// Creates the keeper of a ledger file. Without a file, it keeps nothing. It continues the
    /// holds and claims of the guest that this one is a copy of, or else those in the file, and
    /// `own` continues their ids.
    pub fn new(file: Option<LedgerFile>, copied: Option<Ledger>, own: &mut Incarnation) -> Self {
        let mut keeper = Self::default();
        if let Some(file) = file {
            let found = file.found.as_ref();
            // A mark of a change of the earlier process says nothing about the same change of this
            // one.
            keeper.serial = found.map_or(0, |ledger| ledger.serial.wrapping_add(1));
            keeper.place = Some(file.place);
            keeper.found = file.found;
            keeper.mark = file.mark;
            keeper.process = file.process;
        }
        keeper.found = copied.or(keeper.found);
        if let Some(found) = &keeper.found {
            own.continue_holds(&found.holds_of);
        }
        keeper.holds_of = own.ledger().to_owned();
        keeper
    }

    /// Returns whether the state is kept in a file.
    pub(super) fn is_kept(&self) -> bool {
        self.place.is_some()
    }

    /// Returns whether content of an earlier process has not been adopted yet.
    pub fn waits(&self) -> bool {
        self.found.is_some()
    }

    /// Remembers a request that was made.
    pub(super) fn remember(&mut self, made: Option<MadeRequest>) {
        if self.place.is_some() {
            made.into_iter().for_each(|made| self.made.push(made));
        }
    }

    /// Returns the answer to a request that was made by this or an earlier process.
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

    /// Returns when the next look for the guest's kernel, or the next attempt to write an outcome,
    /// is due. `is_used` tells whether there are holds or claims.
    pub(super) fn due(&self, now: Instant, is_used: bool) -> Option<Instant> {
        let looks = self.waits() || self.place.is_some() && is_used;
        let look = looks.then(|| self.next_look.unwrap_or(now));
        let late = self.late.map(|late| late.next);
        look.into_iter().chain(late).min()
    }

    /// Puts off the next attempt to write an outcome after one that failed. The content of an
    /// earlier process is not replaced before it is adopted, and the state is written then.
    fn put_off(&mut self, now: Instant) {
        if self.waits() {
            return;
        }
        let doubled = |late: Late| (late.delay * 2).min(LAST_DELAY);
        let delay = self.late.map_or(FIRST_DELAY, doubled);
        let next = now + delay;
        self.late = Some(Late { next, delay });
    }

    /// Writes the state, and what a pending change makes of it. Returns the digest of a pending
    /// change. `announce` gets it before it is written, with the digest of the pending change that
    /// it replaces. `adds` tells whether the change adds something.
    fn write(
        &mut self,
        now: State,
        pending: Option<Pending>,
        adds: bool,
        announce: impl FnOnce(&[u8; 32], Option<&[u8; 32]>),
    ) -> Result<Option<[u8; 32]>, KeysError> {
        let Some(place) = &mut self.place else {
            return Ok(None);
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
        let serial = self.serial.wrapping_add(u64::from(!is_pending));
        let ledger = Ledger {
            process: self.process.clone(),
            serial,
            boot: self.kept_boot.clone(),
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
        let (bytes, digest) = ledger.encode().map_err(unwritable)?;
        check_room(&**place, &bytes, adds).map_err(unwritable)?;
        if is_pending {
            if self.pending == Some(digest) {
                return Ok(self.pending);
            }
            announce(&digest, self.pending.as_ref());
        }
        place.replace(&bytes).map_err(unwritable)?;
        self.serial = serial;
        self.pending = is_pending.then_some(digest);
        self.late = None;
        Ok(self.pending)
    }
}

impl<G: Guest> Executor<G> {
    /// Writes what a change is about to do: the counts, the holds on its keys and, if it changes
    /// them, the claims. `request` returns what is kept of the request that asks for the change.
    /// Returns the digest of the ledger. Without a ledger, `request` is not called.
    ///
    /// # Errors
    /// LEDGER_UNWRITABLE, TOO_MANY_CLAIMS: the change must not be made.
    pub(super) fn keep_pending<'a>(
        &mut self,
        changes: impl Iterator<Item = &'a KeyChange>,
        holds: impl Iterator<Item = (KeyInstance, &'a KeyHolds)>,
        claims: Option<Touched<'_>>,
        request: impl FnOnce() -> Option<MadeRequest>,
    ) -> Result<Option<[u8; 32]>, KeysError> {
        if self.ledger.place.is_none() {
            return Ok(None);
        }
        let count = |change: &KeyChange| {
            let key = SavedKey {
                name: change.name.to_string(),
                address: change.key.0,
            };
            (key, change.before, change.after)
        };
        let book = self.shared.book();
        let mut pending = Pending {
            counts: changes.map(count).collect(),
            newest_hold: book.holds.newest(),
            request: request(),
            ..Pending::default()
        };
        let mut room = Room::default();
        let ends = claims.as_ref().is_some_and(|touched| touched.ends);
        for (key, holds) in holds {
            let mut after = holds.clone();
            after.number(&mut pending.newest_hold);
            room.count(book.holds.of(key), after.as_slice());
            pending.holds.push(saved(key, &after));
        }
        if let Some(touched) = claims {
            for Step { name, claims, .. } in touched.steps {
                let before = book.claims.key(name).map_or(0, |of| of.stack().len());
                room.adds |= claims.stack().len() > before;
                pending.claims.insert((*name).to_owned(), claims.clone());
            }
            let unanswered = || book.claims.owner(touched.owner?);
            let owner = touched.answered.or_else(unanswered);
            pending.owners.extend(owner.cloned());
        }
        let adds = room.adds && !ends;
        if !ends {
            room.check(&book.holds)?;
        }
        let now = state_of(&book.holds, &book.claims);
        drop(book);
        let guest = &self.guest;
        let announce = |digest: &_, replaced: Option<&_>| guest.will_keep(digest, replaced);
        self.ledger.write(now, Some(pending), adds, announce)
    }

    /// Writes the current state.
    ///
    /// # Errors
    /// LEDGER_UNWRITABLE: the file contains the state before, and the pending change if there was
    /// one.
    pub(super) fn keep(&mut self) -> Result<(), KeysError> {
        if self.ledger.place.is_none() {
            return Ok(());
        }
        let now = {
            let book = self.shared.book();
            state_of(&book.holds, &book.claims)
        };
        let written = self.ledger.write(now, None, false, |_, _| ());
        written.map(drop)
    }

    /// Returns the holds and claims for a copy of the guest; empty if there are none.
    ///
    /// # Errors
    /// The guest's kernel is not known, so it is not known either which holds are in its counts.
    pub(super) fn copied(&mut self) -> Result<Vec<u8>, KeysError> {
        if !self.ledger.waits() && !self.shared.book().is_used() {
            return Ok(Vec::new());
        }
        self.snapshot()?;
        let now = {
            let book = self.shared.book();
            if !book.is_used() {
                return Ok(Vec::new());
            }
            state_of(&book.holds, &book.claims)
        };
        let holds_of = self.shared.incarnation.ledger();
        CopiedHolds::encode(&self.ledger.kept_boot, holds_of, now)
    }

    /// Writes the state after a change, or after one that failed. The file has both states if this
    /// fails. Then the guest tells which is true, and the state is written again later.
    pub(super) fn keep_outcome(&mut self) {
        if let Err(error) = self.keep() {
            self.ledger.put_off(self.shared.clock.now());
            limited!(error, %error, "the outcome of a change is not in the ledger yet");
        }
    }

    /// Writes the state after a change that was not made, if the change was written as pending
    /// before.
    pub(super) fn drop_pending(&mut self) {
        if self.ledger.pending.is_some() {
            self.keep_outcome();
        }
    }

    /// Makes the holds and claims those of the running kernel. Adopts the ledger of an earlier
    /// process if there is one.
    ///
    /// # Errors
    /// Such a ledger exists, but the guest's kernel is not known.
    pub(super) fn adopt_ledger(&mut self) -> Result<(), KeysError> {
        let waits = self.ledger.waits();
        match self.snapshot() {
            Err(error) if waits => Err(error),
            _ => Ok(()),
        }
    }

    /// Adopts the ledger of an earlier process once the guest's kernel is known, and writes an
    /// outcome that could not be written before. Finds the kernel again after a reset, before the
    /// guest's own code changes the keys for long: the counts of an earlier state tell which
    /// references are void.
    pub(super) fn look_for_ledgers_kernel(&mut self, now: Instant) {
        self.ledger.next_look = Some(now + LOOK_INTERVAL);
        if self.ledger.late.is_some_and(|late| late.next <= now) {
            self.keep_outcome();
        }
        if !self.ledger.waits() && !self.shared.is_behind() {
            return;
        }
        if let Err(error) = self.adopt_ledger() {
            tracing::debug!(%error, "the ledger waits for the guest's kernel");
        }
    }

    /// Binds holds and claims to a new registration, and adopts the ledger of an earlier process.
    /// Returns false if a newer registration already exists.
    pub(super) fn follow_registration(&mut self, snapshot: &Snapshot) -> bool {
        let registration = &*snapshot.registration;
        let (boot, epoch) = (
            self.shared.boot_name(registration),
            Some(registration.epoch),
        );
        let live = self.shared.registry.live_epochs();
        if self.shared.registry.boot() != epoch {
            return false;
        }
        self.pruned = snapshot.version;
        let is_same_kernel = boot == self.ledger.boot;
        let is_first = self.ledger.boot.is_empty();
        let is_set_back = is_same_kernel && self.shared.book().boot != epoch;
        let mut is_changed = is_set_back || !is_same_kernel && !is_first;
        if is_set_back {
            // Another client has stopped and resumed the guest, and may have loaded an earlier
            // state of it.
            let (holds, claims) = {
                let book = self.shared.book();
                (book.holds.clone(), book.claims.clone())
            };
            let holds = holds.iter();
            let holds = holds.map(|(key, holds)| (key.id, holds.clone(), false));
            self.adopt(registration, holds, claims);
        } else {
            let mut book = self.shared.book();
            is_changed |= book.retain(|key| live.contains(&key.epoch));
            book.boot = epoch;
            if !is_same_kernel {
                // Claims and the generations of their owners belong to a boot.
                book.claims = Claims::default();
            }
        }
        if is_set_back || !is_same_kernel {
            self.expiries.endings.clear();
        }
        if !is_same_kernel {
            self.ledger.boot = boot;
            self.ledger.kept_boot = registration.kept_boot();
            self.ledger.made = MadeRequests::default();
        }
        if let Some(ledger) = self.ledger.found.take() {
            is_changed = true;
            // No id of a hold is ever used again, not even in another boot.
            let newest = ledger.newest_hold();
            self.shared.book().holds.number_after(newest);
            if ledger.boot == self.ledger.kept_boot {
                self.adopt_found(registration, ledger);
            } else {
                tracing::warn!(
                    "the ledger belongs to an earlier boot of the guest, and is forgotten"
                );
            }
            self.shared.book().ledger_waits = false;
        }
        // Otherwise the next process would find the state before.
        if is_changed {
            self.keep_outcome();
        }
        true
    }

    fn adopt_found(&mut self, registration: &Registration, ledger: Ledger) {
        let memory = registration.memory(self.guest.ram());
        let mark = self.ledger.mark.take();
        let (state, made) = ledger.settled(mark.as_ref(), |saved| {
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
    /// tracepoints have now. All holds and claims are replaced at once, so a reader finds either
    /// all of the earlier ones or all of the new ones.
    fn adopt(
        &self,
        registration: &Registration,
        holds: impl Iterator<Item = (KeyId, KeyHolds, bool)>,
        mut claims: Claims,
    ) {
        let memory = registration.memory(self.guest.ram());
        let now = self.shared.clock.now();
        let (mut bound, mut kept, mut gone) = (Holds::default(), 0_usize, 0_usize);
        bound.number_after(self.shared.book().holds.newest());
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
            bound.put(registration.instance(key), holds);
            kept += 1;
        }
        for (name, claims) in claims.keys_mut() {
            match registration.catalog.find(name) {
                Some(key) if claims.is_of(key.id) => {
                    claims.bind(registration.instance(key));
                    // The references of the key may not have been returned yet.
                    claims.put_off(now);
                }
                _ => claims.lose(),
            }
        }
        let mut book = self.shared.book();
        let quarantine = std::mem::take(&mut book.quarantine);
        book.quarantine = still_undone(quarantine, registration);
        book.revisions.clear();
        book.holds = bound;
        book.claims = claims;
        book.boot = Some(registration.epoch);
        drop(book);
        tracing::info!(kept, gone, "holds and claims continue");
    }
}

/// Returns the keys whose sites were undone in part. These sites are still in the memory of the
/// same boot, but the keys have another epoch.
fn still_undone(
    quarantine: HashMap<KeyInstance, Quarantine>,
    registration: &Registration,
) -> HashMap<KeyInstance, Quarantine> {
    let undone = quarantine.into_iter();
    let undone = undone.filter(|(_, why)| why.cause == QuarantineCause::UndoIncomplete);
    undone
        .filter_map(|(key, why)| {
            let key = registration.catalog.key(key.id)?;
            Some((registration.instance(key), why))
        })
        .collect()
}

fn state_of(holds: &Holds, claims: &Claims) -> State {
    let mut saved: Vec<SavedHolds> = holds.iter().map(|(key, holds)| saved(key, holds)).collect();
    // The same state is always encoded in the same bytes.
    saved.sort_unstable_by(|one, other| one.key.name.cmp(&other.key.name));
    State {
        newest_hold: holds.newest(),
        holds: saved,
        claims: claims.clone(),
    }
}

fn saved(key: KeyInstance, holds: &KeyHolds) -> SavedHolds {
    let key = SavedKey {
        name: holds.name().to_string(),
        address: key.id.0,
    };
    SavedHolds::of(key, holds)
}

#[cfg(test)]
mod tests;
