// SPDX-License-Identifier: Apache-2.0
//! Attaches to every guest of a host, by the daemon and by `patchbay attach --all`.
//!
//! Each test runs in a PID namespace of its own, so that it does not attach to the guests of other
//! tests.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use kvm_ioctls::Kvm;
use patchbay_attach::attach;
use patchbay_attach::host::{Host, Logging};
use patchbay_attach::process;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::daemon::{Daemon, Programs};
use super::process::{host, readable};
use super::{Accelerator, COUNTER, Memory, PauseWay, Process, Qemu, options, until};

/// Tells the test's program that it runs in the namespace.
const INSIDE: &str = "PATCHBAY_TEST_INSIDE";

/// Returns the programs under test if this process is in a PID namespace of its own. Otherwise runs
/// the test again in such a namespace, and returns `None`. Prints a message if the test cannot run.
fn inside(test: &str) -> Option<Programs> {
    let programs = readable().then(Programs::built).flatten()?;
    if std::env::var_os(INSIDE).is_some() {
        return Some(programs);
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a PID namespace needs root");
        return None;
    }
    let own = std::env::current_exe().expect("a program");
    let status = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(own)
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .expect("util-linux");
    assert!(status.success(), "{status}");
    None
}

/// Returns the names of the attachers' sockets in a folder.
fn sockets(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".sock")).collect();
    names.sort_unstable();
    names
}

/// Returns the running processes of the attacher's program: attachers and their watchdogs.
fn attachers() -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("mounted").flatten();
    let is_one = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains("(patchbay-attach)") && !stat.contains(") Z ")
    };
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut pids: Vec<u32> = pids.filter(is_one).collect();
    pids.sort_unstable();
    pids
}

/// The counter of a guest, read without an attacher.
struct Counter {
    process: Arc<process::Process>,
    at: u64,
}

impl Counter {
    fn of(qemu: &Qemu) -> Self {
        let process = process::Process::open(qemu.child.id()).expect("it runs");
        let process = Arc::new(process);
        let host = Host::open(&process, Logging::Refuse).expect("a guest");
        let at = host.host_address(&(COUNTER..COUNTER + 4)).expect("RAM");
        Self { process, at }
    }

    fn read(&self) -> u32 {
        let mut bytes = [0; 4];
        let memory = self.process.memory().expect("it runs");
        memory.read_exact_at(&mut bytes, self.at).expect("mapped");
        u32::from_le_bytes(bytes)
    }

    fn runs(&self) {
        let before = self.read();
        until("the guest counts on", || self.read() != before);
    }
}

fn terminate(pid: u32) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    kill_process(pid, Signal::TERM).expect("it runs");
}

/// Starts a QEMU whose guest counts.
fn counting() -> Option<Qemu> {
    let qemu = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd)?;
    until("the guest has started", || {
        let row = row(qemu.child.id());
        // A program of the test may be attached to the guest before this command lists it.
        let reason = row["reasons"][0].as_str().unwrap_or_default();
        let is_attached = reason.ends_with("is attached to it");
        is_attached || row["attachable"].as_str().is_some_and(|can| can != "no")
    });
    Some(qemu)
}

/// Returns what `patchbay host list` says about a process's guest.
fn row(pid: u32) -> Value {
    let programs = Programs::built().expect("built");
    let output = Command::new(&programs.cli)
        .args(["host", "list", "-o", "json"])
        .output()
        .expect("started");
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = rows.as_array().expect("a list").iter();
    let mut rows = rows.filter(|row| row["pid"] == pid);
    rows.next().cloned().unwrap_or_default()
}

/// Checks that the daemon finds guests that start after it, gives them different names, stops one,
/// forgets a guest that is killed, reports a guest that cannot be attached to, and leaves nothing
/// behind.
pub fn the_daemon(test: &str) {
    let Some(programs) = inside(test) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let socket = folder.path().join("host.sock");
    let start = || Daemon::start(&programs, folder.path(), &["--attach-all"]);
    let mut daemon = start();
    assert_eq!(programs.guests(&socket), "");
    let Some(first) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) else {
        return;
    };
    until("the first guest is served", || {
        programs.guests(&socket) == "counter\n"
    });
    let second = Qemu::start(Accelerator::Kvm, Memory::Private).expect("as before");
    let both = format!("counter\ncounter-{}\n", second.child.id());
    until("the second guest is served", || {
        programs.guests(&socket) == both
    });

    let counters = [&first, &second].map(Counter::of);
    counters.iter().for_each(Counter::runs);
    let guest = |word: &str| {
        let output = Command::new(&programs.cli)
            .arg("--socket")
            .arg(&socket)
            .args(["--guest", "counter", "guest", word])
            .output()
            .expect("started");
        assert!(output.status.success(), "{output:?}");
    };
    guest("pause");
    let before = counters[0].read();
    counters[1].runs();
    assert_eq!(counters[0].read(), before, "it is paused");
    guest("resume");
    counters.iter().for_each(Counter::runs);

    // The VM of this process has no memory.
    let kvm = Kvm::new().expect("KVM");
    let vm = kvm.create_vm().expect("a VM");
    daemon.logged("a guest cannot be attached to");
    drop(vm);

    // A later daemon finds the attachers of the earlier one.
    let attached = attachers();
    daemon.stop();
    assert_eq!(attachers(), attached);
    let mut daemon = start();
    until("both guests are served again", || {
        programs.guests(&socket) == both
    });
    let again = [
        "counter".to_owned(),
        format!("counter-{}", second.child.id()),
    ];
    let again = again.map(|name| format!(r#""it is attached already","target":"{name}","#));
    again.iter().for_each(|line| daemon.logged(line));
    assert_eq!(attachers(), attached);
    assert_eq!(daemon.attachers(), 2);

    let gone = first.child.id();
    drop(first);
    until("the first guest is taken away", || {
        programs.guests(&socket) == format!("counter-{}\n", second.child.id())
    });
    daemon.logged("the guest is gone");
    assert_eq!(row(gone), Value::Null);
    counters[1].runs();
    daemon.stop();
    // The first guest's name is free now. The second guest keeps its own name.
    let mut daemon = start();
    daemon.logged(&again[1]);
    daemon.stop();
    drop(second);
    until("no attacher is left", || attachers().is_empty());
    assert_eq!(sockets(&folder.path().join("run")), Vec::<String>::new());
}

/// Checks that the reason why a guest cannot be attached to is reported once.
pub fn reports_once(test: &str) {
    let Some(programs) = inside(test) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let kvm = Kvm::new().expect("KVM");
    // Two VMs without memory in one process.
    let _vms = [0, 1].map(|_| kvm.create_vm().expect("a VM"));
    let mut daemon = Daemon::start(&programs, folder.path(), &["--attach-all"]);
    daemon.logged("its process has several VMs");
    // A guest that starts later causes further scans.
    let Some(qemu) = counting() else { return };
    let socket = folder.path().join("host.sock");
    until("the other guest is served", || {
        programs.guests(&socket) == "counter\n"
    });
    assert_eq!(daemon.count("a guest cannot be attached to"), 1);
    assert_eq!(daemon.count("attacher ended"), 0);
    drop(qemu);
    daemon.logged("the guest is gone");
    daemon.stop();
}

/// `patchbay attach --all` in the foreground.
struct Foreground {
    child: Process,
    folder: PathBuf,
}

impl Foreground {
    fn start(programs: &Programs, folder: &Path) -> Self {
        let child = Command::new(&programs.cli)
            .args(["attach", "--all", "--memory", "process"])
            .env("XDG_RUNTIME_DIR", folder)
            .stdin(Stdio::null())
            .spawn()
            .expect("started");
        Self {
            child: Process(child),
            folder: folder.to_owned(),
        }
    }

    fn sockets(&self) -> Vec<String> {
        sockets(&self.folder.join("patchbay"))
    }

    fn serves(&self, names: &[&str]) {
        until("the guests are served", || self.sockets() == names);
    }
}

/// Checks that `patchbay attach --all` serves guests under their names while both the guests and
/// the command run, however the command ends.
pub fn the_foreground(test: &str) {
    let Some(programs) = inside(test) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let Some(first) = counting() else { return };
    let mut all = Foreground::start(&programs, folder.path());
    all.serves(&["counter.sock"]);
    let second = counting().expect("as before");
    let other = format!("counter-{}.sock", second.child.id());
    all.serves(&[&other, "counter.sock"]);
    let patchbay = |words: &[&str]| {
        let output = Command::new(&programs.cli)
            .env("XDG_RUNTIME_DIR", folder.path())
            .args(words)
            .output()
            .expect("started");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).expect("text");
        (output.status.code(), text)
    };
    let described = patchbay(&["--guest", "counter", "guest", "describe"]);
    assert_eq!(described.0, Some(0), "{described:?}");

    // The guest has its attacher.
    let listed = row(first.child.id());
    assert_eq!(listed["attachable"], "no");
    let reason = listed["reasons"][0].as_str().expect("a reason");
    assert!(reason.ends_with("is attached to it"), "{reason}");
    let pid = first.child.id().to_string();
    let (_, text) = patchbay(&["attach", "process", &pid]);
    assert!(text.contains("attached to the guest"), "{text}");
    let (_, text) = patchbay(&["attach", "process", &pid, "--started", "1"]);
    assert!(text.contains("another process has its number"), "{text}");
    let (_, text) = patchbay(&["attach", "process", "--name", "counter"]);
    assert!(
        text.contains("2 processes have a virtual machine named"),
        "{text}"
    );
    let (_, text) = patchbay(&["attach", "process", "--name", "nobody"]);
    assert!(text.contains("no virtual machine of this host"), "{text}");
    for words in [
        &["attach", "--all", &pid][..],
        &["attach", "process", "--all"],
    ] {
        let (code, text) = patchbay(words);
        assert_eq!(code, Some(2), "{text}");
    }

    let counters = [&first, &second].map(Counter::of);
    drop(second);
    all.serves(&["counter.sock"]);
    // The name leads to the guest that is left.
    let (_, text) = patchbay(&["attach", "process", "--name", "counter"]);
    assert!(text.contains("attached to the guest"), "{text}");
    // The attachers notice that the command is killed.
    all.child.kill().expect("it runs");
    all.child.wait().expect("its own");
    until("no attacher is left", || attachers().is_empty());
    assert!(all.sockets().is_empty());
    counters[0].runs();
    let mut all = Foreground::start(&programs, folder.path());
    all.serves(&["counter.sock"]);
    terminate(all.child.id());
    assert!(all.child.wait().expect("its own").success());
    until("no watchdog is left", || attachers().is_empty());
    assert!(all.sockets().is_empty());
    counters[0].runs();
    // The name of a guest without an attacher leads to the guest. Standard input has ended, so the
    // attacher then detaches.
    let name = row(first.child.id())["name"].clone();
    let name = name.as_str().expect("a name");
    let named = Command::new(&programs.cli)
        .env("XDG_RUNTIME_DIR", folder.path())
        .args(["attach", "process", "--name", name, "--until-eof"])
        .stdin(Stdio::null())
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&named.stderr);
    assert!(named.status.success(), "{named:?}");
    assert!(text.contains(&format!("attached to {name};")), "{text}");
    counters[0].runs();
    // It is possible to attach to the guest again, by its process.
    drop(attach(&patchbay_attach::Options {
        target: host(first.child.id()),
        ..options(PathBuf::new(), PauseWay::Freeze, Accelerator::Kvm)
    }));
}

/// Checks that a second attacher is refused even if it sees another mount of /proc than the first.
/// Each start of a systemd unit with `ProtectProc=` makes such a mount.
pub fn another_proc(test: &str) {
    let Some(programs) = inside(test) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let Some(qemu) = counting() else { return };
    let pid = qemu.child.id().to_string();
    let socket = folder.path().join("first.sock");
    let first = Command::new(&programs.attacher)
        .args(["process", &pid, "--api-socket"])
        .arg(&socket)
        .spawn();
    let mut first = Process(first.expect("started"));
    until("the first attacher serves", || socket.exists());
    let attach = || {
        // Standard input has ended, so an attacher that is not refused detaches.
        Command::new("unshare")
            .args(["--mount", "sh", "-c"])
            .arg("mount -t proc proc /proc && exec \"$@\"")
            .arg("sh")
            .arg(&programs.attacher)
            .args(["process", &pid, "--until-eof", "--api-socket"])
            .arg(folder.path().join("second.sock"))
            .stdin(Stdio::null())
            .output()
            .expect("util-linux")
    };
    let second = attach();
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success(), "{second:?}");
    assert!(text.contains("is attached to the guest"), "{text}");
    terminate(first.id());
    assert!(first.wait().expect("its own").success());
    let third = attach();
    assert!(third.status.success(), "{third:?}");
}
