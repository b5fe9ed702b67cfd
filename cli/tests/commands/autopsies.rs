// SPDX-License-Identifier: Apache-2.0
//! Tests that `patchbayd` writes an autopsy of a guest whose kernel panics.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use patchbay_guest::testing::TestKey;
use patchbay_node::autopsy::Autopsies;
use patchbay_node::serve::Config;
use patchbay_service::testing::GuestLog;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use super::daemon;
use super::lab::{Commands, Lab};

const PATIENCE: Duration = Duration::from_secs(60);

/// A guest whose kernel's log is in memory, and a daemon that writes its autopsies.
struct Panicking {
    lab: Lab,
    log: GuestLog,
    runtime: Runtime,
    folder: PathBuf,
}

impl Panicking {
    /// Starts the daemon. `policy` is the content of its policy file.
    fn new(folder: &str, policy: Option<&str>) -> Self {
        let lab = Lab::with(&[TestKey::new("alpha", 1)]);
        let log = GuestLog::new(&lab.guest);
        log.found_by(&lab.registry);
        log.print(6, "all is well");
        let folder = lab.folder().join(folder);
        let policy = policy.map(|text| {
            let file = lab.folder().join("policy.yaml");
            std::fs::write(&file, text).expect("written");
            file
        });
        let runtime = daemon::start(Config {
            policy,
            metrics: Some(metrics(&lab)),
            autopsies: Some(Autopsies {
                folder: folder.clone(),
                program: env!("CARGO_BIN_EXE_patchbay").into(),
            }),
            ..daemon::config(&lab)
        });
        Self {
            lab,
            log,
            runtime,
            folder,
        }
    }

    fn panic(&self) {
        self.log
            .print(0, "Kernel panic - not syncing: \u{1b}[2Jtest");
        self.log.panic(0);
    }

    /// Returns the files of the folder.
    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten();
        let mut files: Vec<_> = entries
            .map(|entry| entry.expect("an entry").path())
            .collect();
        files.retain(|path| !is_hidden(path));
        files.sort();
        files
    }

    /// Waits until the daemon's metrics have this line.
    fn metric(&self, line: &str) {
        let began = Instant::now();
        loop {
            let text = self.runtime.block_on(scrape(&self.lab));
            if text.lines().any(|found| found == line) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "never {line}: {text}");
        }
    }
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_none_or(|name| name.starts_with('.'))
}

fn metrics(lab: &Lab) -> patchbay_access::scrape::MetricsAddress {
    let address = format!("unix:{}", lab.folder().join("metrics").display());
    address.parse().expect("an address")
}

/// Returns the metrics; empty before the daemon listens.
async fn scrape(lab: &Lab) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let Ok(mut stream) = UnixStream::connect(lab.folder().join("metrics")).await else {
        tokio::task::yield_now().await;
        return String::new();
    };
    let request = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("answered");
    text
}

#[test]
fn a_guest_that_panics_gets_one_autopsy() {
    let guest = Panicking::new("deep/autopsies", None);
    guest.metric("# EOF");
    assert!(guest.files().is_empty());
    guest.panic();
    guest.metric("patchbayd_autopsies_total{result=\"written\"} 1");
    let files = guest.files();
    let [file] = &files[..] else {
        panic!("not one file: {files:?}");
    };
    let mode = std::fs::metadata(file).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = std::fs::read(file).expect("text");
    assert!(!text.contains(&0x1b));
    let found: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let records = found["log"]["records"].as_array().expect("records");
    assert_eq!(
        records[1]["text"],
        "Kernel panic - not syncing: \\x1b[2Jtest"
    );
    assert_eq!(found["guest"]["details"]["panicked"], true);
    let name = file
        .file_name()
        .and_then(|name| name.to_str())
        .expect("UTF-8");
    let guest_name = found["guest"]["name"].as_str().expect("a name");
    assert!(name.starts_with(&format!("{guest_name}_")), "{name}");

    // The reading is in both audit logs.
    let own = format!("uid:{}", rustix::process::geteuid().as_raw());
    let host = std::fs::read_to_string(guest.lab.folder().join("host-audit.log")).expect("text");
    assert!(
        host.contains("StreamKernelLog") && host.contains(&own),
        "{host}"
    );
    let audit = guest.lab.audit();
    let reads: Vec<_> = audit
        .iter()
        .filter(|line| line["reads"] == "kernel log")
        .collect();
    assert_eq!(reads.len(), 1, "{audit:?}");
}

/// The daemon goes on, and tries again a few times.
#[test]
fn a_folder_that_cannot_be_used_is_counted_and_the_daemon_serves_on() {
    let guest = Panicking::new("file/autopsies", None);
    std::fs::write(guest.lab.folder().join("file"), "").expect("written");
    guest.panic();
    guest.metric("patchbayd_autopsies_total{result=\"failed\"} 3");
    let mut command = guest.lab.command(&["keys", "get", "alpha"]);
    command.env("PATCHBAY_SOCKET", guest.lab.folder().join("node.sock"));
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_policy_that_does_not_let_the_daemon_read_prevents_the_autopsy() {
    let nobody = "rules: [{name: none, principals: ['uid:4000000000'], role: admin}]";
    let guest = Panicking::new("autopsies", Some(nobody));
    guest.panic();
    guest.metric("patchbayd_autopsies_total{result=\"failed\"} 3");
    assert!(guest.files().is_empty());
}
