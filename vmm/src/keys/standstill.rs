// SPDX-License-Identifier: Apache-2.0
//! A pause that outlasts the command that began it.

use std::time::Duration;

use super::guest::Guest;
use crate::pause::PauseError;

/// The guest as the owner finds it between two commands: running, or held paused because an operator
/// asked for it or a change could not be taken back.
pub(super) struct Standstill<'g, G: Guest> {
    guest: &'g G,
    held: Option<G::Paused<'g>>,
}

impl<'g, G: Guest> Standstill<'g, G> {
    /// The guest runs.
    pub fn none(guest: &'g G) -> Self {
        Self { guest, held: None }
    }

    /// The pause, if the guest is held.
    pub fn held(&self) -> Option<&G::Paused<'g>> {
        self.held.as_ref()
    }

    /// Stops a guest that is not held, for as long as the answer lives.
    ///
    /// # Errors
    /// As [`Guest::pause`].
    pub fn pause(&self, timeout: Duration) -> Result<G::Paused<'g>, PauseError> {
        self.guest.pause(timeout)
    }

    /// Holds the guest from now on.
    pub fn hold(&mut self, paused: G::Paused<'g>) {
        self.held = Some(paused);
    }

    /// Lets the guest run on.
    pub fn end(&mut self) {
        self.held = None;
    }
}
