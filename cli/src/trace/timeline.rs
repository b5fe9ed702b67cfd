// SPDX-License-Identifier: Apache-2.0
//! Writes timelines in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
//!
//! Each task has a track with its events. sched_switch events add a track for each CPU, with the
//! tasks that ran on it. The file is valid JSON after each batch: the closing text follows every
//! batch, and the next batch overwrites it. When the disk is full, the last valid state is
//! restored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use patchbay_proto::v1;
use serde_json::{Map, Value, json};

use super::view;

const END: &[u8] = b"\n]}\n";
/// Process id of the CPUs' tracks; no task has it (`PID_MAX_LIMIT`, `include/linux/threads.h`, is
/// 2^22).
const CPUS: i64 = 1 << 23;
/// The track of the clients' changes.
const OPERATOR: i64 = CPUS + 1;

/// The file operations that a timeline needs.
pub trait Storage: Write + Seek {
    /// Truncates the file to `length`.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

impl Storage for File {
    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }
}

/// A timeline that is being written.
pub struct Timeline<S> {
    storage: S,
    /// The length without the closing text, in bytes.
    length: u64,
    empty: bool,
    /// The host's time of the first event, in nanoseconds.
    start: Option<i128>,
    tasks: BTreeMap<i32, String>,
    cpus: BTreeSet<u32>,
    /// The task that runs on each CPU, and when it started to run.
    running: BTreeMap<u32, (i128, String)>,
    events: u64,
}

impl<S: Storage> Timeline<S> {
    /// Begins the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn begin(storage: S) -> io::Result<Self> {
        let mut timeline = Self {
            storage,
            length: 0,
            empty: true,
            start: None,
            tasks: BTreeMap::new(),
            cpus: BTreeSet::new(),
            running: BTreeMap::new(),
            events: 0,
        };
        timeline.append(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let names = [
            json!({"ph": "M", "name": "process_name", "pid": CPUS, "args": {"name": "CPUs of the guest"}}),
            json!({"ph": "M", "name": "process_name", "pid": OPERATOR, "args": {"name": "Patchbay"}}),
        ];
        timeline.records(&names)?;
        Ok(timeline)
    }

    /// Returns the number of events written.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// The file cannot be written. It is then restored to its state before the batch.
    pub fn add(&mut self, batch: v1::StreamTracepointEventsResponse) -> io::Result<()> {
        let mut records = vec![];
        for mark in batch.marks {
            let ts = self.timestamp(nanoseconds(mark.time));
            records.push(json!({"ph": "i", "s": "g", "name": mark.text, "ts": ts, "pid": OPERATOR, "tid": 0}));
        }
        if let Some(losses) = batch.losses {
            let name = format!("lost: {}", view::Losses::from(losses).sentence());
            let at = batch.events.first().map_or(0, time_of);
            let ts = self.timestamp(at);
            records.push(
                json!({"ph": "i", "s": "g", "name": name, "ts": ts, "pid": OPERATOR, "tid": 0}),
            );
        }
        let count = batch.events.len() as u64;
        for event in batch.events {
            self.event(event, &mut records);
        }
        self.records(&records)?;
        self.events += count;
        Ok(())
    }

    fn event(&mut self, event: v1::TraceEvent, records: &mut Vec<Value>) {
        let at = time_of(&event);
        let ts = self.timestamp(at);
        if self.tasks.get(&event.pid) != Some(&event.comm) && !event.comm.is_empty() {
            self.tasks.insert(event.pid, event.comm.clone());
            let name = json!({"name": event.comm});
            records.push(json!({"ph": "M", "name": "thread_name", "pid": event.pid, "tid": event.pid, "args": name}));
            records
                .push(json!({"ph": "M", "name": "process_name", "pid": event.pid, "args": name}));
        }
        let (system, name) = event.name.split_once(':').unwrap_or(("", &event.name));
        let mut fields: Map<String, Value> = Map::new();
        for field in event.fields {
            if let Some(value) = field.value {
                fields.insert(field.name, view::json(value));
            }
        }
        if event.name == "sched:sched_switch" {
            self.switch(event.cpu, at, &fields, records);
        }
        fields.insert("cpu".to_owned(), event.cpu.into());
        fields.insert(
            "guest_time_ns".to_owned(),
            event.guest_time_ns.to_string().into(),
        );
        records.push(json!({
            "ph": "i", "s": "t", "name": name, "cat": system, "ts": ts, "pid": event.pid, "tid": event.pid,
            "args": fields
        }));
    }

    /// Ends the slice of the task that ran on this CPU until now, and begins that of the next task.
    fn switch(
        &mut self,
        cpu: u32,
        at: i128,
        fields: &Map<String, Value>,
        records: &mut Vec<Value>,
    ) {
        if self.cpus.insert(cpu) {
            let args = json!({"name": format!("CPU {cpu}")});
            records.push(
                json!({"ph": "M", "name": "thread_name", "pid": CPUS, "tid": cpu, "args": args}),
            );
        }
        let of = |name: &str| {
            fields
                .get(name)
                .map(|value| value.as_str().map_or(value.to_string(), str::to_owned))
        };
        let next = format!(
            "{}-{}",
            of("next_comm").unwrap_or_default(),
            of("next_pid").unwrap_or_default()
        );
        let before = self.running.insert(cpu, (at, next));
        if let Some((since, task)) = before.filter(|(_, task)| !task.ends_with("-0")) {
            let (ts, dur) = (self.timestamp(since), microseconds(at - since));
            records.push(
                json!({"ph": "X", "name": task, "ts": ts, "dur": dur, "pid": CPUS, "tid": cpu}),
            );
        }
    }

    /// Returns the microseconds since the first event. A double resolves nanoseconds for the first
    /// hundred days.
    fn timestamp(&mut self, at: i128) -> Value {
        let start = *self.start.get_or_insert(at);
        microseconds(at - start)
    }

    fn records(&mut self, records: &[Value]) -> io::Result<()> {
        let mut text = Vec::new();
        let mut empty = self.empty;
        for record in records {
            text.extend_from_slice(if empty { b"\n" } else { b",\n" });
            empty = false;
            serde_json::to_writer(&mut text, record)?;
        }
        self.append(&text)?;
        self.empty = empty;
        Ok(())
    }

    fn append(&mut self, text: &[u8]) -> io::Result<()> {
        let written = self.write_at_end(text);
        if written.is_err() {
            // If this fails too, the first error is more useful.
            let _ = self.restore();
        }
        written
    }

    /// Restores the closing text at the end of the last complete batch. The closing text is written
    /// before the file is truncated, because other programs may use the freed space at once.
    fn restore(&mut self) -> io::Result<()> {
        if self.length == 0 {
            return self.storage.cut(0);
        }
        self.write_at_end(&[])?;
        self.storage.cut(self.length + END.len() as u64)
    }

    fn write_at_end(&mut self, text: &[u8]) -> io::Result<()> {
        self.storage.seek(SeekFrom::Start(self.length))?;
        self.storage.write_all(text)?;
        self.storage.write_all(END)?;
        self.storage.flush()?;
        self.length += text.len() as u64;
        Ok(())
    }
}

fn time_of(event: &v1::TraceEvent) -> i128 {
    match event.time {
        None => i128::from(event.guest_time_ns),
        time => nanoseconds(time),
    }
}

fn nanoseconds(time: Option<prost_types::Timestamp>) -> i128 {
    time.map_or(0, |time| {
        i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos)
    })
}

fn microseconds(nanoseconds: i128) -> Value {
    #[allow(clippy::cast_precision_loss)]
    let microseconds = nanoseconds as f64 / 1000.0;
    json!(microseconds)
}

#[cfg(test)]
pub(super) mod tests {
    use patchbay_proto::v1::trace_field::Value as Field;

    use super::*;

    /// A disk with room for a limited number of bytes.
    #[derive(Default)]
    pub struct Disk {
        pub bytes: io::Cursor<Vec<u8>>,
        pub room: usize,
        /// A write beyond the room has this error instead of that of a full disk.
        pub error: Option<io::ErrorKind>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let at = usize::try_from(self.bytes.position()).expect("small");
            match self.room.saturating_sub(at).min(bytes.len()) {
                0 if !bytes.is_empty() => {
                    Err(self.error.unwrap_or(io::ErrorKind::StorageFull).into())
                }
                fits => self.bytes.write(&bytes[..fits]),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Disk {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.bytes.seek(to)
        }
    }

    impl Storage for Disk {
        /// Truncates the disk, and simulates other programs that use the freed space at once.
        fn cut(&mut self, length: u64) -> io::Result<()> {
            let length = usize::try_from(length).expect("small");
            self.bytes.get_mut().truncate(length);
            self.room = self.room.min(length);
            Ok(())
        }
    }

    impl Storage for &mut Disk {
        fn cut(&mut self, length: u64) -> io::Result<()> {
            (**self).cut(length)
        }
    }

    fn switch(at: i32, next: &str, pid: i64) -> v1::TraceEvent {
        let field = |name: &str, value| v1::TraceField {
            name: name.into(),
            value: Some(value),
        };
        v1::TraceEvent {
            name: "sched:sched_switch".into(),
            pid: 1,
            comm: "init".into(),
            time: Some(prost_types::Timestamp {
                seconds: 1_700_000_000,
                nanos: at,
            }),
            fields: vec![
                field("next_comm", Field::Text(next.into())),
                field("next_pid", Field::Signed(pid)),
            ],
            ..Default::default()
        }
    }

    fn batch(events: Vec<v1::TraceEvent>) -> v1::StreamTracepointEventsResponse {
        v1::StreamTracepointEventsResponse {
            events,
            ..Default::default()
        }
    }

    fn parsed(timeline: &Timeline<Disk>) -> Vec<Value> {
        let file: Value =
            serde_json::from_slice(timeline.storage.bytes.get_ref()).expect("whole JSON");
        file["traceEvents"].as_array().expect("events").clone()
    }

    #[test]
    fn switches_become_slices_and_the_file_is_whole_after_each_batch() {
        let mut timeline = Timeline::begin(Disk {
            room: 1 << 20,
            ..Disk::default()
        })
        .expect("begun");
        assert_eq!(parsed(&timeline).len(), 2);
        timeline
            .add(batch(vec![switch(1001, "worker", 7)]))
            .expect("added");
        timeline
            .add(batch(vec![
                switch(4501, "swapper/0", 0),
                switch(9001, "worker", 7),
            ]))
            .expect("added");
        let events = parsed(&timeline);
        let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(slices.len(), 1, "idle is no slice");
        assert_eq!(
            (&slices[0]["name"], &slices[0]["ts"], &slices[0]["dur"]),
            (&json!("worker-7"), &json!(0.0), &json!(3.5))
        );
        assert_eq!(events.iter().filter(|event| event["ph"] == "i").count(), 3);
        assert_eq!(timeline.events(), 3);
    }

    #[test]
    fn a_disk_without_room_for_the_beginning_is_left_empty() {
        for room in 0..40 {
            let mut disk = Disk {
                room,
                ..Default::default()
            };
            let begun = Timeline::begin(&mut disk).map(drop);
            assert_eq!(
                begun.map_err(|error| error.kind()),
                Err(io::ErrorKind::StorageFull)
            );
            assert!(disk.bytes.get_ref().is_empty(), "room for {room}");
        }
    }

    #[test]
    fn a_full_disk_is_an_error_and_leaves_a_whole_file() {
        for room in 600..1500 {
            let Ok(mut timeline) = Timeline::begin(Disk {
                room,
                ..Disk::default()
            }) else {
                continue;
            };
            let mut added = 0;
            let error = loop {
                match timeline.add(batch(vec![switch(1, "worker", 7)])) {
                    Ok(()) => added += 1,
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            let instants = parsed(&timeline)
                .iter()
                .filter(|event| event["ph"] == "i")
                .count();
            assert_eq!(instants, added, "room for {room}");
        }
    }
}
