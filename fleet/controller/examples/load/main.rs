// SPDX-License-Identifier: Apache-2.0
//! Measures the load on a controller. Another process serves hosts whose guests are in its memory.
//!
//! The program plans a rollout in 10 waves and runs it, lets another controller take it over, and
//! aborts it. For comparison with the abort it ends the same claims in a bare loop of unary calls.
//!
//! With `--light` the hosts answer as the service does, but have no guests. One process has room
//! for about 20,000 real ones, because each has a thread.

#[path = "../hosts/mod.rs"]
mod hosts;
mod served;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use async_trait::async_trait;
use clap::Parser;
use futures_util::StreamExt;
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller, Leadership};
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::hosts::{HostConfig, Hosts};
use patchbay_fleet::leader::Leader;
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::{
    EmbeddedStore, EtcdStore, Layer, Revision, Store, StoreError, Transaction,
};
use patchbay_proto::v1;

/// The time without a renewal after which another controller leads.
const LEASE_TTL: Duration = Duration::from_secs(20);

#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 10_000)]
    guests: usize,
    #[arg(long, default_value_t = 100)]
    hosts: usize,
    /// The number of keys of each guest, all of which are claimed.
    #[arg(long, default_value_t = 1)]
    keys: usize,
    /// Hosts that answer without guests.
    #[arg(long)]
    light: bool,
    /// The address of an etcd. Without it, the store is a file.
    #[arg(long)]
    etcd: Option<String>,
    /// Serves the hosts on sockets in this folder.
    #[arg(long, hide = true)]
    serve: Option<PathBuf>,
}

/// A store that counts the controller's writes.
struct Counting {
    store: Box<dyn Store>,
    transactions: AtomicU64,
}

#[async_trait]
impl Layer for Counting {
    fn behind(&self) -> &dyn Store {
        &*self.store
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        self.transactions.fetch_add(1, Ordering::Relaxed);
        self.store.commit(transaction).await
    }
}

/// The process that serves the hosts. It ends when the handle is dropped.
struct Served {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Served {
    fn start(folder: &Path) -> anyhow::Result<Self> {
        let mut process = std::process::Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .arg("--serve")
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = process.stdin.take().context("piped")?;
        let from = BufReader::new(process.stdout.take().context("piped")?);
        let mut served = Self { process, to, from };
        served.line()?;
        Ok(served)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        anyhow::ensure!(
            line.ends_with('\n'),
            "the process that serves the hosts has ended"
        );
        Ok(line)
    }

    /// Returns the 50th and the 99th percentile and the maximum of the times at which each guest
    /// was changed last, relative to `start`.
    fn since(&mut self, start: u64) -> anyhow::Result<(Duration, Duration, Duration)> {
        self.to.write_all(b"times\n")?;
        let line = self.line()?;
        let times = line.split_whitespace().map(str::parse::<u64>);
        let mut times: Vec<u64> = times.collect::<Result<_, _>>()?;
        times.sort_unstable();
        let rank = |percent: usize| {
            let index = (times.len() * percent).div_ceil(100).saturating_sub(1);
            Duration::from_micros(times[index].saturating_sub(start))
        };
        Ok((rank(50), rank(99), rank(100)))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    number.unwrap_or(0) / 1024
}

/// Returns the CPU time of all threads of this process.
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

/// The time and the resources that a part of the measurement takes.
struct Part(Instant, Duration);

impl Part {
    fn begin() -> Self {
        Self(Instant::now(), cpu())
    }

    fn end(self, name: &str) {
        let (took, cpu, resident) = (self.0.elapsed(), cpu() - self.1, resident_mib());
        println!("{name}: {took:.2?}, CPU {cpu:.2?}, {resident} MiB resident");
    }
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
            calls.push((Arc::clone(&host), guest.guest));
        }
    }
    let set = |(host, guest): (Arc<patchbay_fleet::hosts::Host>, String)| {
        let request = v1::SetClaimsRequest {
            guest,
            owner: "load".to_owned(),
            generation,
            claims: claims.to_vec(),
            ..v1::SetClaimsRequest::default()
        };
        tokio::spawn(async move { host.set_claims(|| request, "").await })
    };
    let mut answers = futures_util::stream::iter(calls)
        .map(set)
        .buffer_unordered(1024);
    while let Some(answer) = answers.next().await {
        answer??;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    if let Some(folder) = &args.serve {
        return served::serve(folder, args.guests, args.hosts, args.keys, args.light).await;
    }
    let folder = std::env::temp_dir().join(format!("patchbay-load-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = run(&folder, &args).await;
    std::fs::remove_dir_all(&folder)?;
    result
}

/// Starts a controller. The task ends it.
async fn lead(
    folder: &Path,
    configs: &[HostConfig],
    store: &Arc<Counting>,
) -> anyhow::Result<(Arc<Leadership>, tokio::task::JoinHandle<()>)> {
    let config = Config {
        replica: Leader {
            name: "load".to_owned(),
            address: None,
        },
        authority: Authority::new(LivePolicy::own_user_only(0), None),
        hosts: configs.to_vec(),
        reach: patchbay_fleet::inventory::Reach::default(),
        lease_ttl: LEASE_TTL,
        archive: Archive {
            folder: folder.join("archive"),
            keep: Duration::from_secs(24 * 3600),
        },
        commands: Commands::default(),
        keys: RecordKeys::default(),
    };
    let controller = Arc::new(Controller::new(config, Arc::<Counting>::clone(store))?);
    let runs = Arc::clone(&controller);
    let task = tokio::spawn(async move { runs.run().await });
    Ok((controller.lead().await, task))
}

async fn run(folder: &Path, args: &Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut served = Served::start(folder)?;
    let configs = hosts::configs(folder, args.hosts)?;
    let Args {
        guests,
        hosts,
        keys,
        ..
    } = args;
    println!(
        "{guests} guests with {keys} keys on {hosts} hosts, {:.1?} to start",
        began.elapsed()
    );

    let bare = Hosts::new(&configs)?;
    let claim = |key| v1::KeyClaim {
        key: served::key(key),
        want: v1::ClaimWant::Held.into(),
        ..v1::KeyClaim::default()
    };
    let claims: Vec<v1::KeyClaim> = (0..*keys).map(claim).collect();
    bare_loop(&bare, 1, &claims).await?;
    let (part, start) = (Part::begin(), served::micros());
    bare_loop(&bare, 2, &[]).await?;
    part.end("bare loop");
    let (p50, p99, bare_last) = served.since(start)?;
    println!("bare loop: p50 {p50:.2?}, p99 {p99:.2?}, last {bare_last:.2?}");
    drop((bare, claims));

    let store: Box<dyn Store> = match &args.etcd {
        Some(address) => {
            let root = format!("/patchbay/load-{}/", std::process::id());
            Box::new(EtcdStore::new(std::slice::from_ref(address), &root, None)?)
        }
        None => Box::new(EmbeddedStore::open(&folder.join("fleet.redb"))?),
    };
    let store = Arc::new(Counting {
        store,
        transactions: AtomicU64::new(0),
    });
    let (leads, task) = lead(folder, &configs, &store).await?;
    let waves = ["{size: 10%}"; 9].join(", ");
    let spec = format!(
        "selector: {{guests: [\"*\"]}}\nclaims: [{{want: held, keys: [\"key-*\"]}}]\nwaves: [{waves}, {{size: rest}}]\n"
    );
    let part = Part::begin();
    let running = leads.plan("load", &spec, "uid:0").await?;
    part.end("plan");

    let digest = running.rollout().header().digest.clone();
    let part = Part::begin();
    let answer = running.command(Command::Start { digest }, "uid:0").await;
    answer.context("the runner ended")??;
    wait_for(&running, |phase| phase == Phase::Completed).await?;
    part.end("10 waves");
    drop((running, leads));

    task.abort();
    let _ = task.await;
    tokio::time::sleep(LEASE_TTL + Duration::from_secs(2)).await;
    let part = Part::begin();
    let (leads, task) = lead(folder, &configs, &store).await?;
    part.end("another controller leads");
    let running = leads.rollout("load").context("it is stored")?;

    let (part, start) = (Part::begin(), served::micros());
    let answer = running.command(Command::Abort, "uid:0").await;
    answer.context("the runner ended")??;
    wait_for(&running, |phase| matches!(phase, Phase::Ended(_))).await?;
    part.end("abort, until it is stored as ended");
    let (p50, p99, last) = served.since(start)?;
    println!("abort: p50 {p50:.2?}, p99 {p99:.2?}, last {last:.2?}");
    let ratio = last.as_secs_f64() / bare_last.as_secs_f64();
    println!("abort to bare loop: {ratio:.2} times");
    let entries = store.range("rollouts/load/").await?.entries;
    let bytes: usize = entries
        .iter()
        .map(|entry| entry.key.len() + entry.value.len())
        .sum();
    let (count, writes) = (entries.len(), store.transactions.load(Ordering::Relaxed));
    println!("store: {count} keys, {bytes} bytes, {writes} transactions");
    running
        .delete("uid:0")
        .await
        .context("the runner ended")??;
    task.abort();
    Ok(())
}
