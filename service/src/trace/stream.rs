// SPDX-License-Identifier: Apache-2.0
//! Streams of events to clients, and their queues.
//!
//! A stream holds at most [`QUEUE`] batches of [`BATCH_BYTES`] and one event: 16 MiB, whatever the
//! size of the guest's events. An event that several streams want is shared between them.

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

use super::decode::{Format, Record, context_letters};
use static_keys::Patterns;

/// Maximum number of batches that wait for a client.
pub const QUEUE: usize = 16;
/// Bounds of a batch: its message stays below the 4 MiB that gRPC clients accept.
const BATCH_EVENTS: usize = 2048;
pub const BATCH_BYTES: usize = 1 << 20;

/// An armed event as the decoder needs it.
#[derive(Debug)]
pub struct Source {
    /// "system:name".
    pub name: String,
    pub format: Format,
    /// The text of the format if the event is read in memory, otherwise empty.
    pub text: Box<str>,
    /// Events up to this guest time were recorded while the event was being armed, and are skipped.
    pub settled_at: AtomicU64,
    /// Number of events that were sent.
    pub events: AtomicU64,
}

impl Source {
    /// Returns the size of the format and its text in bytes.
    pub fn format_bytes(&self) -> usize {
        self.text.len() + self.format.bytes()
    }
}

/// A decoded event. Its names are in its source.
#[derive(Debug)]
pub struct Event {
    pub source: Arc<Source>,
    pub cpu: u32,
    pub pid: i32,
    pub comm: Arc<str>,
    pub guest_time_ns: u64,
    pub time: Option<prost_types::Timestamp>,
    /// Values by the number of the field in the format.
    pub values: Box<[(u8, Value)]>,
    pub context: String,
    /// Set for a client that wants records.
    pub raw: Option<Box<Raw>>,
}

/// An event as the kernel has written it.
#[derive(Debug)]
pub struct Raw {
    pub record: Box<[u8]>,
    /// The number of events of its CPU that were lost directly before it.
    pub lost_before: u64,
}

impl Event {
    /// Decodes a record. The names of the task and the host's time are left out.
    pub fn of(source: &Arc<Source>, cpu: u32, time: u64, record: &Record<'_>) -> Self {
        Self {
            source: Arc::clone(source),
            cpu,
            pid: record.pid,
            comm: Arc::default(),
            guest_time_ns: time,
            time: None,
            values: record.values(&source.format),
            context: context_letters(record.flags, record.preempt_count),
            raw: None,
        }
    }

    /// Returns the value of a field.
    pub fn value(&self, name: &str) -> Option<&Value> {
        let of_name = |(number, _): &&(u8, Value)| {
            let field = self.source.format.fields.get(usize::from(*number));
            field.is_some_and(|field| *field.name == *name)
        };
        self.values.iter().find(of_name).map(|(_, value)| value)
    }

    /// Returns the size in bytes that the event takes in memory or in a message, whichever is
    /// larger.
    pub fn bytes(&self) -> usize {
        // Overhead of an event and of a value, including the allocator's.
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
        let raw = |raw: &Raw| size_of::<Raw>() + raw.record.len();
        let raw = self.raw.as_deref().map_or(0, raw);
        EVENT + raw + self.source.name.len() + self.values.iter().map(field).sum::<usize>()
    }

    fn to_proto(&self) -> TraceEvent {
        let field = |(number, value): &(u8, Value)| {
            let field = self.source.format.fields.get(usize::from(*number))?;
            Some(TraceField {
                name: field.name.to_string(),
                value: Some(value.clone()),
            })
        };
        let raw = self.raw.as_deref();
        TraceEvent {
            record: raw.map_or_else(Vec::new, |raw| raw.record.to_vec()),
            lost_before: raw.map_or(0, |raw| raw.lost_before),
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

/// Events and losses that are sent to a client together.
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

    /// Splits events, losses and a mark into batches; none if there is nothing to send.
    pub fn split(
        events: impl Iterator<Item = Arc<Event>>,
        losses: TraceLosses,
        mark: Option<TraceMark>,
    ) -> Vec<Self> {
        let mut batches = vec![];
        let mut batch = Self {
            losses: (losses != TraceLosses::default()).then_some(losses),
            marks: mark.into_iter().collect(),
            ..Self::default()
        };
        for event in events {
            if batch.is_full() {
                batches.push(std::mem::take(&mut batch));
            }
            batch.add(event);
        }
        if !batch.is_empty() {
            batches.push(batch);
        }
        batches
    }

    fn add(&mut self, event: Arc<Event>) {
        self.bytes += event.bytes();
        self.events.push(event);
    }

    fn is_full(&self) -> bool {
        self.events.len() >= BATCH_EVENTS || self.bytes >= BATCH_BYTES
    }

    /// Returns the sum of [`Event::bytes`].
    #[cfg(any(test, feature = "testing"))]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the batch as a message.
    pub fn to_proto(&self) -> StreamTracepointEventsResponse {
        StreamTracepointEventsResponse {
            events: self.events.iter().map(|event| event.to_proto()).collect(),
            losses: self.losses,
            marks: self.marks.clone(),
            ..Default::default()
        }
    }
}

/// The client's end of a stream.
pub struct Subscription {
    /// Number of the stream, for [`super::hub::Hub::unsubscribe`].
    pub id: u64,
    pub batches: mpsc::Receiver<Batch>,
}

/// The hub's end of a stream.
#[derive(Debug)]
pub struct Subscriber {
    pub id: u64,
    pub principal: String,
    patterns: Patterns,
    outlet: mpsc::Sender<Batch>,
    guard: FloodGuard,
    pending: Batch,
    losses: TraceLosses,
}

/// Selects events by name. Names are matched once per batch, because a batch has thousands of
/// events of each name.
#[derive(Default)]
pub struct Selection {
    wants: HashMap<*const Source, bool>,
}

impl Selection {
    /// Returns whether the patterns select events of this source.
    pub fn wants(&mut self, patterns: &Patterns, source: &Arc<Source>) -> bool {
        let wants = self.wants.entry(Arc::as_ptr(source));
        *wants.or_insert_with(|| patterns.select_full(&source.name))
    }
}

/// Limits the events per second.
#[derive(Debug)]
pub struct FloodGuard {
    limit: u32,
    since: Instant,
    passed: u32,
}

impl FloodGuard {
    /// Admits this many events per second.
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            since: Instant::now(),
            passed: 0,
        }
    }

    /// Returns whether one more event is admitted.
    pub fn pass(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) >= Duration::from_secs(1) {
            self.since = now;
            self.passed = 0;
        }
        self.passed = self.passed.saturating_add(1);
        self.passed <= self.limit
    }
}

impl Subscriber {
    /// Creates a stream of matching events, with a limit of events per second.
    pub fn new(
        id: u64,
        principal: String,
        patterns: Patterns,
        events_per_second: u32,
    ) -> (Self, Subscription) {
        let (outlet, batches) = mpsc::channel(QUEUE);
        let subscriber = Self {
            id,
            principal,
            patterns,
            outlet,
            guard: FloodGuard::new(events_per_second),
            pending: Batch::default(),
            losses: TraceLosses::default(),
        };
        (subscriber, Subscription { id, batches })
    }

    /// Queues the matching events and the losses. Returns the losses of this stream.
    pub fn hand_out(&mut self, events: &[Arc<Event>], losses: &TraceLosses) -> TraceLosses {
        let mut lost = TraceLosses::default();
        self.losses.overwritten = self.losses.overwritten.saturating_add(losses.overwritten);
        self.losses.malformed = self.losses.malformed.saturating_add(losses.malformed);
        let now = Instant::now();
        let mut selection = Selection::default();
        for event in events {
            if !selection.wants(&self.patterns, &event.source) {
                continue;
            }
            if !self.guard.pass(now) {
                lost.flood += 1;
                self.losses.flood += 1;
                continue;
            }
            self.pending.add(Arc::clone(event));
            if self.pending.is_full() {
                lost.slow_client += self.flush();
            }
        }
        lost.slow_client += self.flush();
        lost
    }

    /// Queues the mark of a client's change. Drops the mark if the queue is full.
    pub fn mark(&mut self, mark: TraceMark) {
        self.pending.marks.push(mark);
        self.flush();
    }

    /// Queues the pending batch. Returns how many events were lost because the client is slow.
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
