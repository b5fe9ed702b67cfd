// SPDX-License-Identifier: Apache-2.0
//! The calls that are counted.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use patchbay_proto::client;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    CommitUpdateRequest, DescribeGuestRequest, FlipReport, KeyOp, KeyUpdate, PauseGuestRequest,
    PrepareUpdateRequest, ResultView, ResumeGuestRequest, UpdateStaticKeysRequest,
};
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::{Keys, KeysConfig, Limits, Registry};
use patchbay_service::trace::Tracing;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::callgrind;
use super::guest::MemoryGuest;
use super::kernel::{self, Kernel};

/// The number of uncounted changes before the counted ones.
const WARM_UP: usize = 3;
/// The number of counted calls: one turns the keys on, and one turns them off.
pub const CALLS: u64 = 2;
/// Time between two checks of the other threads.
const LOOK: Duration = Duration::from_millis(1);
const REFUSED_NAMES: u64 = 4096;
/// Name of the part of the client's count that ends with the last call.
pub const CLIENT: &str = "client";

/// A call that is counted.
pub struct Row {
    pub name: &'static str,
    kernel: Kernel,
    call: Call,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    /// Describes the guest.
    Nothing,
    /// Changes all keys, by name, with a result for each.
    Names,
    /// Changes one of the keys, by name.
    OneName,
    /// Changes all keys, by a pattern, with a summary.
    Pattern,
    /// Commits a prepared change of all keys, with a summary.
    Commit,
    /// A change that is refused because the last of its many names is unknown.
    UnknownName,
    /// A commit that is refused because the key was changed after the prepare.
    Stale,
    /// A commit that is refused because the guest holds text_mutex. The guest has been paused by an
    /// operator, so the gate is checked once and not repeatedly.
    ClosedGate,
}

const fn row(name: &'static str, keys: u64, sites: u64, call: Call) -> Row {
    Row {
        name,
        kernel: Kernel { keys, sites },
        call,
    }
}

pub const ROWS: &[Row] = &[
    row("a call that does nothing", 1000, 1, Call::Nothing),
    row("1 key, 1 site", 1, 1, Call::Names),
    row("1 key, 56 sites", 1, 56, Call::Names),
    row("1 key, 56 sites, prepared", 1, 56, Call::Commit),
    row("1 key, 1,000 sites", 1, 1000, Call::Names),
    row("100 keys by name", 100, 1, Call::Names),
    row("1,000 keys by name", 1000, 1, Call::Names),
    row("1,000 keys by pattern, summary", 1000, 1, Call::Pattern),
    row("1,000 keys by pattern, prepared", 1000, 1, Call::Commit),
    row("65,000 keys by pattern, summary", 65_000, 1, Call::Pattern),
    row("1 of 100,000 keys", 100_000, 1, Call::OneName),
    row(
        "refused: 4,096 names, the last unknown",
        1000,
        1,
        Call::UnknownName,
    ),
    row("refused: a stale plan", 1000, 1, Call::Stale),
    row("refused: a closed gate", 1000, 1, Call::ClosedGate),
];

/// Returns the row with this name, or else the first row whose name begins with it.
pub fn named(name: &str) -> &'static Row {
    let exact = ROWS.iter().find(|row| row.name == name);
    let row = exact.or_else(|| ROWS.iter().find(|row| row.name.starts_with(name)));
    row.unwrap_or_else(|| {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        panic!("there is no row {name}; use one of {names:#?}")
    })
}

/// A guest that is served on a socket, and a client.
struct Served {
    ram: patchbay_vmm::memory::GuestRam,
    channel: Channel,
    _folder: tempfile::TempDir,
}

impl Served {
    /// Starts the executor's thread and then the API's.
    async fn start(kernel: Kernel) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let registry = Arc::new(Registry::new(Limits::default()));
        let guest = Arc::new(MemoryGuest::new());
        let ram = guest.ram.clone();
        let audit = AuditLog::open(&folder.path().join("audit.jsonl")).expect("an audit log");
        let config = KeysConfig {
            audit,
            ..KeysConfig::default()
        };
        let (keys, _executor) =
            Keys::start(guest, Arc::clone(&registry), config).expect("a thread");
        kernel.register(&ram, &*registry);
        let socket = folder.path().join("api.sock");
        let listener = ApiSocket::bind(&socket).expect("a socket");
        std::thread::spawn(move || serve(keys, listener));
        Self {
            ram,
            channel: connect(&socket).await,
            _folder: folder,
        }
    }
}

/// Serves as the monitor does: on one thread with its own runtime.
fn serve(keys: Keys, socket: ApiSocket) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let guests = Guests::default();
        let guest = ServedGuest::start(keys, Tracing::default()).expect("a guest");
        guests.add(guest).ok().expect("a name");
        let endpoint = Endpoint::new(socket, guests);
        endpoint
            .serve(std::future::pending())
            .await
            .expect("serves");
    });
}

async fn connect(socket: &Path) -> Channel {
    let connector = client::unix_socket(socket);
    let channel = client::endpoint().connect_with_connector(connector).await;
    channel.expect("the service listens")
}

/// Counts a call of the client and what the other threads do for it.
async fn counted<T>(call: impl Future<Output = T>) -> T {
    settle();
    callgrind::start();
    let answer = call.await;
    callgrind::ignore_this_thread(settle);
    callgrind::stop();
    answer
}

/// Waits until the other threads have finished their work for a call: none of them is runnable, and
/// none has run between two checks. Valgrind runs one thread at a time, so the others run while
/// this one sleeps.
fn settle() {
    let mut before = None;
    loop {
        let now = sleeping();
        if now.is_some() && now == before {
            return;
        }
        before = now;
        std::thread::sleep(LOOK);
    }
}

/// Returns the number of context switches of each other thread; `None` if one of them does not
/// sleep.
fn sleeping() -> Option<Vec<String>> {
    let this = std::fs::read_link("/proc/thread-self").expect("this thread");
    let mut threads = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task").expect("the threads") {
        let thread = thread.expect("a thread");
        if this.ends_with(thread.file_name()) {
            continue;
        }
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        if !status.contains("\nState:\tS") {
            return None;
        }
        let switches = status.lines().filter(|line| line.contains("ctxt_switches"));
        threads.extend(switches.map(str::to_owned));
    }
    Some(threads)
}

impl Row {
    /// Performs the row: uncounted calls, and [`CALLS`] counted ones.
    pub fn perform(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let served = Served::start(self.kernel).await;
            for _ in 0..WARM_UP {
                self.change(&served, KeyOp::Enable, false).await;
                self.change(&served, KeyOp::Disable, false).await;
            }
            self.change(&served, KeyOp::Enable, true).await;
            assert_eq!(
                kernel::jumps(&served.ram, self.kernel) as u64,
                self.flipped()
            );
            self.change(&served, KeyOp::Disable, true).await;
            assert_eq!(kernel::jumps(&served.ram, self.kernel), 0);
        });
        callgrind::end_part(c"client");
    }

    /// Returns the number of sites that a call changes.
    pub fn flipped(&self) -> u64 {
        match self.call {
            Call::Nothing | Call::UnknownName | Call::Stale | Call::ClosedGate => 0,
            Call::OneName => self.kernel.sites,
            Call::Names | Call::Pattern | Call::Commit => self.kernel.keys * self.kernel.sites,
        }
    }

    /// Returns whether only the executor's instructions are compared, with twice the permitted
    /// difference. After a pause the API's differ by a third between runs and the executor's by
    /// 8 %; the cause is not known.
    pub fn varies(&self) -> bool {
        matches!(self.call, Call::ClosedGate)
    }

    async fn change(&self, served: &Served, op: KeyOp, is_counted: bool) {
        let call = Box::pin(self.call(served, op, is_counted));
        call.await;
    }

    async fn call(&self, served: &Served, op: KeyOp, is_counted: bool) {
        let mut keys = StaticKeysServiceClient::new(served.channel.clone());
        match self.call {
            Call::Nothing => {
                let mut guest = GuestServiceClient::new(served.channel.clone());
                let call = guest.describe_guest(DescribeGuestRequest::default());
                either(is_counted, call).await.expect("an answer");
            }
            Call::Names | Call::OneName | Call::Pattern => {
                let call = keys.update_static_keys(self.update(op));
                let answer = either(is_counted, call).await.expect("the change is made");
                self.check(answer.into_inner().report);
            }
            Call::Commit => {
                let commit = self.prepare(served, op).await;
                let answer = either(is_counted, keys.commit_update(commit)).await;
                self.check(answer.expect("the change is made").into_inner().report);
            }
            Call::Stale => {
                let commit = self.prepare(served, op).await;
                let other = keys.update_static_keys(self.update(KeyOp::Inc)).await;
                other.expect("the change is made");
                let answer = either(is_counted, keys.commit_update(commit)).await;
                refused(answer, Code::FailedPrecondition);
                let back = keys.update_static_keys(self.update(KeyOp::Dec)).await;
                back.expect("the change is made");
            }
            Call::ClosedGate => {
                // The op is INC, because DISABLE would change nothing while the key is off, and
                // would succeed.
                let commit = self.prepare(served, KeyOp::Inc).await;
                let mut guest = GuestServiceClient::new(served.channel.clone());
                let pause = guest.pause_guest(PauseGuestRequest::default()).await;
                pause.expect("the guest is paused");
                kernel::set_text_mutex(&served.ram, 0x1000);
                let answer = either(is_counted, keys.commit_update(commit)).await;
                refused(answer, Code::Unavailable);
                kernel::set_text_mutex(&served.ram, 0);
                let resume = guest.resume_guest(ResumeGuestRequest::default()).await;
                resume.expect("the guest is resumed");
            }
            Call::UnknownName => {
                let call = keys.update_static_keys(self.update(op));
                refused(either(is_counted, call).await, Code::NotFound);
            }
        }
    }

    /// Prepares the change, and returns the request that commits it.
    async fn prepare(&self, served: &Served, op: KeyOp) -> CommitUpdateRequest {
        let mut keys = StaticKeysServiceClient::new(served.channel.clone());
        let prepare = PrepareUpdateRequest {
            updates: self.update(op).updates,
            result_view: ResultView::Summary.into(),
            ..Default::default()
        };
        let plan = keys.prepare_update(prepare).await.expect("a plan");
        let plan = plan.into_inner();
        CommitUpdateRequest {
            plan_id: plan.plan_id,
            digest: plan.digest,
            result_view: ResultView::Summary.into(),
            ..Default::default()
        }
    }

    fn check(&self, report: Option<FlipReport>) {
        let sites = report.expect("a report").sites_patched;
        assert_eq!(u64::from(sites), self.flipped());
    }

    fn update(&self, op: KeyOp) -> UpdateStaticKeysRequest {
        let named = |key| KeyUpdate {
            name: Kernel::name(key),
            op: op.into(),
            ..Default::default()
        };
        let pattern = || KeyUpdate {
            patterns: vec!["k*".to_owned()],
            op: op.into(),
            ..Default::default()
        };
        let summary = match self.call {
            Call::Pattern => ResultView::Summary,
            _ => ResultView::Unspecified,
        };
        UpdateStaticKeysRequest {
            updates: match self.call {
                Call::Nothing => Vec::new(),
                Call::Names => (0..self.kernel.keys).map(named).collect(),
                Call::UnknownName => (1..REFUSED_NAMES)
                    .map(|key| named(key % self.kernel.keys))
                    .chain([named(self.kernel.keys)])
                    .collect(),
                Call::OneName | Call::Stale | Call::ClosedGate => vec![named(0)],
                Call::Commit if self.kernel.keys == 1 => vec![named(0)],
                Call::Pattern | Call::Commit => vec![pattern()],
            },
            result_view: summary.into(),
            ..Default::default()
        }
    }
}

/// Checks that a call was refused with this code.
fn refused<T: Debug>(answer: Result<T, Status>, code: Code) {
    let refusal = answer.expect_err("the call is refused");
    assert_eq!(refusal.code(), code, "{refusal}");
}

async fn either<T>(is_counted: bool, call: impl Future<Output = T>) -> T {
    if is_counted {
        counted(call).await
    } else {
        call.await
    }
}
