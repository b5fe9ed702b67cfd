// SPDX-License-Identifier: Apache-2.0
//! The guest's memory, where the monitor has it: in a file that both map, or in the monitor's process.
//!
//! | backing | access | exchange | a hole that is read |
//! |---|---|---|---|
//! | a file or memfd that the monitor maps shared | mapped, a few nanoseconds | yes | filled, but by [`AttachedRam::copy`] not |
//! | anything else, through /proc/PID/mem | a system call of about a microsecond | no | the kernel's zero page |
//!
//! The monitor's own dirty log does not see what is written here. So no write is made while a migration is under way
//! ([`crate::guest`]). The bitmap here says which pages this process has written.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use patchbay_service::memory::{OutsideMemory, PAGE_SIZE, Piece, Ram};
use patchbay_service::paging::PhysicalMemory;
use rustix::fs::{SeekFrom, seek};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::error::AttachError;
use crate::flat_view::RamRange;
use crate::process::Process;

const PAGE: NonZeroUsize = NonZeroUsize::new(PAGE_SIZE as usize).expect("not 0");

/// The way to reach the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// In its file if the monitor maps one shared, else in the monitor's process.
    #[default]
    Auto,
    /// In its file, or not at all.
    File,
    /// In the monitor's process.
    Process,
}

/// The memory of a guest in another process.
#[derive(Debug)]
pub struct AttachedRam {
    regions: Vec<Region>,
}

#[derive(Debug)]
struct Region {
    addresses: Range<u64>,
    backing: Backing,
    /// Pages that this process has written.
    dirty: AtomicBitmap,
}

#[derive(Debug)]
enum Backing {
    /// `offset`: of the region in the file, which is mapped from its beginning.
    File {
        map: Arc<MmapRegion>,
        file: Arc<File>,
        offset: u64,
    },
    /// `address`: of the region in the monitor.
    Process { memory: Arc<File>, address: u64 },
}

impl AttachedRam {
    /// Maps or opens the memory of a guest. `host_address` gives the address in the monitor's process of a guest-physical one.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn open(
        process: &Process,
        ranges: Vec<RamRange>,
        access: Access,
        host_address: impl Fn(u64) -> Result<u64, AttachError>,
    ) -> Result<Self, AttachError> {
        let mut files = Vec::new();
        let mut memory = None;
        let mut regions = Vec::with_capacity(ranges.len());
        for range in ranges {
            let address = host_address(range.addresses.start)?;
            let shared = match access {
                Access::Process => None,
                Access::Auto | Access::File => shared(process, &mut files, &range, address)?,
            };
            let backing = match shared {
                Some(backing) => backing,
                None if access == Access::File => {
                    return Err(AttachError::Refused(format!(
                        "memory backend {} is not a file that QEMU shares; start QEMU with memory-backend-memfd,share=on or give --memory process",
                        range.backend
                    )));
                }
                None => Backing::Process {
                    memory: Arc::clone(match &mut memory {
                        Some(memory) => memory,
                        None => memory.insert(open_memory(process, address)?),
                    }),
                    address,
                },
            };
            regions.push(Region::new(range.addresses, backing));
        }
        Ok(Self { regions })
    }

    /// Bytes of RAM.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let bytes = self
            .regions
            .iter()
            .map(|region| region.addresses.end - region.addresses.start);
        bytes.sum()
    }

    /// Whether all of it is mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.regions
            .iter()
            .all(|region| matches!(region.backing, Backing::File { .. }))
    }

    /// The RAM that has pages, as far as the host tells.
    #[must_use]
    pub fn filled(&self) -> Vec<Range<u64>> {
        self.regions.iter().flat_map(Region::filled).collect()
    }

    /// Copies bytes out and fills no hole of a file. False: not all of them are RAM.
    #[must_use]
    pub fn copy(&self, address: u64, bytes: &mut [u8]) -> bool {
        let Ok(piece) = self.piece(address, bytes.len()) else {
            return false;
        };
        let Some(region) = self.regions.get(piece.region() as usize) else {
            return false;
        };
        let (file, start) = match &region.backing {
            Backing::File { file, offset, .. } => (file, *offset),
            Backing::Process { memory, address } => (memory, *address),
        };
        let at = start.checked_add(piece.offset());
        at.is_some_and(|at| file.read_exact_at(bytes, at).is_ok())
    }

    /// The region of a piece, if the piece lies in it.
    fn region(&self, piece: Piece) -> Option<&Region> {
        let region = self.regions.get(piece.region() as usize)?;
        let end = piece.offset().checked_add(piece.length() as u64)?;
        (end <= region.addresses.end - region.addresses.start).then_some(region)
    }
}

/// A file of the guest's memory, mapped whole. Ranges of one backend share it.
struct MappedFile {
    /// Device and inode, as the monitor's mapping has them.
    id: (u64, u64),
    file: Arc<File>,
    map: Arc<MmapRegion>,
}

/// The backing in a file that the monitor maps shared, if there is one.
fn shared(
    process: &Process,
    files: &mut Vec<MappedFile>,
    range: &RamRange,
    address: u64,
) -> Result<Option<Backing>, AttachError> {
    let mapping = process.mapping(address)?;
    if !mapping.shared || mapping.inode == 0 {
        return Ok(None);
    }
    let id = (mapping.device, mapping.inode);
    let known = files.iter().position(|known| known.id == id);
    let index = match known {
        Some(index) => index,
        None => {
            let Some(file) = process.file_of(&mapping) else {
                return Ok(None);
            };
            let (file, map) = map_whole(file, &mapping.path)?;
            files.push(MappedFile { id, file, map });
            files.len() - 1
        }
    };
    let MappedFile { file, map, .. } = &files[index];
    let offset = mapping.offset.checked_add(address - mapping.start);
    let size = range.addresses.end - range.addresses.start;
    let end = offset.and_then(|offset| offset.checked_add(size));
    match (offset, end) {
        (Some(offset), Some(end)) if end <= map.size() as u64 => Ok(Some(Backing::File {
            map: Arc::clone(map),
            file: Arc::clone(file),
            offset,
        })),
        _ => Err(AttachError::Refused(format!(
            "memory backend {} lies outside its file {}: it needs {size} bytes",
            range.backend, mapping.path
        ))),
    }
}

fn map_whole(file: File, path: &str) -> Result<(Arc<File>, Arc<MmapRegion>), AttachError> {
    let cannot = |error: String| AttachError::Process {
        what: format!("the guest's memory {path} cannot be mapped"),
        error,
        next: "raise the limit on address space, or give --memory process".to_owned(),
    };
    let bytes = file
        .metadata()
        .map_err(|error| cannot(error.to_string()))?
        .len();
    let bytes = usize::try_from(bytes).map_err(|error| cannot(error.to_string()))?;
    let file = Arc::new(file);
    let map = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&file), 0), bytes);
    let map = map.map_err(|error| cannot(error.to_string()))?;
    Ok((file, Arc::new(map)))
}

/// The monitor's own address space, tried at one address.
fn open_memory(process: &Process, address: u64) -> Result<Arc<File>, AttachError> {
    let path = process.proc("mem");
    let cannot = |error| {
        let what = format!(
            "the guest's memory is not shared, and {} cannot be used",
            path.display()
        );
        AttachError::process(what, error)
    };
    let file = File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(cannot)?;
    file.read_exact_at(&mut [0; 8], address).map_err(cannot)?;
    Ok(Arc::new(file))
}

impl Region {
    fn new(addresses: Range<u64>, backing: Backing) -> Self {
        // More than usize holds is no mapping of any process.
        let bytes = usize::try_from(addresses.end - addresses.start).unwrap_or(usize::MAX);
        Self {
            addresses,
            backing,
            dirty: AtomicBitmap::new(bytes, PAGE),
        }
    }

    fn filled(&self) -> Vec<Range<u64>> {
        let Backing::File { file, offset, .. } = &self.backing else {
            return vec![self.addresses.clone()];
        };
        let size = self.addresses.end - self.addresses.start;
        let mut runs = Vec::new();
        let mut at = 0;
        while at < size {
            // ENXIO: no data behind it. Of a file that cannot tell, all is data.
            let Ok(data) = seek(file, SeekFrom::Data(offset + at)) else {
                break;
            };
            let Ok(hole) = seek(file, SeekFrom::Hole(data)) else {
                break;
            };
            let start = data.saturating_sub(*offset).min(size);
            let end = hole.saturating_sub(*offset).min(size);
            if end <= start {
                break;
            }
            runs.push(self.addresses.start + start..self.addresses.start + end);
            at = end;
        }
        runs
    }

    /// The bytes of a piece, if they are mapped.
    fn slice<'m>(map: &'m MmapRegion, offset: u64, piece: Piece) -> Option<VolatileSlice<'m>> {
        let start = usize::try_from(offset.checked_add(piece.offset())?).ok()?;
        map.get_slice(start, piece.length()).ok()
    }

    fn mark(&self, piece: Piece) {
        if let Ok(offset) = usize::try_from(piece.offset()) {
            self.dirty.set_addr_range(offset, piece.length());
        }
    }
}

fn load(slice: &VolatileSlice<'_>, bytes: &mut [u8]) {
    match bytes.len() {
        // In one access. An address that is not aligned has no atomic reference.
        4 if let Ok(word) = slice.get_atomic_ref::<AtomicU32>(0) => {
            bytes.copy_from_slice(&word.load(Ordering::SeqCst).to_ne_bytes());
        }
        8 if let Ok(word) = slice.get_atomic_ref::<AtomicU64>(0) => {
            bytes.copy_from_slice(&word.load(Ordering::SeqCst).to_ne_bytes());
        }
        _ => {
            slice.copy_to(bytes);
        }
    }
}

/// Stores whole or not at all, within a page, even if this process is killed meanwhile: a vCPU may execute these bytes. A copy to the
/// mapping takes several instructions if it is not an aligned word. A system call is not left before it has copied to a page.
fn store(slice: &VolatileSlice<'_>, file: &File, at: u64, bytes: &[u8]) {
    match <[u8; 4]>::try_from(bytes) {
        Ok(word) if let Ok(to) = slice.get_atomic_ref::<AtomicU32>(0) => {
            to.store(u32::from_ne_bytes(word), Ordering::SeqCst);
        }
        _ if file.write_all_at(bytes, at).is_ok() => {}
        // hugetlbfs has no write().
        _ => slice.copy_from(bytes),
    }
}

impl PhysicalMemory for AttachedRam {
    fn read_u64(&self, address: u64) -> Option<u64> {
        let piece = self
            .piece(address, 8)
            .ok()
            .filter(|_| address.is_multiple_of(8))?;
        let mut word = [0; 8];
        self.read_piece(piece, &mut word)
            .then(|| u64::from_le_bytes(word))
    }
}

impl Ram for AttachedRam {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        let outside = OutsideMemory { address, length };
        let end = address.checked_add(length as u64).ok_or(outside)?;
        let found =
            self.regions.iter().enumerate().find(|(_, region)| {
                region.addresses.start <= address && end <= region.addresses.end
            });
        let (index, region) = found.ok_or(outside)?;
        let index = u32::try_from(index).map_err(|_| outside)?;
        let length = u32::try_from(length).map_err(|_| outside)?;
        Ok(Piece::new(index, address - region.addresses.start, length))
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        let Some(region) = self.region(piece).filter(|_| bytes.len() == piece.length()) else {
            return false;
        };
        match &region.backing {
            Backing::File { map, offset, .. } => match Region::slice(map, *offset, piece) {
                Some(slice) => {
                    load(&slice, bytes);
                    true
                }
                None => false,
            },
            Backing::Process { memory, address } => memory
                .read_exact_at(bytes, address + piece.offset())
                .is_ok(),
        }
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        let Some(region) = self.region(piece).filter(|_| bytes.len() == piece.length()) else {
            return false;
        };
        let written = match &region.backing {
            Backing::File { map, file, offset } => match Region::slice(map, *offset, piece) {
                Some(slice) => {
                    store(&slice, file, offset + piece.offset(), bytes);
                    true
                }
                None => return false,
            },
            Backing::Process { memory, address } => {
                memory.write_all_at(bytes, address + piece.offset()).is_ok()
            }
        };
        region.mark(piece);
        written
    }

    fn compare_exchange_u32(
        &self,
        piece: Piece,
        current: u32,
        new: u32,
    ) -> Option<Result<u32, u32>> {
        let region = self.region(piece).filter(|_| piece.length() == 4)?;
        let Backing::File { map, offset, .. } = &region.backing else {
            return None;
        };
        let slice = Region::slice(map, *offset, piece)?;
        let word = slice.get_atomic_ref::<AtomicU32>(0).ok()?;
        let exchanged = word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst);
        if exchanged.is_ok() {
            region.mark(piece);
        }
        Some(exchanged)
    }

    fn can_exchange(&self) -> bool {
        self.is_mapped()
    }

    fn is_dirty(&self, address: u64) -> bool {
        let found = self
            .regions
            .iter()
            .find(|region| region.addresses.contains(&address));
        found.is_some_and(|region| {
            let offset = usize::try_from(address - region.addresses.start);
            offset.is_ok_and(|offset| region.dirty.is_addr_set(offset))
        })
    }
}
