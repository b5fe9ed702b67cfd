// SPDX-License-Identifier: Apache-2.0
//! An attacher that dies by SIGKILL, in each state, leaves a guest that runs and can be attached to.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use patchbay_attach::PauseWay::{self, Freeze, Qmp};
use patchbay_attach::attach;
use patchbay_attach::guest::QemuGuest;
use patchbay_kernel_image::live::{Way, discover};
use patchbay_service::guest::Guest;
use patchbay_service::keys::registry::discovery::Discoverable;
use serde_json::Value;

use super::{Accelerator, DEADLINE, END, Memory, Qemu, SCRATCH, checked, options};

/// Makes the test's program the attacher that is killed: `SOCKET:PAUSE:ACCELERATOR:STATE`.
const ATTACHER: &str = "PATCHBAY_TEST_ATTACHER";
/// Printed when the state is reached.
const REACHED: &str = "REACHED";

/// What the attacher does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing.
    Idle,
    /// Reads memory and registers, again and again.
    Discovering,
    /// Holds the guest stopped.
    Paused,
    /// Stops the guest, writes and looks at the migration, resumes it, again and again.
    Committing,
}

const STATES: [State; 4] = [
    State::Idle,
    State::Discovering,
    State::Paused,
    State::Committing,
];

/// The test, and in a second process of the same program the attacher.
pub fn kill(accelerator: Accelerator) {
    if let Ok(word) = std::env::var(ATTACHER) {
        attacher(&word);
    }
    let Some(qemu) = Qemu::start(accelerator, Memory::SharedMemfd) else {
        return;
    };
    for pause in [Freeze, Qmp] {
        for state in STATES {
            let times = match state {
                State::Idle | State::Paused => 1,
                State::Discovering | State::Committing => 4,
            };
            for time in 1..=times {
                kill_attacher(&qemu, pause, state, time);
                assert_runs(&qemu, pause);
            }
        }
    }
}

/// Starts an attacher, waits until it has reached the state so many times, and kills it.
fn kill_attacher(qemu: &Qemu, pause: PauseWay, state: State, times: u64) {
    let socket = qemu.socket("qmp");
    let socket = socket.display();
    let accelerator = qemu.accelerator;
    let mut child = Command::new(std::env::current_exe().expect("a program"))
        .args(["--exact", "kill", "--nocapture"])
        .env(
            ATTACHER,
            format!("{socket}:{pause:?}:{accelerator:?}:{state:?}"),
        )
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = output.lines().map_while(Result::ok);
    let mut reach = || assert!(lines.any(|line| line.contains(REACHED)), "{state:?}");
    for _ in 0..times {
        reach();
    }
    if (pause, state) == (Qmp, State::Paused) {
        assert_eq!(qemu.other("query-status", Value::Null)["status"], "paused");
    }
    child.kill().expect("it lives");
    child.wait().expect("it has ended");
}

/// The guest runs without another word, and the next attacher can stop it.
fn assert_runs(qemu: &Qemu, pause: PauseWay) {
    let end = Instant::now() + DEADLINE;
    // The watchdog resumes it and then closes the monitor's socket.
    while qemu.other("query-status", Value::Null)["status"] != "running" {
        assert!(Instant::now() < end, "nobody resumes the guest");
    }
    let guest = loop {
        match attach(&qemu.options(pause)) {
            Ok(guest) => break guest,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
    };
    qemu.runs(&guest);
    drop(guest.pause(DEADLINE).expect("it can be stopped"));
    qemu.runs(&guest);
}

/// The process that is killed.
fn attacher(word: &str) -> ! {
    let mut words = word.split(':');
    let mut next = || words.next().expect("four words");
    let socket = PathBuf::from(next());
    let pause = if next() == "Qmp" { Qmp } else { Freeze };
    let accelerator = if next() == "Tcg" {
        Accelerator::Tcg
    } else {
        Accelerator::Kvm
    };
    let name = next();
    let state = STATES.iter().find(|state| format!("{state:?}") == name);
    let guest = attach(&options(socket, pause, accelerator)).expect("attached");
    match state.expect("a state") {
        State::Idle => println!("{REACHED}"),
        State::Discovering => loop {
            println!("{REACHED}");
            let cpus = guest.cpus().expect("registers");
            let found = discover(Discoverable::memory(&guest), &cpus, Way::Note);
            assert!(found.is_err(), "the guest only counts");
        },
        State::Paused => {
            let paused = guest.pause(DEADLINE).expect("stopped");
            println!("{REACHED}");
            std::mem::forget(paused);
        }
        State::Committing => commit(&guest),
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn commit(guest: &QemuGuest) -> ! {
    let page: Vec<u8> = (0..4096).map(|byte| (byte % 251) as u8).collect();
    loop {
        println!("{REACHED}");
        let paused = guest.pause(DEADLINE).expect("stopped");
        for address in (SCRATCH..END / 4 * 3).step_by(page.len()) {
            guest.ram().write(address, &page).expect("RAM");
        }
        checked(&paused).expect("no migration");
    }
}
