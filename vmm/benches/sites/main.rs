// SPDX-License-Identifier: Apache-2.0

//! Measures a transaction by its number of sites and by the size of the guest's table: the time for
//! which the guest is stopped, split into stop, patch and resume, and the time from the request to
//! the executor's answer (without gRPC). [`calls`] measures calls by the kind of request.
//!
//! The guest's vCPUs spin in user mode. The tables are those of a synthetic kernel with up to
//! 100,000 sites. The baseline is a plain loop that writes the same bytes and reads them back.
//!
//! `cargo bench -p patchbay-vmm --bench sites`

#[path = "../../tests/bare_metal/mod.rs"]
mod bare_metal;
mod calls;
mod kernel;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bare_metal::{branch_code, raw, spinning, started};
use kernel::Kernel;
use patchbay_service::keys::{KeyUpdate, Keys, KeysConfig, Limits, Registry, UpdateRequest};
use patchbay_vmm::config::VmConfig;
use patchbay_vmm::guest::VmGuest;
use patchbay_vmm::request::NoRequests;
use patchbay_vmm::vm::Vm;
use static_keys::Op;

const DEADLINE: Duration = Duration::from_secs(30);
/// Time between two changes, so that the vCPUs enter the guest again.
const BETWEEN: Duration = Duration::from_micros(500);
const WARM_UP: usize = 4;

/// A table, and the number of its keys that one transaction flips.
struct Case {
    kernel: Kernel,
    flipped: u64,
    /// Number of times the keys are turned on and off.
    rounds: usize,
}

const fn case(keys: u64, sites: u64, flipped: u64, rounds: usize) -> Case {
    Case {
        kernel: Kernel::new(keys, sites),
        flipped,
        rounds,
    }
}

const CASES: [Case; 13] = [
    // One key.
    case(1000, 1, 1, 500),
    case(1, 56, 1, 500),
    case(1, 1000, 1, 200),
    case(1, 10_000, 1, 50),
    case(1, 100_000, 1, 20),
    // Many keys with one site each.
    case(100, 1, 100, 500),
    case(1000, 1, 1000, 200),
    case(10_000, 1, 10_000, 50),
    case(100_000, 1, 100_000, 10),
    // One hundred sites in tables of growing size.
    case(1000, 1, 100, 500),
    case(10_000, 1, 100, 500),
    case(100_000, 1, 100, 500),
    case(1000, 100, 1, 500),
];

#[derive(Default)]
struct Times {
    stop: Vec<f64>,
    patch: Vec<f64>,
    resume: Vec<f64>,
    whole: Vec<f64>,
}

fn main() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "host: {cores} cores, load {}; microseconds, p50 / p99 / max",
        load.split(' ').next().unwrap_or("?")
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    if !runtime.block_on(calls::measure()) {
        return;
    }
    // With `-- calls`, only the first table is printed.
    if std::env::args().any(|argument| argument == "calls") {
        return;
    }
    for vcpus in [1, 2, 4] {
        println!();
        println!(
            "| {vcpus} vCPU: flipped | of a table of | stop | patch | resume | request to answer | patch, ns per site | plain loop, ns per site |"
        );
        println!("|---|---|---|---|---|---|---|---|");
        for case in &CASES {
            // The number of vCPUs affects only the stop time.
            if vcpus > 1 && case.flipped * case.kernel.sites > 1000 {
                continue;
            }
            let Some(times) = runtime.block_on(measure(case, vcpus)) else {
                return;
            };
            row(case, times);
        }
    }
}

/// A guest whose vCPUs spin, with the tables of a kernel.
struct BenchGuest {
    vm: Arc<Vm>,
    keys: Keys,
}

impl BenchGuest {
    /// Starts the guest. Returns `None` without KVM.
    fn start(kernel: Kernel, vcpus: u8) -> Option<Self> {
        let registry = Arc::new(Registry::new(Limits::default()));
        let entries = (0..vcpus).map(|vcpu| Some(spinning(vcpu))).collect();
        let config = VmConfig {
            memory_bytes: kernel::MEMORY_BYTES,
            ..raw(branch_code(), entries)
        };
        let vm = Arc::new(started(config, Arc::new(NoRequests))?);
        let guest = Arc::new(VmGuest::new("sites".to_owned(), Arc::clone(&vm)));
        let (keys, _owner) =
            Keys::start(guest, Arc::clone(&registry), KeysConfig::default()).expect("a thread");
        kernel.register(vm.ram(), &*registry);
        Some(Self { vm, keys })
    }
}

impl Drop for BenchGuest {
    fn drop(&mut self) {
        self.vm.shutdown();
    }
}

async fn measure(case: &Case, vcpus: u8) -> Option<Times> {
    let BenchGuest { vm, keys } = &BenchGuest::start(case.kernel, vcpus)?;
    let mut times = Times::default();
    for round in 0..WARM_UP + case.rounds {
        if round == WARM_UP {
            times = Times::default();
        }
        for op in [Op::Enable, Op::Disable] {
            std::thread::sleep(BETWEEN);
            let request = request(case, op);
            let began = Instant::now();
            let outcome = keys.update(request).await.expect("the change is made");
            times.whole.push(began.elapsed().as_secs_f64());
            let report = outcome.report.expect("a report");
            assert_eq!(
                u64::from(report.sites_patched),
                case.flipped * case.kernel.sites
            );
            let pause = report.pause.unwrap_or_default();
            for (of, time) in [
                (&mut times.stop, pause.stop),
                (&mut times.patch, pause.patch),
                (&mut times.resume, pause.resume),
            ] {
                of.push(time.as_secs_f64());
            }
            if round == 0 {
                let jumps = kernel::jumps(vm.ram(), case.kernel) as u64;
                let expected = if op == Op::Enable {
                    case.flipped * case.kernel.sites
                } else {
                    0
                };
                assert_eq!(jumps, expected, "sites that jump");
            }
        }
    }
    Some(times)
}

fn request(case: &Case, op: Op) -> UpdateRequest {
    // The flipped keys are spread over the whole table.
    let step = case.kernel.keys / case.flipped;
    let updates = (0..case.flipped).map(|key| KeyUpdate::new(Kernel::name(key * step), op));
    let deadline = Instant::now() + DEADLINE;
    UpdateRequest::new(updates.collect(), "bench".to_owned(), DEADLINE, deadline)
}

fn row(case: &Case, mut times: Times) {
    let sites = case.flipped * case.kernel.sites;
    let all = [
        &mut times.stop,
        &mut times.patch,
        &mut times.resume,
        &mut times.whole,
    ];
    let [stop, patch, resume, whole] = all.map(|of| {
        let mut at = |percent| percentile(of, percent);
        format!("{:.1} / {:.1} / {:.1}", at(50), at(99), at(100))
    });
    let per_site = times.patch[(times.patch.len() - 1) / 2] * 1e9 / sites as f64;
    let keys = if case.flipped == 1 { "key" } else { "keys" };
    println!(
        "| {} {keys}, {sites} sites | {} | {stop} | {patch} | {resume} | {whole} | {per_site:.1} | {:.1} |",
        case.flipped,
        case.kernel.keys * case.kernel.sites,
        floor(sites) * 1e9 / sites as f64,
    );
}

/// Returns a percentile of the times, in microseconds.
fn percentile(times: &mut [f64], percent: usize) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[((times.len() - 1) * percent).div_ceil(100)] * 1e6
}

/// Returns the time in seconds that a plain loop takes to read, write and read back the same number
/// of sites at the same distances.
fn floor(sites: u64) -> f64 {
    let length = usize::try_from(sites * kernel::STRIDE).expect("small");
    let mut text = vec![0_u8; length];
    let mut best = f64::MAX;
    for round in 0..5_u8 {
        let began = Instant::now();
        for site in text.chunks_exact_mut(usize::try_from(kernel::STRIDE).expect("small")) {
            black_box(&site[..5]);
            site[..5].fill(black_box(round));
            black_box(&site[..5]);
        }
        best = best.min(began.elapsed().as_secs_f64());
    }
    best
}
