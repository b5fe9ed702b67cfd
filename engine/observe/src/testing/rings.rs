// SPDX-License-Identifier: Apache-2.0
//! Rings of trace events in memory, written as a kernel writes them.
//!
//! The writer puts its stores into a queue, from which they reach the memory one by one. A test can
//! therefore interleave each store with the reads.

mod events;
mod reader;
mod version;

use std::cell::RefCell;
use std::collections::VecDeque;

pub use self::version::Version;
use crate::KernelView;
use crate::trace::{Layout, Source};

/// Address of the first byte of the memory.
pub const BASE: u64 = 0xffff_ffff_84a0_0000;
const ARRAYS: u64 = BASE;
/// Address of the top level's `struct trace_array`.
pub const ARRAY: u64 = BASE + 0x100;
/// Address of an instance's `struct trace_array`.
const INSTANCE: u64 = BASE + 0x180;
const INSTANCE_NAME: u64 = BASE + 0x1f0;
const CPUS: u64 = BASE + 0x60;
const BUFFER: u64 = BASE + 0x200;
const POINTERS: u64 = BASE + 0x300;
const RINGS: u64 = BASE + 0x400;
const PAGES: u64 = BASE + 0x1000;
const EVENTS: u64 = BASE + 0x6000;
const TEXTS: u64 = BASE + 0x7000;
/// Address of the function that returns the fields of a system call.
pub const SYSCALL_FIELDS: u64 = 0xffff_ffff_8123_4560;
const DATA: u64 = BASE + 0x8000;
/// The maximum number of pages of a ring.
const MAX_PAGES: u64 = 64;
const PAGE_BYTES: u64 = 64;
/// Number of bytes of events in a page.
pub const CAPACITY: usize = 4096 - 16;
const GENERATION: u64 = 1 << 20;
const HEAD: u64 = 1;
const UPDATE: u64 = 2;

/// Offsets in `struct ring_buffer_per_cpu`.
mod ring {
    pub const HEAD: u64 = 64;
    pub const TAIL: u64 = 72;
    pub const COMMIT: u64 = 80;
    pub const READER: u64 = 88;
    pub const ENTRIES: u64 = 104;
    pub const OVERRUN: u64 = 112;
    pub const COMMITS: u64 = 120;
    pub const COMMITTING: u64 = 128;
    pub const READ: u64 = 136;
    pub const LAST_OVERRUN: u64 = 144;
    pub const PAGES: u64 = 152;
}

/// Called before each read with its number.
type Hook = Box<dyn FnMut(u64, &mut Writer)>;

/// Rings in memory, and their writer.
pub struct Rings {
    writer: RefCell<Writer>,
    hook: RefCell<Option<Hook>>,
    reads: RefCell<u64>,
}

/// The model of one ring. Pages are numbered; the numbers are not in the order of the circle.
struct Ring {
    address: u64,
    pages: Vec<Page>,
    /// The page of the circle whose `next` is flagged.
    before_head: usize,
    /// `head_page`, which the writer does not update.
    head_hint: usize,
    tail: usize,
    commit: usize,
    reader: usize,
    entries: u64,
    overrun: u64,
    last_overrun: u64,
    read: u64,
    commits: u64,
    time: u64,
    /// Events that were overwritten before the reader page since the one before it (`lost_events`).
    missed: u64,
}

#[derive(Clone)]
struct Page {
    next: usize,
    previous: usize,
    data: u64,
    generation: u64,
    written: usize,
    /// Number of bytes before the padding at the end (`real_end`); 0 without it.
    end: usize,
    entries: u64,
    consumed: usize,
    consumed_entries: u64,
}

impl Page {
    /// Takes away the events, also those that readers have consumed.
    fn clear(&mut self) {
        (self.written, self.entries) = (0, 0);
        (self.consumed, self.consumed_entries) = (0, 0);
    }
}

/// The writer of all rings, and the guest's own reader.
pub struct Writer {
    version: Version,
    bytes: Vec<u8>,
    stores: VecDeque<(u64, Vec<u8>)>,
    rings: Vec<Ring>,
    /// Addresses of the next structure and of the next text of an event.
    structures: u64,
    texts: u64,
    /// Addresses of the events.
    calls: Vec<u64>,
}

impl Rings {
    /// Creates empty rings with this many pages each, beside the reader page.
    #[must_use]
    pub fn new(version: Version, cpus: usize, pages: usize) -> Self {
        Self {
            writer: RefCell::new(Writer::new(version, cpus, pages)),
            hook: RefCell::default(),
            reads: RefCell::default(),
        }
    }

    /// Returns what a discovery finds.
    ///
    /// # Panics
    /// If the layout is refused.
    #[must_use]
    pub fn source(&self) -> Source {
        let version = self.writer.borrow().version;
        Source {
            events: BASE + 0x40,
            common_fields: BASE + 0x50,
            arrays: ARRAYS,
            cpus: CPUS,
            syscall_fields: Some(SYSCALL_FIELDS),
            layout: Layout::read(&version).expect("it is whole"),
        }
    }

    /// Calls the writer, and carries out its stores.
    pub fn write<T>(&self, write: impl FnOnce(&mut Writer) -> T) -> T {
        let mut writer = self.writer.borrow_mut();
        let written = write(&mut writer);
        writer.run(usize::MAX);
        written
    }

    /// Calls `hook` before each later read, with the number of reads so far. Its stores stay in the
    /// queue until it runs them.
    pub fn before_read(&self, hook: impl FnMut(u64, &mut Writer) + 'static) {
        *self.reads.borrow_mut() = 0;
        *self.hook.borrow_mut() = Some(Box::new(hook));
    }

    /// Carries out all stores, and calls the hook no more.
    pub fn rest(&self) {
        *self.hook.borrow_mut() = None;
        self.write(|_| {});
    }

    /// Returns the number of reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        *self.reads.borrow()
    }
}

impl KernelView for Rings {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let mut reads = self.reads.borrow_mut();
        let mut writer = self.writer.borrow_mut();
        if let Some(hook) = &mut *self.hook.borrow_mut() {
            hook(*reads, &mut writer);
        }
        *reads += 1;
        let start = address.checked_sub(BASE);
        let start = start.and_then(|start| usize::try_from(start).ok());
        let found = start.and_then(|start| writer.bytes.get(start..)?.get(..bytes.len()));
        found.map(|found| bytes.copy_from_slice(found)).is_some()
    }
}

impl Writer {
    fn new(version: Version, cpus: usize, pages: usize) -> Self {
        let length = DATA - BASE + (cpus as u64) * MAX_PAGES * 4096;
        let mut writer = Self {
            version,
            bytes: vec![0; usize::try_from(length).expect("small")],
            stores: VecDeque::new(),
            rings: Vec::new(),
            structures: EVENTS,
            texts: TEXTS,
            calls: Vec::new(),
        };
        let link = |at, next, previous| [(at, next), (at + 8, previous)];
        let lists = [
            link(ARRAYS, INSTANCE, ARRAY),
            link(INSTANCE, ARRAY, ARRAYS),
            link(ARRAY, ARRAYS, INSTANCE),
        ];
        for (address, word) in lists.into_iter().flatten() {
            writer.put(address, word);
        }
        writer.put(INSTANCE + 16, INSTANCE_NAME);
        writer.put_bytes(INSTANCE_NAME, b"foo\0");
        writer.put(ARRAY + 40, BUFFER);
        writer.put(CPUS, cpus as u64);
        writer.put(BUFFER + 24, POINTERS);
        for cpu in 0..cpus {
            let address = RINGS + cpu as u64 * 256;
            writer.put(POINTERS + cpu as u64 * 8, address);
            let page = |number: usize| Page {
                next: (number + 1) % pages,
                previous: (number + pages - 1) % pages,
                data: DATA + (cpu as u64 * MAX_PAGES + number as u64) * 4096,
                generation: 0,
                written: 0,
                end: 0,
                entries: 0,
                consumed: 0,
                consumed_entries: 0,
            };
            // The last one is the reader page, which links to nothing yet.
            let ring = Ring {
                address,
                pages: (0..=pages).map(page).collect(),
                before_head: pages - 1,
                head_hint: 0,
                tail: 0,
                commit: 0,
                reader: pages,
                entries: 0,
                overrun: 0,
                last_overrun: 0,
                read: 0,
                commits: 0,
                time: 0,
                missed: 0,
            };
            writer.rings.push(ring);
            for number in 0..=pages {
                let data = writer.rings[cpu].pages[number].data;
                writer.put(writer.page(cpu, number) + 48, data);
                writer.put_links(cpu, number);
            }
            writer.put_header(cpu);
        }
        writer.put_events();
        writer.run(usize::MAX);
        writer
    }

    /// Returns the memory.
    #[must_use]
    pub fn memory(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the address of a `struct buffer_page`.
    #[must_use]
    pub fn page(&self, cpu: usize, number: usize) -> u64 {
        PAGES + (cpu as u64 * MAX_PAGES + number as u64) * PAGE_BYTES
    }

    /// Returns the number and the data of the page that is being written.
    #[must_use]
    pub fn tail(&self, cpu: usize) -> (usize, u64) {
        let ring = &self.rings[cpu];
        (ring.tail, ring.pages[ring.tail].data)
    }

    /// Returns the number of events that were written.
    #[must_use]
    pub fn entries(&self, cpu: usize) -> u64 {
        self.rings[cpu].entries
    }

    /// Carries out stores.
    pub fn run(&mut self, count: usize) {
        for _ in 0..count {
            let Some((address, bytes)) = self.stores.pop_front() else {
                return;
            };
            let at = usize::try_from(address - BASE).expect("an address of the memory");
            self.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Returns the number of stores in the queue.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.stores.len()
    }

    /// Replaces the instances by others with these names, whose rings are those of the top level.
    /// Returns the address of the first one's `struct trace_array`, and the number of bytes from
    /// each to the next.
    ///
    /// # Panics
    /// If there is no room for them behind the pages of the last ring.
    pub fn put_instances<'a>(&mut self, names: impl IntoIterator<Item = &'a [u8]>) -> (u64, u64) {
        const STEP: u64 = 192;
        let last = self.rings.len() as u64 - 1;
        let pages = self.rings[0].pages.len() as u64;
        let first = DATA + (last * MAX_PAGES + pages) * 4096;
        let end = BASE + self.bytes.len() as u64;
        let (mut before, mut at) = (ARRAYS, first);
        let mut texts = end;
        let mut known: Option<(&[u8], u64)> = None;
        for name in names {
            let text = match known {
                // Many instances may share the text of their name.
                Some((known, text)) if known == name => text,
                _ => {
                    texts -= name.len() as u64 + 1;
                    self.put_bytes(texts, &[name, b"\0"].concat());
                    texts
                }
            };
            known = Some((name, text));
            assert!(at + STEP <= texts, "no room");
            self.put(before, at);
            self.put(at + 8, before);
            self.put(at + 16, text);
            self.put(at + 40, BUFFER);
            // It has enabled no event.
            self.put(at + 24, at + 24);
            self.put(at + 32, at + 24);
            (before, at) = (at, at + STEP);
        }
        self.put(before, ARRAY);
        self.put(ARRAY + 8, before);
        (first, STEP)
    }

    /// Stores bytes.
    pub fn put_bytes(&mut self, address: u64, bytes: &[u8]) {
        self.stores.push_back((address, bytes.to_vec()));
    }

    /// Stores a word.
    pub fn put(&mut self, address: u64, word: u64) {
        self.put_bytes(address, &word.to_le_bytes());
    }

    fn put_links(&mut self, cpu: usize, number: usize) {
        let ring = &self.rings[cpu];
        let page = &ring.pages[number];
        let flag = u64::from(ring.before_head == number && ring.reader != number) * HEAD;
        let (next, previous) = (self.page(cpu, page.next), self.page(cpu, page.previous));
        let address = self.page(cpu, number);
        self.put(address, next | flag);
        self.put(address + 8, previous);
    }

    fn put_header(&mut self, cpu: usize) {
        let ring = &self.rings[cpu];
        let page = |number| self.page(cpu, number);
        let words = [
            (ring::HEAD, page(ring.head_hint)),
            (ring::TAIL, page(ring.tail)),
            (ring::COMMIT, page(ring.commit)),
            (ring::READER, page(ring.reader)),
            (ring::ENTRIES, ring.entries),
            (ring::OVERRUN, ring.overrun),
            (ring::COMMITS, ring.commits),
            (ring::COMMITTING, 0),
            (ring::READ, ring.read),
            (ring::LAST_OVERRUN, ring.last_overrun),
            // Without the reader page.
            (ring::PAGES, ring.pages.len() as u64 - 1),
        ];
        let address = ring.address;
        for (offset, word) in words {
            self.put(address + offset, word);
        }
    }

    fn put_header_word(&mut self, cpu: usize, offset: u64, word: u64) {
        let address = self.rings[cpu].address + offset;
        self.put(address, word);
    }

    /// Enters the next page (`rb_move_tail()`).
    fn move_tail(&mut self, cpu: usize) {
        let ring = &self.rings[cpu];
        let tail = ring.tail;
        let (written, data) = (ring.pages[tail].written, ring.pages[tail].data);
        let room = CAPACITY - written;
        self.rings[cpu].pages[tail].end = 0;
        if room >= 8 {
            let padding = [1 << 5 | 29, room as u32 - 4]
                .map(u32::to_le_bytes)
                .concat();
            self.put_bytes(data + 16 + written as u64, &padding);
            let page = &mut self.rings[cpu].pages[tail];
            (page.written, page.end) = (CAPACITY, written);
        }
        let ring = &self.rings[cpu];
        let next = ring.pages[tail].next;
        if ring.before_head == tail && ring.reader != tail {
            let entries = ring.pages[next].entries;
            let (address, target) = (self.page(cpu, tail), self.page(cpu, next));
            self.put(address, target | UPDATE);
            let ring = &mut self.rings[cpu];
            ring.overrun += entries;
            let overrun = ring.overrun;
            ring.before_head = next;
            self.put_header_word(cpu, ring::OVERRUN, overrun);
            self.put_links(cpu, next);
            self.put_links(cpu, tail);
        }
        let address = self.page(cpu, next);
        let page = &mut self.rings[cpu].pages[next];
        let old = page.generation * GENERATION + page.written as u64;
        page.generation += 1;
        page.clear();
        let (generation, data) = (page.generation, page.data);
        self.put(address + 16, old + GENERATION);
        self.put(address + 16, generation * GENERATION);
        self.put(data + 8, 0);
        self.rings[cpu].tail = next;
        self.put_header_word(cpu, ring::TAIL, address);
    }

    /// Writes an event at a time.
    ///
    /// # Panics
    /// If the event is larger than a page, or earlier than the last one.
    pub fn event(&mut self, cpu: usize, time: u64, payload: &[u8]) {
        let mut item = match payload.len() {
            length @ 4..=112 if length % 4 == 0 => vec![length as u32 / 4],
            length => vec![0, length as u32 + 4],
        };
        let ring = &mut self.rings[cpu];
        ring.commits += 1;
        let commits = ring.commits;
        self.put_header_word(cpu, ring::COMMITTING, 1);
        self.put_header_word(cpu, ring::COMMITS, commits);
        let size = item.len() * 4 + payload.len().next_multiple_of(4);
        assert!(size + 8 <= CAPACITY, "too large");
        let ring = &self.rings[cpu];
        let delta = time
            .checked_sub(ring.time)
            .expect("time does not go backwards");
        if ring.pages[ring.tail].written + size + 8 > CAPACITY {
            self.move_tail(cpu);
        }
        let ring = &mut self.rings[cpu];
        ring.time = time;
        let (tail, address) = (ring.tail, ring.address);
        let page = &mut ring.pages[tail];
        let (at, data) = (page.written, page.data);
        let is_first = at == 0;
        if is_first {
            self.put(data, time);
        } else if delta < 1 << 27 {
            item[0] |= (delta as u32) << 5;
        } else {
            let extend = [30 | (delta as u32 & 0x7ff_ffff) << 5, (delta >> 27) as u32];
            item.splice(0..0, extend);
        }
        let mut bytes: Vec<u8> = item.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let number = self.page(cpu, tail);
        let page = &mut self.rings[cpu].pages[tail];
        page.written += bytes.len();
        page.entries += 1;
        let (written, generation) = (page.written as u64, page.generation);
        self.put(number + 16, generation * GENERATION + written);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        self.put_bytes(data + 16 + at as u64, first);
        self.put_bytes(data + 16 + (at + first.len()) as u64, second);
        let ring = &mut self.rings[cpu];
        ring.entries += 1;
        let (entries, commit) = (ring.entries, ring.commit);
        self.put(address + ring::ENTRIES, entries);
        if commit != tail {
            let left = &self.rings[cpu].pages[commit];
            let (left, full) = (left.data, left.written as u64);
            self.put(left + 8, full);
            self.rings[cpu].commit = tail;
            self.put(address + ring::COMMIT, number);
        }
        self.put(data + 8, written);
        self.put(address + ring::COMMITTING, 0);
    }

    /// Empties a ring (`echo > trace`).
    pub fn empty(&mut self, cpu: usize) {
        let head = self.rings[cpu].pages[self.rings[cpu].before_head].next;
        let ring = &mut self.rings[cpu];
        (ring.tail, ring.commit, ring.head_hint) = (head, head, head);
        (ring.entries, ring.overrun, ring.last_overrun) = (0, 0, 0);
        (ring.read, ring.commits, ring.time) = (0, 0, 0);
        for number in 0..self.rings[cpu].pages.len() {
            let page = &mut self.rings[cpu].pages[number];
            page.clear();
            page.generation = 0;
            let data = page.data;
            let address = self.page(cpu, number);
            self.put(address + 16, 0);
            self.put(address + 24, 0);
            self.put(data + 8, 0);
        }
        self.put_header(cpu);
    }

    /// Gives a CPU the ring that was created for another one. A snapshot exchanges a ring for the
    /// one that was saved.
    pub fn put_ring(&mut self, cpu: usize, other: usize) {
        let address = self.rings[other].address;
        self.put(POINTERS + cpu as u64 * 8, address);
    }
}
