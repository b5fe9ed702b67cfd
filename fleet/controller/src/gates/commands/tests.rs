// SPDX-License-Identifier: Apache-2.0
//! Tests the users, descriptors, variables and ends of commands.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::FdFlags;
use rustix::process::{PidfdFlags, pidfd_open};

use super::super::ask;
use super::*;
use crate::hosts::Hosts;
use crate::rollout::GateAnswer;

/// A user that exists everywhere and is neither root nor the user of a test.
const OTHER: u32 = 65534;

/// A folder of commands, and a folder to which commands of any user can write.
struct Folders {
    gates: tempfile::TempDir,
    results: tempfile::TempDir,
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its own");
}

fn make_fifo(path: &Path) {
    let made = mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0);
    made.expect("created");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl Folders {
    fn new() -> Self {
        let folder = || tempfile::tempdir().expect("temporary folder");
        let folders = Self {
            gates: folder(),
            results: folder(),
        };
        set_mode(folders.results.path(), 0o777);
        folders
    }

    fn file(&self) -> PathBuf {
        self.gates.path().join("probe.yaml")
    }

    fn result(&self) -> PathBuf {
        self.results.path().join("result")
    }

    fn write(&self, text: &str) {
        fs::write(self.file(), text).expect("written");
        set_mode(&self.file(), 0o644);
    }

    /// Writes a command that runs this script, in which $R is the file of results.
    fn write_script(&self, script: &str, more: &str) {
        let script = script.replace("$R", &self.result().display().to_string());
        self.write(&format!(
            "command: [/bin/sh, -c, '{script}']\n{more}\nenvironment: {{ZONE: eu}}\n"
        ));
    }

    async fn ask(&self) -> GateAnswer {
        let kind = WaveGateKind::NamedCommand {
            name: "probe".to_owned(),
            timeout_ms: 60_000,
        };
        self.ask_kind(&kind).await
    }

    async fn ask_kind(&self, kind: &WaveGateKind) -> GateAnswer {
        let commands = Commands::new(self.gates.path().to_owned());
        self.ask_of(&commands, kind).await
    }

    async fn ask_of(&self, commands: &Commands, kind: &WaveGateKind) -> GateAnswer {
        let hosts = Hosts::new(&[]).expect("none");
        let asking = Asking {
            hosts: &hosts,
            commands,
            rollout: "net",
            wave: "canary",
        };
        ask(kind, &asking, vec![]).await
    }

    /// Asks a gate that passes, and returns the lines that its command has written.
    async fn passes(&self, script: &str, more: &str) -> Vec<String> {
        self.write_script(script, more);
        assert_eq!(self.ask().await, GateAnswer::Passed, "{script}");
        let mut lines: Vec<String> = fs::read_to_string(self.result())
            .expect("written")
            .lines()
            .map(str::to_owned)
            .collect();
        fs::remove_file(self.result()).expect("written");
        lines.sort();
        lines
    }

    async fn inconclusive(&self) -> String {
        match self.ask().await {
            GateAnswer::Inconclusive(why) => why,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_command_passes_with_status_0_and_fails_with_another() {
    let folders = Folders::new();
    folders.write("command: [/bin/true]");
    assert_eq!(folders.ask().await, GateAnswer::Passed);
    folders.write("command: [/bin/false]");
    let why = "command probe ended with exit status: 1".to_owned();
    assert_eq!(folders.ask().await, GateAnswer::Failed(why));
    folders.write("command: [/nowhere]");
    let why = folders.inconclusive().await;
    assert!(why.starts_with("command probe cannot be started"), "{why}");
}

#[tokio::test]
async fn a_command_of_a_root_controller_runs_as_nobody_unless_its_file_says_otherwise() {
    let folders = Folders::new();
    let own = rustix::process::geteuid().as_raw();
    let script = "{ id -u; id -G; } >$R";
    let default = folders.passes(script, "").await;
    if !is_root() {
        assert!(default.contains(&own.to_string()), "{default:?}");
        folders.write("command: [/bin/true]\nuser: root");
        let why = folders.inconclusive().await;
        assert!(why.contains("leave `user` out"), "{why}");
        return;
    }
    let nobody = User::from_name("nobody").expect("readable").expect("there");
    let expected = [nobody.gid.to_string(), nobody.uid.to_string()];
    assert_eq!(default, expected, "with no supplementary group");
    let root = folders.passes(script, "user: root").await;
    assert!(root.iter().all(|line| line == "0"), "{root:?}");
}

#[tokio::test]
async fn a_command_has_the_documented_variables_and_no_other_descriptor() {
    let folders = Folders::new();
    let inherited = fs::File::open("/dev/null").expect("opens");
    rustix::io::fcntl_setfd(&inherited, FdFlags::empty()).expect("set");
    let environment = folders
        .passes("tr \"\\\\0\" \"\\\\n\" </proc/$$/environ >$R", "")
        .await;
    let expected = [
        "PATCHBAY_ROLLOUT=net",
        "PATCHBAY_WAVE=canary",
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "ZONE=eu",
    ];
    assert_eq!(environment, expected);
    let descriptors = folders.passes("(ls /proc/$$/fd >$R); true", "").await;
    assert_eq!(descriptors, ["0", "1", "2"]);
    let folder = folders.passes("pwd >$R", "").await;
    assert_eq!(folder, ["/"]);
}

/// Returns whether the process with the id in this file ends.
fn ends(file: &Path) -> bool {
    let pid = fs::read_to_string(file).expect("written");
    let pid = pid.trim().parse().ok().and_then(Pid::from_raw);
    let Ok(process) = pidfd_open(pid.expect("a pid"), PidfdFlags::empty()) else {
        return true;
    };
    let limit = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
    // The process must not outlive a failed test.
    let _ = rustix::process::pidfd_send_signal(&process, Signal::KILL);
    ended == Ok(1)
}

#[tokio::test]
async fn everything_that_a_command_has_started_ends_with_it_or_at_the_limit() {
    let folders = Folders::new();
    folders.write_script("sleep 3600 & echo $! >$R; wait", "timeout: 3s");
    let why = folders.inconclusive().await;
    assert_eq!(why, "command probe did not end within 3000 ms");
    assert!(ends(&folders.result()), "at the limit");
    folders.write_script("sleep 3600 & echo $! >$R", "");
    assert_eq!(folders.ask().await, GateAnswer::Passed);
    assert!(ends(&folders.result()), "with its command");
    // The timeout of the spec applies too.
    folders.write_script("echo $$ >$R; exec sleep 3600", "timeout: 1h");
    let kind = WaveGateKind::NamedCommand {
        name: "probe".to_owned(),
        timeout_ms: 3000,
    };
    let answer = folders.ask_kind(&kind).await;
    assert!(matches!(answer, GateAnswer::Inconclusive(_)), "{answer:?}");
    assert!(ends(&folders.result()), "at the limit of the spec");
}

#[tokio::test]
async fn files_that_others_can_write_are_refused() {
    let folders = Folders::new();
    folders.write("command: [/bin/true]");
    for mode in [0o664, 0o646, 0o666] {
        set_mode(&folders.file(), mode);
        let why = folders.inconclusive().await;
        let expected = format!("has mode {mode:04o}, so users other than its owner can write it");
        assert!(why.contains(&expected), "{why}");
    }
    set_mode(&folders.file(), 0o600);
    for mode in [0o777, 0o770, 0o1777] {
        set_mode(folders.gates.path(), mode);
        let why = folders.inconclusive().await;
        assert!(why.contains("other than its owner can write it"), "{why}");
    }
    set_mode(folders.gates.path(), 0o755);
    assert_eq!(folders.ask().await, GateAnswer::Passed);
    if is_root() {
        for path in [folders.file(), folders.gates.path().to_owned()] {
            chown(&path, Some(OTHER), None).expect("root may");
            let why = folders.inconclusive().await;
            assert!(why.contains("belongs to uid 65534"), "{why}");
            chown(&path, Some(0), None).expect("root may");
        }
    }
    fs::remove_file(folders.file()).expect("its own");
    let why = folders.inconclusive().await;
    assert!(
        why.contains("probe.yaml is not used: it cannot be read"),
        "{why}"
    );
    fs::create_dir(folders.file()).expect("created");
    let why = folders.inconclusive().await;
    assert!(why.contains("it is not a regular file"), "{why}");
}

/// Checks FIFOs that nobody writes. A controller that waits for a writer waits for ever.
#[tokio::test]
async fn a_fifo_does_not_block_the_controller() {
    let folders = Folders::new();
    make_fifo(&folders.file());
    let why = folders.inconclusive().await;
    assert!(why.contains("it is not a regular file"), "{why}");
    let program = folders.result();
    make_fifo(&program);
    fs::remove_file(folders.file()).expect("its own");
    folders.write(&format!("command: [{}]", program.display()));
    let why = folders.inconclusive().await;
    assert!(why.contains("cannot be started"), "{why}");
    let spec = spec();
    let folder = folders.results.path().join("gates.d");
    make_fifo(&folder);
    let refused = Commands::new(folder).check(&spec).await;
    let why = refused.expect_err("no folder").to_string();
    assert!(why.contains("it is not a folder"), "{why}");
}

/// Returns a spec with a gate that names the command.
fn spec() -> Spec {
    let text = "selector: {guests: ['*']}\nclaims: [{want: on, keys: [a]}]\nwaves: [{size: rest}]\n\
                gates: [{command: probe, on_failure: abort}]\n";
    Spec::parse(text).expect("a spec")
}

/// Checks a file whose reader hangs: the gate is inconclusive, a plan is refused, and other
/// commands are run.
#[tokio::test]
async fn a_file_on_a_hung_file_system_is_given_up() {
    let folders = Folders::new();
    folders.write("command: [/bin/true]");
    let other = folders.gates.path().join("other.yaml");
    fs::copy(folders.file(), other).expect("copied");
    let fifo = folders.result();
    make_fifo(&fifo);
    let commands = Commands::new(folders.gates.path().to_owned());
    let (threads, path) = (commands.threads.clone(), fifo.clone());
    // The thread waits for a writer.
    let hangs = threads.run("probe", || fs::File::open(path));
    let soon = std::time::Duration::from_millis(50);
    assert!(tokio::time::timeout(soon, hangs).await.is_err());
    let impatient = Commands {
        limit: soon,
        ..commands.clone()
    };
    let ask = async |commands: &Commands, name: &str| {
        let name = name.to_owned();
        let timeout_ms = 60_000;
        let kind = WaveGateKind::NamedCommand { name, timeout_ms };
        folders.ask_of(commands, &kind).await
    };
    let answer = ask(&impatient, "probe").await;
    let why = "probe.yaml is not read within 50 ms; look at its file system";
    assert!(
        matches!(&answer, GateAnswer::Inconclusive(found) if found.ends_with(why)),
        "{answer:?}"
    );
    let refused = impatient.check(&spec()).await;
    let refused = refused.expect_err("not read").to_string();
    assert!(refused.ends_with(why), "{refused}");
    assert_eq!(ask(&commands, "other").await, GateAnswer::Passed);
    let writer = fs::OpenOptions::new().write(true).open(fifo);
    drop(writer.expect("there is a reader"));
    assert_eq!(ask(&commands, "probe").await, GateAnswer::Passed);
}

#[tokio::test]
async fn malformed_files_are_refused() {
    let folders = Folders::new();
    let long = format!("command: [/bin/true] # {}", "x".repeat(64 << 10));
    for (text, why) in [
        ("command: [true]", "\"true\" is not the absolute path"),
        ("command: []", "\"\" is not the absolute path"),
        ("command: /bin/true", "malformed"),
        ("command: [/bin/true]\nshell: yes", "malformed at line 2"),
        ("command: [/bin/true]\ntimeout: 5", "malformed at line 2"),
        ("command: [/bin/true]\nuser: no-such-user", "no user"),
        ("command: [/bin/true]\nenvironment: {A=B: c}", "variable"),
        ("", "malformed"),
        (&long, "more than 65536 bytes"),
    ] {
        folders.write(text);
        let found = folders.inconclusive().await;
        assert!(found.contains(why), "{text}: {found}");
    }
    for name in ["", "../probe", "a/b", "a.b", &"a".repeat(65)] {
        assert!(!is_name(name), "{name}");
    }
}

/// Checks that a command that a record of the store gives is not run.
#[tokio::test]
async fn an_inline_command_is_never_run() {
    let folders = Folders::new();
    let marker = folders.result();
    let kind = WaveGateKind::Command {
        argv: vec!["/usr/bin/touch".to_owned(), marker.display().to_string()],
        timeout_ms: 60_000,
    };
    let answer = folders.ask_kind(&kind).await;
    assert!(
        matches!(&answer, GateAnswer::Inconclusive(why) if why.starts_with("/usr/bin/touch is not run")),
        "{answer:?}"
    );
    assert!(!marker.exists());
}
