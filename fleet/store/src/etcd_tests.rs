// SPDX-License-Identifier: Apache-2.0
//! Runs the conformance suite on a real etcd on the loopback interface.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::*;

struct Etcd {
    process: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // SIGKILL is acceptable, because the data is no longer needed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_address() -> String {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    format!("http://{}", socket.local_addr().expect("bound"))
}

impl Etcd {
    /// Starts etcd; `None` if it is not installed.
    fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    fn start_with(options: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (address, peer) = (free_address(), free_address());
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path()).args(options);
        for (option, value) in [
            ("--listen-client-urls", &address),
            ("--advertise-client-urls", &address),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
            ("--initial-cluster", &format!("default={peer}")),
        ] {
            command.arg(option).arg(value);
        }
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        match process {
            Ok(process) => Some(Self {
                process,
                address,
                _folder: folder,
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => panic!("etcd cannot be started: {error}"),
        }
    }

    /// Returns a store under a separate root, once etcd answers.
    async fn store(&self, root: &str) -> Arc<dyn Store> {
        let members = [self.address.clone()];
        let store = EtcdStore::new(&members, root, None).expect("an address");
        let mut attempts = 0;
        while let Err(error) = store.get("x").await {
            attempts += 1;
            assert!(attempts < 600, "etcd does not come up: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Arc::new(store)
    }
}

#[tokio::test]
async fn etcd_conforms() {
    let Some(etcd) = Etcd::start() else {
        eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
        return;
    };
    let count = std::cell::Cell::new(0);
    conformance::check_all(async || {
        count.set(count.get() + 1);
        etcd.store(&format!("/test-{}/", count.get())).await
    })
    .await;
}

/// Checks that etcd takes the largest transaction also with the longest root, and with the most
/// conditions.
#[tokio::test]
async fn etcd_takes_the_largest_transaction_under_the_longest_root() {
    let Some(etcd) = Etcd::start() else {
        eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
        return;
    };
    let root = format!("/{}/", "r".repeat(MAX_ROOT_BYTES - 2));
    let store = etcd.store(&root).await;
    let key = |index| format!("{index:03}");
    let all = (0..MAX_TRANSACTION_OPS).fold(Transaction::new(), |all, index| {
        all.expect(key(index), Expected::Absent).put(key(index), "")
    });
    let rest = MAX_TRANSACTION_BYTES - all.bytes();
    let mut all = all;
    all.writes[0] = Write::Put {
        key: key(0),
        value: vec![7; rest],
        lease: None,
    };
    assert_eq!(all.bytes(), MAX_TRANSACTION_BYTES);
    store.commit(all).await.expect("etcd takes it");
    let longer = format!("{root}/");
    let refused = EtcdStore::new(&[etcd.address.clone()], &longer, None).map(|_| ());
    assert!(
        matches!(refused, Err(StoreError::Invalid(_))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_transaction_over_the_limit_in_bytes_is_not_sent_to_etcd() {
    let store = EtcdStore::new(&[free_address()], "/a/", None).expect("an address");
    for puts in [1, 2, MAX_TRANSACTION_OPS] {
        let large = conformance::of_size(puts, MAX_TRANSACTION_BYTES + 1);
        let refused = store.commit(large).await;
        assert!(
            matches!(&refused, Err(StoreError::TooLarge { key, .. }) if key.starts_with("large/")),
            "{refused:?}"
        );
    }
}

/// Checks that a transaction that this etcd will never take is not reported as one to be repeated.
#[tokio::test]
async fn an_etcd_with_lower_limits_refuses_for_good() {
    let options = ["--max-request-bytes=100000", "--max-txn-ops=8"];
    let Some(etcd) = Etcd::start_with(&options) else {
        eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
        return;
    };
    let store = etcd.store("/a/").await;
    for size in [200_000, 1_000_000] {
        let refused = store
            .commit(Transaction::new().put("a", vec![7; size]))
            .await;
        assert!(
            matches!(&refused, Err(StoreError::TooLarge { key, .. }) if key == "a"),
            "{refused:?}"
        );
    }
    let many = (0..9).fold(Transaction::new(), |all, index| {
        all.put(index.to_string(), "")
    });
    let refused = store.commit(many).await;
    assert!(
        matches!(refused, Err(StoreError::TooLarge { .. })),
        "{refused:?}"
    );
    let small = Transaction::new().put("a", vec![7; 50_000]);
    store.commit(small).await.expect("etcd takes it");
}

#[tokio::test]
async fn an_etcd_that_is_gone_is_unavailable() {
    let store = EtcdStore::new(&[free_address()], "/a/", None).expect("an address");
    let error = store.get("x").await.expect_err("nobody listens");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
}

#[tokio::test]
async fn a_member_that_is_gone_is_left_for_the_next() {
    let Some(etcd) = Etcd::start() else {
        eprintln!("SKIPPED: no etcd on this machine; apt-get install etcd-server");
        return;
    };
    etcd.store("/a/").await;
    let members = [free_address(), etcd.address.clone(), free_address()];
    // Each store begins with a member that it chooses at random.
    for _ in 0..8 {
        let store = EtcdStore::new(&members, "/a/", None).expect("addresses");
        for _ in 0..2 {
            let _ = store.get("x").await;
        }
        for _ in 0..4 {
            store.get("x").await.expect("a member answers");
        }
    }
}
