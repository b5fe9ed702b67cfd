// SPDX-License-Identifier: Apache-2.0
//! Tests watches: from a past revision, from a compacted revision, and with clients that read too
//! slowly.

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use patchbay_proto::v1::key_event::Kind;
use patchbay_service::keys::Limits;
use tokio_stream::StreamExt;
use tonic::{Code, Streaming};

use super::support::{PATIENCE, Served, Setup, assert_refused, every_kind, request};

async fn watch(
    served: &Served,
    start_revision: u64,
    patterns: &[&str],
) -> Streaming<v1::WatchStaticKeysResponse> {
    let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
    let request = v1::WatchStaticKeysRequest {
        start_revision,
        incarnation: served.keys.incarnation().to_string(),
        patterns,
        ..Default::default()
    };
    served
        .client()
        .watch_static_keys(request)
        .await
        .expect("well-formed")
        .into_inner()
}

async fn next(stream: &mut Streaming<v1::WatchStaticKeysResponse>) -> v1::WatchStaticKeysResponse {
    let message = tokio::time::timeout(PATIENCE, stream.next())
        .await
        .expect("in time");
    message.expect("goes on").expect("no error")
}

#[tokio::test]
async fn a_watch_begins_at_once_and_tells_each_change() {
    let served = Served::start().await;
    let mut stream = watch(&served, 0, &[]).await;
    let begin = next(&mut stream).await;
    assert!(begin.events.is_empty());
    let mut update = request(&[("alpha", KeyOp::Inc), ("beta", KeyOp::Enable)]);
    update.reason = "why".into();
    update.request_id = "id".into();
    let answer = served.update(update).await.expect("ref keys");
    let change = next(&mut stream).await;
    assert_eq!(change.revision, begin.revision + 1);
    assert_eq!(change.revision, answer.revision);
    assert!(change.time.is_some());
    assert_eq!(change.events.len(), 2, "one transaction, one revision");
    let event = &change.events[0];
    assert_eq!(
        (event.kind(), event.name.as_str(), event.count),
        (Kind::Changed, "alpha", 1)
    );
    assert_eq!(
        (event.reason.as_str(), event.request_id.as_str()),
        ("why", "id")
    );
    // Nothing changes, so the watch reports nothing.
    served.op("beta", KeyOp::Enable).await.expect("on already");
    served.op("alpha", KeyOp::Dec).await.expect("own");
    assert_eq!(next(&mut stream).await.events[0].count, 0);
}

#[tokio::test]
async fn a_watch_from_the_past_misses_nothing_after_a_list() {
    let served = Served::start().await;
    let listed = served
        .list(v1::ListStaticKeysRequest::default())
        .await
        .expect("registered")
        .revision;
    for _ in 0..3 {
        served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    }
    let mut stream = watch(&served, listed + 1, &[]).await;
    assert_eq!(next(&mut stream).await.revision, listed);
    for count in 1..=3 {
        let change = next(&mut stream).await;
        assert_eq!(
            (change.revision, change.events[0].count),
            (listed + u64::try_from(count).expect("small"), count)
        );
    }
}

#[tokio::test]
async fn modules_registrations_and_quarantines_are_told() {
    let served = Served::start().await;
    let mut stream = watch(&served, 0, &["none_of_them"]).await;
    next(&mut stream).await;
    let mut told = async || {
        let change = next(&mut stream).await;
        (change.events[0].kind(), change.events[0].module.clone())
    };
    assert_eq!(
        served.guest.add_module("ext4", &[TestKey::new("own", 1)]),
        0
    );
    assert_eq!(told().await, (Kind::Added, "ext4".to_owned()));
    assert_eq!(served.guest.delete_module("ext4"), 0);
    assert_eq!(told().await, (Kind::Removed, "ext4".to_owned()));
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(told().await, (Kind::Removed, String::new()));
    assert_eq!(
        served.guest.unregister(),
        0,
        "idempotent, and not told twice"
    );
    assert_eq!(served.guest.register(&every_kind()), 0);
    assert_eq!(told().await, (Kind::Added, String::new()));

    let mut stream = watch(&served, 0, &["alpha"]).await;
    next(&mut stream).await;
    served
        .guest
        .write(served.guest.sites("alpha")[0], &[1, 2, 3, 4, 5]);
    served
        .guest
        .set_gate(patchbay_guest::testing::Gate::SystemState, 2);
    assert_refused(
        served.op("alpha", KeyOp::Inc).await,
        Code::DataLoss,
        "FOREIGN_BYTES",
    );
    let event = next(&mut stream).await.events.remove(0);
    assert_eq!(event.kind(), Kind::Quarantined);
    let why = event.quarantine.expect("says why");
    assert_eq!(why.cause(), v1::quarantine::Cause::ForeignBytes);
    assert!(why.message.contains("01 02 03 04 05"), "{why:?}");
}

#[tokio::test]
async fn patterns_filter_changes() {
    let served = Served::start().await;
    let mut stream = watch(&served, 0, &["b*"]).await;
    next(&mut stream).await;
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    served
        .update(request(&[("alpha", KeyOp::Inc), ("beta", KeyOp::Inc)]))
        .await
        .expect("ref keys");
    let change = next(&mut stream).await;
    assert_eq!(
        change
            .events
            .iter()
            .map(|event| event.name.as_str())
            .collect::<Vec<_>>(),
        ["beta"]
    );
    let bad = v1::WatchStaticKeysRequest {
        start_revision: 0,
        patterns: vec!["[".into()],
        ..Default::default()
    };
    let refused = served.client().watch_static_keys(bad).await;
    assert_refused(
        refused.map(|_| ()),
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
    );
}

#[tokio::test]
async fn compaction_is_told_with_what_is_left() {
    let limits = Limits {
        revisions: 2,
        events: 100,
    };
    let served = Served::with(Setup {
        keys: Some(every_kind()),
        limits,
        ..Setup::default()
    })
    .await;
    for _ in 0..4 {
        served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    }
    let latest = served.keys.revision();
    let from = async |start_revision| {
        let request = v1::WatchStaticKeysRequest {
            start_revision,
            incarnation: served.keys.incarnation().to_string(),
            ..Default::default()
        };
        served.client().watch_static_keys(request).await.map(|_| ())
    };
    let (_, metadata) = assert_refused(from(1).await, Code::OutOfRange, "REVISION_COMPACTED");
    assert_eq!(metadata["oldest_revision"], (latest - 1).to_string());
    from(latest - 1).await.expect("kept");
    from(latest + 1).await.expect("the next");
    assert_refused(
        from(latest + 2).await,
        Code::OutOfRange,
        "REVISION_IN_FUTURE",
    );
}

/// Checks that a revision of another incarnation is refused, because the same number belongs to an
/// unrelated change there.
#[tokio::test]
async fn a_revision_belongs_to_an_incarnation() {
    let served = Served::start().await;
    let incarnation = served.keys.incarnation().to_string();
    let from = async |start_revision, incarnation: &str| {
        let request = v1::WatchStaticKeysRequest {
            start_revision,
            incarnation: incarnation.to_owned(),
            ..Default::default()
        };
        served.client().watch_static_keys(request).await.map(drop)
    };
    from(1, &incarnation).await.expect("kept");
    from(0, "").await.expect("from now on");
    let (message, _) = assert_refused(from(1, "").await, Code::InvalidArgument, "INVALID_ARGUMENT");
    assert!(message.contains("start_revision 1"), "{message}");
    let other = Served::start().await.keys.incarnation().to_string();
    for (start, given) in [
        (1, other.as_str()),
        (0, &other),
        (999, "é"),
        (1, &incarnation[1..]),
    ] {
        let refused = from(start, given).await;
        let (message, _) = assert_refused(refused, Code::OutOfRange, "INCARNATION_CHANGED");
        assert!(message.contains(&incarnation), "{message}");
    }
}

/// Checks a client that does not read. Once the transport's windows and buffers are full, the
/// history advances without it, and its watch ends with the reason.
#[tokio::test]
async fn a_slow_watcher_is_dropped_with_the_reason() {
    const KEYS: usize = 200;
    const CHANGES: usize = 60;
    let keys: Vec<TestKey> = (0..KEYS)
        .map(|n| TestKey::new(&format!("key{n}"), 0))
        .collect();
    let limits = Limits {
        revisions: 4,
        events: 1 << 20,
    };
    let served = Served::with(Setup {
        keys: Some(keys.clone()),
        limits,
        ..Setup::default()
    })
    .await;
    let channel = super::support::connect_with_small_windows(&served.socket()).await;
    let mut client = v1::static_keys_service_client::StaticKeysServiceClient::new(channel);
    let watching = v1::WatchStaticKeysRequest::default();
    let mut stream = client
        .watch_static_keys(watching)
        .await
        .expect("well-formed")
        .into_inner();
    next(&mut stream).await;
    // Each response has about 60 KiB.
    for change in 0..CHANGES {
        let op = if change % 2 == 0 {
            KeyOp::Enable
        } else {
            KeyOp::Disable
        };
        let updates: Vec<_> = keys.iter().map(|key| (key.name.as_str(), op)).collect();
        let update = v1::UpdateStaticKeysRequest {
            reason: "x".repeat(256),
            ..request(&updates)
        };
        served.update(update).await.expect("ref keys");
    }
    let mut seen = 0;
    let error = loop {
        let message = tokio::time::timeout(PATIENCE, stream.next())
            .await
            .expect("in time");
        match message.expect("an error ends it") {
            Ok(_) => seen += 1,
            Err(status) => break status,
        }
    };
    assert!(seen < CHANGES, "some were missed");
    let (message, _) = assert_refused(
        Err::<(), _>(error),
        Code::ResourceExhausted,
        "WATCH_TOO_SLOW",
    );
    assert!(message.contains("list the keys"), "{message}");
}
