// SPDX-License-Identifier: Apache-2.0
//! Reads the files again that are written to a disk of limited size.

use super::super::timeline::tests::Disk;
use super::*;

/// A record's time, the losses before it, and its bytes.
type Written = (u64, u64, Vec<u8>);

impl Read for Disk {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(bytes)
    }
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let bytes = bytes[at..at + size].iter().rev();
    bytes.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

fn place(bytes: &[u8], at: usize) -> usize {
    usize::try_from(number(bytes, at, 8)).expect("small")
}

/// Returns the content of an option.
fn option_of(file: &[u8], wanted: u16) -> &[u8] {
    let mut at = place(file, START.len()) + 16;
    loop {
        let (id, size) = (number(file, at, 2), number(file, at + 2, 4) as usize);
        assert_ne!(id, 0, "no option {wanted}");
        if id == u64::from(wanted) {
            return &file[at + 6..at + 6 + size];
        }
        at += 6 + size;
    }
}

/// Returns the events of each CPU.
fn events(file: &[u8]) -> BTreeMap<u32, Vec<Written>> {
    let buffer = option_of(file, section::BUFFER);
    let count = number(buffer, 19, 4) as usize;
    let of_cpu = |index| {
        let at = 23 + 20 * index;
        let (from, size) = (place(buffer, at + 4), place(buffer, at + 12));
        let pages = file[from..from + size].chunks(PAGE);
        let cpu = u32::try_from(number(buffer, at, 4)).expect("a CPU");
        (cpu, pages.flat_map(events_of).collect())
    };
    (0..count).map(of_cpu).collect()
}

fn events_of(page: &[u8]) -> Vec<Written> {
    let (mut time, commit) = (number(page, 0, 8), number(page, 8, 8));
    let end = PAGE_HEADER + (commit & ((1 << 30) - 1)) as usize;
    let mut lost = match commit >> 30 {
        0 => 0,
        flags => {
            assert_eq!(flags, 3);
            number(page, end, 8)
        }
    };
    let (mut at, mut events) = (PAGE_HEADER, vec![]);
    while at < end {
        let word = number(page, at, 4);
        let (kind, delta) = (word & 31, word >> 5);
        let (from, length) = match kind {
            30 => {
                time += delta + (number(page, at + 4, 4) << 27);
                at += 8;
                continue;
            }
            0 => (at + 8, number(page, at + 4, 4) as usize - 4),
            words @ 1..=28 => (at + 4, words as usize * 4),
            other => panic!("{other}"),
        };
        time += delta;
        events.push((
            time,
            std::mem::take(&mut lost),
            page[from..from + length].to_vec(),
        ));
        at = from + length;
    }
    assert_eq!(at, end);
    events
}

fn format(id: u32, text: &str) -> v1::TraceFormat {
    v1::TraceFormat {
        name: "sched:test".into(),
        id,
        text: text.into(),
    }
}

fn event(cpu: u32, time: u64, lost: u64, record: &[u8]) -> v1::TraceEvent {
    v1::TraceEvent {
        cpu,
        guest_time_ns: time,
        lost_before: lost,
        record: record.to_vec(),
        pid: 7,
        comm: "a\ntask".into(),
        ..Default::default()
    }
}

fn batch(events: Vec<v1::TraceEvent>) -> v1::StreamTracepointEventsResponse {
    v1::StreamTracepointEventsResponse {
        events,
        formats: vec![format(7, "ID: 7\n")],
        ..Default::default()
    }
}

fn begin(room: usize) -> io::Result<TraceDat<Disk>> {
    TraceDat::begin(Disk {
        room,
        ..Disk::default()
    })
}

fn record(length: usize) -> Vec<u8> {
    let mut record: Vec<u8> = (0..length).map(|_| fastrand::u8(..)).collect();
    record[..2].copy_from_slice(&7_u16.to_le_bytes());
    record
}

#[test]
fn the_events_of_each_cpu_are_in_the_file_with_their_times_and_losses() {
    fastrand::seed(25);
    let mut file = begin(usize::MAX).expect("begun");
    assert!(events(file.storage.bytes.get_ref()).is_empty());
    let mut expected: BTreeMap<u32, Vec<Written>> = BTreeMap::new();
    let mut times = [0_u64; 4];
    for _ in 0..300 {
        let mut some = vec![];
        for _ in 0..fastrand::usize(0..9) {
            let cpu = fastrand::u32(0..4);
            let time = &mut times[cpu as usize];
            *time = match fastrand::u8(0..40) {
                0 => 5,
                1 => time.wrapping_add(1 << 60),
                2 => time.wrapping_add(1 << 40),
                3 => time.wrapping_add(1 << 27),
                _ => time.wrapping_add(fastrand::u64(0..1000)),
            };
            let lost = fastrand::u64(0..20).saturating_sub(18);
            let length = match fastrand::u8(0..10) {
                0 => MAX_RECORD,
                1 => 112 + 4 * fastrand::usize(0..2),
                _ => 8 + 4 * fastrand::usize(0..40),
            };
            let record = record(length);
            let own = expected.entry(cpu).or_default();
            some.push(event(cpu, *time, lost, &record));
            own.push((*time, lost, record));
        }
        file.add(batch(some)).expect("added");
    }
    file.finish().expect("finished");
    let count = expected.values().map(Vec::len).sum::<usize>() as u64;
    assert_eq!((file.events(), file.left_out()), (count, 0));
    let found = events(file.storage.bytes.get_ref());
    assert!(found == expected);
    let tasks = place(
        option_of(file.storage.bytes.get_ref(), section::CMDLINES),
        0,
    );
    let tasks = &file.storage.bytes.get_ref()[tasks + 24..];
    assert!(tasks.starts_with("7 a\u{fffd}task\n".as_bytes()));
}

/// An event that the file cannot hold counts as lost before the next one.
#[test]
fn an_event_that_does_not_fit_is_counted() {
    let mut file = begin(usize::MAX).expect("begun");
    let good = record(8);
    file.add(batch(vec![
        event(0, 1, 0, &good),
        event(0, 2, 3, &record(MAX_RECORD + 4)),
        event(0, 3, 0, &good[..6]),
        event(0, 4, 0, &[8, 0, 0, 0, 0, 0, 0, 0]),
        event(0, 5, 0, &good),
    ]))
    .expect("added");
    // Another event has the id now, and then the first one has it again.
    for (text, time) in [("ID: 7\nother", 6), ("ID: 7\n", 7)] {
        let mut next = batch(vec![event(0, time, 0, &good)]);
        next.formats = vec![format(7, text)];
        file.add(next).expect("added");
    }
    file.finish().expect("finished");
    let expected = [(1, 0), (5, 6), (7, 1)].map(|(time, lost)| (time, lost, good.clone()));
    assert_eq!(events(file.storage.bytes.get_ref())[&0], expected);
    assert_eq!((file.events(), file.left_out()), (3, 4));
}

#[test]
fn a_full_disk_keeps_the_first_events_of_each_cpu() {
    let mut longest = 0;
    for room in (0..80_000).step_by(777) {
        let mut file = match begin(room) {
            Ok(file) => file,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                assert!(room < PAGE + 2000, "{room}");
                continue;
            }
        };
        let mut added: BTreeMap<u32, Vec<Written>> = BTreeMap::new();
        let error = (0..).find_map(|number| {
            let (cpu, record) = (number % 3, record(100));
            let own = added.entry(cpu).or_default();
            own.push((number.into(), 0, record.clone()));
            let event = event(cpu, number.into(), 0, &record);
            file.add(batch(vec![event])).err()
        });
        let error = error.expect("the disk is full");
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        match file.finish() {
            Ok(()) => {
                let found = events(file.storage.bytes.get_ref());
                let count = found.values().map(Vec::len).sum::<usize>();
                assert_eq!(count as u64, file.events());
                let is_first = |(cpu, own): (&u32, &Vec<Written>)| added[cpu].starts_with(own);
                assert!(found.iter().all(is_first), "room for {room}");
                longest = longest.max(count);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                assert_eq!(file.events(), 0);
                assert!(room < 4 * PAGE, "{room}");
            }
        }
    }
    assert!(longest > 500, "{longest}");
}

/// Adds events of three CPUs until one cannot be written. Returns its number.
fn fill(file: &mut TraceDat<Disk>) -> u32 {
    let failed = (0..).find(|&number| {
        let event = event(number % 3, number.into(), 0, &record(100));
        file.add(batch(vec![event])).is_err()
    });
    failed.expect("the disk is full")
}

#[test]
fn a_disk_that_was_full_for_a_moment_costs_only_the_events_that_are_counted_as_lost() {
    let mut file = begin(5 * PAGE).expect("room");
    let failed = fill(&mut file);
    file.storage.room = 100 * PAGE;
    for number in failed + 1..failed + 100 {
        let event = event(number % 3, number.into(), 0, &record(100));
        file.add(batch(vec![event])).expect("room");
    }
    file.finish().expect("room");
    let found = events(file.storage.bytes.get_ref());
    let written: usize = found.values().map(Vec::len).sum();
    let lost: u64 = found.values().flatten().map(|(_, lost, _)| lost).sum();
    assert_eq!((written as u32, lost), (failed + 99, 1));
    let after = found[&(failed % 3)].iter().find(|(_, lost, _)| *lost > 0);
    assert_eq!(after.map(|(time, ..)| *time), Some(u64::from(failed) + 3));
}

#[test]
fn a_disk_that_fails_leaves_an_empty_file() {
    let mut file = begin(5 * PAGE).expect("room");
    fill(&mut file);
    file.storage.error = Some(ErrorKind::Other);
    let error = file.finish().expect_err("the disk fails");
    assert_eq!(error.kind(), ErrorKind::Other);
    assert!(file.storage.bytes.get_ref().is_empty());
    assert_eq!(file.events(), 0);
}
