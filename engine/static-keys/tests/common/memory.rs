// SPDX-License-Identifier: Apache-2.0
//! Guest memory for tests, with an arbitrary page mapping, injected faults, and counters of
//! accesses.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;

use static_keys::{AccessFault, Exchanged, GuestMemory, LOCATE_MAX, Leading, Unmapped, Word};

pub const PAGE: u64 = 4096;

/// The effect of an injected fault, which replaces the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The write fails and nothing is written.
    Refused,
    /// Half of the bytes are written, then the write fails.
    Torn,
    /// Nothing is written, but the write reports success.
    Lost,
}

/// Pages by guest-virtual page number. Each page has its own allocation, so a range across two
/// pages is never contiguous.
pub struct Pages {
    pages: RefCell<BTreeMap<u64, Box<[u8; PAGE as usize]>>>,
    writes: Cell<usize>,
    locates: Cell<usize>,
    reads: Cell<usize>,
    /// The numbers of the writes that fail, from the first up to but not including the second, and
    /// the fault. Writes are counted from 0.
    fault: Cell<Option<(usize, usize, Fault)>>,
    /// Called before each compare-and-exchange with its number, counted from 0.
    interference: RefCell<Option<Interference>>,
    exchanges: Cell<usize>,
    /// Called after each byte that a write stores. Writes are then not atomic.
    watcher: RefCell<Option<Watcher>>,
    /// The maximum number of words that are compared or written in one call.
    stride: Cell<usize>,
    /// A call that writes several words reads them back after the last of them.
    reads_back_late: Cell<bool>,
}

impl Default for Pages {
    /// Handles two words in one call, so that a change of several words uses both the methods for
    /// many words and those for one word.
    fn default() -> Self {
        Self {
            pages: RefCell::default(),
            writes: Cell::default(),
            locates: Cell::default(),
            reads: Cell::default(),
            fault: Cell::default(),
            interference: RefCell::default(),
            exchanges: Cell::default(),
            watcher: RefCell::default(),
            stride: Cell::new(2),
            reads_back_late: Cell::default(),
        }
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

/// An action of the guest between two accesses of the engine.
pub type Interference = Box<dyn Fn(&Pages, usize)>;

/// The order in which the bytes of a write are stored, and the function that checks the memory
/// after each of them.
pub struct Watcher {
    pub order: fn(usize) -> Vec<usize>,
    pub look: Box<dyn Fn(&Pages)>,
}

#[derive(Clone, Copy, Debug)]
pub struct Place {
    address: u64,
    len: usize,
}

impl Pages {
    /// Maps the pages of a range; new pages are zeroed.
    pub fn map(&self, address: u64, len: u64) {
        let mut pages = self.pages.borrow_mut();
        for page in address / PAGE..=(address + (len.max(1) - 1)) / PAGE {
            pages
                .entry(page)
                .or_insert_with(|| Box::new([0; PAGE as usize]));
        }
    }

    pub fn unmap(&self, address: u64) {
        self.pages.borrow_mut().remove(&(address / PAGE));
    }

    /// Maps and writes without counting or injected faults.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        self.map(address, bytes.len() as u64);
        self.copy_in(address, bytes);
    }

    pub fn poke_u32(&self, address: u64, value: u32) {
        self.poke(address, &value.to_le_bytes());
    }

    pub fn poke_u64(&self, address: u64, value: u64) {
        self.poke(address, &value.to_le_bytes());
    }

    pub fn peek<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.copy_out(address, &mut bytes);
        bytes
    }

    /// The contents of all pages.
    pub fn snapshot(&self) -> BTreeMap<u64, Box<[u8; PAGE as usize]>> {
        self.pages.borrow().clone()
    }

    pub fn writes(&self) -> usize {
        self.writes.get()
    }

    pub fn locates(&self) -> usize {
        self.locates.get()
    }

    pub fn reads(&self) -> usize {
        self.reads.get()
    }

    /// Makes the next writes `from..until` fail.
    pub fn inject(&self, from: usize, until: usize, fault: Fault) {
        let now = self.writes.get();
        self.fault.set(Some((
            now.saturating_add(from),
            now.saturating_add(until),
            fault,
        )));
    }

    pub fn heal(&self) {
        self.fault.set(None);
    }

    pub fn interfere(&self, interference: Interference) {
        *self.interference.borrow_mut() = Some(interference);
        self.exchanges.set(0);
    }

    /// Handles at most this many words in one call from now on.
    pub fn set_stride(&self, words: usize) {
        self.stride.set(words);
    }

    /// Sets whether a call that writes several words reads them back after the last of them.
    pub fn set_reads_back_late(&self, late: bool) {
        self.reads_back_late.set(late);
    }

    /// Returns the fault of the write with this number.
    fn fault_of(&self, number: usize) -> Option<Fault> {
        let (from, until, fault) = self.fault.get()?;
        (from..until).contains(&number).then_some(fault)
    }

    /// Sets or removes the watcher. While there is one, each byte of a write is stored on its own.
    pub fn watch(&self, watcher: Option<Watcher>) {
        *self.watcher.borrow_mut() = watcher;
    }

    /// Reads a word back, adds it to the result, and returns whether it is as written.
    fn reads_back(&self, word: &Word<Place>, leading: &mut Leading) -> bool {
        let mut found = [0; 8];
        self.copy_out(word.place.address, &mut found[..word.length]);
        let same = u64::from_le_bytes(found) == word.after;
        match same {
            true => leading.written += 1,
            false => leading.differs = Some(u64::from_le_bytes(found)),
        }
        same
    }

    fn copy_in(&self, address: u64, bytes: &[u8]) {
        let mut pages = self.pages.borrow_mut();
        for (index, byte) in bytes.iter().enumerate() {
            let at = address + index as u64;
            pages.get_mut(&(at / PAGE)).expect("mapped")[(at % PAGE) as usize] = *byte;
        }
    }

    fn copy_out(&self, address: u64, bytes: &mut [u8]) {
        let pages = self.pages.borrow();
        for (index, byte) in bytes.iter_mut().enumerate() {
            let at = address + index as u64;
            *byte = pages.get(&(at / PAGE)).expect("mapped")[(at % PAGE) as usize];
        }
    }

    fn is_mapped(&self, place: Place) -> bool {
        let pages = self.pages.borrow();
        let last = place.address + (place.len as u64 - 1);
        (place.address / PAGE..=last / PAGE).all(|page| pages.contains_key(&page))
    }
}

impl GuestMemory for Pages {
    type Place = Place;

    fn locate(&self, address: u64, len: usize) -> Result<Place, Unmapped> {
        assert!((1..=LOCATE_MAX).contains(&len), "located {len} bytes");
        self.locates.set(self.locates.get() + 1);
        let place = Place { address, len };
        if address.checked_add(len as u64 - 1).is_none() {
            return Err(Unmapped {
                address,
                reason: "past the end of the address space",
            });
        }
        if self.is_mapped(place) {
            Ok(place)
        } else {
            Err(Unmapped {
                address,
                reason: "not present",
            })
        }
    }

    fn read(&self, place: Place, bytes: &mut [u8]) -> Result<(), AccessFault> {
        assert!(
            bytes.len() <= place.len,
            "read of {} bytes of {}",
            bytes.len(),
            place.len
        );
        self.reads.set(self.reads.get() + 1);
        if !self.is_mapped(place) {
            return Err(AccessFault);
        }
        self.copy_out(place.address, bytes);
        Ok(())
    }

    fn write(&self, place: Place, bytes: &[u8]) -> Result<(), AccessFault> {
        assert!(
            bytes.len() <= place.len,
            "write of {} bytes of {}",
            bytes.len(),
            place.len
        );
        let number = self.writes.replace(self.writes.get() + 1);
        match self.fault_of(number) {
            Some(Fault::Refused) => return Err(AccessFault),
            Some(Fault::Torn) => {
                self.copy_in(place.address, &bytes[..bytes.len() / 2]);
                return Err(AccessFault);
            }
            Some(Fault::Lost) => return Ok(()),
            None => {}
        }
        if !self.is_mapped(place) {
            return Err(AccessFault);
        }
        match &*self.watcher.borrow() {
            None => self.copy_in(place.address, bytes),
            Some(watcher) => {
                for index in (watcher.order)(bytes.len()) {
                    self.copy_in(place.address + index as u64, &bytes[index..=index]);
                    (watcher.look)(self);
                }
            }
        }
        Ok(())
    }

    fn writes_whole(&self, _place: Place, _length: usize) -> bool {
        self.watcher.borrow().is_none()
    }

    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        let unchanged = |word: &&Word<Place>| {
            let mut bytes = [0; 8];
            let read = self.read(word.place, &mut bytes[..word.length]);
            read.is_ok() && u64::from_le_bytes(bytes) & word.mask == word.before
        };
        let words = words.iter().take(self.stride.get());
        words.take_while(unchanged).count()
    }

    /// Stops before a write that would be refused, so that the number of writes does not depend on
    /// how many of them are made in one call.
    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        let mut leading = Leading::default();
        if self.watcher.borrow().is_some() {
            return leading;
        }
        for word in words.iter().take(self.stride.get()) {
            let fault = self.fault_of(self.writes.get());
            let is_refused = fault.is_some_and(|fault| !matches!(fault, Fault::Lost));
            let bytes = &word.after.to_le_bytes()[..word.length];
            if is_refused || !self.is_mapped(word.place) || self.write(word.place, bytes).is_err() {
                break;
            }
            leading.touched += 1;
            if !self.reads_back_late.get() && !self.reads_back(word, &mut leading) {
                break;
            }
        }
        if self.reads_back_late.get() {
            for word in &words[..leading.touched] {
                if !self.reads_back(word, &mut leading) {
                    break;
                }
            }
        }
        leading
    }

    fn compare_exchange_u32(
        &self,
        place: Place,
        current: u32,
        new: u32,
    ) -> Result<Exchanged, AccessFault> {
        let number = self.exchanges.replace(self.exchanges.get() + 1);
        if let Some(interference) = &*self.interference.borrow() {
            interference(self, number);
        }
        if !place.address.is_multiple_of(4) || !self.is_mapped(place) {
            return Err(AccessFault);
        }
        let found = u32::from_le_bytes(self.peek(place.address));
        if found != current {
            return Ok(Err(found));
        }
        self.copy_in(place.address, &new.to_le_bytes());
        Ok(Ok(found))
    }
}
