// SPDX-License-Identifier: Apache-2.0
//! Compares the cost of a flip with alternatives, in one run:
//!
//! - the host: the whole gRPC call over the unix socket, and its effect on the guest: stop, patch,
//!   resume;
//! - the guest itself: `static_key_enable()` and `static_key_disable()` on the same keys, called
//!   from a module;
//! - QEMU: QMP `stop` and `cont` with the same kernel and initramfs, as seen by the client;
//! - a stock kernel in our monitor, and in QEMU with each way in which the attacher pauses the
//!   guest.
//!
//! Run it as `cargo xtask bench flip [-- VCPUS… monitors]`; by default it measures 1, 2 and 4 vCPUs
//! and all monitors. The lab has one CPU, so only ratios with 1 vCPU are meaningful there.
//!
//! `cargo xtask bench flip --instructions` counts instructions instead, with 1 vCPU.

mod figures;
mod instructions;
mod monitors;
mod qemu;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use figures::Samples;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    CommitUpdateRequest, FlipReport, KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest,
    PauseGuestRequest, PrepareUpdateRequest, ResultView, ResumeGuestRequest, StaticKey,
    UpdateStaticKeysRequest,
};
use patchbay_tests::{Environment, Guest, TestGuest};
use tonic::transport::Channel;

/// The time between two changes, in which the guest continues its work.
const BETWEEN: Duration = Duration::from_millis(2);
/// The number of uncounted changes that warm caches and the emulator's translations.
const WARM_UP: usize = 6;
/// The number of turns of a case. Host and guest alternate, so that a drift of the machine's speed
/// affects both.
const TURNS: usize = 4;

/// Keys that are flipped together, and the file with which the guest flips the same keys.
struct Case {
    what: &'static str,
    selector: Selector,
    keys: &'static str,
    count: usize,
    file: &'static str,
    /// The number of times that the keys are turned on and off.
    rounds: usize,
}

/// The way in which the request selects the keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Selector {
    /// Selects by name and requests a result for each key.
    Names,
    /// Selects by a pattern and requests a summary.
    Pattern,
    /// Selects like `Pattern`, but prepares the change: only the commit is measured.
    Prepared,
}

const CASES: [Case; 7] = [
    Case {
        what: "1 key, 1 site",
        selector: Selector::Names,
        keys: "patchbay_test:bench_key_*",
        count: 1,
        file: "one",
        rounds: 100,
    },
    Case {
        what: "1 key, 56 sites",
        selector: Selector::Names,
        keys: "patchbay_test:many_key",
        count: 1,
        file: "many",
        rounds: 100,
    },
    Case {
        what: "1 key, 56 sites, prepared",
        selector: Selector::Prepared,
        keys: "patchbay_test:many_key",
        count: 1,
        file: "many",
        rounds: 100,
    },
    Case {
        what: "100 keys",
        selector: Selector::Names,
        keys: "patchbay_test:bench_key_*",
        count: 100,
        file: "hundred",
        rounds: 40,
    },
    Case {
        what: "1,000 keys",
        selector: Selector::Names,
        keys: "patchbay_test:bench_key_*",
        count: 1000,
        file: "thousand",
        rounds: 20,
    },
    Case {
        what: "1,000 keys by pattern, summary",
        selector: Selector::Pattern,
        keys: "patchbay_test:bench_key_*",
        count: 1000,
        file: "thousand",
        rounds: 20,
    },
    Case {
        what: "1,000 keys by pattern, prepared",
        selector: Selector::Prepared,
        keys: "patchbay_test:bench_key_*",
        count: 1000,
        file: "thousand",
        rounds: 20,
    },
];

/// Durations of the host's changes.
#[derive(Default)]
struct HostTimes {
    call: Samples,
    stop: Samples,
    patch: Samples,
    resume: Samples,
    /// The times for which the guest was stopped.
    window: Samples,
    /// The number of attempts that found the guest busy.
    again: u32,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let words: Vec<String> = std::env::args().collect();
    if words.iter().any(|word| word == "--instructions") {
        return instructions::measure().await;
    }
    let mut counts: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let mut monitors = words.iter().any(|word| word == "monitors");
    if counts.is_empty() && !monitors {
        (counts, monitors) = (vec![1, 2, 4], true);
    }
    println!("Host: {}", figures::host());
    println!("Microseconds, p50 / p99 / max; ratios of the p50. The guest is idle unless noted.");
    for vcpus in counts {
        println!();
        measure(&environment, vcpus).await?;
    }
    if monitors {
        monitors::compare().await?;
    }
    Ok(())
}

async fn measure(environment: &Environment, vcpus: u32) -> Result<()> {
    let qemu = qemu::measure(environment, vcpus, 100).await?;
    let mut guest = Guest::with_test_keys(vcpus).await?.context("no guest")?;
    let keys = all_keys(&mut guest).await?;

    println!(
        "| {vcpus} vCPU | n | host: whole call | stop | patch | resume | guest stopped | guest itself | times faster | QEMU / stopped |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for case in &CASES {
        let request = request(&keys, case)?;
        let mut host = HostTimes::default();
        let mut itself = Samples::default();
        let prepared = case.selector == Selector::Prepared;
        let mut warm_up = HostTimes::default();
        flip(&mut guest, &request, prepared, WARM_UP, &mut warm_up).await?;
        for _ in 0..TURNS {
            let rounds = case.rounds / TURNS;
            flip(&mut guest, &request, prepared, rounds, &mut host).await?;
            flip_by_itself(&mut guest, case, rounds, &mut itself).await?;
        }
        row(case.what, &host, Some(&itself), qemu.as_ref());
    }
    println!(
        "| (a call that does nothing) | 100 | {} | | | | | | | |",
        nothing(&mut guest, 100).await?
    );
    let spin = "for i in $(seq $(nproc)); do (while :; do :; done) & done";
    guest.shell(spin).await?;
    let request = request(&keys, &CASES[0])?;
    let mut host = HostTimes::default();
    flip(&mut guest, &request, false, CASES[0].rounds, &mut host).await?;
    row("1 key, 1 site, guest busy", &host, None, qemu.as_ref());
    guest.shell("kill $(jobs -p)").await?;

    held(&mut guest, &keys).await?;
    guest.assert_no_warnings().await?;
    if let Some(times) = &qemu {
        println!(
            "\nQEMU, {} rounds: stop {}, cont {}, both {}.",
            times.both.len(),
            times.stop,
            times.cont,
            times.both
        );
    } else {
        println!("\nqemu-system-x86_64 is not installed.");
    }
    Ok(())
}

fn row(what: &str, host: &HostTimes, itself: Option<&Samples>, qemu: Option<&qemu::Times>) {
    let faster = itself.map_or(String::new(), |itself| {
        format!("{:.1}", itself.times(&host.call))
    });
    let itself = itself.map_or(String::new(), ToString::to_string);
    let qemu = qemu.map_or(String::new(), |qemu| {
        format!("{:.1}", qemu.both.times(&host.window))
    });
    println!(
        "| {what} | {} | {} | {} | {} | {} | {} | {itself} | {faster} | {qemu} |",
        host.call.len(),
        host.call,
        host.stop,
        host.patch,
        host.resume,
        host.window,
    );
    if host.again > 0 {
        println!(
            "(the guest was busy {} times, and the host tried again)",
            host.again
        );
    }
}

/// Lists all keys, ordered by name.
async fn all_keys(guest: &mut Guest) -> Result<Vec<StaticKey>> {
    let request = ListStaticKeysRequest {
        page_size: 10_000,
        ..Default::default()
    };
    let listed = guest.static_keys().list_static_keys(request).await?;
    Ok(listed.into_inner().keys)
}

/// Returns the names of a case's keys, in the order of the guest's module.
fn named(keys: &[StaticKey], case: &Case) -> Result<Vec<String>> {
    let prefix = case.keys.trim_end_matches('*');
    let mut names: Vec<String> = keys
        .iter()
        .map(|key| key.name.clone())
        .filter(|name| name.starts_with(prefix))
        .collect();
    names.sort_unstable();
    names.truncate(case.count);
    ensure!(names.len() == case.count, "too few keys {}", case.keys);
    Ok(names)
}

/// Returns the request that flips a case's keys; the op is filled in later.
fn request(keys: &[StaticKey], case: &Case) -> Result<UpdateStaticKeysRequest> {
    let names = named(keys, case)?;
    let matched = keys.iter().map(|key| key.name.clone());
    let prefix = case.keys.trim_end_matches('*');
    let matched = matched.filter(|name| name.starts_with(prefix)).count();
    ensure!(
        case.selector == Selector::Names || matched == case.count,
        "{} matches {matched} keys, not {}",
        case.keys,
        case.count
    );
    Ok(match case.selector {
        Selector::Names => UpdateStaticKeysRequest {
            updates: names
                .into_iter()
                .map(|name| KeyUpdate {
                    name,
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        },
        Selector::Pattern | Selector::Prepared => UpdateStaticKeysRequest {
            updates: vec![KeyUpdate {
                patterns: vec![case.keys.to_owned()],
                ..Default::default()
            }],
            result_view: ResultView::Summary.into(),
            ..Default::default()
        },
    })
}

/// Flips keys on and off from outside.
async fn flip(
    guest: &mut Guest,
    request: &UpdateStaticKeysRequest,
    prepared: bool,
    rounds: usize,
    host: &mut HostTimes,
) -> Result<()> {
    for _ in 0..rounds {
        for op in [KeyOp::Enable, KeyOp::Disable] {
            let mut request = request.clone();
            for update in &mut request.updates {
                update.op = op.into();
            }
            if prepared {
                commit(guest, request, host).await?;
            } else {
                change(guest.static_keys(), request, host).await?;
            }
            tokio::time::sleep(BETWEEN).await;
        }
    }
    Ok(())
}

async fn change(
    mut client: StaticKeysServiceClient<Channel>,
    request: UpdateStaticKeysRequest,
    host: &mut HostTimes,
) -> Result<FlipReport> {
    let began = Instant::now();
    let answer = client.update_static_keys(request).await?.into_inner();
    host.call.add(began.elapsed());
    let report = answer.report.context("a change without a report")?;
    host.add(&report);
    Ok(report)
}

/// Prepares a change, and measures its commit.
async fn commit(
    guest: &mut Guest,
    request: UpdateStaticKeysRequest,
    host: &mut HostTimes,
) -> Result<()> {
    let mut client = guest.static_keys();
    let plan = PrepareUpdateRequest {
        updates: request.updates,
        result_view: ResultView::Summary.into(),
        ..Default::default()
    };
    let plan = client.prepare_update(plan).await?.into_inner();
    let plan = CommitUpdateRequest {
        plan_id: plan.plan_id,
        digest: plan.digest,
        result_view: ResultView::Summary.into(),
        ..Default::default()
    };
    let began = Instant::now();
    let answer = client.commit_update(plan).await?.into_inner();
    host.call.add(began.elapsed());
    host.add(&answer.report.context("a change without a report")?);
    Ok(())
}

impl HostTimes {
    /// Adds the measured cost of a change for the guest.
    fn add(&mut self, report: &FlipReport) {
        let time = |duration: Option<prost_types::Duration>| {
            Duration::try_from(duration.unwrap_or_default()).unwrap_or_default()
        };
        let [stop, patch, resume] =
            [report.stop_time, report.patch_time, report.resume_time].map(time);
        self.stop.add(stop);
        self.patch.add(patch);
        self.resume.add(resume);
        self.window.add(stop + patch + resume);
        self.again += report.attempts.saturating_sub(1);
    }
}

/// Makes the guest flip the same keys on and off.
async fn flip_by_itself(
    guest: &mut Guest,
    case: &Case,
    rounds: usize,
    itself: &mut Samples,
) -> Result<()> {
    let file = format!("/sys/kernel/debug/patchbay_test/bench/{}", case.file);
    let command = format!("for i in $(seq {rounds}); do cat {file}; done");
    let answer = guest.shell(&command).await?;
    let before = itself.len();
    for line in answer.lines() {
        let (_, nanoseconds) = line.split_once(' ').context("not a time")?;
        itself.add(Duration::from_nanos(nanoseconds.trim().parse()?));
    }
    ensure!(itself.len() == before + 2 * rounds, "times are missing");
    Ok(())
}

/// Measures a call that changes nothing, as the cost of a call alone.
async fn nothing(guest: &mut Guest, rounds: usize) -> Result<Samples> {
    let mut samples = Samples::default();
    for _ in 0..rounds {
        let began = Instant::now();
        guest.describe().await?;
        samples.add(began.elapsed());
        tokio::time::sleep(BETWEEN).await;
    }
    Ok(samples)
}

/// Flips every key that can be flipped, in one transaction, and back. The guest is paused
/// meanwhile, because with some keys flipped it would crash.
async fn held(guest: &mut Guest, keys: &[StaticKey]) -> Result<()> {
    let flippable = |key: &&StaticKey| {
        !key.sealed
            && key.key_class() != KeyClass::Tracepoint
            && (0..=1).contains(&key.count)
            && key.quarantine.is_none()
    };
    let keys: Vec<&StaticKey> = keys.iter().filter(flippable).collect();
    let request = |back: bool| UpdateStaticKeysRequest {
        updates: keys
            .iter()
            .map(|key| KeyUpdate {
                name: key.name.clone(),
                op: if key.enabled == back {
                    KeyOp::Enable.into()
                } else {
                    KeyOp::Disable.into()
                },
                ..Default::default()
            })
            .collect(),
        allow_guarded: true,
        force: true,
        ..Default::default()
    };
    let mut service = guest.guest_service();
    service.pause_guest(PauseGuestRequest::default()).await?;
    let mut host = HostTimes::default();
    let mut sites = 0;
    for round in 0..WARM_UP + 20 {
        if round == WARM_UP {
            host = HostTimes::default();
        }
        for back in [false, true] {
            let client = guest.static_keys();
            sites = change(client, request(back), &mut host)
                .await?
                .sites_patched;
        }
    }
    service.resume_guest(ResumeGuestRequest::default()).await?;
    let what = format!("all {} keys, {sites} sites, guest held", keys.len());
    println!(
        "| {what} | {} | {} | | {} | | | | | |",
        host.call.len(),
        host.call,
        host.patch
    );
    Ok(())
}
