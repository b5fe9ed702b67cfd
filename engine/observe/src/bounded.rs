// SPDX-License-Identifier: Apache-2.0
//! A limit on the reads that a guest can cause.

use std::cell::Cell;

use crate::KernelView;

/// A view that refuses all reads after a number of reads or of bytes. A reader that checks
/// [`Self::is_exhausted`] after a failed read therefore ends, regardless of what the guest's
/// pointers and lengths are.
#[derive(Debug)]
pub struct Bounded<'a, V: ?Sized> {
    view: &'a V,
    reads: Cell<usize>,
    bytes: Cell<usize>,
    is_exhausted: Cell<bool>,
}

impl<'a, V: KernelView + ?Sized> Bounded<'a, V> {
    /// Permits this many reads, and this many bytes in them.
    pub fn new(view: &'a V, reads: usize, bytes: usize) -> Self {
        Self {
            view,
            reads: Cell::new(reads),
            bytes: Cell::new(bytes),
            is_exhausted: Cell::new(false),
        }
    }

    /// Returns whether a read was refused.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.is_exhausted.get()
    }
}

impl<V: KernelView + ?Sized> KernelView for Bounded<'_, V> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let reads = self.reads.get().checked_sub(1);
        let left = self.bytes.get().checked_sub(bytes.len());
        let (Some(reads), Some(left), false) = (reads, left, self.is_exhausted()) else {
            self.is_exhausted.set(true);
            return false;
        };
        self.reads.set(reads);
        self.bytes.set(left);
        self.view.read(address, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Zeros;

    impl KernelView for Zeros {
        fn read(&self, _: u64, bytes: &mut [u8]) -> bool {
            bytes.fill(0);
            true
        }
    }

    #[test]
    fn reads_beyond_either_limit_are_refused() {
        let few = Bounded::new(&Zeros, 2, 100);
        assert!(few.read(0, &mut [0; 8]) && few.read(0, &mut [0; 8]));
        assert!(!few.is_exhausted());
        assert!(!few.read(0, &mut [0; 8]) && few.is_exhausted());
        let short = Bounded::new(&Zeros, 100, 10);
        assert!(short.read(0, &mut [0; 8]) && !short.read(0, &mut [0; 8]));
        assert!(!short.read(0, &mut [0; 1]), "it stays exhausted");
    }
}
