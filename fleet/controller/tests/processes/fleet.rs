// SPDX-License-Identifier: Apache-2.0
//! Runs monitors, hosts and replicas as processes.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use patchbay_fleet::store::Store;
use patchbay_proto::client;
use patchbay_proto::fleet::v1;
use patchbay_proto::fleet::v1::inventory_service_client::InventoryServiceClient;
use patchbay_proto::fleet::v1::rollout_service_client::RolloutServiceClient;
use patchbay_proto::v1 as guest;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;

use super::etcd::Etcd;
use super::gate_file;

/// Timeout of the tests' waits, which no correct run reaches.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The library of Debian's package faketime. A process that loads it reads another wall clock.
pub const LIBFAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// A process that is killed when this value is dropped, as in a crash.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Monitor {
    process: Process,
    paused: mpsc::UnboundedReceiver<()>,
}

impl Monitor {
    /// Waits until the guest has been changed and its answer is held back.
    pub async fn paused(&mut self) {
        let paused = tokio::time::timeout(PATIENCE, self.paused.recv()).await;
        paused.expect("in time").expect("the monitor runs");
    }

    pub fn go_on(&mut self) {
        let stdin = self.process.0.stdin.as_mut().expect("piped");
        stdin.write_all(b"\n").expect("it reads");
    }
}

/// Hosts "host-0", "host-1"…, each with its own guests "web-0", "web-1"….
pub struct ProcessFleet {
    pub etcd: Etcd,
    variables: Vec<(&'static str, String)>,
    folder: tempfile::TempDir,
    pub hosts: Vec<Option<Process>>,
    pub monitors: Vec<Option<Monitor>>,
    per_host: usize,
}

impl ProcessFleet {
    /// Starts a fleet; `None` if etcd is not installed. After each change, the guests of `held`
    /// wait until they are told to continue.
    pub async fn start(
        members: usize,
        hosts: usize,
        per_host: usize,
        held: &[usize],
    ) -> Option<Self> {
        let etcd = Etcd::start(members).await?;
        Some(Self::on(etcd, &[], hosts, per_host, held).await)
    }

    /// Starts a fleet on this etcd, with variables for every process.
    pub async fn on(
        etcd: Etcd,
        variables: &[(&'static str, String)],
        hosts: usize,
        per_host: usize,
        held: &[usize],
    ) -> Self {
        let mut fleet = Self {
            etcd,
            variables: variables.to_vec(),
            folder: tempfile::tempdir().expect("temporary folder"),
            hosts: Vec::new(),
            monitors: Vec::new(),
            per_host,
        };
        // The rule names keys, so that the monitors check each key that is changed.
        let uid = rustix::process::geteuid().as_raw();
        let policy = format!(
            "rules: [{{name: own, principals: ['uid:{uid}'], role: operator, keys: [alpha, beta], may_assert: true}}]"
        );
        std::fs::create_dir(fleet.path("policy")).expect("created");
        std::fs::write(fleet.path("policy/policy.yaml"), policy).expect("written");
        for host in 0..hosts {
            std::fs::create_dir(fleet.path(&format!("run-{host}"))).expect("created");
            fleet.hosts.push(None);
            fleet.start_host(host);
            for guest in host * per_host..(host + 1) * per_host {
                fleet.monitors.push(None);
                fleet.start_monitor(guest, held.contains(&guest));
            }
        }
        fleet.registered(hosts, hosts * per_host).await;
        fleet
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn start_host(&mut self, host: usize) {
        let name = format!("host-{host}");
        self.hosts[host] = Some(self.host_process(host, &name));
    }

    /// Starts a `patchbayd` in front of the host's guests that registers itself under this name.
    pub fn host_process(&self, host: usize, name: &str) -> Process {
        let child = self
            .child(
                "patchbayd",
                &[
                    ("RUN_DIR", self.text(&format!("run-{host}"))),
                    ("SOCKET", self.text(&format!("host-{host}.sock"))),
                    ("AUDIT", self.text(&format!("host-{host}.audit"))),
                    ("ETCD", self.etcd.addresses()),
                    ("ETCD_CERTS", self.etcd.certs().display().to_string()),
                    ("HOST_NAME", name.to_owned()),
                    ("CERTS", self.text("policy")),
                    ("RACK", ["a", "b"][host % 2].to_owned()),
                ],
            )
            .spawn();
        Process(child.expect("starts"))
    }

    /// Restarts the host with the certificates and the policy of a folder, and waits until it is
    /// registered again.
    pub async fn start_host_with_tls(&mut self, host: usize, certs: &Path) {
        self.hosts[host] = None;
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = free.local_addr().expect("bound").to_string();
        drop(free);
        let child = self
            .child(
                "patchbayd",
                &[
                    ("RUN_DIR", self.text(&format!("run-{host}"))),
                    ("SOCKET", self.text(&format!("host-{host}-tls.sock"))),
                    ("AUDIT", self.text(&format!("host-{host}.audit"))),
                    ("ETCD", self.etcd.addresses()),
                    ("ETCD_CERTS", self.etcd.certs().display().to_string()),
                    ("HOST_NAME", format!("host-{host}-tls")),
                    ("LISTEN", address),
                    ("CERTS", certs.display().to_string()),
                ],
            )
            .spawn();
        self.hosts[host] = Some(Process(child.expect("starts")));
        // The lease of the first process expires.
        self.stored(&format!("registry/host-{host}-tls/"), 1, self.per_host)
            .await;
        self.registered(1, self.per_host).await;
    }

    /// Returns a command that runs this program as the child `test`.
    pub fn child(&self, test: &str, variables: &[(&str, String)]) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.arg(format!("processes::children::{test}"));
        command.args(["--exact", "--nocapture"]);
        command.envs(variables.iter().cloned());
        command.envs(self.variables.iter().cloned());
        command.stdout(Stdio::null()).stdin(Stdio::null());
        command
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn start_monitor(&mut self, guest: usize, hold: bool) {
        let host = guest / self.per_host;
        self.monitors[guest] = Some(self.monitor_process(guest, host, hold));
    }

    /// Starts the guest on any host.
    pub fn monitor_process(&self, guest: usize, host: usize, hold: bool) -> Monitor {
        let mut command = self.child(
            "monitor",
            &[
                ("GUEST", format!("web-{guest}")),
                ("SOCKET", self.text(&format!("run-{host}/web-{guest}.sock"))),
                ("AUDIT", self.text(&format!("web-{guest}.audit"))),
                ("HOLD", if hold { "1" } else { "" }.to_owned()),
            ],
        );
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = Process(spawned.expect("starts"));
        let stdout = process.0.stdout.take().expect("piped");
        let (sender, paused) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The first output shares its line with that of the test harness.
                if line.ends_with("paused") && sender.send(()).is_err() {
                    return;
                }
            }
        });
        Monitor { process, paused }
    }

    /// Waits until the registry has this many hosts and guests.
    pub async fn registered(&self, hosts: usize, guests: usize) {
        self.stored("registry/", hosts, guests).await;
    }

    async fn stored(&self, prefix: &str, hosts: usize, guests: usize) {
        let store = self.etcd.store();
        let reached = async {
            loop {
                if let Ok(found) = store.range(prefix).await {
                    let keys = found.entries.iter();
                    let (of_hosts, of_guests): (Vec<_>, Vec<_>) =
                        keys.partition(|entry| entry.key.ends_with("/host"));
                    if (of_hosts.len(), of_guests.len()) == (hosts, guests) {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        reached.unwrap_or_else(|_| panic!("never {hosts} hosts and {guests} guests in {prefix}"));
    }

    pub fn replica(&self, name: &str, more: &[&str]) -> Replica {
        let has_lease = more.iter().any(|word| word.starts_with("--lease-seconds"));
        let mut command = match has_lease {
            true => self.command(name, "fleet"),
            false => self.replica_command(name, "fleet"),
        };
        command.args(more);
        Replica::spawn(command, self.path(&format!("{name}.sock")))
    }

    /// Returns the command of a replica that is this user of etcd.
    pub fn replica_command(&self, name: &str, user: &str) -> Command {
        let mut command = self.command(name, user);
        command.args(["--lease-seconds", "1"]);
        command
    }

    /// Returns the command of a replica with the default lease.
    pub fn command(&self, name: &str, user: &str) -> Command {
        let mut command = self.bare_command(name);
        command.args(self.etcd.options_of(user));
        command
    }

    /// Returns the command of a controller without a store.
    pub fn bare_command(&self, name: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-fleet"));
        command
            .arg("--socket")
            .arg(self.path(&format!("{name}.sock")));
        command.arg("--gates").arg(self.path("gates.d"));
        command.envs(self.variables.iter().cloned());
        command
    }

    /// Starts a controller with an embedded store, which knows the first host alone.
    pub fn standalone(&self) -> Replica {
        let mut command = self.bare_command("standalone");
        let host = format!("--host=host-0={}", self.text("host-0.sock"));
        command.args(["--standalone", &host, "--store"]);
        command.arg(self.path("fleet.redb"));
        command.arg("--archive").arg(self.path("archive"));
        Replica::spawn(command, self.path("standalone.sock"))
    }

    /// Writes the command of a gate, which runs this script as the user of the test.
    pub fn gate(&self, name: &str, script: &str) {
        let user = match rustix::process::geteuid().is_root() {
            true => "user: root\n",
            false => "",
        };
        let text = format!("command: [/bin/sh, -c, '{script}']\n{user}timeout: 1h\n");
        gate_file::write(&self.path("gates.d"), name, &text);
    }

    /// Returns the changes in a guest's audit log: the counts of keys before and after.
    pub fn changes(&self, guest: usize) -> Vec<(i64, i64)> {
        self.changes_of(guest, &["alpha", "beta"])
    }

    /// Returns the changes of these keys in a guest's audit log.
    pub fn changes_of(&self, guest: usize, keys: &[&str]) -> Vec<(i64, i64)> {
        let log = std::fs::read_to_string(self.path(&format!("web-{guest}.audit")));
        let mut changes = Vec::new();
        for line in log.expect("the audit log").lines() {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            if line["result"] != "committed" {
                continue;
            }
            for change in line["changes"].as_array().expect("changes") {
                if !keys.iter().any(|key| change["key"] == *key) {
                    continue;
                }
                let count = |name: &str| change[name].as_i64().expect("a count");
                changes.push((count("before"), count("after")));
            }
        }
        changes
    }

    /// Calls every guest of a host through the host's `patchbayd`. Calls that were made before
    /// have most likely arrived then.
    pub async fn ask_guests(&self, host: usize) {
        let channel = channel(&self.path(&format!("host-{host}.sock")));
        let mut guests = GuestServiceClient::new(channel);
        for of in host * self.per_host..(host + 1) * self.per_host {
            let request = guest::DescribeGuestRequest {
                guest: format!("web-{of}"),
                ..Default::default()
            };
            guests.describe_guest(request).await.expect("it answers");
        }
    }

    /// Flips "beta" of a guest through its host's `patchbayd`.
    pub async fn flip_beta(&self, guest: usize) -> Result<(), Status> {
        self.update(guest, "beta", guest::KeyOp::Enable).await
    }

    /// Sends a signal to the `patchbayd` of a host.
    pub fn signal_host(&self, host: usize, signal: Signal) {
        let host = &self.hosts[host].as_ref().expect("started").0;
        kill_process(Pid::from_child(host), signal).expect("it runs");
    }

    /// Changes a key of a guest by hand through its host's `patchbayd`.
    pub async fn update(&self, guest: usize, key: &str, op: guest::KeyOp) -> Result<(), Status> {
        let host = guest / self.per_host;
        let channel = channel(&self.path(&format!("host-{host}.sock")));
        let update = guest::KeyUpdate {
            name: key.to_owned(),
            op: op.into(),
            ..Default::default()
        };
        let request = guest::UpdateStaticKeysRequest {
            guest: format!("web-{guest}"),
            updates: vec![update],
            ..Default::default()
        };
        let mut keys = StaticKeysServiceClient::new(channel);
        keys.update_static_keys(request).await.map(|_| ())
    }
}

pub fn channel(socket: &Path) -> Channel {
    client::endpoint().connect_with_connector_lazy(client::unix_socket(socket))
}

/// A replica of the controller, killed on drop.
pub struct Replica {
    process: Mutex<Process>,
    socket: PathBuf,
    /// The lines of its log.
    log: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
}

impl Replica {
    pub fn spawn(mut command: Command, socket: PathBuf) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("starts");
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, log) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                // The test may have ended.
                let _ = sender.send(line);
            }
        });
        Self {
            process: Mutex::new(Process(child)),
            socket,
            log: tokio::sync::Mutex::new(log),
        }
    }

    pub fn signal(&self, signal: Signal) {
        let process = self.process.lock().expect("not poisoned");
        kill_process(Pid::from_child(&process.0), signal).expect("sent");
    }

    pub fn id(&self) -> u32 {
        self.process.lock().expect("not poisoned").0.id()
    }

    /// Skips the lines that it has logged until now.
    pub async fn skip_log(&self) {
        let mut log = self.log.lock().await;
        while log.try_recv().is_ok() {}
    }

    /// Waits for a line of the log that contains the text.
    pub async fn logged(&self, text: &str) {
        let mut log = self.log.lock().await;
        let found = async {
            while let Some(line) = log.recv().await {
                if line.contains(text) {
                    return;
                }
            }
            panic!("it ends without {text:?} in its log");
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found.unwrap_or_else(|_| panic!("never {text:?}"));
    }

    /// Makes it read its policy again, and waits until it has done so.
    pub async fn reload(&self) {
        self.signal(Signal::HUP);
        self.logged("policy read again").await;
    }

    /// Waits until the process has ended by itself.
    pub async fn ended(self) -> std::process::ExitStatus {
        let mut process = self.process.into_inner().expect("not poisoned");
        let ended = tokio::task::spawn_blocking(move || process.0.wait());
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        ended.expect("in time").expect("joined").expect("waited")
    }

    pub async fn hosts(&self) -> Result<Vec<v1::Host>, Status> {
        let mut client = InventoryServiceClient::new(channel(&self.socket));
        let hosts = client.list_hosts(v1::ListHostsRequest {}).await?;
        Ok(hosts.into_inner().hosts)
    }

    pub fn rollouts(&self) -> RolloutServiceClient<Channel> {
        RolloutServiceClient::new(channel(&self.socket))
    }

    /// Plans the rollout, repeatedly until the replica leads and knows this many guests, and then
    /// starts it.
    pub async fn start(&self, name: &str, spec: &str, guests: u32) {
        let digest = self.plan(name, spec, guests).await;
        let started = self.start_planned(name, digest).await;
        started.expect("started");
    }

    /// Starts a rollout that is planned.
    pub async fn start_planned(&self, name: &str, digest: String) -> Result<(), Status> {
        let request = v1::StartRequest {
            rollout: name.to_owned(),
            digest,
            ..Default::default()
        };
        self.rollouts().start(request).await.map(drop)
    }

    pub async fn plan(&self, name: &str, spec: &str, guests: u32) -> String {
        let mut client = self.rollouts();
        let planned = async {
            loop {
                let request = v1::PlanRequest {
                    rollout: name.to_owned(),
                    spec: spec.to_owned(),
                };
                match client.plan(request).await {
                    Ok(answer) => return answer.into_inner().rollout.expect("a rollout"),
                    Err(status) if status.code() == tonic::Code::Unavailable => {}
                    Err(status) => panic!("{status:?}"),
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let planned = tokio::time::timeout(PATIENCE, planned)
            .await
            .expect("it leads");
        let planned_guests: u32 = planned.waves.iter().map(|wave| wave.guests).sum();
        assert_eq!(planned_guests, guests, "{planned:?}");
        planned.digest
    }

    /// Waits for a phase, including the time until the replica leads.
    pub async fn wait(&self, name: &str, phase: v1::Phase) -> v1::Rollout {
        let mut last = String::new();
        let reached = async {
            loop {
                let request = v1::GetRequest {
                    rollout: name.to_owned(),
                };
                match self.rollouts().get(request).await {
                    Ok(answer) => {
                        let rollout = answer.into_inner().rollout.expect("a rollout");
                        if rollout.phase() == phase {
                            return rollout;
                        }
                        last = format!("{rollout:?}");
                    }
                    Err(status) => last = status.to_string(),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        reached.unwrap_or_else(|_| panic!("{name} is never {phase:?}: {last}"))
    }

    /// Waits until every guest of a wave is changed.
    pub async fn as_wanted(&self, name: &str, wave: usize) {
        let reached = async {
            loop {
                let rollout = name.to_owned();
                let answer = self.rollouts().get(v1::GetRequest { rollout }).await;
                let rollout = answer.expect("answers").into_inner().rollout;
                let wave = &rollout.expect("a rollout").waves[wave];
                if wave.as_wanted == wave.guests {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        reached.unwrap_or_else(|_| panic!("wave {wave} of {name} is never changed"));
    }

    pub async fn pause_and_resume(&self, name: &str) {
        let rollout = name.to_owned();
        let paused = self.rollouts().pause(v1::PauseRequest { rollout }).await;
        paused.expect("legal");
        let rollout = name.to_owned();
        let resumed = self.rollouts().resume(v1::ResumeRequest { rollout }).await;
        resumed.expect("legal");
    }

    pub async fn undo(&self, name: &str) {
        let request = v1::UndoRequest {
            rollout: name.to_owned(),
        };
        self.rollouts().undo(request).await.expect("legal");
        self.wait(name, v1::Phase::Undone).await;
    }
}

/// Looks again and again until something is found.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, found).await;
    found.unwrap_or_else(|_| panic!("not seen within {PATIENCE:?}: {what}"))
}

/// Returns a spec with INC of "alpha" on every guest. A second INC would change the count, whereas
/// a second ENABLE would not.
pub fn spec(more: &str) -> String {
    format!("selector: {{guests: [\"web-*\"]}}\nclaims: [{{want: held, keys: [alpha]}}]\n{more}\n")
}
