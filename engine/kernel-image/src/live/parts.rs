// SPDX-License-Identifier: Apache-2.0
//! The cost of each part of a discovery.

use std::time::{Duration, Instant};

/// A part of a discovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// A short description of the part.
    pub name: &'static str,
    /// The time that the part took.
    pub time: Duration,
    /// Number of bytes copied from the guest, without page tables.
    pub bytes: u64,
}

/// Measures the parts of a discovery.
pub(super) struct Clock {
    last: Instant,
    copied: u64,
    parts: Vec<Part>,
}

impl Clock {
    pub fn start() -> Self {
        Self {
            last: Instant::now(),
            copied: 0,
            parts: Vec::new(),
        }
    }

    /// Ends a part. `copied` is the number of bytes copied since the start.
    pub fn part(&mut self, name: &'static str, copied: u64) {
        let now = Instant::now();
        self.parts.push(Part {
            name,
            time: now - self.last,
            bytes: copied.saturating_sub(self.copied),
        });
        self.last = now;
        self.copied = self.copied.max(copied);
    }

    /// Restarts the count of copied bytes at 0.
    pub fn restart(&mut self) {
        self.copied = 0;
    }

    pub fn parts(self) -> Vec<Part> {
        self.parts
    }
}
