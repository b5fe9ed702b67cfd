// SPDX-License-Identifier: Apache-2.0
//! The kernel's trace events: their formats (kernel/trace/trace_events.c), and the rings that hold
//! them (kernel/trace/ring_buffer.c).
//!
//! The top level of tracefs and each of its instances is a `struct trace_array`. It has a ring per
//! CPU, which only that CPU writes, and which interrupts may enter while an event is being written.
//!
//! # The ring of a CPU
//!
//! ```text
//!     reader page        the circle, linked by list.next
//!       ┌───┐   ┌───┐   ┌───┐   ┌───┐   ┌───┐   ┌───┐
//!       │ 0 │──▶│ 1 │──▶│ 2 │──▶│ 3 │──▶│ 4 │──▶│   │──▶ (page 1)
//!       └───┘   └───┘   └───┘   └───┘   └───┘   └───┘
//!               head                 commit_page
//! ```
//!
//! A `struct buffer_page` points to a data page: the time of its first event (`time_stamp`), the
//! number of bytes of committed events (`commit`), and the events, whose times are relative. The
//! low bits of `list.next` say that the next page is the head, the oldest page of the circle (1),
//! or that the writer is moving the head on because it needs that page (2).
//!
//! The reader page is outside the circle. A reader in the guest takes events from it. When it has
//! taken all, it exchanges it for the head, so in time the reader page stands before the head. The
//! page that it puts back is empty. The writer can stand on the reader page.
//!
//! | situation of the page that was read to its end | the next page | [`Rings::poll`] |
//! |---|---|---|
//! | it is `commit_page` | | waits |
//! | it is in the circle | `list.next` | continues there |
//! | it is the reader page, and `overrun` = `last_overrun` | `list.next` | continues there |
//! | it is the reader page, and the writer has since overwritten pages | the head | searches |
//! | it is not what it was: overwritten, put back or freed | the reader page if it is later, else the head | searches |
//!
//! # Why a torn copy is not taken
//!
//! `buffer_page.write` counts above bit 20 how often the writer has entered the page. When the
//! writer enters a page (`rb_tail_page_update()`), it increments this generation, sets `commit` to
//! 0, moves `tail_page`, sets `time_stamp`, and only then writes the first event. `commit` is
//! advanced when the outermost writer ends, after the bytes. So:
//!
//! - If the generation is the same before `commit` is read and after the bytes were copied, no byte
//!   is of another round, and the bytes below `commit` are whole events.
//! - A reader in the guest that puts a page back sets `write` and `commit` to 0, so a page can have
//!   the same generation again after a whole round. Then its `time_stamp` differs. With
//!   `trace_pipe_raw`, the reader exchanges the data page, so its address is compared as well.
//! - A guest without a stable TSC may have a clock of some milliseconds, in which a ring can wrap.
//!   For the case that a page has the same generation and time again, the first bytes of its events
//!   are compared as well.
//! - A process in the guest may map the pages. The kernel flags a reader page before which events
//!   were lost, and replaces the padding at its end by their number. It reduces `commit` before it
//!   writes the number (`ring_buffer_map_get_reader()`), so a page whose `commit` is less after the
//!   copy is copied again.
//! - Between the generation and `commit` = 0, a page seems to be whole but is of the round before.
//!   This is only the page that the writer enters at that moment. The reader enters a page only
//!   after `commit_page` has left the page before it, and only if that page is still what it was
//!   after the headers of the next one were read; or if it is still flagged as the head.
//!
//! # Losses
//!
//! The kernel counts the events that were written (`entries`). While no event is being written and
//! all of them were read, the difference from the number that was read is the number of lost ones.
//! A reader that is slower than the writer never finds the writer at rest. It loses its position
//! again and again, and each time continues with the oldest page. The events before that page were
//! overwritten (`overrun`), consumed (`read`), or are unread in the reader page. Events among these
//! that the follower has not read are lost.

mod events;
mod follower;
mod layout;
mod page;
mod ring;
mod users;

use std::collections::HashSet;
use std::sync::atomic::{Ordering, fence};

pub use self::events::Event;
use self::follower::Follower;
pub use self::follower::{Batch, Chunk, Start};
pub use self::layout::{ARRAYS, COMMON_FIELDS, CPUS, EVENTS, Layout, SYSCALL_FIELDS, TYPES};
pub use self::page::{Events, Page, PageError};
use self::ring::Pages;
pub use self::users::{Counters, Enabled};
use crate::{Bounded, KernelView, copy, word};

/// The maximum number of reads of one poll, and the maximum number of bytes in them, in addition to
/// 8 bytes for each byte that is wanted. All CPUs share them.
const MAX_READS: usize = 1 << 16;
const MAX_BYTES: usize = 4 << 20;
/// The index of `mono`, CLOCK_MONOTONIC, in `trace_clocks` (kernel/trace/trace.c).
const MONO: u64 = 5;
/// The maximum number of CPUs, `NR_CPUS` of distributions.
const MAX_CPUS: u64 = 8192;
/// The largest page of a ring is [`PAGE`] bytes shifted left by this number.
const MAX_ORDER: u64 = 7;
const PAGE: usize = 4096;

/// The addresses of a kernel's tracing, and the layout of its structures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of [`EVENTS`].
    pub events: u64,
    /// Address of [`COMMON_FIELDS`].
    pub common_fields: u64,
    /// Address of [`ARRAYS`].
    pub arrays: u64,
    /// Address of [`CPUS`].
    pub cpus: u64,
    /// Address of [`SYSCALL_FIELDS`]; without it, events of system calls have no format.
    pub syscall_fields: Option<u64>,
    /// The layout.
    pub layout: Layout,
}

impl Source {
    /// Returns the names of the instances, in any bytes. The name of the top level is empty.
    /// Returns `None` if the list cannot be read.
    pub fn names(&self, view: &(impl KernelView + ?Sized)) -> Option<Vec<Vec<u8>>> {
        let arrays = events::arrays(view, self)?.into_iter();
        Some(arrays.map(|(_, name)| name).collect())
    }

    /// Returns the names of the instances. Characters other than printable ASCII are escaped.
    /// Returns `None` if the list cannot be read.
    pub fn instances(&self, view: &(impl KernelView + ?Sized)) -> Option<Vec<String>> {
        let names = self.names(view)?;
        let shown = names.iter().map(|name| name.escape_ascii().to_string());
        Some(shown.collect())
    }

    /// Returns the address of the `struct trace_array` of an instance.
    pub fn instance(&self, view: &(impl KernelView + ?Sized), name: &str) -> Option<u64> {
        let arrays = events::arrays(view, self)?;
        let mut found = arrays.into_iter();
        let found = found.find(|(_, found)| found == name.as_bytes());
        found.map(|(address, _)| address)
    }

    /// Returns whether the instance at an address still exists and has this name. The memory of an
    /// instance that was removed may be reused for another one.
    pub fn is_instance(&self, view: &(impl KernelView + ?Sized), address: u64, name: &str) -> bool {
        let link = address.wrapping_add(self.layout.array.list.offset());
        // The list of an instance that was removed is poisoned.
        let next = word(view, link);
        let is_linked = next.and_then(|next| word(view, next.wrapping_add(8))) == Some(link);
        let found = events::array_name(view, self, address);
        is_linked && found.is_some_and(|found| found == name.as_bytes())
    }
}

/// A reader of the rings of all CPUs, whose only state is its positions.
#[derive(Clone, Debug)]
pub struct Rings {
    source: Source,
    array: u64,
    start: Start,
    /// The follower of each CPU, indexed by the CPU's number. `None` if the CPU was never online.
    followers: Vec<Option<Follower>>,
    /// The number of bytes of events in a page at the last poll.
    capacity: Option<usize>,
    /// The CPU with which the next poll begins.
    first: usize,
    /// The clock after the last poll.
    clock: Option<u64>,
}

impl Rings {
    /// Creates a reader of the rings of a `struct trace_array`. `start` takes effect in
    /// [`Self::begin`], or in the first poll.
    #[must_use]
    pub fn new(source: Source, array: u64, start: Start) -> Self {
        Self {
            source,
            array,
            start,
            followers: Vec::new(),
            capacity: None,
            first: 0,
            clock: None,
        }
    }

    /// Fixes the position in the ring of each CPU, and reads nothing. Returns false if the rings
    /// cannot be read.
    pub fn begin(&mut self, view: &(impl KernelView + ?Sized)) -> bool {
        let view = Bounded::new(view, MAX_READS, MAX_BYTES);
        let Some((rings, capacity)) = self.rings(&view) else {
            return false;
        };
        let mut batch = Batch::default();
        let layout = self.source.layout.clone();
        let pages = Pages {
            view: &view,
            layout: &layout,
            capacity,
        };
        self.place(&rings, &pages, &mut batch);
        self.clock = self.clock(&view);
        !batch.unreadable
    }

    /// Reads the events since the last poll, up to about `bytes` bytes, or one page of each CPU.
    /// The time and memory of a poll are bounded by `bytes` and constants, regardless of what the
    /// guest does.
    pub fn poll(&mut self, view: &(impl KernelView + ?Sized), bytes: usize) -> Batch {
        let view = Bounded::new(
            view,
            MAX_READS,
            bytes.saturating_mul(8).saturating_add(MAX_BYTES),
        );
        let mut batch = Batch::default();
        let Some((rings, capacity)) = self.rings(&view) else {
            batch.unreadable = true;
            return batch;
        };
        let before = self.clock(&view);
        if self.followers.is_empty() {
            self.clock = before;
        }
        let layout = self.source.layout.clone();
        let pages = Pages {
            view: &view,
            layout: &layout,
            capacity,
        };
        self.place(&rings, &pages, &mut batch);
        let limit = (bytes / rings.len().max(1)).max(1);
        let first = std::mem::take(&mut self.first) % rings.len().max(1);
        let mut taken = 0;
        for index in (first..rings.len()).chain(0..first) {
            let Some(follower) = &mut self.followers[index] else {
                continue;
            };
            if taken >= bytes || view.is_exhausted() {
                batch.more = true;
                self.first = index;
                break;
            }
            if rings[index] != 0 {
                taken += follower.poll(&pages, limit, &mut batch);
            }
        }
        // The kernel changes the number of the clock before it empties the rings.
        let after = self.clock(&view);
        let earlier = std::mem::replace(&mut self.clock, after);
        batch.is_monotonic = [earlier, before, after] == [Some(MONO); 3];
        batch
    }

    /// Creates followers for the rings that have none, or that were exchanged, and fixes their
    /// positions before any events are read.
    fn place(
        &mut self,
        rings: &[u64],
        pages: &Pages<'_, impl KernelView + ?Sized>,
        batch: &mut Batch,
    ) {
        self.followers.resize(rings.len(), None);
        // The kernel replaces all pages when it changes their size.
        let earlier = self.capacity.replace(pages.capacity);
        let is_resized = earlier.is_some_and(|earlier| earlier != pages.capacity);
        for (index, (slot, &ring)) in self.followers.iter_mut().zip(rings).enumerate() {
            match slot {
                _ if ring == 0 => {}
                Some(follower) if follower.ring() == ring && !is_resized => {}
                Some(other) => {
                    batch.restarted = true;
                    *other = other.replaced(ring);
                }
                None => {
                    let follower = slot.insert(Follower::new(index as u32, ring, self.start));
                    let placed = follower.place(pages, batch);
                    batch.unreadable |= placed.is_none() && !pages.view.is_exhausted();
                }
            }
        }
        // A CPU that comes online later begins with an empty ring.
        self.start = Start::Oldest;
    }

    fn clock(&self, view: &(impl KernelView + ?Sized)) -> Option<u64> {
        let field = self.source.layout.array.clock?;
        let mut bytes = [0; 4];
        let read = view.read(self.array.wrapping_add(field.offset()), &mut bytes);
        read.then(|| u32::from_le_bytes(bytes).into())
    }

    /// Returns the address of each CPU's ring, and the number of bytes of events in a page. A
    /// snapshot exchanges the rings, so this is read in each poll.
    fn rings(&self, view: &(impl KernelView + ?Sized)) -> Option<(Vec<u64>, usize)> {
        let layout = &self.source.layout;
        let buffer = word(view, self.array.wrapping_add(layout.array.buffer.offset()))?;
        let bytes = copy(view, buffer, layout.buffer.size)?;
        fence(Ordering::Acquire);
        let mut cpus = [0; 4];
        if !view.read(self.source.cpus, &mut cpus) {
            return None;
        }
        let cpus = u64::from(u32::from_le_bytes(cpus));
        let cpus = (1..=MAX_CPUS).contains(&cpus).then_some(cpus)?;
        let order = match layout.buffer.order {
            Some(order) => order.of(&bytes)?,
            None => 0,
        };
        let order = (order <= MAX_ORDER).then_some(order)?;
        let pointers = layout.buffer.buffers.of(&bytes)?;
        let rings = copy(view, pointers, usize::try_from(cpus).ok()? * 8)?;
        let header = usize::try_from(layout.data.events).ok()?;
        let capacity = (PAGE << order).checked_sub(header)?;
        // Each CPU has a ring of its own, so a second pointer to a ring is not followed.
        let mut known = HashSet::new();
        let own = |ring| if known.insert(ring) { ring } else { 0 };
        Some((events::words(&rings).map(own).collect(), capacity))
    }
}

#[cfg(test)]
mod tests;
