// SPDX-License-Identifier: Apache-2.0
//! Measures the load on a controller. Guests in memory are served by simulated hosts, all in this
//! process.
//!
//! The program plans a rollout in 10 waves, runs it, and aborts it. For comparison with the abort
//! it ends the same claims in a bare loop of unary calls. Run it as `load [GUESTS [HOSTS]]`; the
//! defaults are 10,000 and 100.

mod hosts;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use async_trait::async_trait;
use futures_util::StreamExt;
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::hosts::Hosts;
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{EmbeddedStore, Layer, Revision, Store, StoreError, Transaction};
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_proto::v1;
use patchbay_service::api::ServedGuest;
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;

/// A store that counts the controller's writes.
struct Counting {
    store: EmbeddedStore,
    transactions: AtomicU64,
}

#[async_trait]
impl Layer for Counting {
    fn behind(&self) -> &dyn Store {
        &self.store
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        self.transactions.fetch_add(1, Ordering::Relaxed);
        self.store.commit(transaction).await
    }
}

/// The time at which each guest's last pause ended, in microseconds after the start of the program.
struct Flips {
    base: Instant,
    ended: Vec<AtomicU64>,
}

impl Flips {
    /// Returns the 50th and the 99th percentile and the maximum of the times at which the pauses
    /// ended, relative to `start`.
    fn since(&self, start: Instant) -> (Duration, Duration, Duration) {
        let start = u64::try_from((start - self.base).as_micros()).unwrap_or(u64::MAX);
        let ended = self.ended.iter().map(|ended| ended.load(Ordering::Relaxed));
        let mut times: Vec<u64> = ended.map(|ended| ended.saturating_sub(start)).collect();
        times.sort_unstable();
        let rank = |percent: usize| {
            let index = (times.len() * percent).div_ceil(100).saturating_sub(1);
            Duration::from_micros(times[index])
        };
        (rank(50), rank(99), rank(100))
    }
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.unwrap_or(0)
}

/// Returns the CPU time of all threads, including those of the guests.
fn cpu() -> Duration {
    const TICK_MS: u64 = 10;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks: u64 = fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * TICK_MS)
}

fn boot(name: &str, index: usize, flips: &Arc<Flips>) -> anyhow::Result<ServedGuest> {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), name);
    guest.run(&[TestKey::new("alpha", 1)]);
    let flips = Arc::clone(flips);
    guest.on_resume(move || {
        let ended = u64::try_from(flips.base.elapsed().as_micros()).unwrap_or(u64::MAX);
        flips.ended[index].store(ended, Ordering::Relaxed);
    });
    let (keys, _owner) = Keys::start(guest, registry, KeysConfig::default())?;
    Ok(ServedGuest::start(keys, Tracing::default())?)
}

async fn wait_for(running: &Running, wanted: fn(Phase) -> bool) -> anyhow::Result<()> {
    let mut version = running.version();
    loop {
        version.mark_unchanged();
        if wanted(running.rollout().header().phase) {
            return Ok(());
        }
        version.changed().await?;
    }
}

/// Sets the same claims on every guest without a controller.
async fn bare_loop(hosts: &Hosts, generation: u64, claims: &[v1::KeyClaim]) -> anyhow::Result<()> {
    let mut calls = Vec::new();
    for host in hosts.all() {
        for guest in host.list_guests().await? {
            let request = v1::SetClaimsRequest {
                guest: guest.guest,
                owner: "load".to_owned(),
                generation,
                claims: claims.to_vec(),
                ..v1::SetClaimsRequest::default()
            };
            calls.push((Arc::clone(&host), request));
        }
    }
    let calls = futures_util::stream::iter(calls);
    let mut answers = calls
        .map(|(host, request)| tokio::spawn(async move { host.set_claims(request, "").await }))
        .buffer_unordered(usize::MAX);
    while let Some(answer) = answers.next().await {
        answer??;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let guests = arguments.next().transpose()?.unwrap_or(10_000);
    let hosts = arguments.next().transpose()?.unwrap_or(100);
    let folder = std::env::temp_dir().join(format!("patchbay-load-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = run(&folder, guests, hosts).await;
    std::fs::remove_dir_all(&folder)?;
    result
}

async fn run(folder: &std::path::Path, guests: usize, hosts: usize) -> anyhow::Result<()> {
    let flips = Arc::new(Flips {
        base: Instant::now(),
        ended: (0..guests).map(|_| AtomicU64::new(0)).collect(),
    });
    let configs = hosts::start(folder, guests, hosts, |index| {
        boot(&format!("guest-{index}"), index, &flips)
    })?;
    println!(
        "{guests} guests on {hosts} hosts, {:.1?} to start",
        flips.base.elapsed()
    );

    let bare = Hosts::new(&configs)?;
    let claim = v1::KeyClaim {
        key: "alpha".to_owned(),
        want: v1::ClaimWant::Held.into(),
        ..v1::KeyClaim::default()
    };
    bare_loop(&bare, 1, &[claim]).await?;
    let (start, before) = (Instant::now(), cpu());
    bare_loop(&bare, 2, &[]).await?;
    let (p50, p99, bare_last) = flips.since(start);
    let bare_cpu = cpu() - before;
    println!("bare loop: p50 {p50:.1?}, p99 {p99:.1?}, last {bare_last:.1?}, CPU {bare_cpu:.1?}");

    let store = Arc::new(Counting {
        store: EmbeddedStore::open(&folder.join("fleet.redb"))?,
        transactions: AtomicU64::new(0),
    });
    let config = Config {
        replica: patchbay_fleet::leader::Leader {
            name: "load".to_owned(),
            address: None,
        },
        authority: patchbay_fleet::authority::Authority::new(LivePolicy::own_user_only(0), None),
        hosts: configs,
        reach: patchbay_fleet::inventory::Reach::default(),
        lease_ttl: Duration::from_secs(60),
        archive: Archive {
            folder: folder.join("archive"),
            keep: Duration::from_secs(24 * 3600),
        },
        commands: Commands::default(),
        keys: RecordKeys::default(),
    };
    let controller = Arc::new(Controller::new(config, Arc::<Counting>::clone(&store))?);
    let runs = Arc::clone(&controller);
    tokio::spawn(async move { runs.run().await });
    let leads = controller.lead().await;
    let waves = ["{size: 10%}"; 9].join(", ");
    let spec = format!(
        "selector: {{guests: [\"*\"]}}\nclaims: [{{want: held, keys: [alpha]}}]\nwaves: [{waves}, {{size: rest}}]\n"
    );
    let (start, memory, before) = (Instant::now(), resident_kib(), cpu());
    let running = leads.plan("load", &spec, "uid:0").await?;
    let planned = (resident_kib().saturating_sub(memory) * 1024) / guests as u64;
    println!(
        "plan: {:.1?}, CPU {:.1?}, {planned} bytes per guest",
        start.elapsed(),
        cpu() - before
    );

    let digest = running.rollout().header().digest.clone();
    let (start, before) = (Instant::now(), cpu());
    let answer = running.command(Command::Start { digest }, "uid:0").await;
    answer.context("the runner ended")??;
    wait_for(&running, |phase| phase == Phase::Completed).await?;
    println!(
        "10 waves: {:.1?}, CPU {:.1?}",
        start.elapsed(),
        cpu() - before
    );

    let (start, before) = (Instant::now(), cpu());
    let answer = running.command(Command::Abort, "uid:0").await;
    answer.context("the runner ended")??;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await?;
    let saved = start.elapsed();
    let (p50, p99, last) = flips.since(start);
    let abort_cpu = cpu() - before;
    println!(
        "abort: p50 {p50:.1?}, p99 {p99:.1?}, last {last:.1?}, saved {saved:.1?}, CPU {abort_cpu:.1?}"
    );
    println!(
        "abort to bare loop: {:.2} times",
        last.as_secs_f64() / bare_last.as_secs_f64()
    );
    let snapshot = store.range("").await?;
    let (keys, writes) = (
        snapshot.entries.len(),
        store.transactions.load(Ordering::Relaxed),
    );
    println!("store: {keys} keys, {writes} transactions");
    Ok(())
}
