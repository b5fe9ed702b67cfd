// SPDX-License-Identifier: Apache-2.0
//! Events that are read in the guest's memory, without an agent.

use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::{StreamTracepointEventsResponse, TraceEvent, TraceSource};
use tokio::sync::mpsc;
use tonic::Status;

use super::super::link::AgentLink;
use super::super::memory::{MemoryStream, Wanted};
use super::super::{TraceError, select};
use crate::keys::{Keys, KeysConfig, Registry};
use crate::testing::GuestRings;

struct Lab {
    keys: Arc<Keys>,
    rings: GuestRings,
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
        let stream = MemoryStream::begin(Arc::clone(&self.keys), link, wanted).await?;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move { stream.tell(&sender).await });
        let mut client = Client(receiver);
        let first = client.next().await;
        assert_eq!(first.source(), TraceSource::Memory);
        assert!(first.events.is_empty());
        Ok(client)
    }
}

/// Returns the payload of an event `test:numbered`.
fn numbered(number: u64) -> Vec<u8> {
    let mut payload = vec![7, 0, 0, 0, 42, 0, 0, 0];
    payload.extend_from_slice(&number.to_le_bytes());
    payload.extend_from_slice(b"a task\0\0\0\0\0\0\0\0\0\0");
    payload.extend_from_slice(&(5_u32 << 16 | 40).to_le_bytes());
    payload.extend_from_slice(b"abc\0text\0\0\0\0");
    payload
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
    }
}

struct Client(mpsc::Receiver<Result<StreamTracepointEventsResponse, Status>>);

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

/// While a client does not take its events, nothing more is read for it, and other clients are
/// served.
#[tokio::test]
async fn a_client_that_does_not_read_loses_exactly_what_was_overwritten() {
    let lab = Lab::new();
    let mut slow = lab.open(wanted(&[], true)).await.expect("found");
    lab.event(0);
    while slow.0.is_empty() {
        tokio::task::yield_now().await;
    }
    let mut fast = lab.open(wanted(&[], false)).await.expect("found");
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
        text.contains("no tracefs instance \"bar\"; it has [\"foo\"]"),
        "{text}"
    );
    assert_eq!(error.reason(), "INVALID_ARGUMENT");

    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
    let rings = GuestRings::new(&guest);
    let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    let unknown = Lab {
        keys: Arc::new(keys),
        rings,
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
