// SPDX-License-Identifier: Apache-2.0
//! A guest's physical memory and the registers of its vCPUs, as the readers of its kernel use them.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod cpu;
pub mod paging;

use std::ops::Range;

pub use cpu::Cpu;

/// Size of a page of guest memory and of a page table, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// An access outside the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest-physical {address:#x}, {length} bytes, is not in the guest's memory")]
pub struct OutsideMemory {
    /// Guest-physical address of the first byte.
    pub address: u64,
    /// Length of the access in bytes.
    pub length: usize,
}

/// The guest-physical memory of a guest, running or stopped. A running guest may change it at any
/// time, so a caller reads each number once and then uses the copy.
pub trait PhysicalMemory {
    /// Returns the ranges of RAM, sorted and not overlapping. Ranges that the guest has never
    /// written may be left out.
    fn ram(&self) -> Vec<Range<u64>>;

    /// Copies `bytes.len()` bytes from a guest-physical address on. The guest may change them
    /// meanwhile, so the copy may mix old and new bytes.
    ///
    /// # Errors
    /// [`OutsideMemory`] if any of the bytes is not in RAM, or if they lie in ranges that are not
    /// adjacent on the host. The content of `bytes` is unspecified then.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory>;

    /// Reads the little-endian word at an address. Returns `None` if the address is not aligned or
    /// not in RAM. Page walks use this method. Memory that is mapped is read in one access.
    fn read_u64(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        let aligned = address.is_multiple_of(8);
        (aligned && self.read(address, &mut word).is_ok()).then(|| u64::from_le_bytes(word))
    }
}
