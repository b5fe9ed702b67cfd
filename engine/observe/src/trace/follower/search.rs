// SPDX-License-Identifier: Apache-2.0
//! Finds the next events after a lost position, and counts the events in between as lost.

use super::{Batch, Cursor, Follower};
use crate::KernelView;
use crate::trace::page::Events;
use crate::trace::ring::{Head, Header, Oldest, Pages};

impl Follower {
    /// Finds the oldest events after a lost position. If the writer moves them meanwhile, the
    /// position stays.
    pub(super) fn search(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        steps: &mut usize,
        batch: &mut Batch,
    ) {
        let Some(cursor) = self.cursor else {
            return;
        };
        match pages.head(header.reader) {
            Some(reader)
                if header.reader == cursor.page
                    && cursor.is_in(&reader)
                    && reader.length > cursor.offset =>
            {
                // Only the padding after the unread events was cut.
                return;
            }
            // The reader page is older than the circle. Its events were read before, unless it is
            // later than the position. With a coarse clock, equal times do not tell; then it is
            // skipped.
            Some(reader)
                if reader.length > 0
                    && reader.identity.stamp > cursor.time
                    && pages.is_still(header.reader, &reader) =>
            {
                self.continue_at(Cursor::start_of(header.reader, &reader));
                self.lose_before(pages, header, true, batch);
                return;
            }
            _ => {}
        }
        let Some((page, head)) = oldest(pages, header, steps) else {
            return;
        };
        let floor = cursor.identity.map_or(cursor.time, |of| of.stamp);
        if head.length == 0 {
            // The circle is empty. If the writer stands on the reader page, its content is not
            // that of the position, and therefore is later.
            self.continue_at(Cursor::waiting(header.commit_page, cursor.time));
        } else if page == cursor.page && cursor.is_in(&head) {
            // Only the memory of the next page could not be read for a moment.
        } else if head.identity.stamp < floor {
            // The oldest page was read before, so the position was not overwritten: its memory
            // could not be read for a moment, or the guest has changed the clock.
            *self = self.replaced(self.ring);
            batch.restarted = true;
        } else {
            self.continue_at(Cursor::start_of(page, &head));
            self.lose_before(pages, header, false, batch);
        }
    }

    fn continue_at(&mut self, cursor: Cursor) {
        self.cursor = Some(cursor);
        self.corrects_base = false;
    }

    /// Reports the events before a new position as lost, if the guest does not change their number
    /// meanwhile. Otherwise they are reported later. A reader that is slower than the writer never
    /// finds the writer at rest, but it finds new positions again and again.
    fn lose_before(
        &mut self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        is_reader: bool,
        batch: &mut Batch,
    ) {
        if let Some(count) = self.before(pages, header, is_reader) {
            self.lose_until(count, batch);
        }
    }

    /// Returns the number of events before the first one of the reader page, or of the oldest page
    /// of the circle.
    ///
    /// `overrun` counts the events of a page before the head is moved from it, so the head that was
    /// found is still the oldest page if `overrun` is the same before and after. If an interrupt
    /// has moved the head ([`Pages::oldest`]), the number may be too small by the events of a page.
    /// They are in the next number, so they are reported later.
    fn before(
        &self,
        pages: &Pages<'_, impl KernelView + ?Sized>,
        header: &Header,
        is_reader: bool,
    ) -> Option<u64> {
        let reader = pages.head(header.reader)?;
        let bytes = pages.bytes(&reader, 0)?;
        let again = pages.head(header.reader)?;
        let now = pages.header(self.ring)?;
        // The content of the reader page cannot be replaced before its events are taken, so it need
        // not be compared.
        let extent = |of: &Head| (of.consumed, of.length);
        if extent(&reader) != extent(&again) || header.taken() != now.taken() {
            return None;
        }
        let consumed = count(&bytes[..reader.consumed.min(bytes.len())])?;
        Some(match is_reader {
            // Events that were overwritten after it was taken from the circle come after it.
            true => header
                .last_overrun
                .wrapping_add(header.read)
                .checked_sub(consumed)?,
            false => {
                let unread = count(&bytes)?.checked_sub(consumed)?;
                let taken = header.overrun.wrapping_add(header.read);
                taken.wrapping_add(unread)
            }
        })
    }
}

impl Cursor {
    /// Returns whether a page has the content in which this position is.
    fn is_in(&self, head: &Head) -> bool {
        let is_same = |identity: &super::Identity| identity.is_same(&head.identity);
        self.identity.as_ref().is_some_and(is_same) && head.length >= self.offset
    }
}

/// Returns the number of events; `None` if they contradict themselves.
fn count(bytes: &[u8]) -> Option<u64> {
    let mut count = 0;
    for event in Events::new(0, bytes) {
        event.ok()?;
        count += 1;
    }
    Some(count)
}

/// Returns the oldest page of the circle with a copy of its headers. Returns `None` if the writer
/// moves the head meanwhile.
pub(super) fn oldest(
    pages: &Pages<'_, impl KernelView + ?Sized>,
    header: &Header,
    steps: &mut usize,
) -> Option<(u64, Head)> {
    let Oldest::Page { page, before } = pages.oldest(header, steps) else {
        return None;
    };
    let head = pages.head(page)?;
    let is_whole = pages.is_still(page, &head) && pages.is_oldest(page, before);
    is_whole.then_some((page, head))
}

#[cfg(test)]
mod tests;
