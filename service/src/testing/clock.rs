// SPDX-License-Identifier: Apache-2.0
//! Time that a test sets by hand.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::keys::Clock;

/// A clock that stands still until it is advanced; call [`Keys::tick`](crate::keys::Keys::tick)
/// afterwards.
#[derive(Debug)]
pub struct ManualClock(Mutex<Instant>);

impl ManualClock {
    /// Creates a clock that shows the current time.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Instant::now())))
    }

    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
