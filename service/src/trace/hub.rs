// SPDX-License-Identifier: Apache-2.0
//! Pages in, events out to every stream that wants them.
//!
//! One task decodes. The agent sends only what it has credit for, and credit is given back when a
//! page is decoded; without a stream there is none, and events wait in the guest's ring buffer. A
//! stream that reads too slowly, or that wants more per second than it allowed itself, loses events
//! and is told how many.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::to_agent::Message as Question;
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{
    AgentGetTasks, AgentPages, StreamTracepointEventsResponse as Batch, TraceEvent, TraceField,
    TraceLosses, TraceMark,
};
use tokio::sync::mpsc;

use super::decode::{Format, Page, Record, context_letters};
use super::error::TraceError;
use super::link::{AgentLink, bounded};
use crate::keys::Patterns;

/// Bytes of pages that may be on their way.
const WINDOW: u64 = 4 << 20;
/// Batches that wait for a client.
const QUEUE: usize = 16;
/// Events of one batch, so that a message stays below what gRPC clients take (4 MiB).
const BATCH_EVENTS: usize = 2048;
const MAX_STREAMS: usize = 32;
/// Names of tasks that are remembered, and for how long: a task may take another.
const MAX_TASKS: usize = 16_384;
const TASKS_LIFE: Duration = Duration::from_secs(5);
const TASKS_PATIENCE: Duration = Duration::from_millis(250);
const COMM_BYTES: usize = 32;

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

/// What a client gets.
pub struct Subscription {
    /// Of the stream, for [`Hub::unsubscribe`].
    pub id: u64,
    /// Batches of events.
    pub batches: mpsc::Receiver<Batch>,
}

struct Subscriber {
    id: u64,
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

#[derive(Default)]
struct State {
    sources: HashMap<u16, Arc<Source>>,
    subscribers: Vec<Subscriber>,
    next_stream: u64,
    totals: TraceLosses,
    events: u64,
    page_bytes: u64,
}

/// Figures since the monitor started.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pub losses: TraceLosses,
    pub events: u64,
    pub page_bytes: u64,
    pub streams: usize,
}

/// The decoder and its streams.
pub struct Hub {
    link: AgentLink,
    state: Mutex<State>,
}

/// Names of tasks by process id.
#[derive(Debug)]
struct Tasks {
    names: HashMap<i32, String>,
    since: Instant,
}

impl Hub {
    /// Without sources and streams.
    pub fn new(link: AgentLink) -> Self {
        Self {
            link,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decodes events of this source from now on.
    pub fn add_source(&self, source: Arc<Source>) {
        self.state().sources.insert(source.format.id, source);
    }

    /// Passes its events over from now on.
    pub fn remove_source(&self, id: u16) {
        self.state().sources.remove(&id);
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// [`TraceError::TooManyStreams`].
    pub fn subscribe(
        &self,
        patterns: Patterns,
        events_per_second: u32,
    ) -> Result<Subscription, TraceError> {
        let mut state = self.state();
        if state.subscribers.len() >= MAX_STREAMS {
            return Err(TraceError::TooManyStreams { max: MAX_STREAMS });
        }
        state.next_stream += 1;
        let id = state.next_stream;
        let (outlet, batches) = mpsc::channel(QUEUE);
        state.subscribers.push(Subscriber {
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
        });
        let first = state.subscribers.len() == 1;
        drop(state);
        if first {
            self.link.credit(WINDOW, true);
        }
        Ok(Subscription { id, batches })
    }

    /// Closes a stream.
    pub fn unsubscribe(&self, id: u64) {
        let mut state = self.state();
        state.subscribers.retain(|subscriber| subscriber.id != id);
        let last = state.subscribers.is_empty();
        drop(state);
        if last {
            self.link.credit(0, true);
        }
    }

    /// An agent has connected: it knows nothing of earlier credit.
    pub fn agent_connected(&self) {
        if !self.state().subscribers.is_empty() {
            self.link.credit(WINDOW, true);
        }
    }

    /// Tells all streams what a client did.
    pub fn mark(&self, text: String) {
        let time = self.link.clock().now();
        let mark = TraceMark {
            time: Some(time.into()),
            text,
        };
        let mut state = self.state();
        for subscriber in &mut state.subscribers {
            subscriber.pending.marks.push(mark.clone());
            subscriber.flush();
        }
    }

    /// Since the monitor started.
    pub fn totals(&self) -> Totals {
        let state = self.state();
        Totals {
            losses: state.totals,
            events: state.events,
            page_bytes: state.page_bytes,
            streams: state.subscribers.len(),
        }
    }

    /// Decodes until the link is gone.
    pub async fn run(&self, mut pages: mpsc::Receiver<AgentPages>) {
        let mut tasks = Tasks {
            names: HashMap::new(),
            since: Instant::now(),
        };
        while let Some(pages) = pages.recv().await {
            let bytes: u64 = pages.pages.iter().map(|page| page.data.len() as u64).sum();
            self.decode(&pages, &mut tasks).await;
            let streams = {
                let mut state = self.state();
                state.page_bytes += bytes;
                state.subscribers.len()
            };
            if streams > 0 {
                self.link.credit(bytes, false);
            }
        }
    }

    async fn decode(&self, pages: &AgentPages, tasks: &mut Tasks) {
        let sources = self.state().sources.clone();
        let mut events = Vec::new();
        let mut losses = TraceLosses::default();
        for page in &pages.pages {
            decode_page(page.cpu, &page.data, &sources, &mut events, &mut losses);
        }
        // Pages of several CPUs; their clock is one.
        events.sort_by_key(|event| event.guest_time_ns);
        tasks.name(&self.link, &mut events).await;
        let clock = self.link.clock();
        for event in &mut events {
            event.time = clock.host_time(event.guest_time_ns).map(Into::into);
        }
        drop(clock);
        self.hand_out(events, losses);
    }

    fn hand_out(&self, events: Vec<TraceEvent>, losses: TraceLosses) {
        let mut state = self.state();
        let state = &mut *state;
        state.events += events.len() as u64;
        state.totals.overwritten += losses.overwritten;
        state.totals.malformed += losses.malformed;
        let now = Instant::now();
        for subscriber in &mut state.subscribers {
            subscriber.losses.overwritten += losses.overwritten;
            subscriber.losses.malformed += losses.malformed;
            for event in &events {
                let (system, name) = event.name.split_once(':').unwrap_or(("", &event.name));
                if !subscriber.patterns.select(system, name) {
                    continue;
                }
                if !subscriber.guard.pass(now) {
                    subscriber.losses.flood += 1;
                    state.totals.flood += 1;
                    continue;
                }
                subscriber.pending.events.push(event.clone());
                if subscriber.pending.events.len() >= BATCH_EVENTS {
                    state.totals.slow_client += subscriber.flush();
                }
            }
            state.totals.slow_client += subscriber.flush();
        }
    }
}

impl Subscriber {
    /// Sends what is pending; how many events were lost because the client is slow.
    fn flush(&mut self) -> u64 {
        let mut batch = std::mem::take(&mut self.pending);
        if self.losses != TraceLosses::default() {
            batch.losses = Some(std::mem::take(&mut self.losses));
        }
        if batch == Batch::default() {
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

fn decode_page(
    cpu: u32,
    bytes: &[u8],
    sources: &HashMap<u16, Arc<Source>>,
    events: &mut Vec<TraceEvent>,
    losses: &mut TraceLosses,
) {
    let Ok(page) = Page::parse(bytes) else {
        losses.malformed += 1;
        return;
    };
    losses.overwritten = losses.overwritten.saturating_add(page.missed());
    for event in page.events() {
        let Ok((time, payload)) = event else {
            losses.malformed += 1;
            return;
        };
        let Some(record) = Record::parse(payload) else {
            losses.malformed += 1;
            continue;
        };
        // Disarmed meanwhile, or recorded while it was being armed.
        let Some(source) = sources.get(&record.id) else {
            continue;
        };
        if time <= source.settled_at.load(Ordering::Relaxed) {
            continue;
        }
        source.events.fetch_add(1, Ordering::Relaxed);
        events.push(TraceEvent {
            name: source.name.clone(),
            cpu,
            pid: record.pid,
            comm: String::new(),
            guest_time_ns: time,
            time: None,
            fields: record.fields(&source.format),
            context: context_letters(record.flags, record.preempt_count),
        });
    }
}

impl Tasks {
    /// Fills in the names of the events' tasks, asking the agent for those that are not known.
    async fn name(&mut self, link: &AgentLink, events: &mut [TraceEvent]) {
        if self.since.elapsed() > TASKS_LIFE || self.names.len() > MAX_TASKS {
            self.names.clear();
            self.since = Instant::now();
        }
        self.learn(events);
        let known = |pid: i32| pid == 0 || self.names.contains_key(&pid);
        let unknown: BTreeSet<i32> = events
            .iter()
            .map(|event| event.pid)
            .filter(|&pid| !known(pid))
            .collect();
        if !unknown.is_empty() {
            let pids: Vec<i32> = unknown.into_iter().take(1024).collect();
            let question = Question::GetTasks(AgentGetTasks { pids: pids.clone() });
            // Those without an answer stay nameless until they are forgotten, rather than be asked
            // for with each batch.
            self.names
                .extend(pids.into_iter().map(|pid| (pid, String::new())));
            if let Ok(Answer::Tasks(tasks)) = link.ask(question, TASKS_PATIENCE).await {
                for task in tasks.tasks.into_iter().take(1024) {
                    self.insert(task.pid, &task.comm);
                }
            }
        }
        for event in events {
            event.comm = match event.pid {
                0 => "<idle>".to_owned(),
                pid => self.names.get(&pid).cloned().unwrap_or_default(),
            };
        }
    }

    fn insert(&mut self, pid: i32, comm: &str) {
        if !comm.is_empty() {
            self.names
                .insert(pid, bounded(comm.chars().take(COMM_BYTES).collect()));
        }
    }

    /// sched_switch tells names by itself, also of tasks that are gone when the agent looks.
    fn learn(&mut self, events: &[TraceEvent]) {
        for event in events
            .iter()
            .filter(|event| event.name == "sched:sched_switch")
        {
            for (comm, pid) in [("prev_comm", "prev_pid"), ("next_comm", "next_pid")] {
                let (Some(Value::Text(comm)), Some(&Value::Signed(pid))) =
                    (field(&event.fields, comm), field(&event.fields, pid))
                else {
                    continue;
                };
                if let Ok(pid) = i32::try_from(pid) {
                    self.insert(pid, comm);
                }
            }
        }
    }
}

fn field<'a>(fields: &'a [TraceField], name: &str) -> Option<&'a Value> {
    fields
        .iter()
        .find(|field| field.name == name)?
        .value
        .as_ref()
}
