// SPDX-License-Identifier: Apache-2.0
//! Follows the log from poll to poll.

use super::ring::{ID, Place, Ring, Slot};
use super::{Record, Source};
use crate::KernelView;

/// The maximum number of searches for the position in one poll.
const MAX_SEARCHES: usize = 16;
/// The maximum number of slots that one poll examines, not counting the records that it returns.
pub(super) const MAX_STEPS: u64 = 4096;
/// The maximum number of reclaimed records that a search skips one by one before it bisects.
const MAX_RECLAIMED: u64 = MAX_STEPS / 2;

/// The first record of a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The oldest record in the ring.
    Oldest,
    /// The record with this sequence number. If the ring no longer holds that record, it and all
    /// later records that were overwritten count as lost.
    Seq(u64),
    /// The first record that a writer finishes after the first poll.
    End,
}

/// The terms of one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The maximum number of records.
    pub records: usize,
    /// The number of bytes of text. The poll ends after the record that exceeds it.
    pub bytes: usize,
    /// Also take records that a writer may still append to, and skip records that a writer has
    /// reserved but not written. Set this for a single dump, and for a guest that is stopped or has
    /// panicked, whose writers do not continue.
    pub unfinished: bool,
}

/// The result of one poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Whole records, oldest first.
    pub records: Vec<Record>,
    /// Number of records before and among these that were overwritten before they were read, or
    /// were reserved but never written.
    pub lost: u64,
    /// Number of copies that were discarded because the kernel replaced the record meanwhile. The
    /// records count in `lost`.
    pub torn: u64,
    /// The log began again before these records: another kernel runs, or the ring contradicts
    /// itself. Their sequence numbers are unrelated to earlier ones.
    pub restarted: bool,
    /// The poll ended at a limit; poll again at once.
    pub more: bool,
    /// Later records wait for one that its writer has not finished.
    pub waits: bool,
    /// The ring cannot be read: this is not the running kernel's log, or its memory was reused.
    pub unreadable: bool,
}

/// A position in a ring.
#[derive(Clone, Copy, Debug)]
struct Position {
    place: Place,
    /// The id of the next record.
    id: u64,
    /// The sequence number of that record.
    seq: u64,
}

/// A reader of the log, whose only state is its position.
#[derive(Clone, Debug)]
pub struct Follower {
    source: Source,
    start: Start,
    position: Option<Position>,
}

impl Follower {
    /// Creates a reader. `start` takes effect in the first poll.
    #[must_use]
    pub fn new(source: Source, start: Start) -> Self {
        Self {
            source,
            start,
            position: None,
        }
    }

    /// Returns the sequence number of the next record, once it is known.
    #[must_use]
    pub fn next_seq(&self) -> Option<u64> {
        self.position.map(|position| position.seq)
    }

    /// Reads the records since the last poll. The time and memory of a poll are bounded by `terms`
    /// and constants, regardless of what the guest does.
    pub fn poll(&mut self, view: &(impl KernelView + ?Sized), terms: Terms) -> Batch {
        let mut batch = Batch::default();
        let mut steps = MAX_STEPS;
        let mut bytes = 0;
        for _ in 0..MAX_SEARCHES {
            let Some(ring) = Ring::read(view, &self.source) else {
                batch.unreadable = true;
                return batch;
            };
            let ring = &ring;
            let known = self.position.filter(|position| {
                position.place == ring.place && ring.from(position.id) <= ring.count()
            });
            let mut position = match known {
                Some(position) => position,
                None => match search(
                    view,
                    ring,
                    self.position,
                    &mut self.start,
                    &mut batch,
                    &mut steps,
                ) {
                    Search::Found(position) => position,
                    Search::Empty => return batch,
                    Search::Moved => continue,
                },
            };
            let replaced = advance(
                view,
                ring,
                &mut position,
                &mut batch,
                terms,
                &mut steps,
                &mut bytes,
            );
            self.position = Some(position);
            if !replaced {
                return batch;
            }
            if !batch.records.is_empty() {
                batch.more = true;
                return batch;
            }
            // The ring has wrapped past this record.
            self.start = Start::Seq(position.seq);
            self.position = None;
        }
        batch.more = true;
        batch
    }
}

/// The result of a search for a position.
enum Search {
    Found(Position),
    /// There is no record yet.
    Empty,
    /// The kernel reclaimed records faster than they were read, or the ring contradicts itself.
    Moved,
}

/// Finds the position in a ring that is new, or that has wrapped past the old position.
fn search(
    view: &(impl KernelView + ?Sized),
    ring: &Ring<'_>,
    old: Option<Position>,
    start: &mut Start,
    batch: &mut Batch,
    steps: &mut u64,
) -> Search {
    let wanted = match (old, *start) {
        (Some(position), _) => Start::Seq(position.seq),
        (None, start) => start,
    };
    let Some((id, seq)) = oldest(view, ring, steps) else {
        return match ring.from(ring.tail) {
            // A new ring begins with one reclaimed record. At most its first record is being
            // written.
            0..=2 => {
                if wanted == Start::End {
                    *start = Start::Oldest;
                }
                Search::Empty
            }
            _ => Search::Moved,
        };
    };
    let written = ring.from(id);
    let (id, seq) = match wanted {
        Start::Oldest => (id, seq),
        Start::End => {
            // A record that its writer has not finished is not skipped.
            let newest = ring.record(view, ring.head);
            let open = matches!(&newest, Slot::Reserved | Slot::Committed)
                || matches!(&newest, Slot::Record(record) if !record.finished);
            let ahead = written.saturating_sub(u64::from(open));
            (id.wrapping_add(ahead) & ID, seq.wrapping_add(ahead))
        }
        Start::Seq(wanted) if wanted < seq => {
            batch.lost = batch.lost.saturating_add(seq - wanted);
            (id, seq)
        }
        Start::Seq(wanted) if wanted - seq <= written => {
            (id.wrapping_add(wanted - seq) & ID, wanted)
        }
        // The ring has never held this record.
        Start::Seq(_) => {
            batch.restarted = true;
            (id, seq)
        }
    };
    Search::Found(Position {
        place: ring.place,
        id,
        seq,
    })
}

/// Reads records from `position` on. Returns whether the ring has wrapped past the position.
fn advance(
    view: &(impl KernelView + ?Sized),
    ring: &Ring<'_>,
    position: &mut Position,
    batch: &mut Batch,
    terms: Terms,
    steps: &mut u64,
    bytes: &mut usize,
) -> bool {
    for left in (1..=ring.from(position.id)).rev() {
        if batch.records.len() >= terms.records || *bytes > terms.bytes || *steps == 0 {
            batch.more = true;
            return false;
        }
        let is_newest = left == 1;
        match ring.record(view, position.id) {
            Slot::Record(record) if !record.finished && !terms.unfinished => {
                batch.waits = !is_newest;
                return false;
            }
            Slot::Record(record) => {
                if record.seq < position.seq {
                    // Sequence numbers never fall within a log, so this is another log.
                    if !batch.records.is_empty() {
                        batch.more = true;
                        return false;
                    }
                    batch.restarted = true;
                } else {
                    batch.lost = batch.lost.saturating_add(record.seq - position.seq);
                }
                position.seq = record.seq;
                *bytes += record.text.as_ref().map_or(0, Vec::len);
                batch.records.push(record);
            }
            Slot::Reserved | Slot::Committed if terms.unfinished && !is_newest => {
                batch.lost = batch.lost.saturating_add(1);
                *steps -= 1;
            }
            Slot::Reserved | Slot::Committed => {
                batch.waits = !is_newest;
                return false;
            }
            Slot::Reusable | Slot::Damaged => {
                batch.lost = batch.lost.saturating_add(1);
                *steps -= 1;
            }
            Slot::Replaced { torn } => {
                batch.torn += u64::from(torn);
                return true;
            }
            Slot::Unreadable => {
                batch.unreadable = true;
                return false;
            }
        }
        position.id = position.id.wrapping_add(1) & ID;
        position.seq = position.seq.wrapping_add(1);
    }
    false
}

/// Returns the id and the sequence number of the oldest whole record. It skips up to
/// [`MAX_RECLAIMED`] reclaimed records one by one, and the others by bisection, because reclaimed
/// records, except empty lines, are older than all others.
pub(super) fn oldest(
    view: &(impl KernelView + ?Sized),
    ring: &Ring<'_>,
    steps: &mut u64,
) -> Option<(u64, u64)> {
    let mut id = ring.tail;
    let mut passed = 0;
    for _ in 0..ring.from(ring.tail).min(ring.count()) {
        *steps = steps.checked_sub(1)?;
        // One read finds a record that is reclaimed.
        if let Slot::Record(record) = ring.record(view, id) {
            return Some((id, record.seq));
        }
        id = id.wrapping_add(1) & ID;
        passed += 1;
        if passed == MAX_RECLAIMED {
            id = bisect(view, ring, id);
        }
        if ring.from(id) > ring.count() {
            break;
        }
    }
    None
}

/// Returns the first id, beginning at `id`, that is not reclaimed.
fn bisect(view: &(impl KernelView + ?Sized), ring: &Ring<'_>, mut id: u64) -> u64 {
    let mut length = ring.from(id).min(ring.count());
    while length > 0 {
        let half = length / 2;
        let middle = id.wrapping_add(half) & ID;
        if ring.is_gone(view, middle) {
            id = middle.wrapping_add(1) & ID;
            length -= half + 1;
        } else {
            length = half;
        }
    }
    id
}

/// Returns the newest whole record among the last 64 records.
pub fn newest(view: &(impl KernelView + ?Sized), source: &Source) -> Option<Record> {
    let ring = Ring::read(view, source)?;
    (0..64).find_map(|back| {
        let id = ring.head.wrapping_sub(back) & ID;
        match ring.record(view, id) {
            Slot::Record(record) => Some(record),
            _ => None,
        }
    })
}
