// SPDX-License-Identifier: Apache-2.0
//! Runs the real daemon in front of real services with guests in memory, and in front of a monitor
//! that only records its calls.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::{client, v1};
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::{Keys, KeysConfig, Limits, Registry};
use patchbay_service::trace::Tracing;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt;

/// Timeout of the tests' waits, which no correct run reaches.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with a run directory, a policy and an audit log, and the daemon in it.
pub struct Host {
    pub folder: tempfile::TempDir,
    daemon: Option<Daemon>,
    args: Vec<String>,
    variables: Vec<(String, String)>,
}

struct Daemon {
    child: Child,
    lines: mpsc::UnboundedReceiver<serde_json::Value>,
}

/// Returns the principal of the tests' own user.
pub fn own_uid() -> String {
    format!("uid:{}", rustix::process::geteuid().as_raw())
}

impl Host {
    /// Creates a host with this policy, without starting the daemon.
    pub fn new(policy: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("run")).expect("created");
        let host = Self {
            folder,
            daemon: None,
            args: vec![],
            variables: vec![],
        };
        host.write_policy(policy);
        host
    }

    /// Starts a host and its daemon. The user that runs the tests is an admin.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts the daemon with these variables in its environment.
    pub async fn start_with(variables: &[(&str, &str)]) -> Self {
        let policy = format!(
            "rules: [{{name: own, principals: ['{}'], role: admin}}]",
            own_uid()
        );
        let mut host = Self::new(&policy);
        let owned = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        host.variables = variables.iter().map(owned).collect();
        host.start_daemon(&[]).await;
        host
    }

    pub fn write_policy(&self, policy: &str) {
        std::fs::write(self.path("policy.yaml"), policy).expect("written");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the daemon, and waits until it listens.
    pub async fn start_daemon(&mut self, more: &[&str]) {
        if !more.is_empty() {
            self.args = more.iter().map(|arg| (*arg).to_owned()).collect();
        }
        // The signal is ignored, so that a write beyond RLIMIT_FSIZE is an error.
        let mut child = Command::new("sh")
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_patchbayd"))
            .arg("--run-dir")
            .arg(self.path("run"))
            .arg("--socket")
            .arg(self.path("node.sock"))
            .arg("--policy")
            .arg(self.path("policy.yaml"))
            .arg("--audit-log")
            .arg(self.path("audit.jsonl"))
            .args(&self.args)
            .envs(self.variables.iter().cloned())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the daemon starts");
        let stderr = child.stderr.take().expect("piped");
        let (sender, lines) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                eprintln!("{line}");
                let line = serde_json::from_str(&line).unwrap_or(serde_json::Value::Null);
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        self.daemon = Some(Daemon { child, lines });
        if !self.args.iter().any(|arg| arg == "--listen") {
            self.logged("listening").await;
        }
    }

    /// Waits for a line of the daemon's log that begins with this text, after the lines of earlier
    /// waits.
    pub async fn logged(&mut self, message: &str) -> serde_json::Value {
        let daemon = self.daemon.as_mut().expect("started");
        let wait = async {
            loop {
                let line = daemon.lines.recv().await.expect("the daemon runs");
                let found = line["message"].as_str().unwrap_or_default();
                if found.starts_with(message) {
                    return line;
                }
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.unwrap_or_else(|_| panic!("the daemon never logs {message:?}"))
    }

    /// Returns the TCP address of the daemon. It is read once, right after the start.
    pub async fn tcp(&mut self) -> SocketAddr {
        let line = self.logged("listening with mutual TLS").await;
        line["address"]
            .as_str()
            .expect("an address")
            .parse()
            .expect("an address")
    }

    fn pid(&self) -> Pid {
        let daemon = self.daemon.as_ref().expect("started");
        let pid = i32::try_from(daemon.child.id()).expect("a pid");
        Pid::from_raw(pid).expect("a pid")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("signalled");
    }

    /// Sets whether the daemon can write to files.
    pub fn let_write(&self, can: bool) {
        let current = (!can).then_some(0);
        let limit = Rlimit {
            current,
            maximum: None,
        };
        prlimit(Some(self.pid()), Resource::Fsize, limit).expect("limited");
    }

    /// Kills the daemon.
    pub fn kill_daemon(&mut self) {
        self.daemon = None;
    }

    /// Waits until the daemon ends.
    pub async fn ended(&mut self) -> std::process::ExitStatus {
        let mut daemon = self.daemon.take().expect("started");
        let wait = tokio::task::spawn_blocking(move || daemon.child.wait());
        wait.await.expect("waited").expect("waited")
    }

    pub async fn channel(&self) -> Channel {
        connect(&self.path("node.sock")).await
    }

    pub async fn keys(&self) -> StaticKeysServiceClient<Channel> {
        StaticKeysServiceClient::new(self.channel().await)
    }

    pub async fn guests(&self) -> GuestServiceClient<Channel> {
        GuestServiceClient::new(self.channel().await)
    }

    /// Waits until the host's audit log has this many lines.
    pub async fn audit_until(&self, lines: usize) {
        let wait = async {
            while self.audit().len() != lines {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.unwrap_or_else(|_| panic!("never {lines} lines: {:?}", self.audit()));
    }

    /// Returns the lines of the host's audit log.
    pub fn audit(&self) -> Vec<serde_json::Value> {
        let log = std::fs::read_to_string(self.path("audit.jsonl")).expect("the audit log");
        // The last line may be incomplete.
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let lines = whole.lines();
        lines
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service with one guest in memory, like a monitor.
pub struct Monitor {
    pub guest: Arc<InMemoryGuest>,
    end: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<()>,
}

impl Monitor {
    /// Serves a guest with that name on a socket.
    pub fn start(path: &Path, name: &str, audit_log: &Path) -> Self {
        let keys = ["net_a", "net_b", "ext4_a"].map(|key| TestKey::new(key, 1));
        let registry = Arc::new(Registry::new(Limits::default()));
        let guest = InMemoryGuest::named(Arc::clone(&registry), name);
        guest.run(&keys);
        let config = KeysConfig {
            audit: AuditLog::open(audit_log).expect("the audit log opens"),
            ..KeysConfig::default()
        };
        let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
        let socket = ApiSocket::bind(path).expect("free");
        let (end, ended) = oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            let shutdown = async {
                let _ = ended.await;
            };
            let served = api::serve(socket, keys, Tracing::default(), shutdown);
            served.await.expect("ends cleanly");
        });
        Self {
            guest,
            end: Some(end),
            served,
        }
    }

    /// Ends the service, and waits until its socket is gone.
    pub async fn end(mut self) {
        drop(self.end.take());
        (&mut self.served).await.expect("ended");
    }
}

impl Host {
    /// Starts a monitor with its socket in the run directory.
    pub fn monitor(&self, name: &str) -> Monitor {
        let socket = self.path("run").join(format!("{name}.sock"));
        Monitor::start(&socket, name, &self.path(&format!("{name}.audit")))
    }

    /// Calls ListGuests until it returns this many guests, and returns them.
    pub async fn list_until(&self, count: usize) -> Vec<v1::GuestStatus> {
        let mut client = self.guests().await;
        let wait = async {
            loop {
                let answer = client.list_guests(v1::ListGuestsRequest::default()).await;
                let guests = answer.expect("listed").into_inner().guests;
                if guests.len() == count {
                    return guests;
                }
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, wait).await;
        waited.unwrap_or_else(|_| panic!("there are never {count} guests"))
    }
}

/// Returns an update of keys of a guest.
pub fn update(guest: &str, names: &[&str], op: v1::KeyOp) -> v1::UpdateStaticKeysRequest {
    let update = |name: &&str| v1::KeyUpdate {
        name: (*name).to_owned(),
        op: op.into(),
        ..Default::default()
    };
    v1::UpdateStaticKeysRequest {
        guest: guest.to_owned(),
        updates: names.iter().map(update).collect(),
        ..Default::default()
    }
}

/// Returns an update by patterns.
pub fn update_matching(guest: &str, patterns: &[&str]) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        guest: guest.to_owned(),
        updates: vec![v1::KeyUpdate {
            patterns: patterns.iter().map(|text| (*text).to_owned()).collect(),
            op: v1::KeyOp::Inc.into(),
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Connects a client to the socket, and waits until the socket exists.
pub async fn connect(path: &Path) -> Channel {
    client::endpoint()
        .connect_with_connector(client::unix_socket(path))
        .await
        .expect("the daemon listens")
}

/// Asserts the code and the reason of an error, and returns its message and metadata.
#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(
    result: Result<T, Status>,
    code: Code,
    reason: &str,
) -> (String, HashMap<String, String>) {
    let status = result.expect_err(reason);
    assert_eq!(status.code(), code, "{status:?}");
    let info = status.get_details_error_info().expect("ErrorInfo");
    let found = (info.reason.as_str(), info.domain.as_str());
    assert_eq!(found, (reason, "patchbay"), "{status:?}");
    let known = v1::ErrorReason::from_str_name(&format!("ERROR_REASON_{reason}"));
    assert!(known.is_some(), "{reason} is missing in errors.proto");
    (status.message().to_owned(), info.metadata)
}
