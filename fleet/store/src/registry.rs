// SPDX-License-Identifier: Apache-2.0
//! Implements the registry. Each host writes a record of itself and of its guests under one lease,
//! and controllers watch these records.
//!
//! ```text
//! registry/HOST/host             HostRecord
//! registry/HOST/guests/GUEST     GuestRecord
//! ```
//!
//! * All keys of a host have a common prefix. A role of etcd for this prefix lets the host write
//!   its own keys and no others.
//! * A host's key is created only while it is absent, so the second of two hosts with one name is
//!   refused. A restarted host finds the record of its earlier process, and replaces it by ending
//!   that lease.
//! * Every write carries the condition that the host's key is still the one that this process
//!   created.
//! * When a host's lease expires, the host and all its guests are removed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{
    Change, Expected, Fence, LeaseId, Renewal, Store, StoreError, Transaction, Write, commit_all,
};

/// The prefix of the registry's keys.
pub const PREFIX: &str = "registry/";
const MAX_NAME_BYTES: usize = 64;

/// A host and its endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// The id of the host's machine. It is part of the comparison that recognizes a restarted host.
    /// Only controllers on the machine with this id use the socket.
    pub machine: String,
    /// The unix socket, for controllers on the same machine.
    pub socket: String,
    /// ADDRESS:PORT with mutual TLS; `None` if the host does not listen on TCP.
    pub address: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The lease of all keys of the host.
    pub lease: i64,
}

impl HostRecord {
    /// Returns whether the other record belongs to an earlier process of the same host.
    fn is_same_host(&self, other: &Self) -> bool {
        (&self.machine, &self.socket, &self.address)
            == (&other.machine, &other.socket, &other.address)
    }
}

/// The state of a guest when its host last read it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRecord {
    pub incarnation: String,
    /// The guest's boot; empty if it is not known. Hosts of earlier versions do not tell it.
    #[serde(default)]
    pub boot: String,
    pub kernel_release: String,
    pub kernel_build_id: String,
    /// True if the guest's tables of static keys are known.
    pub registered: bool,
    /// The capabilities of the guest's service: "agent", "discovery", "hypercall".
    pub capabilities: Vec<String>,
    /// The revision of the guest's keys when they were last read.
    pub revision: u64,
}

/// A change of a key of the registry, after parsing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registered {
    Host(String, HostRecord),
    Guest {
        host: String,
        guest: String,
        record: GuestRecord,
    },
    HostGone(String),
    GuestGone {
        host: String,
        guest: String,
    },
}

/// The reason why a host is not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    #[error(
        "another host is registered as {name:?}, at {place}; give one of them another --host-name"
    )]
    NameTaken { name: String, place: String },
    #[error("{0:?} is no name of a host; give 1 to 64 letters, digits, '-', '_' and '.'")]
    Name(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A host in the registry.
pub struct Registration {
    store: Arc<dyn Store>,
    name: String,
    lease: LeaseId,
    ttl: Duration,
    /// The time at which the lease was requested.
    granted: Instant,
    fence: Fence,
    /// The guests that the registry may have; `None` if it may have another record, because a
    /// write had no answer.
    guests: BTreeMap<String, Option<GuestRecord>>,
}

fn host_key(host: &str) -> String {
    format!("{PREFIX}{host}/host")
}

fn guest_key(host: &str, guest: &str) -> String {
    format!("{PREFIX}{host}/guests/{guest}")
}

/// Returns the id of the machine. A machine without an id gets a new random id at each call, so
/// that two such machines are never mistaken for one.
pub fn machine() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    match id.trim() {
        "" => format!("{:032x}", fastrand::u128(..)),
        id => id.to_owned(),
    }
}

/// Checks the name of a host.
///
/// # Errors
/// [`RegisterError::Name`].
pub fn check_name(name: &str) -> Result<(), RegisterError> {
    let letters = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.chars().all(letters) {
        true => Ok(()),
        false => Err(RegisterError::Name(name.to_owned())),
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(value).map_err(|error| StoreError::Invalid(error.to_string()))
}

fn decode<'v, T: Deserialize<'v>>(key: &str, value: &'v [u8]) -> Result<T, StoreError> {
    serde_json::from_slice(value).map_err(|error| {
        StoreError::Invalid(format!("the value of the key {key} is malformed: {error}"))
    })
}

impl Registration {
    /// Registers the host, without guests. This function sets `record.lease`. With `takes_over`,
    /// the registration of an earlier process of the same host is replaced.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing is registered then.
    pub async fn new(
        store: Arc<dyn Store>,
        name: &str,
        mut record: HostRecord,
        ttl: Duration,
        takes_over: bool,
    ) -> Result<Self, RegisterError> {
        check_name(name)?;
        let key = host_key(name);
        if let Some(entry) = store.get(&key).await? {
            let other: HostRecord = decode(&key, &entry.value)?;
            if !takes_over || !record.is_same_host(&other) {
                let place = other.address.unwrap_or(other.socket);
                let name = name.to_owned();
                return Err(RegisterError::NameTaken { name, place });
            }
            store.revoke(LeaseId(other.lease)).await?;
        }
        let granted = Instant::now();
        let lease = store.grant(ttl).await?;
        record.lease = lease.0;
        let create = Transaction::new()
            .expect(&key, Expected::Absent)
            .put_leased(&key, encode(&record)?, lease);
        match store.commit(create).await {
            Ok(created) => Ok(Self {
                store,
                name: name.to_owned(),
                lease,
                ttl,
                granted,
                fence: Fence { key, created },
                guests: BTreeMap::new(),
            }),
            Err(error) => {
                // If this fails, the lease expires.
                let _ = store.revoke(lease).await;
                Err(error.into())
            }
        }
    }

    /// Writes the guests that differ from the registry, and returns their number.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the host is no longer registered.
    pub async fn update(
        &mut self,
        guests: BTreeMap<String, GuestRecord>,
    ) -> Result<usize, StoreError> {
        let guests: BTreeMap<_, _> = guests
            .into_iter()
            .map(|(guest, record)| (guest, Some(record)))
            .collect();
        let all: BTreeSet<&String> = self.guests.keys().chain(guests.keys()).collect();
        let differs = |guest: &&String| match (self.guests.get(*guest), guests.get(*guest)) {
            (Some(None), _) => true,
            (before, after) => before != after,
        };
        let changed: Vec<String> = all.into_iter().filter(differs).cloned().collect();
        let mut writes = Vec::new();
        for guest in &changed {
            let key = guest_key(&self.name, guest);
            writes.push(match guests.get(guest) {
                Some(record) => Write::Put {
                    key,
                    value: encode(record)?,
                    lease: Some(self.lease),
                },
                None => Write::Delete { key },
            });
        }
        // A store that does not answer may have made any of the writes.
        let unknown = changed.into_iter().map(|guest| (guest, None));
        self.guests.extend(unknown);
        commit_all(self.store.as_ref(), &self.fence, &writes).await?;
        self.guests = guests;
        Ok(writes.len())
    }

    /// Returns the renewals of the lease, by which the host stays registered.
    pub fn renewal(&self) -> Renewal {
        Renewal::new(self.lease, self.ttl, self.granted)
    }

    /// Removes the host and its guests at once.
    pub async fn end(self) {
        // If this fails, the lease expires.
        let _ = self.store.revoke(self.lease).await;
    }
}

/// Parses a changed key; `None` if it does not belong to the registry.
///
/// # Errors
/// [`StoreError::Invalid`] for a value that cannot be read.
pub fn read(change: &Change) -> Result<Option<Registered>, StoreError> {
    let key = change.key();
    let parts = key
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.split_once('/'));
    let Some((host, part)) = parts else {
        return Ok(None);
    };
    let guest = part.strip_prefix("guests/").map(str::to_owned);
    let host = host.to_owned();
    Ok(match (part, guest, change) {
        ("host", _, Change::Put(entry)) => Some(Registered::Host(host, decode(key, &entry.value)?)),
        ("host", _, Change::Deleted { .. }) => Some(Registered::HostGone(host)),
        (_, Some(guest), Change::Put(entry)) => Some(Registered::Guest {
            host,
            guest,
            record: decode(key, &entry.value)?,
        }),
        (_, Some(guest), Change::Deleted { .. }) => Some(Registered::GuestGone { host, guest }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{EmbeddedStore, Entry, Revision, Snapshot, Watch};

    const TTL: Duration = Duration::from_secs(60);

    fn store() -> (tempfile::TempDir, Arc<dyn Store>) {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = EmbeddedStore::open(&folder.path().join("x.redb")).expect("opens");
        (folder, Arc::new(store))
    }

    fn record(socket: &str) -> HostRecord {
        HostRecord {
            machine: "m".to_owned(),
            socket: socket.to_owned(),
            address: None,
            labels: BTreeMap::new(),
            lease: 0,
        }
    }

    #[test]
    fn an_error_of_the_store_is_printed_once() {
        let error = RegisterError::from(StoreError::Invalid("bad address".to_owned()));
        assert_eq!(error.to_string(), "bad address");
        assert!(std::error::Error::source(&error).is_none());
    }

    fn guests(names: &[(&str, u64)]) -> BTreeMap<String, GuestRecord> {
        let record = |revision| GuestRecord {
            revision,
            ..GuestRecord::default()
        };
        let names = names.iter();
        names
            .map(|&(name, revision)| (name.to_owned(), record(revision)))
            .collect()
    }

    async fn keys(store: &dyn Store) -> Vec<String> {
        let snapshot = store.range(PREFIX).await.expect("listed");
        snapshot
            .entries
            .into_iter()
            .map(|entry| entry.key)
            .collect()
    }

    /// A store that makes one commit without an answer.
    struct Silent {
        store: Arc<dyn Store>,
        /// The number of commits up to that one, which is the last of them.
        commits: AtomicUsize,
    }

    #[async_trait::async_trait]
    impl Store for Silent {
        async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
            self.store.get(key).await
        }
        async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
            self.store.range(prefix).await
        }
        async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
            self.store.next_key(prefix, from).await
        }
        async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
            let revision = self.store.commit(transaction).await?;
            match self.commits.fetch_sub(1, Ordering::SeqCst) {
                1 => Err(StoreError::Unavailable("no answer".to_owned())),
                _ => Ok(revision),
            }
        }
        async fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, StoreError> {
            self.store.watch(prefix, from).await
        }
        async fn compact(&self, revision: Revision) -> Result<(), StoreError> {
            self.store.compact(revision).await
        }
        async fn grant(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
            self.store.grant(ttl).await
        }
        async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
            self.store.renew(lease).await
        }
        async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
            self.store.revoke(lease).await
        }
    }

    #[tokio::test]
    async fn what_a_store_wrote_without_an_answer_is_not_forgotten() {
        let (_folder, store) = store();
        // The first commit creates the host.
        let silent = Arc::new(Silent {
            store: Arc::clone(&store),
            commits: AtomicUsize::new(2),
        });
        let mut host = Registration::new(silent.clone(), "h", record("a"), TTL, true)
            .await
            .expect("registered");
        let unanswered = host.update(guests(&[("x", 1), ("y", 1)])).await;
        unanswered.expect_err("no answer");
        // The guest x has left the host meanwhile.
        assert_eq!(host.update(guests(&[("y", 1)])).await, Ok(2));
        assert_eq!(
            keys(&*store).await,
            ["registry/h/guests/y", "registry/h/host"]
        );
        silent.commits.store(1, Ordering::SeqCst);
        host.update(guests(&[])).await.expect_err("no answer");
        assert_eq!(host.update(guests(&[("y", 1)])).await, Ok(1));
        assert_eq!(
            keys(&*store).await,
            ["registry/h/guests/y", "registry/h/host"]
        );
        assert_eq!(host.update(guests(&[("y", 1)])).await, Ok(0));
    }

    #[tokio::test]
    async fn only_what_changed_is_written_and_the_end_removes_all() {
        let (_folder, store) = store();
        let mut host = Registration::new(Arc::clone(&store), "h", record("a"), TTL, true)
            .await
            .expect("registered");
        assert_eq!(host.update(guests(&[("x", 1), ("y", 1)])).await, Ok(2));
        assert_eq!(host.update(guests(&[("x", 1), ("y", 2)])).await, Ok(1));
        assert_eq!(host.update(guests(&[("y", 2), ("a/b", 1)])).await, Ok(2));
        let expected = [
            "registry/h/guests/a/b",
            "registry/h/guests/y",
            "registry/h/host",
        ];
        assert_eq!(keys(store.as_ref()).await, expected);
        host.end().await;
        assert_eq!(keys(store.as_ref()).await, [""; 0]);
    }

    #[tokio::test]
    async fn of_two_hosts_with_one_name_the_second_is_refused() {
        let (_folder, store) = store();
        let new = |socket, takes_over| {
            Registration::new(Arc::clone(&store), "h", record(socket), TTL, takes_over)
        };
        let mut first = new("a", true).await.expect("registered");
        let refused = new("b", true).await.err().expect("refused");
        assert!(
            matches!(&refused, RegisterError::NameTaken { place, .. } if place == "a"),
            "{refused}"
        );
        // This is the same host after a restart.
        let mut again = new("a", true).await.expect("registered");
        assert_eq!(again.update(guests(&[("x", 1)])).await, Ok(1));
        // The earlier process can no longer write, and does not register again.
        let stale = first.update(guests(&[("y", 1)])).await;
        assert!(
            matches!(
                stale,
                Err(StoreError::Conflict | StoreError::LeaseExpired(_))
            ),
            "{stale:?}"
        );
        let renewed = store.renew(first.renewal().lease()).await;
        assert!(matches!(renewed, Err(StoreError::LeaseExpired(_))));
        let refused = new("a", false).await.err().expect("refused");
        assert!(
            matches!(refused, RegisterError::NameTaken { .. }),
            "{refused}"
        );
        assert_eq!(
            keys(store.as_ref()).await,
            ["registry/h/guests/x", "registry/h/host"]
        );
    }

    #[tokio::test]
    async fn names_that_are_none_are_refused() {
        let (_folder, store) = store();
        for name in ["", "a/b", "a b", &"a".repeat(65)] {
            let new = Registration::new(Arc::clone(&store), name, record("a"), TTL, true);
            let refused = new.await.err().expect("refused");
            assert!(matches!(refused, RegisterError::Name(_)), "{name}");
        }
    }

    #[test]
    fn a_foreign_value_is_named() {
        let change = Change::Put(crate::Entry {
            key: "registry/h/host".to_owned(),
            value: b"not JSON".to_vec(),
            created: 1,
            modified: 1,
        });
        let error = read(&change).expect_err("refused").to_string();
        assert!(error.contains("registry/h/host"), "{error}");
    }
}
