// SPDX-License-Identifier: Apache-2.0

//! Measures the time to stop and to resume every vCPU, for guests of 1, 2 and 4 vCPUs that spin in
//! user mode. The baseline in the same run is plain threads that spin without KVM until a flag
//! stops them: the cost of the scheduler alone.
//!
//! `cargo bench -p patchbay-vmm --bench pause [-- ROUNDS]`

#[path = "../tests/bare_metal/mod.rs"]
mod bare_metal;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bare_metal::{branch_guest, counters};
use patchbay_vmm::vm::Vm;

const DEADLINE: Duration = Duration::from_secs(10);
/// Time between two pauses, so that the vCPUs enter the guest again.
const BETWEEN: Duration = Duration::from_micros(500);

fn main() {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|word| word.parse().ok())
        .unwrap_or(2_000);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "host: {cores} cores, load {}",
        load.split(' ').next().unwrap_or("?")
    );
    println!("microseconds             p50      p99      max");
    for vcpus in [1, 2, 4] {
        report(vcpus, "threads stop", baseline(vcpus, rounds));
        let Some(vm) = branch_guest(vcpus) else {
            return;
        };
        let (stops, resumes) = guest(&vm, vcpus, rounds);
        report(vcpus, "vCPUs stop", stops);
        report(vcpus, "vCPUs resume", resumes);
    }
}

fn report(vcpus: u8, what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| {
        let index = (times.len() - 1) * share / 100;
        times[index].as_secs_f64() * 1e6
    };
    println!(
        "{vcpus} {what:<18} {:8.1} {:8.1} {:8.1}",
        at(50),
        at(99),
        at(100)
    );
}

/// Stop times, and times from the resume until every vCPU has completed another round.
fn guest(vm: &Vm, vcpus: u8, rounds: usize) -> (Vec<Duration>, Vec<Duration>) {
    let mut stops = vec![];
    let mut resumes = vec![];
    for _ in 0..rounds {
        std::thread::sleep(BETWEEN);
        let paused = vm.pause(DEADLINE).expect("the vCPUs stop");
        stops.push(paused.stop_time());
        let stopped: Vec<u64> = (0..vcpus)
            .map(|vcpu| counters(vm.ram(), vcpu).not_taken)
            .collect();
        let began = Instant::now();
        drop(paused);
        for (vcpu, stopped) in (0..).zip(stopped) {
            while counters(vm.ram(), vcpu).not_taken == stopped {
                std::thread::yield_now();
            }
        }
        resumes.push(began.elapsed());
    }
    (stops, resumes)
}

/// Stop and resume times of threads that spin until a word is odd: no guest and no signal, only the
/// scheduler.
fn baseline(threads: u8, rounds: usize) -> Vec<Duration> {
    #[derive(Default)]
    struct Shared {
        /// Odd means stop. Each request has its own number.
        wish: AtomicU32,
        parked: AtomicU32,
        end: AtomicBool,
    }
    let shared = Arc::new(Shared::default());
    let workers: Vec<_> = (0..threads)
        .map(|_| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                while !shared.end.load(Ordering::SeqCst) {
                    let wish = shared.wish.load(Ordering::SeqCst);
                    if wish % 2 == 1 {
                        shared.parked.fetch_add(1, Ordering::SeqCst);
                        while shared.wish.load(Ordering::SeqCst) == wish {
                            std::thread::park();
                        }
                    }
                    std::hint::spin_loop();
                }
            })
        })
        .collect();
    let mut times = vec![];
    for _ in 0..rounds {
        std::thread::sleep(BETWEEN);
        shared.parked.store(0, Ordering::SeqCst);
        let began = Instant::now();
        shared.wish.fetch_add(1, Ordering::SeqCst);
        while shared.parked.load(Ordering::SeqCst) < threads.into() {
            std::thread::yield_now();
        }
        times.push(began.elapsed());
        shared.wish.fetch_add(1, Ordering::SeqCst);
        for worker in &workers {
            worker.thread().unpark();
        }
    }
    shared.end.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.thread().unpark();
        worker.join().expect("a worker ends");
    }
    times
}
