// SPDX-License-Identifier: Apache-2.0

//! Runs the monitor's program with a kernel of a few instructions that prints and never ends.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Prints `x` once and halts.
pub const QUIET: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, // out dx, al
    0xf4, // hlt
    0xeb, 0xfd, // jmp to hlt
];

/// Prints `x` for ever.
pub const TALKING: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xeb, 0xfd];

/// An ELF kernel with one segment at 1 MiB, entered at its start.
pub fn kernel(code: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 0x1000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(16, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(24, &0x10_0000_u64.to_le_bytes());
    put(32, &64_u64.to_le_bytes());
    put(52, &[64, 0, 56, 0, 1, 0]);
    put(64, &1_u32.to_le_bytes());
    let length = code.len() as u64;
    for (field, value) in [
        (8, 0x800),
        (24, 0x10_0000),
        (32, length),
        (40, 0x1000),
        (48, 8),
    ] {
        put(64 + field, &u64::to_le_bytes(value));
    }
    put(0x800, code);
    image
}

/// Returns whether KVM is available; prints a message if not.
pub fn has_kvm() -> bool {
    let usable = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    if let Err(error) = &usable {
        println!("SKIPPED: /dev/kvm: {error}");
    }
    usable.is_ok()
}

/// A directory with a kernel, in which the program runs.
pub struct Case {
    pub folder: tempfile::TempDir,
}

impl Case {
    pub fn new(code: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("kernel"), kernel(code)).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the command that runs the program with an empty stdin.
    pub fn program(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay-vmm"));
        self.complete(&mut command, arguments);
        command
    }

    /// Returns the command that runs the program through another program. `before` is that program
    /// with its arguments.
    pub fn program_under(&self, before: &[&str], arguments: &[&str]) -> Command {
        let mut command = Command::new(before[0]);
        command.args(&before[1..]);
        command.arg(env!("CARGO_BIN_EXE_patchbay-vmm"));
        self.complete(&mut command, arguments);
        command
    }

    fn complete(&self, command: &mut Command, arguments: &[&str]) {
        command
            .args(["--kernel", "kernel", "--memory", "4M", "--no-patchbay"])
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
    }

    /// Returns whether a program listens on this socket.
    pub fn answers(&self, socket: &str) -> bool {
        UnixStream::connect(self.path(socket)).is_ok()
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }
}

/// A running monitor, killed when dropped.
pub struct Monitor(pub Child);

impl Monitor {
    pub fn start(mut command: Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        let process = Pid::from_child(&self.0);
        kill_process(process, signal).unwrap();
    }

    /// Waits for the program's end; the test's watchdog bounds the wait.
    pub fn wait(&mut self) -> ExitStatus {
        self.0.wait().unwrap()
    }

    pub fn runs(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// Returns whether the thread sleeps in write(2).
    pub fn is_stuck_writing(&self, thread: &str) -> bool {
        let folder = format!("/proc/{}/task", self.0.id());
        std::fs::read_dir(folder).unwrap().any(|task| {
            let task = task.unwrap().path();
            let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
            read("comm").trim() == thread && read("syscall").starts_with("1 ")
        })
    }

    /// Returns one field of each thread's `status` in /proc, with the thread's name.
    pub fn threads(&self, field: &str) -> Vec<(String, String)> {
        let folder = format!("/proc/{}/task", self.0.id());
        let tasks = std::fs::read_dir(folder).unwrap();
        let of = |task: &Path| {
            let text = std::fs::read_to_string(task.join("status")).ok()?;
            let value = |field: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(field))?;
                Some(line.trim_start_matches(':').trim().to_owned())
            };
            Some((value("Name")?, value(field)?))
        };
        tasks.filter_map(|task| of(&task.unwrap().path())).collect()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
