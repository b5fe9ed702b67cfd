// SPDX-License-Identifier: Apache-2.0

mod between;
mod large;
mod lists;
mod losses;
mod mapped;
mod suspect;
mod torn;
mod users;

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::testing::rings::{ARRAY, BASE, Rings as Memory, Version, Writer};

const ALL: usize = 1 << 20;
const VERSIONS: [Version; 3] = [Version::V5_10, Version::V6_12, Version::V7_3];

/// Returns the payload of the event with a number: its id, and bytes that follow from the number.
fn payload(number: u64, length: usize) -> Vec<u8> {
    let mut payload = vec![7, 0, 0, 0, 1, 0, 0, 0];
    payload.extend_from_slice(&number.to_le_bytes());
    payload.resize(length.max(16), number as u8 ^ 0x5a);
    payload
}

/// Returns the payload of an event that begins with the same bytes as all other such events. A
/// number of these events fills a page exactly.
fn alike(number: u64) -> Vec<u8> {
    let mut payload = vec![8];
    payload.resize(88, 0);
    payload.extend_from_slice(&number.to_le_bytes());
    payload.resize(ALIKE, number as u8 ^ 0x5a);
    payload
}

/// Length of the payload of [`alike`].
const ALIKE: usize = 672;

/// An event that was read: CPU, time, number.
type Seen = (u32, u64, u64);

/// Decodes the events of a batch and checks each byte of them.
fn seen(batch: &Batch) -> Vec<Seen> {
    let mut all = vec![];
    for chunk in &batch.chunks {
        let page = Page::parse(&chunk.page).expect("a header");
        let before = all.len();
        for event in page.events() {
            let (time, bytes) = event.expect("whole");
            let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            let (number, expected) = match bytes[0] {
                7 => (number(8), payload(number(8), bytes.len())),
                8 => (number(88), alike(number(88))),
                other => panic!("an event begins with {other}"),
            };
            assert!(expected == bytes, "event {number} is mixed with another");
            all.push((chunk.cpu, time, number));
        }
        assert_eq!(all.len() - before, chunk.events as usize);
    }
    all
}

fn numbers(batch: &Batch) -> Vec<u64> {
    seen(batch)
        .into_iter()
        .map(|(_, _, number)| number)
        .collect()
}

fn rings(memory: &Memory, start: Start) -> Rings {
    Rings::new(memory.source(), ARRAY, start)
}

fn write(memory: &Memory, numbers: std::ops::Range<u64>, length: usize) {
    for number in numbers {
        memory.write(|writer| writer.event(0, 1000 + number, &payload(number, length)));
    }
}

#[test]
fn events_are_read_once_with_their_times_while_the_ring_wraps() {
    for version in VERSIONS {
        let memory = Memory::new(version, 1, 4);
        let mut rings = rings(&memory, Start::Oldest);
        assert_eq!(rings.poll(&memory, ALL), Batch::default(), "an empty ring");
        let mut random = fastrand::Rng::with_seed(5);
        let (mut number, mut time) = (0, 0);
        for round in 0..500 {
            let mut expected = vec![];
            for _ in 0..random.u64(0..6) {
                // Some events are so late that their time is extended.
                time += match random.u32(0..10) {
                    0 => 1 << random.u32(27..40),
                    _ => random.u64(0..1000),
                };
                let payload = payload(number, random.usize(16..900));
                memory.write(|writer| writer.event(0, time, &payload));
                expected.push((0, time, number));
                number += 1;
            }
            let batch = rings.poll(&memory, ALL);
            assert_eq!(seen(&batch), expected, "{version:?} round {round}");
            assert_eq!((batch.lost, batch.torn, batch.damaged), (0, 0, 0));
            assert!(!batch.restarted && !batch.more && !batch.unreadable);
        }
    }
}

#[test]
fn a_ring_that_has_wrapped_is_read_from_its_oldest_event() {
    // The hint is out of date: only the writer has moved the head.
    let memory = Memory::new(Version::V6_12, 1, 6);
    write(&memory, 0..100, 900);
    let mut rings = rings(&memory, Start::Oldest);
    let read = numbers(&rings.poll(&memory, ALL));
    assert_eq!(read, (read[0]..100).collect::<Vec<_>>());
    assert!((20..=24).contains(&read.len()), "{}", read.len());
    assert_eq!(rings.poll(&memory, ALL), Batch::default());
    // Events that the guest overwrote before the first poll do not count as lost.
    write(&memory, 100..150, 900);
    let batch = rings.poll(&memory, ALL);
    let later = numbers(&batch);
    assert_eq!(later.last(), Some(&149));
    assert_eq!(later.len() as u64 + batch.lost, 50);
}

#[test]
fn overwritten_events_are_counted_exactly() {
    let memory = Memory::new(Version::V5_10, 1, 3);
    let mut rings = rings(&memory, Start::Oldest);
    rings.poll(&memory, ALL);
    let mut random = fastrand::Rng::with_seed(9);
    let mut written = 0;
    for _ in 0..200 {
        let before = written;
        let length = random.usize(16..1800);
        write(&memory, written..written + random.u64(0..40), length);
        written = memory.write(|writer| writer.entries(0));
        let batch = rings.poll(&memory, ALL);
        let read = numbers(&batch);
        assert_eq!(before + batch.lost + read.len() as u64, written);
        let expected = written - read.len() as u64..written;
        assert_eq!(read, expected.collect::<Vec<_>>());
    }
}

#[test]
fn a_follower_begins_at_the_end() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    for before in [0, 3, 40] {
        let start = memory.write(|writer| writer.entries(0));
        write(&memory, start..start + before, 300);
        let mut rings = rings(&memory, Start::End);
        assert_eq!(rings.poll(&memory, ALL), Batch::default());
        write(&memory, start + before..start + before + 2, 300);
        let read = seen(&rings.poll(&memory, ALL));
        let next = start + before;
        assert_eq!(read, [(0, 1000 + next, next), (0, 1001 + next, next + 1)]);
    }
}

#[test]
fn each_cpu_has_its_ring_and_a_poll_ends_at_its_limit() {
    let memory = Memory::new(Version::V6_12, 3, 8);
    for number in 0..60 {
        let cpu = number as usize % 3;
        memory.write(|writer| writer.event(cpu, number, &payload(number, 900)));
    }
    let mut rings = rings(&memory, Start::Oldest);
    let (mut read, mut polls) = (vec![], 0);
    loop {
        let batch = rings.poll(&memory, 6000);
        assert!(
            seen(&batch).len() <= 16,
            "three pages of four events, and one more"
        );
        read.extend(seen(&batch));
        polls += 1;
        if !batch.more {
            break;
        }
    }
    assert!(polls > 3, "{polls}");
    for cpu in 0..3 {
        let of_cpu = read.iter().filter(|seen| seen.0 == cpu).map(|seen| seen.2);
        let expected = (0..20).map(|index| u64::from(cpu) + 3 * index);
        assert!(of_cpu.eq(expected), "CPU {cpu}");
    }
}

/// Events that the guest's own reader has consumed before count neither as read nor as lost.
#[test]
fn a_guest_that_reads_its_ring_takes_events_that_are_counted() {
    for version in VERSIONS {
        let memory = Memory::new(version, 1, 5);
        write(&memory, 0..10, 900);
        memory.write(|writer| (0..2).for_each(|_| _ = writer.consume(0)));
        let mut late = rings(&memory, Start::Oldest);
        assert_eq!(numbers(&late.poll(&memory, ALL)), [4, 5, 6, 7, 8, 9]);
        let mut follower = rings(&memory, Start::End);
        follower.poll(&memory, ALL);
        let (mut read, mut lost, mut number) = (0, 0, 10);
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..400 {
            for _ in 0..random.u32(0..8) {
                memory.write(|writer| writer.event(0, 1000 + number, &payload(number, 900)));
                number += 1;
            }
            for _ in 0..random.u32(0..5) {
                memory.write(|writer| writer.consume(0));
            }
            let batch = follower.poll(&memory, ALL);
            let numbers = numbers(&batch);
            assert!(numbers.is_sorted());
            assert!(numbers.iter().all(|&seen| seen >= 10 + read + lost));
            read += numbers.len() as u64;
            lost += batch.lost;
            assert_eq!(10 + read + lost, number, "{version:?}");
        }
        assert!(read > 4 * lost, "{read} read, {lost} lost");
    }
}

/// The page that the reader takes is the one that is being written, so the writer leaves it without
/// a head to move.
#[test]
fn a_guest_that_has_read_everything_is_followed() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let mut follower = rings(&memory, Start::Oldest);
    for number in 0..200 {
        write(&memory, number..number + 1, 900);
        let batch = follower.poll(&memory, ALL);
        assert_eq!((numbers(&batch), batch.lost), (vec![number], 0));
        memory.write(|writer| while writer.consume(0) {});
    }
}

/// After `trace_pipe_raw`, the reader page has another data page, whose time is the same.
#[test]
fn a_data_page_that_the_guest_takes_away_is_noticed() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let event = |number| memory.write(|writer| writer.event(0, 0, &alike(number)));
    // Five events fill a page. The reader page is then the second one.
    (0..10).for_each(event);
    memory.write(|writer| (0..3).for_each(|_| _ = writer.consume(0)));
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [5, 6, 7, 8, 9]);
    (10..12).for_each(event);
    // Its place in the circle is written again, with the same generation.
    memory.write(|writer| writer.take_data(0));
    memory.write(|writer| writer.consume(0));
    (12..37).for_each(event);
    let batch = follower.poll(&memory, ALL);
    assert_eq!(numbers(&batch), (20..37).collect::<Vec<_>>());
    assert_eq!(batch.lost, 10);
}

#[test]
fn an_emptied_ring_begins_anew() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..30, 500);
    let mut follower = rings(&memory, Start::End);
    follower.poll(&memory, ALL);
    memory.write(|writer| writer.empty(0));
    memory.write(|writer| writer.event(0, 5, &payload(0, 100)));
    let batch = follower.poll(&memory, ALL);
    assert_eq!((seen(&batch), batch.lost), (vec![(0, 5, 0)], 0));
    assert!(batch.restarted);
}

/// A snapshot exchanges the ring for one with earlier events.
#[test]
fn a_ring_that_is_exchanged_is_followed_without_its_old_events() {
    let memory = Memory::new(Version::V6_12, 2, 6);
    let both = |cpu: usize, number: u64| {
        memory.write(|writer| writer.event(cpu, number, &payload(number, 200)));
    };
    (0..10).for_each(|number| both(1, number));
    let exchange = |first, second| {
        memory.write(|writer| {
            writer.put_ring(0, first);
            writer.put_ring(1, second);
        });
    };
    exchange(1, 0);
    let mut follower = rings(&memory, Start::Oldest);
    let old = follower.poll(&memory, ALL);
    assert_eq!(numbers(&old), (0..10).collect::<Vec<_>>());
    (10..20).for_each(|number| both(0, number));
    assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 10);
    exchange(0, 1);
    // The ring with 0 to 9 is CPU 1's again, and 20 to 29 are written to the ring with 10 to 19.
    (20..30).for_each(|number| both(0, number));
    let batch = follower.poll(&memory, ALL);
    assert!(batch.restarted);
    let cpu_0: Vec<u64> = seen(&batch)
        .iter()
        .filter(|seen| seen.0 == 0)
        .map(|seen| seen.2)
        .collect();
    assert_eq!(cpu_0, (10..30).collect::<Vec<_>>());
}

/// The ring wraps between any two reads, and again some reads later. No event is then lost that the
/// ring still holds.
#[test]
fn a_ring_that_wraps_during_a_poll_is_read_from_its_oldest_event() {
    for (consumed, written) in [(0, 13), (0, 25), (0, 37), (2, 13), (2, 25), (3, 37)] {
        for (when, again) in (0..50).flat_map(|when| (0..16).map(move |later| (when, when + later)))
        {
            let memory = Memory::new(Version::V6_12, 1, 4);
            write(&memory, 0..14, 900);
            let mut follower = rings(&memory, Start::Oldest);
            memory.write(|writer| (0..consumed).for_each(|_| _ = writer.consume(0)));
            memory.before_read(move |read, writer| {
                if read == when || read == again {
                    let first = writer.entries(0);
                    for number in first..first + written {
                        writer.event(0, 1000 + number, &payload(number, 900));
                    }
                    writer.run(usize::MAX);
                }
            });
            let last = 13 + written * (1 + u64::from(again > when));
            let (mut read, mut lost) = (vec![], 0);
            // The polls in which the ring wraps, and one more.
            while memory.reads() <= again || read.last() != Some(&last) {
                let batch = follower.poll(&memory, ALL);
                read.extend(numbers(&batch));
                lost += batch.lost;
                assert!(
                    memory.reads() < 1000,
                    "{consumed} {written} {when}: {read:?}"
                );
            }
            memory.rest();
            let terms = (consumed, written, when, again);
            let gaps = read.windows(2).filter(|pair| pair[1] != pair[0] + 1);
            let gaps: Vec<&[u64]> = gaps.collect();
            let held = numbers(&rings(&memory, Start::Oldest).poll(&memory, ALL));
            for gap in &gaps {
                let next = held.iter().find(|number| **number > gap[0]);
                assert!(
                    Some(&gap[1]) <= next,
                    "{terms:?}: {gap:?}, and the ring holds {held:?}"
                );
            }
            let gaps: u64 = gaps.iter().map(|gap| gap[1] - gap[0] - 1).sum();
            assert!(lost >= gaps, "{terms:?}");
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Race {
    /// The clock advances once in this many events.
    coarse: u64,
    /// One in this many steps of the guest is a read by the guest's own reader; 0 for none.
    consumes: u32,
    /// The first bytes of all events are equal.
    alike: bool,
    /// The guest carries out at most this many stores between two reads.
    stores: usize,
    pages: usize,
}

/// Interleaves the stores of a guest with the reads of a follower. Each event that is read must be
/// whole and have its own time. Numbers only rise. The events read and lost are together as many as
/// were written.
fn race(race: Race, version: Version, seed: u64) -> (u64, u64) {
    const EVENTS: u64 = 600;
    let memory = Memory::new(version, 1, race.pages);
    let mut follower = rings(&memory, Start::Oldest);
    follower.poll(&memory, ALL);
    let mut random = fastrand::Rng::with_seed(seed);
    let times = Rc::new(RefCell::new(vec![]));
    let (written, mut time) = (Rc::clone(&times), 10);
    memory.before_read(move |_, writer: &mut Writer| {
        let count = random.usize(0..=race.stores);
        while writer.pending() < count && (written.borrow().len() as u64) < EVENTS {
            if race.consumes > 0 && random.u32(0..race.consumes) == 0 {
                writer.consume(0);
                continue;
            }
            let number = written.borrow().len() as u64;
            if number.is_multiple_of(race.coarse) {
                time += random.u64(1..100);
            }
            let payload = match race.alike {
                true => alike(number),
                false => payload(number, random.usize(16..1400)),
            };
            writer.event(0, time, &payload);
            written.borrow_mut().push(time);
        }
        writer.run(count);
    });
    let (mut next, mut read, mut lost, mut torn) = (0, 0, 0, 0);
    let mut check = |batch: Batch| {
        for (_, time, number) in seen(&batch) {
            assert!(number >= next, "{number} after {next} in {race:?} {seed}");
            assert_eq!(time, times.borrow()[number as usize], "{race:?} {seed}");
            next = number + 1;
            read += 1;
        }
        lost += batch.lost;
        torn += batch.torn;
        assert_eq!(batch.damaged, 0, "{race:?} {seed}");
        assert!(!batch.restarted && !batch.unreadable, "{race:?} {seed}");
    };
    while (times.borrow().len() as u64) < EVENTS {
        check(follower.poll(&memory, ALL));
    }
    memory.rest();
    loop {
        let batch = follower.poll(&memory, ALL);
        let more = batch.more;
        check(batch);
        if !more {
            break;
        }
    }
    assert_eq!(read + lost, EVENTS, "{race:?} {seed}");
    (read, torn)
}

#[test]
fn no_order_of_the_guests_stores_makes_a_reader_mix_events() {
    let (mut read, mut torn) = (0, 0);
    for (coarse, consumes, alike) in [
        (1, 0, false),
        (1, 3, false),
        (10, 3, false),
        (1000, 10, false),
        // Only the generation differs.
        (1000, 0, true),
        // Only the time differs, if the generation does not.
        (1, 3, true),
    ] {
        for (stores, pages) in [(2, 3), (20, 3), (20, 6), (200, 3), (500, 4)] {
            for seed in 0..20 {
                let terms = Race {
                    coarse,
                    consumes,
                    alike,
                    stores,
                    pages,
                };
                let version = VERSIONS[seed as usize % 3];
                let (of_one, torn_of_one) = race(terms, version, seed);
                read += of_one;
                torn += torn_of_one;
            }
        }
    }
    println!("{read} events read, {torn} torn copies refused");
    assert!(read > 50_000 && torn > 100, "{read} read, {torn} torn");
}

#[test]
fn pointers_that_lead_nowhere_and_cycles_end_a_poll() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..40, 900);
    for wild in [0, 8, 1 << 60, u64::MAX, BASE + 3, ARRAY] {
        for at in 0..64 {
            for table in [ARRAY, BASE + 0x200, BASE + 0x300, BASE + 0x400] {
                let hurt = Memory::new(Version::V6_12, 1, 4);
                write(&hurt, 0..40, 900);
                let mut follower = rings(&hurt, Start::Oldest);
                follower.poll(&hurt, 1);
                hurt.write(|writer| writer.put(table + at * 8, wild));
                hurt.before_read(|_, _| {});
                _ = follower.poll(&hurt, ALL);
                _ = rings(&hurt, Start::End).poll(&hurt, ALL);
                assert!(hurt.reads() < 300_000, "{}", hurt.reads());
            }
        }
    }
    // A page that follows itself, and is not the head.
    let page = memory.write(|writer| writer.page(0, 1));
    memory.write(|writer| writer.put(page, page));
    _ = rings(&memory, Start::Oldest).poll(&memory, ALL);
}

#[test]
fn lengths_and_events_that_lie_are_skipped_and_counted() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..2, 900);
    let mut follower = rings(&memory, Start::Oldest);
    let (_, data) = memory.write(|writer| writer.tail(0));
    memory.write(|writer| writer.put_bytes(data + 16, &[31 << 3; 4]));
    let batch = follower.poll(&memory, ALL);
    assert_eq!((batch.damaged, batch.chunks.len(), batch.lost), (1, 0, 2));
    write(&memory, 2..8, 900);
    let batch = follower.poll(&memory, ALL);
    let read = numbers(&batch);
    assert_eq!(read, [4, 5, 6, 7], "the next page");
    assert_eq!(batch.lost, 2, "the rest of the page before it");
    memory.write(|writer| writer.put(data + 8, u64::MAX));
    let batch = rings(&memory, Start::Oldest).poll(&memory, ALL);
    assert!(batch.more && batch.chunks.is_empty());
}
