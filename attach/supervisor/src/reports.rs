// SPDX-License-Identifier: Apache-2.0
//! Limits the messages that processes of the host can cause.

use std::collections::BTreeSet;
use std::time::Duration;

use patchbay_host_kernel::Listing;
use tokio::time::Instant;

/// The maximum number of messages in each [`PERIOD`].
const MAX_MESSAGES: u32 = 32;
const PERIOD: Duration = Duration::from_secs(60);

/// Counts the messages about processes.
#[derive(Debug)]
pub(crate) struct Reports {
    since: Instant,
    count: u32,
    /// The remarks of lists that have been reported and still apply.
    remarks: BTreeSet<String>,
    has_reported_hidden: bool,
}

impl Default for Reports {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            count: 0,
            remarks: BTreeSet::new(),
            has_reported_hidden: false,
        }
    }
}

impl Reports {
    /// Returns whether one more message may be logged now.
    pub(crate) fn may_report(&mut self) -> bool {
        if self.since.elapsed() >= PERIOD {
            let left_out = self.count.saturating_sub(MAX_MESSAGES);
            if left_out > 0 {
                tracing::warn!(
                    left_out,
                    "messages about guests were left out; `patchbay host list` shows all guests"
                );
            }
            (self.since, self.count) = (Instant::now(), 0);
        }
        self.count = self.count.saturating_add(1);
        self.count <= MAX_MESSAGES
    }

    /// Reports once what is missing from a list.
    pub(crate) fn of_listing(&mut self, listing: &Listing) {
        self.remarks
            .retain(|remark| listing.remarks.contains(remark));
        for remark in &listing.remarks {
            if self.remarks.insert(remark.clone()) && self.may_report() {
                tracing::warn!("{remark}");
            }
        }
        if let Some(remark) = listing.hidden_remark()
            && !std::mem::replace(&mut self.has_reported_hidden, true)
        {
            tracing::warn!("{remark}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn messages_are_limited_in_each_period() {
        let mut reports = Reports::default();
        let mut count = || (0..1000).filter(|_| reports.may_report()).count();
        assert_eq!(count(), MAX_MESSAGES as usize);
        assert_eq!(count(), 0);
        tokio::time::advance(PERIOD).await;
        assert_eq!(count(), MAX_MESSAGES as usize);
    }
}
