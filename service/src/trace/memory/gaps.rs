// SPDX-License-Identifier: Apache-2.0
//! Assigns losses to the next event of the same CPU.

use std::collections::BTreeMap;

/// The losses of each CPU after its last event that was kept. A guest has at most 8192 CPUs.
#[derive(Default)]
pub struct Gaps(BTreeMap<u32, u64>);

impl Gaps {
    /// Adds lost events of a CPU. The guest chooses some of these numbers.
    pub fn add(&mut self, cpu: u32, events: u64) {
        if events > 0 {
            let lost = self.0.entry(cpu).or_default();
            *lost = lost.saturating_add(events);
        }
    }

    /// Returns and forgets the losses of a CPU, which the next event reports.
    pub fn take(&mut self, cpu: u32) -> u64 {
        self.0.remove(&cpu).unwrap_or(0)
    }
}
