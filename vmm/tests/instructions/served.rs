// SPDX-License-Identifier: Apache-2.0
//! A guest that is served on a socket, and a client whose calls are counted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::guest::Guest;
use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::DebugLine;
use patchbay_proto::client;
use patchbay_service::api::{ApiSocket, Endpoint, Guests, ServedGuest};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::debug::DebugSites;
use patchbay_service::keys::registry::{Contents, KernelTables, Promises};
use patchbay_service::keys::{Keys, KeysConfig, Limits, Registry};
use patchbay_service::testing::{discovered_after, found_in};
use patchbay_service::trace::{AgentSocket, Tracing};
use static_keys::Class;
use tonic::transport::Channel;

use super::callgrind;
use super::guest::{Memory, MemoryGuest};
use super::kernel::Kernel;

/// Time between two checks of the other threads.
const LOOK: Duration = Duration::from_millis(1);

/// The way in which the service gets the tables of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// The kernel registers them.
    Registered,
    /// They are found in the guest's memory, as those of a kernel that does not register. The gates
    /// then prove that no vCPU is inside a site.
    Found,
    /// They are found, and each key belongs to a line of dynamic debug.
    DebugLines,
}

/// The guest that a row needs.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub kernel: Kernel,
    pub tables: Tables,
    pub memory: Memory,
    /// An agent can connect.
    pub agent: bool,
}

impl Setup {
    /// Returns the setup of a guest of our monitor.
    pub const fn new(kernel: Kernel, tables: Tables) -> Self {
        Self {
            kernel,
            tables,
            memory: Memory::Own,
            agent: false,
        }
    }
}

/// A guest that is served on a socket.
pub struct Service {
    pub ram: GuestRam,
    pub folder: tempfile::TempDir,
}

impl Service {
    /// Starts the executor's thread and then the API's.
    pub fn start(setup: Setup) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let registry = Arc::new(Registry::new(Limits::default()));
        let guest = Arc::new(MemoryGuest::new(setup.memory));
        let ram = guest.ram().clone();
        let audit = AuditLog::open(&folder.path().join("audit.jsonl")).expect("an audit log");
        let config = KeysConfig {
            audit,
            ..KeysConfig::default()
        };
        let (keys, _executor) =
            Keys::start(guest, Arc::clone(&registry), config).expect("a thread");
        match setup.tables {
            Tables::Registered => setup.kernel.register(&*ram, &*registry),
            Tables::Found | Tables::DebugLines => {
                let tables = found(&ram, setup);
                registry.register_kernel(tables).expect("taken");
            }
        }
        let listener = ApiSocket::bind(&socket(folder.path())).expect("a socket");
        let agent = setup.agent.then(|| agent_socket(folder.path()));
        let agent = agent.map(|path| AgentSocket::bind(&path).expect("a socket"));
        std::thread::spawn(move || serve(keys, listener, agent));
        Self { ram, folder }
    }

    /// Returns the path of the API's socket.
    pub fn socket(&self) -> PathBuf {
        socket(self.folder.path())
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("api.sock")
}

/// A guest that is served on a socket, and a client.
pub struct Served {
    pub service: Service,
    pub channel: Channel,
}

impl Served {
    pub async fn start(setup: Setup) -> Self {
        let service = Service::start(setup);
        let channel = connect(&service.socket()).await;
        Self { service, channel }
    }
}

/// Returns a runtime on this thread.
pub fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

/// Returns the path of the vsock device of the guest.
pub fn agent_socket(folder: &Path) -> PathBuf {
    folder.join("vsock")
}

/// Returns the tables as a discovery finds them.
fn found(ram: &GuestRam, setup: Setup) -> KernelTables {
    let mut tables = found_in(ram, &setup.kernel.write(&**ram));
    tables.promises = Promises {
        fence: false,
        text_gates: true,
    };
    tables.discovery = Some(discovered_after(0));
    let Contents::Found(kernel) = &mut tables.contents else {
        panic!("the tables are found")
    };
    if setup.tables == Tables::DebugLines {
        let mut lines = Vec::new();
        let keys = kernel.images.iter_mut().flat_map(|image| &mut image.keys);
        for (number, key) in (0..).zip(keys) {
            key.class = Class::DynamicDebug;
            lines.push((key.address, line(number)));
        }
        tables.debug = DebugSites::new(lines).expect("few lines");
    }
    tables
}

/// Returns a line of dynamic debug. A file has ten of them.
fn line(number: u32) -> DebugLine {
    DebugLine {
        module: "net".to_owned(),
        file: format!("net/core/file_{:03}.c", number / 10),
        function: format!("function_{}", number / 5),
        line: number % 10 * 20 + 1,
        format: "a packet of %u bytes came from %pM\n".to_owned(),
        classed: false,
    }
}

/// Serves as the monitor does: on one thread with its own runtime.
fn serve(keys: Keys, socket: ApiSocket, agent: Option<AgentSocket>) {
    runtime().block_on(async {
        let guests = Guests::default();
        let tracing = Tracing {
            agent,
            ..Tracing::default()
        };
        let guest = ServedGuest::start(keys, tracing).expect("a guest");
        guests.add(guest).ok().expect("a name");
        let endpoint = Endpoint::new(socket, guests);
        endpoint
            .serve(std::future::pending())
            .await
            .expect("serves");
    });
}

pub async fn connect(socket: &Path) -> Channel {
    let connector = client::unix_socket(socket);
    let channel = client::endpoint().connect_with_connector(connector).await;
    channel.expect("the service listens")
}

/// Performs a call. If `is_counted` is set, counts the work of the client, and that of the other
/// threads for the call.
pub async fn counted<T>(is_counted: bool, call: impl Future<Output = T>) -> T {
    if !is_counted {
        return call.await;
    }
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
pub fn settle() {
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

/// Waits until another thread has worked and has finished.
pub fn settle_after_work() {
    settle();
    let before = sleeping();
    while sleeping() == before {
        std::thread::sleep(LOOK);
    }
    settle();
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
