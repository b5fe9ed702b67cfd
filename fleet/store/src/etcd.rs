// SPDX-License-Identifier: Apache-2.0
//! Implements the store on etcd 3.4 or later. All keys are below one root.

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use patchbay_access::connect::TlsFiles;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status, Streaming};

use super::members::Members;
use crate::store::{
    Change, Entry, Expected, LeaseId, MAX_ROOT_BYTES, Revision, Snapshot, Store, StoreError,
    Transaction, Watch, Write,
};

#[allow(clippy::all)]
mod pb {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}

/// The default root of a controller's keys.
pub const DEFAULT_ROOT: &str = "/patchbay/fleet/";
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a renewal. It leaves time to ask another member before a lease of 10 s ends, and
/// is shorter than that around the whole call, so that the failure leads to another member.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(3);
/// Makes a member that has no leader end the watch. Such a member may be cut off from the others,
/// and would report no change until it reaches them again.
const REQUIRE_LEADER: &str = "hasleader";
/// The maximum size of an answer.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// The number of entries in a page of unknown size. A page of the largest entries that etcd takes
/// by default fits into [`MAX_ANSWER_BYTES`].
const PAGE: i64 = 128;
/// The maximum number of entries in a page after small pages. For each page etcd counts all
/// remaining keys of the range (`treeIndex.Revisions` in `server/storage/mvcc/index.go`), so a
/// range must not have many pages.
const MAX_PAGE: i64 = 2048;
/// A page has more than [`PAGE`] entries only if those of the page before were so small that this
/// size is expected. The next entries may be larger.
const PAGE_BYTES: usize = 4 << 20;
/// The maximum number of times that the keys of a range are read because etcd compacts the revision
/// meanwhile.
const RANGE_ATTEMPTS: u32 = 3;

/// The store on etcd; see the module's documentation.
#[derive(Clone)]
pub struct EtcdStore {
    root: Root,
    kv: pb::kv_client::KvClient<Members>,
    watch: pb::watch_client::WatchClient<Members>,
    lease: pb::lease_client::LeaseClient<Members>,
}

impl EtcdStore {
    /// Creates the store, which connects to one of the members at the first call. An address is
    /// "http://127.0.0.1:2379", for example, or begins with https:// if there are certificates.
    /// `root` is the prefix of all keys and ends with a slash.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid address, certificates that cannot be used, or a root
    /// that is longer than [`MAX_ROOT_BYTES`].
    pub fn new(
        addresses: &[String],
        root: &str,
        tls: Option<&TlsFiles>,
    ) -> Result<Self, StoreError> {
        if root.len() > MAX_ROOT_BYTES {
            return Err(StoreError::Invalid(format!(
                "the prefix of the keys in etcd has {} bytes; at most {MAX_ROOT_BYTES}",
                root.len()
            )));
        }
        let members = Members::new(addresses, tls)?;
        let kv = pb::kv_client::KvClient::new(members.clone());
        Ok(Self {
            root: Root(root.to_owned()),
            kv: kv.max_decoding_message_size(MAX_ANSWER_BYTES),
            watch: pb::watch_client::WatchClient::new(members.clone()),
            lease: pb::lease_client::LeaseClient::new(members),
        })
    }
}

impl EtcdStore {
    async fn pairs(&self, request: pb::RangeRequest) -> Result<pb::RangeResponse, StoreError> {
        let wanted = revision(request.revision);
        let answer = self.kv.clone().range(timed(request)).await;
        let answer = answer.map_err(|status| match status.code() {
            // etcd does not say which revision is the oldest that it keeps.
            Code::OutOfRange => StoreError::Compacted {
                wanted,
                oldest: wanted + 1,
            },
            _ => unavailable(&status),
        });
        Ok(answer?.into_inner())
    }
}

/// Reads every key that begins with `prefix` by pages, which `read` reads.
///
/// # Errors
/// [`StoreError::Compacted`] if etcd compacts the revision before the last page is read.
async fn snapshot<F: Future<Output = Result<pb::RangeResponse, StoreError>>>(
    root: &Root,
    prefix: &str,
    read: impl Fn(pb::RangeRequest) -> F,
) -> Result<Snapshot, StoreError> {
    let mut snapshot = Snapshot {
        entries: Vec::new(),
        revision: 0,
    };
    let mut key = root.path(prefix);
    let (mut limit, mut max) = (PAGE, MAX_PAGE);
    loop {
        let request = pb::RangeRequest {
            key: key.clone(),
            range_end: root.end_of(prefix),
            limit,
            // The first page decides the revision of the others.
            revision: number(snapshot.revision),
            keys_only: false,
        };
        let answer = match read(request).await {
            // The page may be too large. tonic then has the code by which etcd tells of a
            // compacted revision.
            Err(StoreError::Unavailable(_) | StoreError::Compacted { .. }) if limit > PAGE => {
                (limit, max) = (PAGE, PAGE);
                continue;
            }
            answer => answer?,
        };
        if snapshot.revision == 0 {
            snapshot.revision = revision(answer.header.unwrap_or_default().revision);
        }
        let next = answer.kvs.last().filter(|_| answer.more);
        let next = next.map(|last| [&last.key[..], b"\0"].concat());
        let bytes = answer.kvs.iter().map(|pair| pair.value.len());
        limit = match bytes.sum::<usize>() {
            bytes if bytes <= PAGE_BYTES / 4 => max.min(limit * 4),
            bytes if bytes <= PAGE_BYTES => limit,
            _ => PAGE,
        };
        for pair in answer.kvs {
            snapshot.entries.push(root.entry(pair)?);
        }
        match next {
            Some(next) => key = next,
            None => return Ok(snapshot),
        }
    }
}

/// Makes a snapshot, and makes it again if etcd compacts its revision meanwhile.
///
/// # Errors
/// [`StoreError::Compacted`] after [`RANGE_ATTEMPTS`].
async fn repeated<F: Future<Output = Result<Snapshot, StoreError>>>(
    make: impl Fn() -> F,
) -> Result<Snapshot, StoreError> {
    let mut attempts = 1;
    loop {
        match make().await {
            Err(StoreError::Compacted { .. }) if attempts < RANGE_ATTEMPTS => attempts += 1,
            other => return other,
        }
    }
}

fn timed<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}

/// The prefix of all keys.
#[derive(Clone)]
struct Root(String);

impl Root {
    fn path(&self, key: &str) -> Vec<u8> {
        format!("{}{key}", self.0).into_bytes()
    }

    /// Returns the end of the range of keys that begin with `prefix`. The last byte can be
    /// incremented, because UTF-8 never contains the byte 0xff.
    fn end_of(&self, prefix: &str) -> Vec<u8> {
        let mut end = self.path(prefix);
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        end
    }

    fn key(&self, pair: &pb::KeyValue) -> Result<String, StoreError> {
        let key = std::str::from_utf8(&pair.key).ok();
        let key = key.and_then(|key| key.strip_prefix(&self.0));
        key.map(str::to_owned).ok_or_else(|| {
            let (key, root) = (String::from_utf8_lossy(&pair.key), &self.0);
            StoreError::Invalid(format!(
                "etcd has the foreign key {key:?} under {root}; delete it"
            ))
        })
    }

    fn entry(&self, pair: pb::KeyValue) -> Result<Entry, StoreError> {
        Ok(Entry {
            key: self.key(&pair)?,
            created: revision(pair.create_revision),
            modified: revision(pair.mod_revision),
            value: pair.value,
        })
    }

    fn condition(&self, (key, expected): &(String, Expected)) -> pb::Compare {
        use pb::compare::{CompareTarget, TargetUnion};
        let (target, union) = match *expected {
            Expected::Absent => (CompareTarget::Create, TargetUnion::CreateRevision(0)),
            Expected::CreatedAt(at) => (
                CompareTarget::Create,
                TargetUnion::CreateRevision(number(at)),
            ),
            Expected::ModifiedAt(at) => (CompareTarget::Mod, TargetUnion::ModRevision(number(at))),
        };
        pb::Compare {
            target: target.into(),
            key: self.path(key),
            target_union: Some(union),
        }
    }

    fn operation(&self, write: Write) -> pb::RequestOp {
        use pb::request_op::Request;
        let request = Some(match write {
            Write::Put { key, value, lease } => Request::RequestPut(pb::PutRequest {
                key: self.path(&key),
                value,
                lease: lease.map_or(0, |lease| lease.0),
            }),
            Write::Delete { key } => Request::RequestDeleteRange(pb::DeleteRangeRequest {
                key: self.path(&key),
            }),
        });
        pb::RequestOp { request }
    }

    fn change(&self, event: pb::Event) -> Result<Change, StoreError> {
        let is_deleted = event.r#type() == pb::event::EventType::Delete;
        let pair = event.kv.unwrap_or_default();
        if is_deleted {
            return Ok(Change::Deleted {
                key: self.key(&pair)?,
                revision: revision(pair.mod_revision),
            });
        }
        self.entry(pair).map(Change::Put)
    }
}

fn number(revision: Revision) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

fn revision(number: i64) -> Revision {
    Revision::try_from(number).unwrap_or(0)
}

fn unavailable(status: &Status) -> StoreError {
    match status.code() {
        Code::PermissionDenied | Code::Unauthenticated => StoreError::Invalid(format!(
            "etcd refuses access: {}; grant the user's role readwrite on its prefix",
            status.message()
        )),
        // etcd finds the request itself invalid, and would refuse a repeat.
        Code::InvalidArgument => StoreError::Invalid(format!("etcd: {}", status.message())),
        code => StoreError::Unavailable(format!("etcd: {code:?}: {}", status.message())),
    }
}

/// Returns whether etcd refuses the transaction for its size, because its `--max-request-bytes` or
/// `--max-txn-ops` is less than the default.
fn is_too_large(status: &Status) -> bool {
    let says = |text| status.message().contains(text);
    match status.code() {
        Code::InvalidArgument => says("request is too large") || says("too many operations"),
        // gRPC refuses requests that are far beyond etcd's limit.
        Code::ResourceExhausted => says("message larger than max"),
        _ => false,
    }
}

#[async_trait]
impl Store for EtcdStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let request = pb::RangeRequest {
            key: self.root.path(key),
            ..pb::RangeRequest::default()
        };
        let pair = self.pairs(request).await?.kvs.into_iter().next();
        pair.map(|pair| self.root.entry(pair)).transpose()
    }

    async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        repeated(|| snapshot(&self.root, prefix, |request| self.pairs(request))).await
    }

    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        let request = pb::RangeRequest {
            key: self.root.path(from.max(prefix)),
            range_end: self.root.end_of(prefix),
            limit: 1,
            keys_only: true,
            ..pb::RangeRequest::default()
        };
        if request.key >= request.range_end {
            return Ok(None);
        }
        let pair = self.pairs(request).await?.kvs.into_iter().next();
        pair.map(|pair| self.root.key(&pair)).transpose()
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        transaction.check()?;
        transaction.check_bytes()?;
        let lease = transaction.writes.iter().find_map(|write| match write {
            Write::Put { lease, .. } => *lease,
            Write::Delete { .. } => None,
        });
        let (bytes, largest) = (transaction.bytes(), transaction.largest());
        let request = pb::TxnRequest {
            compare: transaction
                .conditions
                .iter()
                .map(|of| self.root.condition(of))
                .collect(),
            success: transaction
                .writes
                .into_iter()
                .map(|write| self.root.operation(write))
                .collect(),
        };
        let answer = self.kv.clone().txn(timed(request)).await;
        let answer = answer.map_err(|status| match (status.code(), lease) {
            (Code::NotFound, Some(lease)) => StoreError::LeaseExpired(lease.0),
            _ if is_too_large(&status) => StoreError::TooLarge {
                key: largest,
                bytes,
            },
            _ => unavailable(&status),
        })?;
        let answer = answer.into_inner();
        if !answer.succeeded {
            return Err(StoreError::Conflict);
        }
        Ok(revision(answer.header.unwrap_or_default().revision))
    }

    async fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, StoreError> {
        use pb::watch_request::RequestUnion;
        let create = pb::WatchCreateRequest {
            key: self.root.path(prefix),
            range_end: self.root.end_of(prefix),
            start_revision: number(from),
        };
        let request = pb::WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(create)),
        };
        let (requests, stream) = tokio::sync::mpsc::channel(1);
        // The channel is empty and its receiver exists, so this cannot fail.
        let _ = requests.try_send(request);
        let stream = tokio_stream::wrappers::ReceiverStream::new(stream);
        let mut stream = tonic::Request::new(stream);
        let metadata = stream.metadata_mut();
        metadata.insert(REQUIRE_LEADER, MetadataValue::from_static("true"));
        let answers = self.watch.clone().watch(stream).await;
        let answers = answers.map_err(|status| unavailable(&status))?.into_inner();
        Ok(Box::new(EtcdWatch {
            root: self.root.clone(),
            answers,
            ready: VecDeque::new(),
            from,
            _requests: requests,
        }))
    }

    async fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        let revision = number(revision);
        let answer = self
            .kv
            .clone()
            .compact(timed(pb::CompactionRequest { revision }))
            .await;
        match answer {
            Ok(_) => Ok(()),
            // The revision is already compacted.
            Err(status) if status.code() == Code::OutOfRange => Ok(()),
            Err(status) => Err(unavailable(&status)),
        }
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let request = pb::LeaseGrantRequest {
            ttl: number(seconds),
        };
        let answer = self.lease.clone().lease_grant(timed(request)).await;
        let answer = answer.map_err(|status| unavailable(&status))?;
        Ok(LeaseId(answer.into_inner().id))
    }

    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
        let mut request = tonic::Request::new(tokio_stream::once(pb::LeaseKeepAliveRequest {
            id: lease.0,
        }));
        request.set_timeout(RENEWAL_TIMEOUT);
        let renewal = async {
            let mut answers = self
                .lease
                .clone()
                .lease_keep_alive(request)
                .await?
                .into_inner();
            answers.message().await
        };
        let answer = tokio::time::timeout(CALL_TIMEOUT, renewal).await;
        let answer =
            answer.map_err(|_| StoreError::Unavailable("etcd does not answer".to_owned()))?;
        match answer.map_err(|status| unavailable(&status))? {
            Some(answer) if answer.ttl > 0 => Ok(()),
            Some(_) => Err(StoreError::LeaseExpired(lease.0)),
            None => Err(StoreError::Unavailable("etcd ended the renewal".to_owned())),
        }
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let request = pb::LeaseRevokeRequest { id: lease.0 };
        match self.lease.clone().lease_revoke(timed(request)).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(unavailable(&status)),
        }
    }
}

struct EtcdWatch {
    root: Root,
    answers: Streaming<pb::WatchResponse>,
    /// The changes of an answer that covers several revisions, with one item for each revision.
    ready: VecDeque<Vec<Change>>,
    from: Revision,
    /// Kept open, because etcd ends the watch when the client's side closes.
    _requests: tokio::sync::mpsc::Sender<pb::WatchRequest>,
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn next(&mut self) -> Result<Vec<Change>, StoreError> {
        loop {
            if let Some(changes) = self.ready.pop_front() {
                return Ok(changes);
            }
            let answer = self.answers.message().await;
            let answer = answer.map_err(|status| unavailable(&status))?;
            let answer =
                answer.ok_or_else(|| StoreError::Unavailable("etcd ended the watch".to_owned()))?;
            if answer.compact_revision != 0 {
                return Err(StoreError::Compacted {
                    wanted: self.from,
                    oldest: revision(answer.compact_revision),
                });
            }
            if answer.canceled {
                return Err(StoreError::Unavailable(answer.cancel_reason));
            }
            for event in answer.events {
                let change = self.root.change(event)?;
                match self.ready.back_mut() {
                    Some(last) if last[0].revision() == change.revision() => last.push(change),
                    _ => self.ready.push_back(vec![change]),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    fn page(keys: &[&str], revision: i64, more: bool) -> pb::RangeResponse {
        let pair = |key: &&str| pb::KeyValue {
            key: format!("/a/{key}").into_bytes(),
            ..pb::KeyValue::default()
        };
        pb::RangeResponse {
            header: Some(pb::ResponseHeader { revision }),
            kvs: keys.iter().map(pair).collect(),
            more,
        }
    }

    /// Checks that changes between two pages are not seen.
    #[tokio::test]
    async fn later_pages_are_read_at_the_revision_of_the_first() {
        let pages = RefCell::new(VecDeque::from([
            page(&["1", "2"], 7, true),
            page(&["3"], 9, true),
            page(&["4"], 11, false),
        ]));
        let requests = RefCell::new(vec![]);
        let read = async |request: pb::RangeRequest| {
            let key = String::from_utf8_lossy(&request.key).into_owned();
            requests.borrow_mut().push((key, request.revision));
            Ok::<_, StoreError>(pages.borrow_mut().pop_front().expect("no more pages"))
        };
        let root = Root("/a/".to_owned());
        let snapshot = snapshot(&root, "", read).await.expect("read");
        let keys: Vec<_> = snapshot.entries.iter().map(|entry| &*entry.key).collect();
        assert_eq!((keys, snapshot.revision), (vec!["1", "2", "3", "4"], 7));
        let expected = [("/a/", 0), ("/a/2\0", 7), ("/a/3\0", 7)];
        assert_eq!(
            requests.into_inner(),
            expected.map(|(key, revision)| (key.to_owned(), revision))
        );
    }

    #[tokio::test]
    async fn pages_grow_while_they_are_small() {
        let of = |bytes: usize| {
            let mut page = page(&["1"], 7, true);
            page.kvs[0].value = vec![0; bytes];
            Ok(page)
        };
        let too_large = StoreError::Unavailable("too large".to_owned());
        let pages = RefCell::new(VecDeque::from([
            of(1),
            of(PAGE_BYTES),
            of(1),
            Err(too_large),
            of(1),
            Ok(page(&["2"], 7, false)),
        ]));
        let limits = RefCell::new(vec![]);
        let read = async |request: pb::RangeRequest| {
            limits.borrow_mut().push(request.limit);
            pages.borrow_mut().pop_front().expect("no more pages")
        };
        let read = snapshot(&Root("/a/".to_owned()), "", read).await;
        assert_eq!(read.expect("read").entries.len(), 5);
        assert_eq!(limits.into_inner(), [128, 512, 512, 2048, 128, 128]);
    }

    #[tokio::test]
    async fn a_range_whose_revision_is_compacted_is_read_again() {
        let compacted = StoreError::Compacted {
            wanted: 7,
            oldest: 8,
        };
        for (failures, expected) in [(0, 1), (2, 3), (9, 3)] {
            let calls = Cell::new(0);
            let read = repeated(async || {
                calls.set(calls.get() + 1);
                match calls.get() <= failures {
                    true => Err(compacted.clone()),
                    false => Ok(Snapshot {
                        entries: vec![],
                        revision: 9,
                    }),
                }
            });
            assert_eq!(read.await.is_ok(), failures < 3);
            assert_eq!(calls.get(), expected);
        }
    }
}
