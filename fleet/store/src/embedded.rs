// SPDX-License-Identifier: Apache-2.0
//! Implements the store for one machine, in a redb file that one process opens.
//!
//! Tables: `entries` (key → revisions, lease, value), `history` ((revision, index) → change),
//! `meta` (format, revision, oldest revision kept). A transaction of the store is one redb
//! transaction, which is synced before the answer. Leases are kept in memory only. Whoever held one
//! has ended with the process that had the file open, so the keys of all leases are deleted when
//! the file is opened.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use tokio::time::Instant;

use super::embedded_watch::EmbeddedWatch;
use crate::store::{
    Change, Entry, Expected, LeaseId, Revision, Snapshot, Store, StoreError, Transaction, Watch,
    Write,
};

const FORMAT: u64 = 1;
/// The minimum number of revisions that are kept for watches.
const HISTORY: Revision = 10_000;

/// A stored entry, as (created, modified, lease or 0, value).
type Stored<'a> = (Revision, Revision, i64, &'a [u8]);
/// A stored change, as (key, created or 0 if it was deleted, value).
type StoredChange<'a> = (&'a str, Revision, &'a [u8]);

const ENTRIES: TableDefinition<&str, Stored> = TableDefinition::new("entries");
const HISTORY_TABLE: TableDefinition<(Revision, u32), StoredChange> =
    TableDefinition::new("history");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

fn entry(key: &str, (created, modified, _, value): Stored<'_>) -> Entry {
    Entry {
        key: key.to_owned(),
        value: value.to_owned(),
        created,
        modified,
    }
}

struct Lease {
    ttl: Duration,
    expires: Instant,
}

/// The embedded store; see the module's documentation.
pub struct EmbeddedStore {
    shared: Arc<Shared>,
    expiry: tokio::task::JoinHandle<()>,
}

pub(super) struct Shared {
    path: PathBuf,
    database: Database,
    leases: Mutex<BTreeMap<i64, Lease>>,
    /// Wakes the task that ends leases. It is notified when a lease is granted.
    granted: Arc<tokio::sync::Notify>,
    /// The newest revision, on which watches wait.
    pub(super) revision: tokio::sync::watch::Sender<Revision>,
}

impl EmbeddedStore {
    /// Opens the file, or creates it. The task that ends leases runs on the current tokio runtime.
    ///
    /// # Errors
    /// [`StoreError::Unopened`], [`StoreError::Damaged`] or [`StoreError::NewerFormat`], in which
    /// case the file is not changed.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared::open(path)?);
        let expiry = tokio::spawn(expire_leases(Arc::downgrade(&shared)));
        Ok(Self { shared, expiry })
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let shared = Arc::clone(&self.shared);
        tokio::task::spawn_blocking(move || work(&shared))
            .await
            .map_err(|error| StoreError::Unavailable(error.to_string()))?
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.expiry.abort();
    }
}

#[async_trait]
impl Store for EmbeddedStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let key = key.to_owned();
        self.run(move |shared| shared.get(&key)).await
    }

    async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        let prefix = prefix.to_owned();
        self.run(move |shared| shared.range(&prefix)).await
    }

    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        let (prefix, from) = (prefix.to_owned(), from.to_owned());
        self.run(move |shared| shared.next_key(&prefix, &from))
            .await
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        transaction.check()?;
        self.run(move |shared| shared.commit(&transaction)).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, StoreError> {
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(EmbeddedWatch::new(
            shared,
            prefix.to_owned(),
            from,
        )))
    }

    async fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        self.run(move |shared| shared.compact(revision)).await
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        let lease = LeaseId(fastrand::i64(1..));
        let expires = Instant::now() + ttl;
        self.shared.leases().insert(lease.0, Lease { ttl, expires });
        self.shared.granted.notify_one();
        Ok(lease)
    }

    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
        let now = Instant::now();
        match self.shared.leases().get_mut(&lease.0) {
            Some(found) if now < found.expires => {
                found.expires = now + found.ttl;
                Ok(())
            }
            _ => Err(StoreError::LeaseExpired(lease.0)),
        }
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.shared.leases().remove(&lease.0);
        self.run(move |shared| shared.delete_leased(|of| of == lease.0))
            .await
    }
}

impl Shared {
    fn open(path: &Path) -> Result<Self, StoreError> {
        let damaged = |error: &dyn std::fmt::Display| StoreError::Damaged {
            path: path.display().to_string(),
            why: error.to_string(),
        };
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let length = file.and_then(|file| Ok(file.metadata()?.len()));
        let length = length.map_err(|error| StoreError::Unopened {
            path: path.display().to_string(),
            why: error.to_string(),
        })?;
        // redb panics on some damaged files instead of returning an error.
        let opened = std::panic::catch_unwind(|| {
            if length > 0 {
                check_format(path)?;
                Ok(Database::open(path))
            } else {
                Ok(Database::create(path))
            }
        });
        let database = opened.map_err(|_| damaged(&"redb cannot read it"))??;
        let database = match database {
            Err(redb::DatabaseError::DatabaseAlreadyOpen) => {
                let path = path.display();
                return Err(StoreError::Unavailable(format!(
                    "{path} is open in another process"
                )));
            }
            other => other.map_err(|error| damaged(&error))?,
        };
        let mut shared = Self {
            path: path.to_owned(),
            database,
            leases: Mutex::default(),
            granted: Arc::default(),
            revision: tokio::sync::watch::Sender::new(0),
        };
        shared.initialise()?;
        Ok(shared)
    }

    /// Creates the tables, loads the revision from the file, and deletes the keys of leases.
    fn initialise(&mut self) -> Result<(), StoreError> {
        let revision = self.write(|transaction| {
            let mut meta = transaction.open_table(META)?;
            meta.insert("format", FORMAT)?;
            transaction.open_table(HISTORY_TABLE)?;
            transaction.open_table(ENTRIES)?;
            let revision = meta.get("revision")?.map_or(0, |value| value.value());
            Ok(revision)
        })?;
        self.revision.send_replace(revision);
        self.delete_leased(|lease| lease != 0)
    }

    fn leases(&self) -> MutexGuard<'_, BTreeMap<i64, Lease>> {
        // Every change is a single insertion, removal or assignment, so a poisoned lock is
        // consistent.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.read(|transaction| {
            let entries = transaction.open_table(ENTRIES)?;
            let found = entries.get(key)?;
            Ok(found.map(|found| entry(key, found.value())))
        })
    }

    fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.read(|transaction| {
            let mut entries = Vec::new();
            for item in transaction.open_table(ENTRIES)?.range(prefix..)? {
                let (key, value) = item?;
                if !key.value().starts_with(prefix) {
                    break;
                }
                entries.push(entry(key.value(), value.value()));
            }
            let meta = transaction.open_table(META)?;
            let revision = meta.get("revision")?.map_or(0, |value| value.value());
            Ok(Snapshot { entries, revision })
        })
    }

    fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        self.read(|transaction| {
            let entries = transaction.open_table(ENTRIES)?;
            let first = entries.range(from.max(prefix)..)?.next();
            let key = first.transpose()?.map(|(key, _)| key.value().to_owned());
            Ok(key.filter(|key| key.starts_with(prefix)))
        })
    }

    fn commit(&self, request: &Transaction) -> Result<Revision, StoreError> {
        {
            let leases = self.leases();
            for write in &request.writes {
                if let Write::Put {
                    lease: Some(lease), ..
                } = write
                    && !leases.contains_key(&lease.0)
                {
                    return Err(StoreError::LeaseExpired(lease.0));
                }
            }
        }
        let revision = self.write(|transaction| {
            let entries = transaction.open_table(ENTRIES)?;
            for (key, expected) in &request.conditions {
                let found = entries.get(key.as_str())?;
                let found = found.map(|found| (found.value().0, found.value().1));
                let holds = match *expected {
                    Expected::Absent => found.is_none(),
                    Expected::CreatedAt(revision) => found.is_some_and(|at| at.0 == revision),
                    Expected::ModifiedAt(revision) => found.is_some_and(|at| at.1 == revision),
                };
                if !holds {
                    return Err(Failure::Store(StoreError::Conflict));
                }
            }
            drop(entries);
            apply(transaction, &request.writes)
        })?;
        self.revision.send_if_modified(|newest| {
            let is_newer = revision > *newest;
            *newest = revision.max(*newest);
            is_newer
        });
        Ok(revision)
    }

    fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        self.write(|transaction| {
            let newest = transaction
                .open_table(META)?
                .get("revision")?
                .map_or(0, |value| value.value());
            forget_before(transaction, revision.min(newest + 1))
        })
    }

    /// Deletes the keys whose lease is gone. A key without a lease has lease 0.
    fn delete_leased(&self, is_gone: impl Fn(i64) -> bool) -> Result<(), StoreError> {
        let keys: Vec<String> = self.read(|transaction| {
            let mut keys = Vec::new();
            for item in transaction.open_table(ENTRIES)?.iter()? {
                let (key, value) = item?;
                if is_gone(value.value().2) {
                    keys.push(key.value().to_owned());
                }
            }
            Ok(keys)
        })?;
        if keys.is_empty() {
            return Ok(());
        }
        let deletions = keys
            .into_iter()
            .fold(Transaction::new(), Transaction::delete);
        self.commit(&deletions).map(|_| ())
    }

    /// Finds the first revision at or after `from` that has changes under `prefix`. Returns these
    /// changes, and the revision from which to continue.
    pub(super) fn changes(
        &self,
        prefix: &str,
        from: Revision,
    ) -> Result<(Vec<Change>, Revision), StoreError> {
        self.read(|transaction| {
            let meta = transaction.open_table(META)?;
            let oldest = meta.get("oldest")?.map_or(1, |value| value.value());
            let newest = meta.get("revision")?.map_or(0, |value| value.value());
            if from < oldest {
                return Err(Failure::Store(StoreError::Compacted {
                    wanted: from,
                    oldest,
                }));
            }
            let mut changes: Vec<Change> = Vec::new();
            for item in transaction.open_table(HISTORY_TABLE)?.range((from, 0)..)? {
                let (place, change) = item?;
                let (revision, _) = place.value();
                if changes
                    .first()
                    .is_some_and(|first| first.revision() != revision)
                {
                    break;
                }
                let (key, created, value) = change.value();
                if key.starts_with(prefix) {
                    changes.push(if created == 0 {
                        let key = key.to_owned();
                        Change::Deleted { key, revision }
                    } else {
                        Change::Put(entry(key, (created, revision, 0, value)))
                    });
                }
            }
            let next = changes.first().map_or(newest, Change::revision) + 1;
            Ok((changes, next.max(from)))
        })
    }

    fn read<T>(
        &self,
        work: impl FnOnce(&redb::ReadTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let transaction = self.database.begin_read();
        let result = transaction
            .map_err(Failure::from)
            .and_then(|transaction| work(&transaction));
        result.map_err(|failure| self.explain(failure))
    }

    fn write<T>(
        &self,
        work: impl FnOnce(&WriteTransaction) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let result = (|| {
            let transaction = self.database.begin_write()?;
            // A transaction that is dropped without a commit is rolled back.
            let value = work(&transaction)?;
            transaction.commit()?;
            Ok(value)
        })();
        result.map_err(|failure| self.explain(failure))
    }

    fn explain(&self, failure: Failure) -> StoreError {
        let path = self.path.display().to_string();
        match failure {
            Failure::Store(error) => error,
            Failure::Redb(redb::Error::Io(error)) => {
                StoreError::Unavailable(format!("{path}: {error}"))
            }
            Failure::Redb(error) => StoreError::Damaged {
                path,
                why: error.to_string(),
            },
        }
    }
}

/// Reads the format of a file without changing it.
fn check_format(path: &Path) -> Result<(), StoreError> {
    let damaged = |error: &dyn std::fmt::Display| StoreError::Damaged {
        path: path.display().to_string(),
        why: error.to_string(),
    };
    let database = match redb::ReadOnlyDatabase::open(path) {
        Ok(database) => database,
        // A killed process leaves the file in this state. Opening it for writing repairs it.
        Err(redb::DatabaseError::RepairAborted | redb::DatabaseError::DatabaseAlreadyOpen) => {
            return Ok(());
        }
        Err(error) => return Err(damaged(&error)),
    };
    let transaction = database.begin_read().map_err(|error| damaged(&error))?;
    let meta = match transaction.open_table(META) {
        Ok(meta) => meta,
        // The process was killed before its first transaction.
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(()),
        Err(error) => return Err(damaged(&error)),
    };
    let found = meta.get("format").map_err(|error| damaged(&error))?;
    match found.map_or(FORMAT, |found| found.value()) {
        FORMAT => Ok(()),
        found => Err(StoreError::NewerFormat {
            path: path.display().to_string(),
            found,
            known: FORMAT,
        }),
    }
}

/// Makes the writes under the next revision. Deleting a key that does not exist is not a change.
fn apply(transaction: &WriteTransaction, writes: &[Write]) -> Result<Revision, Failure> {
    let mut meta = transaction.open_table(META)?;
    let mut entries = transaction.open_table(ENTRIES)?;
    let mut history = transaction.open_table(HISTORY_TABLE)?;
    let newest = meta.get("revision")?.map_or(0, |value| value.value());
    let revision = newest + 1;
    let mut index = 0;
    for write in writes {
        let key = write.key();
        let existing = entries.get(key)?.map(|found| found.value().0);
        let change: StoredChange = match write {
            Write::Put { value, lease, .. } => {
                let created = existing.unwrap_or(revision);
                let lease = lease.map_or(0, |lease| lease.0);
                entries.insert(key, (created, revision, lease, value.as_slice()))?;
                (key, created, value)
            }
            Write::Delete { .. } if existing.is_none() => continue,
            Write::Delete { .. } => {
                entries.remove(key)?;
                (key, 0, &[])
            }
        };
        history.insert((revision, index), change)?;
        index += 1;
    }
    if index == 0 {
        return Ok(newest);
    }
    meta.insert("revision", revision)?;
    drop((meta, entries, history));
    if revision > HISTORY && revision.is_multiple_of(HISTORY / 10) {
        forget_before(transaction, revision - HISTORY)?;
    }
    Ok(revision)
}

fn forget_before(transaction: &WriteTransaction, revision: Revision) -> Result<(), Failure> {
    let mut meta = transaction.open_table(META)?;
    let oldest = meta.get("oldest")?.map_or(1, |value| value.value());
    if revision > oldest {
        let mut history = transaction.open_table(HISTORY_TABLE)?;
        history.retain_in(..(revision, 0), |_, _| false)?;
        meta.insert("oldest", revision)?;
    }
    Ok(())
}

/// Deletes the keys of leases that were not renewed in time, until the store is dropped.
async fn expire_leases(store: std::sync::Weak<Shared>) {
    loop {
        let Some(shared) = store.upgrade() else {
            return;
        };
        let next = shared.leases().values().map(|lease| lease.expires).min();
        let granted = Arc::clone(&shared.granted);
        // The file is closed when the last reference is dropped, so this task must not hold one
        // while it waits.
        drop(shared);
        match next {
            None => granted.notified().await,
            Some(next) => {
                tokio::select! {
                    () = granted.notified() => {}
                    () = tokio::time::sleep_until(next) => {}
                }
            }
        }
        let Some(shared) = store.upgrade() else {
            return;
        };
        let now = Instant::now();
        let gone: Vec<i64> = {
            let leases = shared.leases();
            let expired = leases.iter().filter(|(_, lease)| lease.expires <= now);
            expired.map(|(&id, _)| id).collect()
        };
        if gone.is_empty() {
            continue;
        }
        // The lease is removed before its keys, so that a put under it is refused from now on.
        shared.leases().retain(|id, _| !gone.contains(id));
        let deleted = tokio::task::spawn_blocking(move || {
            shared.delete_leased(|lease| gone.contains(&lease))
        })
        .await;
        if let Ok(Err(error)) = deleted {
            tracing::error!("keys of expired leases are not deleted: {error}");
        }
    }
}

/// The reason why a transaction ends early.
enum Failure {
    Store(StoreError),
    Redb(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Redb(error.into())
    }
}
