// SPDX-License-Identifier: Apache-2.0
//! Reads the trace events of a stock kernel from QEMU's memory, and compares them with the guest's
//! own `trace` and `format` files, event by event. The guest has two vCPUs.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use patchbay_attach::PauseWay;
use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::trace::{Batch, Event, Rings, Source, Start};
use patchbay_proto::v1::trace_field::Value;
use patchbay_service::keys::Keys;
use patchbay_service::keys::registry::Look;
use patchbay_service::testing::registry;
use patchbay_service::trace::TracepointKeys;
use patchbay_service::trace::decode::{Format, Page, Record};

use super::log::Counted;
use super::stock::{Boot, wait_for};
use super::{Accelerator, Memory, PATIENCE};

/// Records events from the boot on, at the top level and in an instance. Prints the events, and the
/// formats of some of them.
const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t sysfs s /sys
mkdir /proc /t
mount -t proc p /proc
mount -t tracefs t /t
mkdir /t/instances/foo
echo 1 > /t/instances/foo/events/sched/sched_process_exit/enable
echo READY
n=0
while [ $n -lt 60 ]; do
    usleep 20000
    echo alive
    n=$((n + 1))
done
echo 0 > /t/instances/foo/tracing_on
echo 0 > /t/instances/map/tracing_on
echo 0 > /t/tracing_on
cat /t/trace > /trace
cat /t/instances/foo/trace > /foo
cat /t/instances/map/trace > /map
echo BEGIN OF TRACE
cat /trace
echo BEGIN OF FOO
cat /foo
echo BEGIN OF MAP
cat /map
echo BEGIN OF FORMATS
cd /t/events
cat block/*/format ftrace/*/format sched/*/format syscalls/*/format
echo END OF TRACE
while :; do
    usleep 100000
done
";
/// Since 6.12, the rings of the instance `map` are in reserved memory.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet trace_buf_size=2M trace_event=sched:sched_switch,sched:sched_wakeup,sched:sched_process_exec,sched:sched_process_fork reserve_mem=2M:4096:map trace_instance=map@map,sched:sched_process_wait";
const ALL: usize = 64 << 20;
/// Fields that the kernel prints as `NAME=VALUE`, with the value that a record has.
const PRINTED: &[&str] = &[
    "child_comm",
    "child_pid",
    "filename",
    "next_comm",
    "next_pid",
    "next_prio",
    "old_pid",
    "prev_comm",
    "prev_pid",
    "prev_prio",
];

/// An event that was read.
#[derive(Clone, Debug, PartialEq)]
struct Read {
    cpu: u32,
    time: u64,
    pid: i32,
    name: String,
    fields: Vec<(String, Value)>,
}

/// Compares the events that were followed while the guest recorded them, the events that were found
/// afterwards, and the formats of all events.
pub fn trace(accelerator: Accelerator) {
    let Some(boot) = Boot::with(INIT, &[], Vec::new()) else {
        return;
    };
    let append = ["-append", COMMAND_LINE];
    let Some(qemu) = boot.start(accelerator, Memory::SharedMemfd, &append) else {
        return;
    };
    boot.boots();
    let (guest, keys) = qemu.keys(PauseWay::Qmp);
    let log = registry(&keys).find_log(Look::Known).expect("found").log;
    let memory = KernelMemory::new(guest.ram(), log.page_table);
    let source = log.trace.expect("described");
    let instances = source.instances(&memory).expect("a list");
    let has_map = instances.contains(&"map".to_owned());
    let expected = if has_map { 3 } else { 2 };
    assert_eq!(instances.len(), expected, "{instances:?}");
    let find = |name: &str| source.instance(&memory, name).expect("listed");
    let mut formats = Formats::new(&memory, &source);

    let mut follower = Rings::new(source.clone(), find(""), Start::Oldest);
    let (mut followed, mut polls, mut longest) = (vec![], 0, Duration::ZERO);
    let end = Instant::now() + PATIENCE;
    let console = || fs::read_to_string(&boot.console).unwrap_or_default();
    while !console().contains("BEGIN OF TRACE") {
        let began = Instant::now();
        let batch = follower.poll(&memory, ALL);
        longest = longest.max(began.elapsed());
        followed.extend(formats.decode(&memory, &source, &batch));
        polls += 1;
        assert!(Instant::now() < end, "the guest does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    followed.extend(formats.decode(&memory, &source, &follower.poll(&memory, ALL)));
    println!(
        "{} events followed in {polls} polls, at most {longest:?}",
        followed.len()
    );
    let mut read = |name| {
        let batch = Rings::new(source.clone(), find(name), Start::Oldest).poll(&memory, ALL);
        formats.decode(&memory, &source, &batch)
    };
    let (whole, instance) = (read(""), read("foo"));
    Counted::print("a poll of the rings of 2 CPUs", &memory, |view| {
        assert!(follower.poll(view, ALL).chunks.is_empty());
    });
    let map = has_map.then(|| read("map"));
    assert_eq!(
        by_cpu(&whole),
        by_cpu(&followed),
        "read at once and bit by bit"
    );
    wait_for(&boot.console, "END OF TRACE", 1);
    probes(&keys, has_map);
    let text = console().replace('\r', "");
    let release = keys.describe().release;
    let part = |begin: &str, end: &str| {
        let (_, rest) = text.split_once(begin).expect("printed");
        rest.split_once(end).expect("printed").0.to_owned()
    };
    compare(
        &release,
        "top level",
        &part("BEGIN OF TRACE\n", "BEGIN OF FOO"),
        &whole,
        300,
    );
    compare(
        &release,
        "an instance",
        &part("BEGIN OF FOO\n", "BEGIN OF MAP"),
        &instance,
        20,
    );
    match map {
        Some(map) => compare(
            &release,
            "a boot-mapped instance",
            &part("BEGIN OF MAP\n", "BEGIN OF FORMATS"),
            &map,
            20,
        ),
        None => println!("SKIPPED: the kernel has no boot-mapped instance"),
    }
    compare_formats(
        &release,
        &part("BEGIN OF FORMATS\n", "END OF TRACE"),
        &memory,
        &source,
    );
}

/// Compares the probes of the tracepoints with the events that the guest has enabled.
fn probes(keys: &Keys, has_map: bool) {
    let began = Instant::now();
    let facts = TracepointKeys::tracepoints(keys).expect("found");
    println!("{} tracepoints in {:?}", facts.len(), began.elapsed());
    let found = keys.describe().discovery.expect("discovered");
    println!("{:?}", found.functions);
    let began = Instant::now();
    let events = TracepointKeys::events(keys);
    println!("{} events in {:?}", events.len(), began.elapsed());
    assert!(events.contains(&"sched:sched_switch".to_owned()));
    let armed = facts.iter().filter(|facts| facts.probes != Some(0));
    let armed: BTreeMap<&str, Vec<&str>> = armed
        .map(|facts| {
            let mut functions: Vec<_> = facts.functions.iter().map(String::as_str).collect();
            functions.sort_unstable();
            (&*facts.key, functions)
        })
        .collect();
    let by_event = |class| format!("trace_event_raw_event_{class}");
    let (switch, wakeup) = (by_event("sched_switch"), by_event("sched_wakeup_template"));
    let (exec, fork) = (
        by_event("sched_process_exec"),
        by_event("sched_process_fork"),
    );
    let exit = by_event("sched_process_template");
    let (names, wakes) = ("probe_sched_switch", "probe_sched_wakeup");
    let mut expected = BTreeMap::from([
        ("sched_process_exec", vec![&*exec]),
        ("sched_process_exit", vec![&*exit]),
        ("sched_process_fork", vec![&*fork]),
        ("sched_switch", vec![names, &switch]),
        ("sched_wakeup", vec![wakes, &wakeup]),
        ("sched_wakeup_new", vec![wakes]),
    ]);
    let wait = by_event("sched_process_wait");
    if has_map {
        expected.insert("sched_process_wait", vec![&wait]);
    }
    assert_eq!(armed, expected);
}

/// Formats by the id of the event.
struct Formats {
    events: HashMap<u16, Event>,
    formats: HashMap<u16, Format>,
}

impl Formats {
    fn new(memory: &KernelMemory, source: &Source) -> Self {
        let events = Event::all(memory, source).expect("a list");
        Self {
            events: events.into_iter().map(|event| (event.id, event)).collect(),
            formats: HashMap::new(),
        }
    }

    fn decode(&mut self, memory: &KernelMemory, source: &Source, batch: &Batch) -> Vec<Read> {
        assert_eq!((batch.lost, batch.torn, batch.damaged), (0, 0, 0));
        assert!(!batch.restarted && !batch.unreadable);
        let mut all = vec![];
        for chunk in &batch.chunks {
            for event in Page::parse(&chunk.page).expect("a page").events() {
                let (time, payload) = event.expect("an event");
                let record = Record::parse(payload).expect("a record");
                let event = &self.events[&record.id];
                let format = self.formats.entry(record.id).or_insert_with(|| {
                    let text = event.format(memory, source).expect("readable");
                    Format::parse(&text).expect("a format")
                });
                let values = record.values(format).into_iter();
                let name = |number: u8| format.fields[usize::from(number)].name.to_string();
                all.push(Read {
                    cpu: chunk.cpu,
                    time,
                    pid: record.pid,
                    name: event.name.clone(),
                    fields: values
                        .map(|(number, value)| (name(number), value))
                        .collect(),
                });
            }
        }
        all
    }
}

fn by_cpu(all: &[Read]) -> BTreeMap<u32, Vec<&Read>> {
    let mut by_cpu: BTreeMap<u32, Vec<&Read>> = BTreeMap::new();
    for read in all {
        by_cpu.entry(read.cpu).or_default().push(read);
    }
    by_cpu
}

/// Compares the lines of a `trace` file with the events, in the order of each CPU. Prints a row for
/// the table in `docs/measurement-runs.md`.
fn compare(release: &str, what: &str, text: &str, read: &[Read], least: usize) {
    let lines = text
        .lines()
        .filter(|line| line.contains(": ") && !line.starts_with('#'));
    let mut expected = by_cpu(read).into_iter().collect::<BTreeMap<_, _>>();
    expected.values_mut().for_each(|events| events.reverse());
    let mut count = 0;
    for line in lines {
        // "   <idle>-0   [001] d.s2.  1.234567: sched_wakeup: comm=..."
        let (task, rest) = line.split_once(" [").expect(line);
        let (cpu, rest) = rest.split_once(']').expect(line);
        let cpu: u32 = cpu.parse().expect(line);
        let read = expected.get_mut(&cpu).and_then(Vec::pop);
        let read = read.unwrap_or_else(|| panic!("{what}: no event for {line:?}"));
        let pid = task.rsplit_once('-').expect(line).1.trim();
        assert_eq!(pid, read.pid.to_string(), "{what}: {line}");
        let micros = (read.time + 500) / 1000;
        let stamp = format!(
            " {}.{:06}: {}: ",
            micros / 1_000_000,
            micros % 1_000_000,
            read.name
        );
        let (_, printed) = rest
            .split_once(&stamp)
            .unwrap_or_else(|| panic!("{what}: {line} {read:?}"));
        for (name, value) in &read.fields {
            let value = match value {
                Value::Signed(value) => value.to_string(),
                Value::Unsigned(value) => value.to_string(),
                Value::Text(text) => text.clone(),
                _ => continue,
            };
            let assignment = format!("{name}={value}");
            let is_there = format!("{printed} ").contains(&format!("{assignment} "));
            assert!(
                is_there || !PRINTED.contains(&&**name),
                "{what}: {assignment} {line}"
            );
        }
        count += 1;
    }
    assert!(expected.values().all(Vec::is_empty), "{what}: {expected:?}");
    assert!(count >= least, "{what}: {count} events");
    println!("| {release} | QEMU | {what} | `trace` | {count} | 0 |");
}

/// Compares the texts of `format` files. Each begins with the name and the id of its event.
fn compare_formats(release: &str, text: &str, memory: &KernelMemory, source: &Source) {
    let events = Event::all(memory, source).expect("a list");
    let began = Instant::now();
    let mut expected: Vec<String> = vec![];
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let is_first =
            line.starts_with("name: ") && lines.peek().is_some_and(|next| next.starts_with("ID: "));
        if is_first {
            expected.push(String::new());
        }
        let format = expected.last_mut().expect("a name");
        format.push_str(line);
        format.push('\n');
    }
    for expected in &expected {
        let id = expected
            .lines()
            .nth(1)
            .and_then(|line| line.strip_prefix("ID: "));
        let id: u16 = id.and_then(|id| id.parse().ok()).expect(expected);
        let event = events.iter().find(|event| event.id == id).expect(expected);
        assert_eq!(event.format(memory, source).as_ref(), Some(expected));
    }
    assert!(expected.len() > 500, "{} formats", expected.len());
    let count = expected.len();
    println!("the formats were compared in {:?}", began.elapsed());
    println!("| {release} | QEMU | formats of events | tracefs | {count} | 0 |");
}
