// SPDX-License-Identifier: Apache-2.0
//! Keeps the newest records and events of a guest for an autopsy, within a number of bytes.

use std::collections::VecDeque;

use serde::Serialize;

use crate::guest::log::Line;
use crate::print::json;
use crate::trace::view::{Event, Losses};

/// The maximum number of spaces that the whole JSON adds before a line of an item.
const INDENT: usize = 8;
#[derive(Debug, Default, Serialize)]
pub(super) struct Log {
    /// The records that the kernel had overwritten, or never finished.
    pub(super) lost: u64,
    /// The number of the oldest records that are left out because the log is too long.
    pub(super) left_out: u64,
    pub(super) records: VecDeque<Record>,
    /// The size of all records.
    #[serde(skip)]
    pub(super) bytes: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) line: Line,
    /// The record as `dmesg` shows it.
    #[serde(skip)]
    pub(super) text: String,
    /// The [`size`] of `line`.
    #[serde(skip)]
    pub(super) size: usize,
}

impl Log {
    /// Adds a record, and leaves out the oldest ones if all together take more than `limit` bytes.
    pub(super) fn push(&mut self, record: Record, limit: usize) {
        self.bytes = self.bytes.saturating_add(record.size);
        self.records.push_back(record);
        while self.bytes > limit
            && let Some(oldest) = self.records.pop_front()
        {
            self.bytes = self.bytes.saturating_sub(oldest.size);
            self.left_out += 1;
        }
    }
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Ring {
    pub(super) losses: Losses,
    /// The number of the oldest events that are left out, because of `--events` or the limit of
    /// bytes.
    pub(super) left_out: u64,
    pub(super) events: VecDeque<Kept>,
    /// The number of those that only the limit of bytes leaves out.
    #[serde(skip)]
    pub(super) too_large: u64,
    /// The size of all events.
    #[serde(skip)]
    pub(super) bytes: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct Kept {
    #[serde(flatten)]
    pub(super) event: Event,
    /// The [`size`] of `event`.
    #[serde(skip)]
    pub(super) size: usize,
}

impl Ring {
    /// Adds an event, and leaves out the oldest ones if they are more than `events`, or if all
    /// together take more than `limit` bytes.
    pub(super) fn push(&mut self, event: Event, events: usize, limit: usize) {
        let size = size(&event);
        self.bytes = self.bytes.saturating_add(size);
        self.events.push_back(Kept { event, size });
        while (self.events.len() > events || self.bytes > limit)
            && let Some(oldest) = self.events.pop_front()
        {
            self.too_large += u64::from(self.events.len() < events);
            self.bytes = self.bytes.saturating_sub(oldest.size);
            self.left_out += 1;
        }
    }
}

/// Returns the maximum number of bytes of a value and the comma after it in the JSON of an autopsy.
pub(super) fn size(value: &impl Serialize) -> usize {
    // A value without a representation in JSON would fail the whole.
    json(value).map_or(usize::MAX, |text| {
        text.len() + 1 + INDENT * text.lines().count()
    })
}

#[cfg(test)]
pub(super) mod tests {
    use patchbay_proto::v1;

    use super::*;
    use crate::guest::log;

    pub fn event(number: u64) -> Event {
        v1::TraceEvent {
            name: "a:b\u{9b}".to_owned(),
            guest_time_ns: number,
            ..Default::default()
        }
        .into()
    }

    fn times(ring: &Ring) -> Vec<u64> {
        let events = ring.events.iter();
        events.map(|kept| kept.event.guest_time_ns).collect()
    }

    #[test]
    fn a_ring_keeps_its_newest_events_in_a_number_and_in_bytes() {
        let one = size(&event(1));
        let ring = |events: usize, limit: usize| {
            let mut ring = Ring::default();
            (1..=5).for_each(|number| ring.push(event(number), events, limit));
            (times(&ring), ring.left_out, ring.too_large)
        };
        assert_eq!(ring(9, 5 * one), (vec![1, 2, 3, 4, 5], 0, 0));
        assert_eq!(ring(2, 5 * one), (vec![4, 5], 3, 0));
        assert_eq!(ring(9, 2 * one), (vec![4, 5], 3, 3));
        assert_eq!(ring(3, 2 * one + 1), (vec![4, 5], 3, 3));
        assert_eq!(ring(9, one - 1), (vec![], 5, 5));
        assert_eq!(ring(0, 5 * one), (vec![], 5, 0));
    }

    #[test]
    fn a_log_keeps_its_newest_records() {
        let mut log = Log::default();
        for number in 0..5 {
            let record = v1::KernelLogRecord {
                sequence: number,
                ..Default::default()
            };
            let line = log::line(record, true);
            let size = size(&line);
            let text = String::new();
            log.push(Record { line, text, size }, 3 * size);
        }
        assert_eq!((log.records.len(), log.left_out), (3, 2));
    }
}
