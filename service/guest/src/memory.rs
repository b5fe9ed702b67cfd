// SPDX-License-Identifier: Apache-2.0
//! The guest's physical memory, as the service reads and writes it.

use std::fmt::Debug;
use std::sync::Arc;

use patchbay_memory::{OutsideMemory, PhysicalMemory};
pub use static_keys::{Exchanged, Leading, Word};

use crate::kernel_memory::Place;

/// A run of bytes that lies in one region of guest memory. [`Ram::piece`] translates the address
/// once, and later accesses need no translation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Piece {
    region: u32,
    length: u32,
    offset: u64,
}

impl Piece {
    /// Creates a piece of `length` bytes from `offset` on in a region. Region numbers are private
    /// to the [`Ram`] that issued them.
    #[must_use]
    #[inline]
    pub fn new(region: u32, offset: u64, length: u32) -> Self {
        Self {
            region,
            length,
            offset,
        }
    }

    /// Returns the region.
    #[must_use]
    #[inline]
    pub fn region(self) -> u32 {
        self.region
    }

    /// Returns the offset of the first byte in the region.
    #[must_use]
    #[inline]
    pub fn offset(self) -> u64 {
        self.offset
    }

    /// The empty piece.
    pub const NONE: Self = Self {
        region: 0,
        length: 0,
        offset: 0,
    };

    /// Returns the part of the piece from `offset` on, of at most `length` bytes.
    #[must_use]
    #[inline]
    pub fn part(self, offset: usize, length: usize) -> Self {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX).min(self.length);
        let rest = Self {
            length: self.length - offset,
            offset: self.offset + u64::from(offset),
            ..self
        };
        rest.prefix(length)
    }

    /// Returns the number of bytes in the piece.
    #[must_use]
    #[inline]
    pub fn length(self) -> usize {
        self.length as usize
    }

    /// Returns the first `length` bytes of the piece, or the whole piece if it is shorter.
    #[must_use]
    #[inline]
    pub fn prefix(self, length: usize) -> Self {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        Self {
            length: self.length.min(length),
            ..self
        }
    }
}

/// The guest's physical memory, shared with a guest that may run meanwhile.
///
/// The guest is hostile, and its vCPUs write while the service reads. An implementation must
/// therefore never hold a Rust reference to guest memory. The service reads each number once and
/// uses only its copy.
///
/// **Stopped guest.** `read_piece`, `load`, `write_piece`, `writes_whole`, `compare_exchange_u32`,
/// `leading_unchanged` and `write_leading` are also called while the guest is stopped. They do not
/// allocate, log, sleep or take a lock that another thread may hold. For a piece of at most 8
/// bytes, an access to mapped memory takes nanoseconds and no system call. An access to the memory
/// of another process takes one system call.
///
/// **Dirty tracking.** Each write and each successful exchange marks its pages dirty after the
/// bytes are written and before the method returns, also while migration or a snapshot runs. A page
/// that was not written may be marked, but a page that was written is always marked. Reads and
/// failed exchanges mark nothing.
///
/// **Stable pieces.** While the object exists, a [`Piece`] always refers to the same memory. Its
/// accesses fail once that memory has been removed from the guest, and may fail after any other
/// change of the guest's memory layout. The layout does not change while the service holds the
/// guest stopped, but an implementation may detect an earlier removal only during the stop. Regions
/// begin and end at multiples of [`patchbay_memory::PAGE_SIZE`].
pub trait Ram: PhysicalMemory + Debug + Send + Sync {
    /// Locates `length` bytes at a guest-physical address. Callers may pass any values.
    ///
    /// # Errors
    /// [`OutsideMemory`] unless all bytes lie in one region, in memory that guests may write: never
    /// in ROM or in a device.
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory>;

    /// Copies the piece into `bytes`. An aligned word of 4 or 8 bytes is read in one access.
    /// Returns false, with `bytes` unspecified, if `bytes` is not as long as the piece or the
    /// access failed.
    #[must_use]
    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool;

    /// Reads a piece of 1, 2, 4, 5 or 8 bytes as a little-endian number, as by
    /// [`Ram::read_piece`]. Returns `None` if the access failed; may do so for another length. An
    /// implementation for mapped memory overrides this method, so that a word costs a few
    /// instructions.
    #[must_use]
    fn load(&self, piece: Piece) -> Option<u64> {
        let mut bytes = [0; 8];
        let read = self.read_piece(piece, bytes.get_mut(..piece.length())?);
        read.then_some(u64::from_le_bytes(bytes))
    }

    /// Copies `bytes` into the piece. An aligned word of 4 bytes is written in one access. During a
    /// write of another length, a running vCPU may see a partial write. Returns false, with nothing
    /// written, if `bytes` is not as long as the piece. Also returns false if the access failed;
    /// any part of the piece may then have been written.
    #[must_use]
    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool;

    /// Returns whether a write of this piece, which lies in one page, is atomic even if this
    /// process is killed during the write. This is the case for memory whose guest ends with this
    /// process. An instruction that cannot be written atomically is replaced byte by byte
    /// ([`static_keys::instruction::replace`]).
    fn writes_whole(&self, piece: Piece) -> bool;

    /// Atomically replaces `current` by `new`, as `lock cmpxchg` of a vCPU would, while vCPUs run.
    /// Returns `None`, with nothing written, if the piece is not four aligned bytes, if the memory
    /// [cannot](Ram::can_exchange) exchange, or if the access failed. Otherwise returns the same as
    /// [`std::sync::atomic::AtomicU32::compare_exchange`].
    #[must_use]
    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged>;

    /// Returns how many words at the start of `words` still have their expected value. The number
    /// may be too low, but never too high. The service checks the next word by [`Ram::read_piece`]
    /// and continues after it. An implementation for mapped memory overrides this method, so that a
    /// word costs a few instructions. Each word is read as by `read_piece`.
    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        let _ = words;
        0
    }

    /// Writes words from the start of `words` in their order, each as by [`Ram::write_piece`], and
    /// reads each back. Stops at the first word that was not written completely or that reads back
    /// as another value; [`Leading::touched`] tells if later words were written before it was read
    /// back. Stops before an instruction that it can write neither atomically in the sense of
    /// [`Ram::writes_whole`] nor in steps ([`static_keys::instruction::replace`]), and may stop
    /// earlier. Unless a word differs, the service writes the next word by `write_piece` and
    /// continues after it.
    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        let _ = words;
        Leading::default()
    }

    /// Returns whether [`Ram::compare_exchange_u32`] works. If it does not, the service stops the
    /// guest even for a change that writes only counts.
    fn can_exchange(&self) -> bool {
        true
    }

    /// Copies bytes to a guest-physical address.
    ///
    /// # Errors
    /// See [`Ram::piece`].
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let piece = self.piece(address, bytes.len())?;
        let outside = OutsideMemory {
            address,
            length: bytes.len(),
        };
        self.write_piece(piece, bytes).then_some(()).ok_or(outside)
    }

    /// Returns whether the page at `address` is marked dirty; false outside memory.
    fn is_dirty(&self, address: u64) -> bool;
}

/// A shared handle to the guest's memory.
pub type GuestRam = Arc<dyn Ram>;
