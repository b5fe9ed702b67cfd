// SPDX-License-Identifier: Apache-2.0
//! An endpoint that serves several guests from a script. It returns answers that a test cannot
//! obtain from the in-memory guest, such as lost revisions, small pages and a gate that stays
//! closed for one of three guests.

mod guests;
mod keys;
mod tracepoints;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use patchbay_proto::v1;
use patchbay_proto::v1::guest_service_server::GuestServiceServer;
use patchbay_proto::v1::static_keys_service_server::StaticKeysServiceServer;
use patchbay_proto::v1::tracepoints_service_server::TracepointsServiceServer;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

pub const INCARNATION: &str = "5eed";

/// The messages of one watch of a guest's keys. After the last one, the stream stays open.
pub type Script = Vec<Result<v1::WatchStaticKeysResponse, Status>>;

pub struct FakeGuest {
    pub status: watch::Sender<v1::GuestStatus>,
    pub keys: Vec<v1::StaticKey>,
    pub holds: Vec<v1::Hold>,
    pub revision: u64,
    pub busy: bool,
    /// A resume does not change the guest's state.
    pub stays: bool,
    /// A search for the kernel's log finds it.
    pub has_kernel_log: bool,
    /// The changes of each plan, by the plan's id.
    pub plans: BTreeMap<String, Vec<v1::KeyUpdate>>,
    /// Further pages of results, by token.
    pub pages: BTreeMap<String, Vec<v1::KeyResult>>,
    pub watches: VecDeque<Script>,
    /// The answers to a call that saves the guest.
    pub snapshot: Vec<Result<v1::SnapshotGuestResponse, Status>>,
}

impl FakeGuest {
    fn new(name: &str) -> Self {
        let status = v1::GuestStatus {
            guest: name.to_owned(),
            state: v1::GuestState::Running.into(),
            registration: v1::RegistrationState::Absent.into(),
            incarnation: INCARNATION.to_owned(),
            ..Default::default()
        };
        let key = |name: &str| v1::StaticKey {
            name: name.to_owned(),
            key_class: v1::KeyClass::Ref.into(),
            etag: "0".to_owned(),
            site_count: 2,
            patchable_sites: 2,
            ..Default::default()
        };
        Self {
            status: watch::channel(status).0,
            keys: ["alpha", "beta", "gamma"].map(key).to_vec(),
            holds: vec![],
            revision: 10,
            snapshot: vec![],
            busy: false,
            stays: false,
            has_kernel_log: false,
            plans: BTreeMap::new(),
            pages: BTreeMap::new(),
            watches: VecDeque::new(),
        }
    }

    pub fn count(&self, name: &str) -> i32 {
        let key = self.keys.iter().find(|key| key.name == name);
        key.expect("a key").count
    }

    pub fn set_count(&mut self, name: &str, count: i32) {
        let key = self.keys.iter_mut().find(|key| key.name == name);
        let key = key.expect("a key");
        key.count = count;
        key.enabled = count > 0;
        self.revision += 1;
        key.etag = self.revision.to_string();
    }
}

#[derive(Default)]
pub struct State {
    pub guests: BTreeMap<String, FakeGuest>,
    /// All requests in debug format.
    pub seen: Vec<String>,
}

#[derive(Clone, Default)]
pub struct Fake(Arc<Mutex<State>>);

impl Fake {
    /// Serves guests of these names on a socket.
    pub fn serve(runtime: &Runtime, socket: &Path, names: &[&str]) -> Self {
        let fake = Self::default();
        for name in names {
            let guest = FakeGuest::new(name);
            fake.state().guests.insert((*name).to_owned(), guest);
        }
        let entered = runtime.enter();
        let listener = UnixListener::bind(socket).expect("free");
        drop(entered);
        let serve = tonic::transport::Server::builder()
            .add_service(GuestServiceServer::new(fake.clone()))
            .add_service(StaticKeysServiceServer::new(fake.clone()))
            .add_service(TracepointsServiceServer::new(fake.clone()))
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(serve);
        fake
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accesses a guest, to change or to read it.
    pub fn guest<T>(&self, name: &str, work: impl FnOnce(&mut FakeGuest) -> T) -> T {
        work(self.state().guests.get_mut(name).expect("a guest"))
    }

    /// Changes the status of a guest and notifies its watchers.
    pub fn set_status(&self, name: &str, change: impl FnOnce(&mut v1::GuestStatus)) {
        self.guest(name, |guest| guest.status.send_modify(change));
    }

    pub fn seen(&self, what: &str) -> Vec<String> {
        let state = self.state();
        let seen = state.seen.iter().filter(|seen| seen.contains(what));
        seen.cloned().collect()
    }

    /// Records a request, and calls `work` with the guest that the request names.
    fn on<T>(
        &self,
        name: &str,
        request: &impl std::fmt::Debug,
        work: impl FnOnce(&mut FakeGuest) -> Result<T, Status>,
    ) -> Result<T, Status> {
        let mut state = self.state();
        state.seen.push(format!("{request:?}"));
        let only = state.guests.len() == 1;
        let guest = match name {
            "" if only => state.guests.values_mut().next(),
            "" => {
                let message = "the endpoint serves several guests";
                return Err(refuse(Code::InvalidArgument, "GUEST_NOT_NAMED", message));
            }
            name => state.guests.get_mut(name),
        };
        let message = "the endpoint serves no such guest";
        work(guest.ok_or_else(|| refuse(Code::NotFound, "GUEST_NOT_FOUND", message))?)
    }
}

pub fn refuse(code: Code, reason: &str, message: &str) -> Status {
    let metadata = std::collections::HashMap::new();
    let details = ErrorDetails::with_error_info(reason, "patchbay", metadata);
    Status::with_error_details(code, message, details)
}

/// Returns one item per page, so that every command must request the next page.
fn page<T: Clone>(items: &[T], token: &str) -> (Vec<T>, String) {
    let at: usize = token.parse().unwrap_or(0);
    let next = if at + 1 < items.len() {
        (at + 1).to_string()
    } else {
        String::new()
    };
    (items.get(at).cloned().into_iter().collect(), next)
}
