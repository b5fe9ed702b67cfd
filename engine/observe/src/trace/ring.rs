// SPDX-License-Identifier: Apache-2.0
//! Copies of the ring of one CPU and of single pages.

use std::sync::atomic::{Ordering, fence};

use super::layout::{CpuLayout, Layout};
use super::page::LENGTH_MASK;
use crate::{Bounded, KernelView, copy};

/// The bits of `buffer_page.write` below the generation: `RB_WRITE_MASK` and the first bit of
/// `RB_WRITE_INTCNT`, which the writer adds each time it enters the page.
const GENERATION_SHIFT: u32 = 20;
/// The flag in the low bits of `list.next` that says that the next page is the head. The other bit
/// says that the writer is moving the head from it.
const HEAD: u64 = 1;
const FLAGS: u64 = 3;

/// A copy of the members of `struct ring_buffer_per_cpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// A page of the circle, from which the head was last seen.
    pub head: u64,
    /// The page that contains the end of the committed events.
    pub commit_page: u64,
    /// The page that is outside the circle, for a reader in the guest.
    pub reader: u64,
    /// Events that were overwritten.
    pub overrun: u64,
    /// `overrun` when the reader page was taken from the circle.
    pub last_overrun: u64,
    /// Events that were written.
    pub entries: u64,
    /// Events that a reader in the guest has consumed.
    pub read: u64,
    /// Reservations that were begun.
    pub commits: u64,
    /// Reservations that have not ended.
    pub committing: u64,
}

impl Header {
    /// Copies the header. Later reads see memory no older than the copy.
    pub fn read(
        view: &(impl KernelView + ?Sized),
        layout: &CpuLayout,
        address: u64,
    ) -> Option<Self> {
        let bytes = copy(view, address, layout.size)?;
        fence(Ordering::Acquire);
        Some(Self {
            head: layout.head.of(&bytes)?,
            commit_page: layout.commit_page.of(&bytes)?,
            reader: layout.reader.of(&bytes)?,
            overrun: layout.overrun.of(&bytes)?,
            last_overrun: layout.last_overrun.of(&bytes)?,
            entries: layout.entries.of(&bytes)?,
            read: layout.read.of(&bytes)?,
            commits: layout.commits.of(&bytes)?,
            committing: layout.committing.of(&bytes)?,
        })
    }

    /// Returns the counts of the events that were overwritten or that a reader in the guest has
    /// taken. While they are the same, the oldest event is the same.
    pub fn taken(&self) -> [u64; 4] {
        [self.overrun, self.last_overrun, self.read, self.reader]
    }

    /// Returns whether no event was being written from this copy until a later one.
    pub fn rests_until(&self, later: &Self) -> bool {
        let rests = self.committing == 0 && later.committing == 0;
        rests && (self.commits, self.entries) == (later.commits, later.entries)
    }
}

/// Number of bytes of the first event in an [`Identity`].
const FIRST: usize = 64;

/// The identity of the content of a page. It changes before a byte of the content does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    /// Address of the data page. A reader in the guest may exchange it for an empty one.
    data: u64,
    /// Number of times that the writer has entered the page, since a reader has emptied it.
    generation: u64,
    /// Time of the first event.
    pub stamp: u64,
    /// The first bytes of the events, as far as they were committed; then zeros.
    first: [u8; FIRST],
    /// Number of these bytes.
    known: usize,
}

impl Identity {
    /// Returns whether `later` is of the same content, which may have grown.
    pub fn is_same(&self, later: &Self) -> bool {
        let numbers = |of: &Self| (of.data, of.generation, of.stamp);
        numbers(self) == numbers(later) && self.first[..self.known] == later.first[..self.known]
    }
}

/// A copy of the headers of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub identity: Identity,
    /// Number of bytes of committed events.
    pub length: usize,
    /// The next page.
    pub next: u64,
    /// Number of bytes that a reader in the guest has consumed.
    pub consumed: usize,
}

/// Reads pages of one ring.
pub(super) struct Pages<'a, V: ?Sized> {
    pub view: &'a Bounded<'a, V>,
    pub layout: &'a Layout,
    /// Number of bytes of events in a page.
    pub capacity: usize,
}

impl<V: KernelView + ?Sized> Pages<'_, V> {
    /// Copies the header of the ring.
    pub fn header(&self, ring: u64) -> Option<Header> {
        Header::read(self.view, &self.layout.cpu, ring)
    }

    /// Copies the headers of a page. Returns `None` if they cannot be read or contradict
    /// themselves.
    ///
    /// The generation is loaded before the length, and [`Self::is_still`] loads it after the bytes.
    /// If both are equal, the length and the bytes are of this generation.
    pub fn head(&self, page: u64) -> Option<Head> {
        let layout = &self.layout.page;
        let bytes = copy(self.view, page, layout.size)?;
        fence(Ordering::Acquire);
        let data = layout.data.of(&bytes)?;
        let (length, identity) = self.data(data, layout.write.of(&bytes)? >> GENERATION_SHIFT)?;
        let next = layout.next.of(&bytes)?;
        Some(Head {
            identity,
            length,
            next: self.page(next),
            consumed: usize::try_from(layout.read.of(&bytes)?).ok()?,
        })
    }

    fn data(&self, address: u64, generation: u64) -> Option<(usize, Identity)> {
        let layout = &self.layout.data;
        let header = usize::try_from(layout.events).ok()?;
        let bytes = copy(self.view, address, header + FIRST)?;
        fence(Ordering::Acquire);
        let length = usize::try_from(layout.commit.of(&bytes)? & LENGTH_MASK).ok()?;
        let length = (length <= self.capacity).then_some(length)?;
        let known = length.min(FIRST);
        let mut first = [0; FIRST];
        first[..known].copy_from_slice(&bytes[header..][..known]);
        let identity = Identity {
            data: address,
            generation,
            stamp: layout.stamp.of(&bytes)?,
            first,
            known,
        };
        Some((length, identity))
    }

    /// Copies the events of a page from one offset to another.
    pub fn bytes(&self, head: &Head, from: usize) -> Option<Vec<u8>> {
        let length = head.length.checked_sub(from)?;
        let address = head.identity.data.wrapping_add(self.layout.data.events);
        let bytes = copy(self.view, address.wrapping_add(from as u64), length);
        fence(Ordering::Acquire);
        bytes
    }

    /// Returns whether a page still has the content that it had when `head` was copied. The content
    /// may have grown. If it is shorter, the kernel has cut the padding at its end, and may have
    /// written other bytes there.
    pub fn is_still(&self, page: u64, head: &Head) -> bool {
        fence(Ordering::Acquire);
        let is_same =
            |again: Head| head.identity.is_same(&again.identity) && again.length >= head.length;
        self.head(page).is_some_and(is_same)
    }

    /// Returns the oldest page of the circle.
    ///
    /// `head_page` is only a hint, because the writer moves the flag alone. If it is out of date,
    /// the ring has wrapped, and the head follows the page that is being written. To move the head
    /// from a page, the writer changes the flag of the link to it, counts its events as
    /// overwritten, and flags the next page (`rb_handle_head_page()`). The page is skipped, and no
    /// head is found until the next one is flagged. An interrupt between the first two of these
    /// steps may write events and flag the next page. Then the head is found although the events
    /// before it are not counted yet.
    pub fn oldest(&self, header: &Header, steps: &mut usize) -> Oldest {
        let before = |page: u64| {
            let link = page.wrapping_add(self.layout.page.list);
            crate::word(self.view, link.wrapping_add(8)).map(|link| self.page(link))
        };
        let starts = [before(header.head), Some(header.commit_page)];
        for (start, most) in starts.into_iter().flatten().zip([1, usize::MAX]) {
            let mut page = start;
            for _ in 0..most {
                let Some(left) = steps.checked_sub(1) else {
                    return Oldest::Moved;
                };
                *steps = left;
                let link = page.wrapping_add(self.layout.page.list);
                let Some(next) = crate::word(self.view, link) else {
                    return Oldest::Moved;
                };
                if next & FLAGS == HEAD {
                    return Oldest::Page {
                        page: self.page(next),
                        before: page,
                    };
                }
                page = self.page(next);
                if page == start {
                    break;
                }
            }
        }
        Oldest::Moved
    }

    /// Returns whether the page after `before` is still the oldest.
    pub fn is_oldest(&self, page: u64, before: u64) -> bool {
        fence(Ordering::Acquire);
        let link = before.wrapping_add(self.layout.page.list);
        let next = crate::word(self.view, link);
        next.is_some_and(|next| next & FLAGS == HEAD && self.page(next) == page)
    }

    /// Returns the page of a link.
    fn page(&self, link: u64) -> u64 {
        (link & !FLAGS).wrapping_sub(self.layout.page.list)
    }
}

/// The result of a search for the oldest page of the circle.
pub(super) enum Oldest {
    Page {
        page: u64,
        /// The page before `page`.
        before: u64,
    },
    /// The writer is moving the head, or the circle contradicts itself.
    Moved,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy of a header is not atomic: each count may be older than the others.
    #[test]
    fn a_writer_rests_only_if_no_count_tells_otherwise() {
        let rest = Header {
            head: 1,
            commit_page: 2,
            reader: 3,
            overrun: 4,
            last_overrun: 4,
            entries: 9,
            read: 0,
            commits: 9,
            committing: 0,
        };
        assert!(rest.rests_until(&rest));
        let writes = [
            // An event is being written, and is not counted yet.
            Header {
                committing: 1,
                ..rest
            },
            // One was begun, and has ended after `entries` was copied.
            Header {
                commits: 10,
                ..rest
            },
            // One was begun before `commits` was copied the first time.
            Header {
                entries: 10,
                ..rest
            },
        ];
        for write in writes {
            assert!(!rest.rests_until(&write), "{write:?}");
            assert!(!write.rests_until(&rest), "{write:?}");
        }
    }
}
