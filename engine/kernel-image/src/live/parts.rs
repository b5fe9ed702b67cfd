// SPDX-License-Identifier: Apache-2.0
//! What each part of a discovery costs.

use std::time::{Duration, Instant};

/// A part of a discovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// In a few words.
    pub name: &'static str,
    /// How long it took.
    pub time: Duration,
    /// Bytes copied from the guest, without page tables.
    pub bytes: u64,
}

/// Divides the time of a discovery into parts.
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

    /// Ends a part; `copied` counts from the start.
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

    /// Counts the copied bytes from 0 again.
    pub fn restart(&mut self) {
        self.copied = 0;
    }

    pub fn parts(self) -> Vec<Part> {
        self.parts
    }
}
