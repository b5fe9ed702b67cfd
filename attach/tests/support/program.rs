// SPDX-License-Identifier: Apache-2.0
//! The signals of the program `patchbay-attach`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::qemu::Process;
use super::{Accelerator, Memory, Qemu, until};

/// Starts the program and waits until it has attached.
fn attached(qemu: &Qemu, options: &[String]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-attach"));
    command
        .args(["qemu", "--qmp"])
        .arg(qemu.socket("qmp"))
        .arg("--api-socket")
        .arg(qemu.socket("api"))
        .args(options)
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let mut attacher = Process(command.spawn().expect("it is built"));
    let lines = BufReader::new(attacher.stderr.take().expect("piped")).lines();
    let mut lines = lines.map_while(Result::ok);
    assert!(lines.any(|line| line.starts_with("attached to ")));
    attacher
}

fn signal(process: &Process, signal: Signal) {
    let pid = Pid::from_raw(process.id().cast_signed()).expect("a process");
    kill_process(pid, signal).expect("it runs");
}

/// Checks that SIGHUP opens a renamed audit log again, and detaches if there is none.
pub fn hangup() {
    let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    let (log, renamed) = (qemu.socket("audit"), qemu.socket("audit.1"));
    let mut attacher = attached(&qemu, &[format!("--audit-log={}", log.display())]);
    fs::rename(&log, &renamed).expect("the log is there");
    signal(&attacher, Signal::HUP);
    until("the log is opened again", || log.exists());
    signal(&attacher, Signal::TERM);
    assert!(attacher.wait().expect("a child").success());
    let mut attacher = attached(&qemu, &[]);
    signal(&attacher, Signal::HUP);
    assert!(attacher.wait().expect("a child").success());
}
