// SPDX-License-Identifier: Apache-2.0
//! Rolls back references that were taken while the guest ran and must not stay.

use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use static_keys::{Options, Plan, Undo, Update};

use super::Obstacle;
use crate::keys::error::KeysError;
use crate::keys::executor::standstill::Standstill;
use crate::keys::executor::state::Executor;
use crate::keys::executor::transaction::Transaction;
use crate::keys::registry::Registration;

/// Time allowed for rolling back a reference that needs a pause.
const ROLLBACK_TIME: Duration = Duration::from_secs(1);
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// The reason why one attempt did not roll back all references.
enum RollBack {
    /// Another attempt may succeed.
    Later(String),
    Failed(KeysError),
}

impl<G: Guest> Executor<G> {
    /// Rolls back references that have become the last ones of their keys, because the guest has
    /// dropped its own. Such a key is turned off, and this needs a pause.
    pub(super) fn roll_back(
        &self,
        taken_from: &Registration,
        transaction: &Transaction<'_>,
        standstill: &mut Standstill<'_, G>,
        mut left: Vec<Update>,
    ) -> Result<(), KeysError> {
        // The rollback ignores the caller's deadline: it must complete.
        let give_up = Instant::now() + ROLLBACK_TIME;
        loop {
            // The references ended with the key.
            let live = self.shared.registry.live_epochs();
            left.retain(|update| {
                let key = taken_from.catalog.key(update.key);
                key.is_some_and(|key| live.contains(&taken_from.instance(key).epoch))
            });
            if left.is_empty() {
                return Ok(());
            }
            let patience = transaction.request.stop_timeout;
            let why = match self.try_roll_back(patience, standstill, &mut left) {
                Ok(()) => return Ok(()),
                Err(RollBack::Failed(error)) => return Err(error),
                Err(RollBack::Later(why)) => why,
            };
            if Instant::now() >= give_up {
                let left = left.len();
                return Err(KeysError::WriteFault {
                    message: format!(
                        "{left} references could not be rolled back: the guest dropped its own, so \
                         they are the last of their keys ({why})"
                    ),
                });
            }
            std::thread::sleep(BETWEEN_ATTEMPTS);
        }
    }

    /// Makes one attempt. A guest that has withdrawn its registration may register again.
    fn try_roll_back(
        &self,
        patience: Duration,
        standstill: &mut Standstill<'_, G>,
        left: &mut Vec<Update>,
    ) -> Result<(), RollBack> {
        let later = |error: &dyn std::fmt::Display| RollBack::Later(error.to_string());
        let snapshot = self
            .shared
            .registry
            .snapshot()
            .map_err(|error| later(&error))?;
        let registration = &*snapshot.registration;
        let memory = registration.memory(self.guest.ram());
        let options = Options {
            allow_guarded: true,
        };
        let plan = Plan::new(&registration.catalog, &memory, left, &options)
            .map_err(|error| later(&error))?;
        match self.make(patience, &snapshot, &memory, &plan, None, standstill) {
            Ok(_) => Ok(()),
            Err(Obstacle::Commit(error)) if error.undo != Undo::Complete => {
                let (message, undo) = (error.to_string(), error.undo);
                let fault = self.write_fault(registration, &plan, message, undo);
                Err(RollBack::Failed(fault))
            }
            Err(obstacle) => {
                // References that this attempt dropped and could not take again stay dropped.
                if let Obstacle::Entangled { left: given, .. } = &obstacle {
                    left.retain(|update| given.iter().all(|of| of.key != update.key));
                }
                Err(later(&obstacle))
            }
        }
    }
}
