// SPDX-License-Identifier: Apache-2.0
//! A guest that changes the ring between two reads of a search.

use super::*;
use crate::testing::rings::{BASE, CAPACITY, Rings as Memory, Version, Writer};
use crate::{Bounded, word};

/// Writes events. Four of them fill a page.
fn write(writer: &mut Writer, count: u64) {
    for _ in 0..count {
        let number = writer.entries(0);
        let payload = [&[7; 8][..], &number.to_le_bytes(), &[0; 884]].concat();
        writer.event(0, 1000 + number, &payload);
    }
}

/// Searches a ring of 4 pages. Before the read with the number `when`, the guest acts. Returns the
/// number of reads and the result, which is compared with the ring afterwards.
fn searched<T>(
    memory: &Memory,
    when: u64,
    act: impl Fn(&mut Writer) + 'static,
    search: impl FnOnce(&Pages<'_, Memory>, &Header) -> T,
    compare: impl FnOnce(&Pages<'_, Memory>, &Header, &T),
) -> (u64, T) {
    let layout = memory.source().layout;
    let pages = Pages {
        view: &Bounded::new(memory, usize::MAX, usize::MAX),
        layout: &layout,
        capacity: CAPACITY,
    };
    let ring = word(memory, BASE + 0x300).expect("a ring");
    let header = || pages.header(ring).expect("readable");
    let before = header();
    memory.before_read(move |read, writer| {
        if read == when {
            act(writer);
            writer.run(usize::MAX);
        }
    });
    let result = search(&pages, &before);
    let reads = memory.reads();
    memory.rest();
    compare(&pages, &header(), &result);
    (reads, result)
}

#[test]
fn an_oldest_page_that_changes_meanwhile_is_not_returned() {
    // Sixteen events make the head lead to the same page again, with other events.
    for written in [4, 16] {
        let mut refused = 0;
        // The last read, of the head's flag, is left out. If the page is overwritten just before
        // it, the page is returned, and the follower's next step detects the change.
        for when in 0..6 {
            let memory = Memory::new(Version::V6_12, 1, 4);
            memory.write(|writer| write(writer, 16));
            let search =
                |pages: &Pages<'_, Memory>, header: &Header| oldest(pages, header, &mut 1000);
            let act = move |writer: &mut Writer| write(writer, written);
            let (_, result) = searched(&memory, when, act, search, |pages, header, result| {
                if let Some((page, head)) = result {
                    let (now, _) = oldest(pages, header, &mut 1000).expect("at rest");
                    assert_eq!(*page, now, "{when}");
                    assert!(pages.is_still(*page, head), "{when}");
                }
            });
            refused += u32::from(result.is_none());
        }
        assert!(refused > 2, "{written}: {refused}");
    }
}

#[test]
fn events_before_a_page_are_not_counted_while_some_are_taken() {
    let count = |pages: &Pages<'_, Memory>, header: &Header| {
        let ring = word(pages.view, BASE + 0x300).expect("a ring");
        Follower::new(0, ring, crate::trace::Start::Oldest).before(pages, header, false)
    };
    for when in 1..7 {
        let memory = Memory::new(Version::V6_12, 1, 4);
        memory.write(|writer| write(writer, 14));
        let act = |writer: &mut Writer| write(writer, 8);
        let (reads, result) = searched(&memory, when, act, count, |_, _, _| {});
        assert_eq!((reads, result), (7, None), "{when}");
    }
    // A reader in the guest has counted the events that it takes, but the page not yet.
    for when in 1..5 {
        let memory = Memory::new(Version::V6_12, 1, 4);
        memory.write(|writer| {
            write(writer, 14);
            writer.consume(0);
        });
        memory.before_read(|read, writer| {
            if read == 0 {
                writer.consume(0);
                writer.run(1);
            }
        });
        assert!(word(&memory, BASE).is_some());
        let (_, result) = searched(&memory, when, |_| {}, count, |_, _, _| {});
        assert!(matches!(result, None | Some(4)), "{when}: {result:?}");
    }
}

/// The page before the oldest one leads to the head again, but to another page: a reader in the
/// guest has taken the oldest page from the circle.
#[test]
fn an_oldest_page_that_becomes_the_reader_page_is_not_returned() {
    for when in 0..7 {
        let memory = Memory::new(Version::V6_12, 1, 4);
        memory.write(|writer| write(writer, 16));
        let act = |writer: &mut Writer| {
            assert!(writer.consume(0), "the oldest page is exchanged");
            // The writer leaves each of the four pages.
            write(writer, 16);
        };
        let search = |pages: &Pages<'_, Memory>, header: &Header| oldest(pages, header, &mut 1000);
        searched(&memory, when, act, search, |pages, header, result| {
            if let Some((page, _)) = result {
                let (now, _) = oldest(pages, header, &mut 1000).expect("at rest");
                assert_eq!(*page, now, "{when}");
            }
        });
    }
}

/// The kernel replaces the padding of a reader page that a process has mapped. The number that it
/// writes there may look like an event.
#[test]
fn events_before_a_page_are_not_counted_in_padding_that_is_replaced() {
    let count = |pages: &Pages<'_, Memory>, header: &Header| {
        let ring = word(pages.view, BASE + 0x300).expect("a ring");
        Follower::new(0, ring, crate::trace::Start::Oldest).before(pages, header, false)
    };
    for when in 0..8 {
        let memory = Memory::new(Version::V6_12, 1, 4);
        memory.write(|writer| {
            write(writer, 14);
            writer.consume(0);
        });
        let ring = word(&memory, BASE + 0x300).expect("a ring");
        let reader = word(&memory, ring + 88).expect("readable");
        let data = word(&memory, reader + 48).expect("readable");
        let act = move |writer: &mut Writer| {
            let length = 4 * 908;
            let room = CAPACITY as u64 - length;
            writer.put(data + 8, length);
            writer.put(data + 16 + length, (room - 4) << 32);
        };
        let (_, result) = searched(&memory, when, act, count, |_, _, _| {});
        assert!(matches!(result, None | Some(4)), "{when}: {result:?}");
    }
}
