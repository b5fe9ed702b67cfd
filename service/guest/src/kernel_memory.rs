// SPDX-License-Identifier: Apache-2.0
//! The address space of a guest's kernel, as memory for the engine.

use std::cell::Cell;

use static_keys::{
    AccessFault, Exchanged, GuestMemory, LOCATE_MAX, Leading, ReadError, Unmapped, Word,
};

use crate::memory::{GuestRam, Piece};
use patchbay_memory::PAGE_SIZE;
use patchbay_memory::paging::{PageTable, WalkError};

/// Guest memory by kernel-virtual address.
///
/// [`GuestMemory::locate`] caches page walks for the life of this value, because keys and sites lie
/// close together. A value that locates them is used for one attempt at a transaction or for one
/// query. A plan keeps its translations for the same time, so the cache adds no stale translations.
#[derive(Clone, Debug)]
pub struct KernelMemory {
    ram: GuestRam,
    table: PageTable,
    walks: Walks<64, PAGE_SIZE>,
    /// Walks of larger pages, which map nearly all of the kernel's text and data.
    large_walks: Walks<16, LARGE_PAGE>,
}

const LARGE_PAGE: u64 = 2 << 20;

/// A page of the guest's kernel and its location in the guest's memory.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// Address of the first byte. An unused entry has the address 1, which is not the start of a
    /// page.
    page: u64,
    piece: Piece,
}

const NO_WALK: Walk = Walk {
    page: 1,
    piece: Piece::NONE,
};

/// `COUNT` cached walks to pages of `BYTES`, indexed by a hash of the page number.
#[derive(Clone, Debug)]
struct Walks<const COUNT: usize, const BYTES: u64>([Cell<Walk>; COUNT]);

impl<const COUNT: usize, const BYTES: u64> Walks<COUNT, BYTES> {
    fn new() -> Self {
        Self([const { Cell::new(NO_WALK) }; COUNT])
    }

    fn slot(&self, page: u64) -> &Cell<Walk> {
        // Multiplication mixes all bits of the address, because keys and text often have the same
        // low bits.
        let spread = (page / BYTES).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.0[usize::try_from(spread % COUNT as u64).unwrap_or(0)]
    }

    fn find(&self, page: u64) -> Option<Piece> {
        let known = self.slot(page).get();
        (known.page == page).then_some(known.piece)
    }

    fn remember(&self, page: u64, piece: Piece) {
        self.slot(page).set(Walk { page, piece });
    }
}

impl KernelMemory {
    /// Returns the memory that `table` maps.
    pub fn new(ram: &GuestRam, table: PageTable) -> Self {
        Self {
            ram: ram.clone(),
            table,
            walks: Walks::new(),
            large_walks: Walks::new(),
        }
    }

    /// Translates the page that begins at this address.
    fn page(&self, page: u64) -> Result<Piece, Fault> {
        let offset = page % LARGE_PAGE;
        let part = |large: Piece| large.part(usize::try_from(offset).unwrap_or(0), PAGE_BYTES);
        if let Some(large) = self.large_walks.find(page - offset) {
            return Ok(part(large));
        }
        if let Some(piece) = self.walks.find(page) {
            return Ok(piece);
        }
        let mapping = self.table.translate(&*self.ram, page)?;
        // A large page that does not lie wholly in one region of memory is cached as small pages.
        if mapping.remaining > PAGE_SIZE
            && let Ok(large) = self.ram.piece(mapping.physical - offset, LARGE_BYTES)
        {
            self.large_walks.remember(page - offset, large);
            return Ok(part(large));
        }
        // Regions of memory begin and end at page boundaries, so a page is in memory as a whole or
        // not at all.
        let piece = self
            .ram
            .piece(mapping.physical, PAGE_BYTES)
            .map_err(|_| Fault::NotRam)?;
        self.walks.remember(page, piece);
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
            return Ok(Place::from(first));
        }
        let second = self.page(page + PAGE_SIZE)?;
        Ok(Place {
            first,
            second: second.part(0, length - first.length()),
        })
    }

    /// Finds a range that lies in a large page whose walk is cached, as most ranges do. The range
    /// must still lie in one 4 KiB page, even if the memory is contiguous: a write to the memory of
    /// another process is not atomic across such pages.
    #[inline]
    fn find_cached(&self, address: u64, length: usize) -> Option<Place> {
        let offset = address % LARGE_PAGE;
        let end = (address % PAGE_SIZE).saturating_add(length as u64);
        if length == 0 || end > PAGE_SIZE {
            return None;
        }
        let large = self.large_walks.find(address - offset)?;
        let offset = usize::try_from(offset).unwrap_or(0);
        Some(Place::from(large.part(offset, length)))
    }

    /// Calls `part(offset, piece)` for each physically contiguous part of a range.
    fn pieces(
        &self,
        address: u64,
        length: usize,
        mut part: impl FnMut(usize, Piece) -> Result<(), Fault>,
    ) -> Result<(), Unmapped> {
        let mut done = 0;
        let piece = |physical, here| {
            let piece = self.ram.piece(physical, here).map_err(|_| Fault::NotRam)?;
            part(done, piece)?;
            done += here;
            Ok(())
        };
        let result = self
            .table
            .for_each_piece(&*self.ram, address, length, piece);
        result.map_err(|fault: Fault| Unmapped {
            address,
            reason: fault.reason(),
        })
    }
}

const PAGE_BYTES: usize = 1 << 12;
const _: () = assert!(PAGE_BYTES as u64 == PAGE_SIZE);
const LARGE_BYTES: usize = 2 << 20;
const _: () = assert!(LARGE_BYTES as u64 == LARGE_PAGE);

/// Guest-physical location of at most 64 bytes. Such a range crosses at most one page boundary, so
/// two pieces suffice.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    first: Piece,
    second: Piece,
}

impl Place {
    /// Returns the place of two pieces, the second of which may be empty.
    #[must_use]
    pub fn new(first: Piece, second: Piece) -> Self {
        Self { first, second }
    }

    /// Returns the first piece. A range that fits into the first piece does not straddle pages.
    #[must_use]
    #[inline]
    pub fn first(&self) -> Piece {
        self.first
    }

    /// Returns the first `length` bytes in two pieces. The second piece is empty unless the bytes
    /// straddle pages. Both are empty if the place has fewer bytes.
    pub fn pieces(self, length: usize) -> [Piece; 2] {
        split(self, length).map_or([Piece::NONE; 2], |(first, second)| [first, second])
    }
}

impl From<Piece> for Place {
    fn from(first: Piece) -> Self {
        Self {
            first,
            second: Piece::NONE,
        }
    }
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

    #[inline]
    fn locate(&self, address: u64, length: usize) -> Result<Place, Unmapped> {
        let found = match self.find_cached(address, length) {
            _ if length > LOCATE_MAX => Err(Fault::TooLong),
            Some(place) => return Ok(place),
            None => self.find(address, length),
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

    #[inline]
    fn load(&self, place: Place, length: usize) -> Result<u64, AccessFault> {
        let (first, second) = split(place, length)?;
        if second.length() == 0
            && let Some(number) = self.ram.load(first)
        {
            return Ok(number);
        }
        let mut bytes = [0; 8];
        self.read(place, bytes.get_mut(..length).ok_or(AccessFault)?)?;
        Ok(u64::from_le_bytes(bytes))
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

    fn writes_whole(&self, place: Place, length: usize) -> bool {
        // A place with two pieces needs two writes.
        matches!(split(place, length), Ok((first, second)) if second.length() == 0 && self.ram.writes_whole(first))
    }

    fn compare_exchange_u32(
        &self,
        place: Place,
        current: u32,
        new: u32,
    ) -> Result<Exchanged, AccessFault> {
        let (first, second) = split(place, 4)?;
        if second.length() != 0 {
            return Err(AccessFault);
        }
        self.ram
            .compare_exchange_u32(first, current, new)
            .ok_or(AccessFault)
    }

    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        self.ram.leading_unchanged(words)
    }

    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        self.ram.write_leading(words)
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

impl patchbay_observe::KernelView for KernelMemory {
    /// Walks the page tables for each read and does not use the cache: the reader of the log keeps
    /// this value for longer than one transaction, so cached walks would become stale.
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.read_gva(address, bytes).is_ok()
    }
}

/// Returns the first `length` bytes of a place.
#[inline]
fn split(place: Place, length: usize) -> Result<(Piece, Piece), AccessFault> {
    // In the common case the first piece has exactly this length.
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

#[cfg(test)]
mod tests {
    use patchbay_memory::paging::Levels;

    use super::*;

    const ROOT: u64 = 0x1000;
    const BASE: u64 = 0xffff_ffff_8000_0000;

    /// Returns a kernel that maps 8 MiB of memory by a large page, small pages in reverse order and
    /// two large pages that are swapped, and maps one more large page outside memory.
    fn memory() -> KernelMemory {
        let ram = crate::testing::Memory::ram(8 << 20);
        let put = |table: u64, index: u64, entry: u64| {
            ram.write(table + 8 * index, &(entry | 1).to_le_bytes())
                .unwrap();
        };
        put(ROOT, 511, 0x2000);
        put(0x2000, 510, 0x3000);
        let large = 1 << 7;
        put(0x3000, 0, large | 2 << 20);
        put(0x3000, 1, 0x4000);
        for page in 0..512 {
            put(0x4000, page, (511 - page) * PAGE_SIZE);
        }
        put(0x3000, 2, large | 6 << 20);
        put(0x3000, 3, large | 4 << 20);
        put(0x3000, 4, large | 8 << 20);
        let mut random = fastrand::Rng::with_seed(1);
        for address in (2 << 20..8 << 20).step_by(8) {
            ram.write(address, &random.u64(..).to_le_bytes()).unwrap();
        }
        let table = PageTable {
            root: ROOT,
            levels: Levels::Four,
        };
        KernelMemory::new(&ram, table)
    }

    /// A cached walk and a fresh walk find the same location.
    #[test]
    fn remembered_walks_lead_where_walks_lead() {
        let memory = memory();
        let mut random = fastrand::Rng::with_seed(2);
        let mut unmapped = 0;
        for _ in 0..100_000 {
            // Half of the addresses lie near a boundary between large pages.
            let near = random.u64(..6) << 21;
            let address = match random.bool() {
                true => BASE + random.u64(..10 << 20),
                false => BASE + near + random.u64(..128) - 64,
            };
            let length = random.usize(1..=LOCATE_MAX);
            let mut by_walk = vec![0; length];
            let mut found = vec![0; length];
            let walked = memory.read_gva(address, &mut by_walk);
            match memory.locate(address, length) {
                Ok(place) => {
                    for piece in [place.first, place.second] {
                        let last = piece.offset() + (piece.length() as u64).saturating_sub(1);
                        assert_eq!(piece.offset() / PAGE_SIZE, last / PAGE_SIZE, "one page");
                    }
                    memory.read(place, &mut found).unwrap();
                    walked.unwrap();
                    assert_eq!(found, by_walk, "{address:#x}, {length} bytes");
                }
                Err(_) => {
                    unmapped += 1;
                    assert!(walked.is_err(), "{address:#x}, {length} bytes");
                }
            }
        }
        assert!((10_000..60_000).contains(&unmapped), "{unmapped}");
    }
}
