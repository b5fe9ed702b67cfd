// SPDX-License-Identifier: Apache-2.0
//! A fleet for demonstrations: 500 guests in memory on 50 hosts, a controller with its page, and a
//! rollout in waves. Run it as `demo [--keep]`. With `--keep` it prints a link to the page, which
//! stays until Ctrl-C.

mod hosts;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use patchbay_access::policy::LivePolicy;
use patchbay_fleet::authority::Authority;
use patchbay_fleet::controller::{Config, Controller};
use patchbay_fleet::gates::commands::Commands;
use patchbay_fleet::inventory::Reach;
use patchbay_fleet::leader::Leader;
use patchbay_fleet::page::{self, Page};
use patchbay_fleet::rollout::Phase;
use patchbay_fleet::runner::{Command, Running};
use patchbay_fleet::storage::{Archive, RecordKeys};
use patchbay_fleet::store::EmbeddedStore;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use patchbay_service::api::ServedGuest;
use patchbay_service::keys::{Keys, KeysConfig, Registry};
use patchbay_service::trace::Tracing;

const GUESTS: usize = 500;
const HOSTS: usize = 50;
/// The address that is tried first, so that the link is the same each time.
const ADDRESS: &str = "127.0.0.1:8480";

/// The spec of the rollout that runs.
const RECEIVE_PATH: &str = "\
title: New receive path
selector: {guests: [\"web-*\"]}
claims: [{want: on, keys: [net_rx_fast, net_gro_batch]}]
spread_over: rack
max_concurrent: {count: 40, per_domain: {label: rack, count: 10}}
gates: [{pause_p99: 50ms, on_failure: pause}, {max_errors: 2, on_failure: abort}]
waves:
  - {name: canary, size: 1, bake: 2s}
  - {name: tenth, size: 10%, bake: 3s}
  - {name: half, size: 40%, bake: 3s}
  - {name: rest, size: rest}
";

/// The spec of a second rollout, which waits for approval.
const SCHEDULER: &str = "\
title: Scheduler statistics on the databases
selector: {guests: [\"db-*\"]}
claims: [{want: on, keys: [sched_stats]}]
waves: [{name: canary, size: 2, bake: 10m}, {size: rest}]
approvals: 2
";

fn boot(index: usize) -> anyhow::Result<ServedGuest> {
    let kind = if index.is_multiple_of(5) { "db" } else { "web" };
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::named(Arc::clone(&registry), &format!("{kind}-{index:03}"));
    guest.run(&[
        TestKey::new("net_rx_fast", 4),
        TestKey::new("net_gro_batch", 2),
        TestKey::new("sched_stats", 8),
    ]);
    let (keys, _owner) = Keys::start(guest, registry, KeysConfig::default())?;
    Ok(ServedGuest::start(keys, Tracing::default())?)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let keep = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [] => false,
        [option] if option == "--keep" => true,
        other => anyhow::bail!("{other:?} is not known; the one option is --keep"),
    };
    let folder = std::env::temp_dir().join(format!("patchbay-fleet-demo-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = tokio::select! {
        result = run(&folder, keep) => result,
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
    };
    std::fs::remove_dir_all(&folder)?;
    result
}

async fn run(folder: &Path, keep: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    let hosts = hosts::start(folder, GUESTS, HOSTS, boot)?;
    println!(
        "{GUESTS} guests on {HOSTS} hosts run in memory after {:.1?}.",
        start.elapsed()
    );
    let config = Config {
        replica: Leader {
            name: "demo".to_owned(),
            address: None,
        },
        authority: Authority::new(own_user(), None),
        hosts,
        reach: Reach::default(),
        lease_ttl: Duration::from_secs(10),
        archive: Archive {
            folder: folder.join("archive"),
            keep: Duration::from_secs(24 * 3600),
        },
        commands: Commands::default(),
        keys: RecordKeys::default(),
    };
    let store = EmbeddedStore::open(&folder.join("fleet.redb"))?;
    let controller = Arc::new(Controller::new(config, Arc::new(store))?);
    let page = bind(&controller).await?;
    let link = page.link()?;
    let shown = match keep {
        true => format!("The page is at {link}"),
        false => "The page ends with this demo; to look at it, add --keep.".to_owned(),
    };
    let runs = Arc::clone(&controller);
    tokio::spawn(async move { tokio::join!(page.run(), runs.run()) });
    println!("{shown}");

    let by = format!("uid:{}", rustix::process::geteuid().as_raw());
    let leads = controller.lead().await;
    leads.plan("scheduler", SCHEDULER, &by).await?;
    let running = leads.plan("receive-path", RECEIVE_PATH, &by).await?;
    let digest = running.rollout().header().digest.clone();
    let answer = running.command(Command::Start { digest }, &by).await;
    answer.context("the controller ended")??;
    report(&running, start).await?;
    if keep {
        println!(
            "Try Undo on the page, or approve the rollout \"scheduler\". Ctrl-C ends the demo."
        );
        std::future::pending::<()>().await;
    }
    Ok(())
}

fn own_user() -> LivePolicy {
    LivePolicy::own_user_only(rustix::process::geteuid().as_raw())
}

/// Binds the page to the usual address, or to any free port if that address is in use.
async fn bind(controller: &Arc<Controller>) -> anyhow::Result<Page> {
    let config = |address: &str| -> anyhow::Result<page::Config> {
        Ok(page::Config {
            address: address.parse()?,
            tls: None,
            policy: own_user(),
        })
    };
    match Page::bind(config(ADDRESS)?, Arc::clone(controller)).await {
        Ok(page) => Ok(page),
        Err(_) => Page::bind(config("127.0.0.1:0")?, Arc::clone(controller)).await,
    }
}

/// Prints each new entry of the timeline until the rollout has ended.
async fn report(running: &Running, start: Instant) -> anyhow::Result<()> {
    let (mut version, mut shown) = (running.version(), 0);
    loop {
        version.mark_unchanged();
        let phase = {
            let rollout = running.rollout();
            for entry in &rollout.header().timeline[shown..] {
                println!("{:6.1} s  {}", start.elapsed().as_secs_f64(), entry.text);
            }
            shown = rollout.header().timeline.len();
            rollout.header().phase
        };
        match phase {
            Phase::Completed => return Ok(()),
            Phase::Paused | Phase::Ended(_) => {
                anyhow::bail!("the rollout is {}", phase.name());
            }
            _ => version.changed().await?,
        }
    }
}
