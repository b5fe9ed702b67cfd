// SPDX-License-Identifier: Apache-2.0
//! Guest memory without a guest. A page is allocated when it is first written.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use crate::kernel_memory::Place;
use crate::memory::{Exchanged, GuestRam, Leading, Piece, Ram, Word};
use patchbay_memory::{OutsideMemory, PAGE_SIZE, PhysicalMemory};

const WORDS: usize = 512;
const _: () = assert!(WORDS as u64 * 8 == PAGE_SIZE);

#[derive(Debug)]
struct Page {
    words: [AtomicU64; WORDS],
    dirty: AtomicBool,
}

/// Zeroed memory from address 0 on, in one region.
#[derive(Debug)]
pub struct Memory {
    /// A page that was never written reads as zeroes. The first write to a page allocates it. While
    /// a guest is stopped, only pages that the test has written before are written, so nothing is
    /// allocated.
    pages: Box<[OnceLock<Box<Page>>]>,
    faults: Faults,
}

/// The writes that must fail: those with numbers from `first` up to, but not including, `end`.
/// Writes are counted from the call of [`Memory::fail_writes`] on.
#[derive(Debug, Default)]
struct Faults {
    done: AtomicU64,
    first: AtomicU64,
    end: AtomicU64,
    no_exchange: AtomicBool,
}

impl Faults {
    /// Counts the current write and returns whether it fails.
    fn strike(&self) -> bool {
        let number = self.done.fetch_add(1, SeqCst);
        (self.first.load(SeqCst)..self.end.load(SeqCst)).contains(&number)
    }
}

/// The part of an access that lies in one word.
struct Part {
    page: usize,
    word: usize,
    /// Shift of the first byte in the word, in bits.
    shift: usize,
    bytes: Range<usize>,
}

fn parts(piece: Piece) -> impl Iterator<Item = Part> {
    let start = usize::try_from(piece.offset()).unwrap_or(usize::MAX);
    let length = piece.length();
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = start.checked_add(done)?;
        let here = (8 - at % 8).min(length - done);
        let part = Part {
            page: at / (WORDS * 8),
            word: at / 8 % WORDS,
            shift: at % 8 * 8,
            bytes: done..done + here,
        };
        done += here;
        (here > 0).then_some(part)
    })
}

/// Returns the mask of the lowest `bytes` bytes of a word.
fn mask(bytes: usize) -> u64 {
    u64::MAX.checked_shr(64 - 8 * bytes as u32).unwrap_or(0)
}

impl Memory {
    /// Creates `bytes` of zeroed memory, in whole pages.
    #[must_use]
    pub fn new(bytes: u64) -> Arc<Self> {
        let pages = usize::try_from(bytes / PAGE_SIZE).unwrap_or(usize::MAX);
        Arc::new(Self {
            pages: (0..pages).map(|_| OnceLock::new()).collect(),
            faults: Faults::default(),
        })
    }

    /// Creates zeroed memory as a [`GuestRam`], the form that the service uses.
    #[must_use]
    pub fn ram(bytes: u64) -> GuestRam {
        Self::new(bytes)
    }

    /// Makes the writes fail whose numbers are in the range. Writes are counted from 0, starting
    /// now. A failing write stores its first byte only.
    pub fn fail_writes(&self, numbers: Range<u64>) {
        self.faults.done.store(0, SeqCst);
        self.faults.first.store(numbers.start, SeqCst);
        self.faults.end.store(numbers.end, SeqCst);
    }

    /// Sets whether exchanges are impossible from now on.
    pub fn forbid_exchange(&self, forbidden: bool) {
        self.faults.no_exchange.store(forbidden, SeqCst);
    }

    fn contains(&self, piece: Piece) -> bool {
        let bytes = self.pages.len() as u64 * PAGE_SIZE;
        let end = piece.offset().checked_add(piece.length() as u64);
        piece.region() == 0 && end.is_some_and(|end| end <= bytes)
    }

    fn load(&self, page: usize, word: usize) -> u64 {
        let page = self.pages.get(page).and_then(OnceLock::get);
        page.map_or(0, |page| page.words[word].load(SeqCst))
    }

    fn page(&self, page: usize) -> &Page {
        self.pages[page].get_or_init(|| {
            Box::new(Page {
                words: [const { AtomicU64::new(0) }; WORDS],
                dirty: AtomicBool::new(false),
            })
        })
    }
}

/// The maximum number of words that one call handles. The caller handles the next word by itself,
/// so a test with more words covers both paths: several words in one call, and one word alone.
const AT_ONCE: usize = 3;

impl Memory {
    /// Reads a word whose bytes lie in one piece. Returns `None` for any other word.
    fn word(&self, word: &Word<Place>) -> Option<u64> {
        let piece = word.place.first().prefix(word.length);
        let mut bytes = [0; 8];
        let whole = bytes.get_mut(..word.length)?;
        let read = piece.length() == word.length && self.read_piece(piece, whole);
        read.then(|| u64::from_le_bytes(bytes))
    }
}

impl PhysicalMemory for Memory {
    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.pages.len() as u64 * PAGE_SIZE).collect()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        let piece = self.piece(address, length)?;
        let outside = OutsideMemory { address, length };
        self.read_piece(piece, bytes).then_some(()).ok_or(outside)
    }

    fn read_u64(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address).ok()?;
        let inside = at % 8 == 0 && at / 8 / WORDS < self.pages.len();
        inside.then(|| self.load(at / 8 / WORDS, at / 8 % WORDS))
    }
}

impl Ram for Memory {
    fn piece(&self, address: u64, length: usize) -> Result<Piece, OutsideMemory> {
        let outside = OutsideMemory { address, length };
        let short = u32::try_from(length).map_err(|_| outside)?;
        let piece = Piece::new(0, address, short);
        self.contains(piece).then_some(piece).ok_or(outside)
    }

    fn read_piece(&self, piece: Piece, bytes: &mut [u8]) -> bool {
        if bytes.len() != piece.length() || !self.contains(piece) {
            return false;
        }
        for part in parts(piece) {
            let word = self.load(part.page, part.word) >> part.shift;
            let length = part.bytes.len();
            bytes[part.bytes].copy_from_slice(&word.to_le_bytes()[..length]);
        }
        true
    }

    fn write_piece(&self, piece: Piece, bytes: &[u8]) -> bool {
        if bytes.len() != piece.length() || !self.contains(piece) {
            return false;
        }
        let fails = self.faults.strike();
        let (piece, bytes) = match fails {
            true => (piece.prefix(1), bytes.get(..1).unwrap_or_default()),
            false => (piece, bytes),
        };
        for part in parts(piece) {
            let page = self.page(part.page);
            let mut word = [0; 8];
            let mask = mask(part.bytes.len()) << part.shift;
            word[..part.bytes.len()].copy_from_slice(&bytes[part.bytes]);
            let new = u64::from_le_bytes(word) << part.shift;
            let set = |old| Some(old & !mask | new);
            // This cannot fail, because the closure always returns a value.
            let _ = page.words[part.word].fetch_update(SeqCst, SeqCst, set);
            page.dirty.store(true, SeqCst);
        }
        !fails
    }

    fn writes_whole(&self, _piece: Piece) -> bool {
        // The guest ends with this process.
        true
    }

    fn leading_unchanged(&self, words: &[Word<Place>]) -> usize {
        let words = words.iter().take(AT_ONCE);
        words
            .take_while(|word| {
                let found = self.word(word);
                found.is_some_and(|found| found & word.mask == word.before)
            })
            .count()
    }

    fn write_leading(&self, words: &[Word<Place>]) -> Leading {
        let mut leading = Leading::default();
        for word in words.iter().take(AT_ONCE) {
            let bytes = word.after.to_le_bytes();
            let piece = word.place.first().prefix(word.length);
            if self.word(word).is_none() {
                break;
            }
            if !self.write_piece(piece, &bytes[..word.length]) {
                leading.differs = self.word(word);
                break;
            }
            leading.written += 1;
        }
        leading
    }

    fn compare_exchange_u32(&self, piece: Piece, current: u32, new: u32) -> Option<Exchanged> {
        let aligned = piece.length() == 4 && piece.offset().is_multiple_of(4);
        if !aligned || !self.can_exchange() || !self.contains(piece) || self.faults.strike() {
            return None;
        }
        let part = parts(piece).next()?;
        let page = self.page(part.page);
        let mask = mask(4) << part.shift;
        let mut found = 0;
        let exchanged = page.words[part.word].fetch_update(SeqCst, SeqCst, |old| {
            found = u32::try_from((old & mask) >> part.shift).unwrap_or(0);
            (found == current).then_some(old & !mask | u64::from(new) << part.shift)
        });
        Some(match exchanged {
            Ok(_) => {
                page.dirty.store(true, SeqCst);
                Ok(current)
            }
            Err(_) => Err(found),
        })
    }

    fn can_exchange(&self) -> bool {
        !self.faults.no_exchange.load(SeqCst)
    }

    fn is_dirty(&self, address: u64) -> bool {
        let page = usize::try_from(address / PAGE_SIZE).unwrap_or(usize::MAX);
        let page = self.pages.get(page).and_then(OnceLock::get);
        page.is_some_and(|page| page.dirty.load(SeqCst))
    }
}
