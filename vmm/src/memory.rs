// SPDX-License-Identifier: Apache-2.0

//! The layout of guest memory, and the monitor's accesses to it.
//!
//! ```text
//!  0 ──────────────── 3 GiB ───────────── 4 GiB ──────────────▶
//!  │ low RAM          │ devices (APIC…)   │ RAM beyond 3 GiB
//! ```
//!
//! Every access goes through volatile slices or pointers, because the guest may write the same
//! bytes at the same time. No Rust reference to guest memory ever exists. Each write of the monitor
//! marks the dirty bitmap.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use patchbay_guest::kernel_memory::Place;
pub use patchbay_guest::memory::Piece;
use patchbay_guest::memory::{Exchanged, Leading, Word};
use patchbay_memory::PhysicalMemory;
pub use patchbay_memory::{OutsideMemory, PAGE_SIZE};
use vm_memory::bitmap::NewBitmap;
use vm_memory::mmap::{FromRangesError, MmapRegionBuilder};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MemoryRegionAddress, VolatileMemory,
};

use crate::dirty::DirtyBitmap;

/// Start of the gap that x86 reserves below 4 GiB for devices (local APIC at 0xfee00000, I/O APIC
/// at 0xfec00000, KVM's TSS pages).
pub const DEVICE_GAP_START: u64 = 3 << 30;

/// End of the device gap, where high memory starts.
pub const DEVICE_GAP_END: u64 = 4 << 30;

/// Minimum size of guest memory in bytes. The boot structures end at 1 MiB, and the smallest Linux
/// kernel needs additional memory.
pub const MEMORY_MIN: u64 = 2 << 20;

/// Maximum size of guest memory in bytes.
pub const MEMORY_MAX: u64 = 1 << 40;

/// Guest memory cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum MemoryError {
    #[error(
        "guest memory of {0} bytes is not possible; use a multiple of 4 KiB from 2 MiB to 1 TiB"
    )]
    Size(u64),
    #[error("the host cannot map {bytes} bytes for the guest ({error}); give the guest less")]
    Map { bytes: u64, error: FromRangesError },
    #[error("the file of the guest's memory cannot be used ({0}); raise the limit on open files")]
    File(std::io::Error),
}

/// Returns whether a guest can have this many bytes of memory.
pub(crate) fn is_possible(bytes: u64) -> bool {
    (MEMORY_MIN..=MEMORY_MAX).contains(&bytes) && bytes.is_multiple_of(PAGE_SIZE)
}

/// Returns the address and the size of each region of a guest's memory.
fn ranges(bytes: u64) -> Result<Vec<(GuestAddress, usize)>, MemoryError> {
    if !is_possible(bytes) {
        return Err(MemoryError::Size(bytes));
    }
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| MemoryError::Size(bytes));
    let low = bytes.min(DEVICE_GAP_START);
    let mut ranges = vec![(GuestAddress(0), size(low)?)];
    if bytes > low {
        ranges.push((GuestAddress(DEVICE_GAP_END), size(bytes - low)?));
    }
    Ok(ranges)
}

/// RAM of a guest. Clones share the memory.
#[derive(Debug, Clone)]
pub struct GuestRam {
    mmap: GuestMemoryMmap<DirtyBitmap>,
}

impl GuestRam {
    /// Maps `bytes` of zeroed memory. The host allocates each page at its first access.
    ///
    /// # Errors
    /// [`MemoryError`] if the size is out of range or the host refuses the mapping.
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        let ranges = ranges(bytes)?;
        let mmap = GuestMemoryMmap::from_ranges(&ranges)
            .map_err(|error| MemoryError::Map { bytes, error })?;
        Ok(Self { mmap })
    }

    /// Maps a file of `bytes` bytes, which has the memory below the device gap and then the memory
    /// above it. The guest's writes are not written to the file, and pages that are not written are
    /// shared with other guests of the file. The file must not be truncated meanwhile.
    ///
    /// # Errors
    /// [`MemoryError`] if the size is out of range or the host refuses the mapping.
    pub fn of_file(bytes: u64, file: &File) -> Result<Self, MemoryError> {
        let refused = |error| MemoryError::Map { bytes, error };
        let mut offset = 0;
        let mut regions = vec![];
        for (address, size) in ranges(bytes)? {
            let file = file.try_clone().map_err(MemoryError::File)?;
            let mapping = MmapRegionBuilder::new_with_bitmap(size, DirtyBitmap::with_len(size))
                .with_file_offset(FileOffset::new(file, offset))
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
                .build()
                .map_err(|error| refused(error.into()))?;
            let region = GuestRegionMmap::new(mapping, address)
                .ok_or_else(|| refused(FromRangesError::InvalidGuestRegion))?;
            regions.push(region);
            offset += size as u64;
        }
        let mmap = GuestMemoryMmap::from_regions(regions).map_err(|error| refused(error.into()))?;
        Ok(Self { mmap })
    }

    /// Returns the vm-memory view, for kernel loaders and memory slots.
    #[must_use]
    pub fn mmap(&self) -> &GuestMemoryMmap<DirtyBitmap> {
        &self.mmap
    }

    /// Returns the size of the memory below the device gap, in bytes.
    #[must_use]
    pub fn low_bytes(&self) -> u64 {
        self.mmap.iter().next().map_or(0, GuestMemoryRegion::len)
    }

    /// Returns the size of the memory at 4 GiB and above, in bytes.
    #[must_use]
    pub fn high_bytes(&self) -> u64 {
        self.mmap.iter().skip(1).map(GuestMemoryRegion::len).sum()
    }

    /// Returns the size of the memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.low_bytes() + self.high_bytes()
    }

    /// Locates `length` bytes at a guest-physical address.
    ///
    /// # Errors
    /// [`OutsideMemory`] unless all bytes lie in one region.
    pub fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        let outside = OutsideMemory { address, length };
        let length32 = u32::try_from(length).map_err(|_| outside)?;
        for (index, region) in self.mmap.iter().enumerate() {
            let Some(offset) = address.checked_sub(region.start_addr().0) else {
                continue;
            };
            let Some(end) = offset.checked_add(length as u64) else {
                continue;
            };
            if end <= region.len() {
                let region = u32::try_from(index).map_err(|_| outside)?;
                return Ok(Piece::new(region, offset, length32));
            }
        }
        Err(outside)
    }

    fn slice(
        &self,
        piece: Piece,
    ) -> Option<vm_memory::VolatileSlice<'_, vm_memory::bitmap::BS<'_, DirtyBitmap>>> {
        let region = self.mmap.iter().nth(piece.region() as usize)?;
        region
            .get_slice(MemoryRegionAddress(piece.offset()), piece.length())
            .ok()
    }

    /// Copies a piece of guest memory into `bytes`, which must be as long as the piece. Returns
    /// false if nothing was read.
    #[must_use]
    #[inline]
    pub fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        bytes.len() == piece.length() && self.copy_out(piece, bytes)
    }

    /// Reads a piece of 1, 2, 4, 5 or 8 bytes as a little-endian number. Returns `None` for another
    /// length, and if nothing was read.
    #[must_use]
    #[inline]
    pub fn load(&self, piece: Piece) -> Option<u64> {
        let (_, first, _) = self.short(piece)?;
        // SAFETY: `short` returns the first byte of the piece, which lies wholly in the mapping.
        unsafe { load(first, piece.length()) }
    }

    /// Copies `bytes` into a piece and marks it dirty. `bytes` must be as long as the piece.
    /// Returns false if nothing was written.
    #[must_use]
    #[inline]
    pub fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        bytes.len() == piece.length() && self.copy_in(piece, bytes)
    }

    /// Returns the region of a short piece (a word or an instruction), the host address of its
    /// first byte, and its offset in the region. Returns `None` for a piece of more than 8 bytes
    /// and for a piece that does not lie wholly in the region. Inlined into its callers, because a
    /// flip makes thousands of these accesses while the guest is stopped.
    #[inline]
    fn short(&self, piece: Piece) -> Option<(&GuestRegionMmap<DirtyBitmap>, *mut u8, usize)> {
        let region = self.mmap.iter().nth(piece.region() as usize)?;
        let end = piece.offset().checked_add(piece.length() as u64)?;
        if piece.length() > 8 || end > region.len() {
            return None;
        }
        let offset = usize::try_from(piece.offset()).ok()?;
        // SAFETY: the offset is within the region's mapping, as was just checked.
        let first = unsafe { region.as_ptr().add(offset) };
        Some((region, first, offset))
    }

    /// Copies a piece of guest memory into `bytes`, which must be as long as the piece.
    #[inline]
    fn copy_out(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        let Some((_, from, _)) = self.short(piece) else {
            let slice = self.slice(piece);
            return slice.is_some_and(|slice| slice.read_slice(bytes, 0).is_ok());
        };
        match bytes.len() {
            // The word is read in a single access, because the guest may write it meanwhile.
            4 if from.cast::<u32>().is_aligned() => {
                // SAFETY: four bytes of the mapping, aligned; no reference to them exists.
                let word = unsafe { from.cast::<u32>().read_volatile() };
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            8 if from.cast::<u64>().is_aligned() => {
                // SAFETY: eight bytes of the mapping, aligned; no reference to them exists.
                let word = unsafe { from.cast::<u64>().read_volatile() };
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            _ => {
                for (index, byte) in bytes.iter_mut().enumerate() {
                    // SAFETY: within the piece, which is within the mapping.
                    let from = unsafe { from.add(index) };
                    // SAFETY: a byte of the mapping; no reference to it exists.
                    *byte = unsafe { from.read_volatile() };
                }
            }
        }
        true
    }

    /// Copies `bytes` into a piece and marks it dirty. `bytes` must be as long as the piece.
    #[inline]
    fn copy_in(&self, piece: Piece, bytes: &[u8]) -> bool {
        use vm_memory::bitmap::Bitmap;
        let Some((region, to, offset)) = self.short(piece) else {
            let slice = self.slice(piece);
            return slice.is_some_and(|slice| slice.write_slice(bytes, 0).is_ok());
        };
        match (<[u8; 4]>::try_from(bytes), to.cast::<u32>().is_aligned()) {
            (Ok(word), true) => {
                // SAFETY: four bytes of the mapping, aligned; no reference to them exists.
                unsafe { to.cast::<u32>().write_volatile(u32::from_ne_bytes(word)) };
            }
            _ => {
                for (index, byte) in bytes.iter().enumerate() {
                    // SAFETY: within the piece, which is within the mapping.
                    let to = unsafe { to.add(index) };
                    // SAFETY: a byte of the mapping; no reference to it exists.
                    unsafe { to.write_volatile(*byte) };
                }
            }
        }
        region.bitmap().mark_dirty(offset, bytes.len());
        true
    }

    /// Atomically replaces `current` by `new` in an aligned piece of four bytes and marks it dirty.
    /// Returns `None` if the piece is not four aligned bytes; otherwise the result of
    /// [`AtomicU32::compare_exchange`].
    #[must_use]
    pub fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        if piece.length() != 4 {
            return None;
        }
        let slice = self.slice(piece)?;
        let word = slice.get_atomic_ref::<AtomicU32>(0).ok()?;
        let result = word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst);
        if result.is_ok() {
            use vm_memory::bitmap::Bitmap;
            slice.bitmap().mark_dirty(0, 4);
        }
        Some(result)
    }

    /// Returns how many words at the start of `words` have their expected value; see
    /// [`patchbay_guest::memory::Ram::leading_unchanged`].
    #[must_use]
    pub fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        let mut mapped = Mapped::NONE;
        for (index, word) in words.iter().enumerate() {
            if !mapped.has(word) {
                mapped = Mapped::of(self, word);
            }
            let Some((first, offset)) = mapped.find(word) else {
                return index;
            };
            // One access serves all lengths: the mask selects the bytes of the word. The access
            // stays in one cache line, because a read of two lines is not atomic, and the second
            // line may be in a page that was never allocated.
            let found = if offset % LINE_BYTES <= LINE_BYTES - 8 {
                // SAFETY: `find` returns the first of eight bytes of the mapping.
                let Unaligned(found) = unsafe { first.cast::<Unaligned<u64>>().read_volatile() };
                Some(found)
            } else {
                // SAFETY: `find` returns the first byte of the word, which lies in the mapping.
                unsafe { load(first, word.length) }
            };
            if found.is_none_or(|found| found & word.mask != word.before) {
                return index;
            }
        }
        words.len()
    }

    /// Writes words from the start of `words`, reads each back, and marks their pages dirty. Stops
    /// at a word that cannot be written; see [`patchbay_guest::memory::Ram::write_leading`].
    #[must_use]
    pub fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        let mut mapped = Mapped::NONE;
        // The page that was written last and is not marked dirty yet. Sites are ordered, so many
        // words lie in one page, which is marked once after the last of them.
        let mut written = None;
        let mut leading = Leading::default();
        for word in words {
            if !mapped.has(word) {
                mark_dirty(mapped.region, written.take());
                mapped = Mapped::of(self, word);
            }
            let Some((first, offset)) = mapped.find(word) else {
                break;
            };
            let page = offset & !(PAGE_BYTES - 1);
            // SAFETY: `find` returns the first of eight bytes of the mapping.
            let found = unsafe { store_and_load(first, word.length, word.after) };
            if written != Some(page) {
                mark_dirty(mapped.region, written.replace(page));
            }
            if offset + word.length > page + PAGE_BYTES {
                mark_dirty(mapped.region, written.replace(page + PAGE_BYTES));
            }
            if found != Some(word.after) {
                leading.differs = found;
                break;
            }
            leading.written += 1;
        }
        mark_dirty(mapped.region, written);
        leading
    }

    /// Copies bytes from a guest-physical address.
    ///
    /// # Errors
    /// [`OutsideMemory`] unless all bytes lie in one region of memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let piece = self.piece(address, bytes.len())?;
        if self.read_piece(piece, bytes) {
            Ok(())
        } else {
            Err(OutsideMemory {
                address,
                length: bytes.len(),
            })
        }
    }

    /// Copies bytes to a guest-physical address and marks them dirty.
    ///
    /// # Errors
    /// [`OutsideMemory`] unless all bytes lie in one region of memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let piece = self.piece(address, bytes.len())?;
        if self.write_piece(piece, bytes) {
            Ok(())
        } else {
            Err(OutsideMemory {
                address,
                length: bytes.len(),
            })
        }
    }

    /// Returns whether the monitor has written the page at `address`.
    #[must_use]
    pub fn is_dirty(&self, address: u64) -> bool {
        use vm_memory::bitmap::Bitmap;
        self.mmap
            .to_region_addr(GuestAddress(address))
            .is_some_and(|(region, offset)| {
                usize::try_from(offset.0).is_ok_and(|offset| region.bitmap().dirty_at(offset))
            })
    }
}

const PAGE_BYTES: usize = 1 << 12;
/// The size of a cache line of x86-64 processors.
const LINE_BYTES: usize = 64;
const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);

/// The region of the word that was accessed last. Consecutive words usually lie in the same region.
#[derive(Clone, Copy)]
struct Mapped<'a> {
    number: u32,
    region: Option<&'a GuestRegionMmap<DirtyBitmap>>,
    /// The first byte of the region.
    start: *mut u8,
    /// The number of offsets at which a word of eight bytes fits into the region.
    limit: u64,
}

impl<'a> Mapped<'a> {
    const NONE: Self = Self {
        number: u32::MAX,
        region: None,
        start: std::ptr::null_mut(),
        limit: 0,
    };

    /// Finds the region of a word.
    #[cold]
    fn of(ram: &'a GuestRam, word: &Word<Place>) -> Self {
        let number = word.place.first().region();
        let region = ram.mmap.iter().nth(number as usize);
        region.map_or(Self::NONE, |region| Self {
            number,
            region: Some(region),
            start: region.as_ptr(),
            limit: region.len().saturating_sub(7),
        })
    }

    #[inline]
    fn has(self, word: &Word<Place>) -> bool {
        word.place.first().region() == self.number
    }

    /// Returns the host address and the offset of the first byte of a word of at most eight bytes.
    /// The caller has checked with [`has`](Self::has) that the word lies in this region. Returns
    /// `None` without a region, for a word that is not wholly in one piece, and for a word that
    /// begins in the last seven bytes of the region.
    #[inline]
    fn find(self, word: &Word<Place>) -> Option<(*mut u8, usize)> {
        let piece = word.place.first();
        let is_whole = word.length <= 8 && word.length <= piece.length();
        if !is_whole || piece.offset() >= self.limit {
            return None;
        }
        let offset = usize::try_from(piece.offset()).ok()?;
        // SAFETY: eight bytes from the offset on are within the region's mapping, as was just
        // checked.
        let first = unsafe { self.start.add(offset) };
        Some((first, offset))
    }
}

#[cold]
fn mark_dirty(region: Option<&GuestRegionMmap<DirtyBitmap>>, page: Option<usize>) {
    use vm_memory::bitmap::Bitmap;
    if let (Some(region), Some(page)) = (region, page) {
        region.bitmap().mark_dirty(page, 1);
    }
}

/// A number that need not be aligned.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

/// Reads a word of 1, 2, 4, 5 or 8 bytes as a little-endian number. Returns `None` for another
/// length. The compiler reads each number in one instruction, so an aligned word is read in a
/// single access, except that 5 bytes are read as 4 and 1.
///
/// # Safety
/// `first` is the first of `length` bytes that are mapped and may be read. No Rust reference to
/// them exists. The guest may write them meanwhile, hence the volatile accesses.
#[inline]
unsafe fn load(first: *mut u8, length: usize) -> Option<u64> {
    Some(match length {
        5 => {
            // SAFETY: the caller vouches for five bytes, of which this accesses the first four.
            let Unaligned(low) = unsafe { first.cast::<Unaligned<u32>>().read_volatile() };
            // SAFETY: the fifth of the caller's bytes is within the same mapping.
            let high = unsafe { first.add(4) };
            // SAFETY: this is the fifth of the caller's bytes.
            let high = unsafe { high.read_volatile() };
            u64::from(low) | u64::from(high) << 32
        }
        4 => {
            // SAFETY: the caller vouches for four bytes, and this accesses no more.
            let Unaligned(word) = unsafe { first.cast::<Unaligned<u32>>().read_volatile() };
            word.into()
        }
        8 => {
            // SAFETY: the caller vouches for eight bytes, and this accesses no more.
            let Unaligned(word) = unsafe { first.cast::<Unaligned<u64>>().read_volatile() };
            word
        }
        2 => {
            // SAFETY: the caller vouches for two bytes, and this accesses no more.
            let Unaligned(word) = unsafe { first.cast::<Unaligned<u16>>().read_volatile() };
            word.into()
        }
        // SAFETY: the caller vouches for one byte.
        1 => unsafe { first.read_volatile() }.into(),
        _ => return None,
    })
}

/// Writes the first 2, 4 or 5 bytes of a little-endian number and reads them back. Returns `None`
/// for another length. An aligned word of 2 or 4 bytes is written in a single access; 5 bytes are
/// written as 4 and 1.
///
/// # Safety
/// `first` is the first of eight bytes that are mapped and may be read and written. No Rust
/// reference to them exists. The guest may write them meanwhile, hence the volatile accesses.
#[inline]
unsafe fn store_and_load(first: *mut u8, length: usize, value: u64) -> Option<u64> {
    let [a, b, c, d, e, ..] = value.to_le_bytes();
    let low = Unaligned(u32::from_le_bytes([a, b, c, d]));
    match length {
        5 => {
            // SAFETY: the caller vouches for eight bytes, of which this accesses the first four.
            unsafe { first.cast::<Unaligned<u32>>().write_volatile(low) };
            // SAFETY: the fifth of the caller's eight bytes is within the same mapping.
            let high = unsafe { first.add(4) };
            // SAFETY: this is the fifth of the caller's eight bytes.
            unsafe { high.write_volatile(e) };
            // SAFETY: the caller vouches for eight bytes.
            unsafe { load(first, 5) }
        }
        4 => {
            // SAFETY: the caller vouches for eight bytes, and this accesses no more.
            unsafe { first.cast::<Unaligned<u32>>().write_volatile(low) };
            // SAFETY: the caller vouches for eight bytes.
            unsafe { load(first, 4) }
        }
        2 => {
            let word = Unaligned(u16::from_le_bytes([a, b]));
            // SAFETY: the caller vouches for eight bytes, and this accesses no more.
            unsafe { first.cast::<Unaligned<u16>>().write_volatile(word) };
            // SAFETY: the caller vouches for eight bytes.
            unsafe { load(first, 2) }
        }
        _ => None,
    }
}

impl PhysicalMemory for GuestRam {
    fn ram(&self) -> Vec<Range<u64>> {
        let low = 0..self.low_bytes();
        let high = DEVICE_GAP_END..DEVICE_GAP_END + self.high_bytes();
        let ranges = [low, high].into_iter();
        ranges.filter(|range| !range.is_empty()).collect()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        self.read(address, bytes)
    }

    fn read_u64(&self, address: u64) -> Option<u64> {
        self.mmap
            .load(GuestAddress(address), Ordering::Acquire)
            .ok()
    }
}

#[cfg(test)]
mod tests;
