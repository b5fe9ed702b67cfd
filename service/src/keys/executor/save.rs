// SPDX-License-Identifier: Apache-2.0
//! Saves the guest. No other command runs meanwhile, so no change is saved in part.

use patchbay_guest::guest::Guest;
use patchbay_guest::snapshot::{ControlState, SaveError};

use super::standstill::Standstill;
use super::state::Executor;
use crate::keys::error::KeysError;
use crate::keys::quarantine::{Quarantine, QuarantineCause};
use crate::keys::request::SaveRequest;

/// Number of attempts to stop the guest while it does not register or withdraw keys.
const ATTEMPTS: u32 = 8;

impl<G: Guest> Executor<G> {
    /// Stops the guest unless it is held, and saves it.
    pub(super) fn save(
        &mut self,
        mut request: SaveRequest,
        standstill: &Standstill<'_, G>,
    ) -> Result<Vec<u8>, KeysError> {
        if self.guest.has_ended() {
            return Err(KeysError::GuestStopped);
        }
        let is_undone_in_part = |why: &Quarantine| why.cause == QuarantineCause::UndoIncomplete;
        if self
            .shared
            .book()
            .quarantine
            .values()
            .any(is_undone_in_part)
        {
            let message = "a change of its keys could not be undone completely, so a copy could run into half an instruction; reboot the guest";
            return Err(KeysError::NotSaved {
                message: message.to_owned(),
            });
        }
        for _ in 0..ATTEMPTS {
            let ledger = self.copied()?;
            // The client may have left while this command waited for others.
            request.sink.check().map_err(not_saved)?;
            let mut paused = None;
            let paused = match standstill.held() {
                Some(held) => held,
                None => &*paused.insert(standstill.pause(request.timeout)?),
            };
            // Only this thread changes holds and claims, but the guest may have withdrawn their
            // keys before it stopped. `copied` is not called while the guest is stopped, because
            // finding a kernel again needs running vCPUs. The loop lets the guest run and starts
            // over.
            if !ledger.is_empty() && self.pruned != self.shared.registry.version() {
                continue;
            }
            let control = ControlState {
                guest: self.guest.description().name,
                incarnation: self.shared.incarnation.as_str().to_owned(),
                // A vCPU that has stopped is not inside a request.
                requests: self.shared.registry.kept_requests(),
                ledger,
            };
            self.check_names(&control)?;
            let saved = self.guest.save(paused, control, &mut *request.sink);
            return saved.map_err(not_saved);
        }
        Err(KeysError::NotSaved {
            message: "whenever the guest was stopped, its kernel had just registered or withdrawn keys; repeat the command".to_owned(),
        })
    }

    /// Refuses holds and claims on keys that could have other names in a copy. A key of the kernel
    /// that only a module lists, and whose name another key has, is named by its address; a copy
    /// numbers such keys instead, because it finds them in one list.
    fn check_names(&self, control: &ControlState) -> Result<(), KeysError> {
        let known = match control.ledger.is_empty() || control.requests.is_empty() {
            true => None,
            false => self.shared.registry.known().ok(),
        };
        let mut keys = known
            .iter()
            .flat_map(|known| known.registration.catalog.keys());
        match keys.find(|key| key.full_name.contains("#0x")) {
            Some(key) => Err(KeysError::NotSaved {
                message: format!(
                    "the kernel has several keys of the name of {}, and they would have other names in a copy; release all holds and claims first",
                    key.full_name
                ),
            }),
            None => Ok(()),
        }
    }
}

fn not_saved(error: impl Into<SaveError>) -> KeysError {
    let message = error.into().to_string();
    KeysError::NotSaved { message }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use patchbay_guest::guest::Machine;
    use patchbay_guest::testing::{InMemoryGuest, TestKey};

    use super::*;
    use crate::keys::outcome::PauseState;
    use crate::keys::{Keys, KeysConfig, Registry};

    async fn save(keys: &Keys) -> KeysError {
        let saved = keys.save(SaveRequest::to_nobody()).await;
        saved.expect_err("not saved")
    }

    #[tokio::test]
    async fn a_guest_that_cannot_be_saved_runs_on() {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 2)]);
        let config = KeysConfig::default();
        let known = Arc::clone(&registry);
        let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        // The monitor of this guest saves nothing.
        let error = save(&keys).await;
        assert_eq!(error.reason(), "NOT_SAVED");
        assert!(error.to_string().contains("monitor"), "{error}");
        assert_eq!(keys.pause_state(), PauseState::Running);
        let pauses = guest.pauses();
        assert!(pauses > 0);

        let snapshot = known.snapshot().expect("registered");
        let key = snapshot
            .registration
            .catalog
            .find("alpha")
            .expect("it is there");
        let key = snapshot.registration.instance(key);
        for cause in [
            QuarantineCause::UndoIncomplete,
            QuarantineCause::ForeignBytes,
        ] {
            let message = String::new();
            let why = Quarantine { cause, message };
            keys.shared.book().quarantine.insert(key, why);
            let is_refused = save(&keys)
                .await
                .to_string()
                .contains("half an instruction");
            assert_eq!(is_refused, cause == QuarantineCause::UndoIncomplete);
        }

        guest.shut_down();
        assert!(matches!(save(&keys).await, KeysError::GuestStopped));
    }
}
