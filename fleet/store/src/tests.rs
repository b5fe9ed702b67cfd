// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;
use std::time::Duration;

use super::*;

#[tokio::test]
async fn the_embedded_store_conforms() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let count = std::cell::Cell::new(0);
    conformance::check_all(async || {
        count.set(count.get() + 1);
        let path = folder.path().join(format!("{}.redb", count.get()));
        Arc::new(EmbeddedStore::open(&path).expect("opens")) as Arc<dyn Store>
    })
    .await;
}

/// Checks that the file takes what etcd does not, so that records of any earlier size are saved.
#[tokio::test]
async fn the_embedded_store_has_no_limit_in_bytes() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let store = EmbeddedStore::open(&folder.path().join("fleet.redb")).expect("opens");
    for puts in [1, 2] {
        let large = conformance::of_size(puts, 2 * MAX_TRANSACTION_BYTES);
        store.commit(large).await.expect("written");
    }
    let kept = store.range("large/").await.expect("readable");
    assert_eq!(kept.entries.len(), 2);
}

#[tokio::test]
async fn the_embedded_store_survives_a_restart() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.redb");
    let store = EmbeddedStore::open(&path).expect("opens");
    let revision = store
        .commit(Transaction::new().put("a", "1"))
        .await
        .expect("written");
    let lease = store.grant(Duration::from_secs(60)).await.expect("granted");
    let leased = Transaction::new().put_leased("b", "1", lease);
    store.commit(leased).await.expect("written");
    drop(store);
    let store = EmbeddedStore::open(&path).expect("opens again");
    let entry = store.get("a").await.expect("readable").expect("kept");
    assert_eq!(entry.created, revision);
    // The process that held the lease has ended.
    assert_eq!(store.get("b").await.expect("readable"), None);
    assert_eq!(
        store.renew(lease).await,
        Err(StoreError::LeaseExpired(lease.0))
    );
    let mut watch = store.watch("", revision).await.expect("watched");
    assert_eq!(watch.next().await.expect("history")[0].key(), "a");
}

#[tokio::test]
async fn a_file_that_is_open_is_not_opened_again() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.redb");
    let _store = EmbeddedStore::open(&path).expect("opens");
    let second = EmbeddedStore::open(&path).map(|_| ());
    assert!(
        matches!(second, Err(StoreError::Unavailable(_))),
        "{second:?}"
    );
}

/// Checks that opening the file fails and does not change it.
fn assert_kept(path: &std::path::Path) -> StoreError {
    let before = std::fs::read(path).expect("readable");
    let error = EmbeddedStore::open(path).map(|_| ()).expect_err("refused");
    assert_eq!(
        std::fs::read(path).expect("readable"),
        before,
        "the file was changed"
    );
    error
}

#[tokio::test]
async fn a_damaged_file_is_kept() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.redb");
    for content in [
        &b"not a database"[..],
        &[0; 8192],
        b"redb\x1A\x0A\xA9\x0D\x0A",
    ] {
        std::fs::write(&path, content).expect("writable");
        let error = assert_kept(&path);
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_path_without_a_file_is_not_called_damaged() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for path in [
        folder.path().to_owned(),
        folder.path().join("none/fleet.redb"),
    ] {
        let error = EmbeddedStore::open(&path).map(|_| ()).expect_err("refused");
        assert!(matches!(error, StoreError::Unopened { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_truncated_file_is_kept() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.redb");
    let store = EmbeddedStore::open(&path).expect("opens");
    store
        .commit(Transaction::new().put("a", vec![7; 100_000]))
        .await
        .expect("written");
    drop(store);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("opens");
    file.set_len(8192).expect("truncated");
    let error = assert_kept(&path);
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
}

#[tokio::test]
async fn a_file_of_a_newer_version_is_kept() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("fleet.redb");
    drop(EmbeddedStore::open(&path).expect("opens"));
    let meta = redb::TableDefinition::<&str, u64>::new("meta");
    let database = redb::Database::open(&path).expect("opens");
    let transaction = database.begin_write().expect("begins");
    let mut table = transaction.open_table(meta).expect("opens");
    table.insert("format", 2).expect("inserted");
    drop(table);
    transaction.commit().expect("committed");
    drop(database);
    let error = assert_kept(&path);
    assert!(
        matches!(error, StoreError::NewerFormat { found: 2, .. }),
        "{error}"
    );
}
