// SPDX-License-Identifier: Apache-2.0
//! The interface of a store.

use std::time::Duration;

use async_trait::async_trait;

/// The revision of the store. It advances with each transaction that wrote something.
pub type Revision = u64;

/// A key's value and its revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: Vec<u8>,
    pub created: Revision,
    pub modified: Revision,
}

/// The condition of a transaction on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    Absent,
    CreatedAt(Revision),
    ModifiedAt(Revision),
}

/// The id of a lease. Keys under a lease are deleted with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId(pub i64);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    Put {
        key: String,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    },
    Delete {
        key: String,
    },
}

impl Write {
    pub(crate) fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let value = match self {
            Self::Put { value, .. } => value.len(),
            Self::Delete { .. } => 0,
        };
        OP_BYTES + self.key().len() + value
    }
}

/// Writes that are made together if all conditions hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    pub(crate) conditions: Vec<(String, Expected)>,
    pub(crate) writes: Vec<Write>,
}

/// The maximum number of conditions, and of writes, in a transaction. It is etcd's default for
/// `--max-txn-ops`.
pub const MAX_TRANSACTION_OPS: usize = 128;

/// The maximum size of a transaction for etcd, as [`Transaction::bytes`] counts it. etcd's default
/// for `--max-request-bytes` is 1.5 MiB. The difference is a margin for what etcd adds to a
/// request.
pub const MAX_TRANSACTION_BYTES: usize = (3 << 19) - (64 << 10);

/// The bytes that a condition or a write takes in a request besides its key and value, at most:
/// the root of all keys, and the numbers and lengths of etcd's messages.
const OP_BYTES: usize = MAX_ROOT_BYTES + 64;

/// The maximum length of the root of all keys in etcd.
pub const MAX_ROOT_BYTES: usize = 256;

impl Transaction {
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn expect(mut self, key: impl Into<String>, expected: Expected) -> Self {
        self.conditions.push((key.into(), expected));
        self
    }

    /// Adds the condition that the leader with this fence still leads.
    #[must_use]
    pub fn fenced(self, fence: &Fence) -> Self {
        self.expect(&fence.key, Expected::CreatedAt(fence.created))
    }

    #[must_use]
    pub fn put(self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.write(Write::Put {
            key: key.into(),
            value: value.into(),
            lease: None,
        })
    }

    #[must_use]
    pub fn put_leased(
        self,
        key: impl Into<String>,
        value: impl Into<Vec<u8>>,
        lease: LeaseId,
    ) -> Self {
        self.write(Write::Put {
            key: key.into(),
            value: value.into(),
            lease: Some(lease),
        })
    }

    #[must_use]
    pub fn delete(self, key: impl Into<String>) -> Self {
        self.write(Write::Delete { key: key.into() })
    }

    #[must_use]
    pub fn write(mut self, write: Write) -> Self {
        self.writes.push(write);
        self
    }

    /// Returns the conditions on keys.
    pub fn conditions(&self) -> &[(String, Expected)] {
        &self.conditions
    }

    /// Returns the writes.
    pub fn writes(&self) -> &[Write] {
        &self.writes
    }

    /// Returns the upper bound of the transaction's size as a request to etcd.
    pub(crate) fn bytes(&self) -> usize {
        let conditions = self.conditions.iter().map(|(key, _)| OP_BYTES + key.len());
        let writes = self.writes.iter().map(Write::bytes);
        conditions.chain(writes).sum()
    }

    /// Returns the key of the largest write.
    pub(crate) fn largest(&self) -> String {
        let largest = self.writes.iter().max_by_key(|write| write.bytes());
        largest.map_or_else(String::new, |write| write.key().to_owned())
    }

    /// Checks the transaction for its size in bytes, which etcd limits.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`].
    pub(crate) fn check_bytes(&self) -> Result<(), StoreError> {
        let bytes = self.bytes();
        match bytes > MAX_TRANSACTION_BYTES {
            true => {
                let key = self.largest();
                Err(StoreError::TooLarge { key, bytes })
            }
            false => Ok(()),
        }
    }

    /// Checks the transaction.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if it has too many conditions or writes, or writes a key twice,
    /// which etcd refuses.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let (conditions, writes) = (self.conditions.len(), self.writes.len());
        if conditions.max(writes) > MAX_TRANSACTION_OPS {
            return Err(StoreError::Invalid(format!(
                "a transaction has {conditions} conditions and {writes} writes; \
                 at most {MAX_TRANSACTION_OPS} of each"
            )));
        }
        let mut keys: Vec<&str> = self.writes.iter().map(Write::key).collect();
        keys.sort_unstable();
        match keys.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(StoreError::Invalid(format!(
                "a transaction writes the key {:?} twice",
                pair[0]
            ))),
            None => Ok(()),
        }
    }
}

/// The proof of leadership that every write of a leader carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    pub key: String,
    pub created: Revision,
}

/// The keys under a prefix at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The entries in key order.
    pub entries: Vec<Entry>,
    /// The revision. A watch from the next revision on continues this snapshot.
    pub revision: Revision,
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Put(Entry),
    Deleted { key: String, revision: Revision },
}

impl Change {
    pub fn key(&self) -> &str {
        match self {
            Self::Put(entry) => &entry.key,
            Self::Deleted { key, .. } => key,
        }
    }

    pub fn revision(&self) -> Revision {
        match self {
            Self::Put(entry) => entry.modified,
            Self::Deleted { revision, .. } => *revision,
        }
    }
}

/// The reason why the store did not carry out a request. Nothing was changed, unless
/// [`StoreError::Unavailable`] says that this is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("a condition of the transaction does not hold; read again and decide again")]
    Conflict,
    #[error("revision {wanted} is compacted, the oldest kept is {oldest}; list again")]
    Compacted { wanted: Revision, oldest: Revision },
    #[error("lease {0} has expired; take a new one")]
    LeaseExpired(i64),
    #[error("{0}")]
    Invalid(String),
    /// A repeat is refused too.
    #[error(
        "a transaction of {bytes} bytes with the key {key} is too large for the store, which takes \
         {MAX_TRANSACTION_BYTES} if etcd's --max-request-bytes is not less than its default"
    )]
    TooLarge { key: String, bytes: usize },
    /// The store did not answer. The transaction may have been applied.
    #[error("the store cannot be reached: {0}; it is tried again")]
    Unavailable(String),
    #[error(
        "the store at {path} cannot be opened: {why}; create its folder, or give the path of a file that this user may write"
    )]
    Unopened { path: String, why: String },
    #[error("the store at {path} is damaged: {why}; it is left as it is, restore a copy")]
    Damaged { path: String, why: String },
    #[error(
        "the store at {path} has format {found}, this program knows {known}; \
         it is left as it is, start the newer program"
    )]
    NewerFormat {
        path: String,
        found: u64,
        known: u64,
    },
}

/// A sequence of changes.
#[async_trait]
pub trait Watch: Send {
    /// Waits for the next revision with changes, and returns these.
    ///
    /// # Errors
    /// [`StoreError::Compacted`] or [`StoreError::Unavailable`]. The watch then ends.
    async fn next(&mut self) -> Result<Vec<Change>, StoreError>;
}

/// The store. The crate's documentation lists its guarantees.
#[async_trait]
pub trait Store: Send + Sync {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;

    /// Returns every key that begins with `prefix`, at one revision.
    async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError>;

    /// Returns the first key, in order, that begins with `prefix` and is not less than `from`.
    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError>;

    /// Applies the transaction, and returns its revision.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if a condition does not hold. [`StoreError::LeaseExpired`] if a
    /// lease of a put is gone.
    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError>;

    /// Watches the keys that begin with `prefix`, from revision `from` on.
    ///
    /// # Errors
    /// The store cannot be reached. The watch, not this call, reports a compacted revision.
    async fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, StoreError>;

    /// Drops the changes before `revision`. Watches of earlier revisions then end.
    async fn compact(&self, revision: Revision) -> Result<(), StoreError>;

    /// Grants a lease that expires `ttl` after its last renewal. The store may round `ttl` up to
    /// whole seconds.
    async fn grant(&self, ttl: Duration) -> Result<LeaseId, StoreError>;

    /// Renews the lease.
    ///
    /// # Errors
    /// [`StoreError::LeaseExpired`].
    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// Ends the lease, and deletes its keys. A repeat has no further effect.
    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError>;
}

/// Makes the writes in their order, in as many transactions as the limits require. Each of them has
/// the fence. A write that is over etcd's limit is a transaction by itself, which the store in a
/// file takes. A repeat after an error is harmless.
///
/// # Errors
/// [`StoreError::Conflict`] if another leads. [`StoreError::TooLarge`] if the store does not take a
/// write. Those before it are made.
pub async fn commit_all(
    store: &dyn Store,
    fence: &Fence,
    writes: &[Write],
) -> Result<(), StoreError> {
    let empty = Transaction::new().fenced(fence);
    let room = MAX_TRANSACTION_BYTES - empty.bytes().min(MAX_TRANSACTION_BYTES);
    let mut rest = writes;
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take(MAX_TRANSACTION_OPS).take_while(|write| {
            bytes += write.bytes();
            bytes <= room
        });
        let (now, later) = rest.split_at(fits.count().max(1));
        let transaction = now.iter().cloned().fold(empty.clone(), Transaction::write);
        store.commit(transaction).await?;
        rest = later;
    }
    Ok(())
}

/// Returns the names of the folders in `prefix`, which ends with a slash: the parts of keys between
/// it and the next slash. It makes one call for each folder, however many keys a folder has.
///
/// # Errors
/// [`StoreError::Unavailable`].
pub async fn folders(store: &dyn Store, prefix: &str) -> Result<Vec<String>, StoreError> {
    let mut names = Vec::new();
    let mut from = prefix.to_owned();
    while let Some(key) = store.next_key(prefix, &from).await? {
        let rest = key.get(prefix.len()..).unwrap_or_default();
        match rest.split_once('/') {
            Some((name, _)) => {
                // The character after the slash is the first that follows all keys of the folder.
                from = format!("{prefix}{name}0");
                names.push(name.to_owned());
            }
            None => from = key + "\0",
        }
    }
    Ok(names)
}
