// SPDX-License-Identifier: Apache-2.0
//! Simulates a fleet with faults: the real rollout machine, its storage, its requests and the real
//! service code of guests, on one clock, network and store that a seed decides.
//!
//! `cargo xtask simulate` makes more runs, and the run of one seed with its events.

mod simulation {
    mod copies;
    mod driver;
    mod faults;
    mod guest;
    mod hook;
    mod liar;
    mod network;
    mod oracle;
    mod owners;
    mod people;
    mod progress;
    mod reasons;
    mod records;
    mod registry;
    mod rights;
    pub mod run;
    mod store;
    mod terms;
    mod waves;
    pub mod world;
}

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use simulation::run::run;
use simulation::world::folder;

/// The number of seeds in the tests. `cargo xtask test` builds this test in the release profile.
const SEEDS: u64 = if cfg!(debug_assertions) { 600 } else { 10_000 };
/// The number of broken seeds after which no further ones are run.
const ENOUGH: usize = 10;

/// Returns the number in an environment variable.
fn given(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is {value}, which is no number")),
    )
}

/// Returns the seeds to run.
fn seeds() -> Range<u64> {
    let first = given("PATCHBAY_SIMULATE_SEED");
    let count = given("PATCHBAY_SIMULATE_SEEDS");
    let count = count.unwrap_or(if first.is_some() { 1 } else { SEEDS });
    let first = first.unwrap_or(0);
    first..first.saturating_add(count)
}

/// The result of many runs.
#[derive(Default)]
struct Total {
    seeds: u64,
    faults: BTreeMap<&'static str, u64>,
    /// The promises that seeds have broken.
    broken: BTreeMap<u64, String>,
}

fn run_all(seeds: &Range<u64>, total: &Mutex<Total>) {
    let next = AtomicU64::new(seeds.start);
    let (next, began) = (&next, Instant::now());
    let work = |cpus: &CpuSet| {
        // The threads of a run take turns, so a second CPU would only add the time of wake-ups.
        // They inherit this.
        let _ = sched_setaffinity(None, cpus);
        let folder = folder();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || total.lock().expect("no panic").broken.len() >= ENOUGH {
                return;
            }
            let ran = run(seed, folder.path(), false);
            let mut total = total.lock().expect("no panic");
            total.seeds += 1;
            for (fault, count) in ran.faults {
                *total.faults.entry(fault).or_default() += count;
            }
            if let Some(why) = ran.broken {
                eprintln!(
                    "seed {seed}, after {:.1} s: {why}",
                    began.elapsed().as_secs_f64()
                );
                total.broken.insert(seed, why);
            }
        }
    };
    let allowed = sched_getaffinity(None).expect("this thread exists");
    let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    std::thread::scope(|scope| {
        for cpu in cpus.take(16) {
            scope.spawn(move || {
                let mut one = CpuSet::new();
                one.set(cpu);
                work(&one);
            });
        }
    });
    let rate = total.lock().expect("no panic").seeds as f64 / began.elapsed().as_secs_f64();
    eprintln!(
        "{:.0} s, {rate:.0} seeds a second",
        began.elapsed().as_secs_f64()
    );
}

#[test]
fn every_seed_ends_as_its_last_intent_says() {
    let (seeds, total) = (seeds(), Mutex::default());
    // The panics of a run are reported with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    run_all(&seeds, &total);
    let _ = std::panic::take_hook();
    let total: Total = total.into_inner().expect("no panic");
    eprintln!(
        "{} seeds from {}, with these faults:",
        total.seeds, seeds.start
    );
    for (fault, count) in &total.faults {
        eprintln!("{count:>9} {fault}");
    }
    let first = total.broken.first_key_value();
    let shown = first.map(|(seed, _)| *seed);
    if let Some(seed) = shown.or(Some(seeds.start).filter(|_| total.seeds == 1)) {
        eprintln!("seed {seed}, time in milliseconds:");
        let events = run(seed, folder().path(), true).events;
        events.iter().for_each(|event| eprintln!("{event}"));
    }
    if let Some((seed, why)) = first {
        let others: Vec<&u64> = total.broken.keys().skip(1).collect();
        panic!("seed {seed}: {why}; other broken seeds: {others:?}");
    }
}

/// The same seed makes the same run.
#[test]
fn a_seed_repeats_its_run() {
    let folder = folder();
    for seed in 0..40 {
        let [one, other] = [(); 2].map(|()| {
            let events = run(seed, folder.path(), true).events;
            let events = events.iter().map(|event| without_ledgers(event));
            events.collect::<Vec<_>>()
        });
        assert!(!one.is_empty());
        let differs = one.iter().zip(&other).find(|(one, other)| one != other);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(one.len(), other.len(), "seed {seed}");
    }
}

/// Replaces the names of ledgers, 8 hexadecimal digits, which no seed determines.
fn without_ledgers(event: &str) -> String {
    let is_digit = |byte: u8| byte.is_ascii_hexdigit();
    let shown = event.split_inclusive([' ', ',', ';']).map(|word| {
        let name = word.trim_end_matches([' ', ',', ';']);
        match name.len() == 8 && name.bytes().all(is_digit) {
            true => "ledger ",
            false => word,
        }
    });
    shown.collect()
}
