// SPDX-License-Identifier: Apache-2.0
//! Tests the discovery of guests of other monitors. A script simulates the attacher.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

use super::support::{Host, Monitor, PATIENCE, own_uid};

/// A host that attaches to the QEMUs of a folder.
struct Attaching {
    host: Host,
    folder: PathBuf,
}

fn policy() -> String {
    format!(
        "rules: [{{name: own, principals: ['{}'], role: admin}}]",
        own_uid()
    )
}

/// The script's record of its start.
struct Start {
    pid: Pid,
    arguments: Vec<String>,
}

impl Attaching {
    /// Starts the daemon. The script ends when its QMP socket is gone, as an attacher does with its
    /// guest.
    async fn start() -> Self {
        Self::with_script("while [ -e \"$3\" ]; do sleep 0.02; done").await
    }

    async fn with_script(script: &str) -> Self {
        let mut host = Host::new(&policy());
        let (folder, program) = (host.path("qmp"), host.path("attacher"));
        std::fs::create_dir(&folder).expect("created");
        let notes = host.path("notes");
        let script = format!(
            "#!/bin/sh\necho $$ \"$@\" >>{}\n{script}\n",
            notes.display()
        );
        std::fs::write(&program, script).expect("written");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, executable).expect("changed");
        let [folder_name, program] = [&folder, &program].map(|path| path.display().to_string());
        let debug_files = host.path("debug");
        std::fs::create_dir(&debug_files).expect("created");
        host.start_daemon(&[
            "--attach-qmp",
            &folder_name,
            "--attach-program",
            &program,
            "--debug-file",
            &debug_files.display().to_string(),
        ])
        .await;
        Self { host, folder }
    }

    fn qemu(&self, name: &str) -> UnixListener {
        UnixListener::bind(self.folder.join(name)).expect("bound")
    }

    fn quit(&self, name: &str) {
        std::fs::remove_file(self.folder.join(name)).expect("removed");
    }

    /// Waits until attachers were started this many times, and returns the starts.
    async fn starts(&self, count: usize) -> Vec<Start> {
        let wait = async {
            loop {
                let notes = std::fs::read_to_string(self.host.path("notes")).unwrap_or_default();
                if notes.lines().count() >= count && notes.ends_with('\n') {
                    return notes;
                }
                tokio::task::yield_now().await;
            }
        };
        let notes = tokio::time::timeout(PATIENCE, wait).await;
        let notes = notes.unwrap_or_else(|_| panic!("there are never {count} starts"));
        let starts: Vec<Start> = notes
            .lines()
            .map(|line| {
                let mut words = line.split(' ').map(str::to_owned);
                let pid = words.next().and_then(|pid| pid.parse().ok());
                Start {
                    pid: pid.and_then(Pid::from_raw).expect("a process"),
                    arguments: words.collect(),
                }
            })
            .collect();
        assert_eq!(starts.len(), count);
        starts
    }
}

#[tokio::test]
async fn a_qemu_that_comes_is_attached_and_served() {
    let mut this = Attaching::start().await;
    let _one = this.qemu("web-1.qmp");
    this.host.logged("attaching").await;
    let first = this.starts(1).await.remove(0);
    let qmp = this.folder.join("web-1.qmp").display().to_string();
    assert_eq!(first.arguments[..3], ["qemu", "--qmp", &qmp]);
    assert_eq!(first.arguments[3], "--api-socket");
    let debug_files = this.host.path("debug").display().to_string();
    assert_eq!(first.arguments[5..], ["--debug-file", &debug_files]);
    let socket = PathBuf::from(&first.arguments[4]);
    assert_eq!(socket.parent(), Some(this.host.path("run").as_path()));
    let served = Monitor::start(&socket, "web-1", &this.host.path("web-1.audit"));
    assert_eq!(this.host.list_until(1).await[0].guest, "web-1");

    let _two = this.qemu("web-2.qmp");
    let second = this.starts(2).await.remove(1);
    assert_ne!(first.arguments[4], second.arguments[4]);
    // The attacher ends with its guest, and is not restarted.
    this.quit("web-1.qmp");
    this.host.logged("the guest is gone").await;
    served.end().await;
    assert!(this.host.list_until(0).await.is_empty());
    this.quit("web-2.qmp");
    this.host.logged("the guest is gone").await;
    this.starts(2).await;
}

#[tokio::test]
async fn an_attacher_that_is_killed_is_started_again() {
    let mut this = Attaching::start().await;
    let _one = this.qemu("web-1.qmp");
    let first = this.starts(1).await.remove(0);
    kill_process(first.pid, Signal::KILL).expect("its own");
    let line = this.host.logged("attacher ended; started again").await;
    assert!(line.to_string().contains("SIGKILL"), "{line}");
    assert!(line.to_string().contains("again at once"), "{line}");
    let second = this.starts(2).await.remove(1);
    assert_eq!(first.arguments, second.arguments);
    this.quit("web-1.qmp");
    this.host.logged("the guest is gone").await;
}

/// Checks an attacher that fails, for example because its guest is emulated or the QMP socket is in
/// use.
#[tokio::test]
async fn an_attacher_that_is_refused_is_tried_again_until_the_guest_is_gone() {
    let mut this = Attaching::with_script("exit 1").await;
    let _one = this.qemu("web-1.qmp");
    for delay in ["1s", "2s"] {
        let line = this.host.logged("attacher ended; started again").await;
        assert!(line.to_string().contains(&format!("in {delay}")), "{line}");
    }
    // The supervision ends without waiting for the next attempt.
    this.quit("web-1.qmp");
    this.host.logged("the guest is gone").await;
    this.starts(2).await;
    // A new QEMU with the same path is another guest.
    let _again = this.qemu("web-1.qmp");
    let line = this.host.logged("attacher ended; started again").await;
    assert!(line.to_string().contains("in 1s"), "{line}");
    this.quit("web-1.qmp");
    this.host.logged("the guest is gone").await;
}

/// Checks that an attacher keeps running, because its clients' holds would be lost otherwise.
#[tokio::test]
async fn an_attacher_outlives_the_daemon_and_is_found_again() {
    let mut this = Attaching::start().await;
    let _one = this.qemu("web-1.qmp");
    let first = this.starts(1).await.remove(0);
    let socket = PathBuf::from(&first.arguments[4]);
    let _served = Monitor::start(&socket, "web-1", &this.host.path("web-1.audit"));
    this.host.list_until(1).await;
    this.host.kill_daemon();
    this.host.start_daemon(&[]).await;
    this.host.list_until(1).await;
    // The scan that finds web-2.qmp also finds web-1.qmp, which must not be attached again.
    let _two = this.qemu("web-2.qmp");
    let second = this.starts(2).await.remove(1);
    assert_ne!(first.arguments[2], second.arguments[2]);
    for name in ["web-1.qmp", "web-2.qmp"] {
        this.quit(name);
    }
}

#[tokio::test]
async fn what_is_no_socket_is_not_attached() {
    let mut this = Attaching::start().await;
    std::fs::write(this.folder.join("file.qmp"), "").expect("written");
    std::fs::create_dir(this.folder.join("folder.qmp")).expect("created");
    let _one = this.qemu("web-1.qmp");
    let link = this.folder.join("link.qmp");
    std::os::unix::fs::symlink(this.folder.join("web-1.qmp"), link).expect("linked");
    this.starts(1).await;
    // A later scan finds the second socket, and the others are still not attached.
    let _two = this.qemu("web-2.qmp");
    this.starts(2).await;
    for name in ["web-1.qmp", "web-2.qmp"] {
        this.quit(name);
        this.host.logged("the guest is gone").await;
    }
}

#[tokio::test]
async fn an_attacher_that_is_missing_is_said() {
    let mut host = Host::new(&policy());
    let folder = host.path("qmp");
    std::fs::create_dir(&folder).expect("created");
    let _one = UnixListener::bind(folder.join("web-1.qmp")).expect("bound");
    let folder = folder.display().to_string();
    host.start_daemon(&["--attach-qmp", &folder, "--attach-program", "/nonexistent"])
        .await;
    let line = host.logged("attacher ended; started again").await;
    let said = line.to_string();
    assert!(said.contains("/nonexistent cannot be started"), "{line}");
}

/// The command line of a process names its guest, and the attacher belongs to the daemon itself. So
/// if the process has a name first, the name must still go to the guest to which an administrator
/// gives it.
#[tokio::test]
async fn the_guest_of_a_process_yields_its_name() {
    let mut host = Host::new(&policy());
    host.start_daemon(&[]).await;
    let process = |host: &Host, number: u32| {
        let name = format!("attached-process-{number}.sock");
        let audit = host.path(&format!("{number}.audit"));
        Monitor::start(&host.path("run").join(name), "web", &audit)
    };
    let _first = process(&host, 1);
    host.list_until(1).await;
    let _own = host.monitor("web");
    let line = host.logged("guest found; the guest of a process").await;
    assert!(line["monitor"].to_string().contains("/web.sock"), "{line}");
    assert_eq!(host.list_until(1).await[0].guest, "web");
    // A process that starts later does not take the name.
    let _later = process(&host, 2);
    loop {
        let line = host.logged("another monitor serves a guest").await;
        assert!(line["serves"].to_string().contains("/web.sock"), "{line}");
        if line["monitor"].to_string().contains("process-2") {
            return;
        }
    }
}
