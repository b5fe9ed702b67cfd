// SPDX-License-Identifier: Apache-2.0

//! Bitmap of the guest pages that the monitor has written.
//!
//! It replaces vm-memory's `AtomicBitmap`, which divides twice per write by a page size that is
//! only known at run time. Here the page size is a constant, because a flip of many keys makes many
//! writes while the guest is stopped.

use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

use crate::memory::PAGE_SIZE;

const PAGE_SHIFT: u32 = PAGE_SIZE.trailing_zeros();
const _: () = assert!(1 << PAGE_SHIFT == PAGE_SIZE);

/// One bit per page. Bits past the end are never set.
#[derive(Debug, Default)]
pub struct DirtyBitmap {
    words: Box<[AtomicU64]>,
}

impl DirtyBitmap {
    /// Returns the word and the bit of a page; `None` past the end.
    #[inline]
    fn bit(&self, page: usize) -> Option<(&AtomicU64, u64)> {
        Some((self.words.get(page / 64)?, 1 << (page % 64)))
    }
}

impl NewBitmap for DirtyBitmap {
    fn with_len(bytes: usize) -> Self {
        let words = bytes.div_ceil(1 << PAGE_SHIFT).div_ceil(64);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for DirtyBitmap {
    #[inline]
    fn mark_dirty(&self, offset: usize, length: usize) {
        let Some(last) = length.checked_sub(1) else {
            return;
        };
        let last = offset.saturating_add(last) >> PAGE_SHIFT;
        for page in offset >> PAGE_SHIFT..=last {
            let Some((word, bit)) = self.bit(page) else {
                return;
            };
            // The bit is written even if it is already set: a collector clears the bits and then
            // reads the pages, so every write must set its bit again.
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.bit(offset >> PAGE_SHIFT)
            .is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 1 << PAGE_SHIFT;

    fn dirty(bitmap: &DirtyBitmap) -> Vec<usize> {
        let dirty = (0..200).filter(|page| bitmap.dirty_at(page * PAGE + 7));
        dirty.collect()
    }

    #[test]
    fn each_page_that_is_touched_is_marked_and_no_other() {
        let bitmap = DirtyBitmap::with_len(100 * PAGE);
        bitmap.mark_dirty(5 * PAGE, 0);
        assert!(dirty(&bitmap).is_empty());
        bitmap.mark_dirty(5 * PAGE, 1);
        bitmap.mark_dirty(8 * PAGE - 1, 1);
        bitmap.mark_dirty(64 * PAGE - 2, 4);
        assert_eq!(dirty(&bitmap), [5, 7, 63, 64]);
        bitmap.mark_dirty(10 * PAGE - 1, 2 * PAGE + 2);
        assert_eq!(dirty(&bitmap), [5, 7, 9, 10, 11, 12, 63, 64]);
    }

    #[test]
    fn slices_share_the_bits_of_the_whole() {
        let bitmap = DirtyBitmap::with_len(100 * PAGE);
        bitmap.slice_at(3 * PAGE).slice_at(PAGE).mark_dirty(PAGE, 4);
        assert_eq!(dirty(&bitmap), [5]);
        assert!(bitmap.slice_at(5 * PAGE).dirty_at(0));
    }

    #[test]
    fn marks_beyond_the_end_are_ignored() {
        let bitmap = DirtyBitmap::with_len(64 * PAGE);
        bitmap.mark_dirty(64 * PAGE, 1);
        bitmap.mark_dirty(usize::MAX - 1, 1000);
        assert!(dirty(&bitmap).is_empty());
        bitmap.mark_dirty(63 * PAGE, usize::MAX);
        assert_eq!(dirty(&bitmap), [63]);
        DirtyBitmap::default().mark_dirty(0, 1);
    }
}
