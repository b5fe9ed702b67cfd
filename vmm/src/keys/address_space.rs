// SPDX-License-Identifier: Apache-2.0
//! The guest's kernel address space as the engine sees it.

use std::cell::Cell;

use static_keys::{AccessFault, GuestMemory, LOCATE_MAX, ReadError, Unmapped};

use crate::memory::{GuestRam, PAGE_SIZE, Piece};
use crate::paging::{self, Levels, WalkError};

/// Where the kernel's own page table is.
///
/// With page table isolation, or while a nested guest runs, a vCPU's CR3 shows something else; the
/// kernel's `init_top_pgt` always maps the whole kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable {
    /// Guest-physical address of the top table.
    pub root: u64,
    /// 4 or 5.
    pub levels: Levels,
}

/// Guest memory by kernel-virtual address.
///
/// Page walks are remembered for as long as this lives, which is to be one attempt at a transaction:
/// a plan's translations are as old as that anyway, and keys and sites lie close together.
#[derive(Clone, Debug)]
pub struct KernelMemory {
    ram: GuestRam,
    table: PageTable,
    /// By the page's number.
    walks: [Cell<Walk>; WALKS],
}

const WALKS: usize = 64;

/// A page of the guest's kernel and where it lies.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// Address of its first byte, or no such address.
    page: u64,
    piece: Piece,
}

const NO_WALK: Walk = Walk {
    page: 1,
    piece: Piece::NONE,
};

impl KernelMemory {
    /// The memory that `table` maps.
    pub fn new(ram: &GuestRam, table: PageTable) -> Self {
        Self {
            ram: ram.clone(),
            table,
            walks: [const { Cell::new(NO_WALK) }; WALKS],
        }
    }

    /// Where the page that begins at this address lies.
    fn page(&self, page: u64) -> Result<Piece, Fault> {
        // Spread by all bits: keys and text lie in step with each other.
        let spread = (page / PAGE_SIZE).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let index = usize::try_from(spread % WALKS as u64).unwrap_or(0);
        let known = self.walks[index].get();
        if known.page == page {
            return Ok(known.piece);
        }
        let mapping = paging::translate(&self.ram, self.table.root, self.table.levels, page)?;
        // Memory begins and ends with whole pages.
        let piece = self
            .ram
            .piece(mapping.physical, PAGE_BYTES)
            .map_err(|_| Fault::NotRam)?;
        self.walks[index].set(Walk { page, piece });
        Ok(piece)
    }

    fn find(&self, address: u64, length: usize) -> Result<Place, Fault> {
        let Some(last) = length.checked_sub(1) else {
            return Ok(Place::default());
        };
        let wraps = WalkError::Wraps { address, length };
        let last = address.checked_add(last as u64).ok_or(wraps)?;
        let offset = address % PAGE_SIZE;
        let page = address - offset;
        let offset = usize::try_from(offset).unwrap_or(0);
        let first = self.page(page)?.part(offset, length);
        if last - page < PAGE_SIZE {
            return Ok(Place {
                first,
                second: Piece::NONE,
            });
        }
        let second = self.page(page + PAGE_SIZE)?;
        Ok(Place {
            first,
            second: second.part(0, length - first.length()),
        })
    }

    /// Hands each physically contiguous part of a range to `part(offset, piece)`.
    fn pieces(
        &self,
        address: u64,
        length: usize,
        mut part: impl FnMut(usize, Piece) -> Result<(), Fault>,
    ) -> Result<(), Unmapped> {
        let mut done = 0;
        let result = paging::for_each_piece(
            &self.ram,
            self.table.root,
            self.table.levels,
            address,
            length,
            |physical, here| {
                let piece = self.ram.piece(physical, here).map_err(|_| Fault::NotRam)?;
                part(done, piece)?;
                done += here;
                Ok(())
            },
        );
        result.map_err(|fault: Fault| Unmapped {
            address,
            reason: fault.reason(),
        })
    }
}

const PAGE_BYTES: usize = 1 << 12;
const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);

/// Up to two pieces: a range of at most 64 bytes straddles at most one page end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    first: Piece,
    second: Piece,
}

enum Fault {
    Walk(WalkError),
    NotRam,
    TooLong,
    Access,
}

impl Fault {
    fn reason(&self) -> &'static str {
        match self {
            Self::Walk(WalkError::NotCanonical(_)) => "the address is not canonical",
            Self::Walk(WalkError::NotPresent { .. }) => "a page table entry is not present",
            Self::Walk(WalkError::Reserved { .. }) => "a page table entry sets reserved bits",
            Self::Walk(WalkError::TableOutsideMemory { .. }) => {
                "a page table lies outside the guest's memory"
            }
            Self::Walk(WalkError::Wraps { .. }) => "it passes the end of the address space",
            Self::NotRam => "the page lies outside the guest's memory",
            Self::TooLong => "it is too long to be located",
            Self::Access => "the access failed",
        }
    }
}

impl From<WalkError> for Fault {
    fn from(error: WalkError) -> Self {
        Self::Walk(error)
    }
}

impl GuestMemory for KernelMemory {
    type Place = Place;

    fn locate(&self, address: u64, length: usize) -> Result<Place, Unmapped> {
        let found = if length > LOCATE_MAX {
            Err(Fault::TooLong)
        } else {
            self.find(address, length)
        };
        found.map_err(|fault| Unmapped {
            address,
            reason: fault.reason(),
        })
    }

    fn read(&self, place: Place, bytes: &mut [u8]) -> Result<(), AccessFault> {
        let (first, second) = split(place, bytes.len())?;
        let (head, tail) = bytes.split_at_mut(first.length());
        let read = |piece, bytes: &mut [u8]| bytes.is_empty() || self.ram.read_piece(piece, bytes);
        if read(first, head) && read(second, tail) {
            Ok(())
        } else {
            Err(AccessFault)
        }
    }

    fn write(&self, place: Place, bytes: &[u8]) -> Result<(), AccessFault> {
        let (first, second) = split(place, bytes.len())?;
        let (head, tail) = bytes.split_at(first.length());
        let write = |piece, bytes: &[u8]| bytes.is_empty() || self.ram.write_piece(piece, bytes);
        if write(first, head) && write(second, tail) {
            Ok(())
        } else {
            Err(AccessFault)
        }
    }

    fn compare_exchange_u32(
        &self,
        place: Place,
        current: u32,
        new: u32,
    ) -> Result<Result<u32, u32>, AccessFault> {
        let (first, second) = split(place, 4)?;
        if second.length() != 0 {
            return Err(AccessFault);
        }
        self.ram
            .compare_exchange_u32(first, current, new)
            .ok_or(AccessFault)
    }

    fn read_gva(&self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
        let length = bytes.len();
        self.pieces(address, length, |offset, piece| {
            let part = &mut bytes[offset..offset + piece.length()];
            if self.ram.read_piece(piece, part) {
                Ok(())
            } else {
                Err(Fault::Access)
            }
        })?;
        Ok(())
    }
}

/// The first `length` bytes of a place.
#[inline]
fn split(place: Place, length: usize) -> Result<(Piece, Piece), AccessFault> {
    // As nearly always.
    if length == place.first.length() {
        return Ok((place.first, Piece::NONE));
    }
    let first = length.min(place.first.length());
    let second = length - first;
    if second > place.second.length() {
        return Err(AccessFault);
    }
    Ok((place.first.prefix(first), place.second.prefix(second)))
}
