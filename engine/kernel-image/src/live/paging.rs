// SPDX-License-Identifier: Apache-2.0
//! Reads the guest's page tables (Intel SDM volume 3, chapter 4.5), with their access permissions.
//!
//! The tables are not trusted. A table that maps itself is read as often as the processor would
//! read it, and the numbers of levels and of runs are bounded.

use std::ops::Range;

use super::memory::PhysicalMemory;

/// Size of a page and of a table, in bytes.
pub const PAGE: u64 = 4096;
/// Address at which x86-64 maps the kernel image (`__START_KERNEL_map`): the second-to-last GiB,
/// which one level-3 entry maps.
pub const IMAGE_MAP: u64 = 0xffff_ffff_8000_0000;
/// Size of that mapping, in bytes.
pub const IMAGE_MAP_SIZE: u64 = 1 << 30;

/// The maximum number of runs in the mapping of an image. A kernel has about twenty, even without
/// large pages.
const MAX_RUNS: usize = 1024;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 51:12 of an entry, the physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The root of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable {
    /// Guest-physical address of the top table.
    pub root: u64,
    /// The page table has five levels instead of four.
    pub five_levels: bool,
}

/// The mapping of a virtual address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The guest-physical address.
    pub physical: u64,
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
    fn and(self, entry: u64) -> Self {
        Self {
            writable: self.writable && entry & WRITABLE != 0,
            executable: self.executable && entry & NO_EXECUTE == 0,
        }
    }
}

const ALL: Permissions = Permissions {
    writable: true,
    executable: true,
};

impl PageTable {
    fn levels(self) -> u32 {
        if self.five_levels { 5 } else { 4 }
    }

    /// Translates one virtual address. Returns `None` if it is not canonical or not mapped, or if a
    /// table is not in RAM.
    pub fn translate(
        self,
        memory: &(impl PhysicalMemory + ?Sized),
        address: u64,
    ) -> Option<Mapping> {
        let unused = 64 - (12 + 9 * self.levels());
        if (address.cast_signed() << unused >> unused).cast_unsigned() != address {
            return None;
        }
        let mut table = self.root & ADDRESS;
        let mut permissions = ALL;
        for level in (1..=self.levels()).rev() {
            let shift = 12 + 9 * (level - 1);
            let entry = word(memory, table + ((address >> shift) & 0x1ff) * 8)?;
            if entry & PRESENT == 0 {
                return None;
            }
            permissions = permissions.and(entry);
            if level == 1 || level <= 3 && entry & LARGE != 0 {
                let page = 1 << shift;
                return Some(Mapping {
                    physical: (entry & ADDRESS & !(page - 1)) + address % page,
                    writable: permissions.writable,
                    executable: permissions.executable,
                });
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Returns the runs of the kernel image's mapping; `None` if there are too many or a table is
    /// not in RAM.
    pub fn image_runs(self, memory: &(impl PhysicalMemory + ?Sized)) -> Option<Vec<Run>> {
        let mut table = self.root & ADDRESS;
        let mut permissions = ALL;
        let mut runs = Runs::default();
        for level in (3..=self.levels()).rev() {
            let shift = 12 + 9 * (level - 1);
            let entry = word(memory, table + ((IMAGE_MAP >> shift) & 0x1ff) * 8)?;
            if entry & PRESENT == 0 {
                return Some(Vec::new());
            }
            permissions = permissions.and(entry);
            if level == 3 && entry & LARGE != 0 {
                runs.add(
                    IMAGE_MAP,
                    IMAGE_MAP_SIZE,
                    entry & !(IMAGE_MAP_SIZE - 1),
                    permissions,
                )?;
                return Some(runs.0);
            }
            table = entry & ADDRESS;
        }
        for (address, entry) in entries(memory, table, IMAGE_MAP, PAGE << 9)? {
            let permissions = permissions.and(entry);
            if entry & LARGE != 0 {
                runs.add(address, PAGE << 9, entry & !((PAGE << 9) - 1), permissions)?;
                continue;
            }
            for (address, entry) in entries(memory, entry & ADDRESS, address, PAGE)? {
                runs.add(address, PAGE, entry, permissions.and(entry))?;
            }
        }
        Some(runs.0)
    }
}

/// Returns the guest-physical address of a virtual address. The runs must be sorted.
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
    let mut bytes = vec![0; PAGE as usize];
    memory.read(table, &mut bytes).then_some(())?;
    Some((0..512).filter_map(move |index| {
        let bytes = bytes.get(8 * index..)?.first_chunk()?;
        let entry = u64::from_le_bytes(*bytes);
        (entry & PRESENT != 0).then_some((address + size * index as u64, entry))
    }))
}

fn word(memory: &(impl PhysicalMemory + ?Sized), address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    memory.read(address, &mut bytes).then_some(())?;
    Some(u64::from_le_bytes(bytes))
}

#[derive(Default)]
struct Runs(Vec<Run>);

impl Runs {
    /// Adds a page. Extends the last run if the page continues it.
    fn add(&mut self, address: u64, size: u64, entry: u64, permissions: Permissions) -> Option<()> {
        let physical = entry & ADDRESS;
        if let Some(last) = self.0.last_mut()
            && last.range.end == address
            && last.physical + (address - last.range.start) == physical
            && last.writable == permissions.writable
            && last.executable == permissions.executable
        {
            last.range.end = address + size;
            return Some(());
        }
        if self.0.len() == MAX_RUNS {
            return None;
        }
        self.0.push(Run {
            range: address..address + size,
            physical,
            writable: permissions.writable,
            executable: permissions.executable,
        });
        Some(())
    }
}
