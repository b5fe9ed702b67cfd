// SPDX-License-Identifier: Apache-2.0
//! The target of the rings of trace events. The input determines what a guest writes to its rings,
//! what its own readers take from them, and how it damages the structures of its tracing.

use std::cell::Cell;
use std::rc::Rc;

use patchbay_observe::testing::Version as Kernel;
use patchbay_observe::testing::rings::{ARRAY, BASE, Rings as Memory, Version, Writer};
use patchbay_observe::trace::{Batch, Event, Page, Rings, Source, Start};
use patchbay_observe::{Bounded, KernelView, state, tasks};

/// The maximum number of reads of one poll, and the maximum number of bytes in them, in addition to
/// 8 bytes for each byte that is wanted. These are the promises of `trace::Rings::poll`.
const MAX_READS: usize = 1 << 16;
const MAX_BYTES: usize = 4 << 20;
/// The limits of the service for lists and formats.
const LIST_READS: usize = 1 << 16;
const LIST_BYTES: usize = 16 << 20;
/// The maximum number of reads for the instances that have enabled an event.
const USER_READS: usize = 1 << 18;
/// The maximum number of reads for the tasks of all CPUs.
const TASK_READS: usize = 1 << 16;
/// The maximum number of reads of a list of instances, which needs no other limit.
const INSTANCE_READS: usize = 1025 * 6 + 1;

/// The first byte chooses the kind of the memory, the version and the start. Either the other bytes
/// are the memory, again and again. Or each four of them are a step of a guest or of a reader.
pub fn rings(data: &[u8]) {
    let Some((&choice, rest)) = data.split_first() else {
        return;
    };
    let version = [Version::V5_10, Version::V6_12, Version::V7_3][usize::from(choice & 3) % 3];
    let start = match choice >> 2 & 1 {
        0 => Start::Oldest,
        _ => Start::End,
    };
    let pages = 3 + usize::from(choice >> 3 & 3);
    let memory = Memory::new(version, 2, pages);
    match choice >> 7 {
        0 => Guest::new(&memory, start).run(rest),
        _ => arbitrary(rest, &memory.source(), start),
    }
}

/// Reads a memory that consists of the input. All pointers lead to it.
fn arbitrary(data: &[u8], source: &Source, start: Start) {
    let memory = Repeated(data);
    let mut follower = Rings::new(source.clone(), ARRAY, start);
    for limit in [1, 1 << 12, 1 << 16] {
        poll(&memory, &mut follower, limit);
    }
    lists(&memory, source);
    keep_time(&memory, BASE);
    if let Ok(page) = Page::parse(data) {
        assert!(page.events().count() <= data.len() / 4 + 1);
    }
}

/// A memory that consists of the same bytes again and again.
struct Repeated<'a>(&'a [u8]);

impl KernelView for Repeated<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let start = (address % self.0.len() as u64) as usize;
        let (head, tail) = self.0.split_at(start);
        for (byte, from) in bytes.iter_mut().zip(tail.iter().chain(head).cycle()) {
            *byte = *from;
        }
        true
    }
}

/// A view that counts the reads and their bytes.
struct Counted<'a, V> {
    view: &'a V,
    reads: Cell<usize>,
    bytes: Cell<usize>,
}

impl<'a, V: KernelView> Counted<'a, V> {
    fn new(view: &'a V) -> Self {
        let (reads, bytes) = Default::default();
        Self { view, reads, bytes }
    }
}

impl<V: KernelView> KernelView for Counted<'_, V> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + bytes.len());
        self.view.read(address, bytes)
    }
}

/// A guest with two CPUs, and a reader of its rings.
struct Guest<'a> {
    memory: &'a Memory,
    source: Source,
    start: Start,
    follower: Rings,
    length: usize,
    /// Time of the last event of both rings.
    time: Rc<Cell<u64>>,
    /// The guest has changed memory otherwise than a kernel does.
    is_hostile: bool,
    /// The sums over all batches. The numbers of a hostile guest can be too large for them.
    lost: u64,
    lost_before: u64,
}

impl<'a> Guest<'a> {
    fn new(memory: &'a Memory, start: Start) -> Self {
        let source = memory.source();
        Self {
            memory,
            start,
            follower: Rings::new(source.clone(), ARRAY, start),
            source,
            length: memory.write(|writer| writer.memory().len()),
            time: Rc::default(),
            is_hostile: false,
            lost: 0,
            lost_before: 0,
        }
    }

    fn run(mut self, steps: &[u8]) {
        for step in steps.chunks_exact(4) {
            let offset = u16::from_le_bytes([step[1], step[2]]);
            self.step(step[0], offset, step[3]);
        }
        self.poll(1 << 20);
        self.memory.rest();
        self.poll(1 << 20);
        lists(self.memory, &self.source);
    }

    fn step(&mut self, kind: u8, offset: u16, byte: u8) {
        let at = usize::from(offset);
        let address = BASE + (at % self.length) as u64;
        let aligned = BASE + (at & !7) as u64;
        let cpu = usize::from(byte & 1);
        self.is_hostile |= (2..=4).contains(&(kind % 11));
        match kind % 11 {
            0 => self.write(cpu, offset, usize::from(byte >> 1)),
            1 => self.memory.write(|writer| take(writer, cpu, byte >> 1)),
            2 => self
                .memory
                .write(|writer| writer.put_bytes(address, &[byte])),
            3 => self.memory.write(|writer| writer.put(aligned, wild(byte))),
            4 => {
                let when = u64::from(byte);
                self.memory.before_read(move |number, writer| {
                    if number == when {
                        writer.put_bytes(address, &[!byte]);
                        writer.run(usize::MAX);
                    }
                });
            }
            5 => self.race(offset, byte),
            6 => self.poll(1 << (byte & 31).min(20)),
            7 => _ = self.follower.begin(self.memory),
            8 => lists(self.memory, &self.source),
            9 => keep_time(self.memory, address),
            _ => self.follower = Rings::new(self.source.clone(), ARRAY, self.start),
        }
    }

    /// Writes events.
    fn write(&mut self, cpu: usize, offset: u16, count: usize) {
        for _ in 0..count % 24 {
            let time = self.time.get() + (u64::from(offset >> 10) << (offset & 31));
            self.time.set(time);
            let payload = vec![7; 4 + usize::from(offset % 1200)];
            self.memory
                .write(|writer| writer.event(cpu, time, &payload));
        }
    }

    /// Carries out some stores of a writer, or of a reader in the guest, before each read.
    fn race(&mut self, offset: u16, byte: u8) {
        let (stores, cpu) = (usize::from(byte >> 1), usize::from(byte & 1));
        let time = Rc::clone(&self.time);
        self.memory.before_read(move |number, writer| {
            if writer.pending() < stores && number < 1 << 12 {
                match offset & 7 {
                    0 => take(writer, cpu, (number & 15) as u8),
                    _ => {
                        time.set(time.get() + 1);
                        writer.event(cpu, time.get(), &vec![7; 4 + usize::from(offset % 1200)]);
                    }
                }
            }
            writer.run(stores);
        });
    }

    fn poll(&mut self, limit: usize) {
        let (batch, lost_before) = poll(self.memory, &mut self.follower, limit);
        assert!(self.is_hostile || batch.damaged == 0, "{batch:?}");
        self.lost = self.lost.saturating_add(batch.lost);
        self.lost_before = self.lost_before.saturating_add(lost_before);
        assert!(self.lost_before <= self.lost, "each loss is reported once");
    }
}

/// Lets a reader in the guest act.
fn take(writer: &mut Writer, cpu: usize, how: u8) {
    match how % 8 {
        0 => writer.take_data(cpu),
        1 => writer.put_ring(cpu, 1 - cpu),
        2 => writer.put_ring(cpu, cpu),
        3 => _ = writer.consume_mapped(cpu),
        _ => _ = writer.consume(cpu),
    }
}

/// Returns a word that may lead somewhere.
fn wild(byte: u8) -> u64 {
    match byte {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << 63,
        3..64 => 1 << byte,
        // The structures of the pages.
        64..128 => BASE + 0x1000 + u64::from(byte - 64) * 64,
        128..192 => BASE + u64::from(byte - 128) * 512,
        // The events and their fields.
        _ => BASE + 0x6000 + u64::from(byte - 192) * 48,
    }
}

/// Polls, and checks the guarantees of a batch. Returns the batch, and the number of lost events
/// that its chunks report.
fn poll(memory: &impl KernelView, follower: &mut Rings, limit: usize) -> (Batch, u64) {
    let view = Counted::new(memory);
    let batch = follower.poll(&view, limit);
    let (reads, bytes) = (view.reads.get(), view.bytes.get());
    assert!(reads <= MAX_READS, "{reads} reads");
    assert!(bytes <= 8 * limit + MAX_BYTES, "{bytes} bytes for {limit}");
    let mut lost_before = 0_u64;
    for chunk in &batch.chunks {
        let page = Page::parse(&chunk.page).expect("a header");
        assert_eq!(page.missed(), 0);
        let mut count = 0;
        for event in page.events() {
            event.expect("whole");
            count += 1;
        }
        assert_eq!(count, chunk.events);
        assert!(count > 0);
        lost_before = lost_before.saturating_add(chunk.lost_before);
    }
    (batch, lost_before)
}

/// Reads the lists of instances and of events, and the formats of some events.
fn lists(memory: &impl KernelView, source: &Source) {
    let view = Counted::new(memory);
    let names = source.instances(&view).unwrap_or_default();
    let reads = view.reads.get();
    assert!(reads <= INSTANCE_READS, "{reads} reads");
    for name in names.iter().take(4) {
        assert!(name.bytes().all(|byte| matches!(byte, b' '..=b'~')));
        if let Some(address) = source.instance(memory, name) {
            source.is_instance(memory, address, name);
        }
    }
    let view = Bounded::new(memory, LIST_READS, LIST_BYTES);
    for event in Event::all(&view, source).unwrap_or_default() {
        let is_graphic = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        assert!(is_graphic(&event.name) && is_graphic(&event.system));
        let Some(format) = event.format(&view, source) else {
            continue;
        };
        let is_text = |byte| matches!(byte, b' '..=b'~' | b'\t' | b'\n');
        assert!(format.bytes().all(is_text), "{format:?}");
        assert!(format.len() < 1 << 18, "{} bytes", format.len());
    }
    let view = Counted::new(memory);
    let enabled = source.enabled(&view).unwrap_or_default();
    assert!(view.reads.get() <= USER_READS, "{} reads", view.reads.get());
    let names = || enabled.values().flatten();
    assert!(names().all(|name| name.bytes().all(|byte| matches!(byte, b' '..=b'~'))));
    let bytes = names().map(String::len).sum::<usize>();
    assert!(bytes <= 1 << 20, "{bytes} bytes");
    let view = Counted::new(memory);
    let counters = Rings::new(source.clone(), ARRAY, Start::Oldest).counters(&view);
    assert!(counters.is_none_or(|all| all.iter().all(|cpu| cpu.held() <= cpu.written)));
    assert!(view.reads.get() <= 4 + 8192, "{} reads", view.reads.get());
}

/// Reads the words of the kernel's state, and its tasks, as if they were at an address.
fn keep_time(memory: &impl KernelView, address: u64) {
    let words = [address, address.wrapping_add(8)];
    let source = state::Source {
        taints: Some(address),
        load: Some(address),
        reports: Some(words),
        pressure: Some(words),
        panic: Some(address),
        uptime: Some(words),
    };
    let view = Counted::new(memory);
    let state = source.read(&view);
    assert!(view.reads.get() <= 32, "{} reads", view.reads.get());
    const MILLENNIUM: u64 = 1000 * 366 * 86_400;
    assert!(state.uptime.is_none_or(|uptime| uptime <= MILLENNIUM));
    let tasks = tasks::Source {
        cpus: address,
        online: address,
        offsets: address,
        current: address,
        layout: tasks::Layout::read(&Kernel::V6_12).expect("it is whole"),
    };
    let view = Counted::new(memory);
    let running = tasks.read(&view).unwrap_or_default();
    assert!(view.reads.get() <= TASK_READS, "{} reads", view.reads.get());
    assert!(
        running
            .iter()
            .all(|task| task.cpu < 8192 && task.name.len() <= 16)
    );
}
