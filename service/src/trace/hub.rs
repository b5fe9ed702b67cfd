// SPDX-License-Identifier: Apache-2.0
//! Decodes pages and passes the events to the streams that want them.
//!
//! One task decodes. The agent sends only pages for which it has credit, and decoding a page
//! returns its credit. Without a stream, pages wait here and then in the guest's ring buffer. A
//! stream that reads too slowly, or exceeds its own rate limit, loses events and is told how many.
//!
//! The guest can make the hub hold at most the pages of the link's window, [`DECODED_BYTES`] of
//! decoded events (and the last event of a page), and the streams' queues.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use patchbay_proto::agent::v1::AgentPages;
use patchbay_proto::v1::{TraceLosses, TraceMark};
use tokio::sync::{mpsc, watch};

use super::decode::{Page, Record};
use super::error::TraceError;
use super::link::{AgentLink, Received};
use super::stream::{Event, Source, Subscriber, Subscription};
use super::tasks::Tasks;
use static_keys::Patterns;

/// Maximum number of streams of all principals. Each stream holds at most 16 MiB.
const MAX_STREAMS: usize = 32;
/// Maximum number of streams of one principal, so that no principal can use up all streams.
const MAX_STREAMS_OF_ONE: usize = 8;
/// Size of the decoded events that are sent together, in bytes. A batch of the agent is normally
/// smaller. The events of a larger batch are ordered by time only within each such part.
const DECODED_BYTES: usize = 8 << 20;

/// Sources by `common_type`.
type Sources = HashMap<u16, Arc<Source>>;

#[derive(Default)]
struct State {
    sources: Arc<Sources>,
    subscribers: Vec<Subscriber>,
    /// The principals of the streams that are read in memory, one for each stream.
    in_memory: Vec<String>,
    next_stream: u64,
    totals: TraceLosses,
    events: u64,
    page_bytes: u64,
}

impl State {
    /// Adds events and their losses to the counters.
    fn count(&mut self, events: usize, losses: &TraceLosses) {
        self.events = self.events.saturating_add(events as u64);
        let totals = &mut self.totals;
        totals.overwritten = totals.overwritten.saturating_add(losses.overwritten);
        totals.malformed = totals.malformed.saturating_add(losses.malformed);
        totals.flood = totals.flood.saturating_add(losses.flood);
    }
}

/// Counters since the monitor started.
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
    /// True while streams exist.
    streams: watch::Sender<bool>,
}

/// A permit for a stream that is read in memory.
pub struct Permit {
    hub: Arc<Hub>,
    principal: String,
}

impl Permit {
    /// Adds events and losses to the counters.
    pub fn count(&self, events: usize, losses: &TraceLosses) {
        self.hub.state().count(events, losses);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.hub.state();
        let mut held = state.in_memory.iter();
        if let Some(own) = held.position(|principal| *principal == self.principal) {
            state.in_memory.swap_remove(own);
        }
    }
}

/// Events of a frame that have not been sent yet.
#[derive(Default)]
struct Decoded {
    events: Vec<Event>,
    bytes: usize,
    losses: TraceLosses,
}

impl State {
    /// Returns the number of streams.
    fn streams(&self) -> usize {
        self.subscribers.len() + self.in_memory.len()
    }

    /// Checks that a principal may open one more stream.
    fn admit(&self, principal: &str) -> Result<(), TraceError> {
        let subscribers = self.subscribers.iter().map(|of| &*of.principal);
        let all = subscribers.chain(self.in_memory.iter().map(String::as_str));
        if all.filter(|of| *of == principal).count() >= MAX_STREAMS_OF_ONE {
            return Err(TraceError::TooManyStreamsOfOne {
                principal: principal.to_owned(),
                max: MAX_STREAMS_OF_ONE,
            });
        }
        if self.streams() >= MAX_STREAMS {
            return Err(TraceError::TooManyStreams { max: MAX_STREAMS });
        }
        Ok(())
    }
}

impl Hub {
    /// Creates a hub without sources and streams.
    pub fn new(link: AgentLink) -> Self {
        Self {
            link,
            state: Mutex::default(),
            streams: watch::Sender::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decodes the events of this source from now on.
    pub fn add_source(&self, source: Arc<Source>) {
        let mut state = self.state();
        Arc::make_mut(&mut state.sources).insert(source.format.id, source);
    }

    /// Skips the events of this source from now on.
    pub fn remove_source(&self, id: u16) {
        Arc::make_mut(&mut self.state().sources).remove(&id);
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// [`TraceError::TooManyStreams`].
    pub fn subscribe(
        &self,
        principal: &str,
        patterns: Patterns,
        events_per_second: u32,
    ) -> Result<Subscription, TraceError> {
        let mut state = self.state();
        state.admit(principal)?;
        state.next_stream += 1;
        let (subscriber, subscription) = Subscriber::new(
            state.next_stream,
            principal.to_owned(),
            patterns,
            events_per_second,
        );
        state.subscribers.push(subscriber);
        self.want_pages(&state);
        Ok(subscription)
    }

    /// Counts a stream that is read in memory, until the permit is dropped.
    ///
    /// # Errors
    /// [`TraceError::TooManyStreams`].
    pub fn permit_in_memory(self: &Arc<Self>, principal: &str) -> Result<Permit, TraceError> {
        let mut state = self.state();
        state.admit(principal)?;
        state.in_memory.push(principal.to_owned());
        Ok(Permit {
            hub: Arc::clone(self),
            principal: principal.to_owned(),
        })
    }

    /// Closes a stream.
    pub fn unsubscribe(&self, id: u64) {
        let mut state = self.state();
        state.subscribers.retain(|subscriber| subscriber.id != id);
        self.want_pages(&state);
    }

    /// Lets a newly connected agent send pages if a stream wants them.
    pub fn agent_connected(&self) {
        self.want_pages(&self.state());
    }

    /// Tells the link whether any stream wants pages. Called with the state locked, so that the
    /// last call reports the latest state.
    fn want_pages(&self, state: &State) {
        let wanted = !state.subscribers.is_empty();
        self.streams.send_replace(wanted);
        self.link.want_pages(wanted);
    }

    /// Reports a change made by a client to all streams.
    pub fn mark(&self, text: String) {
        let time = self.link.clock().now();
        let mark = TraceMark {
            time: Some(time.into()),
            text,
        };
        for subscriber in &mut self.state().subscribers {
            subscriber.mark(mark.clone());
        }
    }

    /// Returns the counters.
    pub fn totals(&self) -> Totals {
        let state = self.state();
        Totals {
            losses: state.totals,
            events: state.events,
            page_bytes: state.page_bytes,
            streams: state.streams(),
        }
    }

    /// Decodes until the link is dropped.
    pub async fn run(&self, mut received: mpsc::UnboundedReceiver<Received>) {
        let mut tasks = Tasks::default();
        let mut streams = self.streams.subscribe();
        while let Some(Received { pages, cost }) = received.recv().await {
            // This fails only if the sender is dropped, and `self` owns the sender.
            let _ = streams.wait_for(|there_is_one| *there_is_one).await;
            self.decode(&pages, &mut tasks).await;
            drop(pages);
            self.link.release(cost);
            // Streams and the link run on this thread too.
            tokio::task::yield_now().await;
        }
    }

    async fn decode(&self, pages: &AgentPages, tasks: &mut Tasks) {
        let sources = Arc::clone(&self.state().sources);
        let mut decoded = Decoded::default();
        for page in &pages.pages {
            let Ok(parsed) = Page::parse(&page.data) else {
                decoded.losses.malformed += 1;
                continue;
            };
            let overwritten = &mut decoded.losses.overwritten;
            *overwritten = overwritten.saturating_add(parsed.missed());
            for event in parsed.events() {
                let Ok((time, payload)) = event else {
                    decoded.losses.malformed += 1;
                    break;
                };
                decoded.add(page.cpu, time, payload, &sources);
                if decoded.bytes >= DECODED_BYTES {
                    self.hand_out(&mut decoded, tasks).await;
                    tokio::task::yield_now().await;
                }
            }
        }
        self.hand_out(&mut decoded, tasks).await;
        self.state().page_bytes += bytes_of(pages);
    }

    /// Passes on and drops all decoded events.
    async fn hand_out(&self, decoded: &mut Decoded, tasks: &mut Tasks) {
        let Decoded {
            mut events, losses, ..
        } = std::mem::take(decoded);
        // Pages come from several CPUs, which share one clock.
        events.sort_by_key(|event| event.guest_time_ns);
        tasks.name(&self.link, &mut events).await;
        let clock = self.link.clock();
        for event in &mut events {
            event.time = clock.host_time(event.guest_time_ns).map(Into::into);
        }
        drop(clock);
        let events: Vec<Arc<Event>> = events.into_iter().map(Arc::new).collect();
        let mut state = self.state();
        let state = &mut *state;
        state.count(events.len(), &losses);
        let totals = &mut state.totals;
        for subscriber in &mut state.subscribers {
            let lost = subscriber.hand_out(&events, &losses);
            totals.flood += lost.flood;
            totals.slow_client += lost.slow_client;
        }
    }
}

fn bytes_of(pages: &AgentPages) -> u64 {
    pages.pages.iter().map(|page| page.data.len() as u64).sum()
}

impl Decoded {
    fn add(&mut self, cpu: u32, time: u64, payload: &[u8], sources: &Sources) {
        let Some(record) = Record::parse(payload) else {
            self.losses.malformed += 1;
            return;
        };
        // The event was disarmed meanwhile, or it was recorded while it was being armed.
        let Some(source) = sources.get(&record.id) else {
            return;
        };
        if time <= source.settled_at.load(Ordering::Relaxed) {
            return;
        }
        source.events.fetch_add(1, Ordering::Relaxed);
        let event = Event::of(source, cpu, time, &record);
        self.bytes += event.bytes();
        self.events.push(event);
    }
}
