// SPDX-License-Identifier: Apache-2.0
//! Time that a test sets by hand.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::lock;
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
        *lock(&self.0) += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *lock(&self.0)
    }
}
