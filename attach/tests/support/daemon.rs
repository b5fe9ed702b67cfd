// SPDX-License-Identifier: Apache-2.0
//! Runs the programs as they are installed: `patchbay`, and a `patchbayd` that discovers QEMU's
//! guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::stock::{Boot, DEBUG};
use super::{Accelerator, Memory, Process, until};

/// Paths of the programs under test, which are built in the release profile.
pub struct Programs {
    pub cli: PathBuf,
    pub daemon: PathBuf,
    pub attacher: PathBuf,
}

impl Programs {
    /// Finds the programs. Prints a message and returns `None` if a variable is not set.
    pub fn find() -> Option<Self> {
        let find = |name: &str| {
            let program = std::env::var_os(name).map(PathBuf::from);
            if program.is_none() {
                eprintln!(
                    "SKIPPED: {name} names no program; `cargo xtask test` builds and names it"
                );
            }
            program
        };
        Some(Self {
            cli: find("PATCHBAY_CLI")?,
            daemon: find("PATCHBAYD")?,
            attacher: find("PATCHBAY_ATTACH")?,
        })
    }

    /// Finds the programs beside the attacher. Prints a message and returns `None` if they are not
    /// built.
    pub fn built() -> Option<Self> {
        let attacher = PathBuf::from(env!("CARGO_BIN_EXE_patchbay-attach"));
        let [cli, daemon] = ["patchbay", "patchbayd"].map(|name| attacher.with_file_name(name));
        if !cli.is_file() || !daemon.is_file() {
            eprintln!(
                "SKIPPED: patchbay and patchbayd are not built; `cargo xtask test` builds them"
            );
            return None;
        }
        Some(Self {
            cli,
            daemon,
            attacher,
        })
    }

    /// Runs `patchbay` with this API socket.
    pub fn patchbay(&self, socket: &Path, words: &[&str]) -> Output {
        // The timeout is long, because a lab is slow and the first list of keys also discovers the
        // kernel.
        Command::new(&self.cli)
            .args(["--timeout", "5m", "--socket"])
            .arg(socket)
            .args(words)
            .output()
            .expect("the program is there")
    }

    /// Returns the output of `patchbay`, which must succeed.
    pub fn succeeds(&self, socket: &Path, words: &[&str]) -> String {
        let output = self.patchbay(socket, words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {output:?}");
        text
    }

    /// Returns the names of the guests of this host, one per line.
    pub fn guests(&self, socket: &Path) -> String {
        self.succeeds(socket, &["--all", "guest", "list", "-o", "name"])
    }

    /// Turns lines of pr_debug() of a booted guest on and off.
    pub fn flips(&self, socket: &Path, boot: &Boot) {
        let keys = self.succeeds(socket, &["keys", "list", "-o", "name"]);
        assert!(keys.lines().count() > 1000, "{keys}");
        let lines = self.succeeds(socket, &["debug", "list", "-o", "name", DEBUG]);
        assert!(lines.contains("lib/kobject_uevent.c/"), "{lines}");
        boot.is_silent();
        println!("{}", self.succeeds(socket, &["debug", "on", DEBUG]));
        boot.prints();
        let on = self.succeeds(socket, &["debug", "list", "--on", "-o", "name", DEBUG]);
        assert_eq!(on, lines);
        self.succeeds(socket, &["debug", "off", DEBUG]);
        boot.is_silent();
    }
}

/// A running patchbayd.
pub struct Daemon {
    child: Process,
    log: PathBuf,
    folder: PathBuf,
}

impl Daemon {
    /// Starts the daemon with these options. Its own socket is `host.sock` in the folder. The
    /// sockets of attachers are in `run`.
    pub fn start(programs: &Programs, folder: &Path, options: &[&str]) -> Self {
        let (log, run) = (folder.join("log"), folder.join("run"));
        fs::create_dir_all(&run).expect("room");
        let child = Command::new(&programs.daemon)
            .arg("--run-dir")
            .arg(run)
            .arg("--socket")
            .arg(folder.join("host.sock"))
            .arg("--audit-log")
            .arg(folder.join("audit"))
            .arg("--attach-program")
            .arg(&programs.attacher)
            .args(options)
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log).expect("room"))
            .spawn()
            .expect("the program is there");
        let mut daemon = Self {
            child: Process(child),
            log,
            folder: folder.to_owned(),
        };
        daemon.logged("listening");
        daemon
    }

    /// Returns the number of lines in the daemon's log that contain the words.
    pub fn count(&self, words: &str) -> usize {
        let log = fs::read_to_string(&self.log).expect("a log");
        log.lines().filter(|line| line.contains(words)).count()
    }

    /// Returns the process of the attacher that was started last; `None` before the first.
    pub fn attacher(&self) -> Option<rustix::process::Pid> {
        let log = fs::read_to_string(&self.log).expect("a log");
        let lines = log.lines().rev();
        let mut lines = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let started = lines.find(|line| line["message"] == "attaching");
        let pid = started.and_then(|line| line["pid"].as_i64());
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
        pid.and_then(rustix::process::Pid::from_raw)
    }

    /// Ends the daemon by SIGKILL. Its attachers stay.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops the daemon, which must end without an error.
    pub fn stop(mut self) {
        let pid = self.child.id().cast_signed();
        let pid = rustix::process::Pid::from_raw(pid).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        assert!(self.child.wait().expect("its own").success());
    }

    /// Waits for a line in the daemon's log.
    pub fn logged(&mut self, words: &str) {
        until(words, || {
            let ended = self.child.try_wait().expect("its own");
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            assert!(ended.is_none(), "{ended:?}: {log}");
            log.contains(words)
        });
    }

    /// Returns the number of attachers that have a socket.
    pub fn attachers(&self) -> usize {
        let files = fs::read_dir(self.folder.join("run")).expect("there");
        files
            .flatten()
            .filter(|file| file.path().extension().is_some_and(|end| end == "sock"))
            .count()
    }

    /// Waits until the only guest, which has ended, is neither served nor attached to.
    pub fn forgets_the_guest(&mut self, programs: &Programs) {
        self.logged("the guest is gone");
        let socket = self.folder.join("host.sock");
        until("the guest is taken away", || {
            programs.guests(&socket).is_empty()
        });
        assert_eq!(self.attachers(), 0, "the attacher has removed its socket");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        println!("patchbayd: {log}");
    }
}

/// Checks that the daemon attaches to a QEMU that starts, flips its keys, and notices its end.
pub fn finds(accelerator: Accelerator) {
    let (Some(programs), Some(boot)) = (Programs::find(), Boot::prepare()) else {
        return;
    };
    let folder = boot.folder.path();
    let (qmp, host) = (folder.join("qmp"), folder.join("host.sock"));
    fs::create_dir(&qmp).expect("room");
    let options = ["--attach-qmp", &qmp.display().to_string()];
    let mut daemon = Daemon::start(&programs, folder, &options);
    assert_eq!(programs.guests(&host), "");
    let socket = format!("unix:{},server=on,wait=off", qmp.join("web-1").display());
    let Some(qemu) = boot.start(accelerator, Memory::SharedMemfd, &["-qmp", &socket]) else {
        return;
    };
    until("the guest is served", || {
        programs.guests(&host) == "counter\n"
    });
    boot.boots();
    programs.flips(&host, &boot);
    assert_eq!(daemon.attachers(), 1);

    qemu.other("quit", serde_json::Value::Null);
    daemon.forgets_the_guest(&programs);
}
