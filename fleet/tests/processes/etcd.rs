// SPDX-License-Identifier: Apache-2.0
//! A cluster of etcd on loopback.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use patchbay_fleet::store::{DEFAULT_ROOT, EtcdStore, Store};

use super::fleet::PATIENCE;

pub struct Etcd {
    folder: tempfile::TempDir,
    clients: Vec<String>,
    peers: Vec<String>,
    members: Vec<Option<Child>>,
}

fn free_address() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    format!("http://{}", socket.local_addr().expect("bound"))
}

impl Etcd {
    /// `None` if etcd is not installed.
    pub async fn start(members: usize) -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
            return None;
        }
        let mut etcd = Self {
            folder: tempfile::tempdir().expect("temporary folder"),
            clients: (0..members).map(|_| free_address()).collect(),
            peers: (0..members).map(|_| free_address()).collect(),
            members: (0..members).map(|_| None).collect(),
        };
        for member in 0..members {
            etcd.start_member(member);
        }
        etcd.answers().await;
        Some(etcd)
    }

    /// Starts it, or starts it again with its data.
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
        // Tests need no disk that keeps its promises.
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
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.members[member] = Some(command.spawn().expect("starts"));
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
        EtcdStore::new(&self.clients, DEFAULT_ROOT).expect("addresses")
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
