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

/// A reader in the guest has taken the page, but has not yet stored how many events were
/// overwritten before (`last_overrun`).
#[test]
fn a_count_that_is_stored_while_the_first_position_is_determined_is_not_mixed() {
    for when in 1..40 {
        let memory = Memory::new(Version::V6_12, 1, 4);
        memory.write(|writer| write(writer, 34));
        let ring = word(&memory, BASE + 0x300).expect("a ring");
        let layout = memory.source().layout;
        let pages = Pages {
            view: &Bounded::new(&memory, usize::MAX, usize::MAX),
            layout: &layout,
            capacity: CAPACITY,
        };
        memory.before_read(|read, writer| {
            if read == 0 {
                writer.consume(0);
                // The count is the last store.
                writer.run(writer.pending() - 1);
            }
        });
        assert!(word(&memory, ring).is_some());
        memory.before_read(move |read, writer| {
            if read == when {
                writer.run(1);
            }
        });
        let mut follower = Follower::new(0, ring, Start::Oldest);
        let placed = follower.place(&pages, &mut Batch::default());
        placed.expect("readable");
        if memory.reads() <= when {
            break;
        }
        // A later poll corrects a number that the guest stores after the position is determined.
        let now = pages.header(ring).expect("readable");
        assert_eq!(follower.base, Some(now.last_overrun), "{when}");
    }
}

/// A read that is refused because the poll has reached its limit tells nothing about the guest.
#[test]
fn a_poll_that_ends_at_any_read_loses_nothing() {
    for start in [Start::Oldest, Start::End] {
        for reads in 0..120 {
            let memory = Memory::new(Version::V6_12, 1, 4);
            memory.write(|writer| write(writer, 18));
            let ring = word(&memory, BASE + 0x300).expect("a ring");
            let layout = memory.source().layout;
            let mut follower = Follower::new(0, ring, start);
            let mut poll = |reads| {
                let pages = Pages {
                    view: &Bounded::new(&memory, reads, usize::MAX),
                    layout: &layout,
                    capacity: CAPACITY,
                };
                let mut batch = Batch::default();
                follower.poll(&pages, usize::MAX, &mut batch);
                let terms = format!("{start:?} {reads}");
                assert_eq!(batch.more, pages.view.is_exhausted(), "{terms}");
                assert_eq!(
                    (batch.lost, batch.torn, batch.damaged),
                    (0, 0, 0),
                    "{terms}"
                );
                assert!(!batch.restarted && !batch.unreadable, "{terms}");
                batch.chunks.iter().map(|chunk| chunk.events).sum::<u64>()
            };
            poll(usize::MAX);
            memory.write(|writer| write(writer, 8));
            let first = poll(reads);
            assert_eq!(first + poll(usize::MAX), 8, "{start:?} {reads}");
        }
    }
}
