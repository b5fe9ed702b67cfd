// SPDX-License-Identifier: Apache-2.0
//! Reads the log of a stock kernel from QEMU's memory, and compares it with the guest's own
//! /dev/kmsg, record by record. Then the kernel panics.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_attach::PauseWay;
use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::KernelView;
use patchbay_observe::log::{Batch, Follower, Record, Start, Terms};
use patchbay_service::keys::Keys;
use patchbay_service::keys::debug::DebugQueries;
use patchbay_service::keys::registry::Look;
use patchbay_service::keys::{Target, UpdateRequest};
use patchbay_service::testing::registry;
use static_keys::Op;

use super::stock::{Boot, DEBUG, wait_for};
use super::{Accelerator, Memory, PATIENCE, keys_of};

/// Prints the guest's own view of its log, passes lines of pr_debug() for 20 seconds with a silent
/// console, and panics. In these 20 seconds the host follows the log. A reader of /dev/kmsg waits
/// at the end of the log, so it is killed.
const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t sysfs s /sys
/bin/busybox mkdir /proc
/bin/busybox mount -t proc p /proc
/bin/busybox mknod /dev/kmsg c 1 11
echo N > /sys/module/printk/parameters/ignore_loglevel
echo 1 > /proc/sys/kernel/printk
echo 0 > /proc/sys/kernel/panic
/bin/busybox timeout 5 /bin/busybox cat /dev/kmsg > /kmsg
echo BEGIN OF LOG
/bin/busybox cat /kmsg
echo END OF LOG
echo READY
n=0
while [ $n -lt 200 ]; do
    /bin/busybox usleep 100000
    echo change > /sys/class/mem/null/uevent
    echo alive
    n=$((n + 1))
done
echo c > /proc/sysrq-trigger
";
const END_OF_PANIC: &str = "end Kernel panic - not syncing";
/// The number of polls of which the shortest is reported.
const POLLS: usize = 100;
const ALL: Terms = Terms {
    records: usize::MAX,
    bytes: usize::MAX,
    unfinished: false,
};

/// A record of /dev/kmsg, with the names of its fields in Documentation/ABI/testing/dev-kmsg.
#[derive(Debug, PartialEq)]
struct Kmsg {
    priority: u64,
    sequence: u64,
    micros: u64,
    continues: bool,
    text: String,
    /// SUBSYSTEM= and DEVICE=.
    device: [String; 2],
}

/// Compares the log with the guest's own view of it. Follows the log while lines are turned on, and
/// after a panic.
pub fn log(accelerator: Accelerator) {
    let Some(boot) = Boot::with(INIT, &[], Vec::new()) else {
        return;
    };
    let Some(qemu) = boot.start(accelerator, Memory::SharedMemfd, &[]) else {
        return;
    };
    boot.boots();
    let (guest, keys) = qemu.keys(PauseWay::Qmp);
    let mut reader = Reader::begin(&guest, &keys);
    let mut read = reader.poll();
    compare(&own(&boot.console), &read);

    turn_on(&keys);
    // Without KVM, changed code may run only later.
    if accelerator == Accelerator::Kvm {
        reader.until(&mut read, Boot::PRINTED);
        let console = fs::read_to_string(&boot.console).unwrap_or_default();
        let shown = console.split("END OF LOG").last().unwrap_or_default();
        assert!(!shown.contains(Boot::PRINTED), "the console is silent");
    }
    reader.until(&mut read, END_OF_PANIC);
    wait_for(&boot.console, END_OF_PANIC, 1);

    // A second service reads the same log, although the guest has panicked.
    let mut second = Reader::begin(&guest, &keys_of(&guest));
    let again = second.poll();
    assert_eq!(again, read, "read at once and bit by bit");
    let numbers = read.windows(2).all(|pair| pair[0].seq + 1 == pair[1].seq);
    assert!(numbers, "none is missing");
    println!("{accelerator:?}: {} records with the panic's", again.len());
    Counted::print("a poll of the log", &second.memory, |view| {
        assert!(second.follower.poll(view, ALL).records.is_empty());
    });
}

/// A view that counts.
pub struct Counted<'a> {
    view: &'a KernelMemory,
    reads: Cell<u64>,
    bytes: Cell<usize>,
}

impl Counted<'_> {
    /// Calls `poll`, which finds nothing new, with a view of the memory. Prints the number of reads
    /// and bytes, and the shortest time of several polls.
    pub fn print(what: &str, view: &KernelMemory, mut poll: impl FnMut(&Counted<'_>)) {
        let counted = Counted {
            view,
            reads: Cell::default(),
            bytes: Cell::default(),
        };
        poll(&counted);
        let (reads, bytes) = (counted.reads.get(), counted.bytes.get());
        let times = (0..POLLS).map(|_| {
            let began = Instant::now();
            poll(&counted);
            began.elapsed()
        });
        let time = times.min().expect("several polls");
        println!("{what} that finds nothing: {bytes} bytes in {reads} reads, {time:?}");
    }
}

impl KernelView for Counted<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.bytes.set(self.bytes.get() + bytes.len());
        KernelView::read(self.view, address, bytes)
    }
}

struct Reader {
    memory: KernelMemory,
    follower: Follower,
}

impl Reader {
    fn begin(guest: &Arc<patchbay_attach::guest::QemuGuest>, keys: &Keys) -> Self {
        let began = Instant::now();
        let found = registry(keys).find_log(Look::Known).expect("found");
        println!("the log was found in {:?}", began.elapsed());
        Self {
            memory: KernelMemory::new(guest.ram(), found.log.page_table),
            follower: Follower::new(found.log.source, Start::Oldest),
        }
    }

    fn poll(&mut self) -> Vec<Record> {
        let began = Instant::now();
        let batch = self.follower.poll(&self.memory, ALL);
        let Batch { lost, .. } = batch;
        assert!(
            lost == 0 && !batch.restarted && !batch.unreadable,
            "{batch:?}"
        );
        if batch.records.len() > 100 {
            println!("{} records in {:?}", batch.records.len(), began.elapsed());
        }
        batch.records
    }

    /// Follows until a record contains the text.
    fn until(&mut self, read: &mut Vec<Record>, text: &str) {
        let end = Instant::now() + PATIENCE;
        let has = |record: &Record| {
            let found = String::from_utf8_lossy(record.text.as_deref().unwrap_or_default());
            found.contains(text)
        };
        loop {
            let records = self.poll();
            let found = records.iter().any(has);
            read.extend(records);
            if found {
                return;
            }
            assert!(Instant::now() < end, "no {text:?}; last {:?}", read.last());
            // No event reports a change of the guest's memory, so this polls.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn turn_on(keys: &Keys) {
    let queries = DebugQueries::parse(&[DEBUG.to_owned()]).expect("well-formed");
    let update = patchbay_service::keys::KeyUpdate {
        keys: Target::Debug(queries),
        op: Op::Enable,
    };
    let end = Instant::now() + PATIENCE;
    let request = UpdateRequest::new(vec![update], "uid:0".to_owned(), PATIENCE, end);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let outcome = runtime.block_on(keys.update(request)).expect("changed");
    assert!(outcome.summary.sites_patched > 0, "{:?}", outcome.summary);
}

/// Returns the records that the guest has printed.
fn own(console: &Path) -> Vec<Kmsg> {
    let text = fs::read_to_string(console).expect("text").replace('\r', "");
    let begin = text.find("BEGIN OF LOG\n").expect("printed");
    let end = text.find("END OF LOG").expect("printed");
    let mut records: Vec<Kmsg> = vec![];
    for line in text[begin..end].lines().skip(1) {
        let Some(word) = line.strip_prefix(' ') else {
            records.push(kmsg(line).unwrap_or_else(|| panic!("{line:?}")));
            continue;
        };
        let last = records.last_mut().expect("a record");
        for (index, name) in ["SUBSYSTEM=", "DEVICE="].into_iter().enumerate() {
            if let Some(value) = word.strip_prefix(name) {
                value.clone_into(&mut last.device[index]);
            }
        }
    }
    records
}

/// Reads a line such as "6,339,5140900,-;NET: Registered".
fn kmsg(line: &str) -> Option<Kmsg> {
    let (prefix, text) = line.split_once(';')?;
    let mut words = prefix.split(',');
    let mut number = || words.next()?.parse().ok();
    Some(Kmsg {
        priority: number()?,
        sequence: number()?,
        micros: number()?,
        continues: words.next()? == "c",
        text: text.to_owned(),
        device: Default::default(),
    })
}

/// Returns a record as /dev/kmsg shows it, with its escapes.
fn as_kmsg(record: &Record) -> Kmsg {
    let text = record.text.iter().flatten().map(|byte| match byte {
        b'\\' | 0..b' ' | 127.. => format!("\\x{byte:02x}"),
        byte => char::from(*byte).to_string(),
    });
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Kmsg {
        priority: u64::from(record.facility) << 3 | u64::from(record.level),
        sequence: record.seq,
        micros: record.time / 1000,
        continues: record.continues,
        text: text.collect(),
        device: [name(&record.subsystem), name(&record.device)],
    }
}

/// Compares the log as the guest reads it with the log from its memory, record by record. Prints a
/// row for the table in `docs/measurement-runs.md`.
fn compare(own: &[Kmsg], read: &[Record]) {
    assert!(own.len() > 100, "{} records", own.len());
    assert!(read.len() >= own.len(), "{} of {}", read.len(), own.len());
    for (own, read) in own.iter().zip(read) {
        assert_eq!(&as_kmsg(read), own);
    }
    let is_release = |own: &&Kmsg| own.text.starts_with("Linux version ");
    let version = own
        .iter()
        .find(is_release)
        .expect("the kernel's first line");
    let release = version.text.split(' ').nth(2).expect("a release");
    println!("| {release} | QEMU | log | /dev/kmsg | {} | 0 |", own.len());
}
