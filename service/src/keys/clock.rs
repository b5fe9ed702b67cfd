// SPDX-License-Identifier: Apache-2.0
//! The clock by which holds expire; tests bring their own.

use std::time::Instant;

/// Tells the time.
pub trait Clock: Send + Sync {
    /// Now, never earlier than before.
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
