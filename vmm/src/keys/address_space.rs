// SPDX-License-Identifier: Apache-2.0
//! The guest's kernel address space as the engine sees it.

use static_keys::{AccessFault, GuestMemory, LOCATE_MAX, ReadError, Unmapped};

use crate::memory::{GuestRam, Piece};
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
#[derive(Clone, Debug)]
pub struct KernelMemory {
    ram: GuestRam,
    table: PageTable,
}

impl KernelMemory {
    /// The memory that `table` maps.
    pub fn new(ram: &GuestRam, table: PageTable) -> Self {
        Self {
            ram: ram.clone(),
            table,
        }
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
        let mut place = Place::default();
        if length > LOCATE_MAX {
            return Err(Unmapped {
                address,
                reason: Fault::TooLong.reason(),
            });
        }
        self.pieces(address, length, |offset, piece| {
            if offset == 0 {
                place.first = piece;
            } else {
                place.second = piece;
            }
            Ok(())
        })?;
        Ok(place)
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
fn split(place: Place, length: usize) -> Result<(Piece, Piece), AccessFault> {
    let first = length.min(place.first.length());
    let second = length - first;
    if second > place.second.length() {
        return Err(AccessFault);
    }
    Ok((place.first.prefix(first), place.second.prefix(second)))
}
