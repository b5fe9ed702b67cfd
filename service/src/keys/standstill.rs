// SPDX-License-Identifier: Apache-2.0
//! A pause that outlasts the command that began it.

use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::pause::PauseError;

/// The guest as the executor finds it between two commands: running, or held paused because an operator
/// asked for it or a change could not be taken back.
pub(super) struct Standstill<'g, G: Guest> {
    guest: &'g G,
    held: Option<Held<G::Paused<'g>>>,
}

struct Held<P> {
    paused: P,
    /// When it ends by itself; `None`: only an operator ends it.
    until: Option<Instant>,
}

impl<'g, G: Guest> Standstill<'g, G> {
    /// The guest runs.
    pub fn none(guest: &'g G) -> Self {
        Self { guest, held: None }
    }

    /// The pause, if the guest is held.
    pub fn held(&self) -> Option<&G::Paused<'g>> {
        self.held.as_ref().map(|held| &held.paused)
    }

    /// Stops a guest that is not held, for as long as the answer lives.
    ///
    /// # Errors
    /// As [`Guest::pause`].
    pub fn pause(&self, timeout: Duration) -> Result<G::Paused<'g>, PauseError> {
        self.guest.pause(timeout)
    }

    /// Holds the guest from now on, until then or until it is resumed.
    pub fn hold(&mut self, paused: G::Paused<'g>, until: Option<Instant>) {
        self.held = Some(Held { paused, until });
    }

    /// Holds a guest that is held for longer. A pause that ends later, or only by a resume, is not cut
    /// short.
    pub fn prolong(&mut self, until: Instant) {
        let held = self.held.as_mut();
        if let Some(end) = held.and_then(|held| held.until.as_mut()) {
            *end = until.max(*end);
        }
    }

    /// When the pause ends by itself.
    pub fn expiry(&self) -> Option<Instant> {
        self.held.as_ref()?.until
    }

    /// Lets the guest run on.
    pub fn end(&mut self) {
        self.held = None;
    }
}
