// SPDX-License-Identifier: Apache-2.0
//! The clock by which holds expire. Tests supply their own.

use std::time::Instant;

/// A source of time.
pub trait Clock: Send + Sync {
    /// Returns the current time. It never goes backwards.
    fn now(&self) -> Instant;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
