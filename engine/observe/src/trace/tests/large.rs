// SPDX-License-Identifier: Apache-2.0
//! A ring of 1 GiB on one CPU. Its pages are made when they are read.

use std::cell::Cell;

use super::*;

/// Number of pages of the circle: 1 GiB. The reader page has this index.
const PAGES: u64 = 1 << 18;
/// Addresses of the first `struct buffer_page` and of the first data page.
const STRUCTURES: u64 = 0xffff_9000_0000_0000;
const DATA: u64 = 0xffff_a000_0000_0000;
/// Size of a `struct buffer_page` with the space up to the next one.
const STRUCTURE: u64 = 64;
/// Length of the payload of the only event in each page.
const PAYLOAD: usize = 4068;
/// Number of bytes before the payload: those of the page's header and of the event's.
const HEADER: usize = 16 + 8;
/// Number of bytes that one poll wants.
const WANTED: usize = 1 << 20;

/// The structures that lead to the ring, and the pages. Event `n` is alone in the page that the
/// writer enters as the `n`th.
struct Large {
    memory: Memory,
    /// Number of the last event.
    last: Cell<u64>,
    /// The link to the oldest page is flagged.
    has_head: Cell<bool>,
    reads: Cell<usize>,
    bytes: Cell<usize>,
}

impl Large {
    fn new(last: u64) -> Self {
        let memory = Memory::new(Version::V6_12, 1, 4);
        let (reads, bytes) = Default::default();
        let large = Self {
            memory,
            last: Cell::new(last),
            has_head: Cell::new(true),
            reads,
            bytes,
        };
        large.write_until(last);
        large
    }

    /// Writes events up to one with this number.
    fn write_until(&self, last: u64) {
        self.last.set(last);
        let ring = word(&self.memory, BASE + 0x300).expect("a ring");
        let page = |index: u64| STRUCTURES + index * STRUCTURE;
        let words = [
            // `head_page` is out of date, as in each ring that has wrapped.
            (64, page(PAGES / 2)),
            (80, page(last % PAGES)),
            (88, page(PAGES)),
            (104, last + 1),
            (112, (last + 1).saturating_sub(PAGES)),
            (120, last + 1),
        ];
        self.memory.write(|writer| {
            for (offset, word) in words {
                writer.put(ring + offset, word);
            }
        });
    }

    /// Returns the number of the event in a page; `None` if it has none.
    fn event(&self, index: u64) -> Option<u64> {
        let last = self.last.get();
        let back = (last % PAGES + PAGES).wrapping_sub(index) % PAGES;
        last.checked_sub(back).filter(|_| index < PAGES)
    }

    fn structure(&self, index: u64) -> [u8; STRUCTURE as usize] {
        let links = [(index + 1) % PAGES, (index + PAGES - 1) % PAGES];
        let [next, before] = links.map(|index| STRUCTURES + index * STRUCTURE);
        let is_before_head = self.has_head.get() && index == self.last.get() % PAGES;
        let event = self.event(index);
        let round = event.map_or(0, |event| event / PAGES + 1);
        let write = round << 20 | event.map_or(0, |_| PAYLOAD as u64 + 8);
        let data = DATA + index * 4096;
        let words = [
            next | u64::from(is_before_head),
            before,
            write,
            0,
            0,
            0,
            data,
        ];
        let mut bytes = [0; STRUCTURE as usize];
        for (at, word) in words.into_iter().enumerate() {
            bytes[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn data(&self, index: u64) -> [u8; 4096] {
        let mut bytes = [0; 4096];
        if let Some(event) = self.event(index) {
            // The bytes after the number follow from it, as in `payload()`.
            bytes[16..HEADER + PAYLOAD].fill(event as u8 ^ 0x5a);
            let length = PAYLOAD as u64 + 8;
            let item = (PAYLOAD as u64 + 4) << 32;
            for (at, word) in [1000 + event, length, item, 1 << 32 | 7, event]
                .into_iter()
                .enumerate()
            {
                bytes[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
            }
        }
        bytes
    }

    /// Polls, and checks the limits. Returns the batch and the number of reads.
    fn poll(&self, follower: &mut Rings) -> (Batch, usize) {
        self.reads.set(0);
        self.bytes.set(0);
        let batch = follower.poll(self, WANTED);
        let (reads, bytes) = (self.reads.get(), self.bytes.get());
        assert!(reads <= MAX_READS, "{reads} reads");
        assert!(bytes <= 8 * WANTED + MAX_BYTES, "{bytes} bytes");
        let length = batch.chunks.iter().map(|chunk| chunk.page.len());
        assert!(length.sum::<usize>() < 2 * WANTED);
        (batch, reads)
    }
}

impl KernelView for Large {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + bytes.len());
        let mut copy = |page: &[u8], offset: u64| {
            let part = page.get(offset as usize..);
            let part = part.and_then(|part| part.get(..bytes.len()));
            part.map(|part| bytes.copy_from_slice(part)).is_some()
        };
        match address {
            BASE.. => self.memory.read(address, bytes),
            DATA.. => copy(&self.data((address - DATA) / 4096), address % 4096),
            STRUCTURES.. => {
                let index = (address - STRUCTURES) / STRUCTURE;
                copy(&self.structure(index), address % STRUCTURE)
            }
            _ => false,
        }
    }
}

fn begin(large: &Large, start: Start) -> Rings {
    Rings::new(large.memory.source(), ARRAY, start)
}

#[test]
fn a_ring_of_one_gibibyte_is_read_whole_in_polls_of_bounded_size() {
    let last = PAGES + 1000;
    let large = Large::new(last);
    let mut follower = begin(&large, Start::Oldest);
    let (mut next, mut polls) = (last + 1 - PAGES, 0);
    loop {
        let (batch, reads) = large.poll(&mut follower);
        for chunk in &batch.chunks {
            let page = &large.data(next % PAGES)[..HEADER + PAYLOAD];
            assert!(chunk.page == page, "event {next}");
            next += 1;
        }
        // Each page takes some reads, and a poll a few more.
        assert!(reads <= 24 * batch.chunks.len() + 32, "{reads} reads");
        assert_eq!((batch.lost, batch.torn, batch.damaged), (0, 0, 0));
        polls += 1;
        if !batch.more {
            break;
        }
    }
    assert_eq!(next, last + 1);
    assert!(polls >= PAGES / 260, "{polls} polls");
}

#[test]
fn a_position_in_a_large_ring_is_found_again_by_a_few_reads() {
    for last in [100, PAGES / 2, 3 * PAGES - 1, 3 * PAGES] {
        let large = Large::new(last);
        let mut follower = begin(&large, Start::End);
        let (batch, reads) = large.poll(&mut follower);
        assert_eq!((batch.chunks.len(), batch.more), (0, false));
        assert!(reads < 32, "{reads} reads");
        // The writer overwrites the whole ring, and half of it again.
        let now = last + PAGES * 3 / 2;
        large.write_until(now);
        let (batch, reads) = large.poll(&mut follower);
        let first = now + 1 - PAGES;
        assert_eq!(numbers(&batch)[0], first);
        assert_eq!(batch.lost, first - last - 1);
        assert!(reads <= 24 * batch.chunks.len() + 64, "{reads} reads");
    }
}

/// The walk to the oldest page ends although the circle has no head.
#[test]
fn a_large_ring_without_a_head_ends_a_poll() {
    let large = Large::new(2 * PAGES);
    large.has_head.set(false);
    let mut follower = begin(&large, Start::Oldest);
    for _ in 0..3 {
        let (batch, reads) = large.poll(&mut follower);
        assert!(batch.more && batch.chunks.is_empty() && !batch.unreadable);
        assert!(reads < 20_000, "{reads} reads");
    }
    large.has_head.set(true);
    let (batch, _) = large.poll(&mut follower);
    assert_eq!((numbers(&batch)[0], batch.lost), (PAGES + 1, 0));
}
