// SPDX-License-Identifier: Apache-2.0
//! Kills an attacher by SIGKILL in each state, and checks that the guest runs, can be attached to,
//! and has no partial change.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, raise};
use patchbay_attach::PauseWay::{self, Freeze, Qmp};
use patchbay_attach::guest::QemuGuest;
use patchbay_attach::{Options, Target, attach};
use patchbay_guest::discovery::Discoverable;
use patchbay_guest::guest::{Guest, Intended, PausedGuest};
use patchbay_guest::kernel_memory::Place;
use patchbay_kernel_image::live::{Way, discover};
use serde_json::Value;
use static_keys::Write;
use static_keys::instruction::replace;

use super::foreign::{self, Counting};
use super::{
    Accelerator, DEADLINE, Memory, Qemu, SCRATCH, begun, checked, counts_on, options, process,
};

/// The variable that makes the test's program run as the attacher to kill:
/// `TARGET:PAUSE:ACCELERATOR:STATE:TURNS`. The target is a socket or a process's id.
const ATTACHER: &str = "PATCHBAY_TEST_ATTACHER";

/// The variable that gives the number of times that each way of attaching is tested; 1 without it.
const ROUNDS: &str = "PATCHBAY_TEST_MONITOR_KILLS";

/// The number of keys of the interrupted change.
const KEYS: u64 = 4096;

/// The activity of the attacher when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Does nothing.
    Idle,
    /// Reads memory and registers.
    Discovering,
    /// Stops the guest.
    Stopping,
    /// Writes to the stopped guest.
    Writing,
    /// Checks the migration before the resume.
    Checking,
    /// Resumes the guest.
    Resuming,
}

const STATES: [State; 6] = [
    State::Idle,
    State::Discovering,
    State::Stopping,
    State::Writing,
    State::Checking,
    State::Resuming,
];

/// The guest whose attachers are killed.
struct Victim<'q> {
    /// The name of the test, which the attacher's process runs too.
    test: &'static str,
    accelerator: Accelerator,
    /// The monitor, if it is QEMU.
    qemu: Option<&'q Qemu>,
}

/// Runs the test. The attacher runs in a second process of the same program.
pub fn kill(accelerator: Accelerator) {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word);
    }
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    process::counting(&qemu);
    let victim = Victim::of_qemu(&qemu);
    kill_each(&victim, &[Freeze, Qmp].map(|pause| qemu.options(pause)));
}

/// Does the same as [`kill()`] with attachers that do not ask QEMU.
pub fn kill_by_process() {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word);
    }
    if !process::readable() {
        return;
    }
    if let Some(qemu) = Qemu::start(Accelerator::Kvm, Memory::SharedMemfd) {
        process::counting(&qemu);
        kill_each(&Victim::of_qemu(&qemu), &[process::by_process(&qemu)]);
    }
}

/// Does the same with a monitor that does not cooperate. `test` is the name of the test.
pub fn kill_with(test: &'static str, start: fn(&Path) -> Option<Counting>) {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word);
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let Some(monitor) = start(folder.path()) else {
        return;
    };
    let victim = Victim {
        test,
        accelerator: Accelerator::Kvm,
        qemu: None,
    };
    counts_on(&foreign::attached(monitor.pid()));
    let options = Options {
        target: process::host(monitor.pid()),
        ..options(PathBuf::new(), Freeze, Accelerator::Kvm)
    };
    kill_each(&victim, &[options]);
}

impl<'q> Victim<'q> {
    fn of_qemu(qemu: &'q Qemu) -> Self {
        Self {
            test: "kill",
            accelerator: qemu.accelerator,
            qemu: Some(qemu),
        }
    }
}

fn kill_each(victim: &Victim<'_>, ways: &[Options]) {
    let rounds = std::env::var(ROUNDS).map_or(1, |rounds| rounds.parse().expect("a number"));
    for options in ways {
        for state in STATES {
            let times = match state {
                State::Idle => 1,
                State::Discovering | State::Stopping => 2,
                State::Writing | State::Checking | State::Resuming => 4,
            };
            for time in 0..times * rounds {
                kill_attacher(victim, options, state, turns(state, time));
                assert_runs(victim, options);
            }
            let way = options.pause;
            println!("{way:?}, {state:?}: {} kills", times * rounds);
        }
    }
}

/// Returns the number of turns of a loop between the beginning of a state and the kill. Every
/// eighth attempt takes none, and the others take up to 7,161.
fn turns(state: State, time: u64) -> u64 {
    const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
    let seed = time * 16 + state as u64;
    (seed.wrapping_mul(MULTIPLIER) >> 33) % 1024 * (time % 8)
}

/// Starts an attacher that kills itself in a state, and waits for its end.
fn kill_attacher(victim: &Victim<'_>, options: &Options, state: State, turns: u64) {
    let pause = options.pause;
    let target = match &options.target {
        Target::Host { pid, .. } => pid.to_string(),
        Target::Qmp(socket, _) => socket.display().to_string(),
        other => panic!("no test attaches to {other:?}"),
    };
    let accelerator = victim.accelerator;
    let status = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", victim.test, "--nocapture"])
        .env(
            ATTACHER,
            format!("{target}:{pause:?}:{accelerator:?}:{state:?}:{turns}"),
        )
        .stdout(Stdio::null())
        .status()
        .expect("started");
    let killed = Some(Signal::SIGKILL as i32);
    assert_eq!(status.signal(), killed, "{pause:?} {state:?}: {status}");
}

/// Checks that the guest runs without a further command, and that the next attacher can stop it.
fn assert_runs(victim: &Victim<'_>, options: &Options) {
    let end = Instant::now() + DEADLINE;
    // The watchdog resumes the guest and then closes the monitor's socket.
    while victim
        .qemu
        .is_some_and(|qemu| qemu.other("query-status", Value::Null)["status"] != "running")
    {
        assert!(Instant::now() < end, "nobody resumes the guest");
    }
    let guest = super::qemu::attached(options, DEADLINE, "after a kill");
    counts_on(&guest);
    drop(guest.pause(DEADLINE).expect("it can be stopped"));
    if victim.accelerator == Accelerator::Kvm {
        guest.monitor().registers(DEADLINE).expect("they run");
        assert_eq!(foreign::requests(&guest), [0, 0]);
    }
    counts_on(&guest);
    let found = |write: &Write<Place>| {
        let mut bytes = [0; 5];
        let found = &mut bytes[..write.length];
        assert!(
            guest
                .ram()
                .read_piece(write.place.pieces(write.length)[0], found)
        );
        *found == write.after[..write.length]
    };
    let mut made = writes(&guest).map(|write| found(&write));
    let first = made.next();
    assert!(made.all(|made| Some(made) == first), "a change in part");
}

/// Returns the writes of a change: the keys' sites, and then their counts. So a partial change
/// makes every key inconsistent.
fn writes(guest: &QemuGuest) -> impl Iterator<Item = Write<Place>> {
    let write = |key: u64, place, length, after| Write {
        key: usize::try_from(key).expect("few"),
        place: guest
            .ram()
            .piece(SCRATCH + (place * KEYS + key) * 16, length)
            .expect("RAM")
            .into(),
        length,
        before: [0; 5],
        after,
    };
    let sites = (0..KEYS).map(move |key| write(key, 0, 5, [0xe9, 1, 2, 3, 4]));
    sites.chain((0..KEYS).map(move |key| write(key, 1, 4, [1, 0, 0, 0, 0])))
}

/// Writes the bytes from before or after the change, as the engine does. A copy of five bytes may
/// be interrupted.
fn put(guest: &QemuGuest, write: &Write<Place>, bytes: [u8; 5]) {
    let [piece, _] = write.place.pieces(write.length);
    let put = |bytes: &[u8]| {
        let written = guest.ram().write_piece(piece.prefix(bytes.len()), bytes);
        written.then_some(()).ok_or("no memory")
    };
    let bytes = &bytes[..write.length];
    // A count is an aligned word.
    replace(bytes, put).expect("RAM");
}

/// Runs the attacher to kill.
fn attacher(word: &str) -> ! {
    let mut words = word.split(':');
    let mut next = || words.next().expect("five words");
    let target = next();
    let pause = if next() == "Qmp" { Qmp } else { Freeze };
    let accelerator = if next() == "Tcg" {
        Accelerator::Tcg
    } else {
        Accelerator::Kvm
    };
    let name = next();
    let state = STATES.iter().find(|state| format!("{state:?}") == name);
    let turns = next().parse().expect("a number");
    let options = match target.parse() {
        Ok(pid) => Options {
            target: process::host(pid),
            ..options(PathBuf::new(), pause, accelerator)
        },
        Err(_) => options(PathBuf::from(target), pause, accelerator),
    };
    let guest = attach(&options).expect("attached");
    let now = Arc::new(AtomicUsize::new(State::Idle as usize));
    kill_in(*state.expect("a state"), turns, Arc::clone(&now));
    match state {
        Some(State::Idle) => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        Some(State::Discovering) => loop {
            now.store(State::Discovering as usize, Ordering::SeqCst);
            let cpus = guest.cpus().expect("answered").expect("registers");
            let found = discover(Discoverable::memory(&guest), &cpus, Way::Note);
            assert!(found.is_err(), "the guest only counts");
        },
        _ => commit(&guest, pause, &now),
    }
}

/// Kills this process from a second thread. If the state ends before all turns have passed, the
/// thread waits for the state again, with half as many turns.
fn kill_in(state: State, mut turns: u64, now: Arc<AtomicUsize>) {
    let reached = move || now.load(Ordering::SeqCst) == state as usize;
    std::thread::spawn(move || {
        loop {
            while !reached() {
                std::thread::yield_now();
            }
            for _ in 0..turns {
                std::hint::spin_loop();
            }
            if reached() {
                raise(Signal::SIGKILL).expect("nothing forbids it");
            }
            turns /= 2;
        }
    });
}

fn commit(guest: &QemuGuest, pause: PauseWay, now: &AtomicUsize) -> ! {
    let reach = |state: State| now.store(state as usize, Ordering::SeqCst);
    // An earlier attacher may have been killed after its last write.
    for write in writes(guest) {
        put(guest, &write, write.before);
    }
    for on in [true, false].into_iter().cycle() {
        let writes: Vec<Write<Place>> = writes(guest)
            .map(|write| match on {
                true => write,
                false => Write {
                    before: write.after,
                    after: write.before,
                    ..write
                },
            })
            .collect();
        guest
            .will_write(Intended {
                keys: &mut (0..KEYS).map(|_| "key"),
                writes: &mut writes.iter().copied(),
                gates: &mut std::iter::empty(),
                ledger: None,
            })
            .expect("kept by the watchdog");
        reach(State::Stopping);
        let paused = guest.pause(DEADLINE).expect("stopped");
        begun(&paused).expect("noted by the watchdog");
        reach(State::Writing);
        for write in &writes {
            put(guest, write, write.after);
        }
        if pause == Qmp {
            assert_eq!(guest.monitor().status().as_deref(), Ok("paused"));
        }
        reach(State::Checking);
        checked(&paused).expect("no migration");
        paused.made();
        reach(State::Resuming);
        drop(paused);
    }
    unreachable!("it does not end")
}
