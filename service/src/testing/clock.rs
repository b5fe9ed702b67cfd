// SPDX-License-Identifier: Apache-2.0
//! Time that a test sets.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::keys::Clock;

/// A clock that stands still until it is set forward; tell [`crate::keys::Keys::tick`] afterwards.
#[derive(Debug)]
pub struct ManualClock(Mutex<Instant>);

impl ManualClock {
    /// Starts now.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Instant::now())))
    }

    fn now_mut(&self) -> MutexGuard<'_, Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets it forward.
    pub fn advance(&self, by: Duration) {
        *self.now_mut() += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *self.now_mut()
    }
}
