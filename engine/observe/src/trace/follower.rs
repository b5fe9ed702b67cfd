// SPDX-License-Identifier: Apache-2.0
//! Follows the ring of one CPU from poll to poll.

mod search;

use self::search::oldest;
use super::page::{Events, HEADER_BYTES};
use super::ring::{Head, Header, Identity, Pages};
use crate::KernelView;

/// The maximum number of searches for the position in one poll.
const MAX_SEARCHES: usize = 16;
/// The maximum number of pages that one poll looks at.
const MAX_STEPS: usize = 8192;

/// The first event of a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The oldest event that the ring holds and no reader in the guest has consumed.
    Oldest,
    /// The first event that is written after the first poll.
    End,
}

/// Events of one CPU, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The CPU.
    pub cpu: u32,
    /// A page as `trace_pipe_raw` delivers it, for [`super::Page::parse`]. It begins with the time
    /// before its first event.
    pub page: Vec<u8>,
    /// Number of events, at least 1.
    pub events: u64,
    /// The part of [`Batch::lost`] that this CPU has lost since its previous chunk, in this poll or
    /// an earlier one.
    pub lost_before: u64,
}

/// The result of one poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Whole events. The events of one CPU are in order; the chunks of one CPU follow those of
    /// another.
    pub chunks: Vec<Chunk>,
    /// Number of events before and among these that were overwritten, or consumed by a reader in
    /// the guest, before they were read. The sum over all polls exceeds the number of lost events
    /// by at most one, if a reader in the guest takes an event at that moment. The sum is exact at
    /// each poll that finds all events read and none being written. There is one exception: if the
    /// first position is found while an interrupt moves the head that the interrupted code was
    /// about to move, and events are lost before such a poll, the sum stays too high by up to the
    /// events of a page.
    pub lost: u64,
    /// Number of copies that were discarded because the kernel changed the page meanwhile. The
    /// events are copied again, or count in `lost`.
    pub torn: u64,
    /// Number of pages whose events contradict themselves. The events count in `lost`.
    pub damaged: u64,
    /// A ring was emptied, resized to another size of pages, or exchanged for another one.
    pub restarted: bool,
    /// The poll ended at a limit; poll again at once.
    pub more: bool,
    /// A ring cannot be read: its memory was freed, or another kernel runs.
    pub unreadable: bool,
    /// All times are of the guest's CLOCK_MONOTONIC (`trace_clock` is `mono`).
    pub is_monotonic: bool,
}

/// A position in the ring.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    page: u64,
    /// `None` until the page has a committed event.
    identity: Option<Identity>,
    /// Number of bytes of its events that were read.
    offset: usize,
    /// Time after the last item.
    time: u64,
    /// The events contradict themselves, so the rest of the page is skipped.
    is_damaged: bool,
}

impl Cursor {
    /// Returns a position before the first event of a page that has none yet.
    fn waiting(page: u64, time: u64) -> Self {
        Self {
            page,
            identity: None,
            offset: 0,
            time,
            is_damaged: false,
        }
    }

    /// Returns a position before the first event of a page.
    fn start_of(page: u64, head: &Head) -> Self {
        Self {
            identity: Some(head.identity),
            ..Self::waiting(page, head.identity.stamp)
        }
    }
}

/// A reader of one ring.
#[derive(Clone, Debug)]
pub(super) struct Follower {
    cpu: u32,
    /// Address of the `struct ring_buffer_per_cpu`.
    ring: u64,
    start: Start,
    cursor: Option<Cursor>,
    /// `entries` at the start, once it is known.
    base: Option<u64>,
    /// No event was lost since the start. The next exact count then determines `base`.
    corrects_base: bool,
    /// Number of events that were read since the start.
    seen: u64,
    /// Number of events that were reported as lost.
    lost: u64,
    /// The events among these that were lost after the last chunk.
    lost_since_chunk: u64,
    /// `entries` of the last header.
    entries: u64,
    /// Events up to this time were read from another ring. They are skipped only until the end of
    /// the ring is first reached.
    after: Option<u64>,
}

/// The result of a step.
enum Step {
    /// The position has advanced to another page, or was found.
    Next,
    /// All committed events were read. The header was copied before the page's length.
    End(Header),
    /// The position is lost: the page was overwritten, consumed or freed.
    Lost { torn: bool },
    /// A limit was reached.
    Limit,
}

impl Follower {
    pub fn new(cpu: u32, ring: u64, start: Start) -> Self {
        Self {
            cpu,
            ring,
            start,
            cursor: None,
            base: None,
            corrects_base: true,
            seen: 0,
            lost: 0,
            lost_since_chunk: 0,
            entries: 0,
            after: None,
        }
    }

    /// Returns a follower of another ring that continues this one, as after a snapshot.
    pub fn replaced(&self, ring: u64) -> Self {
        let mut next = Self::new(self.cpu, ring, self.start);
        next.after = self.after.max(self.cursor.map(|cursor| cursor.time));
        next.lost_since_chunk = self.lost_since_chunk;
        if next.after.is_some() {
            next.start = Start::Oldest;
        }
        next
    }

    pub fn ring(&self) -> u64 {
        self.ring
    }

    /// Finds the first position, so that the events after this call are read later.
    pub fn place(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        batch: &mut Batch,
    ) -> Option<()> {
        let mut steps = MAX_STEPS;
        for _ in 0..MAX_SEARCHES {
            let header = pages.header(self.ring)?;
            self.entries = header.entries;
            self.begin(pages, &header, &mut steps, batch);
            if self.cursor.is_some() {
                break;
            }
        }
        Some(())
    }

    /// Reads the events since the last poll, and returns their size in bytes. It ends after `limit`
    /// bytes, and changes nothing after the view is exhausted.
    pub fn poll(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        limit: usize,
        batch: &mut Batch,
    ) -> usize {
        let (mut steps, mut searches, mut bytes) = (MAX_STEPS, MAX_SEARCHES, 0);
        loop {
            let Some(header) = pages.header(self.ring) else {
                batch.unreadable |= !pages.view.is_exhausted();
                batch.more |= pages.view.is_exhausted();
                return bytes;
            };
            if header.entries < self.entries {
                // The guest has emptied the ring, perhaps because it has changed the clock.
                *self = Self {
                    base: Some(0),
                    corrects_base: false,
                    lost_since_chunk: self.lost_since_chunk,
                    ..Self::new(self.cpu, self.ring, Start::Oldest)
                };
                batch.restarted = true;
            }
            self.entries = header.entries;
            let Some(left) = steps.checked_sub(1).filter(|_| bytes < limit) else {
                batch.more = true;
                return bytes;
            };
            steps = left;
            let step = match self.cursor {
                Some(cursor) => self.step(pages, &header, cursor, &mut bytes, batch),
                None => self.begin(pages, &header, &mut steps, batch),
            };
            if pages.view.is_exhausted() {
                // The step has failed for this reason, and not because of the guest.
                batch.more = true;
                return bytes;
            }
            match step {
                Step::Next => continue,
                Step::Limit => {}
                Step::End(header) => {
                    self.account(pages, &header, batch);
                    return bytes;
                }
                Step::Lost { torn } => {
                    batch.torn += u64::from(torn);
                    searches -= 1;
                    self.search(pages, &header, &mut steps, batch);
                }
            }
            if searches == 0 || steps == 0 {
                batch.more = true;
                return bytes;
            }
        }
    }

    /// Finds the first position.
    fn begin(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        steps: &mut usize,
        batch: &mut Batch,
    ) -> Step {
        let found = match self.start {
            Start::Oldest => self.begin_oldest(pages, header, steps),
            Start::End => self.begin_end(pages, header, batch),
        };
        match found {
            Some(cursor) => {
                self.cursor = Some(cursor);
                Step::Next
            }
            None => {
                *steps = steps.saturating_sub(MAX_STEPS / MAX_SEARCHES);
                Step::Limit
            }
        }
    }

    fn begin_oldest(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        steps: &mut usize,
    ) -> Option<Cursor> {
        let reader = pages.head(header.reader)?;
        // The writer may stand on a reader page that was consumed up to its end.
        let is_last = header.commit_page == header.reader && reader.length > 0;
        let has_unread = reader.length > reader.consumed || is_last;
        let cursor = if has_unread {
            let bytes = pages.bytes(&reader, 0)?;
            let time = time_at(&bytes, reader.identity.stamp, reader.consumed)?;
            Cursor {
                offset: reader.consumed,
                time,
                ..Cursor::start_of(header.reader, &reader)
            }
        } else {
            let (page, head) = oldest(pages, header, steps)?;
            match head.length {
                // The ring is empty.
                0 => Cursor::waiting(header.commit_page, self.after.unwrap_or(0)),
                _ => Cursor::start_of(page, &head),
            }
        };
        let again = pages.header(self.ring)?;
        // The next step checks that the content is unchanged before it takes an event. The time was
        // then computed from this content, too.
        if header.taken() != again.taken() {
            return None;
        }
        // The number of events before the first one. Those that were overwritten since the reader
        // page was taken from the circle are after it.
        let overwritten = match has_unread {
            true => header.last_overrun,
            false => header.overrun,
        };
        let before = overwritten.wrapping_add(header.read);
        self.base.get_or_insert(before);
        // An empty ring may wrap before its first event is read. The position is then on a later
        // event, so the number must not be corrected by it.
        if cursor.identity.is_none() && header.entries == before {
            self.corrects_base = false;
        }
        Some(cursor)
    }

    /// Returns the end of the committed events.
    fn begin_end(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        batch: &mut Batch,
    ) -> Option<Cursor> {
        let head = pages.head(header.commit_page)?;
        let bytes = pages.bytes(&head, 0)?;
        let now = pages.header(self.ring)?;
        if !pages.is_still(header.commit_page, &head) {
            batch.torn += u64::from(!pages.view.is_exhausted());
            return None;
        }
        let time = time_at(&bytes, head.identity.stamp, head.length)?;
        // Unless the writer has rested meanwhile, some of these events come after the position. If
        // the position is lost, these events must not count as lost.
        self.base = Some(now.entries);
        self.corrects_base = !header.rests_until(&now);
        Some(Cursor {
            identity: (head.length > 0).then_some(head.identity),
            offset: head.length,
            ..Cursor::waiting(header.commit_page, time)
        })
    }

    /// Reads the rest of a page, and continues with the next one if the writer has left it.
    fn step(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        mut cursor: Cursor,
        bytes: &mut usize,
        batch: &mut Batch,
    ) -> Step {
        let lost = Step::Lost { torn: false };
        let Some(head) = pages.head(cursor.page) else {
            return lost;
        };
        let is_last = header.commit_page == cursor.page;
        let Some(identity) = cursor.identity else {
            if head.length > 0 {
                // If the page has changed, the copy may mix two contents, and the next step copies
                // it again.
                if pages.is_still(cursor.page, &head) {
                    self.cursor = Some(Cursor::start_of(cursor.page, &head));
                }
                return Step::Next;
            }
            return match is_last {
                true => Step::End(*header),
                // A reader in the guest has consumed the page already.
                false => lost,
            };
        };
        if !identity.is_same(&head.identity) {
            return lost;
        }
        if head.length < cursor.offset {
            // The content is of another round, and begins with the same bytes.
            return lost;
        }
        if head.length > cursor.offset {
            let Some(copied) = pages.bytes(&head, cursor.offset) else {
                return lost;
            };
            if !pages.is_still(cursor.page, &head) {
                return Step::Lost { torn: true };
            }
            *bytes += copied.len();
            self.take(&mut cursor, &copied, batch);
            cursor.offset = head.length;
            // The new identity contains more of the first bytes.
            cursor.identity = Some(head.identity);
            self.cursor = Some(cursor);
        }
        if is_last {
            return Step::End(*header);
        }
        // The header was copied before the length, so the length is final.
        self.leave(pages, header, &cursor, &head)
    }

    /// Continues with the page after one that was read to its end.
    fn leave(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        cursor: &Cursor,
        head: &Head,
    ) -> Step {
        let lost = Step::Lost { torn: false };
        let Some(next) = pages.head(head.next) else {
            return lost;
        };
        // The kernel has taken the page out of the circle: list_del_init() links it to itself, or
        // the memory of its list is used for something else.
        let is_older = next.length > 0 && next.identity.stamp < head.identity.stamp;
        if head.next == cursor.page || is_older {
            return lost;
        }
        // In the circle, the next page is newer, so it is not overwritten before this one is.
        if !pages.is_still(cursor.page, head) {
            return lost;
        }
        // The page that follows the reader page may be overwritten while the reader page stays.
        let Some(now) = pages.header(self.ring) else {
            return lost;
        };
        if [header.reader, now.reader].contains(&cursor.page)
            && (now.reader != cursor.page || now.overrun != now.last_overrun)
        {
            return lost;
        }
        self.cursor = Some(match next.length {
            0 => Cursor::waiting(head.next, cursor.time),
            _ if !pages.is_still(head.next, &next) => return Step::Next,
            _ => Cursor::start_of(head.next, &next),
        });
        Step::Next
    }

    /// Adds the events of a copy.
    fn take(&mut self, cursor: &mut Cursor, bytes: &[u8], batch: &mut Batch) {
        if cursor.is_damaged {
            return;
        }
        let mut events = Events::new(cursor.time, bytes);
        let (mut seen, mut count, mut time, mut from) = (0, 0, cursor.time, 0);
        while let Some(event) = events.next() {
            if event.is_err() {
                cursor.is_damaged = true;
                self.corrects_base = false;
                batch.damaged += 1;
                return;
            }
            seen += 1;
            match self.after {
                Some(after) if events.time() <= after => {
                    (time, from) = (events.time(), bytes.len() - events.left());
                }
                _ => count += 1,
            }
        }
        cursor.time = events.time();
        self.seen += seen;
        if count == 0 {
            return;
        }
        let rest = &bytes[from..];
        let mut page = Vec::with_capacity(HEADER_BYTES + rest.len());
        page.extend_from_slice(&time.to_le_bytes());
        page.extend_from_slice(&(rest.len() as u64).to_le_bytes());
        page.extend_from_slice(rest);
        batch.chunks.push(Chunk {
            cpu: self.cpu,
            page,
            events: count,
            lost_before: std::mem::take(&mut self.lost_since_chunk),
        });
    }

    /// Compares the number of events with the kernel's. This is done only if no event was written
    /// since the header was copied, because then all of them were read or lost.
    fn account(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        batch: &mut Batch,
    ) {
        self.after = None;
        let Some(now) = pages.header(self.ring) else {
            batch.more |= pages.view.is_exhausted();
            return;
        };
        if !header.rests_until(&now) {
            return;
        }
        if std::mem::take(&mut self.corrects_base) {
            self.base = Some(now.entries.wrapping_sub(self.seen));
        }
        self.lose_until(now.entries, batch);
    }

    /// Reports the unread events among the first `count` events of the ring as lost. All events
    /// that were read are among the first `count`.
    fn lose_until(&mut self, count: u64, batch: &mut Batch) {
        let base = *self.base.get_or_insert(count.wrapping_sub(self.seen));
        let known = base.wrapping_add(self.seen).wrapping_add(self.lost);
        // A hostile guest may have counted fewer.
        let more = count.saturating_sub(known);
        self.lost = self.lost.saturating_add(more);
        self.lost_since_chunk = self.lost_since_chunk.saturating_add(more);
        batch.lost = batch.lost.saturating_add(more);
    }
}

/// Returns the time after the items up to an offset; `None` if they contradict themselves.
fn time_at(bytes: &[u8], stamp: u64, offset: usize) -> Option<u64> {
    let mut events = Events::new(stamp, bytes.get(..offset)?);
    for event in events.by_ref() {
        event.ok()?;
    }
    Some(events.time())
}

#[cfg(test)]
mod tests;
