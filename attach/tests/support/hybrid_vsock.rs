// SPDX-License-Identifier: Apache-2.0
//! Tests the agent's socket beside the vsock devices of Firecracker and Cloud Hypervisor, with the
//! attacher as it is installed.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::foreign::{configuration, counter, jailed};
use super::process::readable;
use super::programs::program;
use super::{Process, until};

/// Starts attachers until one has created the agent's socket. The monitor may not have started its
/// guest yet, and the watchdog of an earlier attacher may not have ended.
fn attacher(pid: u32, folder: &Path, socket: &Path) -> Process {
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-attach"));
        command.args(["process", &pid.to_string(), "--api-socket"]);
        let command = command.arg(folder.join("attached.sock"));
        Process(command.stdin(Stdio::null()).spawn().expect("it starts"))
    };
    let mut attacher = start();
    until("an attacher serves the agent's socket", || {
        if attacher.try_wait().expect("own child").is_some() {
            attacher = start();
        }
        // No process listens on the socket that a killed attacher has left. This process is not the
        // monitor, so its connection is closed.
        let client = UnixStream::connect(socket);
        client.is_ok_and(|mut client| matches!(client.read(&mut [0]), Ok(0)))
    });
    attacher
}

/// Tests the agent's socket of a monitor that runs as a user.
fn serves(pid: u32, folder: &Path, socket: &Path, user: u32) {
    let mut killed = attacher(pid, folder, socket);
    let found = fs::metadata(socket).expect("bound");
    assert_eq!((found.uid(), found.mode() & 0o777), (user, 0o600));
    killed.kill().expect("own child");
    killed.wait().expect("own child");
    assert!(socket.exists(), "a killed attacher leaves it");
    let mut last = attacher(pid, folder, socket);
    let id = Pid::from_raw(last.id().cast_signed()).expect("a process");
    kill_process(id, Signal::TERM).expect("own child");
    assert!(last.wait().expect("own child").success());
    assert!(fs::symlink_metadata(socket).is_err(), "removed");
}

/// Tests Firecracker, which also listens on its API socket.
pub fn firecracker() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let program = || program("firecracker", folder);
    let Some(program) = readable().then(program).flatten() else {
        return;
    };
    let config = configuration(folder, &counter(folder), &folder.join("v.sock"));
    let mut monitor = Command::new(program);
    monitor
        .args(["--id", "agent-1", "--config-file"])
        .arg(config);
    monitor.arg("--api-sock").arg(folder.join("api.sock"));
    let monitor = monitor.stdin(Stdio::null()).spawn();
    let monitor = Process(monitor.expect("it starts"));
    let user = rustix::process::geteuid().as_raw();
    serves(monitor.id(), folder, &folder.join("v.sock_1024"), user);
}

/// Tests Firecracker in its jail, whose path of the device is relative.
pub fn jailed_firecracker() {
    let folder = tempfile::tempdir().expect("temporary folder");
    if let Some((monitor, root)) = jailed(folder.path()) {
        serves(monitor.0, folder.path(), &root.join("v.sock_1024"), 65534);
    }
}

/// Tests Cloud Hypervisor, which also listens on its API socket.
pub fn cloud_hypervisor() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let program = || program("cloud-hypervisor", folder);
    let Some(program) = readable().then(program).flatten() else {
        return;
    };
    let mut monitor = Command::new(program);
    monitor.arg("--kernel").arg(counter(folder));
    monitor.args(["--cpus", "boot=1", "--memory", "size=64M"]);
    monitor.args(["--console", "off", "--serial", "off", "--api-socket"]);
    monitor.arg(folder.join("api.sock")).arg("--vsock");
    monitor.arg(format!("cid=3,socket={}", folder.join("v.sock").display()));
    let monitor = Process(monitor.stdin(Stdio::null()).spawn().expect("it starts"));
    let user = rustix::process::geteuid().as_raw();
    serves(monitor.id(), folder, &folder.join("v.sock_1024"), user);
}
