// SPDX-License-Identifier: Apache-2.0
//! Streams of events to clients, and what waits in them.
//!
//! A stream holds at most [`QUEUE`] batches of [`BATCH_BYTES`] and an event: 16 MiB, however the guest shapes
//! its events. Streams share the events that they both want.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{
    StreamTracepointEventsResponse, TraceEvent, TraceField, TraceLosses, TraceMark,
};
use tokio::sync::mpsc;

use super::decode::Format;
use super::select;
use static_keys::Patterns;

/// Batches that wait for a client.
pub const QUEUE: usize = 16;
/// Events of one batch, and their bytes, so that a message stays below what gRPC clients take (4 MiB).
const BATCH_EVENTS: usize = 2048;
pub const BATCH_BYTES: usize = 1 << 20;

/// An armed event, for decoding.
#[derive(Debug)]
pub struct Source {
    /// "system:name".
    pub name: String,
    pub format: Format,
    /// Events up to this guest time were recorded while the event was being armed.
    pub settled_at: AtomicU64,
    /// Events that came out.
    pub events: AtomicU64,
}

/// A decoded event. Its names are its source's.
#[derive(Debug)]
pub struct Event {
    pub source: Arc<Source>,
    pub cpu: u32,
    pub pid: i32,
    pub comm: Arc<str>,
    pub guest_time_ns: u64,
    pub time: Option<prost_types::Timestamp>,
    /// By number of the field in the format.
    pub values: Box<[(u8, Value)]>,
    pub context: String,
}

impl Event {
    /// Value of a field.
    pub fn value(&self, name: &str) -> Option<&Value> {
        let of_name = |(number, _): &&(u8, Value)| {
            let field = self.source.format.fields.get(usize::from(*number));
            field.is_some_and(|field| *field.name == *name)
        };
        self.values.iter().find(of_name).map(|(_, value)| value)
    }

    /// What it takes in memory, or as a message to a client, whichever is more.
    pub fn bytes(&self) -> usize {
        // Allocations of an event and of a value, with what the allocator adds.
        const EVENT: usize = size_of::<Event>() + 128;
        const VALUE: usize = size_of::<(u8, Value)>() + 32;
        let field = |(number, value): &(u8, Value)| {
            let field = self.source.format.fields.get(usize::from(*number));
            let content = match value {
                Value::Text(text) => text.len(),
                Value::Raw(bytes) => bytes.len(),
                _ => 0,
            };
            VALUE + content + field.map_or(0, |field| field.name.len())
        };
        EVENT + self.source.name.len() + self.values.iter().map(field).sum::<usize>()
    }

    fn to_proto(&self) -> TraceEvent {
        let field = |(number, value): &(u8, Value)| {
            let field = self.source.format.fields.get(usize::from(*number))?;
            Some(TraceField {
                name: field.name.to_string(),
                value: Some(value.clone()),
            })
        };
        TraceEvent {
            name: self.source.name.clone(),
            cpu: self.cpu,
            pid: self.pid,
            comm: self.comm.to_string(),
            guest_time_ns: self.guest_time_ns,
            time: self.time,
            fields: self.values.iter().filter_map(field).collect(),
            context: self.context.clone(),
        }
    }
}

/// What a client is told at once.
#[derive(Debug, Default)]
pub struct Batch {
    events: Vec<Arc<Event>>,
    bytes: usize,
    losses: Option<TraceLosses>,
    marks: Vec<TraceMark>,
}

impl Batch {
    fn is_empty(&self) -> bool {
        self.events.is_empty() && self.losses.is_none() && self.marks.is_empty()
    }

    /// By [`Event::bytes`].
    #[cfg(any(test, feature = "testing"))]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// As it is told.
    pub fn to_proto(&self) -> StreamTracepointEventsResponse {
        StreamTracepointEventsResponse {
            events: self.events.iter().map(|event| event.to_proto()).collect(),
            losses: self.losses,
            marks: self.marks.clone(),
            names: vec![],
        }
    }
}

/// What a client gets.
pub struct Subscription {
    /// Of the stream, for [`super::hub::Hub::unsubscribe`].
    pub id: u64,
    pub batches: mpsc::Receiver<Batch>,
}

/// A stream's end at the hub.
#[derive(Debug)]
pub struct Subscriber {
    pub id: u64,
    patterns: Patterns,
    outlet: mpsc::Sender<Batch>,
    guard: FloodGuard,
    pending: Batch,
    losses: TraceLosses,
}

/// At most so many events per second.
#[derive(Debug)]
struct FloodGuard {
    limit: u32,
    since: Instant,
    passed: u32,
}

impl FloodGuard {
    fn pass(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) >= Duration::from_secs(1) {
            self.since = now;
            self.passed = 0;
        }
        self.passed = self.passed.saturating_add(1);
        self.passed <= self.limit
    }
}

impl Subscriber {
    /// A stream of the events that match, at most so many per second.
    pub fn new(id: u64, patterns: Patterns, events_per_second: u32) -> (Self, Subscription) {
        let (outlet, batches) = mpsc::channel(QUEUE);
        let subscriber = Self {
            id,
            patterns,
            outlet,
            guard: FloodGuard {
                limit: events_per_second,
                since: Instant::now(),
                passed: 0,
            },
            pending: Batch::default(),
            losses: TraceLosses::default(),
        };
        (subscriber, Subscription { id, batches })
    }

    /// Sends those of the events that it wants, and the losses; what was lost here.
    pub fn hand_out(&mut self, events: &[Arc<Event>], losses: &TraceLosses) -> TraceLosses {
        let mut lost = TraceLosses::default();
        self.losses.overwritten = self.losses.overwritten.saturating_add(losses.overwritten);
        self.losses.malformed = self.losses.malformed.saturating_add(losses.malformed);
        let now = Instant::now();
        // By name once per batch: there are thousands of events of each.
        let mut wants: HashMap<*const Source, bool> = HashMap::new();
        for event in events {
            let wanted = *wants.entry(Arc::as_ptr(&event.source)).or_insert_with(|| {
                let (system, name) = select::split(&event.source.name);
                self.patterns.select(system, name)
            });
            if !wanted {
                continue;
            }
            if !self.guard.pass(now) {
                lost.flood += 1;
                self.losses.flood += 1;
                continue;
            }
            self.pending.bytes += event.bytes();
            self.pending.events.push(Arc::clone(event));
            if self.pending.events.len() >= BATCH_EVENTS || self.pending.bytes >= BATCH_BYTES {
                lost.slow_client += self.flush();
            }
        }
        lost.slow_client += self.flush();
        lost
    }

    /// Tells what a client did; without room in the queue it is not told.
    pub fn mark(&mut self, mark: TraceMark) {
        self.pending.marks.push(mark);
        self.flush();
    }

    /// Sends what is pending; how many events were lost because the client is slow.
    fn flush(&mut self) -> u64 {
        let mut batch = std::mem::take(&mut self.pending);
        if self.losses != TraceLosses::default() {
            batch.losses = Some(std::mem::take(&mut self.losses));
        }
        if batch.is_empty() {
            return 0;
        }
        let Err(error) = self.outlet.try_send(batch) else {
            return 0;
        };
        let batch = error.into_inner();
        let lost = batch.events.len() as u64;
        self.losses = batch.losses.unwrap_or_default();
        self.losses.slow_client += lost;
        lost
    }
}
