// SPDX-License-Identifier: Apache-2.0
//! Finds the newest reports of errors in a log, and counts its losses since boot.

use super::follower::{MAX_STEPS, oldest};
use super::ring::{ID, Ring, Slot};
use super::{Record, Source};
use crate::{Bounded, KernelView, word};

/// The maximum number of records that are examined, beginning with the newest.
const MAX_RECORDS: u64 = 8192;
/// The maximum number of reads and of bytes in them. A record takes at most 6 reads.
const MAX_READS: usize = 1 << 16;
const MAX_BYTES: usize = 16 << 20;
/// The beginning of the message of `panic()` (kernel/panic.c).
const PANIC: &str = "Kernel panic - not syncing";

/// The errors that a log reports, and its losses since boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The newest report of an error, without panics.
    pub report: Option<Record>,
    /// The newest message of a panic.
    pub panic: Option<Record>,
    /// The number of records that the ring no longer holds. `None` if the oldest record was
    /// overwritten again and again while it was searched for.
    pub overwritten: Option<u64>,
    /// The number of records for which a writer found no room in the ring. `None` if the kernel
    /// does not count them.
    pub refused: Option<u64>,
}

impl Summary {
    /// Searches the newest records for errors. `reports` are the beginnings of messages that report
    /// one. Only messages of the kernel count, because a process can write any others to
    /// `/dev/kmsg`. Returns `None` if the log cannot be read.
    pub fn read(
        view: &(impl KernelView + ?Sized),
        source: &Source,
        reports: &[&str],
    ) -> Option<Self> {
        let view = &Bounded::new(view, MAX_READS, MAX_BYTES);
        let ring = Ring::read(view, source)?;
        let mut steps = MAX_STEPS;
        let refused = source.layout.ring.refused.and_then(|field| {
            let ring = word(view, source.prb)?;
            word(view, ring.checked_add(field.offset())?)
        });
        let mut summary = Self {
            overwritten: oldest(view, &ring, &mut steps).map(|(_, seq)| seq),
            refused,
            ..Self::default()
        };
        for back in 0..ring.count().min(MAX_RECORDS) {
            let record = match ring.record(view, ring.head.wrapping_sub(back) & ID) {
                Slot::Record(record) => record,
                Slot::Reserved | Slot::Committed | Slot::Damaged => continue,
                // All older records are reclaimed as well, except empty lines.
                Slot::Reusable | Slot::Replaced { .. } | Slot::Unreadable => break,
            };
            let text = record.text.as_deref().unwrap_or_default();
            if record.facility != 0 || record.continues {
                continue;
            }
            let begins_with = |beginning: &str| text.starts_with(beginning.as_bytes());
            let found = match begins_with(PANIC) {
                true => &mut summary.panic,
                false if reports.iter().any(|report| begins_with(report)) => &mut summary.report,
                false => continue,
            };
            found.get_or_insert(record);
            if summary.panic.is_some() && summary.report.is_some() {
                break;
            }
        }
        Some(summary)
    }
}
