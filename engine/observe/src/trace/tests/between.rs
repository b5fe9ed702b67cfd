// SPDX-License-Identifier: Apache-2.0
//! A guest that writes events, and reads them itself, between any two reads of a poll.

use super::*;

/// The guest's part between two reads.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Writes events. Four of them fill a page.
    Write(u64),
    /// Takes the events of the reader page, or exchanges it for the head; this many times.
    Consume(u64),
}

impl Act {
    fn carry_out(self, writer: &mut Writer) {
        match self {
            Self::Write(count) => {
                let first = writer.entries(0);
                for number in first..first + count {
                    writer.event(0, 1000 + number, &payload(number, 900));
                }
            }
            Self::Consume(times) => (0..times).for_each(|_| _ = writer.consume(0)),
        }
        writer.run(usize::MAX);
    }
}

/// Returns the number of the oldest event of a ring of 4 pages after these acts.
fn oldest_after(acts: &[Act]) -> u64 {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let carry_out = |writer: &mut Writer| acts.iter().for_each(|act| act.carry_out(writer));
    memory.write(carry_out);
    let read = numbers(&rings(&memory, Start::Oldest).poll(&memory, ALL));
    let written = memory.write(|writer| writer.entries(0));
    read.first().copied().unwrap_or(written)
}

/// Follows a ring of 4 pages. The guest acts before the reads with these numbers. Each event is
/// read once and in order. All events from the first position on are read or lost, and no event is
/// reported as lost before it is read. The first position is the oldest event between two acts.
fn follow(before: &[Act], acts: [(u64, Act); 2], limit: usize, starts: &[u64]) {
    let memory = Memory::new(Version::V6_12, 1, 4);
    memory.write(|writer| before.iter().for_each(|act| act.carry_out(writer)));
    let terms = format!("{before:?} {acts:?} {limit}");
    memory.before_read(move |read, writer| {
        for (when, act) in acts {
            if read == when {
                act.carry_out(writer);
            }
        }
    });
    let mut follower = rings(&memory, Start::Oldest);
    // Each event with the number of events that were read or lost before.
    let (mut read, mut lost, mut rounds) = (vec![], 0, 0);
    loop {
        let has_acted = memory.reads() > acts[1].0;
        let batch = follower.poll(&memory, limit);
        for number in numbers(&batch) {
            read.push((number, read.len() as u64 + lost));
        }
        assert!(!batch.restarted && batch.damaged == 0, "{terms}: {batch:?}");
        lost += batch.lost;
        rounds += 1;
        assert!(rounds < 1000, "{terms}");
        if has_acted && !batch.more {
            break;
        }
    }
    let written = memory.write(|writer| writer.entries(0));
    let start = written.wrapping_sub(read.len() as u64 + lost);
    assert!(starts.contains(&start), "{terms}: {start} of {starts:?}");
    let in_order = |pair: &[(u64, u64)]| pair[0].0 < pair[1].0;
    assert!(read.windows(2).all(in_order), "{terms}: {read:?}");
    let is_counted = |(number, known): &(u64, u64)| *number >= start + known;
    assert!(read.iter().all(is_counted), "{terms}: {start} {read:?}");
}

/// Before `when`, and again before a later read.
fn each_time(before: &[Act], [one, other]: [Act; 2]) {
    let all = [before, &[one, other]].concat();
    let starts = [0, 1, 2].map(|acts| oldest_after(&all[..before.len() + acts]));
    for when in 0..40 {
        for later in 0..12 {
            for limit in [1, ALL] {
                follow(before, [(when, one), (when + later, other)], limit, &starts);
            }
        }
    }
}

use Act::{Consume, Write};

#[test]
fn a_ring_that_wraps_while_the_guest_reads_it() {
    for consumed in 0..4 {
        let before = [Write(14), Consume(consumed)];
        for acts in [
            [Write(13), Consume(2)],
            [Write(3), Consume(3)],
            [Write(7), Consume(5)],
            [Consume(1), Write(13)],
            [Consume(2), Write(5)],
            [Consume(3), Write(25)],
            [Consume(2), Consume(2)],
        ] {
            each_time(&before, acts);
        }
    }
}

#[test]
fn a_ring_that_wraps_while_its_first_event_is_awaited() {
    for acts in [
        [Write(17), Write(1)],
        [Write(22), Consume(2)],
        [Write(2), Write(33)],
    ] {
        each_time(&[], acts);
    }
}

/// A writer may stop for ever after it has flagged the next head, as in a panic.
#[test]
fn a_head_that_is_being_moved_is_found_once_the_next_one_is_flagged() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..16, 900);
    let links = (0..4).map(|number| memory.write(|writer| writer.page(0, number)));
    let links: Vec<u64> = links.collect();
    let word = |address| word(&memory, address).expect("within the memory");
    let mut before = links.iter().filter(|link| word(**link) & 3 == 1);
    let before = *before.next().expect("a head");
    let head = word(before) & !3;
    let moved = |flag: u64| {
        let next = word(head) & !3;
        memory.write(|writer| writer.put(before, head | 2));
        memory.write(|writer| writer.put(head, next | flag));
        rings(&memory, Start::Oldest).poll(&memory, ALL)
    };
    let batch = moved(0);
    assert!(batch.more && batch.chunks.is_empty(), "{batch:?}");
    assert_eq!(numbers(&moved(1)), (4..16).collect::<Vec<_>>());
}

/// A page that a reader in the guest has taken out of the circle keeps its events while the pages
/// after it are overwritten.
#[test]
fn a_lost_position_is_continued_at_a_later_reader_page() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..14, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 14);
    write(&memory, 14..34, 900);
    assert!(memory.write(|writer| writer.consume(0)));
    write(&memory, 34..42, 900);
    let held = numbers(&rings(&memory, Start::Oldest).poll(&memory, ALL));
    assert!(held[4] > held[3] + 1, "the reader page comes before a gap");
    let batch = follower.poll(&memory, ALL);
    assert_eq!(numbers(&batch), held);
    assert_eq!(batch.lost, 28 - held.len() as u64);
}
