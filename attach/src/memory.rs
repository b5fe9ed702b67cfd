// SPDX-License-Identifier: Apache-2.0
//! Accesses the guest's memory in a file that the monitor maps too, or in the monitor's process.
//!
//! - A file or memfd that the monitor maps shared, also on hugetlbfs, is mapped. An access takes a
//!   few nanoseconds, and atomic exchange is possible. A read through the mapping fills a hole;
//!   [`PhysicalMemory::read`] does not. If this process is killed, a write in a page may be
//!   partial, unless it is an aligned word of 4 bytes.
//! - Any other memory is accessed through /proc/PID/mem. An access is a system call of about a
//!   microsecond, and there is no atomic exchange. A hole reads as the kernel's zero page. If this
//!   process is killed, a write in a page is whole or not made at all, but it may take effect only
//!   after the vCPUs run again. While a thread of the monitor is stopped by ptrace, one system call
//!   accesses many words ([`crate::at_once`]).
//!
//! A write that straddles pages may be partial with both backings. The guest keeps running when
//! this process is killed. So the engine replaces instructions in steps, and each intermediate
//! state can be executed ([`static_keys::instruction::replace`]).
//!
//! The monitor's own dirty log does not record the writes of this process. So no write is made
//! while a migration is in progress ([`crate::guest`]). The bitmap of each region records the pages
//! that this process has written.
//!
//! Memory may be plugged in and removed while the guest runs ([`crate::hotplug`]). A region that
//! has not changed keeps its id, so that its pieces stay valid. No other region ever gets that id,
//! so no access through a piece of a removed region succeeds.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use nix::unistd::Pid;
use patchbay_guest::kernel_memory::Place;
use patchbay_guest::memory::{Exchanged, Leading, Piece, Ram, Word};
use patchbay_memory::{OutsideMemory, PhysicalMemory};

use crate::at_once::{self, Copies, ProcessWord, Written};
use crate::error::AttachError;
use crate::flat_view::{MAX_RANGES, RamRange};
use crate::process::Process;
use crate::region::{HostMemory, Region};

/// The way to reach the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Uses its file if the monitor maps one shared, otherwise the monitor's process.
    #[default]
    Auto,
    /// Uses only its file.
    File,
    /// Uses the monitor's process.
    Process,
}

/// The memory of a guest in another process.
#[derive(Debug)]
pub struct AttachedRam {
    access: Access,
    /// The regions, sorted and not overlapping. They do not change while this process holds the
    /// guest stopped, so a reader does not wait in that time.
    regions: RwLock<Vec<Arc<Region>>>,
    /// The number of times that `regions` was written.
    changes: AtomicU64,
    /// An access missed memory, or a region is gone.
    doubted: AtomicBool,
    /// The number of a thread of the monitor that is stopped by ptrace and is not the first thread
    /// of its process; 0 for none.
    stopped: AtomicI32,
}

/// Words are accessed through a stopped thread until this is dropped. The thread must be stopped
/// until then.
#[derive(Debug)]
pub struct ByStoppedThread<'m>(&'m AttachedRam);

impl Drop for ByStoppedThread<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(0, Ordering::SeqCst);
    }
}

impl AttachedRam {
    /// Maps or opens the memory of a guest. `host_address` translates a guest-physical address to
    /// one in the monitor's process. All is done before the deadline.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn open(
        process: &Process,
        ranges: Vec<RamRange>,
        access: Access,
        deadline: Instant,
        host_address: impl Fn(u64) -> Result<u64, AttachError>,
    ) -> Result<Self, AttachError> {
        let memory = Self {
            access,
            regions: RwLock::default(),
            changes: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
            stopped: AtomicI32::new(0),
        };
        memory.update(process, ranges, deadline, host_address)?;
        Ok(memory)
    }

    /// Applies the changes of the guest's memory and returns whether there were any. Must be called
    /// by only one thread at a time, and not while the guest is stopped.
    ///
    /// # Errors
    /// [`AttachError`]; nothing is applied.
    pub fn update(
        &self,
        process: &Process,
        ranges: Vec<RamRange>,
        deadline: Instant,
        host_address: impl Fn(u64) -> Result<u64, AttachError>,
    ) -> Result<bool, AttachError> {
        let known = self.regions().clone();
        let mut placed = Vec::with_capacity(ranges.len());
        for range in ranges {
            let address = host_address(range.addresses.start)?;
            placed.push((range, address));
        }
        let hosts = HostMemory::new(process, self.access, &known, deadline).find(&placed)?;
        let mut next = self.changes().saturating_mul(MAX_RANGES as u64);
        let mut regions = Vec::with_capacity(placed.len());
        for ((range, _), host) in placed.into_iter().zip(hosts) {
            if let Some(same) = known.iter().find(|region| region.is(&range, &host)) {
                regions.push(Arc::clone(same));
                continue;
            }
            let id = u32::try_from(next).map_err(|_| {
                AttachError::Refused(format!(
                    "the guest's memory has changed {} times, and no more than {} changes are followed; end this process and attach again",
                    self.changes(),
                    u32::MAX / MAX_RANGES as u32
                ))
            })?;
            next += 1;
            let region = Region::new(id, range, host);
            known
                .iter()
                .for_each(|earlier| region.inherit_marks(earlier));
            regions.push(Arc::new(region));
        }
        let same = known.len() == regions.len()
            && known.iter().zip(&regions).all(|(a, b)| Arc::ptr_eq(a, b));
        if !same {
            *self.regions.write().unwrap_or_else(PoisonError::into_inner) = regions;
            self.changes.fetch_add(1, Ordering::SeqCst);
        }
        Ok(!same)
    }

    /// Returns the number of changes of the regions.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Marks a removable region as gone unless the monitor confirms that it still has the region at
    /// the same address. `host_address` translates the first address of a guest-physical range, and
    /// fails if the range is no longer contiguous in the monitor. After the deadline, nothing more
    /// is confirmed, because the guest is stopped.
    pub fn confirm(
        &self,
        process: &Process,
        deadline: Instant,
        host_address: impl Fn(&Range<u64>) -> Result<u64, AttachError>,
    ) {
        let regions = self.regions();
        let mut answers = true;
        let mut addresses = Vec::new();
        for region in regions.iter() {
            if !region.is_removable() || region.is_gone() {
                continue;
            }
            answers = answers && Instant::now() < deadline;
            let found = answers.then(|| host_address(&region.addresses));
            // A monitor that failed to answer is not asked about further regions.
            answers = !matches!(found, None | Some(Err(AttachError::Monitor(_))));
            addresses.push((region, found.and_then(Result::ok)));
        }
        let mapped = addresses.iter().filter(|(region, _)| region.is_mapped());
        let mapped: Vec<u64> = mapped.filter_map(|(_, address)| *address).collect();
        let mappings = (!mapped.is_empty()).then(|| process.mappings(mapped, deadline).ok());
        let mappings = mappings.flatten();
        for (region, address) in addresses {
            let is_there = |address| region.is_still_at(address, mappings.as_ref());
            if !address.is_some_and(is_there) {
                region.set_gone();
                self.doubt();
            }
        }
    }

    /// Returns whether an access missed memory, or a region was lost, since the last call.
    #[must_use]
    pub fn take_doubt(&self) -> bool {
        self.doubted.swap(false, Ordering::SeqCst)
    }

    /// Requests another read of the guest's memory map.
    pub fn doubt(&self) {
        self.doubted.store(true, Ordering::SeqCst);
    }

    /// Returns the number of bytes of RAM.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let size = |region: &Arc<Region>| region.addresses.end - region.addresses.start;
        self.regions().iter().map(size).sum()
    }

    /// Returns whether all of the RAM is mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.regions().iter().all(|region| region.is_mapped())
    }

    /// Returns the RAM that has pages, as far as the host reveals it.
    #[must_use]
    pub fn filled(&self) -> Vec<Range<u64>> {
        let regions = self.regions();
        let there = regions.iter().filter(|region| !region.is_gone());
        there.flat_map(|region| region.filled()).collect()
    }

    /// Returns the address of a piece in the monitor's process; `None` if its region is gone.
    #[must_use]
    pub fn monitors_address(&self, piece: Piece) -> Option<u64> {
        self.access(piece, |region| region.address(piece.offset()))
    }

    /// Accesses words through one of these threads of the process, which the caller has stopped by
    /// ptrace. The first thread of the process is not used.
    pub fn by_stopped_thread(&self, process: &Process, threads: &[u32]) -> ByStoppedThread<'_> {
        let other = threads.iter().find(|thread| **thread != process.pid());
        let thread = other.and_then(|thread| i32::try_from(*thread).ok());
        self.stopped.store(thread.unwrap_or(0), Ordering::SeqCst);
        ByStoppedThread(self)
    }

    fn stopped_thread(&self) -> Option<Pid> {
        let thread = self.stopped.load(Ordering::SeqCst);
        (thread != 0).then(|| Pid::from_raw(thread))
    }

    fn regions(&self) -> RwLockReadGuard<'_, Vec<Arc<Region>>> {
        // Each change assigns whole values, so a panic leaves no inconsistent state.
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accesses the region of a piece; `None` if the piece does not lie in it, or the region is
    /// gone.
    fn access<T>(&self, piece: Piece, access: impl FnOnce(&Region) -> T) -> Option<T> {
        let regions = self.regions();
        let region = regions.iter().find(|region| region.has(piece))?;
        Some(access(region))
    }
}

impl PhysicalMemory for AttachedRam {
    fn ram(&self) -> Vec<Range<u64>> {
        self.filled()
    }

    /// Copies bytes without filling holes of a file.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        let piece = self.piece(address, length)?;
        let copied = self.access(piece, |region| region.copy(piece, bytes));
        let outside = OutsideMemory { address, length };
        (copied == Some(true)).then_some(()).ok_or(outside)
    }
}

impl Ram for AttachedRam {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        let outside = OutsideMemory { address, length };
        let regions = self.regions();
        let Some(region) = regions
            .iter()
            .find(|region| region.addresses.contains(&address) && !region.is_gone())
        else {
            self.doubt();
            return Err(outside);
        };
        let end = address.checked_add(length as u64).ok_or(outside)?;
        if end > region.addresses.end {
            return Err(outside);
        }
        let length = u32::try_from(length).map_err(|_| outside)?;
        Ok(Piece::new(
            region.id,
            address - region.addresses.start,
            length,
        ))
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        let fits = bytes.len() == piece.length();
        let read = || self.access(piece, |region| region.read(piece, bytes));
        fits.then(read).flatten().unwrap_or_default()
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        let fits = bytes.len() == piece.length();
        let write = || self.access(piece, |region| region.write(piece, bytes));
        fits.then(write).flatten().unwrap_or_default()
    }

    fn writes_whole(&self, _piece: Piece) -> bool {
        // A write through a mapping may be partial. A write through /proc/PID/mem is whole, but it
        // may take effect too late: if the thread that holds the vCPUs stopped ends, the vCPUs run
        // while this thread is still in the kernel's copy.
        false
    }

    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        let Some(thread) = self.stopped_thread() else {
            return 0;
        };
        let regions = self.regions();
        let found = |word| find(&regions, word).map(|(word, ..)| word);
        let mut index = 0;
        // Memory that is mapped is accessed without system calls.
        while let Some(rest) = words.get(index..)
            && rest.first().and_then(found).is_some()
        {
            let copies = Copies::read(thread, rest.iter().map_while(found));
            let unchanged = rest.iter().enumerate().take_while(|(at, word)| {
                let value = copies.value(*at, word.length);
                value.is_some_and(|value| value & word.mask == word.before)
            });
            let unchanged = unchanged.count();
            index += unchanged;
            if unchanged == 0 || unchanged < copies.words() {
                break;
            }
        }
        index
    }

    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        let mut leading = Leading::default();
        let Some(thread) = self.stopped_thread() else {
            return leading;
        };
        let regions = self.regions();
        let found = |word| find(&regions, word).map(|(place, ..)| (place, word.after));
        while let Some(rest) = words.get(leading.written..)
            && rest.first().and_then(found).is_some()
        {
            let Written { words, touched } = at_once::write(thread, rest.iter().map_while(found));
            leading.touched = leading.written + touched;
            for word in &rest[..touched] {
                if let Some((_, region, piece)) = find(&regions, word) {
                    region.mark_piece(piece);
                }
            }
            let mut at = 0;
            while at < words {
                let left = &rest[at..words];
                let places = left.iter().map_while(found).map(|(place, _)| place);
                let copies = Copies::read(thread, places);
                if copies.words() == 0 {
                    return leading;
                }
                for (index, word) in left.iter().enumerate().take(copies.words()) {
                    let value = copies.value(index, word.length);
                    if value != Some(word.after) {
                        leading.differs = value;
                        return leading;
                    }
                    leading.written += 1;
                }
                at += copies.words();
            }
            if words == 0 || words < touched {
                break;
            }
        }
        leading
    }

    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        let exchange = |region: &Region| region.compare_exchange(piece, current, new);
        let is_word = piece.length() == 4;
        is_word
            .then(|| self.access(piece, exchange))
            .flatten()
            .flatten()
    }

    fn can_exchange(&self) -> bool {
        self.is_mapped()
    }

    fn is_dirty(&self, address: u64) -> bool {
        let regions = self.regions();
        let mut regions = regions.iter();
        regions.any(|region| region.addresses.contains(&address) && region.is_dirty(address))
    }
}

/// Returns a word's place in the monitor's process, its region and its piece; `None` if the word is
/// not accessed there, or not in one piece.
fn find<'r>(
    regions: &'r [Arc<Region>],
    word: &Word<Place>,
) -> Option<(ProcessWord, &'r Region, Piece)> {
    let [piece, none] = word.place.pieces(word.length);
    let is_whole = none.length() == 0 && piece.length() == word.length;
    let mut regions = regions.iter().filter(|_| is_whole);
    let region = regions.find(|region| region.has(piece))?;
    let place = ProcessWord {
        address: region.in_process(piece)?,
        length: word.length,
    };
    Some((place, region, piece))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;
    use std::time::Duration;

    use vm_memory::{FileOffset, MmapRegion};

    use super::*;
    use crate::flat_view::Removal;
    use crate::process::READS;
    use crate::qmp::QmpError;

    const BASE: u64 = 0x10_0000;
    const DIMM: u64 = 0x1_0000_0000;
    /// The size of the mappings. It is below 2 MiB, because the kernel aligns larger mappings to 2
    /// MiB and would not put one into the gap that another has left.
    const SIZE: u64 = 1 << 18;

    /// A simulated monitor in this process. It has the machine's memory, and behind this a DIMM in
    /// the same file.
    struct Monitor {
        process: Process,
        file: File,
        map: MmapRegion,
    }

    impl Monitor {
        fn new() -> Self {
            let file = tempfile::tempfile().expect("room");
            file.set_len(2 * SIZE).expect("room");
            let map = map(&file);
            let process = Process::open(std::process::id()).expect("it runs");
            Self { process, file, map }
        }

        fn host_address(&self, address: u64) -> Result<u64, AttachError> {
            let offset = match address {
                BASE..DIMM => address - BASE,
                _ => address - DIMM + SIZE,
            };
            Ok(self.map.as_ptr() as u64 + offset)
        }

        fn open(&self, access: Access) -> AttachedRam {
            let ranges = vec![range(BASE, SIZE, Removal::Never), dimm()];
            let host_address = |address| self.host_address(address);
            AttachedRam::open(&self.process, ranges, access, later(), host_address).expect("opened")
        }
    }

    fn map(file: &File) -> MmapRegion {
        map_of(file, 2 * SIZE)
    }

    fn map_of(file: &File, bytes: u64) -> MmapRegion {
        let file = file.try_clone().expect("a descriptor");
        let size = usize::try_from(bytes).expect("small");
        MmapRegion::from_file(FileOffset::new(file, 0), size).expect("address space")
    }

    fn range(start: u64, size: u64, removal: Removal) -> RamRange {
        RamRange {
            addresses: start..start + size,
            backend: "ram".to_owned(),
            offset: 0,
            removal,
        }
    }

    fn dimm() -> RamRange {
        range(DIMM, SIZE, Removal::ByVcpu)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn silent(_: u64) -> Result<u64, AttachError> {
        Err(AttachError::Monitor(QmpError::TimedOut {
            command: "gpa2hva".to_owned(),
            patience: Duration::ZERO,
        }))
    }

    fn reads(memory: &AttachedRam, piece: Piece) -> bool {
        memory.read_piece(piece, &mut [0; 8])
    }

    #[test]
    fn a_monitor_that_does_not_answer_is_asked_once_in_a_stop() {
        for access in [Access::File, Access::Process] {
            let monitor = Monitor::new();
            let memory = monitor.open(access);
            let host_address = |address| monitor.host_address(address);
            let ranges = || {
                let second = range(DIMM + SIZE / 2, SIZE / 2, Removal::ByVcpu);
                let first = range(DIMM, SIZE / 2, Removal::ByVcpu);
                vec![range(BASE, SIZE, Removal::Never), first, second]
            };
            let changed = memory.update(&monitor.process, ranges(), later(), host_address);
            assert!(changed.expect("taken over"));
            let base = memory.piece(BASE, 8).expect("RAM");
            let pieces = [DIMM, DIMM + SIZE / 2].map(|at| memory.piece(at, 8).expect("RAM"));
            let _ = memory.take_doubt();
            memory.confirm(&monitor.process, later(), |range| host_address(range.start));
            assert!(pieces.iter().all(|piece| reads(&memory, *piece)));
            assert!(!memory.take_doubt());
            let asked = Cell::new(0);
            memory.confirm(&monitor.process, later(), |range| {
                asked.set(asked.get() + 1);
                silent(range.start)
            });
            assert_eq!(asked.get(), 1);
            assert!(!pieces.iter().any(|piece| reads(&memory, *piece)));
            assert!(reads(&memory, base), "nothing removes it");
            assert!(memory.take_doubt());
            // The memory still exists, so an update maps it again.
            let changed = memory.update(&monitor.process, ranges(), later(), host_address);
            assert!(changed.expect("taken over"));
            assert!(memory.read_u64(DIMM).is_some());
            assert!(!pieces.iter().any(|piece| reads(&memory, *piece)));
            assert!(reads(&memory, base), "it has not changed");
        }
    }

    #[test]
    fn the_list_of_mappings_is_read_once_for_all_regions() {
        let monitor = Monitor::new();
        let host_address = |address| monitor.host_address(address);
        READS.set(0);
        let memory = monitor.open(Access::File);
        assert_eq!(READS.get(), 2, "the file is confirmed after it was opened");
        let part = |number| range(DIMM + number * SIZE / 4, SIZE / 4, Removal::ByVcpu);
        let parts = (0..4).map(part).collect();
        READS.set(0);
        let changed = memory.update(&monitor.process, parts, later(), host_address);
        assert!(changed.expect("taken over"));
        assert_eq!(READS.get(), 1);
        READS.set(0);
        memory.confirm(&monitor.process, later(), |range| host_address(range.start));
        assert_eq!(READS.get(), 1);
        assert_eq!(memory.bytes(), SIZE);
        assert!(!memory.take_doubt(), "all of them are there");
    }

    #[test]
    fn nothing_is_confirmed_after_the_deadline() {
        for access in [Access::File, Access::Process] {
            let monitor = Monitor::new();
            let memory = monitor.open(access);
            let piece = memory.piece(DIMM, 8).expect("RAM");
            memory.confirm(&monitor.process, Instant::now(), |_| panic!("it is late"));
            assert!(!reads(&memory, piece));
            assert!(memory.take_doubt());
            let ranges = vec![range(BASE, SIZE, Removal::Never), dimm()];
            let late = memory.update(&monitor.process, ranges, Instant::now(), |address| {
                monitor.host_address(address)
            });
            late.expect_err("it is late");
        }
    }

    #[test]
    fn another_file_at_the_address_is_not_the_region() {
        // Another thread may take the address first, so the test tries this several times.
        assert!((0..20).any(|_| another_file_takes_the_place()));
    }

    /// Returns false if the kernel has put the other file at another address.
    fn another_file_takes_the_place() -> bool {
        let mut monitor = Monitor::new();
        let memory = monitor.open(Access::File);
        let piece = memory.piece(DIMM, 8).expect("RAM");
        let address = monitor.map.as_ptr();
        monitor.file = tempfile::tempfile().expect("room");
        monitor.file.set_len(2 * SIZE).expect("room");
        monitor.map = map(&monitor.file);
        // The kernel fills higher gaps first, so fill these.
        let mut higher = Vec::new();
        while monitor.map.as_ptr() != address {
            if higher.len() == 1000 {
                return false;
            }
            higher.push(std::mem::replace(&mut monitor.map, map(&monitor.file)));
        }
        memory.confirm(&monitor.process, later(), |range| {
            monitor.host_address(range.start)
        });
        assert!(!reads(&memory, piece));
        true
    }

    #[test]
    fn what_cannot_be_taken_over_changes_nothing() {
        let monitor = Monitor::new();
        let memory = monitor.open(Access::File);
        let piece = memory.piece(DIMM, 8).expect("RAM");
        let host_address = |address| monitor.host_address(address);
        let changes = memory.changes();
        let update = |ranges, file: bool| {
            memory.update(&monitor.process, ranges, later(), |address| match file {
                true => host_address(address),
                false => silent(address),
            })
        };
        update(vec![dimm()], false).expect_err("no answer");
        let beyond = update(vec![range(DIMM, 2 * SIZE, Removal::ByVcpu)], true);
        let error = beyond.expect_err("beyond the mapping").to_string();
        assert!(error.contains("has no 524288 bytes at"), "{error}");
        assert!(error.contains("mapped in one run, only 262144"), "{error}");
        let mut grown = Monitor::new();
        grown.file = monitor.file.try_clone().expect("a descriptor");
        grown.file.set_len(4 * SIZE).expect("room");
        grown.map = map_of(&grown.file, 4 * SIZE);
        let more = vec![range(DIMM, 3 * SIZE, Removal::ByVcpu)];
        let beyond = memory.update(&monitor.process, more, later(), |address| {
            grown.host_address(address)
        });
        let error = beyond.expect_err("beyond the known file").to_string();
        let expected = "it needs 786432 bytes from 0x40000, and the file has 524288; attach again";
        assert!(error.contains(expected), "{error}");
        assert_eq!(memory.changes(), changes);
        assert!(reads(&memory, piece));
        let same = vec![range(BASE, SIZE, Removal::Never), dimm()];
        assert!(!update(same, true).expect("nothing new"));
        assert!(update(vec![dimm()], true).expect("less"));
        assert_eq!(memory.changes(), changes + 1);
        assert!(reads(&memory, piece), "it has not changed");
        assert_eq!(memory.read_u64(BASE), None);
    }

    /// Returns a word of 4 bytes at this offset of the machine's memory.
    fn word(memory: &AttachedRam, offset: u64, after: u64) -> Word<Place> {
        let piece = memory.piece(BASE + offset, 4).expect("RAM");
        Word {
            place: piece.into(),
            length: 4,
            mask: 0xffff_ffff,
            before: 0,
            after,
        }
    }

    /// Returns this thread's number. The thread stands for one that is stopped.
    fn thread() -> u32 {
        rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned()
    }

    #[test]
    fn words_are_accessed_at_once_while_a_thread_is_stopped() {
        let monitor = Monitor::new();
        for access in [Access::Process, Access::File] {
            let ram = Arc::new(monitor.open(access));
            let words: Vec<_> = (0..1000)
                .map(|index| word(&ram, 64 * index, index + 1))
                .collect();
            assert_eq!(ram.leading_unchanged(&words), 0, "no thread is stopped");
            assert_eq!(ram.write_leading(&words), Leading::default());
            let stopped = ram.by_stopped_thread(&monitor.process, &[std::process::id()]);
            assert_eq!(ram.leading_unchanged(&words), 0, "it is the first thread");
            drop(stopped);
            let both = [std::process::id(), thread()];
            let stopped = ram.by_stopped_thread(&monitor.process, &both);
            let count = if access == Access::Process { 1000 } else { 0 };
            assert_eq!(ram.leading_unchanged(&words), count);
            let written = ram.write_leading(&words);
            assert_eq!((written.written, written.differs), (count, None));
            assert_eq!(ram.is_dirty(BASE + 64 * 999), count > 0);
            let wrong = ram.leading_unchanged(&words[500..]);
            assert_eq!(wrong, 0, "they have changed");
            drop(stopped);
            assert_eq!(ram.write_leading(&words), Leading::default());
            for word in &words {
                ram.write_piece(word.place.first(), &[0; 4])
                    .then_some(())
                    .expect("RAM");
            }
        }
    }

    #[test]
    fn a_word_that_reads_back_as_another_is_reported_with_all_that_were_written() {
        let monitor = Monitor::new();
        let ram = monitor.open(Access::Process);
        let _stopped = ram.by_stopped_thread(&monitor.process, &[thread()]);
        // The third word overwrites a part of the second.
        let places = [(0, 1), (64, 2), (66, 3), (128, 4)];
        let words = places.map(|(offset, after)| word(&ram, offset, after));
        let expected = Leading {
            written: 1,
            differs: Some(0x3_0002),
            touched: 4,
        };
        assert_eq!(ram.write_leading(&words), expected);
    }

    #[test]
    fn memory_that_the_monitor_can_reuse_is_not_written_at_once() {
        let monitor = Monitor::new();
        let ranges = vec![range(BASE, SIZE, Removal::ByMonitor)];
        let host_address = |address| monitor.host_address(address);
        let ram = AttachedRam::open(
            &monitor.process,
            ranges,
            Access::Process,
            later(),
            host_address,
        );
        let ram = ram.expect("opened");
        let _stopped = ram.by_stopped_thread(&monitor.process, &[thread()]);
        assert_eq!(ram.write_leading(&[word(&ram, 0, 1)]), Leading::default());
    }

    #[test]
    fn ids_of_regions_are_not_used_twice() {
        let monitor = Monitor::new();
        let memory = monitor.open(Access::File);
        let update = |ranges| {
            memory.update(&monitor.process, ranges, later(), |address| {
                monitor.host_address(address)
            })
        };
        let last = u64::from(u32::MAX) / MAX_RANGES as u64;
        memory.changes.store(last, Ordering::SeqCst);
        let half = || vec![range(BASE, SIZE / 2, Removal::Never)];
        assert!(update(half()).expect("the last one"));
        let error = update(vec![dimm()]).expect_err("no id is left").to_string();
        let expected = "changed 4194304 times, and no more than 4194303 changes are followed; end this process and attach again";
        assert!(error.contains(expected), "{error}");
        assert!(!update(half()).expect("nothing new"));
    }

    #[test]
    fn marks_outlive_another_shape_of_a_region() {
        let monitor = Monitor::new();
        let memory = monitor.open(Access::Process);
        memory.write(BASE + SIZE - 4096, &[1; 4]).expect("RAM");
        let half = range(BASE + SIZE / 2, SIZE / 2, Removal::Never);
        let update = memory.update(&monitor.process, vec![half], later(), |address| {
            monitor.host_address(address)
        });
        assert!(update.expect("taken over"));
        assert!(memory.is_dirty(BASE + SIZE - 4096));
        assert!(!memory.is_dirty(BASE + SIZE - 8192));
        assert!(!memory.is_dirty(BASE));
    }
}
