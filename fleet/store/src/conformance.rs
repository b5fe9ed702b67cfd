// SPDX-License-Identifier: Apache-2.0
//! Tests what every store must do. An implementation calls [`check_all`] with a function that makes
//! a fresh store for each test.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{Change, Expected, Fence, MAX_TRANSACTION_OPS, Store, StoreError, Transaction, Watch};

/// The timeout of waits, which no correct run reaches.
const PATIENCE: Duration = Duration::from_secs(60);
/// The shortest lease that every store can grant.
const SHORT: Duration = Duration::from_secs(1);

type Shared = Arc<dyn Store>;

/// Runs every test, each with a fresh store.
pub async fn check_all<F: Future<Output = Shared>>(fresh: impl Fn() -> F) {
    reads_what_was_written(fresh().await).await;
    ranges_are_prefixes_in_order(fresh().await).await;
    a_transaction_is_whole_or_nothing(fresh().await).await;
    conditions_compare_revisions(fresh().await).await;
    one_of_many_wins_a_race(fresh().await).await;
    a_fence_stops_the_leader_of_before(fresh().await).await;
    malformed_transactions_are_refused(fresh().await).await;
    a_watch_continues_a_snapshot(fresh().await).await;
    a_watch_waits_and_sees_deletions(fresh().await).await;
    a_watch_that_was_lost_continues(fresh().await).await;
    a_watch_of_compacted_changes_ends(fresh().await).await;
    an_expired_lease_takes_its_keys(fresh().await).await;
    a_renewed_lease_lives(fresh().await).await;
    a_revoked_lease_takes_its_keys(fresh().await).await;
    a_put_moves_a_key_to_another_lease(fresh().await).await;
}

fn put(key: &str, value: &str) -> Transaction {
    Transaction::new().put(key, value)
}

async fn text(store: &Shared, key: &str) -> Option<String> {
    let entry = store.get(key).await.expect("readable");
    entry.map(|entry| String::from_utf8(entry.value).expect("text"))
}

async fn next(watch: &mut Box<dyn Watch>) -> Result<Vec<Change>, StoreError> {
    let next = tokio::time::timeout(PATIENCE, watch.next());
    next.await.expect("a change in time")
}

/// Returns the keys of the next revision, with a `-` before those that were deleted.
async fn next_keys(watch: &mut Box<dyn Watch>) -> Vec<String> {
    let changes = next(watch).await.expect("changes");
    let revision = changes[0].revision();
    assert!(changes.iter().all(|change| change.revision() == revision));
    let name = |change: &Change| match change {
        Change::Put(entry) => entry.key.clone(),
        Change::Deleted { key, .. } => format!("-{key}"),
    };
    changes.iter().map(name).collect()
}

async fn reads_what_was_written(store: Shared) {
    assert_eq!(store.get("a").await, Ok(None));
    let first = store.commit(put("a", "1")).await.expect("written");
    let second = store.commit(put("a", "2")).await.expect("written");
    assert!(second > first);
    let entry = store.get("a").await.expect("readable").expect("there");
    assert_eq!((entry.created, entry.modified), (first, second));
    assert_eq!(entry.value, b"2");
    store
        .commit(Transaction::new().delete("a"))
        .await
        .expect("deleted");
    assert_eq!(store.get("a").await, Ok(None));
    let again = store.commit(put("a", "3")).await.expect("written");
    let entry = store.get("a").await.expect("readable").expect("there");
    assert_eq!(entry.created, again, "a key that was deleted is a new one");
}

async fn ranges_are_prefixes_in_order(store: Shared) {
    for key in ["b/2", "b/10", "b", "c/1", "a/9", "b0"] {
        store.commit(put(key, key)).await.expect("written");
    }
    let snapshot = store.range("b/").await.expect("readable");
    let keys: Vec<_> = snapshot
        .entries
        .iter()
        .map(|entry| &entry.key[..])
        .collect();
    assert_eq!(keys, ["b/10", "b/2"]);
    let none = store.range("d/").await.expect("readable");
    assert_eq!(none.entries, []);
    assert_eq!(none.revision, snapshot.revision);
}

async fn a_transaction_is_whole_or_nothing(store: Shared) {
    let all = put("a", "1").put("b", "1").delete("c");
    store.commit(all).await.expect("written");
    let (a, b) = (store.get("a").await, store.get("b").await);
    let modified = |entry: Result<Option<super::Entry>, _>| entry.unwrap().unwrap().modified;
    assert_eq!(modified(a), modified(b), "one revision");
    let refused = put("a", "2").put("d", "2").expect("b", Expected::Absent);
    assert_eq!(store.commit(refused).await, Err(StoreError::Conflict));
    assert_eq!(text(&store, "a").await.as_deref(), Some("1"));
    assert_eq!(text(&store, "d").await, None);
}

async fn conditions_compare_revisions(store: Shared) {
    let absent = || put("a", "1").expect("a", Expected::Absent);
    let created = store.commit(absent()).await.expect("absent");
    assert_eq!(store.commit(absent()).await, Err(StoreError::Conflict));
    let at = |expected| put("a", "2").expect("a", expected);
    let modified = store
        .commit(at(Expected::ModifiedAt(created)))
        .await
        .expect("unchanged");
    for refused in [
        Expected::ModifiedAt(created),
        Expected::CreatedAt(modified),
        Expected::Absent,
    ] {
        assert_eq!(store.commit(at(refused)).await, Err(StoreError::Conflict));
    }
    store
        .commit(at(Expected::CreatedAt(created)))
        .await
        .expect("the same key");
    let gone = put("b", "1").expect("b", Expected::ModifiedAt(created));
    assert_eq!(store.commit(gone).await, Err(StoreError::Conflict));
}

async fn one_of_many_wins_a_race(store: Shared) {
    let tasks: Vec<_> = (0..16)
        .map(|index: u32| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let request = put("leader", &index.to_string()).expect("leader", Expected::Absent);
                store.commit(request).await.is_ok()
            })
        })
        .collect();
    let mut winners = 0;
    for task in tasks {
        winners += u32::from(task.await.expect("ends"));
    }
    assert_eq!(winners, 1);
}

async fn a_fence_stops_the_leader_of_before(store: Shared) {
    let lead = |name: &str| put("leader", name).expect("leader", Expected::Absent);
    let fence = |created| Fence {
        key: "leader".to_owned(),
        created,
    };
    let first = fence(store.commit(lead("one")).await.expect("elected"));
    store
        .commit(put("a", "1").fenced(&first))
        .await
        .expect("leads");
    store
        .commit(Transaction::new().delete("leader"))
        .await
        .expect("gone");
    let late = store.commit(put("a", "2").fenced(&first)).await;
    assert_eq!(late, Err(StoreError::Conflict), "nobody leads");
    let second = fence(store.commit(lead("two")).await.expect("elected"));
    let late = store.commit(put("a", "3").fenced(&first)).await;
    assert_eq!(late, Err(StoreError::Conflict), "another leads");
    store
        .commit(put("a", "4").fenced(&second))
        .await
        .expect("leads");
    assert_eq!(text(&store, "a").await.as_deref(), Some("4"));
}

async fn malformed_transactions_are_refused(store: Shared) {
    let twice = store.commit(put("a", "1").delete("a")).await;
    assert!(matches!(twice, Err(StoreError::Invalid(_))), "{twice:?}");
    let many = |count: usize| {
        (0..count).fold(Transaction::new(), |all, index| {
            all.put(format!("k{index}"), "1")
        })
    };
    let large = store.commit(many(MAX_TRANSACTION_OPS + 1)).await;
    assert!(matches!(large, Err(StoreError::Invalid(_))), "{large:?}");
    store
        .commit(many(MAX_TRANSACTION_OPS))
        .await
        .expect("the most");
}

async fn a_watch_continues_a_snapshot(store: Shared) {
    store.commit(put("w/a", "1")).await.expect("written");
    let snapshot = store.range("w/").await.expect("readable");
    store.commit(put("other", "1")).await.expect("written");
    store
        .commit(put("w/b", "1").put("w/c", "1"))
        .await
        .expect("written");
    store.commit(put("w/a", "2")).await.expect("written");
    let from = snapshot.revision + 1;
    let mut watch = store.watch("w/", from).await.expect("watched");
    assert_eq!(next_keys(&mut watch).await, ["w/b", "w/c"]);
    assert_eq!(next_keys(&mut watch).await, ["w/a"]);
}

async fn a_watch_waits_and_sees_deletions(store: Shared) {
    let revision = store.range("").await.expect("readable").revision;
    let mut watch = store.watch("w/", revision + 1).await.expect("watched");
    let waiting = tokio::spawn(async move { (next_keys(&mut watch).await, watch) });
    store.commit(put("other", "1")).await.expect("written");
    store.commit(put("w/a", "1")).await.expect("written");
    let (keys, mut watch) = waiting.await.expect("ends");
    assert_eq!(keys, ["w/a"]);
    // Deleting a key that does not exist is not a change.
    store
        .commit(Transaction::new().delete("w/z"))
        .await
        .expect("nothing");
    store
        .commit(Transaction::new().delete("w/a"))
        .await
        .expect("deleted");
    assert_eq!(next_keys(&mut watch).await, ["-w/a"]);
}

async fn a_watch_that_was_lost_continues(store: Shared) {
    let from = store.range("").await.expect("readable").revision + 1;
    for key in ["w/1", "w/2", "w/3"] {
        store.commit(put(key, "1")).await.expect("written");
    }
    let mut watch = store.watch("w/", from).await.expect("watched");
    let seen = next(&mut watch).await.expect("changes")[0].revision();
    drop(watch);
    let mut watch = store.watch("w/", seen + 1).await.expect("watched");
    assert_eq!(next_keys(&mut watch).await, ["w/2"]);
    assert_eq!(next_keys(&mut watch).await, ["w/3"]);
}

async fn a_watch_of_compacted_changes_ends(store: Shared) {
    let first = store.commit(put("w/a", "1")).await.expect("written");
    let second = store.commit(put("w/a", "2")).await.expect("written");
    store.compact(second).await.expect("compacted");
    let mut late = store.watch("w/", first).await.expect("watched");
    let ended = next(&mut late).await;
    assert!(
        matches!(ended, Err(StoreError::Compacted { .. })),
        "{ended:?}"
    );
    let mut in_time = store.watch("w/", second).await.expect("watched");
    assert_eq!(next_keys(&mut in_time).await, ["w/a"]);
    assert_eq!(text(&store, "w/a").await.as_deref(), Some("2"));
}

async fn an_expired_lease_takes_its_keys(store: Shared) {
    let lease = store.grant(SHORT).await.expect("granted");
    let both = Transaction::new()
        .put_leased("l/a", "1", lease)
        .put_leased("l/b", "1", lease)
        .put("l/stays", "1");
    let revision = store.commit(both).await.expect("written");
    let mut watch = store.watch("l/", revision + 1).await.expect("watched");
    assert_eq!(next_keys(&mut watch).await, ["-l/a", "-l/b"]);
    assert!(text(&store, "l/stays").await.is_some());
    let expired = |result| matches!(result, Err(StoreError::LeaseExpired(_)));
    assert!(expired(store.renew(lease).await));
    let late = Transaction::new().put_leased("l/c", "1", lease);
    assert!(expired(store.commit(late).await.map(|_| ())));
}

async fn a_renewed_lease_lives(store: Shared) {
    let renewed = store.grant(SHORT).await.expect("granted");
    let witness = store.grant(SHORT * 3).await.expect("granted");
    let both = Transaction::new()
        .put_leased("l/renewed", "1", renewed)
        .put_leased("l/witness", "1", witness);
    let revision = store.commit(both).await.expect("written");
    let mut watch = store.watch("l/", revision + 1).await.expect("watched");
    // The lease of the witness is never renewed. Without renewals, the other lease would expire
    // before it.
    let mut beat = tokio::time::interval(SHORT / 10);
    let first = loop {
        tokio::select! {
            keys = next_keys(&mut watch) => break keys,
            _ = beat.tick() => store.renew(renewed).await.expect("lives"),
        }
    };
    assert_eq!(first, ["-l/witness"]);
    assert_eq!(next_keys(&mut watch).await, ["-l/renewed"]);
}

async fn a_revoked_lease_takes_its_keys(store: Shared) {
    let lease = store.grant(SHORT * 3600).await.expect("granted");
    let leased = Transaction::new().put_leased("l/a", "1", lease);
    store.commit(leased).await.expect("written");
    store.revoke(lease).await.expect("revoked");
    assert_eq!(text(&store, "l/a").await, None);
    store.revoke(lease).await.expect("idempotent");
    let renewed = store.renew(lease).await;
    assert!(
        matches!(renewed, Err(StoreError::LeaseExpired(_))),
        "{renewed:?}"
    );
}

async fn a_put_moves_a_key_to_another_lease(store: Shared) {
    let lease = store.grant(SHORT * 3600).await.expect("granted");
    let leased = Transaction::new()
        .put_leased("l/a", "1", lease)
        .put_leased("l/b", "1", lease);
    store.commit(leased).await.expect("written");
    store.commit(put("l/a", "2")).await.expect("written");
    store.revoke(lease).await.expect("revoked");
    assert_eq!(text(&store, "l/a").await.as_deref(), Some("2"));
    assert_eq!(text(&store, "l/b").await, None);
}
