// SPDX-License-Identifier: Apache-2.0
//! A relay between an attacher and QEMU's monitor that changes or loses messages.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use patchbay_attach::guest::QemuGuest;
use patchbay_attach::{Options, PauseWay, Target, attach};
use patchbay_guest::guest::{Guest, PausedGuest};
use patchbay_guest::pause::PauseError;
use serde_json::{Value, json};

use super::migration::{AFTER, BEFORE, announce};
use super::{Accelerator, DEADLINE, Memory, Qemu, begun, checked, until};

/// Timeout of a stop that gets no answer.
const SHORT: Duration = Duration::from_secs(1);

/// The message that the relay loses next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Command(&'static str),
    Answer(&'static str),
}

#[derive(Default)]
struct Faults {
    /// A text that replaces the answer to `info mtree -f`.
    view: Option<String>,
    lost: Option<Lost>,
    /// The ids of the last `info mtree -f`, and of a command whose answer is lost.
    view_id: Value,
    lost_id: Value,
    /// A callback that is called once, before the attacher gets the answer to the next
    /// `query-cpus-fast`.
    before_vcpus: Option<Box<dyn FnOnce() + Send>>,
    vcpus_id: Value,
    /// Callbacks that are called in turn, each before the next command of its name is forwarded and
    /// after all earlier commands were answered.
    before: VecDeque<(&'static str, Hook)>,
    /// Makes the relay hold back the answer to the first `query-status` after the last callback
    /// until the attacher has sent two more commands, which wait for this answer.
    holds: bool,
    holds_next: bool,
    held: Option<u64>,
    /// Commands with their arguments, and the answers that replace QEMU's.
    lies: Vec<(&'static str, Value, Value)>,
    /// The ids of commands whose answers are replaced, with the answers.
    replaced: Vec<(Value, Value)>,
    /// The names of the commands that were forwarded so far, and the text of those for QEMU's
    /// terminal.
    commands: Vec<String>,
    /// The ids of the last command and of the last answer.
    asked: u64,
    answered: u64,
}

type Hook = Box<dyn FnOnce() + Send>;

impl Faults {
    /// Returns the callback for a command.
    fn hook(&mut self, message: &Value) -> Option<Hook> {
        self.asked = message["id"].as_u64().unwrap_or(self.asked);
        if self.holds_next && message["execute"] == "query-status" {
            self.holds_next = false;
            self.held = Some(self.asked);
        }
        let is_next = |(name, _): &(&str, Hook)| message["execute"] == *name;
        if self.before.front().is_none_or(|next| !is_next(next)) {
            return None;
        }
        if self.before.len() == 1 && std::mem::take(&mut self.holds) {
            self.holds_next = true;
        }
        self.before.pop_front().map(|(_, hook)| hook)
    }

    /// Returns whether a command is forwarded to QEMU.
    fn command(&mut self, message: &Value) -> bool {
        if message["arguments"]["command-line"] == "info mtree -f" {
            self.view_id = message["id"].clone();
        }
        let name = message["execute"].as_str().unwrap_or_default();
        let line = message["arguments"]["command-line"].as_str();
        self.commands.push(line.unwrap_or(name).to_owned());
        let mut lies = self.lies.iter();
        let lie = lies.find(|lie| (lie.0, &lie.1) == (name, &message["arguments"]));
        if let Some((_, _, answer)) = lie {
            self.replaced.push((message["id"].clone(), answer.clone()));
        }
        if message["execute"] == "query-cpus-fast" {
            self.vcpus_id = message["id"].clone();
        }
        match self.lost {
            Some(Lost::Command(name)) if message["execute"] == name => {
                self.lost = None;
                false
            }
            Some(Lost::Answer(name)) if message["execute"] == name => {
                self.lost = None;
                self.lost_id = message["id"].clone();
                true
            }
            _ => true,
        }
    }

    /// Returns whether an answer or an event is forwarded to the attacher.
    fn answer(&mut self, message: &mut Value) -> bool {
        let id = message["id"].clone();
        if !id.is_null()
            && id == self.vcpus_id
            && let Some(hook) = self.before_vcpus.take()
        {
            hook();
        }
        if let Some(view) = self.view.clone().filter(|_| id == self.view_id) {
            message["return"] = Value::String(view);
        }
        if let Some((_, answer)) = self.replaced.iter().find(|(lied, _)| *lied == id) {
            *message = json!({ "return": answer, "id": id });
        }
        id.is_null() || id != self.lost_id
    }
}

/// A relay to a QEMU's monitor, with faults.
pub struct Relay {
    path: PathBuf,
    faults: Arc<Mutex<Faults>>,
}

impl Relay {
    /// Serves one client.
    pub fn start(folder: &Path, qemu: PathBuf) -> Self {
        let path = folder.join("relay");
        let listener = UnixListener::bind(&path).expect("free");
        let faults = Arc::new(Mutex::new(Faults::default()));
        let both = [Arc::clone(&faults), Arc::clone(&faults)];
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("a client");
            let qemu = UnixStream::connect(qemu).expect("QEMU listens");
            let clone = |stream: &UnixStream| stream.try_clone().expect("free");
            let up = (clone(&client), clone(&qemu));
            let [commands, answers] = both;
            std::thread::spawn(move || {
                relay(up.0, up.1, |message| {
                    let hook = lock(&commands).hook(message);
                    if let Some(hook) = hook {
                        let id = message["id"].as_u64().expect("a number");
                        until("earlier commands are answered", || {
                            lock(&commands).answered + 1 >= id
                        });
                        hook();
                    }
                    lock(&commands).command(message)
                });
            });
            relay(qemu, client, |message| {
                if let Some(id) = message["id"].as_u64() {
                    if lock(&answers).held == Some(id) {
                        until("the attacher gives up", || lock(&answers).asked > id + 1);
                    }
                    lock(&answers).answered = id;
                }
                lock(&answers).answer(message)
            });
        });
        Self { path, faults }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn options(&self, qemu: &Qemu, pause: PauseWay) -> Options {
        Options {
            target: Target::Qmp(self.path.clone(), Some(qemu.child.id())),
            ..qemu.options(pause)
        }
    }

    /// Attaches through the relay, and waits until the guest's counter runs.
    pub fn attach(&self, qemu: &Qemu, pause: PauseWay) -> QemuGuest {
        let guest = attach(&self.options(qemu, pause)).expect("attached");
        qemu.runs(&guest);
        // The firmware, which has ended now, changes the memory slots.
        let _ = guest.memory_changes(true);
        guest
    }

    /// Replaces QEMU's answers to a command with these arguments.
    pub fn lie(&self, command: &'static str, arguments: Value, answer: Value) {
        lock(&self.faults).lies.push((command, arguments, answer));
    }

    pub fn tell_the_truth(&self) {
        lock(&self.faults).lies.clear();
    }

    /// Returns the commands that were forwarded since the last call.
    pub fn commands(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.faults).commands)
    }

    pub fn replace(&self, view: Option<&str>) {
        lock(&self.faults).view = view.map(str::to_owned);
    }

    pub fn before_vcpus(&self, hook: impl FnOnce() + Send + 'static) {
        lock(&self.faults).before_vcpus = Some(Box::new(hook));
    }

    /// Calls `hook` before a command, after the callbacks that were added earlier.
    fn before(&self, command: &'static str, hook: impl FnOnce() + Send + 'static) {
        let mut faults = lock(&self.faults);
        faults.before.push_back((command, Box::new(hook)));
    }

    /// Holds back the answers of the stop whose query follows the last callback, until the attacher
    /// has given up.
    fn hold(&self) {
        lock(&self.faults).holds = true;
    }

    fn lose(&self, message: Lost) {
        lock(&self.faults).lost = Some(message);
    }

    fn has_lost(&self) -> bool {
        lock(&self.faults).lost.is_none()
    }
}

fn lock(faults: &Mutex<Faults>) -> MutexGuard<'_, Faults> {
    faults.lock().expect("no panic")
}

/// Forwards messages until one side is gone.
fn relay(from: UnixStream, mut to: UnixStream, mut passes: impl FnMut(&mut Value) -> bool) {
    for line in BufReader::new(from).lines().map_while(Result::ok) {
        let Ok(mut message) = serde_json::from_str(&line) else {
            continue;
        };
        if passes(&mut message) && writeln!(to, "{message}").is_err() {
            break;
        }
    }
    // The other side learns that this side is gone.
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// Checks that a stop ends in an error if QEMU does not answer one of its commands, and that the
/// guest keeps running while the attacher lives.
pub fn unanswered(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    for lose in [Lost::Command, Lost::Answer] {
        let folder = tempfile::tempdir().expect("temporary folder");
        let relay = Relay::start(folder.path(), qemu.socket("qmp"));
        let guest = relay.attach(&qemu, PauseWay::Qmp);
        let runs = |lost: &str| {
            assert!(relay.has_lost(), "{lost}");
            let status = &qemu.other("query-status", Value::Null)["status"];
            assert_eq!(status, "running", "{lost}");
            qemu.runs(&guest);
        };
        relay.lose(lose("stop"));
        let error = guest.pause(SHORT).expect_err("not answered");
        assert!(
            matches!(&error, PauseError::Late { deadline, late } if *deadline == SHORT && late.len() == 2),
            "{error}"
        );
        runs("stop");
        let paused = guest.pause(DEADLINE).expect("stopped");
        relay.lose(lose("query-migrate"));
        let error = paused.check_writes().expect_err("not answered");
        assert!(
            error.contains("did not answer query-migrate within"),
            "{error}"
        );
        drop(paused);
        runs("query-migrate");
        let paused = guest.pause(DEADLINE).expect("stopped");
        relay.lose(lose("cont"));
        drop(paused);
        runs("cont");
        // Another client's stop outlasts the attacher, because the watchdog was told that the
        // attacher's own stop is over.
        qemu.other("stop", Value::Null);
        drop(guest);
        let status = &qemu.other("query-status", Value::Null)["status"];
        assert_eq!(status, "paused");
        qemu.other("cont", Value::Null);
    }
}

/// Checks that a stop gives up if QEMU does not answer a question about its memory, because a read
/// of the map and a stop exclude each other.
pub fn unanswered_map(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), qemu.socket("qmp"));
    let guest = relay.attach(&qemu, PauseWay::Freeze);
    relay.lose(Lost::Answer("qom-list"));
    std::thread::scope(|scope| {
        scope.spawn(|| guest.memory_changes(true));
        until("QEMU is asked", || relay.has_lost());
        let error = guest.pause(DEADLINE).expect_err("the map is being read");
        assert!(error.to_string().contains("being read"), "{error}");
        assert!(!guest.is_held());
    });
    drop(guest.pause(DEADLINE).expect("the read was given up"));
    qemu.runs(&guest);
}

/// Checks that commands of another client between the attacher's query and its `stop` have their
/// effect on the guest: it runs after that client's `cont`, and is stopped after that client's
/// `stop`.
pub fn between(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let qemu = Arc::new(qemu);
    let folder = tempfile::tempdir().expect("temporary folder");
    let relay = Relay::start(folder.path(), qemu.socket("qmp"));
    let guest = relay.attach(&qemu, PauseWay::Qmp);
    let before = |command, words: &'static [&'static str]| {
        let qemu = Arc::clone(&qemu);
        relay.before(command, move || {
            for word in words {
                qemu.other(word, Value::Null);
            }
        });
    };
    let status = || qemu.other("query-status", Value::Null)["status"].clone();

    // The other client's stop ends before the attacher's stop begins.
    before("stop", &["stop", "cont"]);
    let resets = guest.life().resets();
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    begun(&paused).expect("the stop is the attacher's");
    assert!(guest.life().resets() > resets, "it may have set it back");
    drop(paused);
    assert_eq!(status(), "running");
    qemu.runs(&guest);

    // The other client's stop is older than the query, and ends before the attacher's stop begins.
    before("query-migrate", &["stop"]);
    before("stop", &["cont"]);
    announce(&guest, BEFORE, AFTER);
    let paused = guest.pause(DEADLINE).expect("stopped");
    begun(&paused).expect("the stop is the attacher's");
    drop(paused);
    assert_eq!(status(), "running");
    qemu.runs(&guest);

    // The other client's stop is older than the query, and lasts.
    for late in [false, true] {
        before("query-migrate", &["stop"]);
        if late {
            relay.hold();
        }
        let error = guest.pause(SHORT).expect_err("another client's stop");
        let expected = match late {
            false => matches!(error, PauseError::AlreadyPaused),
            true => matches!(error, PauseError::Late { .. }),
        };
        assert!(expected, "{error}");
        assert_eq!(status(), "paused", "late: {late}");
        qemu.other("cont", Value::Null);
        qemu.runs(&guest);
    }
}

/// Checks that a guest that another client resumes during a change is stopped again for the undo
/// and runs afterwards.
pub fn resumed_in_a_change(accelerator: Accelerator) {
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    let guest = qemu.attach(PauseWay::Qmp);
    let status = || qemu.other("query-status", Value::Null)["status"].clone();
    let paused = guest.pause(DEADLINE).expect("stopped");
    qemu.other("cont", Value::Null);
    let error = begun(&paused).expect_err("the guest runs");
    assert!(error.contains("resumed it"), "{error}");
    drop(paused);
    qemu.runs(&guest);
    for stops_again in [false, true] {
        announce(&guest, BEFORE, AFTER);
        let paused = guest.pause(DEADLINE).expect("stopped");
        begun(&paused).expect("stopped");
        qemu.other("cont", Value::Null);
        if stops_again {
            qemu.other("stop", Value::Null);
        }
        let error = checked(&paused).expect_err("the guest has run");
        assert!(error.contains("resumed it"), "{error}");
        assert_eq!(status(), "paused", "for the undo");
        paused.undone();
        drop(paused);
        if stops_again {
            assert_eq!(status(), "paused", "the other client's stop");
            qemu.other("cont", Value::Null);
        }
        assert_eq!(status(), "running");
        qemu.runs(&guest);
    }
}
