// SPDX-License-Identifier: Apache-2.0
//! Addresses that the guest gives to something else, and a guest that makes a poll long.

use super::*;

/// Returns a word of the memory.
fn word_at(memory: &Memory, address: u64) -> u64 {
    word(memory, address).expect("within the memory")
}

#[test]
fn only_the_monotonic_clock_is_reported_as_such() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let clock = |number| memory.write(|writer| writer.put(ARRAY + 48, number));
    let mut follower = rings(&memory, Start::Oldest);
    assert!(!follower.poll(&memory, ALL).is_monotonic, "local");
    clock(MONO);
    let batch = follower.poll(&memory, ALL);
    assert!(!batch.is_monotonic, "some events may be older");
    assert!(follower.poll(&memory, ALL).is_monotonic);
    let mut other = rings(&memory, Start::End);
    assert!(other.begin(&memory) && other.poll(&memory, ALL).is_monotonic);
    // `x86-tsc`
    clock(9);
    assert!(!follower.poll(&memory, ALL).is_monotonic);
}

/// The guest changes the clock before the last read of a poll. Some events may have been read with
/// the times of another clock.
#[test]
fn a_clock_that_changes_during_a_poll_is_not_reported_as_monotonic() {
    // `x86-tsc`
    for (before, after) in [(MONO, 9), (9, MONO)] {
        let memory = Memory::new(Version::V6_12, 1, 4);
        let clock = |number| memory.write(|writer| writer.put(ARRAY + 48, number));
        clock(MONO);
        let mut follower = rings(&memory, Start::Oldest);
        assert!(follower.poll(&memory, ALL).is_monotonic);
        write(&memory, 0..2, 900);
        clock(before);
        memory.before_read(|_, _| {});
        assert_eq!(numbers(&follower.clone().poll(&memory, ALL)), [0, 1]);
        let last = memory.reads() - 1;
        memory.before_read(move |read, writer| {
            if read == last {
                writer.put(ARRAY + 48, after);
                writer.run(usize::MAX);
            }
        });
        let batch = follower.poll(&memory, ALL);
        assert_eq!(numbers(&batch), [0, 1]);
        assert!(!batch.is_monotonic, "{before} {after}");
    }
}

/// All events of a CPU that was not online before are later than the start.
#[test]
fn a_cpu_that_comes_online_is_read_from_its_first_event() {
    let memory = Memory::new(Version::V6_12, 2, 4);
    let pointer = BASE + 0x300 + 8;
    let ring = word_at(&memory, pointer);
    memory.write(|writer| writer.put(pointer, 0));
    let mut follower = rings(&memory, Start::End);
    assert!(follower.begin(&memory));
    memory.write(|writer| {
        writer.put(pointer, ring);
        writer.event(1, 5, &payload(3, 100));
    });
    assert_eq!(seen(&follower.poll(&memory, ALL)), [(1, 5, 3)]);
}

/// The kernel clears the pointer to a ring that it frees. The memory may be reused.
#[test]
fn a_ring_without_a_pointer_is_not_read() {
    let memory = Memory::new(Version::V6_12, 2, 4);
    write(&memory, 0..2, 100);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1]);
    let ring = word_at(&memory, BASE + 0x300);
    memory.write(|writer| writer.put(BASE + 0x300, 0));
    write(&memory, 2..3, 100);
    assert_eq!(follower.poll(&memory, ALL), Batch::default());
    memory.write(|writer| writer.put(BASE + 0x300, ring));
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [2]);
}

#[test]
fn an_instance_that_was_removed_is_not_taken_for_another_one() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let source = memory.source();
    let foo = source.instance(&memory, "foo").expect("listed");
    assert!(source.is_instance(&memory, foo, "foo"));
    assert!(source.is_instance(&memory, ARRAY, ""));
    assert!(!source.is_instance(&memory, foo, "bar"), "another name");
    assert!(!source.is_instance(&memory, foo, ""), "the top level");
    // list_del() takes it out of the list and poisons its links.
    let (next, before) = (word_at(&memory, foo), word_at(&memory, foo + 8));
    memory.write(|writer| {
        writer.put(before, next);
        writer.put(next + 8, before);
    });
    assert!(!source.is_instance(&memory, foo, "foo"), "not in the list");
    memory.write(|writer| writer.put(foo, 0xdead_0000_0000_0100));
    assert!(!source.is_instance(&memory, foo, "foo"), "poisoned");
    assert_eq!(source.instance(&memory, "foo"), None);
}

#[test]
fn an_event_that_was_removed_is_not_taken_for_another_one() {
    let memory = Memory::new(Version::V6_12, 1, 3);
    let source = memory.source();
    let events = Event::all(&memory, &source).expect("a list");
    assert!(
        events
            .iter()
            .all(|event| event.is_current(&memory, &source))
    );
    let call = word_at(&memory, source.events);
    // Its print format, its class and its name are those of another event.
    for offset in [72, 16, 24] {
        let before = word_at(&memory, call + offset);
        let other = word_at(&memory, word_at(&memory, call) + offset);
        memory.write(|writer| writer.put(call + offset, other));
        assert!(!events[0].is_current(&memory, &source), "{offset}");
        assert_eq!(events[0].format(&memory, &source), None);
        memory.write(|writer| writer.put(call + offset, before));
        assert!(events[0].is_current(&memory, &source));
    }
    let next = word_at(&memory, call);
    memory.write(|writer| writer.put(source.events, next));
    assert!(!events[0].is_current(&memory, &source), "not in the list");
}

/// An event that is registered in the same memory may have the same id and names. One of these
/// addresses differs: that of its class, of its print format, or of its last field.
#[test]
fn an_event_with_equal_names_is_not_taken_for_the_one_that_was_removed() {
    let memory = Memory::new(Version::V6_12, 1, 3);
    let source = memory.source();
    let events = Event::all(&memory, &source).expect("a list");
    let call = word_at(&memory, source.events);
    let class = word_at(&memory, call + 16);
    let copy = BASE + 0x7f00;
    memory.write(|writer| {
        let at = (class - BASE) as usize;
        let bytes = writer.memory()[at..at + 40].to_vec();
        writer.put_bytes(copy, &bytes);
    });
    let first_field = word_at(&memory, word_at(&memory, class + 24));
    let print = word_at(&memory, call + 72);
    for (address, other) in [
        (call + 16, copy),
        (call + 72, print + 1),
        (class + 24, first_field),
    ] {
        let before = word_at(&memory, address);
        assert!(events[0].is_current(&memory, &source));
        memory.write(|writer| writer.put(address, other));
        assert!(!events[0].is_current(&memory, &source), "{address:#x}");
        memory.write(|writer| writer.put(address, before));
    }
}

/// Another event is registered in the same memory before any read of a format.
#[test]
fn a_format_is_of_one_event() {
    let memory = Memory::new(Version::V6_12, 1, 3);
    let source = memory.source();
    let events = Event::all(&memory, &source).expect("a list");
    memory.before_read(|_, _| {});
    let format = events[0].format(&memory, &source).expect("readable");
    let call = word_at(&memory, source.events);
    let other = word_at(&memory, call);
    let words = [16, 24, 56, 72].map(|at| {
        [
            at,
            word_at(&memory, call + at),
            word_at(&memory, other + at),
        ]
    });
    let put = move |writer: &mut Writer, which: usize| {
        for word in words {
            writer.put(call + word[0], word[which]);
        }
        writer.run(usize::MAX);
    };
    let mut refused = 0;
    for when in 0..200 {
        memory.before_read(move |read, writer| {
            if read == when {
                put(writer, 2);
            }
        });
        let result = events[0].format(&memory, &source);
        let has_acted = memory.reads() > when;
        memory.rest();
        memory.write(|writer| put(writer, 1));
        match result {
            None => refused += 1,
            Some(text) => assert_eq!(text, format, "{when}"),
        }
        if !has_acted {
            break;
        }
    }
    assert!(refused > 30, "{refused}");
}

#[test]
fn a_guest_that_counts_fewer_events_than_it_has_written_loses_none() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..2, 100);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1]);
    write(&memory, 2..3, 100);
    // `entries`
    let ring = word_at(&memory, BASE + 0x300);
    memory.write(|writer| writer.put(ring + 104, 2));
    let batch = follower.poll(&memory, ALL);
    assert_eq!((numbers(&batch), batch.lost), (vec![2], 0));
}

/// Two CPUs with one ring would deliver its events twice.
#[test]
fn a_ring_that_two_cpus_have_is_read_once() {
    let memory = Memory::new(Version::V6_12, 2, 4);
    write(&memory, 0..4, 100);
    memory.write(|writer| writer.put_ring(1, 0));
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1, 2, 3]);
}

/// All CPUs share the limit of a poll.
#[test]
fn the_reads_of_a_poll_are_bounded_for_all_cpus_together() {
    const CPUS_OF_GUEST: u64 = 64;
    let memory = Memory::new(Version::V6_12, 2, 4);
    write(&memory, 0..40, 900);
    // The pages after the one that is being written lead in a circle, without a head, and not back.
    let (tail, _) = memory.write(|writer| writer.tail(0));
    for number in (0..5).filter(|number| *number != tail) {
        let page = memory.write(|writer| writer.page(0, number));
        memory.write(|writer| writer.put(page, page));
    }
    let page = memory.write(|writer| writer.page(0, tail));
    let next = word_at(&memory, page);
    memory.write(|writer| writer.put(page, next & !3));
    // Each CPU has a copy of the ring's header.
    let pointers = BASE + 0x300;
    let ring = word_at(&memory, pointers);
    let (_, spare) = memory.write(|writer| writer.tail(1));
    memory.write(|writer| {
        let at = (ring - BASE) as usize;
        let header = writer.memory()[at..at + 256].to_vec();
        writer.put(word_of_cpus(), CPUS_OF_GUEST);
        writer.put(BASE + 0x200 + 24, spare);
        for cpu in 0..CPUS_OF_GUEST {
            let copy = spare + 4096 + cpu * 256;
            writer.put_bytes(copy, &header);
            writer.put(spare + cpu * 8, copy);
        }
    });
    let mut follower = rings(&memory, Start::Oldest);
    memory.before_read(|_, _| {});
    for poll in 1..4 {
        let batch = follower.poll(&memory, ALL);
        assert!(batch.more && batch.chunks.is_empty() && batch.lost == 0);
        assert!(!batch.unreadable, "the limit is not the guest's");
        let most = poll * (MAX_READS as u64 + 1);
        assert!(memory.reads() <= most, "{} of {most}", memory.reads());
    }
}

/// Returns the address of the number of CPUs.
fn word_of_cpus() -> u64 {
    Memory::new(Version::V6_12, 1, 4).source().cpus
}

/// `ring_buffer_subbuf_order_set()` unlinks each page by list_del_init() before it frees it.
#[test]
fn a_page_that_was_unlinked_is_not_read_again() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..2, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1]);
    let (page, _) = memory.write(|writer| writer.tail(0));
    write(&memory, 2..6, 900);
    memory.write(|writer| {
        let page = writer.page(0, page);
        writer.put(page, page);
    });
    let mut read = Vec::new();
    for _ in 0..4 {
        read.extend(numbers(&follower.poll(&memory, ALL)));
    }
    let mut once = read.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(read, once, "each event once");
}

#[test]
fn pages_of_another_size_begin_anew() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    write(&memory, 0..2, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1]);
    assert!(!follower.poll(&memory, ALL).restarted);
    memory.write(|writer| writer.put_bytes(BASE + 0x200 + 48, &1u32.to_le_bytes()));
    let batch = follower.poll(&memory, ALL);
    assert!(batch.restarted);
    assert_eq!(numbers(&batch), []);
}

/// Each snapshot exchanges the ring for the saved one, which keeps its events.
#[test]
fn an_idle_ring_that_is_exchanged_twice_is_not_read_again() {
    let memory = Memory::new(Version::V6_12, 2, 6);
    write(&memory, 0..10, 200);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 10);
    for (first, second) in [(1, 0), (0, 1)] {
        memory.write(|writer| {
            writer.put_ring(0, first);
            writer.put_ring(1, second);
        });
        let batch = follower.poll(&memory, ALL);
        assert!(batch.restarted);
        assert!(seen(&batch).iter().all(|seen| seen.0 == 1), "CPU 0 again");
    }
}

/// The list of a page that was freed leads to a page that was read before.
#[test]
fn a_page_that_leads_to_an_older_one_does_not_make_events_be_read_again() {
    let memory = Memory::new(Version::V6_12, 1, 6);
    write(&memory, 0..2, 900);
    let (older, _) = memory.write(|writer| writer.tail(0));
    write(&memory, 2..6, 900);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1, 2, 3, 4, 5]);
    let (page, _) = memory.write(|writer| writer.tail(0));
    assert_ne!(older, page);
    write(&memory, 6..10, 900);
    memory.write(|writer| {
        let [older, page] = [older, page].map(|page| writer.page(0, page));
        writer.put(page, older);
    });
    let mut read = vec![];
    for _ in 0..4 {
        read.extend(numbers(&follower.poll(&memory, ALL)));
    }
    assert!(read.starts_with(&[6, 7]), "the rest of the page: {read:?}");
    assert!(
        read.is_sorted_by(|one, next| one < next),
        "each event once: {read:?}"
    );
}

/// The oldest page or the reader page has the memory and the generation that the page of the
/// position had.
#[test]
fn a_page_that_seems_to_be_another_one_does_not_hold_a_follower() {
    for is_reader in [false, true] {
        let memory = Memory::new(Version::V6_12, 1, 4);
        write(&memory, 0..15, 900);
        let mut follower = rings(&memory, Start::Oldest);
        assert_eq!(numbers(&follower.poll(&memory, ALL)).len(), 15);
        write(&memory, 15..16, 900);
        let (tail, data) = memory.write(|writer| writer.tail(0));
        let page = memory.write(|writer| writer.page(0, tail));
        let ring = word_at(&memory, BASE + 0x300);
        let other = match is_reader {
            true => word_at(&memory, ring + 88),
            false => word_at(&memory, page) & !3,
        };
        let written = word_at(&memory, page + 16);
        memory.write(|writer| {
            writer.put(page + 16, written + (1 << 20));
            writer.put(other + 16, written);
            writer.put(other + 48, data);
        });
        let batch = follower.poll(&memory, ALL);
        assert!(!batch.chunks.is_empty(), "{is_reader}: {batch:?}");
    }
}

/// The guest has changed the clock, has written more events than before, and has consumed those of
/// the page that the follower waits at.
#[test]
fn a_clock_that_goes_back_while_an_event_is_awaited_is_noticed() {
    let memory = Memory::new(Version::V6_12, 1, 4);
    let late = |number| {
        memory.write(|writer| writer.event(0, 1_000_000 + number, &payload(number, 900)));
    };
    (0..4).for_each(late);
    let mut follower = rings(&memory, Start::Oldest);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [0, 1, 2, 3]);
    // The event of the next page is being written.
    late(4);
    let ring = word_at(&memory, BASE + 0x300);
    let (_, data) = memory.write(|writer| writer.tail(0));
    memory.write(|writer| {
        writer.put(data + 8, 0);
        writer.put(ring + 128, 1);
    });
    assert_eq!(follower.poll(&memory, ALL), Batch::default());
    memory.write(|writer| writer.empty(0));
    write(&memory, 0..14, 900);
    memory.write(|writer| (0..5).for_each(|_| _ = writer.consume(0)));
    assert!(follower.poll(&memory, ALL).restarted);
    write(&memory, 14..15, 900);
    assert_eq!(numbers(&follower.poll(&memory, ALL)), [14]);
}
