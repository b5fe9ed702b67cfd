// SPDX-License-Identifier: Apache-2.0
//! Runs a cluster of etcd on the loopback interface, or in network namespaces.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use patchbay_access::certs;
use patchbay_fleet::hosts::TlsFiles;
use patchbay_fleet::store::{
    DEFAULT_ROOT, EtcdStore, Expected, Revision, Store, StoreError, Transaction,
};

use rustix::process::{Pid, Signal, kill_process};

use super::fleet::{PATIENCE, eventually};
use super::network::{Network, Side};

pub struct Etcd {
    folder: tempfile::TempDir,
    clients: Vec<String>,
    peers: Vec<String>,
    members: Vec<Option<Child>>,
    /// True if clients need certificates.
    tls: bool,
    /// The maximum size of the database in bytes; `None` for etcd's default.
    quota: Option<u64>,
    /// Each member is in a namespace of this network.
    network: Option<Network>,
}

fn has_etcdctl() -> bool {
    let is_there = Command::new("etcdctl").arg("version").output().is_ok();
    if !is_there {
        eprintln!("SKIPPED: no etcdctl on this machine; apt-get install etcd-client");
    }
    is_there
}

/// The key of the leading controller.
const LEADER: &str = "leader";

/// The port of members that are in namespaces.
pub const PORT: u16 = 2379;

/// Returns the number of a member in addresses.
fn number(member: usize) -> u8 {
    u8::try_from(member + 1).expect("few members")
}

/// The timeout of each wait for a member's metrics, which no correct run reaches.
const METRICS: Duration = Duration::from_secs(5);

/// Returns the number of watches that a member has, by its metrics.
fn watchers(member: &Ipv4Addr) -> u64 {
    let address = SocketAddr::from((*member, PORT));
    let mut stream = TcpStream::connect_timeout(&address, METRICS).expect("it listens");
    stream.set_read_timeout(Some(METRICS)).expect("connected");
    let request = "GET /metrics HTTP/1.0\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let mut lines = answer.lines();
    let line = lines.find_map(|line| line.strip_prefix("etcd_debugging_mvcc_watcher_total "));
    line.and_then(|count| count.parse().ok()).expect("a number")
}

pub fn free_address() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("bound").to_string()
}

impl Etcd {
    /// Starts a cluster; `None` if etcd is not installed.
    pub async fn start(members: usize) -> Option<Self> {
        let etcd = Self::prepare(members, false)?;
        etcd.run().await
    }

    /// Starts a cluster whose members are in namespaces of their own. `None` without etcd and
    /// etcdctl.
    pub async fn start_in(network: Network, members: u8) -> Option<Self> {
        has_etcdctl().then_some(())?;
        let mut etcd = Self::prepare(usize::from(members), false)?;
        etcd.network = Some(network);
        let url =
            |side: Side, member: usize| format!("http://{}:{PORT}", side.address(number(member)));
        let members = 0..etcd.members.len();
        etcd.clients = members.clone().map(|of| url(Side::Clients, of)).collect();
        etcd.peers = members.map(|of| url(Side::Peers, of)).collect();
        etcd.run().await
    }

    /// Starts one member whose database has at most this many bytes. `None` without etcd and
    /// etcdctl.
    pub async fn start_small(quota: u64) -> Option<Self> {
        has_etcdctl().then_some(())?;
        let mut etcd = Self::prepare(1, false)?;
        etcd.quota = Some(quota);
        etcd.run().await
    }

    /// Starts one member that identifies its clients by their certificates. The users "fleet",
    /// "host-0" and "host-1" have the roles of a controller and of hosts, and "stranger" has none.
    /// `None` without etcd and etcdctl.
    pub async fn start_with_users() -> Option<Self> {
        has_etcdctl().then_some(())?;
        let etcd = Self::prepare(1, true)?;
        certs::init(&etcd.certs(), certs::DEFAULT_TRUST_DOMAIN).expect("a CA");
        for name in ["member", "root", "fleet", "host-0", "host-1", "stranger"] {
            let request = certs::Request {
                name: name.to_owned(),
                hosts: vec!["127.0.0.1".to_owned()],
                days: 1,
                ..certs::Request::default()
            };
            certs::issue(&etcd.certs(), &request).expect("issued");
        }
        let etcd = etcd.run().await?;
        for words in [
            "user add root --no-password",
            "user grant-role root root",
            "user add stranger --no-password",
        ] {
            etcd.ctl(words);
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/etcd-roles.sh");
        let printed = Command::new("sh")
            .args([script, "fleet", "host-0", "host-1"])
            .output()
            .expect("a shell");
        assert!(printed.status.success(), "{printed:?}");
        for line in String::from_utf8_lossy(&printed.stdout).lines() {
            etcd.ctl(line.strip_prefix("etcdctl ").expect("a command"));
        }
        etcd.ctl("auth enable");
        Some(etcd)
    }

    pub fn ctl(&self, words: &str) {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3");
        command.arg("--endpoints").arg(&self.clients[0]);
        if let Some(files) = self.tls("root") {
            command.arg("--cacert").arg(files.ca);
            command.arg("--cert").arg(files.certificate);
            command.arg("--key").arg(files.key);
        }
        let output = command.args(words.split(' ')).output().expect("it starts");
        assert!(output.status.success(), "{words}: {output:?}");
    }

    /// Returns the folder of the CA and of each user's certificate.
    pub fn certs(&self) -> PathBuf {
        self.folder.path().join("certs")
    }

    pub fn tls(&self, user: &str) -> Option<TlsFiles> {
        let file = |name: &str| self.certs().join(name);
        self.tls.then(|| TlsFiles {
            certificate: file(&format!("{user}.pem")),
            key: file(&format!("{user}.key")),
            ca: file("ca.pem"),
        })
    }

    fn prepare(members: usize, tls: bool) -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
            return None;
        }
        let scheme = if tls { "https" } else { "http" };
        let address = |scheme: &str| format!("{scheme}://{}", free_address());
        Some(Self {
            folder: tempfile::tempdir().expect("temporary folder"),
            clients: (0..members).map(|_| address(scheme)).collect(),
            peers: (0..members).map(|_| address("http")).collect(),
            members: (0..members).map(|_| None).collect(),
            tls,
            quota: None,
            network: None,
        })
    }

    async fn run(mut self) -> Option<Self> {
        for member in 0..self.members.len() {
            self.start_member(member);
        }
        self.answers().await;
        Some(self)
    }

    /// Starts a member, or restarts it with its data.
    pub fn start_member(&mut self, member: usize) {
        let name = |index: usize| format!("m{index}");
        let cluster: Vec<String> = self
            .peers
            .iter()
            .enumerate()
            .map(|(index, peer)| format!("{}={peer}", name(index)))
            .collect();
        let mut command = Command::new("etcd");
        command.arg("--name").arg(name(member));
        command
            .arg("--data-dir")
            .arg(self.folder.path().join(name(member)));
        // The data need not survive a crash of the machine.
        command.arg("--unsafe-no-fsync");
        for (option, value) in [
            ("--listen-client-urls", self.clients[member].clone()),
            ("--advertise-client-urls", self.clients[member].clone()),
            ("--listen-peer-urls", self.peers[member].clone()),
            ("--initial-advertise-peer-urls", self.peers[member].clone()),
            ("--initial-cluster", cluster.join(",")),
        ] {
            command.arg(option).arg(value);
        }
        if let Some(quota) = self.quota {
            command.arg(format!("--quota-backend-bytes={quota}"));
        }
        if let Some(files) = self.tls("member") {
            command.arg("--client-cert-auth");
            command.arg("--cert-file").arg(&files.certificate);
            command.arg("--key-file").arg(&files.key);
            command.arg("--trusted-ca-file").arg(&files.ca);
        }
        if let Some(network) = self.network {
            let sides = [Side::Clients, Side::Peers];
            command = network.enter(number(member), &sides, &command);
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.members[member] = Some(command.spawn().expect("starts"));
    }

    fn network(&self) -> Network {
        self.network.expect("the members are in namespaces")
    }

    pub fn cut(&self, member: usize, side: Side) {
        self.network().cut(number(member), side);
    }

    pub fn heal(&self, member: usize, side: Side) {
        self.network().heal(number(member), side);
    }

    /// Returns the address at which clients reach a member that is in a namespace.
    fn address(member: usize) -> Ipv4Addr {
        let address = Side::Clients.address(number(member));
        address.parse().expect("an address")
    }

    /// Waits until the members have this many watches of clients, and returns the number of each
    /// member.
    pub async fn has_watchers(&self, count: u64) -> Vec<u64> {
        let reached = async || {
            let members = 0..self.members.len();
            let found = members.map(|member| watchers(&Self::address(member)));
            let found: Vec<u64> = found.collect();
            (found.iter().sum::<u64>() == count).then_some(found)
        };
        eventually(&format!("there are {count} watches"), reached).await
    }

    /// Waits until all members have the same leader, and returns it.
    pub async fn leader(&self) -> usize {
        eventually("the members agree", async || self.common_leader().await).await
    }

    async fn common_leader(&self) -> Option<usize> {
        let mut command = tokio::process::Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").kill_on_drop(true);
        command.arg("--endpoints").arg(self.addresses());
        command.args(["--command-timeout=2s", "--dial-timeout=1s"]);
        command.args(["endpoint", "status", "--write-out=json"]);
        let output = command.output().await.expect("it starts");
        // The output is an answer of each member that answers, in the order of the endpoints.
        let answers: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).ok()?;
        let all_of = |path: &str| -> Vec<Option<u64>> {
            let answers = answers.iter();
            answers.map(|of| of.pointer(path)?.as_u64()).collect()
        };
        let (leaders, ids) = (all_of("/Status/leader"), all_of("/Status/header/member_id"));
        let is_agreed = leaders.len() == self.members.len()
            && leaders.iter().all(|leader| *leader == leaders[0]);
        is_agreed.then_some(())?;
        ids.iter().position(|id| id.is_some() && *id == leaders[0])
    }

    pub fn signal(&self, member: usize, signal: Signal) {
        let process = self.members[member].as_ref().expect("it runs");
        kill_process(Pid::from_child(process), signal).expect("sent");
    }

    pub fn kill_member(&mut self, member: usize) {
        if let Some(mut process) = self.members[member].take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub fn addresses(&self) -> String {
        self.clients.join(",")
    }

    pub fn store(&self) -> EtcdStore {
        self.store_of("fleet")
    }

    /// Returns the store of a user. Without certificates there is only one user.
    pub fn store_of(&self, user: &str) -> EtcdStore {
        let tls = self.tls(user);
        EtcdStore::new(&self.clients, DEFAULT_ROOT, tls.as_ref()).expect("addresses")
    }

    /// Returns the options of a controller.
    pub fn options_of(&self, user: &str) -> Vec<String> {
        let mut options: Vec<String> = Vec::new();
        for client in &self.clients {
            options.push(format!("--etcd={client}"));
        }
        if let Some(files) = self.tls(user) {
            options.push(format!("--etcd-ca={}", files.ca.display()));
            options.push(format!("--etcd-cert={}", files.certificate.display()));
            options.push(format!("--etcd-key={}", files.key.display()));
        }
        options
    }

    /// Returns the revision at which the leading controller became the leader.
    pub async fn term(&self) -> Revision {
        let leader = self.store().get(LEADER).await.expect("etcd runs");
        leader.expect("a controller leads").created
    }

    /// Ends this term as the end of the leader's lease does. A later term continues.
    pub async fn end_term(&self, term: Revision) {
        let end = Transaction::new()
            .expect(LEADER, Expected::CreatedAt(term))
            .delete(LEADER);
        match self.store().commit(end).await {
            // The lease may have ended already.
            Ok(_) | Err(StoreError::Conflict) => {}
            Err(error) => panic!("{error}"),
        }
    }

    pub async fn answers(&self) {
        let answers = async {
            let store = self.store();
            while store.get("x").await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let answered = tokio::time::timeout(PATIENCE, answers).await;
        answered.expect("etcd comes up");
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in 0..self.members.len() {
            self.kill_member(member);
        }
    }
}
