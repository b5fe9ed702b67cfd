// SPDX-License-Identifier: Apache-2.0
//! Tests the first position of a follower, and the losses that it reports while the guest writes.

use super::*;

/// An event on one CPU during the first poll must not make the other CPUs begin at their oldest
/// event.
#[test]
fn all_cpus_begin_at_the_end_before_any_event_is_read() {
    let memory = Memory::new(Version::V6_12, 3, 6);
    for number in 0..30 {
        let cpu = number as usize % 3;
        memory.write(|writer| writer.event(cpu, number, &payload(number, 100)));
    }
    let mut follower = rings(&memory, Start::End);
    let mut next = 30;
    memory.before_read(move |_, writer| {
        if next < 90 {
            writer.event(0, next, &payload(next, 100));
            writer.run(usize::MAX);
            next += 1;
        }
    });
    // The limit lets the poll end after the first CPU.
    let mut read = seen(&follower.poll(&memory, 1));
    memory.rest();
    loop {
        let batch = follower.poll(&memory, ALL);
        read.extend(seen(&batch));
        if !batch.more {
            break;
        }
    }
    assert!(read.iter().all(|seen| seen.0 == 0), "{read:?}");
    let in_order = |pair: &[Seen]| pair[1].2 == pair[0].2 + 1;
    assert!(read.len() > 20 && read.windows(2).all(in_order), "{read:?}");

    let mut follower = rings(&memory, Start::End);
    assert!(follower.begin(&memory));
    memory.write(|writer| writer.event(2, 1000, &payload(90, 100)));
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [90]);
}

/// A reader that is slower than the writer never finds the writer at rest.
#[test]
fn losses_are_reported_while_the_writer_never_rests() {
    for (start, consumes) in [
        (Start::Oldest, false),
        (Start::End, false),
        (Start::Oldest, true),
        (Start::End, true),
    ] {
        let memory = Memory::new(Version::V6_12, 1, 5);
        write(&memory, 0..1000, 40);
        if consumes {
            memory.write(|writer| (0..2).for_each(|_| _ = writer.consume(0)));
        }
        // Each read comes after an event.
        memory.before_read(move |read, writer: &mut Writer| {
            let next = writer.entries(0);
            if consumes && read % 150 == 0 {
                writer.consume(0);
            }
            writer.event(0, 1000 + next, &payload(next, 40));
            writer.run(usize::MAX);
        });
        let mut follower = rings(&memory, start);
        assert!(follower.begin(&memory));
        let (mut read, mut lost, mut first) = (0, 0, None);
        let mut poll = |memory: &Memory| {
            let batch = follower.poll(memory, ALL);
            let numbers = numbers(&batch);
            first = first.or(numbers.first().copied());
            read += numbers.len() as u64;
            lost += batch.lost;
            (read, lost, first)
        };
        for round in 1..20 {
            let (read, lost, first) = poll(&memory);
            let written = memory.write(|writer| writer.entries(0));
            let first = first.expect("an event");
            assert!(read + lost <= written - first, "{start:?} {round}");
            // At most one loss is not reported yet.
            assert!(
                lost >= 800 * u64::saturating_sub(round, 2),
                "{start:?} {round}: {lost}"
            );
            memory.write(|writer| {
                for number in written..written + 1300 {
                    writer.event(0, 1000 + number, &payload(number, 40));
                }
            });
        }
        memory.rest();
        let (read, lost, first) = poll(&memory);
        let written = memory.write(|writer| writer.entries(0));
        let missing = written - first.expect("an event") - read - lost;
        let permitted = match start {
            Start::Oldest => 0,
            // The events that were written while the position was fixed.
            Start::End => 10,
        };
        assert!(missing <= permitted, "{start:?} {consumes}: {missing}");
    }
}

/// Events of the reader page that no reader in the guest has taken were written before those of the
/// circle.
#[test]
fn unread_events_of_the_reader_page_come_before_the_oldest_page() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..10, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 10);
    memory.write(|writer| writer.consume(0));
    write(&memory, 10..60, 900);
    // `committing`: an event is being written for ever.
    let ring = word(&memory, BASE + 0x300).expect("a ring");
    memory.write(|writer| writer.put(ring + 128, 1));
    let batch = follower.poll(&memory, ALL);
    assert_eq!(batch.lost, numbers(&batch)[0] - 10);
}

/// Without a loss, a start while events are written makes no later count wrong.
#[test]
fn a_start_amid_events_is_counted_exactly_afterwards() {
    let memory = Memory::new(Version::V6_12, 1, 6);
    write(&memory, 0..50, 40);
    memory.before_read(move |read, writer: &mut Writer| {
        let next = writer.entries(0);
        if read < 30 {
            writer.event(0, 1000 + next, &payload(next, 40));
            writer.run(usize::MAX);
        }
    });
    let mut follower = rings(&memory, Start::End);
    assert!(follower.begin(&memory));
    let batch = follower.poll(&memory, ALL);
    let first = numbers(&batch)[0];
    memory.rest();
    let (mut read, mut lost) = (numbers(&batch).len() as u64, batch.lost);
    let batch = follower.poll(&memory, ALL);
    read += numbers(&batch).len() as u64;
    lost += batch.lost;
    assert_eq!(lost, 0);
    let next = memory.write(|writer| writer.entries(0));
    write(&memory, next..next + 1000, 40);
    let batch = follower.poll(&memory, ALL);
    read += numbers(&batch).len() as u64;
    lost += batch.lost;
    assert!(lost > 100, "{lost}");
    assert_eq!(first + read + lost, next + 1000);
}

/// A reader in the guest that waits for events stands on the page that is being written.
#[test]
fn events_that_the_guest_has_read_before_are_neither_read_nor_lost() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..3, 900);
    memory.write(|writer| while writer.consume(0) {});
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(follower.poll(&memory, ALL), Batch::default());
    write(&memory, 3..6, 900);
    let batch = follower.poll(&memory, ALL);
    assert_eq!((numbers(&batch), batch.lost), (vec![3, 4, 5], 0));
    write(&memory, 6..100, 900);
    let batch = follower.poll(&memory, ALL);
    assert_eq!(6 + numbers(&batch).len() as u64 + batch.lost, 100);
}

/// The page that was read is the oldest one, and the next page cannot be read for a moment.
#[test]
fn a_page_is_not_read_twice_because_the_next_one_cannot_be_read() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..4, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1, 2, 3]);
    write(&memory, 4..5, 900);
    let (_, data) = memory.write(|writer| writer.tail(0));
    let commit = memory.write(|writer| {
        let at = (data + 8 - BASE) as usize;
        u64::from_le_bytes(writer.memory()[at..at + 8].try_into().unwrap())
    });
    memory.write(|writer| writer.put(data + 8, 1 << 20));
    let batch = follower.poll(&memory, ALL);
    assert!(batch.more && batch.chunks.is_empty(), "{batch:?}");
    memory.write(|writer| writer.put(data + 8, commit));
    let batch = follower.poll(&memory, ALL);
    assert_eq!((numbers(&batch), batch.lost), (vec![4], 0));
}

/// A content that is shorter than what was read of it is another content, even if all else is
/// equal.
#[test]
fn a_page_that_becomes_shorter_is_read_anew() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    (0..3).for_each(|number| memory.write(|writer| writer.event(0, 0, &alike(number))));
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1, 2]);
    let (_, data) = memory.write(|writer| writer.tail(0));
    memory.write(|writer| writer.put(data + 8, 8 + ALIKE as u64));
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0]);
}
