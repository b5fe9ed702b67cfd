// SPDX-License-Identifier: Apache-2.0
//! Tests each comparison that keeps a changed page from being taken, or makes a follower leave a
//! position that the guest has overtaken.

use super::*;

/// Returns the events of CPU 0 in a batch.
fn of_cpu_0(batch: &Batch) -> Vec<u64> {
    let of_cpu = seen(batch).into_iter().filter(|seen| seen.0 == 0);
    of_cpu.map(|seen| seen.2).collect()
}

/// Gives CPU 0 the ring of CPU 1, and CPU 1 that of CPU 0.
fn exchange(memory: &Memory) {
    memory.write(|writer| {
        writer.put_ring(0, 1);
        writer.put_ring(1, 0);
    });
}

/// The content begins with the same bytes as the earlier one, and differs in those that were
/// written after the first poll.
#[test]
fn the_first_bytes_of_a_page_are_compared_as_far_as_they_were_read() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let event = |number| memory.write(|writer| writer.event(0, 0, &payload(number, 16)));
    event(0);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0]);
    event(1);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [1]);
    let (_, data) = memory.write(|writer| writer.tail(0));
    // An event has 4 bytes before its payload.
    memory.write(|writer| writer.put_bytes(data + 16 + 20 + 4, &payload(9, 16)));
    event(2);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 9, 2]);
}

/// Nothing was read before the ring wraps, so its position is not lost.
#[test]
fn losses_after_a_start_at_the_end_of_an_empty_ring_are_counted() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let mut follower = rings(&memory, Start::End);
    assert!(follower.begin(&memory));
    for written in [0..37, 37..40] {
        let expected = written.end - written.start;
        write(&memory, written, 900);
        let batch = follower.poll(&memory, ALL);
        assert_eq!(numbers(&batch).len() as u64 + batch.lost, expected);
    }
}

/// The page that the follower waits at was written, and consumed and emptied by a reader in the
/// guest.
#[test]
fn a_page_that_was_consumed_while_its_first_event_was_awaited_is_left() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(follower.poll(&memory, ALL), Batch::default());
    write(&memory, 0..10, 900);
    memory.write(|writer| (0..3).for_each(|_| _ = writer.consume(0)));
    let batch = follower.poll(&memory, ALL);
    assert_eq!(numbers(&batch), (4..10).collect::<Vec<_>>());
    assert_eq!(batch.lost, 4);
}

/// The next page has no event of this round yet, and the time of the round before.
#[test]
fn an_empty_page_is_awaited_whatever_its_time_is() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..20, 900);
    let mut follower = rings(&memory, Start::Oldest);
    follower.poll(&memory, ALL);
    write(&memory, 20..21, 900);
    let (_, data) = memory.write(|writer| writer.tail(0));
    let [time, length] = [0, 8].map(|offset| word(&memory, data + offset).expect("readable"));
    let ring = word(&memory, BASE + 0x300).expect("a ring");
    let put = |time, length| {
        memory.write(|writer| {
            // `committing`: the event is being written.
            writer.put(ring + 128, u64::from(length == 0));
            writer.put(data, time);
            writer.put(data + 8, length);
        });
    };
    put(1000, 0);
    let batch = follower.poll(&memory, ALL);
    assert_eq!(
        (batch.restarted, batch.lost, batch.chunks.len()),
        (false, 0, 0)
    );
    put(time, length);
    let batch = follower.poll(&memory, ALL);
    assert_eq!(
        (numbers(&batch), batch.lost, batch.restarted),
        (vec![20], 0, false)
    );
}

/// With a coarse clock, events after an exchange have the time of the last one before it.
#[test]
fn events_with_the_time_of_an_exchange_are_read_once_the_ring_was_read_to_its_end() {
    let memory = Memory::new(Version::V6_12, 2, 4);
    let event = |cpu: usize, number| {
        memory.write(|writer| writer.event(cpu, 5, &payload(number, 100)));
    };
    event(0, 0);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0]);
    exchange(&memory);
    assert_eq!(of_cpu_0(&follower.poll(&memory, ALL)), []);
    event(1, 1);
    assert_eq!(of_cpu_0(&follower.poll(&memory, ALL)), [1]);
}

/// Events are written to the other ring before it is first seen.
#[test]
fn a_follower_that_began_at_the_end_reads_an_exchanged_ring_from_its_oldest_event() {
    let memory = Memory::new(Version::V6_12, 2, 4);
    let event = |cpu: usize, number| {
        memory.write(|writer| writer.event(cpu, 100 + number, &payload(number, 100)));
    };
    event(0, 0);
    let mut follower = rings(&memory, Start::End);
    assert!(follower.begin(&memory));
    event(0, 1);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [1]);
    exchange(&memory);
    event(1, 2);
    assert_eq!(of_cpu_0(&follower.poll(&memory, ALL)), [2]);
}

/// The losses of a poll without events are told with the next events, even of another ring.
#[test]
fn losses_before_a_ring_is_exchanged_or_emptied_belong_to_the_next_chunk() {
    for is_emptied in [false, true] {
        let memory = Memory::new(Version::V6_12, 2, 4);
        write(&memory, 0..2, 900);
        let mut follower = rings(&memory, Start::Oldest);
        let (_, data) = memory.write(|writer| writer.tail(0));
        memory.write(|writer| writer.put_bytes(data + 16, &[31 << 3; 4]));
        let batch = follower.poll(&memory, ALL);
        assert_eq!((batch.chunks.len(), batch.lost), (0, 2));
        let cpu = usize::from(!is_emptied);
        match is_emptied {
            true => memory.write(|writer| writer.empty(0)),
            false => exchange(&memory),
        }
        memory.write(|writer| writer.event(cpu, 9000, &payload(0, 100)));
        let batch = follower.poll(&memory, ALL);
        assert!(batch.restarted);
        let chunk = batch.chunks.iter().find(|chunk| chunk.cpu == 0);
        assert_eq!(chunk.expect("an event").lost_before, 2, "{is_emptied}");
    }
}

/// The page of the position was overwritten, and a reader in the guest has taken it from the circle
/// with its later events, before those after it were overwritten.
#[test]
fn a_position_is_continued_in_its_own_page_if_it_is_a_later_reader_page() {
    let mut found = 0;
    for (first, second) in (14..40).flat_map(|first| (18..42).map(move |second| (first, second))) {
        let memory = Memory::new(Version::V6_12, 1, 4);
        write(&memory, 0..first, 900);
        let mut follower = rings(&memory, Start::Oldest);
        follower.poll(&memory, ALL);
        let (page, _) = memory.write(|writer| writer.tail(0));
        let end = first + second;
        write(&memory, first..end, 900);
        memory.write(|writer| writer.consume(0));
        write(&memory, end..end + 10, 900);
        let ring = word(&memory, BASE + 0x300).expect("a ring");
        let reader = word(&memory, ring + 88).expect("readable");
        found += u32::from(reader == memory.write(|writer| writer.page(0, page)));
        let held = numbers(&rings(&memory, Start::Oldest).poll(&memory, ALL));
        let batch = follower.poll(&memory, ALL);
        assert_eq!(numbers(&batch), held, "{first} {second}");
        assert_eq!(held.len() as u64 + batch.lost, second + 10);
    }
    assert!(found > 10, "{found}");
}

/// `trace_pipe_raw` may give the ring a page whose time is not initialized.
#[test]
fn the_time_of_a_reader_page_without_events_means_nothing() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..14, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 14);
    write(&memory, 14..60, 900);
    memory.write(|writer| {
        writer.consume(0);
        writer.take_data(0);
    });
    let ring = word(&memory, BASE + 0x300).expect("a ring");
    let reader = word(&memory, ring + 88).expect("readable");
    let data = word(&memory, reader + 48).expect("readable");
    memory.write(|writer| writer.put(data, 1 << 60));
    let batch = follower.poll(&memory, ALL);
    assert!(!batch.restarted);
    let read = numbers(&batch);
    assert_eq!(read, (60 - read.len() as u64..60).collect::<Vec<_>>());
    assert_eq!(14 + batch.lost, read[0]);
}
