// SPDX-License-Identifier: Apache-2.0

//! Walks of the guest's page tables, as the processor does them: Intel SDM
//! volume 3, chapter 4.5; AMD APM volume 2, chapter 5.3.
//!
//! The tables are the guest's and may say anything. A walk reads at most five
//! entries, each once; it cannot loop, whatever they point at.

/// The guest's physical memory, as much of it as a page walk needs.
pub trait PhysicalMemory {
    /// Reads the aligned little-endian word at a guest-physical address, in one
    /// access. `None`: there is no memory at that address.
    fn read_u64(&self, address: u64) -> Option<u64>;
}

/// How many levels the guest's page tables have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// 48-bit virtual addresses.
    Four,
    /// 57-bit virtual addresses (CR4.LA57).
    Five,
}

impl Levels {
    fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Five => 5,
        }
    }

    /// Returns whether the bits above the translated ones repeat the highest of them.
    fn is_canonical(self, address: u64) -> bool {
        let shift = 64 - (12 + 9 * self.count());
        (address.cast_signed() << shift >> shift).cast_unsigned() == address
    }
}

/// Why a guest-virtual address has no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// The upper bits are neither all zero nor all one.
    #[error("address {0:#x} is not canonical")]
    NotCanonical(u64),
    /// An entry on the way says: not present.
    #[error("address {address:#x} is not mapped: the level {level} entry is not present")]
    NotPresent {
        /// The guest-virtual address.
        address: u64,
        /// Level of the entry, 1 for the table of 4 KiB pages.
        level: u32,
    },
    /// An entry on the way sets bits that the processor would fault on.
    #[error(
        "address {address:#x} is not mapped: the level {level} entry {entry:#x} sets reserved bits"
    )]
    Reserved {
        /// The guest-virtual address.
        address: u64,
        /// Level of the entry.
        level: u32,
        /// The entry.
        entry: u64,
    },
    /// A page table lies outside the guest's memory.
    #[error(
        "address {address:#x}: the level {level} page table is at {table:#x}, outside the guest's memory"
    )]
    TableOutsideMemory {
        /// The guest-virtual address.
        address: u64,
        /// Level of the table.
        level: u32,
        /// Guest-physical address of the table.
        table: u64,
    },
    /// The range wraps around the end of the address space.
    #[error("{length} bytes at {address:#x} pass the end of the address space")]
    Wraps {
        /// The guest-virtual address.
        address: u64,
        /// Bytes asked for.
        length: usize,
    },
}

const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
/// Bits 51:12. A guest under this monitor never has more physical address bits;
/// bits 62:52 are ignored by the walk, 63 is no-execute.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The mapping of a guest-virtual address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// The guest-physical address.
    pub physical: u64,
    /// Bytes from there to the end of the page, at least 1.
    pub remaining: u64,
}

/// Translates one guest-virtual address.
///
/// `root` is the guest-physical address of the top table, as in CR3; its low
/// twelve bits are ignored. Permissions are not looked at.
///
/// # Errors
/// [`WalkError`] says where the walk ended.
pub fn translate(
    memory: &(impl PhysicalMemory + ?Sized),
    root: u64,
    levels: Levels,
    address: u64,
) -> Result<Mapping, WalkError> {
    if !levels.is_canonical(address) {
        return Err(WalkError::NotCanonical(address));
    }
    let mut table = root & ADDRESS;
    let mut level = levels.count();
    loop {
        let shift = 12 + 9 * (level - 1);
        let index = (address >> shift) & 0x1ff;
        let entry = memory
            .read_u64(table + index * 8)
            .ok_or(WalkError::TableOutsideMemory {
                address,
                level,
                table,
            })?;
        if entry & PRESENT == 0 {
            return Err(WalkError::NotPresent { address, level });
        }
        let large = level > 1 && entry & LARGE != 0;
        if large && level > 3 {
            return Err(WalkError::Reserved {
                address,
                level,
                entry,
            });
        }
        if level == 1 || large {
            let page = 1_u64 << shift;
            // Bit 12 of a large page is its PAT bit; the rest up to the page's size is reserved.
            let base = if large {
                entry & ADDRESS & !(1 << 12)
            } else {
                entry & ADDRESS
            };
            if base & (page - 1) != 0 {
                return Err(WalkError::Reserved {
                    address,
                    level,
                    entry,
                });
            }
            let offset = address & (page - 1);
            return Ok(Mapping {
                physical: base + offset,
                remaining: page - offset,
            });
        }
        table = entry & ADDRESS;
        level -= 1;
    }
}

/// Translates `length` bytes from `address` on and hands each physically
/// contiguous piece to `piece(physical, length)`, in order.
///
/// # Errors
/// The first [`WalkError`] on the way, or the first error of `piece`; the pieces
/// before it have been handed over.
pub fn for_each_piece<E: From<WalkError>>(
    memory: &(impl PhysicalMemory + ?Sized),
    root: u64,
    levels: Levels,
    address: u64,
    length: usize,
    mut piece: impl FnMut(u64, usize) -> Result<(), E>,
) -> Result<(), E> {
    if length > 0 && address.checked_add(length as u64 - 1).is_none() {
        return Err(WalkError::Wraps { address, length }.into());
    }
    let mut done = 0;
    while done < length {
        let mapping = translate(memory, root, levels, address + done as u64)?;
        let here = usize::try_from(mapping.remaining)
            .unwrap_or(usize::MAX)
            .min(length - done);
        piece(mapping.physical, here)?;
        done += here;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
