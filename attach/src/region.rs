// SPDX-License-Identifier: Apache-2.0
//! A region of the guest's memory: its location, and access to it.

use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use patchbay_guest::memory::{Exchanged, Piece};
use patchbay_memory::PAGE_SIZE;
use rustix::fs::{SeekFrom, seek};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::error::AttachError;
use crate::flat_view::{RamRange, Removal};
use crate::memory::Access;
use crate::process::{Mapping, Mappings, Process};

const PAGE: NonZeroUsize = NonZeroUsize::new(PAGE_SIZE as usize).expect("not 0");

/// RAM that is contiguous in the guest and in the monitor.
#[derive(Debug)]
pub struct Region {
    /// Unique, and never reused.
    pub id: u32,
    /// Guest-physical addresses.
    pub addresses: Range<u64>,
    removal: Removal,
    host: HostRange,
    /// The monitor no longer has the region at its address; accesses fail.
    gone: AtomicBool,
    /// Pages that this process has written.
    dirty: AtomicBitmap,
}

/// The part of the monitor's process that holds a region.
#[derive(Debug)]
pub struct HostRange {
    /// Address in the monitor's process.
    address: u64,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    /// `offset` is where the region begins in the file.
    File { file: Arc<MappedFile>, offset: u64 },
    /// /proc/PID/mem of the monitor.
    Process(Arc<File>),
}

/// A file of the guest's memory, mapped completely. Regions of one backend share it.
#[derive(Debug)]
struct MappedFile {
    /// Device and inode of the monitor's mapping.
    id: (u64, u64),
    /// The monitor's own descriptor. The descriptor's offset is shared with the monitor, so each
    /// access gives an explicit offset. Only a search for holes moves the shared offset, which QEMU
    /// does not use.
    file: File,
    map: MmapRegion,
}

/// Finds regions in the memory of the monitor's process. Reuses files that are already mapped or
/// open.
#[derive(Debug)]
pub struct HostMemory<'p> {
    process: &'p Process,
    access: Access,
    deadline: Instant,
    files: Vec<Arc<MappedFile>>,
    memory: Option<Arc<File>>,
    /// The uses of the files that `self` has opened: the address in the process, the mapping found
    /// there, and the name of the backend.
    opened: Vec<(u64, Mapping, String)>,
}

impl<'p> HostMemory<'p> {
    /// Prepares to find regions in the process's memory before the deadline. `regions` are the ones
    /// that are already known.
    pub fn new(
        process: &'p Process,
        access: Access,
        regions: &[Arc<Region>],
        deadline: Instant,
    ) -> Self {
        let mut host_memory = Self {
            process,
            access,
            deadline,
            files: Vec::new(),
            memory: None,
            opened: Vec::new(),
        };
        for region in regions {
            match &region.host.backing {
                Backing::File { file, .. } => host_memory.files.push(Arc::clone(file)),
                Backing::Process(memory) => host_memory.memory = Some(Arc::clone(memory)),
            }
        }
        host_memory
    }

    /// Returns the memory of the monitor's process behind each range, which begins at the given
    /// address of the process.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn find(&mut self, ranges: &[(RamRange, u64)]) -> Result<Vec<HostRange>, AttachError> {
        let addresses = ranges.iter().map(|(_, address)| *address).collect();
        let mappings = self.process.mappings(addresses, self.deadline)?;
        let mut found = Vec::with_capacity(ranges.len());
        for (range, address) in ranges {
            found.push(self.find_in(&mappings, range, *address)?);
        }
        self.confirm_opened()?;
        Ok(found)
    }

    /// Returns the part of the monitor's process that holds a range.
    fn find_in(
        &mut self,
        mappings: &Mappings,
        range: &RamRange,
        address: u64,
    ) -> Result<HostRange, AttachError> {
        if Instant::now() >= self.deadline {
            return Err(AttachError::Refused(format!(
                "the guest's memory was not found in process {} in time; check how many mappings and descriptors the process has, and how fast QEMU answers",
                self.process.pid()
            )));
        }
        let size = range.addresses.end - range.addresses.start;
        // Every access method refuses memory that the monitor itself may not write.
        let mapping = mappings.at(address, size)?;
        let shared = match self.access {
            Access::Process => None,
            Access::Auto | Access::File => self.shared(range, address, mapping)?,
        };
        let backing = match shared {
            Some(backing) => backing,
            None if self.access == Access::File => {
                return Err(AttachError::Refused(format!(
                    "memory backend {} is not a file that QEMU shares; start QEMU with memory-backend-memfd,share=on or give --memory process",
                    range.backend
                )));
            }
            None => Backing::Process(Arc::clone(match &mut self.memory {
                Some(memory) => memory,
                None => self.memory.insert(open_memory(self.process, address)?),
            })),
        };
        Ok(HostRange { address, backing })
    }

    /// Returns the file that backs the range, if the monitor maps one shared.
    fn shared(
        &mut self,
        range: &RamRange,
        address: u64,
        mapping: &Mapping,
    ) -> Result<Option<Backing>, AttachError> {
        if !mapping.shared || mapping.inode == 0 {
            return Ok(None);
        }
        let id = (mapping.device, mapping.inode);
        let known = self.files.iter().find(|known| known.id == id);
        let is_opened =
            |(_, mapping, _): &(u64, Mapping, String)| (mapping.device, mapping.inode) == id;
        let is_new = known.is_none() || self.opened.iter().any(is_opened);
        let file = match known {
            Some(known) => Arc::clone(known),
            None => {
                let Some(file) = self.process.file_of(mapping) else {
                    return Ok(None);
                };
                let file = Arc::new(MappedFile::new(id, file, &mapping.path)?);
                self.files.push(Arc::clone(&file));
                file
            }
        };
        if is_new {
            // The mapping was read before the file was opened, and may have changed between.
            let backend = range.backend.clone();
            self.opened.push((address, mapping.clone(), backend));
        }
        let offset = mapping.offset_of(address);
        let size = range.addresses.end - range.addresses.start;
        let end = offset.and_then(|offset| offset.checked_add(size));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= file.map.size() as u64 => {
                Ok(Some(Backing::File { file, offset }))
            }
            _ => Err(AttachError::Refused(format!(
                "memory backend {} lies outside its file {}: it needs {size} bytes{}, and the file has {}; attach again, or give --memory process",
                range.backend,
                mapping.path,
                offset.map_or(String::new(), |offset| format!(" from {offset:#x}")),
                file.map.size()
            ))),
        }
    }

    /// Confirms the mappings of files that were opened. The number of an inode is not reused while
    /// the file is open here. So a mapping that still has this number is a mapping of this file.
    fn confirm_opened(&self) -> Result<(), AttachError> {
        if self.opened.is_empty() {
            return Ok(());
        }
        let addresses = self.opened.iter().map(|(address, ..)| *address).collect();
        let now = self.process.mappings(addresses, self.deadline)?;
        for (address, mapping, backend) in &self.opened {
            let now = now.at(*address, 1)?;
            if !now.agrees_at(*address, mapping) {
                return Err(AttachError::Refused(format!(
                    "memory backend {backend} moved while it was being mapped (first {} at {address:#x}, then {}); attach again",
                    mapping.path, now.path
                )));
            }
        }
        Ok(())
    }
}

impl MappedFile {
    fn new(id: (u64, u64), file: File, path: &str) -> Result<Self, AttachError> {
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
        let mapped = file
            .try_clone()
            .map_err(|error| cannot(error.to_string()))?;
        let map = MmapRegion::from_file(FileOffset::new(mapped, 0), bytes);
        let map = map.map_err(|error| cannot(error.to_string()))?;
        Ok(Self { id, file, map })
    }

    /// Returns the bytes of a piece of a region that begins at `offset` in the file.
    fn slice(&self, offset: u64, piece: Piece) -> Option<VolatileSlice<'_>> {
        let start = usize::try_from(offset.checked_add(piece.offset())?).ok()?;
        self.map.get_slice(start, piece.length()).ok()
    }
}

/// Opens the monitor's address space, and tries to read one address.
fn open_memory(process: &Process, address: u64) -> Result<Arc<File>, AttachError> {
    let file = process.memory()?;
    file.read_exact_at(&mut [0; 8], address).map_err(|error| {
        let what = format!(
            "the guest's memory at {address:#x} of process {} cannot be read",
            process.pid()
        );
        AttachError::process(what, error)
    })?;
    Ok(Arc::new(file))
}

impl HostRange {
    fn is(&self, other: &Self) -> bool {
        let same_backing = match (&self.backing, &other.backing) {
            (
                Backing::File { file, offset },
                Backing::File {
                    file: other,
                    offset: others,
                },
            ) => file.id == other.id && offset == others,
            (Backing::Process(_), Backing::Process(_)) => true,
            _ => false,
        };
        self.address == other.address && same_backing
    }
}

impl Region {
    pub fn new(id: u32, range: RamRange, host: HostRange) -> Self {
        // No process maps more bytes than `usize` holds.
        let bytes = usize::try_from(range.addresses.end - range.addresses.start);
        Self {
            id,
            addresses: range.addresses,
            removal: range.removal,
            host,
            gone: AtomicBool::new(false),
            dirty: AtomicBitmap::new(bytes.unwrap_or(usize::MAX), PAGE),
        }
    }

    /// Returns whether the region has this range at this place of the process.
    pub fn is(&self, range: &RamRange, host: &HostRange) -> bool {
        !self.is_gone()
            && self.addresses == range.addresses
            && self.removal == range.removal
            && self.host.is(host)
    }

    pub fn is_mapped(&self) -> bool {
        matches!(self.host.backing, Backing::File { .. })
    }

    pub fn is_removable(&self) -> bool {
        self.removal != Removal::Never
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Marks the region as removed. Later accesses fail.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Returns whether the monitor still maps the memory that this process accesses, given that the
    /// region is now at `address` in the monitor. `mappings` must include `address` if the region
    /// is accessed through a mapped file.
    pub fn is_still_at(&self, address: u64, mappings: Option<&Mappings>) -> bool {
        if address != self.host.address {
            return false;
        }
        let Backing::File { file, offset } = &self.host.backing else {
            return true;
        };
        let size = self.addresses.end - self.addresses.start;
        let mapping = mappings.and_then(|mappings| mappings.at(address, size).ok());
        mapping.is_some_and(|mapping| {
            mapping.shared
                && (mapping.device, mapping.inode) == file.id
                && mapping.offset_of(address) == Some(*offset)
        })
    }

    /// Returns whether the whole piece lies in this region and may be accessed.
    pub fn has(&self, piece: Piece) -> bool {
        let end = piece.offset().checked_add(piece.length() as u64);
        self.id == piece.region()
            && end.is_some_and(|end| end <= self.addresses.end - self.addresses.start)
            && !self.is_gone()
    }

    /// Returns the address of a byte in the monitor's process. If the address overflows, returns
    /// `u64::MAX`, where no process has a mapping.
    pub fn address(&self, offset: u64) -> u64 {
        self.host.address.saturating_add(offset)
    }

    /// Copies bytes by a read of the file or of the process's memory, not through the mapping.
    pub fn copy(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        let copied = match &self.host.backing {
            Backing::File { file, offset } => {
                let at = offset.saturating_add(piece.offset());
                file.file.read_exact_at(bytes, at)
            }
            Backing::Process(memory) => memory.read_exact_at(bytes, self.address(piece.offset())),
        };
        copied.is_ok()
    }

    pub fn read(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        match &self.host.backing {
            Backing::File { file, offset } => match file.slice(*offset, piece) {
                Some(slice) => {
                    load(&slice, bytes);
                    true
                }
                None => false,
            },
            Backing::Process(memory) => memory
                .read_exact_at(bytes, self.address(piece.offset()))
                .is_ok(),
        }
    }

    pub fn write(&self, piece: Piece, bytes: &[u8]) -> bool {
        let written = match &self.host.backing {
            Backing::File { file, offset } => match file.slice(*offset, piece) {
                Some(slice) => {
                    store(&slice, bytes);
                    true
                }
                None => return false,
            },
            // The monitor may have reused the address since the guest was stopped.
            Backing::Process(_) if self.removal == Removal::ByMonitor => return false,
            Backing::Process(memory) => memory
                .write_all_at(bytes, self.address(piece.offset()))
                .is_ok(),
        };
        self.mark_piece(piece);
        written
    }

    /// Returns the address of a piece in the monitor's process; `None` if the piece is in a mapped
    /// file, or if the monitor may have reused the address since the guest was stopped.
    pub fn in_process(&self, piece: Piece) -> Option<u64> {
        let in_process = matches!(self.host.backing, Backing::Process(_));
        let stays = self.removal != Removal::ByMonitor;
        (in_process && stays).then(|| self.address(piece.offset()))
    }

    pub fn compare_exchange(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        let Backing::File { file, offset } = &self.host.backing else {
            return None;
        };
        let slice = file.slice(*offset, piece)?;
        let word = slice.get_atomic_ref::<AtomicU32>(0).ok()?;
        let exchanged = word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst);
        if exchanged.is_ok() {
            self.mark_piece(piece);
        }
        Some(exchanged)
    }

    /// Marks the pages of a piece as written.
    pub fn mark_piece(&self, piece: Piece) {
        self.mark(piece.offset(), piece.length());
    }

    fn mark(&self, offset: u64, length: usize) {
        if let Ok(offset) = usize::try_from(offset) {
            self.dirty.set_addr_range(offset, length);
        }
    }

    pub fn is_dirty(&self, address: u64) -> bool {
        let offset = address
            .checked_sub(self.addresses.start)
            .map(usize::try_from);
        matches!(offset, Some(Ok(offset)) if self.dirty.is_addr_set(offset))
    }

    /// Copies the dirty marks of a region that this one replaces.
    pub fn inherit_marks(&self, earlier: &Self) {
        let start = self.addresses.start.max(earlier.addresses.start);
        let end = self.addresses.end.min(earlier.addresses.end);
        let mut page = start;
        while page < end {
            if earlier.is_dirty(page) {
                self.mark(page - self.addresses.start, PAGE.get());
            }
            page += PAGE_SIZE;
        }
    }

    /// Returns the parts of the RAM that have pages, as far as the host reports them.
    pub fn filled(&self) -> Vec<Range<u64>> {
        let Backing::File { file, offset } = &self.host.backing else {
            return vec![self.addresses.clone()];
        };
        let size = self.addresses.end - self.addresses.start;
        let mut runs = Vec::new();
        let mut at = 0;
        while at < size {
            // ENXIO means that no data follows. A file system that cannot tell reports everything
            // as data.
            let Ok(data) = seek(&file.file, SeekFrom::Data(offset + at)) else {
                break;
            };
            let Ok(hole) = seek(&file.file, SeekFrom::Hole(data)) else {
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
}

fn load(slice: &VolatileSlice<'_>, bytes: &mut [u8]) {
    match bytes.len() {
        // A word is loaded in one access. An unaligned address has no atomic reference.
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

/// Stores bytes. An aligned word is stored by one instruction. Anything else takes several stores,
/// and this process may be killed between them.
fn store(slice: &VolatileSlice<'_>, bytes: &[u8]) {
    match <[u8; 4]>::try_from(bytes) {
        Ok(word) if let Ok(to) = slice.get_atomic_ref::<AtomicU32>(0) => {
            to.store(u32::from_ne_bytes(word), Ordering::SeqCst);
        }
        _ => slice.copy_from(bytes),
    }
}
