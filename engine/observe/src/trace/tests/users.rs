// SPDX-License-Identifier: Apache-2.0
//! Tests which instances have enabled an event, and the counters of the rings.

use super::*;

/// The bit of an event that is enabled, and other bits.
const ENABLED: u64 = 1;
const OTHERS: u64 = !1;

fn enabled(memory: &Memory) -> Option<Vec<(String, Vec<String>)>> {
    let enabled = memory.source().enabled(memory)?;
    Some(enabled.into_iter().collect())
}

#[test]
fn each_instance_that_has_enabled_an_event_is_named() {
    for version in VERSIONS {
        let memory = Memory::new(version, 1, 2);
        assert_eq!(enabled(&memory), Some(vec![]), "{version:?}");
        memory.write(|writer| {
            writer.put_files(false, [ENABLED | OTHERS, OTHERS, ENABLED]);
            writer.put_files(true, [ENABLED, 0, 0]);
        });
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        let expected = [
            ("syscalls:sys_enter_test".to_owned(), names(&[""])),
            ("test:numbered".to_owned(), names(&["foo", ""])),
        ];
        assert_eq!(enabled(&memory).as_deref(), Some(&expected[..]));
    }
}

/// A list that loops, one that leads away, and a file of an event that does not exist.
#[test]
fn a_hostile_list_of_files_ends() {
    const FILES: u64 = ARRAY + 24;
    let memory = Memory::new(Version::V6_12, 1, 2);
    memory.write(|writer| writer.put_files(false, [ENABLED; 3]));
    assert_eq!(enabled(&memory).map(|found| found.len()), Some(3));
    let first = crate::word(&memory, FILES).expect("readable");
    memory.write(|writer| writer.put(first + 16, 0xdead_0000));
    assert_eq!(enabled(&memory).map(|found| found.len()), Some(2));
    memory.write(|writer| writer.put(first, first));
    memory.before_read(|_, _| {});
    assert_eq!(enabled(&memory), None);
    assert!(memory.reads() <= 1 << 18, "{}", memory.reads());
    memory.write(|writer| writer.put(first, u64::MAX - 100));
    assert_eq!(enabled(&memory), None);
}

/// Instances whose names are as long as the kernel permits, each of which enables all events.
#[test]
fn names_take_a_bounded_number_of_bytes() {
    for (count, is_found) in [(300, true), (400, false)] {
        let memory = Memory::new(Version::V6_12, 1, 2);
        let name = vec![0x80; 255];
        memory.write(|writer| {
            let (first, step) = writer.put_instances((0..count).map(|_| name.as_slice()));
            writer.put_files(false, [0; 3]);
            for index in 0..count as u64 {
                writer.put_files_of(first + step * index, [ENABLED; 3]);
            }
        });
        let found = enabled(&memory);
        assert_eq!(found.is_some(), is_found, "{count}");
        for (_, names) in found.into_iter().flatten() {
            assert_eq!(names.len(), count);
        }
    }
}

#[test]
fn counters_are_those_of_each_cpu() {
    for version in VERSIONS {
        let memory = Memory::new(version, 2, 2);
        let rings = super::super::Rings::new(memory.source(), ARRAY, Start::Oldest);
        memory.write(|writer| {
            for number in 0..100 {
                writer.event(1, number, &alike(number));
            }
        });
        let counters = rings.counters(&memory).expect("readable");
        let [first, second] = counters[..] else {
            panic!("{counters:?}");
        };
        let empty = Counters {
            bytes: 2 * 4096,
            ..Counters::default()
        };
        assert_eq!((first, first.held()), (empty, 0));
        assert_eq!((second.cpu, second.written, second.consumed), (1, 100, 0));
        // A page holds 6 of these events.
        assert!(second.overwritten >= 100 - 12, "{second:?}");
        assert_eq!(second.held(), 100 - second.overwritten);
        memory.write(|writer| writer.put(BASE + 0x300, 0));
        let counters = rings.counters(&memory).expect("readable");
        assert_eq!(counters, [second], "a CPU that was never online");
        memory.write(|writer| writer.put(BASE + 0x300, u64::MAX - 8));
        assert_eq!(rings.counters(&memory), None);
    }
}

#[test]
fn impossible_counters_do_no_harm() {
    let counters = Counters {
        written: 3,
        overwritten: u64::MAX,
        consumed: u64::MAX,
        ..Counters::default()
    };
    assert_eq!(counters.held(), 0);
}
