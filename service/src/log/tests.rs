// SPDX-License-Identifier: Apache-2.0
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_observe::log::Start;
use patchbay_observe::testing::BASE;
use patchbay_proto::v1::{KernelLogRecord, KernelLogSource, StreamKernelLogResponse};
use tokio::sync::mpsc;
use tonic::Status;

use super::text::printable;
use super::*;
use crate::keys::registry::Look;
use crate::keys::{Keys, KeysConfig, KeysError, Registry};
use crate::testing::GuestLog;

const FOLLOW: Wanted = Wanted {
    max_level: 7,
    start: Start::Oldest,
    since: None,
    no_follow: false,
};
const DUMP: Wanted = Wanted {
    no_follow: true,
    ..FOLLOW
};

struct Lab {
    keys: Arc<Keys>,
    registry: Arc<Registry>,
    log: GuestLog,
}

impl Lab {
    fn new() -> Self {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
        let log = GuestLog::new(&guest);
        log.found_by(&registry);
        let keys = Keys::start(guest, Arc::clone(&registry), KeysConfig::default());
        let (keys, _) = keys.expect("a thread");
        Self {
            keys: Arc::new(keys),
            registry,
            log,
        }
    }

    async fn open(&self, wanted: Wanted) -> Client {
        let place = Place::find(&self.keys).expect("found");
        let stream = LogStream::begin(Arc::clone(&self.keys), place, wanted);
        let stream = stream.await.expect("readable");
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move { stream.tell(&sender).await });
        let mut client = Client(receiver);
        let first = client.next().await.expect("a message");
        assert_eq!(first.source(), KernelLogSource::Memory);
        assert!(first.records.is_empty());
        client
    }

    /// Returns the texts that a client gets that does not follow the log.
    async fn dump(&self, wanted: Wanted) -> Vec<String> {
        let mut client = self.open(wanted).await;
        let mut texts = vec![];
        while let Some(message) = client.next().await {
            texts.extend(message.records.into_iter().map(|record| record.text));
        }
        texts
    }
}

struct Client(mpsc::Receiver<Result<StreamKernelLogResponse, Status>>);

impl Client {
    async fn next(&mut self) -> Option<StreamKernelLogResponse> {
        let next = tokio::time::timeout(Duration::from_secs(30), self.0.recv());
        let next = next.await.expect("in time")?;
        Some(next.expect("no error"))
    }

    async fn records(&mut self) -> Vec<KernelLogRecord> {
        let message = self.next().await.expect("no end");
        assert!(!message.records.is_empty(), "{message:?}");
        message.records
    }
}

#[tokio::test]
async fn a_client_gets_the_log_and_what_is_printed_later() {
    let lab = Lab::new();
    lab.log.print(6, "before");
    let mut all = lab.open(FOLLOW).await;
    let mut end = lab
        .open(Wanted {
            start: Start::End,
            ..FOLLOW
        })
        .await;
    let records = all.records().await;
    assert_eq!((records.len(), &*records[0].text), (1, "before"));
    for number in 1..20_u64 {
        let text = format!("line {number}");
        lab.log.print(3, &text);
        for client in [&mut all, &mut end] {
            let records = client.records().await;
            assert_eq!((&*records[0].text, records[0].sequence), (&*text, number));
            assert_eq!((records[0].level, records.len()), (3, 1));
        }
    }
}

#[tokio::test]
async fn a_dump_ends_with_what_there_is_and_shows_an_unfinished_line() {
    let lab = Lab::new();
    assert_eq!(lab.dump(DUMP).await, Vec::<String>::new());
    for number in 0..40 {
        lab.log.print(6, &number.to_string());
    }
    lab.log.write(|writer| {
        let id = writer.reserve();
        writer.commit(id, 6 << 5, 7, b"a line that hangs ...");
    });
    let texts = lab.dump(DUMP).await;
    assert_eq!(texts.len(), 41);
    assert_eq!(texts[40], "a line that hangs ...");
}

#[tokio::test]
async fn a_dump_ends_although_the_guest_keeps_writing() {
    let lab = Lab::new();
    // A record with a number that no record reaches is the newest one when the dump begins.
    let (at, seq) = lab.log.write(|writer| {
        let seq = writer.seq;
        let id = writer.print(6, "forged");
        let at = writer.info(id);
        writer.put(at, u64::MAX);
        (at, seq)
    });
    let mut client = lab.open(DUMP).await;
    lab.log.write(|writer| writer.put(at, seq));
    let guest = async {
        loop {
            lab.log.print(6, "more");
            tokio::task::yield_now().await;
        }
    };
    let mut last = None;
    let dump = async {
        while let Some(message) = client.0.recv().await {
            last = Some(message.map(drop));
        }
    };
    let dumped = async {
        tokio::select! {
            () = dump => {}
            () = guest => {}
        }
    };
    let dumped = tokio::time::timeout(Duration::from_secs(20), dumped).await;
    dumped.expect("it ends");
    let error = last.expect("a message").expect_err("it is not complete");
    assert!(error.message().contains("not read to its end"), "{error}");
}

#[tokio::test]
async fn levels_and_times_and_numbers_select() {
    let lab = Lab::new();
    for number in 0..10_u8 {
        lab.log.write(|writer| {
            writer.time = u64::from(number) * 60_000_000_000;
            writer.print(number % 8, &number.to_string())
        });
    }
    let levels = Wanted {
        max_level: 3,
        ..DUMP
    };
    assert_eq!(lab.dump(levels).await, ["0", "1", "2", "3", "8", "9"]);
    let since = Wanted {
        since: Some(Duration::from_secs(150)),
        ..DUMP
    };
    assert_eq!(lab.dump(since).await, ["7", "8", "9"]);
    let from = Wanted {
        start: Start::Seq(8),
        ..DUMP
    };
    assert_eq!(lab.dump(from).await, ["8", "9"]);
}

/// While a client does not take its records, nothing more is read for it, and other clients are
/// served.
#[tokio::test]
async fn a_client_that_does_not_read_loses_exactly_what_was_overwritten() {
    let lab = Lab::new();
    lab.log.print(6, "0");
    let mut slow = lab.open(FOLLOW).await;
    // This fills the channel.
    while slow.0.is_empty() {
        tokio::task::yield_now().await;
    }
    let mut fast = lab.open(FOLLOW).await;
    assert_eq!(fast.records().await.len(), 1);
    for number in 1..500_u64 {
        lab.log.print(6, &number.to_string());
        let records = fast.records().await;
        assert_eq!((records.len(), records[0].sequence), (1, number));
    }
    let (mut next, mut lost) = (0, 0);
    while next < 500 {
        let message = slow.next().await.expect("no end");
        lost += message.lost;
        for record in message.records {
            next = record.sequence + 1;
            assert_eq!(record.text, record.sequence.to_string());
        }
    }
    assert_eq!(lost, 499 - 64, "the ring has 64 records");
}

#[tokio::test]
async fn another_kernel_at_the_same_address_begins_anew() {
    let lab = Lab::new();
    (0..10).for_each(|_| lab.log.print(6, "the first kernel"));
    let mut client = lab.open(FOLLOW).await;
    assert_eq!(client.records().await.len(), 10);
    let second = Lab::new();
    second.log.print(6, "the second kernel");
    let bytes = second.log.write(|writer| writer.memory().to_vec());
    lab.log.write(|writer| writer.put_bytes(BASE, &bytes));
    let message = client.next().await.expect("no end");
    assert!(message.restarted);
    assert_eq!(message.records[0].text, "the second kernel");
}

#[tokio::test]
async fn another_kernel_at_another_address_is_found() {
    const ELSEWHERE: u64 = BASE + 0x80;
    let lab = Lab::new();
    lab.log.print(6, "a kernel");
    let mut client = lab.open(FOLLOW).await;
    assert_eq!(client.records().await.len(), 1);
    let mut found = lab.registry.find_log(Look::Known).expect("found");
    found.log.source.prb = ELSEWHERE;
    lab.registry.remember_log(found);
    lab.log.write(|writer| {
        let ring = writer.ring();
        writer.put(ELSEWHERE, ring);
        writer.put(BASE, 0);
    });
    assert!(client.next().await.expect("no end").restarted);
    assert_eq!(client.records().await[0].text, "a kernel");
}

#[tokio::test]
async fn a_guest_whose_log_is_not_found_says_why() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[]);
    let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
    let error = Place::find(&keys).expect_err("there is none");
    assert!(
        matches!(error, KeysError::NotRegistered { .. }),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("not found in its memory"),
        "{error}"
    );
    let lab = Lab::new();
    lab.log.write(|writer| writer.put(BASE, 0));
    let place = Place::find(&lab.keys).expect("where it was");
    let Err(error) = LogStream::begin(Arc::clone(&lab.keys), place, DUMP).await else {
        panic!("it cannot be read");
    };
    assert!(error.to_string().contains("cannot be read"), "{error}");
}

#[test]
fn texts_are_printable_and_bounded() {
    assert_eq!(
        printable("a\tb\nc \u{e9} \\".as_bytes()),
        "a\tb\nc \u{e9} \\"
    );
    assert_eq!(
        printable(b"\x1b[2J\x00\x7f\xff\xc3"),
        r"\x1b[2J\x00\x7f\xff\xc3"
    );
    assert_eq!(printable("\u{9b}".as_bytes()), r"\xc2\x9b");
    assert_eq!(printable(&[b'x'; 100_000]).len(), 4096);
    assert_eq!(first_line(b"a\tb\x1b[2J\nanother line"), r"a b\x1b[2J");
    assert_eq!(first_line("\u{e9}".repeat(400).as_bytes()).len(), 512);
    assert_eq!(first_line(&[0xff; 4000]).len(), 512);
}
