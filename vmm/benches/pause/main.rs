// SPDX-License-Identifier: Apache-2.0

//! Measures the time to stop and to resume every vCPU, for guests of 1, 2 and 4 vCPUs that spin in
//! user mode, compared with a bare probe ([`probe`]) that stops the same guest code. The monitor
//! and the probe take turns in one run, and one is kept stopped while the other runs.
//!
//! If there are enough cores, the controller gets a core of its own. Otherwise the figures would
//! depend on whether the scheduler happens to put a vCPU on the controller's core. Such a vCPU is
//! already preempted when the controller requests the pause.
//!
//! `cargo xtask bench pause [-- ROUNDS]`

#[path = "../../tests/bare_metal/mod.rs"]
mod bare_metal;
mod probe;

use std::time::{Duration, Instant};

use bare_metal::{branch_guest, counters};
use patchbay_vmm::vm::Vm;
use probe::Probe;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};

const DEADLINE: Duration = Duration::from_secs(10);
/// Time between two pauses, so that the vCPUs enter the guest again.
const BETWEEN: Duration = Duration::from_micros(500);
/// Monitor and probe take this many turns, so that a drift of the machine affects both.
const TURNS: usize = 20;

fn main() {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|word| word.parse().ok())
        .unwrap_or(2_000);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "host: {cores} cores, load {}; microseconds of {rounds} rounds",
        load.split(' ').next().unwrap_or("?")
    );
    println!("| vCPUs | | p50 | p99 | max | p50 / probe |");
    println!("|---|---|---|---|---|---|");
    for vcpus in [1, 2, 4] {
        let Some(vm) = branch_guest(vcpus) else {
            return;
        };
        let mut paused = Some(vm.pause(DEADLINE).expect("the vCPUs stop"));
        let probe = Probe::start(vcpus);
        place(usize::from(vcpus) < cores, cores);
        let (mut ours, mut bare) = (Times::default(), Times::default());
        for _ in 0..TURNS {
            for _ in 0..rounds / TURNS {
                bare.add(of_probe(&probe, vcpus));
            }
            probe.stop();
            drop(paused.take());
            for _ in 0..rounds / TURNS {
                ours.add(of_monitor(&vm, vcpus));
            }
            paused = Some(vm.pause(DEADLINE).expect("the vCPUs stop"));
            probe.resume();
        }
        row(vcpus, "stop", &mut ours.stops, Some(&mut bare.stops));
        row(vcpus, "stop, probe", &mut bare.stops, None);
        row(vcpus, "resume", &mut ours.resumes, Some(&mut bare.resumes));
        row(vcpus, "resume, probe", &mut bare.resumes, None);
    }
}

/// Pins this thread to the first core and the vCPUs' threads to the others if `apart` is true;
/// otherwise allows all of these threads on all cores.
fn place(apart: bool, cores: usize) {
    let set = |cores: std::ops::Range<usize>| {
        let mut set = CpuSet::new();
        cores.for_each(|core| set.set(core));
        set
    };
    let (this, vcpus) = match apart {
        true => (set(0..1), set(1..cores)),
        false => (set(0..cores), set(0..cores)),
    };
    sched_setaffinity(None, &this).expect("this thread");
    for task in std::fs::read_dir("/proc/self/task").expect("threads") {
        let task = task.expect("a thread");
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.starts_with("vcpu") {
            let thread = task.file_name().to_string_lossy().parse().ok();
            let thread = thread.and_then(Pid::from_raw).expect("a thread's number");
            sched_setaffinity(Some(thread), &vcpus).expect("a vCPU's thread");
        }
    }
}

/// Times to stop, and times from the resume until every vCPU has completed another round.
#[derive(Default)]
struct Times {
    stops: Vec<Duration>,
    resumes: Vec<Duration>,
}

impl Times {
    fn add(&mut self, (stop, resume): (Duration, Duration)) {
        self.stops.push(stop);
        self.resumes.push(resume);
    }
}

fn row(vcpus: u8, what: &str, times: &mut [Duration], probe: Option<&mut Vec<Duration>>) {
    let [p50, p99, max] = [50, 99, 100].map(|share| at(times, share));
    let ratio = probe.map_or_else(String::new, |probe| format!("{:.2}", p50 / at(probe, 50)));
    println!("| {vcpus} | {what} | {p50:.1} | {p99:.1} | {max:.1} | {ratio} |");
}

/// Returns a percentile in microseconds.
fn at(times: &mut [Duration], share: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6
}

fn of_monitor(vm: &Vm, vcpus: u8) -> (Duration, Duration) {
    let rounds = |vcpu| counters(vm.ram(), vcpu).not_taken;
    std::thread::sleep(BETWEEN);
    let paused = vm.pause(DEADLINE).expect("the vCPUs stop");
    let stop = paused.stop_time();
    (stop, resumed(vcpus, rounds, || drop(paused)))
}

fn of_probe(probe: &Probe, vcpus: u8) -> (Duration, Duration) {
    std::thread::sleep(BETWEEN);
    let stop = probe.stop();
    let rounds = |vcpu| probe.rounds(vcpu);
    (stop, resumed(vcpus, rounds, || probe.resume()))
}

fn resumed(vcpus: u8, rounds: impl Fn(u8) -> u64, resume: impl FnOnce()) -> Duration {
    let stopped: Vec<u64> = (0..vcpus).map(&rounds).collect();
    let began = Instant::now();
    resume();
    for (vcpu, stopped) in (0..).zip(stopped) {
        while rounds(vcpu) == stopped {
            std::thread::yield_now();
        }
    }
    began.elapsed()
}
