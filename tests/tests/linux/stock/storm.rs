// SPDX-License-Identifier: Apache-2.0
//! Runs the storm: an unpatched kernel switches its own keys, loads and unloads modules and
//! reboots, while the host changes its keys.
//!
//! The first update of each transaction enables the same key, the mark, which nothing else changes.
//! The count of the mark before the transaction is zero if and only if no earlier transaction has
//! changed this kernel. So each answer shows whether the kernel is a new one, and therefore which
//! state its other keys must have had.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::{
    GetStaticKeyRequest, Hold, KeyOp, KeyUpdate, ListHoldsRequest, ReleaseHoldsRequest, StaticKey,
    UpdateStaticKeysRequest, UpdateStaticKeysResponse,
};
use patchbay_tests::{Guest, StockKernel, TestGuest, reason};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::{assert_sites, list};

/// Activity in the guest, until the file `/tmp/calm` exists.
const BESIDE: [&str; 3] = [
    "echo 1 >/sys/kernel/tracing/events/sched/enable; usleep 100000; \
     echo 0 >/sys/kernel/tracing/events/sched/enable; usleep 100000",
    "echo 'file kobject* +p' >/sys/kernel/debug/dynamic_debug/control; usleep 50000; \
     echo 'file kobject* -p' >/sys/kernel/debug/dynamic_debug/control; usleep 50000",
    "insmod /lib/modules/*-binfmt_misc.ko; sleep 5; rmmod binfmt_misc; sleep 5",
];
/// A text in the names of the keys that the guest switches too.
const SHARED: &str = "/kobject";
/// The number of keys that are read at the same time.
const READERS: usize = 16;
/// One of this many keys that no transaction changes is checked, unless [`FLIPS`] is given. An
/// answer takes several milliseconds in an emulated computer, and the kernel has thousands of keys.
const SPARSE: usize = 8;
/// The variable that gives the number of transactions.
const FLIPS: &str = "PATCHBAY_STOCK_FLIPS";
/// The time between two attempts while the guest reboots.
const INTERVAL: Duration = Duration::from_millis(100);
/// The time for a booted kernel to be discovered.
const DISCOVERY_LIMIT: Duration = Duration::from_secs(120);

/// Checks the host's transactions while the guest switches its own keys, including some that the
/// host switches, loads and unloads modules, and starts its kernel again by kexec. Each transaction
/// is made as a whole in one kernel or not at all, no change is carried over to the next kernel,
/// the sites of each key that is checked agree with it, and no kernel complains.
#[tokio::test]
async fn guest_and_host_flip_the_keys_of_an_unpatched_kernel_that_reboots() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let flips = number(FLIPS, 40)?;
    let reboots = number("PATCHBAY_STOCK_REBOOTS", 1)?;
    let folder = tempfile::tempdir()?;
    let initramfs = folder.path().join("initramfs");
    kernel.initramfs_with(&[("kernel", 0o644, &kernel.kernel)], &initramfs)?;
    let mut guest = Guest::stock(&kernel)
        .initramfs(&initramfs)
        .argument("--allow-guarded")
        // The initramfs stays readable in sysfs, from which it is loaded for the next kernel.
        .command_line("retain_initrd")
        .boot()
        .await?;
    let lines = list(&mut guest, &["lib/*", "drivers/base/*", "kernel/*.c/*"]).await?;
    let names = lines
        .into_iter()
        .filter(|key| key.count == 0 && key.name.contains('/'))
        .map(|key| key.name);
    let mut host = Host::new(guest.static_keys(), names.collect())?;
    let began = Instant::now();
    for boot in 0..=reboots {
        for work in BESIDE {
            let line = format!("(while [ ! -e /tmp/calm ]; do {work}; done) &");
            guest.shell(&line).await?;
        }
        let until = flips * (boot + 1) / (reboots + 1);
        while host.tally.made < until {
            host.step(Kernel::Runs).await?;
        }
        guest.assert_no_warnings().await?;
        if boot < reboots {
            let before = host.held_mark().await?;
            let began = Instant::now();
            reboot(&mut guest, &mut host).await?;
            println!("rebooted in {:?}", began.elapsed());
            host.assert_kernel(&mut guest, boot + 2).await?;
            host.assert_void(before).await?;
        }
    }
    guest.shell("touch /tmp/calm; wait").await?;
    host.assert_kernel(&mut guest, reboots + 1).await?;
    println!(
        "{:?}, refused during reboots {:?}, in {:?}",
        host.tally,
        host.refusals,
        began.elapsed()
    );
    Ok(())
}

fn number(variable: &str, default: u32) -> Result<u32> {
    match std::env::var(variable) {
        Ok(value) => value.parse().with_context(|| variable.to_owned()),
        Err(_) => Ok(default),
    }
}

/// Makes the guest start its kernel again while the host continues to change keys.
async fn reboot(guest: &mut Guest, host: &mut Host) -> Result<()> {
    let made = host.tally.made;
    let booted = Cell::new(false);
    let boot = async {
        guest
            .console()
            .type_line("kexec_tool /kernel /sys/firmware/initrd")
            .await?;
        guest.wait_for_shell().await?;
        booted.set(true);
        Ok(())
    };
    let flip = async {
        while !booted.get() {
            host.step(Kernel::MayEnd).await?;
        }
        Ok::<_, anyhow::Error>(())
    };
    tokio::try_join!(boot, flip)?;
    host.tally.made_during_reboots += host.tally.made - made;
    Ok(())
}

async fn get(client: &mut StaticKeysServiceClient<Channel>, name: &str) -> Result<StaticKey> {
    let request = GetStaticKeyRequest {
        name: name.to_owned(),
        ..Default::default()
    };
    let answer = client.get_static_key(request).await?.into_inner();
    answer.key.context("the answer has no key")
}

/// The state of the guest's kernel during a transaction: it runs all the time, or it may end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Runs,
    MayEnd,
}

/// The outcomes of the transactions.
#[derive(Debug, Default)]
struct Tally {
    kernels: u32,
    made: u32,
    made_during_reboots: u32,
    ops: usize,
    sites: u32,
    attempts: u32,
    given_up: u32,
    checked_keys: usize,
    checked_sites: usize,
}

/// A client that changes keys, and its changes to the running kernel.
struct Host {
    client: StaticKeysServiceClient<Channel>,
    /// The key that each transaction enables.
    mark: String,
    names: Vec<String>,
    /// The keys that this kernel's transactions have left on, except shared ones.
    on: BTreeSet<String>,
    random: fastrand::Rng,
    tally: Tally,
    /// The number of transactions that were refused while the guest rebooted, by reason.
    refusals: BTreeMap<String, u32>,
}

impl Host {
    fn new(client: StaticKeysServiceClient<Channel>, mut names: Vec<String>) -> Result<Self> {
        ensure!(names.len() > 50, "{names:?}");
        let own = names.iter().position(|name| !name.contains(SHARED));
        let mark = names.swap_remove(own.context("the guest switches all")?);
        Ok(Self {
            client,
            mark,
            names,
            on: BTreeSet::new(),
            // The seed is the same in every run.
            random: fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15),
            tally: Tally::default(),
            refusals: BTreeMap::new(),
        })
    }

    /// Makes one transaction, and checks one of its keys.
    async fn step(&mut self, kernel: Kernel) -> Result<()> {
        let on = self.random.bool();
        let count = 1 + self.random.usize(..40);
        let names = &self.names;
        let chosen: BTreeSet<String> = (0..count)
            .filter_map(|_| self.random.choice(names).cloned())
            .collect();
        match self.update(&chosen, on).await {
            Ok(answer) => {
                self.record(&answer, on)?;
                if kernel == Kernel::Runs {
                    self.look(&chosen, on).await?;
                }
            }
            // The guest changed its own keys until the limit of the change or of the discovery, or
            // its kernel was being replaced.
            Err(refusal) => {
                let tolerable = [Code::Unavailable, Code::FailedPrecondition];
                ensure!(tolerable.contains(&refusal.code()), "{refusal:?}");
                if kernel == Kernel::Runs {
                    println!("given up: {}: {}", reason(&refusal), refusal.message());
                    self.tally.given_up += 1;
                    let limit = 20 + self.tally.made / 10;
                    ensure!(self.tally.given_up < limit, "nothing succeeds: {refusal:?}");
                } else {
                    *self.refusals.entry(reason(&refusal)).or_default() += 1;
                    // There is no event for a kernel that has booted.
                    tokio::time::sleep(INTERVAL).await;
                }
            }
        }
        Ok(())
    }

    async fn update(
        &mut self,
        chosen: &BTreeSet<String>,
        on: bool,
    ) -> Result<UpdateStaticKeysResponse, Status> {
        let update = |name: &String, op: KeyOp| KeyUpdate {
            name: name.clone(),
            op: op.into(),
            ..Default::default()
        };
        let op = if on { KeyOp::Enable } else { KeyOp::Disable };
        let mut updates = vec![update(&self.mark, KeyOp::Enable)];
        updates.extend(chosen.iter().map(|name| update(name, op)));
        let request = UpdateStaticKeysRequest {
            updates,
            allow_guarded: true,
            // `force` is set, because the guest itself holds references on some of the keys.
            force: true,
            retry_timeout: Some(prost_types::Duration {
                seconds: 10,
                nanos: 0,
            }),
            ..Default::default()
        };
        let answer = self.client.update_static_keys(request).await;
        answer.map(tonic::Response::into_inner)
    }

    /// Fails unless the keys had the state that the earlier transactions have set in this kernel.
    fn record(&mut self, answer: &UpdateStaticKeysResponse, on: bool) -> Result<()> {
        let mark = answer.results.first().context("a result for each key")?;
        ensure!(mark.name == self.mark && mark.count_after == 1, "{mark:?}");
        if mark.count_before == 0 {
            self.tally.kernels += 1;
            self.on.clear();
        }
        for result in &answer.results[1..] {
            ensure!((result.count_after != 0) == on, "{result:?}");
            if result.name.contains(SHARED) {
                continue;
            }
            let was = self.on.contains(&result.name);
            ensure!(
                result.count_before == i32::from(was),
                "kernel {}, on: {was}: {result:?}",
                self.tally.kernels
            );
            if on {
                self.on.insert(result.name.clone());
            } else {
                self.on.remove(&result.name);
            }
        }
        let report = answer.report.unwrap_or_default();
        self.tally.made += 1;
        self.tally.ops += answer.results.len();
        self.tally.attempts += report.attempts;
        self.tally.sites += report.sites_patched;
        Ok(())
    }

    /// Checks one key that was just changed.
    async fn look(&mut self, chosen: &BTreeSet<String>, on: bool) -> Result<()> {
        let own: Vec<_> = chosen
            .iter()
            .filter(|name| !name.contains(SHARED))
            .collect();
        let Some(name) = self.random.choice(own) else {
            return Ok(());
        };
        assert_sites(&get(&mut self.client, name).await?, Some(on))
    }

    /// Returns the keys that transactions change and some of the others, in each kernel different
    /// ones, with their sites. It requests several at the same time, because one answer takes long
    /// in an emulated computer.
    async fn keys_to_check(&self, guest: &mut Guest) -> Result<Vec<StaticKey>> {
        let changed: BTreeSet<&String> = self.names.iter().chain([&self.mark]).collect();
        let listed = list(guest, &[]).await?.into_iter();
        let (mut names, others): (Vec<String>, Vec<String>) = listed
            .map(|key| key.name)
            .partition(|name| changed.contains(name));
        let step = std::env::var(FLIPS).map_or(SPARSE, |_| 1);
        let first = self.tally.kernels as usize % step;
        names.extend(others.into_iter().skip(first).step_by(step));
        let mut reads = JoinSet::new();
        for part in names.chunks(names.len().div_ceil(READERS).max(1)) {
            let (mut client, part) = (self.client.clone(), part.to_vec());
            reads.spawn(async move {
                let mut keys = Vec::new();
                for name in &part {
                    keys.push(get(&mut client, name).await?);
                }
                Ok::<_, anyhow::Error>(keys)
            });
        }
        let mut keys = Vec::new();
        while let Some(read) = reads.join_next().await {
            keys.extend(read??);
        }
        ensure!(keys.len() == names.len());
        Ok(keys)
    }

    async fn holds(&mut self) -> Result<Vec<Hold>> {
        let request = ListHoldsRequest {
            page_size: 10_000,
            ..Default::default()
        };
        Ok(self.client.list_holds(request).await?.into_inner().holds)
    }

    /// Returns the hold on the mark.
    async fn held_mark(&mut self) -> Result<Hold> {
        let holds = self.holds().await?;
        let mut holds = holds.into_iter().filter(|hold| hold.key == self.mark);
        holds.next().context("the mark is held")
    }

    /// Fails unless the hold ended with its kernel.
    async fn assert_void(&mut self, hold: Hold) -> Result<()> {
        let request = ReleaseHoldsRequest {
            ids: vec![hold.id],
            ..Default::default()
        };
        let released = self.client.release_holds(request).await;
        let refusal = released.err().context("it was released")?;
        ensure!(reason(&refusal) == "HOLD_NOT_FOUND", "{refusal:?}");
        Ok(())
    }

    /// Fails unless the kernel is the one with this number, the sites of each key that is checked
    /// agree with it, and each key that transactions change has the state that they have set.
    /// Nothing else may change the keys during this check.
    async fn assert_kernel(&mut self, guest: &mut Guest, number: u32) -> Result<()> {
        let end = Instant::now() + DISCOVERY_LIMIT;
        let made = self.tally.made;
        while self.tally.made == made {
            ensure!(Instant::now() < end, "the kernel is not discovered");
            self.step(Kernel::MayEnd).await?;
        }
        ensure!(self.tally.kernels == number, "{:?}", self.tally);
        let began = Instant::now();
        let keys = self.keys_to_check(guest).await?;
        let (mut sites, mut wrong) = (0, 0);
        for key in &keys {
            sites += key.sites.len();
            let own = !key.name.contains(SHARED) && self.names.contains(&key.name);
            let on = own.then(|| self.on.contains(&key.name));
            if let Err(error) = assert_sites(key, on) {
                println!("{error:#}");
                wrong += 1;
            }
        }
        let held: BTreeMap<_, _> = self
            .holds()
            .await?
            .into_iter()
            .filter(|hold| !hold.key.contains(SHARED) && hold.key != self.mark)
            .map(|hold| (hold.key, hold.references))
            .collect();
        let expected: BTreeMap<_, _> = self.on.iter().map(|name| (name.clone(), 1)).collect();
        ensure!(held == expected, "held {held:?}, not {expected:?}");
        println!(
            "kernel {number}: {} keys with {sites} sites checked in {:?}, {wrong} keys wrong",
            keys.len(),
            began.elapsed()
        );
        ensure!(wrong == 0);
        self.tally.checked_keys += keys.len();
        self.tally.checked_sites += sites;
        guest.assert_no_warnings().await
    }
}
