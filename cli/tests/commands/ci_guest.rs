// SPDX-License-Identifier: Apache-2.0
//! Simulates the monitor of `patchbay ci`: this test program serves an in-memory guest and plays
//! the agent.

use std::os::unix::net::UnixStream;
use std::path::Path;

use patchbay_guest::testing::TestKey;
use patchbay_proto::agent::v1::from_exec::Message as Answer;
use patchbay_proto::agent::v1::to_exec::Message as Question;
use patchbay_proto::agent::v1::{
    ExecExited, ExecFetched, ExecFile, ExecHello, ExecOutput, ExecStarted, FromExec, ToExec,
};
use patchbay_proto::agent_frame;
use patchbay_proto::v1::SnapshotGuestResponse;
use tokio::runtime::Runtime;

use super::fake::Fake;
use super::lab::{Lab, runtime};

/// The environment variable that passes the monitor's arguments to the process that simulates the
/// monitor.
pub(super) const MONITOR_ARGUMENTS: &str = "PATCHBAY_TEST_MONITOR_ARGUMENTS";
const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// Time limit for what a test waits for. It only ends a test that would never end.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);

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
            // With the key on, the connection ends when the command is to be killed, and the
            // monitor runs on.
            ["leave-with", key] if self.any_on(&[key]) => {
                assert!(matches!(self.receive(), Some(Question::Kill(_))));
                let _ = self.stream.shutdown(std::net::Shutdown::Both);
            }
            // With the key on, succeeds, and fails when the key is turned off again.
            ["fail-back", key, how] if self.any_on(&[key]) => {
                let panics = how == "panic";
                match how {
                    "late" => self.keys.guest.set_late(true),
                    _ => self.keys.guest.on_pause(move || {
                        if panics {
                            console("[    8.000000] Kernel panic - not syncing: the way back");
                            std::process::exit(0);
                        }
                        console("[    8.000000] WARNING: CPU: 0 PID: 7 at kernel/x.c:1 f+0x1/0x2");
                        console("[    8.100000] ---[ end trace 0000000000000000 ]---");
                    }),
                }
                self.end(mark, Some(0), 0);
            }
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
                let others: usize = others.parse().expect("a number");
                until(|| staying(Path::new(".")).len() == others);
                self.send(Answer::Fetched(ExecFetched {}));
            }
            // Breaks the protocol if it is the command with this number, and otherwise fails with
            // the keys on.
            ["break-at", number, ..] if number == mark => {
                self.send(Answer::Fetched(ExecFetched {}));
            }
            ["break-at", ..] => {
                let failed = self.on(&argv[2..]);
                self.end(mark, Some(if failed { 9 } else { 0 }), 0);
            }
            // Does not end if it is the command with this number, and otherwise is another command.
            ["stay-at", number, ..] if number == mark => stay(),
            ["stay-at", ..] => self.play(&argv[2..], mark),
            // With several keys on, fails, and does not end when it is repeated with the same keys.
            // If this key is one of them, then waits until another guest stays, and breaks the
            // protocol.
            ["fail-once", key] => {
                let on = |key: &&str| self.keys.guest.count(key) > 0;
                let on: Vec<&str> = KEYS.into_iter().filter(on).collect();
                if on.len() < 2 {
                    self.end(mark, Some(0), 0);
                } else if std::fs::File::create_new(on.concat()).is_ok() {
                    self.end(mark, Some(9), 0);
                } else if on.contains(&key) {
                    until(|| staying(Path::new(".")).len() == 1);
                    self.send(Answer::Fetched(ExecFetched {}));
                } else {
                    stay();
                }
            }
            // With the keys on, the guest ends, and no other can be started.
            ["lose-monitor-with", ..] if self.on(&argv[1..]) => {
                std::fs::remove_file("monitor").expect("it was there");
                std::process::exit(0);
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
            // Prints 640 KiB, and then a measurement.
            ["flood"] => {
                for _ in 0..10 {
                    self.print(1, &"x".repeat(64 << 10));
                }
                self.print(1, "\ntook 5 ns\n");
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
            "/endless" => stay(),
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
#[track_caller]
pub(super) fn until(mut happened: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !happened() {
        assert!(begun.elapsed() < PATIENCE, "it does not happen");
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
    // A file of this name makes all copies of a guest unreachable but the first one.
    let is_unreachable = words.contains(&"--from")
        && std::fs::rename("first-reachable", "unreachable").is_err()
        && Path::new("unreachable").exists();
    if saved.is_none() && !is_unreachable {
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
