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
use crate::host::host_memory;
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
    /// The monitor has a userfaultfd, so a call that accesses many words might wait for a page.
    waits_for_pages: AtomicBool,
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
            waits_for_pages: AtomicBool::new(true),
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
        check_size(&ranges)?;
        let known = self.regions().clone();
        let mut placed = Vec::with_capacity(ranges.len());
        for range in ranges {
            let address = host_address(range.addresses.start)?;
            placed.push((range, address));
        }
        let hosts = HostMemory::new(process, self.access, &known, deadline).find(&placed)?;
        let waits_for_pages = process.has_userfaultfd()?;
        self.waits_for_pages
            .store(waits_for_pages, Ordering::SeqCst);
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
    /// ptrace. The first thread of the process is not used. No thread is used if the process had a
    /// userfaultfd at the last [`AttachedRam::update`].
    pub fn by_stopped_thread(&self, process: &Process, threads: &[u32]) -> ByStoppedThread<'_> {
        let waits = self.waits_for_pages.load(Ordering::SeqCst);
        let other = threads
            .iter()
            .find(|thread| !waits && **thread != process.pid());
        let thread = other.and_then(|thread| i32::try_from(*thread).ok());
        self.stopped.store(thread.unwrap_or(0), Ordering::SeqCst);
        ByStoppedThread(self)
    }

    fn stopped_thread(&self) -> Option<Pid> {
        let thread = self.stopped.load(Ordering::SeqCst);
        (thread != 0).then(|| Pid::from_raw(thread))
    }

    // These two are not inlined, because the service calls the methods for each word, and the
    // buffers on the stack would cost each call something while no thread is stopped.

    #[inline(never)]
    fn leading_unchanged_at_once(&self, thread: Pid, words: &[Word<Place>]) -> usize {
        let regions = self.regions();
        let is_unchanged = |word: &Word<Place>, value| value & word.mask == word.before;
        self.count_expected(thread, &regions, words, is_unchanged).0
    }

    #[inline(never)]
    fn write_leading_at_once(&self, thread: Pid, words: &[Word<Place>]) -> Leading {
        let regions = self.regions();
        let mut leading = Leading::default();
        while let Some(rest) = words.get(leading.written..)
            && begins_in_process(&regions, rest)
        {
            let places = rest.iter().map_while(|word| {
                let (place, ..) = find(&regions, word)?;
                Some((place, word.after))
            });
            let Some(Written { words, touched }) =
                self.or_one_by_one(at_once::write(thread, places))
            else {
                break;
            };
            leading.touched = leading.written + touched;
            for word in &rest[..touched] {
                if let Some((_, region, piece)) = find(&regions, word) {
                    region.mark_piece(piece);
                }
            }
            let is_written = |word: &Word<Place>, value| value == word.after;
            let (same, differs) = self.count_expected(thread, &regions, &rest[..words], is_written);
            leading.written += same;
            leading.differs = differs;
            if touched == 0 || same < touched {
                break;
            }
        }
        leading
    }

    /// Returns the number of words at the start whose values are expected, and the value of the
    /// next word if it was read and is another. Stops before a word that is not in the monitor's
    /// process.
    fn count_expected(
        &self,
        thread: Pid,
        regions: &[Arc<Region>],
        words: &[Word<Place>],
        is_expected: impl Fn(&Word<Place>, u64) -> bool,
    ) -> (usize, Option<u64>) {
        let mut index = 0;
        while let Some(rest) = words.get(index..)
            && begins_in_process(regions, rest)
        {
            let places = rest.iter().map_while(|word| Some(find(regions, word)?.0));
            let Some(copies) = self.or_one_by_one(Copies::read(thread, places)) else {
                break;
            };
            for (at, word) in rest.iter().take(copies.words()).enumerate() {
                match copies.value(at, word.length) {
                    Some(value) if is_expected(word, value) => index += 1,
                    other => return (index, other),
                }
            }
        }
        (index, None)
    }

    /// Returns the result of a call that accesses many words. After an error the rest of the stop
    /// accesses each word on its own, because a call that the host forbids would fail at each word.
    fn or_one_by_one<T>(&self, result: nix::Result<T>) -> Option<T> {
        if result.is_err() {
            self.stopped.store(0, Ordering::SeqCst);
        }
        result.ok()
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
        match self.stopped_thread() {
            Some(thread) => self.leading_unchanged_at_once(thread, words),
            None => 0,
        }
    }

    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        match self.stopped_thread() {
            Some(thread) => self.write_leading_at_once(thread, words),
            None => Leading::default(),
        }
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

/// Returns whether the first word is in the monitor's process. If it is not, no call is prepared,
/// because mapped memory is accessed without system calls.
fn begins_in_process(regions: &[Arc<Region>], words: &[Word<Place>]) -> bool {
    words
        .first()
        .is_some_and(|word| find(regions, word).is_some())
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
        address: usize::try_from(region.in_process(piece)?).ok()?,
        length: word.length,
    };
    Some((place, region, piece))
}

/// Refuses more RAM than a guest of this host can have. QEMU or the host's kernel reports the
/// ranges, and the monitor chooses them. The bitmap of written pages takes memory in proportion to
/// their size.
fn check_size(ranges: &[RamRange]) -> Result<(), AttachError> {
    let bytes = ranges.iter().fold(0_u64, |sum, range| {
        sum.saturating_add(range.addresses.end - range.addresses.start)
    });
    if bytes > host_memory().saturating_mul(4) {
        return Err(AttachError::Refused(format!(
            "the guest has {bytes} bytes of RAM, more than four times the host's memory and swap"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
