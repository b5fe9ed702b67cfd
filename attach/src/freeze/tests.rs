// SPDX-License-Identifier: Apache-2.0
//! Tests stops of threads by ptrace.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::*;

/// A process, killed on drop.
struct Running(Child);

impl Running {
    fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that prints forever.
struct Busy(Running, BufReader<std::process::ChildStdout>);

impl Busy {
    fn new() -> Self {
        let mut child = Command::new("yes")
            .stdout(Stdio::piped())
            .spawn()
            .expect("coreutils");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut busy = Self(Running(child), output);
        busy.prints();
        busy
    }

    fn prints(&mut self) {
        // This is more than a pipe and the reader's buffer hold.
        self.prints_some(100_000);
    }

    fn prints_some(&mut self, lines: usize) {
        for _ in 0..lines {
            let mut line = String::new();
            assert_ne!(self.1.read_line(&mut line).expect("text"), 0);
        }
    }

    fn state(&self) -> String {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).expect("it lives");
        let state = status
            .lines()
            .find_map(|line| line.strip_prefix("State:\t"));
        state.expect("a state").to_owned()
    }
}

fn in_time() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[test]
fn threads_stand_still_until_the_drop() {
    let mut busy = Busy::new();
    for _ in 0..10 {
        let frozen = freeze(&[busy.0.id()], Point::Any, in_time()).expect("stopped");
        assert!(busy.state().starts_with('t'), "{}", busy.state());
        drop(frozen);
        busy.prints();
    }
}

#[test]
fn a_deadline_that_has_passed_leaves_them_running() {
    let mut busy = Busy::new();
    for _ in 0..10 {
        match freeze(&[busy.0.id()], Point::Any, Instant::now()) {
            Err(FreezeError::Late(late)) => assert_eq!(late, [0]),
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
        busy.prints();
    }
    drop(freeze(&[busy.0.id()], Point::Any, in_time()).expect("stopped"));
}

#[test]
fn no_thread_stays_stopped_if_one_cannot_be() {
    let mut busy = Busy::new();
    let id = busy.0.id();
    let missing =
        freeze(&[id, i32::MAX.cast_unsigned()], Point::Any, in_time()).expect_err("no such thread");
    assert_eq!(missing, FreezeError::Gone);
    busy.prints();
    let frozen = freeze(&[id], Point::Any, in_time()).expect("stopped");
    let twice = freeze(&[id], Point::Any, in_time()).expect_err("it has a tracer");
    assert!(matches!(twice, FreezeError::Denied { .. }), "{twice}");
    drop(frozen);
    busy.prints();
}

/// The variable that makes the test's program stop a process that prints.
const STOPS: &str = "PATCHBAY_TEST_STOPS";

#[test]
fn an_endless_stop_kills_the_process() {
    let test = "an_endless_stop_kills_the_process";
    if std::env::var_os(STOPS).is_some() {
        let printing = Command::new("yes").spawn().expect("coreutils");
        let longest = Duration::from_millis(1);
        let frozen = freeze_for(&[printing.id()], Point::Any, in_time(), longest);
        let _frozen = frozen.expect("stopped");
        loop {
            std::thread::park();
        }
    }
    let mut child = Command::new(std::env::current_exe().expect("a program"))
        .args([test, "--test-threads=1", "--nocapture"])
        .env(STOPS, "")
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut busy = Busy(Running(child), output);
    let status = loop {
        // Somebody has to read, or `yes` waits and shows nothing.
        busy.prints_some(1000);
        if let Some(status) = busy.0.0.try_wait().expect("a child") {
            break status;
        }
    };
    assert_eq!(status.signal(), Some(Signal::SIGKILL as i32), "{status}");
    busy.prints();
}

/// The variable that makes the test's program only wait.
const WAITS: &str = "PATCHBAY_TEST_WAITS";

#[test]
fn a_thread_that_may_hold_a_lock_goes_on() {
    if std::env::var_os(WAITS).is_some() {
        loop {
            std::thread::park();
        }
    }
    let mut busy = Busy::new();
    let soon = Instant::now() + Duration::from_millis(50);
    let late = freeze(&[busy.0.id()], Point::Unlocked, soon).expect_err("it writes");
    assert_eq!(late, FreezeError::Late(vec![0]));
    busy.prints();

    let waits = Command::new(std::env::current_exe().expect("a program"))
        .args(["a_thread_that_may_hold_a_lock_goes_on", "--test-threads=1"])
        .env(WAITS, "")
        .stdout(Stdio::null())
        .spawn()
        .expect("this program");
    let waits = Running(waits);
    for _ in 0..10 {
        drop(freeze(&[waits.id()], Point::Unlocked, in_time()).expect("it waits"));
    }
}

/// Uses a process whose thread writes, so that the test would notice a resumed thread.
#[test]
fn a_stopped_process_does_not_run() {
    let mut busy = Busy::new();
    let pid = Pid::from_raw(busy.0.id().cast_signed());
    let stops = |busy: &Busy| {
        while !busy.state().starts_with('T') {
            std::thread::yield_now();
        }
    };
    nix::sys::signal::kill(pid, Signal::SIGSTOP).expect("it lives");
    stops(&busy);
    for point in [Point::Unlocked, Point::Any] {
        let frozen = freeze(&[busy.0.id()], point, in_time()).expect("stopped");
        assert!(busy.state().starts_with('t'), "{}", busy.state());
        drop(frozen);
        stops(&busy);
    }
    nix::sys::signal::kill(pid, Signal::SIGCONT).expect("it lives");
    busy.prints();
}

/// Checks that a signal that arrives while the thread is stopped is delivered afterwards.
#[test]
fn a_signal_is_not_lost() {
    let mut busy = Busy::new();
    let frozen = freeze(&[busy.0.id()], Point::Any, in_time()).expect("stopped");
    nix::sys::signal::kill(Pid::from_raw(busy.0.id().cast_signed()), Signal::SIGTERM)
        .expect("it lives");
    assert!(busy.state().starts_with('t'));
    drop(frozen);
    assert!(!busy.0.0.wait().expect("ended").success());
}

/// Starts a shell that writes without end, and `handled` when SIGRTMIN+1 arrives.
fn handles(output: Stdio) -> Child {
    let script = "trap 'echo handled' RTMIN+1; echo ready; while :; do echo; done";
    let mut bash = Command::new("bash");
    bash.args(["-c", script]).stdout(output);
    bash.spawn().expect("bash")
}

fn is_line(busy: &mut Busy, expected: &str) {
    let mut line = String::new();
    while line.trim_end() != expected {
        line.clear();
        assert_ne!(busy.1.read_line(&mut line).expect("text"), 0);
    }
}

#[test]
fn a_real_time_signal_before_the_stop_is_delivered_after_it() {
    let mut child = handles(Stdio::piped());
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let mut busy = Busy(Running(child), output);
    is_line(&mut busy, "ready");
    let id = busy.0.id();
    for (point, expected) in [
        (Point::Any, Ok(())),
        (Point::Running, Err(Failure::RealTimeSignal(0))),
    ] {
        let traces = || {
            let mut traced = Vec::new();
            seize(&[id], &mut traced).expect("no tracer");
            // Bash sends it, because nix has no name for it. It arrives before the interrupt.
            let kill = format!("kill -RTMIN+1 {id}");
            let killed = Command::new("bash").args(["-c", &kill]).status();
            assert!(killed.expect("bash").success());
            while !busy.state().starts_with('t') {
                std::thread::yield_now();
            }
            let stopped = stop_seized(point, &mut traced, in_time());
            (stopped, release(&traced))
        };
        let (stopped, released) =
            std::thread::scope(|scope| scope.spawn(traces).join().expect("no panic"));
        assert_eq!(stopped, expected);
        assert!(
            released.is_err(),
            "the end of the tracer's thread releases it"
        );
        is_line(&mut busy, "handled");
    }
}

#[test]
fn threads_that_real_time_signals_interrupt_are_frozen() {
    let busy = Running(handles(Stdio::null()));
    let id = busy.id();
    // Until the shell has its handler, the signal would kill it.
    let caught = || {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it lives");
        let caught = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:\t"));
        let caught = u64::from_str_radix(caught.expect("a mask"), 16).expect("a number");
        caught >> libc::SIGRTMIN() & 1 == 1
    };
    while !caught() {
        std::thread::yield_now();
    }
    let kill = format!("while kill -RTMIN+1 {id}; do :; done");
    let kills = Command::new("bash").args(["-c", &kill]).spawn();
    let _kills = Running(kills.expect("bash"));
    for _ in 0..200 {
        drop(freeze(&[id], Point::Any, in_time()).expect("stopped"));
        let soon = Instant::now() + Duration::from_millis(1);
        let late = freeze(&[id], Point::Running, soon).expect_err("no KVM_RUN");
        assert_eq!(late, FreezeError::Late(vec![0]));
    }
}
