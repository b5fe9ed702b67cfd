// SPDX-License-Identifier: Apache-2.0
//! Calls through `patchbayd`, whose instructions are counted, to guests in another process, whose
//! instructions are not.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use patchbay_node::attach::Attach;
use patchbay_node::guests::Guests;
use patchbay_node::monitors::RunDirs;
use patchbay_node::serve::{Config, serve};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::guest_service_server::{GuestService, GuestServiceServer};
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    DescribeGuestRequest, DescribeGuestResponse, GuestStatus, KeyOp, KeyUpdate, ListGuestsRequest,
    ListGuestsResponse, PauseGuestRequest, PauseGuestResponse, ResumeGuestRequest,
    ResumeGuestResponse, ShutdownGuestRequest, ShutdownGuestResponse, SnapshotGuestRequest,
    SnapshotGuestResponse, StreamConsoleRequest, StreamConsoleResponse, UpdateStaticKeysRequest,
    WatchGuestRequest, WatchGuestResponse,
};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::UnixListener;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

use super::callgrind::{self, Program};
use super::kernel::Kernel;
use super::served::{self, Service, Setup, Tables, counted};

/// Value of the variable `callgrind::ROW` that makes a process serve guests.
pub const ROW: &str = "guests";
/// Environment variables of that process: its folder, and the number of its guests.
const FOLDER: &str = "PATCHBAY_INSTRUCTIONS_FOLDER";
const COUNT: &str = "PATCHBAY_INSTRUCTIONS_GUESTS";
/// The line that this process prints when it serves.
const READY: &str = "the guests are served";
/// The name of the guest that has memory and keys.
const REAL: &str = "instructions";
const WARM_UP: usize = 3;

/// The call that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Describes a guest.
    Nothing,
    /// Changes a key.
    OneKey,
}

/// Serves the guests of this process until its standard input ends. One of them has memory and
/// keys, and the others have only names.
pub fn serve_guests() {
    let variable = |name| std::env::var(name).expect("set by the parent");
    let folder = PathBuf::from(variable(FOLDER));
    let count: usize = variable(COUNT).parse().expect("a number");
    allow_descriptors();
    served::runtime().block_on(async {
        let real = Service::start(Setup::new(Kernel::new(1, 1), Tables::Registered));
        std::fs::rename(real.socket(), folder.join("real.sock")).expect("renamed");
        for number in 1..count {
            let name = format!("guest-{number:04}");
            let socket = folder.join(format!("{name}.sock"));
            let listener = UnixListener::bind(socket).expect("bound");
            let (_, health) = tonic_health::server::health_reporter();
            let server = Server::builder()
                .add_service(health)
                .add_service(GuestServiceServer::new(Named(name)));
            tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        }
        println!("\n{READY}");
        let ended = tokio::task::spawn_blocking(|| std::io::stdin().lines().count());
        ended.await.expect("read");
    });
}

/// Raises the limit on open files, because each guest has a connection.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).expect("a process may raise its limit");
}

/// A guest that has only a name.
struct Named(String);

type Answer<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn none<T>() -> Answer<T> {
    Err(Status::unimplemented("the guest has only a name"))
}

#[tonic::async_trait]
impl GuestService for Named {
    type WatchGuestStream = Messages<WatchGuestResponse>;
    type StreamConsoleStream = Messages<StreamConsoleResponse>;
    type SnapshotGuestStream = Messages<SnapshotGuestResponse>;

    async fn list_guests(&self, _: Request<ListGuestsRequest>) -> Answer<ListGuestsResponse> {
        let status = GuestStatus {
            guest: self.0.clone(),
            ..Default::default()
        };
        Ok(Response::new(ListGuestsResponse {
            guests: vec![status],
            next_page_token: String::new(),
        }))
    }

    async fn describe_guest(
        &self,
        _: Request<DescribeGuestRequest>,
    ) -> Answer<DescribeGuestResponse> {
        none()
    }

    async fn watch_guest(
        &self,
        _: Request<WatchGuestRequest>,
    ) -> Answer<Messages<WatchGuestResponse>> {
        none()
    }

    async fn pause_guest(&self, _: Request<PauseGuestRequest>) -> Answer<PauseGuestResponse> {
        none()
    }

    async fn resume_guest(&self, _: Request<ResumeGuestRequest>) -> Answer<ResumeGuestResponse> {
        none()
    }

    async fn shutdown_guest(
        &self,
        _: Request<ShutdownGuestRequest>,
    ) -> Answer<ShutdownGuestResponse> {
        none()
    }

    async fn snapshot_guest(
        &self,
        _: Request<SnapshotGuestRequest>,
    ) -> Answer<Messages<SnapshotGuestResponse>> {
        none()
    }

    async fn stream_console(
        &self,
        _: Request<Streaming<StreamConsoleRequest>>,
    ) -> Answer<Messages<StreamConsoleResponse>> {
        none()
    }
}

/// The process that serves the guests. It ends when its standard input is closed.
struct Host {
    child: Child,
    input: Option<ChildStdin>,
}

impl Host {
    fn start(folder: &Path, guests: usize) -> Self {
        let mut child = Command::new(Program::executable())
            .args(["--exact", super::TEST, "--nocapture"])
            .env(callgrind::ROW, ROW)
            .env(FOLDER, folder)
            .env(COUNT, guests.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let input = child.stdin.take();
        let output = child.stdout.take().expect("piped");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == READY), "the guests are not served");
        Self { child, input }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// The daemon, in this process, and the guests that it serves.
pub struct Daemon {
    socket: PathBuf,
    guests: usize,
    _host: Host,
    _folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts the guests and then the daemon.
    pub fn start(guests: usize) -> Self {
        allow_descriptors();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = folder.path().join("run");
        std::fs::create_dir(&run).expect("created");
        let host = Host::start(&run, guests);
        let socket = folder.path().join("patchbayd.sock");
        let config = Config {
            run_dirs: RunDirs(vec![run]),
            socket: socket.clone(),
            socket_mode: 0o600,
            listen: None,
            policy: None,
            max_stream_age: Duration::from_secs(3600),
            audit_log: folder.path().join("audit.jsonl"),
            metrics: None,
            guests: Guests::default(),
            attach: Attach::default(),
            autopsies: None,
            registry: None,
        };
        std::thread::spawn(move || daemon(config));
        Self {
            socket,
            guests,
            _host: host,
            _folder: folder,
        }
    }

    /// Waits until the daemon serves all guests, and returns a connection to it.
    pub async fn connect(&self) -> Channel {
        while !self.socket.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let channel = served::connect(&self.socket).await;
        wait_for(&channel, self.guests).await;
        channel
    }
}

/// Runs the daemon as its program does, but on one thread.
fn daemon(config: Config) {
    let (_reload, reloads) = tokio::sync::mpsc::channel(1);
    let served = served::runtime().block_on(serve(config, reloads, std::future::pending()));
    served.expect("it serves");
}

/// Waits until the daemon serves this number of guests.
async fn wait_for(channel: &Channel, guests: usize) {
    let mut client = GuestServiceClient::new(channel.clone());
    loop {
        let mut found = 0;
        let mut request = ListGuestsRequest::default();
        loop {
            let page = client.list_guests(request.clone()).await;
            let page = page.expect("a list").into_inner();
            found += page.guests.len();
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
        if found == guests {
            return;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Performs a call through the daemon in front of this number of guests.
pub async fn perform(guests: usize, call: Call) {
    let daemon = Daemon::start(guests);
    let channel = daemon.connect().await;
    for turn in 0..=WARM_UP {
        for op in [KeyOp::Enable, KeyOp::Disable] {
            if turn == WARM_UP && guests > 1 {
                // The daemon lists its guests again every few seconds. A call that begins right
                // afterwards ends before the next scan.
                served::settle_after_work();
            }
            turn_once(&channel, call, op, turn == WARM_UP).await;
        }
    }
}

async fn turn_once(channel: &Channel, call: Call, op: KeyOp, is_counted: bool) {
    let guest = REAL.to_owned();
    match call {
        Call::Nothing => {
            let mut client = GuestServiceClient::new(channel.clone());
            let call = client.describe_guest(DescribeGuestRequest {
                guest,
                ..DescribeGuestRequest::default()
            });
            counted(is_counted, call).await.expect("an answer");
        }
        Call::OneKey => {
            let update = KeyUpdate {
                name: Kernel::name(0),
                op: op.into(),
                ..Default::default()
            };
            let request = UpdateStaticKeysRequest {
                guest,
                updates: vec![update],
                ..Default::default()
            };
            let mut client = StaticKeysServiceClient::new(channel.clone());
            let call = client.update_static_keys(request);
            let answer = counted(is_counted, call).await.expect("the change is made");
            let report = answer.into_inner().report.expect("a report");
            assert_eq!(report.sites_patched, 1);
        }
    }
}
