// SPDX-License-Identifier: Apache-2.0
//! Access to guest memory: one small trait, and typed reads through it.

/// The maximum length of a range passed to [`GuestMemory::locate`], in bytes.
pub const LOCATE_MAX: usize = 64;

/// A guest-virtual range is not backed by guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest address {address:#x} is not backed by guest memory: {reason}")]
pub struct Unmapped {
    /// Guest-virtual address.
    pub address: u64,
    /// The reason why the page walk failed.
    pub reason: &'static str,
}

/// Located guest memory could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest memory refused the access")]
pub struct AccessFault;

/// A read by guest-virtual address failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The translation failed.
    #[error(transparent)]
    Unmapped(#[from] Unmapped),
    /// The access failed.
    #[error(transparent)]
    Fault(#[from] AccessFault),
}

/// The result of a compare-and-exchange. `Ok` holds the previous value. `Err` holds the value that
/// was found instead of the expected one; the word is then unchanged.
pub type Exchanged = Result<u32, u32>;

/// One to eight bytes of located memory as a little-endian number, with the value that a change
/// expects there and the value that it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word<P> {
    /// The located range. It starts with these bytes and may be longer.
    pub place: P,
    /// The number of bytes.
    pub length: usize,
    /// The bits that are compared, all of them within the first `length` bytes.
    pub mask: u64,
    /// The expected value of the compared bits.
    pub before: u64,
    /// The value that is written to all bytes.
    pub after: u64,
}

impl<P> Word<P> {
    /// Returns a word of at most eight bytes of which all bits are compared.
    pub(crate) fn new(place: P, length: usize, before: u64, after: u64) -> Self {
        let unused = 64_usize.saturating_sub(8 * length);
        Self {
            place,
            length,
            mask: u64::MAX
                .checked_shr(u32::try_from(unused).unwrap_or(64))
                .unwrap_or(0),
            before,
            after,
        }
    }
}

/// The result of [`GuestMemory::write_leading`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leading {
    /// The number of words at the start that were written and have read back as written.
    pub written: usize,
    /// The value read back from the next word, if that word was written and did not read back as
    /// written.
    pub differs: Option<u64>,
    /// The number of words at the start that may have been written before the first of them was
    /// read back. May be 0 if each word is read back before the next one is written.
    pub touched: usize,
}

/// Guest memory, addressed by guest-virtual addresses of the guest's kernel.
///
/// Translation and access are separate, because the page tables are walked before the vCPUs are
/// stopped, and the memory is accessed afterwards. The methods take `&self`, because the guest
/// shares the memory.
pub trait GuestMemory {
    /// A translated range. It may straddle two pages that are not adjacent in guest-physical
    /// memory.
    type Place: Copy;

    /// Translates `len` bytes (at most [`LOCATE_MAX`]) from `address` on with the kernel's own page
    /// table.
    ///
    /// # Errors
    /// [`Unmapped`] if any byte is not present, is not RAM, or lies past the end of the address
    /// space.
    fn locate(&self, address: u64, len: usize) -> Result<Self::Place, Unmapped>;

    /// Reads the first `bytes.len()` bytes of `place`, which must not be more than were located.
    ///
    /// # Errors
    /// [`AccessFault`].
    fn read(&self, place: Self::Place, bytes: &mut [u8]) -> Result<(), AccessFault>;

    /// Reads the first `length` bytes of `place`, at most eight, as a little-endian number. An
    /// implementation may override this with a faster read.
    ///
    /// # Errors
    /// [`AccessFault`].
    fn load(&self, place: Self::Place, length: usize) -> Result<u64, AccessFault> {
        let mut bytes = [0; 8];
        self.read(place, &mut bytes[..length])?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes the first `bytes.len()` bytes of `place` and marks them dirty.
    ///
    /// # Errors
    /// [`AccessFault`]; some of the bytes may have been written.
    fn write(&self, place: Self::Place, bytes: &[u8]) -> Result<(), AccessFault>;

    /// Returns whether no vCPU can see a partial write of the first `length` bytes of `place`, even
    /// if this process is killed during the write. This is always the case if the guest ends with
    /// this process.
    fn writes_whole(&self, place: Self::Place, length: usize) -> bool;

    /// Compares and exchanges the aligned 32-bit word at `place` with sequential consistency, and
    /// marks it dirty on success.
    ///
    /// # Errors
    /// [`AccessFault`], also if the place is not aligned.
    fn compare_exchange_u32(
        &self,
        place: Self::Place,
        current: u32,
        new: u32,
    ) -> Result<Exchanged, AccessFault>;

    /// Returns the number of leading `words` that still have their `before` value. May return a
    /// smaller number: the caller then reads the next word itself and continues after it. An
    /// implementation may override this to check many words at once.
    fn leading_unchanged(&self, words: &[Word<Self::Place>]) -> usize {
        let _ = words;
        0
    }

    /// Writes leading `words` in order and reads each back. Stops at a word that reads back as
    /// another value. May also stop earlier: the caller then writes the next word itself and
    /// continues after it. Each word is written as by [`GuestMemory::write`]. An instruction is
    /// written atomically in the sense of [`GuestMemory::writes_whole`], or in steps
    /// ([`replace`](crate::instruction::replace)).
    fn write_leading(&self, words: &[Word<Self::Place>]) -> Leading {
        let _ = words;
        Leading::default()
    }

    /// Reads a range of any length. An implementation may override this loop with a faster one.
    ///
    /// # Errors
    /// [`ReadError`].
    fn read_gva(&self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let mut next = Some(address);
        for piece in bytes.chunks_mut(LOCATE_MAX) {
            let at = next.ok_or(Unmapped {
                address,
                reason: "the range passes the end of the address space",
            })?;
            self.read(self.locate(at, piece.len())?, piece)?;
            next = at.checked_add(piece.len() as u64);
        }
        Ok(())
    }
}

/// Width of a word of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U8,
    U16,
    U32,
    U64,
}

impl Width {
    pub(crate) const fn of(bytes: u8) -> Option<Self> {
        match bytes {
            1 => Some(Self::U8),
            2 => Some(Self::U16),
            4 => Some(Self::U32),
            8 => Some(Self::U64),
            _ => None,
        }
    }

    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
            Self::U64 => 8,
        }
    }

    /// Returns the mask of all bits of a word.
    pub(crate) const fn mask(self) -> u64 {
        u64::MAX >> (64 - 8 * self.bytes())
    }
}

/// Returns the index and the value of the first word that does not have its `before` value.
pub(crate) fn first_changed<M: GuestMemory>(
    memory: &M,
    words: &[Word<M::Place>],
) -> Result<Option<(usize, u64)>, AccessFault> {
    let mut index = 0;
    while let Some(rest) = words.get(index..) {
        index += memory.leading_unchanged(rest);
        let Some(word) = words.get(index) else { break };
        let found = memory.load(word.place, word.length)?;
        if found & word.mask != word.before {
            return Ok(Some((index, found)));
        }
        index += 1;
    }
    Ok(None)
}

/// Locates and reads a word.
pub(crate) fn read_word_at<M: GuestMemory>(
    memory: &M,
    address: u64,
    width: Width,
) -> Result<u64, ReadError> {
    let place = memory.locate(address, width.bytes())?;
    Ok(memory.load(place, width.bytes())?)
}

/// Reads an `atomic_t`.
pub(crate) fn read_count<M: GuestMemory>(memory: &M, place: M::Place) -> Result<i32, AccessFault> {
    let count = memory.load(place, Width::U32.bytes())?;
    Ok(i32::from_le_bytes(first_bytes(count)))
}

/// Returns the first bytes of a little-endian number.
pub(crate) fn first_bytes<const N: usize>(number: u64) -> [u8; N] {
    let bytes = number.to_le_bytes();
    std::array::from_fn(|index| bytes[index])
}
