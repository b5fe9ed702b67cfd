// SPDX-License-Identifier: Apache-2.0
//! Sends the events that a client has asked for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use patchbay_observe::trace::Start;
use patchbay_proto::v1::{self, TraceFormat, TraceMark};
use static_keys::Patterns;
use tokio::sync::mpsc;
use tonic::Status;

use super::super::error::TraceError;
use super::super::hub::Permit;
use super::super::link::AgentLink;
use super::super::stream::{BATCH_BYTES, Batch, Event, FloodGuard, Selection, Source};
use super::super::tasks::Tasks;
use super::formats::MAX_BYTES;
use super::gaps::Gaps;
use super::reader::{Place, Polled, Reader};
use crate::keys::{Keys, KeysError};

/// Time between two polls after an event.
const BUSY: Duration = Duration::from_millis(5);
/// Maximum time between two polls. Without an event, the time doubles up to this.
const IDLE: Duration = Duration::from_millis(100);
/// Maximum time for the events of a client that does not follow.
const DUMP: Duration = Duration::from_secs(10);
/// Minimum time between two marks.
const MARKS: Duration = Duration::from_secs(1);

type Sender = mpsc::Sender<Result<v1::StreamTracepointEventsResponse, Status>>;

/// The events that a client selects.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The name of the instance; empty for the top level.
    pub instance: String,
    /// The names of the events.
    pub patterns: Patterns,
    /// Limit of events per second.
    pub events_per_second: u32,
    /// Begin with the events that the rings hold.
    pub buffered: bool,
    /// End when the rings hold no more events.
    pub no_follow: bool,
    /// Also send the bytes of each event and the formats.
    pub records: bool,
}

/// A client's view of the events.
pub struct MemoryStream {
    reader: Reader,
    patterns: Patterns,
    guard: FloodGuard,
    tasks: Tasks,
    marks: Marks,
    /// The agent, which compares the clocks of guest and host, if it is connected.
    link: AgentLink,
    permit: Permit,
    no_follow: bool,
    gaps: Gaps,
    /// If the client wants records: the formats that were sent.
    formats: Option<Sent>,
}

/// The formats that were sent to a client.
#[derive(Default)]
struct Sent {
    sources: HashMap<u16, Arc<Source>>,
    bytes: usize,
}

impl Sent {
    /// Returns messages with the formats of these events that were not sent before. The events are
    /// those of one poll, and each of their formats is sent at most once.
    fn missing(&mut self, events: &[Event]) -> Vec<v1::StreamTracepointEventsResponse> {
        // Not between the events: a guest could then have formats sent again with each of them.
        if self.bytes > MAX_BYTES {
            *self = Self::default();
        }
        let mut messages: Vec<v1::StreamTracepointEventsResponse> = vec![];
        let mut bytes = 0;
        for source in events.iter().map(|event| &event.source) {
            let sent = self.sources.get(&source.format.id);
            if sent.is_some_and(|sent| Arc::ptr_eq(sent, source)) {
                continue;
            }
            self.bytes += source.format_bytes();
            self.sources.insert(source.format.id, Arc::clone(source));
            if messages.is_empty() || bytes > BATCH_BYTES {
                messages.push(v1::StreamTracepointEventsResponse::default());
                bytes = 0;
            }
            bytes += source.text.len();
            let format = TraceFormat {
                name: source.name.clone(),
                id: source.format.id.into(),
                text: source.text.to_string(),
            };
            if let Some(message) = messages.last_mut() {
                message.formats.push(format);
            }
        }
        messages
    }
}

/// The messages of a poll.
#[derive(Default)]
struct Told {
    messages: Vec<v1::StreamTracepointEventsResponse>,
    /// Events were read, though perhaps none that the client wants.
    has_read: bool,
    /// There are more events already.
    more: bool,
}

impl MemoryStream {
    /// Finds the rings and fixes the position in them.
    ///
    /// # Errors
    /// The rings are not found or cannot be read, or there is no such instance.
    pub async fn begin(
        keys: Arc<Keys>,
        link: AgentLink,
        permit: Permit,
        wanted: Wanted,
    ) -> Result<Self, TraceError> {
        let (instance, records) = (wanted.instance, wanted.records);
        let start = match wanted.buffered {
            true => Start::Oldest,
            false => Start::End,
        };
        let begin = tokio::task::spawn_blocking(move || {
            let place = Place::find(&keys, &instance)?;
            // The permit lasts as long as this, also if the client cancels the call meanwhile.
            Ok::<_, TraceError>((Reader::begin(keys, place, start, records)?, permit))
        });
        let (reader, permit) = begin.await.map_err(failed)??;
        Ok(Self {
            reader,
            patterns: wanted.patterns,
            guard: FloodGuard::new(wanted.events_per_second),
            tasks: Tasks::default(),
            marks: Marks::default(),
            link,
            permit,
            no_follow: wanted.no_follow,
            gaps: Gaps::default(),
            formats: records.then(Sent::default),
        })
    }

    /// Sends events until the client disconnects, or the instance is removed. Without following,
    /// ends at the end of the rings.
    pub async fn tell(mut self, sender: &Sender) {
        let first = v1::StreamTracepointEventsResponse {
            source: v1::TraceSource::Memory.into(),
            ..Default::default()
        };
        if sender.send(Ok(first)).await.is_err() {
            return;
        }
        let mut pace = Pace::default();
        let begun = Instant::now();
        loop {
            // Nothing is read until the client has taken the previous events.
            let Ok(permit) = sender.reserve().await else {
                return;
            };
            drop(permit);
            let polled = tokio::task::spawn_blocking(move || {
                let told = self.poll();
                (self, told)
            });
            let told = match polled.await.map_err(failed) {
                Ok((own, Ok(told))) => {
                    self = own;
                    told
                }
                Ok((_, Err(error))) | Err(error) => {
                    let _ = sender.send(Err(error.into())).await;
                    return;
                }
            };
            for message in told.messages {
                if sender.send(Ok(message)).await.is_err() {
                    return;
                }
            }
            // A guest can pretend that there is more.
            if self.no_follow && (!told.more || begun.elapsed() > DUMP) {
                return;
            }
            if let Some(rest) = pace.after(told.has_read, told.more) {
                tokio::time::sleep(rest).await;
            }
        }
    }

    /// Reads, decodes, selects and encodes the events since the last poll. This takes long for a
    /// busy guest, so it runs on a thread of its own: the API's thread also answers fire and park.
    fn poll(&mut self) -> Result<Told, TraceError> {
        let Polled {
            mut events,
            mut losses,
            restarted,
            more,
            has_read,
            is_monotonic,
        } = self.reader.poll(&self.patterns)?;
        self.tasks.name_from_events(&mut events);
        let (mut selection, now) = (Selection::default(), Instant::now());
        events.retain_mut(|event| {
            let wanted = selection.wants(&self.patterns, &event.source);
            let passes = wanted && self.guard.pass(now);
            let dropped = u64::from(wanted && !passes);
            losses.flood += dropped;
            if let Some(raw) = &mut event.raw {
                let lost = raw.lost_before.saturating_add(dropped);
                self.gaps.add(event.cpu, lost);
                if passes {
                    raw.lost_before = self.gaps.take(event.cpu);
                }
            }
            passes
        });
        // The agent compares the host's clock with CLOCK_MONOTONIC.
        if is_monotonic {
            let clock = self.link.clock();
            for event in &mut events {
                event.time = clock.host_time(event.guest_time_ns).map(Into::into);
            }
        }
        self.permit.count(events.len(), &losses);
        let mark = self.marks.admit(restarted, now).then(|| TraceMark {
            time: Some(SystemTime::now().into()),
            text: "the guest's rings begin anew: they were emptied or exchanged, or another kernel runs".to_owned(),
        });
        let formats = self.formats.as_mut();
        let mut messages = formats.map_or_else(Vec::new, |formats| formats.missing(&events));
        let batches = Batch::split(events.into_iter().map(Arc::new), losses, mark);
        messages.extend(batches.into_iter().map(|batch| batch.to_proto()));
        Ok(Told {
            messages,
            has_read,
            more,
        })
    }
}

/// The time between two polls.
struct Pace(Duration);

impl Default for Pace {
    fn default() -> Self {
        Self(BUSY)
    }
}

impl Pace {
    /// Returns the time to wait after a poll. It depends on the events that were read, not on those
    /// that were selected, because events that no client wants overwrite events that a client
    /// wants.
    fn after(&mut self, has_read: bool, more: bool) -> Option<Duration> {
        self.0 = match has_read {
            true => BUSY,
            false => (self.0 * 2).min(IDLE),
        };
        // A guest can pretend that there is more.
        (!has_read || !more).then_some(self.0)
    }
}

/// Limits the marks, which a guest can cause with each poll.
#[derive(Default)]
struct Marks {
    is_due: bool,
    last: Option<Instant>,
}

impl Marks {
    /// Returns whether a mark is sent now. A mark that is not sent now is due later.
    fn admit(&mut self, restarted: bool, now: Instant) -> bool {
        self.is_due |= restarted;
        let rests = |last| now.saturating_duration_since(last) < MARKS;
        if !self.is_due || self.last.is_some_and(rests) {
            return false;
        }
        self.is_due = false;
        self.last = Some(now);
        true
    }
}

fn failed(error: tokio::task::JoinError) -> TraceError {
    let message = format!("the trace events cannot be read: {error}; report it, it is a bug");
    KeysError::Internal { message }.into()
}

#[cfg(test)]
mod tests {
    use patchbay_guest::testing::{InMemoryGuest, TestKey};

    use super::super::super::decode::Format;
    use super::super::super::hub::Hub;
    use super::super::super::select;
    use super::*;
    use crate::keys::{KeysConfig, Registry};
    use crate::testing::GuestRings;

    /// Events that are not selected overwrite the others too, so they must be read just as fast.
    #[tokio::test]
    async fn events_that_nobody_wants_are_read() {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
        let rings = GuestRings::new(&guest);
        rings.found_by(&registry);
        let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
        let (pages, _) = mpsc::unbounded_channel();
        let link = AgentLink::new(pages);
        let hub = Arc::new(Hub::new(link.clone()));
        let permit = hub.permit_in_memory("alice").expect("free");
        let patterns = vec!["test:numbered".to_owned()];
        let patterns = select::Wanted::parse(patterns, false).expect("well-formed");
        let wanted = Wanted {
            instance: String::new(),
            patterns: patterns.patterns().clone(),
            events_per_second: 1000,
            buffered: true,
            no_follow: false,
            records: false,
        };
        let stream = MemoryStream::begin(Arc::new(keys), link, permit, wanted).await;
        let mut stream = stream.expect("found");
        let mut unwanted = vec![8];
        unwanted.resize(96, 0);
        rings.write(|writer| writer.event(0, 1, &unwanted));
        let told = stream.poll().expect("the top level");
        assert!(told.has_read && told.messages.is_empty());
        assert!(!stream.poll().expect("the top level").has_read);
    }

    /// Events in turn must not have their formats sent again and again.
    #[test]
    fn each_format_is_sent_once_per_poll() {
        let text = "x".repeat(MAX_BYTES / 8);
        let source = |id| {
            Arc::new(Source {
                name: format!("test:{id}"),
                format: Format {
                    id,
                    fields: [].into(),
                },
                text: text.as_str().into(),
                settled_at: 0.into(),
                events: 0.into(),
            })
        };
        let sources: Vec<_> = (0..12).map(source).collect();
        let in_turn = sources.iter().cycle().take(48);
        let events: Vec<_> = in_turn
            .map(|source| Event {
                source: Arc::clone(source),
                cpu: 0,
                pid: 1,
                comm: "init".into(),
                guest_time_ns: 1,
                time: None,
                values: [].into(),
                context: String::new(),
                raw: None,
            })
            .collect();
        let mut sent = Sent::default();
        let count = |messages: Vec<v1::StreamTracepointEventsResponse>| {
            messages
                .iter()
                .map(|message| message.formats.len())
                .sum::<usize>()
        };
        assert_eq!(count(sent.missing(&events)), sources.len());
        // They were more than are remembered, so the next poll sends them again, once.
        assert_eq!(count(sent.missing(&events)), sources.len());
    }

    #[test]
    fn the_pace_follows_what_is_read() {
        let mut pace = Pace::default();
        for _ in 0..10 {
            assert_eq!(pace.after(true, true), None, "there is more");
            assert_eq!(pace.after(true, false), Some(BUSY));
        }
        assert_eq!(pace.after(false, false), Some(2 * BUSY));
        for _ in 0..10 {
            let rest = pace
                .after(false, true)
                .expect("it claims that there is more");
            assert!(rest > BUSY && rest <= IDLE);
        }
        assert_eq!(pace.after(false, false), Some(IDLE));
        assert_eq!(pace.after(true, false), Some(BUSY));
    }

    #[test]
    fn marks_are_rare_and_none_is_forgotten() {
        let mut marks = Marks::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert!(!marks.admit(false, at(0)));
        assert!(marks.admit(true, at(0)), "the first one at once");
        for ms in 1..1000 {
            assert!(!marks.admit(true, at(ms)));
        }
        assert!(marks.admit(false, at(1000)), "the ones that were withheld");
        assert!(!marks.admit(false, at(3000)));
    }
}
