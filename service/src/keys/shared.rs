// SPDX-License-Identifier: Apache-2.0
//! State that the executor and the readers share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;
use tokio::sync::watch;

use super::claims::Claims;
use super::clock::Clock;
use super::error::KeysError;
use super::holds::{Holds, KeyInstance, KeyState};
use super::incarnation::Incarnation;
use super::outcome::PauseState;
use super::pages::ResultPages;
use super::quarantine::Quarantine;
use super::registry::{Registration, Registry};
use super::scope::{Caller, Spent, Use};
use super::symbols::Symbols;

/// State that the executor and the readers share. None of its locks is held across a pause.
pub(super) struct Shared {
    pub registry: Arc<Registry>,
    pub book: Mutex<Book>,
    pub symbols: Symbols,
    pub clock: Arc<dyn Clock>,
    pub incarnation: Incarnation,
    /// The guest was started from a snapshot.
    pub is_copy: bool,
    pub pause: watch::Sender<PauseState>,
    pub pages: Mutex<ResultPages>,
    pub spent: Mutex<Spent>,
    /// Set when the executor thread has ended.
    pub ended: watch::Sender<Option<ExecutorEnd>>,
}

/// The reason for the end of the executor thread.
#[derive(Clone, Debug)]
pub(super) enum ExecutorEnd {
    /// The last handle was dropped.
    Dropped,
    /// The thread panicked, with this message.
    Panicked(String),
}

/// State of keys outside guest memory. Only the executor changes it.
#[derive(Debug, Default)]
pub(super) struct Book {
    pub holds: Holds,
    pub claims: Claims,
    /// The holds and claims of an earlier process are still missing here.
    pub ledger_waits: bool,
    /// The boot ([`Registry::boot`]) whose keys these are.
    pub boot: Option<u64>,
    /// Quarantined keys.
    pub quarantine: HashMap<KeyInstance, Quarantine>,
    /// Revision of each key's last change.
    pub revisions: HashMap<KeyInstance, u64, RandomState>,
}

impl Book {
    /// Returns the revision of the key's last change; 0 if there was none.
    pub fn revision(&self, key: KeyInstance) -> u64 {
        self.revisions.get(&key).copied().unwrap_or_default()
    }

    /// Returns whether a claim keeps a tracepoint on without a hold, because the guest had it on.
    #[inline]
    pub fn is_claimed_on(&self, name: &str, key: KeyInstance, state: &KeyState) -> bool {
        state.tracepoint && self.has_claim_on(name, key, state)
    }

    fn has_claim_on(&self, name: &str, key: KeyInstance, state: &KeyState) -> bool {
        self.claims.key(name).is_some_and(|claims| {
            let mut claims = claims.clone();
            claims.follow_guest(key, self.holds.copy(key), state);
            claims.is_on_without_hold()
        })
    }

    /// Returns whether there are holds or claims.
    pub fn is_used(&self) -> bool {
        !self.holds.is_empty() || !self.claims.is_empty()
    }

    /// Drops keys that no longer exist. Returns whether there were holds on them.
    pub fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) -> bool {
        self.quarantine.retain(|key, _| exists(*key));
        self.revisions.retain(|key, _| exists(*key));
        self.holds.retain(&mut exists)
    }
}

impl Shared {
    /// Creates the state of a service that starts.
    pub fn new(registry: Arc<Registry>, symbols: Symbols, clock: Arc<dyn Clock>) -> Self {
        Self {
            registry,
            book: Mutex::default(),
            symbols,
            clock,
            incarnation: Incarnation::new(),
            is_copy: false,
            pause: watch::Sender::default(),
            pages: Mutex::default(),
            spent: Mutex::default(),
            ended: watch::Sender::new(None),
        }
    }

    pub fn book(&self) -> MutexGuard<'_, Book> {
        // The executor replaces whole values under this lock, so a panic leaves no partial state.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the holds and claims belong to a boot that may have ended since. This
    /// includes a guest whose kernel is not known at the moment.
    pub fn is_behind(&self) -> bool {
        let book = self.book();
        if !book.is_used() {
            return false;
        }
        let of = book.boot;
        drop(book);
        let known = self.registry.known();
        known.map_or(true, |known| {
            of != self.registry.boot() || !self.registry.is_same_boot(&known.registration)
        })
    }

    /// Returns the name of the guest's boot for clients.
    pub fn boot_name(&self, registration: &Registration) -> String {
        self.named_boot(registration.boot_identity())
    }

    /// Returns the name for clients of the boot that a registration has by this name.
    ///
    /// A copy has the boot of the guest that was saved, and an earlier state of its claims and
    /// generations. Under the same name, a client would assume that a change in one of the two
    /// guests was also made in the other.
    pub fn named_boot(&self, name: String) -> String {
        match self.is_copy {
            true => format!("{name}-{}", self.incarnation),
            false => name,
        }
    }

    pub fn set_pause(&self, state: PauseState) {
        self.pause.send_replace(state);
    }

    pub fn pages(&self) -> MutexGuard<'_, ResultPages> {
        // Each method replaces whole lists, so a panic leaves no partial state.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether a caller may use these keys, and counts changed keys against the caps.
    ///
    /// # Errors
    /// [`KeysError::NotPermitted`].
    pub fn permit<'k>(
        &self,
        caller: &Caller,
        keys: impl FnOnce() -> Vec<&'k str>,
        how: Use,
    ) -> Result<(), KeysError> {
        if caller.scope.is_none() {
            return Ok(());
        }
        let mut keys = keys();
        keys.sort_unstable();
        keys.dedup();
        // A panic leaves whole entries.
        let mut spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        spent.permit(caller, &keys, how, self.clock.now())
    }
}
