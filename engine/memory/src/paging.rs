// SPDX-License-Identifier: Apache-2.0
//! Walks of the guest's page tables as the processor does them (Intel SDM volume 3, chapter 4.5;
//! AMD APM volume 2, chapter 5.3).
//!
//! The tables are not trusted. A walk reads at most five entries, each once, regardless of what
//! they point to. A list of runs reads a table as often as the processor would, and has a maximum
//! length.

use std::ops::Range;

use crate::{PAGE_SIZE, PhysicalMemory};

/// The maximum number of runs in a list. A kernel image has about twenty, even without large pages.
const MAX_RUNS: usize = 1024;
/// Size of the range that an entry of a level-3 table maps, in bytes.
const GIBIBYTE: u64 = 1 << 30;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// The PAT bit of an entry that maps a large page, within the bits of the address.
const LARGE_PAT: u64 = 1 << 12;
/// Bits 51:12 of an entry or of CR3, the physical address. Bits 62:52 are ignored by the walk.
pub(crate) const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The number of levels of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Levels {
    /// 48-bit virtual addresses.
    Four,
    /// 57-bit virtual addresses (CR4.LA57).
    Five,
}

impl Levels {
    /// Returns five levels if CR4.LA57 is set, and four otherwise.
    #[must_use]
    pub fn of(la57: bool) -> Self {
        match la57 {
            true => Self::Five,
            false => Self::Four,
        }
    }

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

/// The reason why a guest-virtual address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WalkError {
    /// The upper bits are neither all zero nor all one.
    #[error("address {0:#x} is not canonical")]
    NotCanonical(u64),
    /// An entry is not present.
    #[error("address {address:#x} is not mapped: the level {level} entry is not present")]
    NotPresent {
        /// The guest-virtual address.
        address: u64,
        /// Level of the entry, 1 for the table of 4 KiB pages.
        level: u32,
    },
    /// An entry sets bits that make the processor fault.
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
        /// Length of the range in bytes.
        length: usize,
    },
}

/// The root of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable {
    /// Guest-physical address of the top table, as in CR3. Its low twelve bits are ignored.
    pub root: u64,
    /// The number of levels.
    pub levels: Levels,
}

/// The mapping of a guest-virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The guest-physical address.
    pub physical: u64,
    /// Number of bytes from this address to the end of the page, at least 1.
    pub remaining: u64,
    /// Every level permits writes.
    pub writable: bool,
    /// No level forbids execution.
    pub executable: bool,
}

/// Virtually and physically contiguous pages with the same permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Virtual addresses of the run.
    pub range: Range<u64>,
    /// Guest-physical address of its first byte.
    pub physical: u64,
    /// See [`Mapping::writable`].
    pub writable: bool,
    /// See [`Mapping::executable`].
    pub executable: bool,
}

impl Run {
    /// Returns whether the run is neither writable nor executable.
    #[must_use]
    pub fn is_constant(&self) -> bool {
        !self.writable && !self.executable
    }
}

/// The permissions that the levels above grant.
#[derive(Clone, Copy)]
struct Permissions {
    writable: bool,
    executable: bool,
}

impl Permissions {
    const ALL: Self = Self {
        writable: true,
        executable: true,
    };

    fn and(self, entry: u64) -> Self {
        Self {
            writable: self.writable && entry & WRITABLE != 0,
            executable: self.executable && entry & NO_EXECUTE == 0,
        }
    }
}

impl PageTable {
    /// Translates one guest-virtual address.
    ///
    /// # Errors
    /// [`WalkError`] names the entry at which the walk ended.
    pub fn translate(
        self,
        memory: &(impl PhysicalMemory + ?Sized),
        address: u64,
    ) -> Result<Mapping, WalkError> {
        if !self.levels.is_canonical(address) {
            return Err(WalkError::NotCanonical(address));
        }
        let mut table = self.root & ADDRESS;
        let mut level = self.levels.count();
        let mut permissions = Permissions::ALL;
        loop {
            let shift = 12 + 9 * (level - 1);
            let index = (address >> shift) & 0x1ff;
            let entry =
                memory
                    .read_u64(table + index * 8)
                    .ok_or(WalkError::TableOutsideMemory {
                        address,
                        level,
                        table,
                    })?;
            if entry & PRESENT == 0 {
                return Err(WalkError::NotPresent { address, level });
            }
            permissions = permissions.and(entry);
            let large = level > 1 && entry & LARGE != 0;
            let reserved = WalkError::Reserved {
                address,
                level,
                entry,
            };
            if large && level > 3 {
                return Err(reserved);
            }
            if level == 1 || large {
                let page = 1_u64 << shift;
                let base = match large {
                    true => large_page(entry, page).ok_or(reserved)?,
                    false => entry & ADDRESS,
                };
                let offset = address & (page - 1);
                return Ok(Mapping {
                    physical: base + offset,
                    remaining: page - offset,
                    writable: permissions.writable,
                    executable: permissions.executable,
                });
            }
            table = entry & ADDRESS;
            level -= 1;
        }
    }

    /// Translates `length` bytes from `address` on and passes each physically contiguous piece to
    /// `piece(physical, length)`, in order.
    ///
    /// # Errors
    /// The first [`WalkError`], or the first error of `piece`. The pieces before it have been
    /// passed.
    pub fn for_each_piece<E: From<WalkError>>(
        self,
        memory: &(impl PhysicalMemory + ?Sized),
        address: u64,
        length: usize,
        mut piece: impl FnMut(u64, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        if length > 0 && address.checked_add(length as u64 - 1).is_none() {
            return Err(WalkError::Wraps { address, length }.into());
        }
        let mut done = 0;
        while done < length {
            let mapping = self.translate(memory, address + done as u64)?;
            let here = usize::try_from(mapping.remaining)
                .unwrap_or(usize::MAX)
                .min(length - done);
            piece(mapping.physical, here)?;
            done += here;
        }
        Ok(())
    }

    /// Returns the runs in the GiB that begins at `start`, a canonical address and a multiple of
    /// 1 GiB. Returns `None` if there are more than 1024 runs, if a table is not in RAM, if an
    /// entry sets reserved bits, or if a run ends at the end of the address space.
    pub fn runs_of_gibibyte(
        self,
        memory: &(impl PhysicalMemory + ?Sized),
        start: u64,
    ) -> Option<Vec<Run>> {
        let mut table = self.root & ADDRESS;
        let mut permissions = Permissions::ALL;
        let mut runs = Runs::default();
        for level in (3..=self.levels.count()).rev() {
            let shift = 12 + 9 * (level - 1);
            let entry = memory.read_u64(table + ((start >> shift) & 0x1ff) * 8)?;
            if entry & PRESENT == 0 {
                return Some(Vec::new());
            }
            permissions = permissions.and(entry);
            if entry & LARGE != 0 {
                let physical = (level == 3).then(|| large_page(entry, GIBIBYTE))??;
                runs.add(start, GIBIBYTE, physical, permissions)?;
                return Some(runs.0);
            }
            table = entry & ADDRESS;
        }
        let large = PAGE_SIZE << 9;
        for (address, entry) in entries(memory, table, start, large)? {
            let permissions = permissions.and(entry);
            if entry & LARGE != 0 {
                runs.add(address, large, large_page(entry, large)?, permissions)?;
                continue;
            }
            for (address, entry) in entries(memory, entry & ADDRESS, address, PAGE_SIZE)? {
                runs.add(address, PAGE_SIZE, entry, permissions.and(entry))?;
            }
        }
        Some(runs.0)
    }
}

/// Returns the address in an entry that maps a large page; `None` if reserved bits are set.
fn large_page(entry: u64, size: u64) -> Option<u64> {
    let base = entry & ADDRESS & !LARGE_PAT;
    base.is_multiple_of(size).then_some(base)
}

/// Returns the guest-physical address of a virtual address. The runs must be sorted.
#[must_use]
pub fn physical(runs: &[Run], address: u64) -> Option<u64> {
    let next = runs.partition_point(|run| run.range.end <= address);
    let run = runs.get(next).filter(|run| run.range.contains(&address))?;
    Some(run.physical + (address - run.range.start))
}

/// Returns the present entries of a table, each with the virtual address that it maps. The first
/// entry of the table maps `address`.
fn entries(
    memory: &(impl PhysicalMemory + ?Sized),
    table: u64,
    address: u64,
    size: u64,
) -> Option<impl Iterator<Item = (u64, u64)>> {
    let mut bytes = vec![0; PAGE_SIZE as usize];
    memory.read(table, &mut bytes).ok()?;
    Some((0..512).filter_map(move |index| {
        let bytes = bytes.get(8 * index..)?.first_chunk()?;
        let entry = u64::from_le_bytes(*bytes);
        (entry & PRESENT != 0).then_some((address + size * index as u64, entry))
    }))
}

#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    /// Adds a page. Extends the last run if the page continues it.
    fn add(&mut self, address: u64, size: u64, entry: u64, permissions: Permissions) -> Option<()> {
        let physical = entry & ADDRESS;
        let end = address.checked_add(size)?;
        if let Some(last) = self.0.last_mut()
            && last.range.end == address
            && last.physical + (address - last.range.start) == physical
            && last.writable == permissions.writable
            && last.executable == permissions.executable
        {
            last.range.end = end;
            return Some(());
        }
        if self.0.len() == MAX_RUNS {
            return None;
        }
        self.0.push(Run {
            range: address..end,
            physical,
            writable: permissions.writable,
            executable: permissions.executable,
        });
        Some(())
    }
}

#[cfg(test)]
mod tests;
