// SPDX-License-Identifier: Apache-2.0

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;

use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_service::api::{self, ApiSocket};
use patchbay_service::keys::audit::AuditLog;
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::testing::GuestRings;
use patchbay_service::trace::{AgentSocket, Tracing, socket_path};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use super::fake::Fake;

const VSOCK: &str = "vsock";

pub fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(1).enable_all();
    builder.build().expect("a runtime")
}

/// Runs commands that find only the guests in one folder.
pub trait Commands {
    fn folder(&self) -> &Path;

    fn command(&self, words: &[&str]) -> Command {
        self.under(&[], words)
    }

    /// Returns a command that another program starts. `before` is that program and its own
    /// arguments, or empty if there is none.
    fn under(&self, before: &[&str], words: &[&str]) -> Command {
        let line = [before, &[env!("CARGO_BIN_EXE_patchbay")], words].concat();
        let mut command = Command::new(line[0]);
        command
            .env("XDG_RUNTIME_DIR", self.folder())
            .env("PATCHBAY_RUN_DIR", self.folder().join("host"))
            .env("PATCHBAY_FLEET_SOCKET", self.folder().join("fleet.sock"))
            .env_remove("PATCHBAY_SOCKET")
            .args(&line[1..])
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("the command starts")
    }

    /// Runs a command that must succeed, and returns its standard output.
    #[track_caller]
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("text")
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        let text = self.ok(&[words, &["-o", "json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Runs a command that must fail with exit code `code`, and returns its message.
    #[track_caller]
    fn fails(&self, code: i32, words: &[&str]) -> String {
        let output = self.run(words);
        let message = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{words:?}: {message}");
        assert!(
            message.starts_with("patchbay: ") && message.lines().count() == 1,
            "one sentence: {message}"
        );
        assert!(output.stdout.is_empty());
        message
    }

    /// Runs a command, and returns standard output, standard error and the exit code.
    fn all(&self, words: &[&str]) -> (String, String, Option<i32>) {
        let output = self.run(words);
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (
            text(output.stdout),
            text(output.stderr),
            output.status.code(),
        )
    }

    /// Runs a command with this standard input.
    fn fed(&self, words: &[&str], input: &str) -> Output {
        use std::io::Write;
        let mut child = self
            .command(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(input.as_bytes()).expect("it reads");
        drop(stdin);
        child.wait_with_output().expect("it ends")
    }

    fn follow(&self, words: &[&str]) -> Following {
        let mut child = self
            .command(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Following { child, lines }
    }
}

/// Sends a signal to a command, which must end, and returns its exit code.
pub fn end(mut run: Child, signal: &str) -> Option<i32> {
    let pid = run.id().to_string();
    let kill = Command::new("kill").args(["-s", signal, &pid]).status();
    assert!(kill.expect("kill runs").success());
    run.wait().expect("it ends").code()
}

/// A command that prints events as they happen.
pub struct Following {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Following {
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("text");
        line.trim_end().to_owned()
    }

    pub fn json(&mut self) -> Value {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Ends the command if it still runs. Returns its output on stderr, and its exit code if it
    /// ended by itself.
    pub fn end(mut self) -> (String, Option<i32>) {
        self.child.kill().expect("it can be killed");
        let output = self.child.wait_with_output().expect("it ends");
        let said = String::from_utf8(output.stderr).expect("text");
        (said, output.status.code())
    }

    /// Waits until the command ends by itself. Returns the rest of its output, its output on
    /// stderr, and its exit code.
    pub fn output(mut self) -> (String, String, Option<i32>) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("text");
        let output = self.child.wait_with_output().expect("it ends");
        let said = String::from_utf8(output.stderr).expect("text");
        (rest, said, output.status.code())
    }
}

/// A served guest named "test" in a temporary runtime folder.
pub struct Lab {
    pub guest: Arc<InMemoryGuest>,
    pub registry: Arc<Registry>,
    folder: tempfile::TempDir,
    end: Arc<Notify>,
    _runtime: Runtime,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(&[
            TestKey::new("alpha", 1),
            TestKey::new("beta", 3),
            TestKey::guarded("guarded"),
            TestKey::tracepoint("sched_switch", true),
        ])
    }

    pub fn with(keys: &[TestKey]) -> Self {
        Self::with_guarded(keys, false)
    }

    /// Creates a guest. `allow_guarded` is whether its monitor allows changes of guarded keys.
    pub fn with_guarded(keys: &[TestKey], allow_guarded: bool) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        std::fs::create_dir(folder.path().join("patchbay")).expect("writable");
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), keys);
        let config = KeysConfig {
            audit: AuditLog::open(&folder.path().join("audit.log")).expect("writable"),
            allow_guarded,
            ..KeysConfig::default()
        };
        let started = Keys::start(Arc::clone(&guest), Arc::clone(&registry), config);
        let (keys, _) = started.expect("a thread");
        let runtime = runtime();
        let socket = ApiSocket::bind(&folder.path().join("patchbay/test.sock")).expect("free");
        let agent = AgentSocket::bind(&folder.path().join(VSOCK)).expect("free");
        let tracing = Tracing {
            agent: Some(agent),
            ..Tracing::default()
        };
        let end = Arc::new(Notify::new());
        let ended = Arc::clone(&end);
        runtime.spawn(async move { api::serve(socket, keys, tracing, ended.notified()).await });
        Self {
            guest,
            registry,
            folder,
            end,
            _runtime: runtime,
        }
    }

    /// Ends the service as a monitor does that ends in order.
    pub fn end(&self) {
        self.end.notify_one();
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("patchbay/test.sock")
    }

    /// Returns the socket that the guest's agent connects to.
    pub fn agent_socket(&self) -> PathBuf {
        socket_path(&self.folder.path().join(VSOCK))
    }
}

impl Lab {
    /// Returns the lines of the service's audit log.
    pub fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.folder.path().join("audit.log")).expect("text");
        let lines = text.lines().map(serde_json::from_str);
        lines.collect::<Result<_, _>>().expect("JSON")
    }

    /// Puts a log and ring buffers into the guest's memory, where the service finds them.
    pub fn rings(&self) -> GuestRings {
        let rings = GuestRings::new(&self.guest);
        rings.found_by(&self.registry);
        rings
    }
}

impl Commands for Lab {
    fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A fake endpoint that serves web-1, web-2 and db on one socket.
pub struct Host {
    pub fake: Fake,
    folder: tempfile::TempDir,
    _runtime: Runtime,
}

impl Host {
    pub fn new() -> Self {
        Self::with(&["db", "web-1", "web-2"])
    }

    pub fn with(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let runtime = runtime();
        std::fs::create_dir(folder.path().join("host")).expect("writable");
        let fake = Fake::serve(&runtime, &folder.path().join("host/all.sock"), names);
        Self {
            fake,
            folder,
            _runtime: runtime,
        }
    }

    /// Ends the service. Its socket stays, but no process listens on it.
    pub fn end(self) {
        drop(self);
    }
}

impl Commands for Host {
    fn folder(&self) -> &Path {
        self.folder.path()
    }
}
