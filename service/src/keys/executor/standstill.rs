// SPDX-License-Identifier: Apache-2.0
//! A pause that outlives the command that started it.

use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use patchbay_guest::pause::PauseError;

/// The guest between two commands: running, or held paused. It is held because an operator asked
/// for a pause or because an undo is incomplete.
pub(super) struct Standstill<'g, G: Guest> {
    guest: &'g G,
    held: Option<Held<G::Paused<'g>>>,
}

struct Held<P> {
    paused: P,
    /// The time at which the pause expires; `None` if it lasts until an operator resumes the guest.
    until: Option<Instant>,
}

impl<'g, G: Guest> Standstill<'g, G> {
    /// Returns the state of a running guest.
    pub fn none(guest: &'g G) -> Self {
        Self { guest, held: None }
    }

    /// Returns the pause; `None` if the guest is not held.
    pub fn held(&self) -> Option<&G::Paused<'g>> {
        self.held.as_ref().map(|held| &held.paused)
    }

    /// Stops the guest unless it is held. Dropping the returned value resumes the guest.
    ///
    /// # Errors
    /// See [`Guest::pause`].
    pub fn pause(&self, timeout: Duration) -> Result<G::Paused<'g>, PauseError> {
        self.guest.pause(timeout)
    }

    /// Holds the guest until `until` or a resume.
    pub fn hold(&mut self, paused: G::Paused<'g>, until: Option<Instant>) {
        self.held = Some(Held { paused, until });
    }

    /// Extends a pause. A pause that ends later, or only by a resume, is not shortened.
    pub fn prolong(&mut self, until: Instant) {
        let held = self.held.as_mut();
        if let Some(end) = held.and_then(|held| held.until.as_mut()) {
            *end = until.max(*end);
        }
    }

    /// Returns the time at which the pause expires.
    pub fn expiry(&self) -> Option<Instant> {
        self.held.as_ref()?.until
    }

    /// Resumes the guest.
    pub fn end(&mut self) {
        self.held = None;
    }
}
