// SPDX-License-Identifier: Apache-2.0
//! A guest that changes the ring while the first position is determined.

use super::*;
use crate::testing::rings::{BASE, CAPACITY, Rings as Memory, Version, Writer};
use crate::trace::Page;
use crate::{Bounded, word};

/// Writes events. Four of them fill a page.
fn write(writer: &mut Writer, count: u64) {
    for _ in 0..count {
        let number = writer.entries(0);
        let payload = [&[7; 8][..], &number.to_le_bytes(), &[0; 884]].concat();
        writer.event(0, 1000 + number, &payload);
    }
}

/// The events before the first one are exactly those that the follower does not expect to read.
#[test]
fn the_first_position_belongs_to_its_count() {
    for consumed in 0..4 {
        for (written, taken) in [(4, 0), (8, 0), (17, 0), (0, 1), (0, 2), (5, 3)] {
            for when in 0..40 {
                let memory = Memory::new(Version::V6_12, 1, 4);
                memory.write(|writer| {
                    write(writer, 18);
                    (0..consumed).for_each(|_| _ = writer.consume(0));
                });
                let layout = memory.source().layout;
                let pages = Pages {
                    view: &Bounded::new(&memory, usize::MAX, usize::MAX),
                    layout: &layout,
                    capacity: CAPACITY,
                };
                let ring = word(&memory, BASE + 0x300).expect("a ring");
                memory.before_read(move |read, writer| {
                    if read == when {
                        write(writer, written);
                        (0..taken).for_each(|_| _ = writer.consume(0));
                        writer.run(usize::MAX);
                    }
                });
                let mut follower = Follower::new(0, ring, Start::Oldest);
                let mut batch = Batch::default();
                follower.place(&pages, &mut batch).expect("readable");
                let has_acted = memory.reads() > when;
                memory.rest();
                let base = follower.base.expect("a position");
                follower.poll(&pages, usize::MAX, &mut batch);
                let first = batch.chunks.first().map(|chunk| {
                    let page = Page::parse(&chunk.page).expect("a header");
                    let (_, bytes) = page.events().next().expect("one").expect("whole");
                    u64::from_le_bytes(bytes[8..16].try_into().unwrap())
                });
                let end = memory.write(|writer| writer.entries(0));
                let terms = format!("{consumed} {written} {taken} {when}");
                assert_eq!(base, first.unwrap_or(end), "{terms}");
                if !has_acted {
                    break;
                }
            }
        }
    }
}
