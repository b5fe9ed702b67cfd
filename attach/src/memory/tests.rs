// SPDX-License-Identifier: Apache-2.0
//! Tests the access to memory of this process, which stands for a monitor.

use std::cell::Cell;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use vm_memory::{FileOffset, MmapRegion};

use super::*;
use crate::flat_view::Removal;
use crate::process::READS;
use crate::qmp::QmpError;

const BASE: u64 = 0x10_0000;
const DIMM: u64 = 0x1_0000_0000;
/// The size of the mappings. It is below 2 MiB, because the kernel aligns larger mappings to 2
/// MiB and would not put one into the gap that another has left.
const SIZE: u64 = 1 << 18;

/// A simulated monitor in this process. It has the machine's memory, and behind this a DIMM in
/// the same file.
struct Monitor {
    process: Process,
    file: File,
    map: MmapRegion,
}

impl Monitor {
    fn new() -> Self {
        let file = tempfile::tempfile().expect("room");
        file.set_len(2 * SIZE).expect("room");
        let map = map(&file);
        let process = Process::open(std::process::id()).expect("it runs");
        Self { process, file, map }
    }

    fn host_address(&self, address: u64) -> Result<u64, AttachError> {
        let offset = match address {
            BASE..DIMM => address - BASE,
            _ => address - DIMM + SIZE,
        };
        Ok(self.map.as_ptr() as u64 + offset)
    }

    fn open(&self, access: Access) -> AttachedRam {
        let ranges = vec![range(BASE, SIZE, Removal::Never), dimm()];
        let host_address = |address| self.host_address(address);
        AttachedRam::open(&self.process, ranges, access, later(), host_address).expect("opened")
    }
}

fn map(file: &File) -> MmapRegion {
    map_of(file, 2 * SIZE)
}

fn map_of(file: &File, bytes: u64) -> MmapRegion {
    let file = file.try_clone().expect("a descriptor");
    let size = usize::try_from(bytes).expect("small");
    MmapRegion::from_file(FileOffset::new(file, 0), size).expect("address space")
}

fn range(start: u64, size: u64, removal: Removal) -> RamRange {
    RamRange {
        addresses: start..start + size,
        backend: "ram".to_owned(),
        offset: 0,
        removal,
    }
}

fn dimm() -> RamRange {
    range(DIMM, SIZE, Removal::ByVcpu)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn silent(_: u64) -> Result<u64, AttachError> {
    Err(AttachError::Monitor(QmpError::TimedOut {
        command: "gpa2hva".to_owned(),
        patience: Duration::ZERO,
    }))
}

fn reads(memory: &AttachedRam, piece: Piece) -> bool {
    memory.read_piece(piece, &mut [0; 8])
}

#[test]
fn a_monitor_that_does_not_answer_is_asked_once_in_a_stop() {
    for access in [Access::File, Access::Process] {
        let monitor = Monitor::new();
        let memory = monitor.open(access);
        let host_address = |address| monitor.host_address(address);
        let ranges = || {
            let second = range(DIMM + SIZE / 2, SIZE / 2, Removal::ByVcpu);
            let first = range(DIMM, SIZE / 2, Removal::ByVcpu);
            vec![range(BASE, SIZE, Removal::Never), first, second]
        };
        let changed = memory.update(&monitor.process, ranges(), later(), host_address);
        assert!(changed.expect("taken over"));
        let base = memory.piece(BASE, 8).expect("RAM");
        let pieces = [DIMM, DIMM + SIZE / 2].map(|at| memory.piece(at, 8).expect("RAM"));
        let _ = memory.take_doubt();
        memory.confirm(&monitor.process, later(), |range| host_address(range.start));
        assert!(pieces.iter().all(|piece| reads(&memory, *piece)));
        assert!(!memory.take_doubt());
        let asked = Cell::new(0);
        memory.confirm(&monitor.process, later(), |range| {
            asked.set(asked.get() + 1);
            silent(range.start)
        });
        assert_eq!(asked.get(), 1);
        assert!(!pieces.iter().any(|piece| reads(&memory, *piece)));
        assert!(reads(&memory, base), "nothing removes it");
        assert!(memory.take_doubt());
        // The memory still exists, so an update maps it again.
        let changed = memory.update(&monitor.process, ranges(), later(), host_address);
        assert!(changed.expect("taken over"));
        assert!(memory.read_u64(DIMM).is_some());
        assert!(!pieces.iter().any(|piece| reads(&memory, *piece)));
        assert!(reads(&memory, base), "it has not changed");
    }
}

#[test]
fn the_list_of_mappings_is_read_once_for_all_regions() {
    let monitor = Monitor::new();
    let host_address = |address| monitor.host_address(address);
    READS.set(0);
    let memory = monitor.open(Access::File);
    assert_eq!(READS.get(), 2, "the file is confirmed after it was opened");
    let part = |number| range(DIMM + number * SIZE / 4, SIZE / 4, Removal::ByVcpu);
    let parts = (0..4).map(part).collect();
    READS.set(0);
    let changed = memory.update(&monitor.process, parts, later(), host_address);
    assert!(changed.expect("taken over"));
    assert_eq!(READS.get(), 1);
    READS.set(0);
    memory.confirm(&monitor.process, later(), |range| host_address(range.start));
    assert_eq!(READS.get(), 1);
    assert_eq!(memory.bytes(), SIZE);
    assert!(!memory.take_doubt(), "all of them are there");
}

#[test]
fn nothing_is_confirmed_after_the_deadline() {
    for access in [Access::File, Access::Process] {
        let monitor = Monitor::new();
        let memory = monitor.open(access);
        let piece = memory.piece(DIMM, 8).expect("RAM");
        memory.confirm(&monitor.process, Instant::now(), |_| panic!("it is late"));
        assert!(!reads(&memory, piece));
        assert!(memory.take_doubt());
        let ranges = vec![range(BASE, SIZE, Removal::Never), dimm()];
        let late = memory.update(&monitor.process, ranges, Instant::now(), |address| {
            monitor.host_address(address)
        });
        late.expect_err("it is late");
    }
}

#[test]
fn another_file_at_the_address_is_not_the_region() {
    // Another thread may take the address first, so the test tries this several times.
    assert!((0..20).any(|_| another_file_takes_the_place()));
}

/// Returns false if the kernel has put the other file at another address.
fn another_file_takes_the_place() -> bool {
    let mut monitor = Monitor::new();
    let memory = monitor.open(Access::File);
    let piece = memory.piece(DIMM, 8).expect("RAM");
    let address = monitor.map.as_ptr();
    monitor.file = tempfile::tempfile().expect("room");
    monitor.file.set_len(2 * SIZE).expect("room");
    monitor.map = map(&monitor.file);
    // The kernel fills higher gaps first, so fill these.
    let mut higher = Vec::new();
    while monitor.map.as_ptr() != address {
        if higher.len() == 1000 {
            return false;
        }
        higher.push(std::mem::replace(&mut monitor.map, map(&monitor.file)));
    }
    memory.confirm(&monitor.process, later(), |range| {
        monitor.host_address(range.start)
    });
    assert!(!reads(&memory, piece));
    true
}

#[test]
fn what_cannot_be_taken_over_changes_nothing() {
    let monitor = Monitor::new();
    let memory = monitor.open(Access::File);
    let piece = memory.piece(DIMM, 8).expect("RAM");
    let host_address = |address| monitor.host_address(address);
    let changes = memory.changes();
    let update = |ranges, file: bool| {
        memory.update(&monitor.process, ranges, later(), |address| match file {
            true => host_address(address),
            false => silent(address),
        })
    };
    update(vec![dimm()], false).expect_err("no answer");
    let beyond = update(vec![range(DIMM, 2 * SIZE, Removal::ByVcpu)], true);
    let error = beyond.expect_err("beyond the mapping").to_string();
    assert!(error.contains("has no 524288 bytes at"), "{error}");
    assert!(error.contains("mapped in one run, only 262144"), "{error}");
    let mut grown = Monitor::new();
    grown.file = monitor.file.try_clone().expect("a descriptor");
    grown.file.set_len(4 * SIZE).expect("room");
    grown.map = map_of(&grown.file, 4 * SIZE);
    let more = vec![range(DIMM, 3 * SIZE, Removal::ByVcpu)];
    let beyond = memory.update(&monitor.process, more, later(), |address| {
        grown.host_address(address)
    });
    let error = beyond.expect_err("beyond the known file").to_string();
    let expected = "it needs 786432 bytes from 0x40000, and the file has 524288; attach again";
    assert!(error.contains(expected), "{error}");
    assert_eq!(memory.changes(), changes);
    assert!(reads(&memory, piece));
    let same = vec![range(BASE, SIZE, Removal::Never), dimm()];
    assert!(!update(same, true).expect("nothing new"));
    assert!(update(vec![dimm()], true).expect("less"));
    assert_eq!(memory.changes(), changes + 1);
    assert!(reads(&memory, piece), "it has not changed");
    assert_eq!(memory.read_u64(BASE), None);
}

/// Returns a word of 4 bytes at this offset of the machine's memory.
fn word(memory: &AttachedRam, offset: u64, after: u64) -> Word<Place> {
    let piece = memory.piece(BASE + offset, 4).expect("RAM");
    Word {
        place: piece.into(),
        length: 4,
        mask: 0xffff_ffff,
        before: 0,
        after,
    }
}

/// Returns this thread's number. The thread stands for one that is stopped.
fn thread() -> u32 {
    rustix::thread::gettid()
        .as_raw_nonzero()
        .get()
        .cast_unsigned()
}

#[test]
fn words_are_accessed_at_once_while_a_thread_is_stopped() {
    let monitor = Monitor::new();
    for access in [Access::Process, Access::File] {
        let ram = Arc::new(monitor.open(access));
        let words: Vec<_> = (0..1000)
            .map(|index| word(&ram, 64 * index, index + 1))
            .collect();
        assert_eq!(ram.leading_unchanged(&words), 0, "no thread is stopped");
        assert_eq!(ram.write_leading(&words), Leading::default());
        let stopped = ram.by_stopped_thread(&monitor.process, &[std::process::id()]);
        assert_eq!(ram.leading_unchanged(&words), 0, "it is the first thread");
        drop(stopped);
        let both = [std::process::id(), thread()];
        let stopped = ram.by_stopped_thread(&monitor.process, &both);
        let count = if access == Access::Process { 1000 } else { 0 };
        assert_eq!(ram.leading_unchanged(&words), count);
        let written = ram.write_leading(&words);
        assert_eq!((written.written, written.differs), (count, None));
        assert_eq!(ram.is_dirty(BASE + 64 * 999), count > 0);
        let wrong = ram.leading_unchanged(&words[500..]);
        assert_eq!(wrong, 0, "they have changed");
        drop(stopped);
        assert_eq!(ram.write_leading(&words), Leading::default());
        for word in &words {
            ram.write_piece(word.place.first(), &[0; 4])
                .then_some(())
                .expect("RAM");
        }
    }
}

#[test]
fn a_word_that_reads_back_as_another_is_reported_with_all_that_were_written() {
    let monitor = Monitor::new();
    let ram = monitor.open(Access::Process);
    let _stopped = ram.by_stopped_thread(&monitor.process, &[thread()]);
    // The third word overwrites a part of the second.
    let places = [(0, 1), (64, 2), (66, 3), (128, 4)];
    let words = places.map(|(offset, after)| word(&ram, offset, after));
    let expected = Leading {
        written: 1,
        differs: Some(0x3_0002),
        touched: 4,
    };
    assert_eq!(ram.write_leading(&words), expected);
}

#[test]
fn counts_are_written_after_the_instructions_have_been_read_back() {
    let monitor = Monitor::new();
    let ram = monitor.open(Access::Process);
    let _stopped = ram.by_stopped_thread(&monitor.process, &[thread()]);
    // The second instruction overwrites a part of the first.
    let places = [(0, 5), (4, 5), (64, 4)];
    let words = places.map(|(offset, length)| {
        let piece = ram.piece(BASE + offset, length).expect("RAM");
        let place = piece.into();
        let after = offset + 1;
        Word {
            place,
            length,
            mask: u64::MAX >> (64 - 8 * length),
            before: 0,
            after,
        }
    });
    let written = ram.write_leading(&words);
    assert_eq!((written.written, written.touched), (0, 2));
    assert_eq!(ram.leading_unchanged(&words[2..]), 1, "no count is written");
}

/// A process whose memory is registered with a userfaultfd that nobody serves. Only the first page
/// is there. Prints the address of the memory and the number of its second thread.
const WAITS_FOR_PAGES: &str = "
import ctypes, fcntl, mmap, struct, sys, threading
size = int(sys.argv[1])
fault = ctypes.CDLL(None).syscall(323, 0)
if fault < 0: sys.exit(1)
fcntl.ioctl(fault, 0xc018aa3f, bytearray(struct.pack('3Q', 0xaa, 0, 0)))
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[0] = 0
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(fault, 0xc020aa00, bytearray(struct.pack('4Q', address, size, 1, 0)))
thread = threading.Thread(target=sys.stdin.read)
thread.start()
print(address, thread.native_id, flush=True)
";

#[test]
fn no_call_waits_for_the_holder_of_a_userfaultfd() {
    let mut child = Command::new("python3")
        .args(["-c", WAITS_FOR_PAGES, &SIZE.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python");
    let mut line = String::new();
    let output = child.stdout.take().expect("piped");
    BufReader::new(output).read_line(&mut line).expect("text");
    let mut numbers = line.split_whitespace();
    let mut next = || numbers.next().and_then(|number| number.parse().ok());
    let (Some(address), Some(thread)) = (next(), next()) else {
        eprintln!("SKIPPED: userfaultfd is not allowed");
        return;
    };
    let process = Process::open(child.id()).expect("it runs");
    let ranges = vec![range(BASE, SIZE, Removal::Never)];
    let host_address = |_| Ok(address);
    let ram = AttachedRam::open(&process, ranges, Access::Process, later(), host_address);
    let ram = ram.expect("opened");
    let thread = u32::try_from(thread).expect("a number of a thread");
    let _stopped = ram.by_stopped_thread(&process, &[thread]);
    let words = [word(&ram, 0, 1), word(&ram, SIZE / 2, 2)];
    assert_eq!(ram.leading_unchanged(&words), 0);
    assert_eq!(ram.write_leading(&words), Leading::default());
    assert!(reads(&ram, ram.piece(BASE, 8).expect("RAM")));
    assert!(!reads(&ram, ram.piece(BASE + SIZE / 2, 8).expect("RAM")));
    child.kill().expect("it runs");
    child.wait().expect("a child");
}

#[test]
fn after_a_call_that_fails_each_word_is_accessed_alone() {
    let monitor = Monitor::new();
    let ram = monitor.open(Access::Process);
    let no_thread = i32::MAX.cast_unsigned();
    let _stopped = ram.by_stopped_thread(&monitor.process, &[no_thread]);
    assert_eq!(ram.stopped_thread(), Some(Pid::from_raw(i32::MAX)));
    assert_eq!(ram.write_leading(&[word(&ram, 0, 1)]), Leading::default());
    assert_eq!(ram.stopped_thread(), None);
}

#[test]
fn memory_that_the_monitor_can_reuse_is_not_written_at_once() {
    let monitor = Monitor::new();
    let ranges = vec![range(BASE, SIZE, Removal::ByMonitor)];
    let host_address = |address| monitor.host_address(address);
    let ram = AttachedRam::open(
        &monitor.process,
        ranges,
        Access::Process,
        later(),
        host_address,
    );
    let ram = ram.expect("opened");
    let _stopped = ram.by_stopped_thread(&monitor.process, &[thread()]);
    assert_eq!(ram.write_leading(&[word(&ram, 0, 1)]), Leading::default());
}

#[test]
fn ids_of_regions_are_not_used_twice() {
    let monitor = Monitor::new();
    let memory = monitor.open(Access::File);
    let update = |ranges| {
        memory.update(&monitor.process, ranges, later(), |address| {
            monitor.host_address(address)
        })
    };
    let last = u64::from(u32::MAX) / MAX_RANGES as u64;
    memory.changes.store(last, Ordering::SeqCst);
    let half = || vec![range(BASE, SIZE / 2, Removal::Never)];
    assert!(update(half()).expect("the last one"));
    let error = update(vec![dimm()]).expect_err("no id is left").to_string();
    let expected = "changed 4194304 times, and no more than 4194303 changes are followed; end this process and attach again";
    assert!(error.contains(expected), "{error}");
    assert!(!update(half()).expect("nothing new"));
}

#[test]
fn marks_outlive_another_shape_of_a_region() {
    let monitor = Monitor::new();
    let memory = monitor.open(Access::Process);
    memory.write(BASE + SIZE - 4096, &[1; 4]).expect("RAM");
    let half = range(BASE + SIZE / 2, SIZE / 2, Removal::Never);
    let update = memory.update(&monitor.process, vec![half], later(), |address| {
        monitor.host_address(address)
    });
    assert!(update.expect("taken over"));
    assert!(memory.is_dirty(BASE + SIZE - 4096));
    assert!(!memory.is_dirty(BASE + SIZE - 8192));
    assert!(!memory.is_dirty(BASE));
}

#[test]
fn more_ram_than_a_guest_of_this_host_can_have_is_refused() {
    let monitor = Monitor::new();
    let memory = monitor.open(Access::Process);
    let half = host_memory().saturating_mul(2) / SIZE * SIZE + SIZE;
    let ranges = vec![
        range(0, half, Removal::Never),
        range(half, half, Removal::Never),
    ];
    let host_address = |address| monitor.host_address(address);
    let refused = memory.update(&monitor.process, ranges, later(), host_address);
    let refused = refused.expect_err("too large").to_string();
    assert!(refused.contains("four times"), "{refused}");
}
