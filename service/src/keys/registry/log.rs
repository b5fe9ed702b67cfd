// SPDX-License-Identifier: Apache-2.0
//! Finds the log of the guest's kernel.
//!
//! A discovery finds the log together with the keys. If no kernel was discovered, because the
//! kernel registers itself, still boots or has panicked, only the log is searched for.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_kernel_image::live::Log;

use super::Registry;

/// Minimum time between two searches, for all readers together.
const REST: Duration = Duration::from_millis(500);
/// Minimum time between two confirmations, which read the registers of the vCPUs.
const CONFIRMED: Duration = Duration::from_secs(10);

/// The location of the log of the guest's kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelLog {
    /// The log.
    pub log: Log,
    /// The number of resets of the guest before the log was found.
    pub resets: u64,
}

/// The check that a reader of the log requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The log that was found last is sufficient, unless the guest was reset.
    Known,
    /// The vCPUs must run the kernel that was found last. If registers are not available, the log
    /// that was found last is sufficient.
    Confirm,
    /// The log that was found last is no longer there.
    Search,
}

/// The log that was found last, and the last search.
#[derive(Debug, Default)]
pub(super) struct LogState {
    found: Option<KernelLog>,
    /// The time of the last search, and its error.
    looked: Option<(Instant, Option<String>)>,
}

impl Registry {
    /// Remembers the log of the running kernel.
    pub fn remember_log(&self, log: KernelLog) {
        self.log_state().found = Some(log);
    }

    /// Returns the log that was found last; `None` if the guest was reset. Does not search.
    pub fn known_log(&self) -> Option<KernelLog> {
        let known = self.log_state().found.clone();
        known.filter(|log| self.is_current_log(log))
    }

    /// Returns whether no known event has reset the guest since this log was found.
    pub fn is_current_log(&self, log: &KernelLog) -> bool {
        let discovery = self.discovery.get();
        discovery.is_none_or(|discovery| discovery.resets() == log.resets)
    }

    /// Returns the log of the guest's kernel. May take as long as a discovery.
    ///
    /// # Errors
    /// The reason why the log is not found.
    pub fn find_log(&self, look: Look) -> Result<KernelLog, String> {
        let known = self.known_log();
        if look == Look::Known
            && let Some(known) = known
        {
            return Ok(known);
        }
        let Some(discovery) = self.discovery.get() else {
            return known.ok_or_else(|| {
                "the monitor does not look for the kernel in the guest's memory".to_owned()
            });
        };
        let rest = if look == Look::Confirm {
            CONFIRMED
        } else {
            REST
        };
        let search = self.log_search.lock();
        let _search = search.unwrap_or_else(PoisonError::into_inner);
        if let Some((at, error)) = self.log_state().looked.clone()
            && at.elapsed() < rest
        {
            if let Some(error) = error {
                return Err(error);
            }
            if let Some(known) = known {
                return Ok(known);
            }
        }
        let known = known.filter(|_| look == Look::Confirm);
        let found = discovery.find_log(known);
        let mut state = self.log_state();
        state.looked = Some((Instant::now(), found.as_ref().err().cloned()));
        if let Ok(found) = &found {
            state.found = Some(found.clone());
        }
        found
    }

    fn log_state(&self) -> MutexGuard<'_, LogState> {
        // Each change assigns whole values, so a panic leaves no partial state.
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
