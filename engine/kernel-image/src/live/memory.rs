// SPDX-License-Identifier: Apache-2.0
//! Copies of the kernel's virtual memory.
//!
//! The guest may change its memory at any time. Each page is therefore copied once, and all checks
//! use the copy.

use std::collections::HashMap;
use std::ops::Range;

use foldhash::fast::RandomState;

use patchbay_memory::paging::{PageTable, Run, physical};
use patchbay_memory::{PAGE_SIZE, PhysicalMemory};

use crate::classes::Memory;

/// The maximum number of bytes that are copied from one guest. A distribution kernel needs 20 MiB.
const MAX_COPIED: u64 = 256 << 20;

/// Size of an allocation that the C library always maps separately, and so returns to the kernel
/// when it is freed (`DEFAULT_MMAP_THRESHOLD_MAX` of glibc). Smaller ones may stay in its heap,
/// where they would take several times what is kept of a discovery. Only pages that are written
/// take memory.
const ALWAYS_MAPPED: usize = (32 << 20) + 4096;

/// Size of a run, in bytes, from which on its copy is a buffer of [`returned`].
const LARGE: usize = 1 << 20;

/// Returns an empty buffer whose memory is returned to the kernel when it is dropped. If this much
/// address space is not available, the buffer grows like any other.
fn returned() -> Vec<u8> {
    let mut buffer = Vec::new();
    let _ = buffer.try_reserve_exact(ALWAYS_MAPPED);
    buffer
}

/// Copies of the memory that one page table maps.
pub(super) struct View<'m, M: ?Sized> {
    memory: &'m M,
    pub table: PageTable,
    /// The table's mapping of the kernel image, so that addresses in it need no page walk. May be
    /// empty.
    pub image: Vec<Run>,
    /// Read-only data of the kernel image: {virtual address, bytes}, sorted.
    data: Vec<(u64, Vec<u8>)>,
    /// The offsets of pages in `copies`, by their virtual addresses; `None` for what is no RAM.
    pages: HashMap<u64, Option<usize>, RandomState>,
    copies: Vec<u8>,
    /// Number of bytes copied so far.
    copied: u64,
}

impl<M: ?Sized> View<'_, M> {
    /// Drops the pieces that [`View::copy_run`] has copied, except this range.
    pub fn keep_data(&mut self, range: &Range<u64>) {
        self.data.retain_mut(|(start, bytes)| {
            let length = bytes.len() as u64;
            let from = range.start.saturating_sub(*start).min(length);
            let to = range.end.saturating_sub(*start).min(length);
            if from >= to {
                return false;
            }
            bytes.truncate(to as usize);
            bytes.drain(..from as usize);
            *start += from;
            true
        });
    }
}

impl<'m, M: PhysicalMemory + ?Sized> View<'m, M> {
    pub fn new(memory: &'m M, table: PageTable) -> Self {
        Self {
            memory,
            table,
            image: Vec::new(),
            data: Vec::new(),
            pages: HashMap::default(),
            copies: Vec::new(),
            copied: 0,
        }
    }

    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Copies a run as one piece. Later reads of the run use this copy. Returns `false` if any part
    /// of the run is not RAM, or if the total would exceed `MAX_COPIED`.
    pub fn copy_run(&mut self, run: &Run) -> bool {
        let length = run.range.end - run.range.start;
        if self.copied.saturating_add(length) > MAX_COPIED {
            return false;
        }
        let Ok(length) = usize::try_from(length) else {
            return false;
        };
        // A guest may have any number of small runs.
        let mut bytes = match length >= LARGE {
            true => returned(),
            false => Vec::new(),
        };
        bytes.resize(length, 0);
        if self.memory.read(run.physical, &mut bytes).is_err() {
            return false;
        }
        self.copied += length as u64;
        match self.data.last_mut() {
            Some((start, last)) if start.wrapping_add(last.len() as u64) == run.range.start => {
                last.extend_from_slice(&bytes);
            }
            _ => self.data.push((run.range.start, bytes)),
        }
        true
    }

    /// Returns the pieces that [`View::copy_run`] has copied. Adjacent pieces are joined.
    pub fn data(&self) -> &[(u64, Vec<u8>)] {
        &self.data
    }

    /// Returns the bytes of a range that lies in one of the pieces.
    pub fn data_at(&self, range: Range<u64>) -> Option<&[u8]> {
        let next = self
            .data
            .partition_point(|(start, _)| *start <= range.start);
        let (start, bytes) = &self.data[next.checked_sub(1)?];
        let from = usize::try_from(range.start - start).ok()?;
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        bytes.get(from..)?.get(..length)
    }

    /// Reads from the copies. Pages that are not copied yet are copied first.
    pub fn read(&mut self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let end = address.checked_add(bytes.len() as u64)?;
        if let Some(copied) = self.data_at(address..end) {
            bytes.copy_from_slice(copied);
            return Some(());
        }
        let mut done = 0;
        while done < bytes.len() {
            let at = address.checked_add(done as u64)?;
            let offset = (at % PAGE_SIZE) as usize;
            let length = (bytes.len() - done).min(PAGE_SIZE as usize - offset);
            let page = self.page(at - at % PAGE_SIZE)?;
            bytes[done..done + length].copy_from_slice(&page[offset..offset + length]);
            done += length;
        }
        Some(())
    }

    /// Returns the copy of a page; `None` if the page is not mapped or is not RAM, or if the total
    /// would exceed `MAX_COPIED`.
    fn page(&mut self, address: u64) -> Option<&[u8; PAGE_SIZE as usize]> {
        let known = self.pages.get(&address).copied();
        let at = match known {
            Some(at) => at,
            None => {
                let copy = self.copy_page(address);
                self.pages.insert(address, copy);
                copy
            }
        };
        self.copies.get(at?..)?.first_chunk()
    }

    fn translate(&self, address: u64) -> Option<u64> {
        physical(&self.image, address).or_else(|| {
            let mapping = self.table.translate(self.memory, address).ok()?;
            Some(mapping.physical)
        })
    }

    /// Copies a page, and returns its offset in `copies`.
    fn copy_page(&mut self, address: u64) -> Option<usize> {
        if self.copied.saturating_add(PAGE_SIZE) > MAX_COPIED {
            return None;
        }
        let physical = self.translate(address)?;
        let mut bytes = [0; PAGE_SIZE as usize];
        self.memory.read(physical, &mut bytes).ok()?;
        self.copied += PAGE_SIZE;
        if self.copies.capacity() == 0 {
            self.copies = returned();
        }
        let at = self.copies.len();
        self.copies.extend_from_slice(&bytes);
        Some(at)
    }

    /// Drops the copies that [`View::read`] made, so that later reads see the current memory of the
    /// guest.
    pub fn forget(&mut self) {
        self.pages.clear();
        self.copies.clear();
    }

    /// Drops the copies of the page of an address and of the next page.
    pub fn forget_at(&mut self, address: u64) {
        let page = address - address % PAGE_SIZE;
        self.pages.remove(&page);
        self.pages.remove(&page.wrapping_add(PAGE_SIZE));
    }

    pub fn u32(&mut self, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }

    pub fn u64(&mut self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Reads the 64-bit word at an offset in a structure.
    pub fn pointer(&mut self, structure: u64, offset: u32) -> Option<u64> {
        self.u64(structure.checked_add(u64::from(offset))?)
    }

    /// Reads `count` records of `size` bytes. Returns `None` if the records take more than `most`
    /// bytes or cannot be read.
    pub fn array(&mut self, address: u64, count: u64, size: u64, most: u64) -> Option<Vec<u8>> {
        let length = count.checked_mul(size).filter(|length| *length <= most)?;
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        self.read(address, &mut bytes)?;
        Some(bytes)
    }
}

impl<M: PhysicalMemory + ?Sized> Memory for View<'_, M> {
    fn read_at(&mut self, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.read(address, bytes)
    }
}
