// SPDX-License-Identifier: Apache-2.0
//! Tests rollouts over a guest that patchbayd attaches to, with etcd, the controller and `patchbay
//! rollout`.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::daemon::{Daemon, Programs};
use super::stock::Boot;
use super::{Accelerator, Memory, Process, until};

/// The keys of the lines of pr_debug() that the guest passes.
const KEYS: &str = "lib/kobject_uevent.c/*";

fn free_address() -> String {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("bound").to_string()
}

/// A running etcd.
struct Etcd {
    _process: Process,
    url: String,
}

impl Etcd {
    /// Starts etcd. Prints a message and returns `None` if etcd is not installed.
    fn start(folder: &Path) -> Option<Self> {
        let [url, peer] =
            [free_address(), free_address()].map(|address| format!("http://{address}"));
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            // The test does not need durable data.
            .arg("--unsafe-no-fsync")
            .args(["--listen-client-urls", &url])
            .args(["--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match process {
            Ok(process) => Some(Self {
                _process: Process(process),
                url,
            }),
            Err(error) => {
                eprintln!("SKIPPED: etcd cannot be started ({error}); install etcd-server");
                None
            }
        }
    }
}

/// A running controller, and the CLI that calls it.
struct Controller<'a> {
    programs: &'a Programs,
    folder: &'a Path,
    _process: Process,
}

impl<'a> Controller<'a> {
    /// Starts the controller and waits until it leads. Its log is the test's output.
    fn start(programs: &'a Programs, folder: &'a Path, etcd: &Etcd) -> Option<Self> {
        let program = std::env::var_os("PATCHBAY_FLEET").map(PathBuf::from);
        let Some(program) = program else {
            eprintln!(
                "SKIPPED: PATCHBAY_FLEET names no program; `cargo xtask test` builds and names it"
            );
            return None;
        };
        let process = Command::new(program)
            .args(["--etcd", &etcd.url, "--socket"])
            .arg(folder.join("fleet.sock"))
            .arg("--gates")
            .arg(gates(folder))
            .stdin(Stdio::null())
            .spawn()
            .expect("the program is there");
        let controller = Self {
            programs,
            folder,
            _process: Process(process),
        };
        until("the controller leads", || {
            controller.rollout(&["list"]).status.success()
        });
        Some(controller)
    }

    fn rollout(&self, words: &[&str]) -> Output {
        // The timeout is long, because a lab is slow.
        Command::new(&self.programs.cli)
            .args(["--timeout", "5m", "rollout", "--fleet-socket"])
            .arg(self.folder.join("fleet.sock"))
            .args(words)
            .output()
            .expect("the program is there")
    }

    /// Returns the output of the command, which must succeed.
    fn succeeds(&self, words: &[&str]) -> String {
        let output = self.rollout(words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("$ patchbay rollout {}\n{text}", words.join(" "));
        assert!(output.status.success(), "{words:?}: {output:?}");
        text
    }

    /// Plans and starts a rollout to all guests of this kernel. After the guests' change, the
    /// command `gate` decides.
    fn start_rollout(&self, name: &str, gate: &str) {
        let spec = format!(
            "selector: {{kernel_release: \"6.*-amd64\"}}\n\
             claims: [{{want: on, keys: [\"{KEYS}\"]}}]\n\
             waves: [{{size: rest}}]\n\
             gates: [{{command: {gate}, timeout: 5m, on_failure: abort}}]\n",
        );
        let path = self.folder.join(format!("{name}.yaml"));
        fs::write(&path, spec).expect("room");
        let plan = self.succeeds(&["plan", &path.display().to_string()]);
        assert!(plan.contains("1 guest on 1 host"), "{plan}");
        let digest = plan.trim().rsplit(' ').next().unwrap_or_default();
        self.succeeds(&["start", name, "--digest", digest]);
    }

    /// Waits for the end of a rollout's work.
    fn ends(&self, name: &str, phase: &str) {
        let seen = self.succeeds(&["status", name, "--watch"]);
        let mut heads = seen.lines().filter(|line| !line.starts_with(' '));
        let last = heads.next_back().unwrap_or_default();
        assert!(last.starts_with(&format!("{name} is {phase}")), "{last}");
    }
}

/// Returns the folder of the gates' commands, which nobody else can write.
fn gates(folder: &Path) -> PathBuf {
    let gates = folder.join("gates.d");
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(&gates).expect("room");
    gates
}

/// Writes the command of a gate that waits until the guest prints its lines, and then passes or
/// fails.
fn gate<'a>(boot: &Boot, name: &'a str, status: u8) -> &'a str {
    let path = boot.folder.path().join(name);
    let script = format!(
        "#!/bin/sh\nuntil tail -n 5 {} | grep -q \"{}\"; do sleep 0.1; done\nexit {status}\n",
        boot.console.display(),
        Boot::PRINTED
    );
    fs::write(&path, script).expect("room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its own");
    // The console is in a folder of the test's user.
    let user = match fs::metadata("/proc/self").expect("mounted").uid() {
        0 => "user: root\n",
        _ => "",
    };
    let file = gates(boot.folder.path()).join(format!("{name}.yaml"));
    let text = format!(
        "command: [{:?}]\ntimeout: 5m\n{user}",
        path.display().to_string()
    );
    fs::write(&file, text).expect("room");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its own");
    name
}

/// Finds the programs and a kernel, and starts etcd. Prints a message and returns `None` if one of
/// them is missing.
fn prepared() -> Option<(Programs, Boot, Etcd)> {
    let (programs, boot) = (Programs::find()?, Boot::prepare()?);
    let etcd = Etcd::start(boot.folder.path())?;
    Some((programs, boot, etcd))
}

/// Starts the daemon of a host with its files in this folder, and waits until it is registered
/// under the folder's name.
fn registered(programs: &Programs, folder: &Path, etcd: &Etcd) -> Daemon {
    fs::create_dir_all(folder.join("qmp")).expect("room");
    let name = folder.file_name().and_then(|name| name.to_str());
    let mut daemon = Daemon::start(
        programs,
        folder,
        &[
            "--attach-qmp",
            &folder.join("qmp").display().to_string(),
            "--etcd",
            &etcd.url,
            "--host-name",
            name.expect("a name"),
        ],
    );
    daemon.logged("registered");
    daemon
}

/// Returns QEMU's option for the socket at which the host's daemon finds it.
fn qmp(host: &Path) -> String {
    let socket = host.join("qmp/web-1");
    format!("unix:{},server=on,wait=off", socket.display())
}

/// Waits until the host's daemon serves the guest.
fn serves(programs: &Programs, host: &Path) {
    let socket = host.join("host.sock");
    until("the guest is served", || {
        programs.guests(&socket) == "counter\n"
    });
}

/// Runs `patchbay-attach ledger` for the guest of a host.
fn ledger(programs: &Programs, host: &Path, words: &[&str]) -> Output {
    Command::new(&programs.attacher)
        .arg("ledger")
        .args(words)
        .arg("qemu")
        .arg("--qmp")
        .arg(host.join("qmp/web-1"))
        .arg("--api-socket")
        .arg(host.join("run/web-1.sock"))
        .output()
        .expect("the program is there")
}

/// Checks that a rollout is rolled back if its gate fails, and is kept until it is undone if its
/// gate passes.
pub fn changes(accelerator: Accelerator) {
    let Some((programs, boot, etcd)) = prepared() else {
        return;
    };
    let folder = boot.folder.path();
    // A lab has no host name of its own.
    let host = folder.join("lab");
    let _daemon = registered(&programs, &host, &etcd);
    let Some(controller) = Controller::start(&programs, folder, &etcd) else {
        return;
    };
    let Some(_qemu) = boot.start(accelerator, Memory::SharedMemfd, &["-qmp", &qmp(&host)]) else {
        return;
    };
    boot.boots();
    serves(&programs, &host);
    boot.is_silent();

    controller.start_rollout("wrong", gate(&boot, "closed", 1));
    controller.ends("wrong", "aborted");
    boot.is_silent();
    controller.start_rollout("right", gate(&boot, "open", 0));
    controller.ends("right", "completed");
    boot.prints();
    controller.succeeds(&["drift", "right"]);
    controller.succeeds(&["undo", "right"]);
    controller.ends("right", "undone");
    boot.is_silent();
}

/// Checks that a rollout follows a guest that migrates to another host with its ledger, and takes
/// its change back there.
pub fn moves(accelerator: Accelerator) {
    let Some((programs, boot, etcd)) = prepared() else {
        return;
    };
    let folder = boot.folder.path();
    let (here, there) = (folder.join("here"), folder.join("there"));
    let daemon = registered(&programs, &here, &etcd);
    let Some(controller) = Controller::start(&programs, folder, &etcd) else {
        return;
    };
    let Some(from) = boot.start(accelerator, Memory::SharedMemfd, &["-qmp", &qmp(&here)]) else {
        return;
    };
    boot.boots();
    serves(&programs, &here);
    controller.start_rollout("net", gate(&boot, "open", 0));
    controller.ends("net", "completed");

    // The daemon would start its attacher again.
    let attacher = daemon.attacher().expect("it serves the guest");
    daemon.stop();
    let early = ledger(&programs, &here, &["export"]);
    let refused = String::from_utf8_lossy(&early.stderr);
    assert!(refused.contains("is attached to the guest"), "{refused}");
    kill_process(attacher, Signal::TERM).expect("it runs");
    let exported = folder.join("exported");
    until("the attacher has detached", || {
        let output = ledger(&programs, &here, &["export"]);
        fs::write(&exported, output.stdout).expect("room");
        output.status.success()
    });
    fs::create_dir_all(there.join("qmp")).expect("room");
    let uri = format!("unix:{}", folder.join("migration").display());
    let more = ["-qmp", &qmp(&there), "-incoming", &uri];
    let to = boot.start(accelerator, Memory::SharedMemfd, &more);
    let to = to.expect("the first one was started");
    from.other("migrate", json!({ "uri": uri }));
    until("the guest has arrived", || {
        to.other("query-status", Value::Null)["status"] == "running"
    });
    drop(from);
    fs::create_dir_all(there.join("run")).expect("room");
    let import = ["import", &exported.display().to_string()];
    let output = ledger(&programs, &there, &import);
    assert!(output.status.success(), "{output:?}");
    boot.prints();

    let _daemon = registered(&programs, &there, &etcd);
    serves(&programs, &there);
    until("the controller finds the guest", || {
        let seen = controller.succeeds(&["history", "net"]);
        seen.contains("guest counter moved from here to there")
    });
    controller.succeeds(&["drift", "net"]);
    controller.succeeds(&["undo", "net"]);
    controller.ends("net", "undone");
    boot.is_silent();
}
