// SPDX-License-Identifier: Apache-2.0
//! Tests `patchbay ci run` without KVM. The monitor is this test program, which serves an in-memory
//! guest and simulates the agent. The tests of `ci compare` use the same guests.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use patchbay_guest::testing::TestKey;
use patchbay_proto::agent::v1::from_exec::Message as Answer;
use patchbay_proto::agent::v1::to_exec::Message as Question;
use patchbay_proto::agent::v1::{
    ExecExited, ExecFetched, ExecFile, ExecHello, ExecOutput, ExecStarted, FromExec, ToExec,
};
use patchbay_proto::agent_frame;
use patchbay_proto::v1::SnapshotGuestResponse;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::runtime::Runtime;

use super::fake::Fake;
use super::lab::{Lab, end, runtime};

/// The environment variable that passes the monitor's arguments to the process that simulates the
/// monitor.
const MONITOR_ARGUMENTS: &str = "PATCHBAY_TEST_MONITOR_ARGUMENTS";
/// Timeout for the end of a process. No correct run reaches it.
const PATIENCE: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};
const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// The content of a saved guest's state.
const STATE: &[u8] = b"the state of a test";

/// The guest that a run boots.
struct FakeGuest {
    stream: UnixStream,
    keys: Lab,
}

impl FakeGuest {
    fn send(&mut self, message: Answer) {
        let message = Some(message);
        let _ = agent_frame::write(&mut self.stream, &FromExec { message });
    }

    fn receive(&mut self) -> Option<Question> {
        let question: ToExec = agent_frame::read(&mut self.stream).ok()?;
        question.message
    }

    fn print(&mut self, descriptor: u32, text: &str) {
        let data = text.as_bytes().to_vec();
        self.send(Answer::Output(ExecOutput { descriptor, data }));
    }

    fn end(&mut self, mark: &str, code: Option<i32>, signal: i32) {
        console(&format!("[    9.000000] patchbay-exec: {mark} ends"));
        self.send(Answer::Exited(ExecExited {
            code,
            signal,
            elapsed_us: 1,
        }));
    }

    /// Returns whether all these keys are on.
    fn on(&self, keys: &[String]) -> bool {
        keys.iter().all(|key| self.keys.guest.count(key) > 0)
    }

    /// Returns whether one of these keys is on.
    fn any_on(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.keys.guest.count(key) > 0)
    }

    /// Simulates a command.
    fn play(&mut self, argv: &[String], mark: &str) {
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        if words[0] == "absent" {
            return self.send(Answer::Error("the guest has no program absent".to_owned()));
        }
        self.send(Answer::Started(ExecStarted {}));
        match words[..] {
            ["say", out, err, code] => {
                self.print(1, out);
                self.print(2, err);
                // Without a number, the command keeps running.
                if let Ok(code) = code.parse() {
                    self.end(mark, Some(code), 0);
                }
            }
            ["warn"] => {
                console("[    8.000000] WARNING: CPU: 0 PID: 7 at kernel/x.c:1 f+0x1/0x2");
                console("[    8.100000] ---[ end trace 0000000000000000 ]---");
                self.end(mark, Some(0), 0);
            }
            ["hang"] => match self.receive() {
                Some(Question::Kill(_)) => self.end(mark, None, 9),
                _ => std::process::exit(1),
            },
            ["lose-agent"] => {
                let _ = self.stream.shutdown(std::net::Shutdown::Both);
            }
            ["panic"] => {
                console("[    8.000000] Kernel panic - not syncing: Fatal exception");
                std::process::exit(0);
            }
            ["power-off"] => std::process::exit(0),
            ["kill-agent"] => {
                let both = std::net::Shutdown::Both;
                self.stream.shutdown(both).expect("it was open");
            }
            ["count", ..] => {
                let counts = KEYS.map(|key| self.keys.guest.count(key).to_string());
                self.print(1, &counts.join(" "));
                self.end(mark, Some(0), 0);
            }
            ["fail-with", ..] => {
                let failed = self.on(&argv[1..]);
                self.print(1, "output of the test\n");
                self.end(mark, Some(if failed { 9 } else { 0 }), 0);
            }
            // With the key on, ends after the command with another key on, which must run at the
            // same time.
            ["wait-for", _, other] => {
                if self.on(&argv[1..2]) {
                    until(|| Path::new("done").exists());
                } else if self.any_on(&[other]) {
                    std::fs::write("done", "").expect("written");
                }
                self.end(mark, Some(0), 0);
            }
            // Prints the number of commands that this guest has run.
            ["number"] => {
                self.print(1, &format!("command {mark} of its guest\n"));
                self.end(mark, Some(0), 0);
            }
            ["stay-with", ref keys @ ..] if self.any_on(keys) => stay(),
            // With the key on, waits until that many other guests stay, and breaks the protocol.
            ["break-with", _, _, ref keys @ ..] if self.any_on(keys) => stay(),
            ["break-with", key, others, ..] if self.any_on(&[key]) => {
                let others = others.parse().expect("a number");
                until(|| staying(Path::new(".")).len() == others);
                self.send(Answer::Fetched(ExecFetched {}));
            }
            ["panic-with", ..] if self.on(&argv[1..]) => {
                console("[    8.000000] Kernel panic - not syncing: the other side");
                std::process::exit(0);
            }
            // Prints a simulated time with noise. If the key is on, the time is multiplied by the
            // factor.
            ["bench", _, factor] => {
                let factor = match self.on(&argv[1..2]) {
                    true => factor.parse().expect("a number"),
                    false => 1,
                };
                let run: u32 = mark.parse().expect("the number of the run");
                let time = factor * (1000 + run * 7919 % 31);
                self.print(1, &format!("took {time} ns\n"));
                self.end(mark, Some(0), 0);
            }
            ["print-without", _, text] => {
                if !self.on(&argv[1..2]) {
                    self.print(1, text);
                }
                self.end(mark, Some(0), 0);
            }
            _ => self.end(mark, Some(0), 0),
        }
    }

    fn fetch(&mut self, path: &str) {
        let file = |path: &str, more| {
            Answer::File(ExecFile {
                path: path.to_owned(),
                data: b"text".to_vec(),
                mode: 0o644,
                more,
                folder: false,
            })
        };
        match path {
            "/results" => {
                self.send(file("results/one", false));
                self.send(Answer::Fetched(ExecFetched {}));
            }
            "/hostile" => self.send(file("../../../tmp/patchbay-escaped", false)),
            _ => self.send(Answer::Error(format!("{path} cannot be read in the guest"))),
        }
    }
}

/// Runs on with a command that does not end, and leaves a file with the process id.
fn stay() -> ! {
    std::fs::write(format!("stays.{}", std::process::id()), "").expect("written");
    run_on()
}

/// Returns the process ids of the monitors whose guests stay.
pub(super) fn staying(folder: &Path) -> Vec<i32> {
    let files = std::fs::read_dir(folder).expect("a folder");
    let names = files.map(|file| file.expect("a name").file_name());
    let pid = |name: std::ffi::OsString| name.to_str()?.strip_prefix("stays.")?.parse().ok();
    names.filter_map(pid).collect()
}

/// Waits for an event of another process, of which that process does not tell this one.
pub(super) fn until(happened: impl Fn() -> bool) {
    while !happened() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Serves a monitor whose guest can be saved, and which has none of the keys.
fn serve_savable(socket: &Path) -> Runtime {
    let runtime = runtime();
    let fake = Fake::serve(&runtime, socket, &[""]);
    let parts = [
        SnapshotGuestResponse {
            memory_bytes: 64 << 20,
            ..Default::default()
        },
        SnapshotGuestResponse {
            state: STATE.to_vec(),
            ..Default::default()
        },
    ];
    fake.guest("", |guest| guest.snapshot = parts.map(Ok).to_vec());
    runtime
}

fn console(line: &str) {
    println!("{line}\r");
}

/// Keeps this process running. A real monitor also continues when the connection to its guest or
/// the reader of its console is gone.
fn run_on() -> ! {
    let null = std::fs::File::create("/dev/null").expect("a device");
    // The test harness prints a notice after 60 s, and would end if standard output were a closed
    // pipe.
    rustix::stdio::dup2_stdout(null).expect("standard output is open");
    loop {
        std::thread::park();
    }
}

/// Simulates the monitor if a run has started this process as its monitor; otherwise does nothing.
#[test]
fn monitor() {
    let Ok(arguments) = std::env::var(MONITOR_ARGUMENTS) else {
        return;
    };
    let words: Vec<&str> = arguments.split(' ').collect();
    let value = |option: &str| {
        let at = words.iter().position(|word| *word == option);
        at.map(|at| words[at + 1]).expect("given")
    };
    if words.contains(&"--from") {
        let snapshot = Path::new(value("--from"));
        let state = std::fs::read(snapshot.join("state"));
        assert_eq!(state.expect("a file"), STATE);
        assert!(snapshot.join("memory").is_file());
    } else {
        for word in ["rdinit=/patchbay/init", "patchbay.exec"] {
            assert!(words.contains(&word), "{arguments}");
        }
    }
    if words.contains(&"no-vsock") {
        console("[    1.0] patchbay-init: error: the kernel has no vsock");
        run_on();
    }
    if words.contains(&"silent") {
        console("[    1.0] no more is said");
        std::thread::park();
    }
    if words.contains(&"no-root") {
        console("[    1.0] Kernel panic - not syncing: No working init found.");
        std::process::exit(0);
    }
    if words.contains(&"no-memory") {
        eprintln!("the guest's memory cannot be allocated");
        std::process::exit(1);
    }
    let keys: Vec<TestKey> = KEYS
        .iter()
        .map(|key| TestKey::new(key, 1))
        .chain([
            TestKey::guarded("guarded"),
            TestKey::guarded("sched_feature"),
            TestKey::tracepoint("traced", true),
            TestKey {
                sealed: true,
                ..TestKey::new("sealed", 1)
            },
        ])
        .collect();
    let keys = Lab::with_guarded(&keys, words.contains(&"--allow-guarded"));
    let socket = Path::new(value("--api-socket"));
    let saved = words.contains(&"savable").then(|| serve_savable(socket));
    if saved.is_none() {
        std::os::unix::fs::symlink(keys.socket(), socket).expect("a link");
    }
    if words.contains(&"warns") {
        console("[    1.0] WARNING: CPU: 0 PID: 1 at init/main.c:1 f+0x1/0x2");
    }
    let exec = format!("{}_1025", value("--vsock"));
    let stream = UnixStream::connect(exec).expect("the run listens");
    let mut guest = FakeGuest { stream, keys };
    guest.send(Answer::Hello(ExecHello {
        version: patchbay_proto::EXEC_VERSION,
        ..Default::default()
    }));
    while let Some(question) = guest.receive() {
        match question {
            Question::Start(start) => guest.play(&start.argv, &start.mark),
            Question::Fetch(fetch) => guest.fetch(&fetch.path),
            Question::Kill(_) => {}
        }
    }
    run_on();
}

/// A folder with a kernel and a monitor.
pub(super) struct Ci {
    folder: tempfile::TempDir,
}

pub(super) struct Done {
    status: Option<i32>,
    pub(super) out: String,
    pub(super) err: String,
}

impl Ci {
    /// Creates the folder. Prints the reason and returns `None` if this machine has no static
    /// busybox.
    pub(super) fn new() -> Option<Self> {
        if !Path::new("/bin/busybox").exists() {
            println!("SKIPPED: /bin/busybox is missing; install busybox-static");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut kernel = vec![0; 4096];
        kernel[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        kernel[0x236] = 1;
        std::fs::write(folder.path().join("kernel"), kernel).expect("written");
        let this = std::env::current_exe().expect("this program");
        let script = format!(
            "#!/bin/sh\n{MONITOR_ARGUMENTS}=\"$*\" exec {} --exact commands::ci::monitor --nocapture\n",
            this.display()
        );
        let monitor = folder.path().join("monitor");
        std::fs::write(&monitor, script).expect("written");
        std::fs::set_permissions(&monitor, PermissionsExt::from_mode(0o755)).expect("a mode");
        Some(Self { folder })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn command(&self, words: &[&str]) -> Command {
        self.verb("run", words)
    }

    /// Returns `patchbay ci VERB` with the kernel and the monitor.
    pub(super) fn verb(&self, verb: &str, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_patchbay"));
        command
            .args(["ci", verb, "--kernel", "kernel", "--agent", "/bin/busybox"])
            .env("PATCHBAY_VMM", self.path("monitor"))
            .args(words)
            .current_dir(self.folder.path())
            // This variable marks the lab, so the run boots its guests here even without KVM.
            .env("PATCHBAY_LAB_OUT", self.folder.path())
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Done {
        let output = self.command(words).output().expect("it starts");
        Done {
            status: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }

    /// Runs a command that must end with `status` and print `texts`.
    #[track_caller]
    pub(super) fn expect(&self, status: i32, texts: &[&str], words: &[&str]) -> Done {
        let done = self.run(words);
        assert_eq!(done.status, Some(status), "{words:?}: {}", done.err);
        for text in texts {
            assert!(
                done.err.contains(text),
                "{text:?} of {words:?}: {}",
                done.err
            );
        }
        done
    }
}

#[test]
fn output_and_status_are_the_commands() {
    let Some(ci) = Ci::new() else { return };
    let done = ci.expect(
        7,
        &["to stderr", "1 boot "],
        &["--", "say", "to stdout", "to stderr", "7"],
    );
    assert_eq!(done.out, "to stdout");
    let done = ci.expect(0, &[], &["--ktap", "--", "say", "out\nok 9 faked", "", "0"]);
    assert!(
        done.out
            .starts_with("KTAP version 1\n1..1\n# out\n# ok 9 faked\nok 1 say"),
        "{}",
        done.out
    );
}

#[test]
fn every_bad_end_is_told_apart() {
    let Some(ci) = Ci::new() else { return };
    ci.expect(
        1,
        &["the guest's kernel reported:", "kernel/x.c:1"],
        &["--", "warn"],
    );
    ci.expect(127, &["no program absent"], &["--", "absent"]);
    ci.expect(
        124,
        &["did not end within 0.2 s"],
        &["--timeout", "200ms", "--", "hang"],
    );
    ci.expect(125, &["Fatal exception"], &["--", "panic"]);
    ci.expect(125, &["powered off or reset"], &["--", "power-off"]);
    let lost = "the agent in the guest ended";
    ci.expect(125, &[lost], &["--", "lose-agent"]);
}

#[test]
fn a_guest_that_does_not_boot_says_why() {
    let Some(ci) = Ci::new() else { return };
    let with = |word| ["--append", word, "--", "true"];
    ci.expect(125, &["the kernel has no vsock"], &with("no-vsock"));
    ci.expect(
        125,
        &["No working init found", "the guest's console ends with"],
        &with("no-root"),
    );
    ci.expect(
        125,
        &["the monitor failed", "cannot be allocated"],
        &with("no-memory"),
    );
    let absent = ci.path("absent");
    let absent = absent.to_str().expect("text");
    ci.expect(
        125,
        &["does not exist", "--monitor"],
        &["--monitor", absent, "--", "true"],
    );
    ci.expect(
        125,
        &["cannot copy", "/absent"],
        &["--copy", absent, "--", "true"],
    );
    std::fs::write(ci.path("kernel"), "#!/bin/sh").expect("written");
    ci.expect(125, &["is not a kernel"], &["--", "true"]);
    let mut arm = vec![0; 4096];
    arm[56..60].copy_from_slice(b"ARM\x64");
    std::fs::write(ci.path("kernel"), arm).expect("written");
    ci.expect(125, &["a kernel for arm64"], &["--", "true"]);
    assert_eq!(ci.run(&["true"]).status, Some(2));
}

#[test]
fn files_are_collected_and_none_leaves_its_folder() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--collect",
        "/absent",
        "--collect",
        "/results",
        "--junit",
        "j.xml",
        "--",
        "true",
    ];
    ci.expect(0, &["/absent cannot be read"], &words);
    let read = |name| std::fs::read_to_string(ci.path(name)).expect("a file");
    assert_eq!(read("collected/results/one"), "text");
    assert!(read("j.xml").contains("tests=\"1\" failures=\"0\""));
    ci.expect(0, &["outside of"], &["--collect", "/hostile", "--", "true"]);
    assert!(!Path::new("/tmp/patchbay-escaped").exists());
}

#[test]
fn the_matrix_flips_each_key_alone_and_names_the_failing_ones() {
    let Some(ci) = Ci::new() else { return };
    let texts = [
        "FAIL  c=on",
        "exit status 9",
        "output of the test",
        ", 1 boot ",
        "8 passed, 1 failed",
    ];
    let words = [
        "--ktap",
        "--matrix",
        "*",
        "!guarded",
        "--",
        "fail-with",
        "c",
    ];
    let done = ci.expect(1, &texts, &words);
    assert_eq!(done.out.matches("\nnot ok ").count(), 1, "{}", done.out);
    assert!(done.out.contains("\nnot ok 4 c=on\n"), "{}", done.out);
    // Each key was restored before the next was flipped.
    let both = ["--matrix", "[a-h]", "--", "fail-with", "c", "d"];
    ci.expect(0, &["9 passed, 0 failed"], &both);
    // A guarded key is skipped if a glob selects it, and refused if it is named.
    ci.expect(
        0,
        &["skip  guarded=on", "--allow-guarded"],
        &["--matrix", "g*", "--", "true"],
    );
    ci.expect(
        0,
        &["patchbay: no key was flipped"],
        &["--matrix", "sched_*", "--", "true"],
    );
    ci.expect(125, &["guarded"], &["--matrix", "guarded", "--", "true"]);
    ci.expect(
        125,
        &["no key nothing"],
        &["--matrix", "nothing", "--", "true"],
    );
    ci.expect(
        125,
        &["no key of the guest matches"],
        &["--matrix", "no*", "--", "true"],
    );
    ci.expect(
        1,
        &["FAIL  no key flipped", "no key was flipped"],
        &["--matrix", "a", "--", "say", "", "", "3"],
    );
}

#[test]
fn a_crash_boots_anew_and_the_rest_goes_on() {
    let Some(ci) = Ci::new() else { return };
    let texts = [
        "FAIL  c=on",
        "the other side",
        "8 passed, 1 failed",
        ", 2 boots ",
    ];
    ci.expect(1, &texts, &["--matrix", "[a-h]", "--", "panic-with", "c"]);
}

#[test]
fn together_finds_the_smallest_failing_set() {
    let Some(ci) = Ci::new() else { return };
    let words = [
        "--matrix",
        "[a-h]",
        "--together",
        "--",
        "fail-with",
        "b",
        "g",
    ];
    let done = ci.expect(1, &["fails with b=on g=on: exit status 9"], &words);
    assert!(done.err.contains("with all 8 keys flipped"), "{}", done.err);
    let words = [
        "--matrix",
        "[a-h]",
        "--together",
        "--",
        "panic-with",
        "b",
        "g",
    ];
    ci.expect(1, &["fails with b=on g=on: Kernel panic"], &words);
    let words = ["--matrix", "[a-h]", "--together", "--", "true"];
    ci.expect(0, &["2 passed, 0 failed"], &words);
}

#[test]
fn keys_are_set_in_every_guest() {
    let Some(ci) = Ci::new() else { return };
    let done = ci.expect(0, &[], &["--set", "b=on", "--set", "d=on", "--", "count"]);
    assert_eq!(done.out, "0 1 0 1 0 0 0 0");
    ci.expect(125, &["nothing"], &["--set", "nothing=on", "--", "true"]);
    assert_eq!(ci.run(&["--set", "b=yes", "--", "true"]).status, Some(2));
}

#[test]
fn no_monitor_outlives_its_run() {
    let Some(ci) = Ci::new() else { return };
    for signal in ["INT", "TERM", "KILL"] {
        let mut command = ci.command(&["--timeout", "1000s", "--", "say", "ready\n", "", "x"]);
        let mut run = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut ready = [0; 6];
        let mut out = run.stdout.take().expect("piped");
        out.read_exact(&mut ready).expect("it runs");
        let pid = run.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(children).expect("it has a monitor");
        let monitor = children.trim().parse().ok().and_then(Pid::from_raw);
        let monitor = monitor.unwrap_or_else(|| panic!("one child: {children:?}"));
        let monitor = pidfd_open(monitor, PidfdFlags::empty()).expect("it runs");
        end(run, signal);
        assert!(ends(&monitor), "the monitor runs on after SIG{signal}");
    }
}

/// Waits for the end of a process, and kills it if it does not end.
pub(super) fn ends(process: &OwnedFd) -> bool {
    // The pidfd becomes readable when the process ends, whichever process reaps it.
    let ended = &mut [PollFd::new(process, PollFlags::IN)];
    let ends = poll(ended, Some(&PATIENCE)).expect("polled");
    if ends == 0 {
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
    ends > 0
}
