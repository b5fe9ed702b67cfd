// SPDX-License-Identifier: Apache-2.0
//! A kernel log in memory, written as a kernel writes it; and rings of trace events ([`rings`]).

pub mod rings;

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::log::{Layout, Source};
use crate::{KernelView, Member, Types};

/// Address of the first byte of the log's memory.
pub const BASE: u64 = 0xffff_ffff_8480_0000;
const RING: u64 = BASE + 0x100;
const TABLES: u64 = BASE + 0x1000;
/// Size of `struct prb_desc`.
const DESCRIPTOR: u64 = 24;
const ID: u64 = (1 << 62) - 1;

const COMMITTED: u64 = 1;
const FINALIZED: u64 = 2;
const REUSABLE: u64 = 3;

/// A version of the kernel, by the layout of its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// 5.10.
    V5_10,
    /// 6.1 and 6.12, in which all members that are read have the same layout.
    V6_12,
    /// 7.3.
    V7_3,
}

impl Version {
    /// Returns the size of `struct printk_info`.
    fn info(self) -> u64 {
        match self {
            Self::V5_10 | Self::V6_12 => 88,
            Self::V7_3 => 112,
        }
    }

    fn dev_info(self) -> u32 {
        match self {
            Self::V5_10 | Self::V6_12 => 24,
            Self::V7_3 => 44,
        }
    }

    /// Returns the offset of the ring of texts.
    fn texts(self) -> u32 {
        match self {
            Self::V5_10 => 40,
            Self::V6_12 | Self::V7_3 => 48,
        }
    }
}

fn plain(offset: u32, size: u32) -> Member {
    Member {
        offset,
        shift: 0,
        width: 0,
        size: Some(size),
    }
}

impl Types for Version {
    fn member(&self, structure: &str, path: &[&str]) -> Option<Member> {
        let bits = |offset, shift, width| Member {
            offset,
            shift,
            width,
            size: None,
        };
        let texts = self.texts();
        let device = self.dev_info();
        Some(match (structure, path) {
            ("printk_ringbuffer", ["desc_ring", "count_bits"]) => plain(0, 4),
            ("printk_ringbuffer", ["desc_ring", "descs"]) => plain(8, 8),
            ("printk_ringbuffer", ["desc_ring", "infos"]) => plain(16, 8),
            ("printk_ringbuffer", ["desc_ring", "head_id"]) => plain(24, 8),
            ("printk_ringbuffer", ["desc_ring", "tail_id"]) => plain(32, 8),
            ("printk_ringbuffer", ["text_data_ring", "size_bits"]) => plain(texts, 4),
            ("printk_ringbuffer", ["text_data_ring", "data"]) => plain(texts + 8, 8),
            ("printk_ringbuffer", ["fail"]) => plain(texts + 32, 8),
            ("prb_desc", ["state_var"]) => plain(0, 8),
            ("prb_desc", ["text_blk_lpos", "begin"]) => plain(8, 8),
            ("prb_desc", ["text_blk_lpos", "next"]) => plain(16, 8),
            ("printk_info", ["seq"]) => plain(0, 8),
            ("printk_info", ["ts_nsec"]) => plain(8, 8),
            ("printk_info", ["text_len"]) => plain(16, 2),
            ("printk_info", ["facility"]) => plain(18, 1),
            ("printk_info", ["flags"]) => bits(19, 0, 5),
            ("printk_info", ["level"]) => bits(19, 5, 3),
            ("printk_info", ["caller_id"]) => plain(20, 4),
            ("printk_info", ["dev_info", "subsystem"]) => plain(device, 16),
            ("printk_info", ["dev_info", "device"]) => plain(device + 16, 48),
            ("task_struct", ["pid"]) => plain(0, 4),
            ("task_struct", ["tgid"]) => plain(4, 4),
            ("task_struct", ["comm"]) => plain(16, 16),
            _ => return None,
        })
    }

    fn size(&self, structure: &str) -> Option<u32> {
        match structure {
            "printk_ringbuffer" => Some(self.texts() + 40),
            "prb_desc" => Some(24),
            "task_struct" => Some(64),
            "printk_info" => u32::try_from(self.info()).ok(),
            _ => None,
        }
    }
}

/// A function that is called before each read, with the number of earlier reads.
type Hook = Box<dyn FnMut(u64, &mut Writer)>;

/// A log in memory, and its writer.
pub struct Log {
    writer: RefCell<Writer>,
    hook: RefCell<Option<Hook>>,
    reads: RefCell<u64>,
}

/// The writer of a log.
pub struct Writer {
    version: Version,
    bytes: Vec<u8>,
    count_bits: u32,
    text_bits: u32,
    head: u64,
    tail: u64,
    /// Positions in the ring of texts.
    text_head: u64,
    text_tail: u64,
    /// Blocks that are not overwritten: id and the position after the block.
    blocks: VecDeque<(u64, u64)>,
    /// Sequence number of the next record.
    pub seq: u64,
    /// Time of the next record.
    pub time: u64,
    /// A block may end with the last byte of the ring, as in newer kernels.
    pub fills_the_end: bool,
}

impl Log {
    /// Creates an empty log.
    #[must_use]
    pub fn new(version: Version, count_bits: u32, text_bits: u32) -> Self {
        Self {
            writer: RefCell::new(Writer::new(version, count_bits, text_bits)),
            hook: RefCell::default(),
            reads: RefCell::default(),
        }
    }

    /// Returns the source of the log, as a discovery would find it.
    ///
    /// # Panics
    /// If the layout is refused.
    #[must_use]
    pub fn source(&self) -> Source {
        let version = self.writer.borrow().version;
        Source {
            prb: BASE,
            layout: Layout::read(&version).expect("it is whole"),
        }
    }

    /// Returns the log's writer.
    #[must_use]
    pub fn into_writer(self) -> Writer {
        self.writer.into_inner()
    }

    /// Calls `write` with the log's writer.
    pub fn write<T>(&self, write: impl FnOnce(&mut Writer) -> T) -> T {
        write(&mut self.writer.borrow_mut())
    }

    /// Calls `hook` before each later read, with the number of reads so far.
    pub fn before_read(&self, hook: impl FnMut(u64, &mut Writer) + 'static) {
        *self.reads.borrow_mut() = 0;
        *self.hook.borrow_mut() = Some(Box::new(hook));
    }

    /// Returns the number of reads.
    #[must_use]
    pub fn reads(&self) -> u64 {
        *self.reads.borrow()
    }
}

impl KernelView for Log {
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
    fn new(version: Version, count_bits: u32, text_bits: u32) -> Self {
        let count = 1_u64 << count_bits;
        let mut writer = Self {
            version,
            bytes: Vec::new(),
            count_bits,
            text_bits,
            // The id of the record before the first one, which is reusable from the start.
            head: ID - count,
            tail: ID - count,
            text_head: 0_u64.wrapping_sub(1 << text_bits),
            text_tail: 0_u64.wrapping_sub(1 << text_bits),
            blocks: VecDeque::new(),
            seq: 0,
            time: 0,
            fills_the_end: false,
        };
        let length = writer.texts() + (1 << text_bits) - BASE;
        writer.bytes = vec![0; usize::try_from(length).expect("a small log")];
        let texts = u64::from(version.texts());
        writer.put(BASE, RING);
        writer.put(RING, u64::from(count_bits));
        writer.put(RING + 8, TABLES);
        writer.put(RING + 16, TABLES + DESCRIPTOR * count);
        writer.put(RING + texts, u64::from(text_bits));
        writer.put(RING + texts + 8, writer.texts());
        writer.put_state(writer.head, REUSABLE);
        writer.put_ends();
        writer
    }

    /// Returns the address of the texts.
    #[must_use]
    pub fn texts(&self) -> u64 {
        let count = 1 << self.count_bits;
        TABLES + (DESCRIPTOR + self.version.info()) * count
    }

    /// Returns the address of the descriptor of an id.
    #[must_use]
    pub fn descriptor(&self, id: u64) -> u64 {
        TABLES + DESCRIPTOR * (id & ((1 << self.count_bits) - 1))
    }

    /// Returns the address of the info of an id.
    #[must_use]
    pub fn info(&self, id: u64) -> u64 {
        let count = 1 << self.count_bits;
        TABLES + DESCRIPTOR * count + self.version.info() * (id & (count - 1))
    }

    /// Returns the newest id.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns the address of the ring's header.
    #[must_use]
    pub fn ring(&self) -> u64 {
        RING
    }

    /// Writes bytes to memory.
    ///
    /// # Panics
    /// If the address is not the log's.
    pub fn put_bytes(&mut self, address: u64, bytes: &[u8]) {
        let at = usize::try_from(address - BASE).expect("an address of the log");
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes a word to memory.
    pub fn put(&mut self, address: u64, word: u64) {
        self.put_bytes(address, &word.to_le_bytes());
    }

    /// Returns the memory.
    #[must_use]
    pub fn memory(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes the state of a record.
    pub fn put_state(&mut self, id: u64, state: u64) {
        self.put(self.descriptor(id), id & ID | state << 62);
    }

    fn put_ends(&mut self) {
        self.put(RING + 24, self.head);
        self.put(RING + 32, self.tail);
    }

    /// Reserves a record and does not write it. Returns its id.
    pub fn reserve(&mut self) -> u64 {
        let id = self.advance();
        self.put_state(id, 0);
        id
    }

    /// Advances `head_id`, as the first step of a reservation. The descriptor is still the old one.
    pub fn advance(&mut self) -> u64 {
        let id = self.head.wrapping_add(1) & ID;
        if id.wrapping_sub(self.tail) & ID >= 1 << self.count_bits {
            self.put_state(self.tail, REUSABLE);
            self.tail = self.tail.wrapping_add(1) & ID;
        }
        self.head = id;
        self.put_ends();
        id
    }

    /// Allocates a block of text. Returns its positions.
    fn block(&mut self, id: u64, length: usize) -> (u64, u64) {
        let size = 1_u64 << self.text_bits;
        let needed = (8 + length as u64).next_multiple_of(8);
        let begin = self.text_head;
        let mut next = begin.wrapping_add(needed);
        let last = next.wrapping_sub(u64::from(self.fills_the_end));
        if begin >> self.text_bits != last >> self.text_bits {
            // A block that does not fit before the end is put at the start.
            next = (last >> self.text_bits << self.text_bits).wrapping_add(needed);
        }
        while next.wrapping_sub(self.text_tail) > size {
            let (old, end) = self.blocks.pop_front().expect("the ring is large enough");
            if id.wrapping_sub(old) & ID < 1 << self.count_bits {
                self.put_state(old, REUSABLE);
            }
            self.text_tail = end;
        }
        self.text_head = next;
        self.blocks.push_back((id, next));
        (begin, next)
    }

    /// Writes a reserved record and leaves it committed.
    pub fn commit(&mut self, id: u64, prefix: u8, caller: u32, text: &[u8]) {
        let (begin, next) = match text.is_empty() {
            true => (3, 3),
            false => {
                let (begin, next) = self.block(id, text.len());
                let mask = (1 << self.text_bits) - 1;
                let index = match begin >> self.text_bits == next.wrapping_sub(1) >> self.text_bits
                {
                    true => begin & mask,
                    false => 0,
                };
                let address = self.texts() + index;
                self.put(address, id);
                self.put_bytes(address + 8, text);
                (begin, next)
            }
        };
        let at = self.info(id);
        self.put_bytes(
            at,
            &vec![0; usize::try_from(self.version.info()).expect("small")],
        );
        self.put(at, self.seq);
        self.put(at + 8, self.time);
        let length = u16::try_from(text.len()).expect("a short text");
        self.put_bytes(at + 16, &length.to_le_bytes());
        self.put_bytes(at + 18, &[0, prefix]);
        self.put_bytes(at + 20, &caller.to_le_bytes());
        self.put(self.descriptor(id) + 8, begin);
        self.put(self.descriptor(id) + 16, next);
        self.seq += 1;
        self.time += 1_000;
        self.put_state(id, COMMITTED);
    }

    /// Counts records for which there was no room.
    pub fn refuse(&mut self, records: u64) {
        self.put(RING + u64::from(self.version.texts()) + 32, records);
    }

    /// Sets the facility of a record. That of the kernel is 0.
    pub fn set_facility(&mut self, id: u64, facility: u8) {
        self.put_bytes(self.info(id) + 18, &[facility]);
    }

    /// Finalizes a record.
    pub fn finalize(&mut self, id: u64) {
        self.put_state(id, FINALIZED);
    }

    /// Prints a line of a level, from task 7. Returns its id.
    pub fn print(&mut self, level: u8, text: &str) -> u64 {
        let id = self.reserve();
        self.commit(id, level << 5 | 2, 7, text.as_bytes());
        self.finalize(id);
        id
    }

    /// Names the device of a record.
    pub fn name_device(&mut self, id: u64, subsystem: &str, device: &str) {
        let at = self.info(id) + u64::from(self.version.dev_info());
        self.put_bytes(at, subsystem.as_bytes());
        self.put_bytes(at + 16, device.as_bytes());
    }

    /// Moves the log to a ring at another address of the same memory, with the same sequence
    /// numbers, as `log_buf_len=` does. The ids of the new ring are unrelated to those of the old
    /// one.
    pub fn move_to(&mut self, mut other: Self) {
        let offset = self.bytes.len() as u64;
        let texts = u64::from(other.version.texts());
        for field in [8, 16, texts + 8] {
            let at = usize::try_from(RING + field - BASE).expect("small");
            let word: [u8; 8] = other.bytes[at..at + 8].try_into().expect("8 bytes");
            other.put(RING + field, u64::from_le_bytes(word) + offset);
        }
        let moved = RING + offset;
        self.bytes.append(&mut other.bytes);
        self.put(BASE, moved);
    }
}
