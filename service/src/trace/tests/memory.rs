// SPDX-License-Identifier: Apache-2.0
//! Events that are read in the guest's memory, without an agent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_observe::testing::rings::{ARRAY, BASE, Writer};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{StreamTracepointEventsResponse, TraceEvent, TraceSource};
use static_keys::Patterns;
use tokio::sync::mpsc;
use tonic::Status;

use super::super::hub::Hub;
use super::super::link::AgentLink;
use super::super::memory::{MemoryStream, Wanted};
use super::super::{TraceError, select};
use crate::keys::{Keys, KeysConfig, Registry};
use crate::testing::{GuestRings, numbered};

struct Lab {
    keys: Arc<Keys>,
    rings: GuestRings,
    hub: Arc<Hub>,
}

fn hub() -> Arc<Hub> {
    let (pages, _) = mpsc::unbounded_channel();
    Arc::new(Hub::new(AgentLink::new(pages)))
}

impl Lab {
    fn new() -> Self {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
        let rings = GuestRings::new(&guest);
        rings.found_by(&registry);
        let keys = Keys::start(guest, registry, KeysConfig::default());
        let (keys, _) = keys.expect("a thread");
        Self {
            keys: Arc::new(keys),
            rings,
            hub: hub(),
        }
    }

    fn event(&self, number: u64) {
        let cpu = usize::from(number % 2 == 1);
        let payload = numbered(number);
        self.rings
            .write(|writer| writer.event(cpu, 1000 * number, &payload));
    }

    async fn open(&self, wanted: Wanted) -> Result<Client, TraceError> {
        let (pages, _) = mpsc::unbounded_channel();
        let link = AgentLink::new(pages);
        let own = link.clone();
        let permit = self.hub.permit_in_memory("alice")?;
        let stream = MemoryStream::begin(Arc::clone(&self.keys), link, permit, wanted).await?;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move { stream.tell(&sender).await });
        let mut client = Client(receiver, own);
        let first = client.next().await;
        assert_eq!(first.source(), TraceSource::Memory);
        assert!(first.events.is_empty());
        Ok(client)
    }
}

fn wanted(patterns: &[&str], buffered: bool) -> Wanted {
    let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
    Wanted {
        instance: String::new(),
        patterns: select::Wanted::parse(patterns, false)
            .expect("well-formed")
            .patterns()
            .clone(),
        events_per_second: 1000,
        buffered,
        no_follow: false,
        records: false,
    }
}

struct Client(
    mpsc::Receiver<Result<StreamTracepointEventsResponse, Status>>,
    AgentLink,
);

impl Client {
    async fn next(&mut self) -> StreamTracepointEventsResponse {
        let next = tokio::time::timeout(Duration::from_secs(30), self.0.recv());
        next.await
            .expect("in time")
            .expect("no end")
            .expect("no error")
    }

    /// Returns as many events, and the losses before and among them.
    async fn events(&mut self, count: usize) -> (Vec<TraceEvent>, u64) {
        let (mut events, mut lost) = (vec![], 0);
        while events.len() < count {
            let message = self.next().await;
            let losses = message.losses.unwrap_or_default();
            assert_eq!((losses.malformed, losses.slow_client), (0, 0));
            lost += losses.overwritten + losses.flood;
            events.extend(message.events);
        }
        (events, lost)
    }
}

fn number(event: &TraceEvent) -> u64 {
    match event.fields[0].value {
        Some(Value::Unsigned(number)) => number,
        ref other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn events_are_read_with_their_fields_and_those_of_all_cpus_in_order() {
    let lab = Lab::new();
    (0..6).for_each(|number| lab.event(number));
    let mut all = lab.open(wanted(&[], true)).await.expect("found");
    let mut later = lab.open(wanted(&["test:*"], false)).await.expect("found");
    let (events, lost) = all.events(6).await;
    assert_eq!(
        (events.iter().map(number).collect::<Vec<_>>(), lost),
        ((0..6).collect(), 0)
    );
    let event = &events[3];
    assert_eq!(
        (event.name.as_str(), event.cpu, event.pid),
        ("test:numbered", 1, 42)
    );
    assert_eq!(event.guest_time_ns, 3000);
    let values: Vec<_> = event
        .fields
        .iter()
        .map(|field| (&*field.name, field.value.clone()))
        .collect();
    let text = |text: &str| Some(Value::Text(text.to_owned()));
    let expected = [
        ("number", Some(Value::Unsigned(3))),
        ("comm", text("a task")),
        ("text", text("text")),
        ("rest", text("abc")),
    ];
    assert_eq!(values, expected);
    for number in 6..20 {
        lab.event(number);
        for client in [&mut all, &mut later] {
            let (events, lost) = client.events(1).await;
            assert_eq!((self::number(&events[0]), lost), (number, 0));
        }
    }
}

#[tokio::test]
async fn a_stream_that_does_not_follow_ends_at_the_end_of_the_rings() {
    let lab = Lab::new();
    (0..6).for_each(|number| lab.event(number));
    let dump = Wanted {
        no_follow: true,
        ..wanted(&[], true)
    };
    let mut client = lab.open(dump.clone()).await.expect("found");
    assert_eq!(client.events(6).await.0.len(), 6);
    assert!(client.0.recv().await.is_none());
    // Without the events that the rings hold already, nothing is left to send.
    let from_the_end = Wanted {
        buffered: false,
        ..dump
    };
    let mut client = lab.open(from_the_end).await.expect("found");
    assert!(client.0.recv().await.is_none());
}

#[tokio::test]
async fn names_select_and_the_flood_limit_counts() {
    let lab = Lab::new();
    for number in 0..5 {
        lab.event(number * 2);
        let mut payload = vec![8];
        payload.resize(96, 0);
        lab.rings
            .write(|writer| writer.event(0, 2000 * number + 1, &payload));
    }
    let mut client = lab.open(wanted(&["alike"], true)).await.expect("found");
    let (events, _) = client.events(5).await;
    assert!(events.iter().all(|event| event.name == "test:alike"));
    let few = Wanted {
        events_per_second: 3,
        ..wanted(&[], true)
    };
    let mut client = lab.open(few).await.expect("found");
    let (events, lost) = client.events(3).await;
    assert_eq!((events.len(), lost), (3, 7));
}

#[tokio::test]
async fn the_flood_limit_counts_before_the_next_record() {
    let lab = Lab::new();
    (0..10).for_each(|number| lab.event(number));
    let few = Wanted {
        events_per_second: 4,
        records: true,
        ..wanted(&[], true)
    };
    let mut client = lab.open(few).await.expect("found");
    let (events, lost) = client.events(4).await;
    assert_eq!((events.len(), lost), (4, 6));
    let mut number = 10;
    // Events pass the flood limit again once a second is over.
    let event = loop {
        lab.event(number);
        number += 2;
        let message = client.next().await;
        if let Some(event) = message.events.into_iter().next() {
            break event;
        }
    };
    let before = self::number(&event);
    // Numbers 4, 6 and 8, and those that the loop has written.
    assert_eq!((event.cpu, event.lost_before), (0, (before - 4) / 2));
}

/// Each loss is told before the next event of its CPU, whatever has lost it.
#[tokio::test]
async fn records_have_their_bytes_their_losses_and_their_formats() {
    let lab = Lab::new();
    let records = Wanted {
        records: true,
        ..wanted(&["test:*"], true)
    };
    let mut client = lab.open(records.clone()).await.expect("found");
    (0..2).for_each(|number| lab.event(number));
    let (mut last, mut formats, mut losses) = ([None; 2], vec![], (0, 0));
    // The first position of an empty ring is in no page, so a loss there is noticed later.
    let mut first = vec![];
    while first.len() < 2 {
        let message = client.next().await;
        formats.extend(message.formats);
        first.extend(message.events);
    }
    for event in &first {
        assert_eq!(event.lost_before, 0);
        last[event.cpu as usize] = Some(number(event));
    }
    (2..2000).for_each(|number| lab.event(number));
    let unknown = [50, 0, 0, 0, 42, 0, 0, 0];
    lab.rings
        .write(|writer| writer.event(1, 2_000_000, &unknown));
    (2000..2004).for_each(|number| lab.event(number));
    while last != [Some(2002), Some(2003)] {
        let message = client.next().await;
        formats.extend(message.formats);
        let lost = message.losses.unwrap_or_default();
        losses = (losses.0 + lost.overwritten, losses.1 + lost.malformed);
        for event in message.events {
            let number = number(&event);
            assert_eq!(event.record, numbered(number));
            let last = &mut last[event.cpu as usize];
            // Every second event is of this CPU. The unknown one precedes 2001.
            let before = last.expect("was read") + 2;
            let gap = (number - before) / 2 + u64::from(number == 2001);
            assert_eq!(event.lost_before, gap, "{number}, expected {before}");
            *last = Some(number);
        }
    }
    assert!(losses.0 > 1000 && losses.1 == 1, "{losses:?}");
    let [format] = &formats[..] else {
        panic!("{formats:?}");
    };
    assert_eq!((&*format.name, format.id), ("test:numbered", 7));
    assert!(
        format.text.starts_with("name: numbered\nID: 7\n"),
        "{format:?}"
    );

    let plain = Wanted {
        records: false,
        no_follow: true,
        ..records
    };
    let mut client = lab.open(plain).await.expect("found");
    while let Some(message) = client.0.recv().await {
        let message = message.expect("no error");
        assert!(message.formats.is_empty());
        let is_plain = |event: &TraceEvent| event.record.is_empty() && event.lost_before == 0;
        assert!(message.events.iter().all(is_plain));
    }
}

/// While a client does not take its events, nothing more is read for it, and other clients are
/// served.
#[tokio::test]
async fn a_client_that_does_not_read_loses_exactly_what_was_overwritten() {
    let lab = Lab::new();
    // The guest may write all events within a second.
    let open = |buffered| {
        lab.open(Wanted {
            events_per_second: 10_000,
            ..wanted(&[], buffered)
        })
    };
    let mut slow = open(true).await.expect("found");
    lab.event(0);
    while slow.0.is_empty() {
        tokio::task::yield_now().await;
    }
    let mut fast = open(false).await.expect("found");
    for number in 1..2000 {
        lab.event(number);
        if number % 50 == 0 {
            let (events, lost) = fast.events(50).await;
            assert_eq!((self::number(&events[49]), lost), (number, 0));
        }
    }
    let (mut read, mut lost) = (0, 0);
    let mut last = 0;
    while read + lost < 2000 || last < 1999 {
        let message = slow.next().await;
        lost += message.losses.unwrap_or_default().overwritten;
        read += message.events.len() as u64;
        last = message
            .events
            .iter()
            .map(number)
            .max()
            .unwrap_or(last)
            .max(last);
    }
    assert_eq!(read + lost, 2000);
    assert!(lost > 1000, "the rings hold a few hundred: {lost}");
}

#[tokio::test]
async fn what_cannot_be_read_says_why() {
    let lab = Lab::new();
    let other = |name: &str| Wanted {
        instance: name.to_owned(),
        ..wanted(&[], false)
    };
    lab.open(other("foo")).await.err();
    let Err(error) = lab.open(other("bar")).await else {
        panic!("there is no such instance");
    };
    let text = error.to_string();
    assert!(
        text.contains("no tracefs instance \"bar\"; it has foo"),
        "{text}"
    );
    assert_eq!(error.reason(), "TRACE_INSTANCE_NOT_FOUND");

    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
    let rings = GuestRings::new(&guest);
    let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    let unknown = Lab {
        keys: Arc::new(keys),
        rings,
        hub: hub(),
    };
    let Err(error) = unknown.open(other("")).await else {
        panic!("no kernel was found");
    };
    assert_eq!(error.reason(), "GUEST_NOT_REGISTERED");
    assert!(
        error.to_string().contains("not found in its memory"),
        "{error}"
    );
}

/// Streams in memory count together with those of the agent.
#[test]
fn streams_are_limited_together() {
    let hub = hub();
    let all = Patterns::default();
    let mut agents = vec![];
    let mut permits = vec![];
    for _ in 0..4 {
        agents.push(hub.subscribe("alice", all.clone(), 1).expect("free"));
        permits.push(hub.permit_in_memory("alice").expect("free"));
    }
    let reason = |error: TraceError| error.to_string();
    let refused = hub.permit_in_memory("alice").err().map(reason);
    assert!(refused.is_some_and(|text| text.contains("alice has 8 streams")));
    assert!(hub.subscribe("alice", all.clone(), 1).is_err());
    for number in 0..24 {
        let name = format!("bob-{}", number % 4);
        permits.push(hub.permit_in_memory(&name).expect("free"));
    }
    assert_eq!(hub.totals().streams, 32);
    let refused = hub.permit_in_memory("carol").err().map(reason);
    assert!(refused.is_some_and(|text| text.contains("32 streams")));
    permits.pop();
    assert!(hub.permit_in_memory("carol").is_ok());
}

/// The instance of a stream is removed. Its memory may belong to another instance immediately
/// afterwards.
#[tokio::test]
async fn a_stream_ends_with_its_instance() {
    let lab = Lab::new();
    let instance = ARRAY + 0x80;
    lab.rings.write(|writer| {
        let buffer = word(writer, ARRAY + 40);
        writer.put(instance + 40, buffer);
    });
    let foo = Wanted {
        instance: "foo".to_owned(),
        ..wanted(&[], false)
    };
    let mut client = lab.open(foo).await.expect("found");
    lab.event(0);
    assert_eq!(client.events(1).await.0.len(), 1);
    lab.rings.write(|writer| {
        let (next, before) = (word(writer, instance), word(writer, instance + 8));
        writer.put(before, next);
        writer.put(next + 8, before);
        writer.put(instance, 0xdead_0000_0000_0100);
    });
    lab.event(2);
    let end = tokio::time::timeout(Duration::from_secs(30), client.0.recv());
    let Some(Err(status)) = end.await.expect("in time") else {
        panic!("an event of a removed instance");
    };
    assert_eq!(status.code(), tonic::Code::NotFound);
    assert!(
        status.message().contains("\"foo\" was removed"),
        "{status:?}"
    );
}

/// Returns a word of the guest's memory.
fn word(writer: &Writer, address: u64) -> u64 {
    let at = usize::try_from(address - BASE).expect("small");
    u64::from_le_bytes(writer.memory()[at..at + 8].try_into().expect("8 bytes"))
}

/// The kernel gives the id of an event that was removed to another one.
#[tokio::test]
async fn an_event_with_the_id_of_another_one_does_not_get_its_name() {
    let lab = Lab::new();
    let mut client = lab.open(wanted(&[], true)).await.expect("found");
    lab.event(0);
    let (events, _) = client.events(1).await;
    assert_eq!(events[0].name, "test:numbered");
    lab.rings.write(|writer| {
        let list = BASE + 0x40;
        let alike = word(writer, word(writer, list));
        writer.put(list, alike);
        writer.put(alike + 8, list);
        let id = word(writer, alike + 56) & !0xffff_ffff | 7;
        writer.put(alike + 56, id);
    });
    lab.event(2);
    let message = client.next().await;
    assert!(message.events.is_empty(), "{message:?}");
    assert_eq!(message.losses.expect("told").malformed, 1);
}

/// The agent has compared the host's clock with CLOCK_MONOTONIC only.
#[tokio::test]
async fn only_times_of_the_monotonic_clock_have_a_time_of_the_host() {
    let lab = Lab::new();
    let mut client = lab.open(wanted(&[], true)).await.expect("found");
    let now = Instant::now();
    client.1.clock().sample(now, now, 0);
    lab.event(0);
    assert_eq!(client.events(1).await.0[0].time, None, "local");
    // `mono`
    lab.rings.write(|writer| writer.put(ARRAY + 48, 5));
    let mut number = 2;
    loop {
        lab.event(number);
        let event = client.events(1).await.0.remove(0);
        match event.time {
            Some(_) => break,
            // Only the events of the poll that meets the change may be of the clock before.
            None => assert!(number < 6, "{event:?}"),
        }
        number += 2;
    }
}
