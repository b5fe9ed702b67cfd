// SPDX-License-Identifier: Apache-2.0
//! Tests what every store must do. An implementation calls [`check_all`] with a function that makes
//! a fresh store for each test.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Change, Entry, Expected, Fence, Layer, MAX_TRANSACTION_BYTES, MAX_TRANSACTION_OPS, Revision,
    Store, StoreError, Transaction, Watch, Write, commit_all, folders,
};

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
    transactions_of_many_bytes_are_taken(fresh().await).await;
    writes_are_split_by_number_and_bytes(fresh().await).await;
    a_fence_stops_every_part_of_writes_that_are_split(fresh().await).await;
    a_range_of_many_keys_is_whole(fresh().await).await;
    folders_are_listed_without_their_keys(fresh().await).await;
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
    let modified = |entry: Result<Option<Entry>, _>| entry.unwrap().unwrap().modified;
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

/// Returns a transaction with this many puts and this size.
pub fn of_size(puts: usize, bytes: usize) -> Transaction {
    let key = |index| format!("large/{index:03}");
    let empty = (0..puts).fold(Transaction::new(), |all, index| all.put(key(index), ""));
    let values = bytes - empty.bytes();
    let value = |index| vec![7; values / puts + usize::from(index < values % puts)];
    (0..puts).fold(Transaction::new(), |all, index| {
        all.put(key(index), value(index))
    })
}

async fn transactions_of_many_bytes_are_taken(store: Shared) {
    for puts in [1, 2, MAX_TRANSACTION_OPS] {
        let most = of_size(puts, MAX_TRANSACTION_BYTES);
        store.commit(most).await.expect("the most");
        let kept = store.range("large/").await.expect("readable");
        assert_eq!(kept.entries.len(), puts);
        let delete = |all: Transaction, index| all.delete(format!("large/{index:03}"));
        let all = (0..puts).fold(Transaction::new(), delete);
        store.commit(all).await.expect("deleted");
    }
}

async fn leader(store: &Shared) -> Fence {
    let key = "leader".to_owned();
    let created = store.commit(put(&key, "one")).await.expect("elected");
    Fence { key, created }
}

fn puts(prefix: &str, sizes: impl IntoIterator<Item = usize>) -> Vec<Write> {
    let put = |(index, size)| Write::Put {
        key: format!("{prefix}{index:04}"),
        value: vec![7; size],
        lease: None,
    };
    sizes.into_iter().enumerate().map(put).collect()
}

async fn writes_are_split_by_number_and_bytes(store: Shared) {
    let fence = leader(&store).await;
    for (prefix, sizes, transactions) in [
        ("none/", vec![], 0),
        ("small/", vec![1; 300], 3),
        // 128 of these are over etcd's limit, though they are few enough for one transaction.
        ("large/", vec![15_000; 300], 4),
    ] {
        let writes = puts(prefix, sizes);
        let before = store.range("").await.expect("readable").revision;
        commit_all(store.as_ref(), &fence, &writes)
            .await
            .expect("written");
        let after = store.range(prefix).await.expect("readable");
        assert_eq!(after.entries.len(), writes.len());
        assert_eq!(after.revision - before, transactions, "{prefix}");
    }
    // The largest value that fits takes a transaction by itself.
    let fenced = Transaction::new().fenced(&fence).bytes();
    let most = MAX_TRANSACTION_BYTES - fenced - puts("most/", [0])[0].bytes();
    let writes = puts("most/", [1, most, 1]);
    commit_all(store.as_ref(), &fence, &writes)
        .await
        .expect("written");
    let kept = store.range("most/").await.expect("readable");
    assert_eq!(kept.entries.len(), 3);
    // The store itself decides about one that is larger.
    let over = commit_all(store.as_ref(), &fence, &puts("over/", [1, most + 1, 1])).await;
    let kept = store.range("over/").await.expect("readable").entries.len();
    match &over {
        Ok(()) => assert_eq!(kept, 3),
        Err(StoreError::TooLarge { key, .. }) if key == "over/0001" => assert_eq!(kept, 1),
        Err(error) => panic!("{error}"),
    }
}

/// Checks that another leader stops also the later parts of writes that are split.
async fn a_fence_stops_every_part_of_writes_that_are_split(store: Shared) {
    let fence = leader(&store).await;
    let deposing = Deposing {
        store: Arc::clone(&store),
        commits: AtomicUsize::new(0),
    };
    let refused = commit_all(&deposing, &fence, &puts("parts/", vec![1; 300])).await;
    assert_eq!(refused, Err(StoreError::Conflict));
    let kept = store.range("parts/").await.expect("readable");
    assert_eq!(kept.entries.len(), MAX_TRANSACTION_OPS, "the first part");
}

/// A store whose leader loses the leadership after the first transaction.
struct Deposing {
    store: Shared,
    commits: AtomicUsize,
}

#[async_trait]
impl Layer for Deposing {
    fn behind(&self) -> &dyn Store {
        self.store.as_ref()
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        let revision = self.store.commit(transaction).await?;
        if self.commits.fetch_add(1, Ordering::Relaxed) == 0 {
            let gone = Transaction::new().delete("leader");
            self.store.commit(gone).await?;
        }
        Ok(revision)
    }
}

async fn a_range_of_many_keys_is_whole(store: Shared) {
    let fence = leader(&store).await;
    let writes = puts("many/", vec![1; 3 * MAX_TRANSACTION_OPS]);
    commit_all(store.as_ref(), &fence, &writes)
        .await
        .expect("written");
    let snapshot = store.range("many/").await.expect("readable");
    let keys: Vec<_> = snapshot.entries.iter().map(|entry| &*entry.key).collect();
    let expected: Vec<_> = writes.iter().map(Write::key).collect();
    assert_eq!(keys, expected);
}

async fn folders_are_listed_without_their_keys(store: Shared) {
    for key in [
        "f/a/1", "f/a/2", "f/a-b/1", "f/a0/x/y", "f/notes", "f/z", "f0/b/1", "e/b/1",
    ] {
        store.commit(put(key, key)).await.expect("written");
    }
    let names = folders(store.as_ref(), "f/").await.expect("listed");
    assert_eq!(names, ["a-b", "a", "a0"]);
    assert_eq!(store.next_key("f/", "").await, Ok(Some("f/a-b/1".into())));
    assert_eq!(
        store.next_key("f/", "f/b").await,
        Ok(Some("f/notes".into()))
    );
    assert_eq!(store.next_key("f/", "f/zz").await, Ok(None));
    assert_eq!(store.next_key("f/", "g").await, Ok(None));
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
