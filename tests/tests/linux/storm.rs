// SPDX-License-Identifier: Apache-2.0
//! Tests a guest and a host that change the same keys at the same time.
//!
//! `PATCHBAY_STORM_ROUNDS` sets the rounds of each guest thread (default 60).
//! `PATCHBAY_STORM_VCPUS` sets the number of the guest's vCPUs (default 1). If several vCPUs share
//! one core, each of the guest's own flips waits for whole time slices.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    KeyOp, KeyUpdate, ListStaticKeysRequest, StaticKey, UpdateStaticKeysRequest,
};
use patchbay_tests::{Guest, TestGuest};
use tonic::Code;

const TEST: &str = "/sys/kernel/debug/patchbay_test";
const THREADS: u32 = 2;
const OWN_KEYS: usize = 16;
const BENCH_KEYS: usize = 1000;

/// The number of references that the host holds, by the keys' names without their module.
type References = BTreeMap<String, i32>;

fn keys() -> References {
    let own = (0..OWN_KEYS).map(|key| format!("storm_key_{key}"));
    let bench = (0..BENCH_KEYS).map(|key| format!("bench_key_{key:03}"));
    // A module with branches on this key is loaded and unloaded.
    let shared = ["patchbay_test_shared_key".to_owned()];
    own.chain(bench).chain(shared).map(|key| (key, 0)).collect()
}

/// Draws random updates that take or drop references on few or many keys. They never drop more
/// references than the host holds.
fn draw(held: &References, random: &mut fastrand::Rng) -> (Vec<KeyUpdate>, References) {
    let names: Vec<&String> = held.keys().collect();
    let count = match random.usize(..10) {
        0..=1 => 500,
        2..=4 => 50,
        _ => 1 + random.usize(..5),
    };
    let mut after = References::new();
    let mut updates = vec![];
    for _ in 0..count {
        // A third of the changes are on the few keys that all threads of the guest use. These keys
        // are the last ones in the order of names.
        let last = random.usize(..3) == 0;
        let index = if last {
            names.len() - 1 - random.usize(..OWN_KEYS + 1)
        } else {
            random.usize(..names.len())
        };
        let name = names[index];
        let references = after.get(name).copied().unwrap_or(held[name]);
        let take = references == 0 || references < 3 && random.usize(..2) == 0;
        let op = if take { KeyOp::Inc } else { KeyOp::Dec };
        after.insert(name.clone(), references + if take { 1 } else { -1 });
        updates.push(KeyUpdate {
            name: format!("patchbay_test:{name}"),
            op: op.into(),
            ..Default::default()
        });
    }
    (updates, after)
}

/// The guest's report of its storm.
struct Report {
    numbers: BTreeMap<String, i64>,
    /// The count and the guest's own references of each key.
    keys: BTreeMap<String, (i32, i32)>,
}

impl Report {
    async fn read(guest: &mut Guest) -> Result<Self> {
        let text = guest.shell(&format!("cat {TEST}/storm")).await?;
        let mut report = Self {
            numbers: BTreeMap::new(),
            keys: BTreeMap::new(),
        };
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [name, number] => {
                    report.numbers.insert(name.to_owned(), number.parse()?);
                }
                [name, count, held] => {
                    let counts = (count.parse()?, held.parse()?);
                    report.keys.insert(name.to_owned(), counts);
                }
                _ => anyhow::bail!("the guest says {line:?}"),
            }
        }
        Ok(report)
    }

    fn number(&self, name: &str) -> Result<i64> {
        self.numbers.get(name).copied().context(name.to_owned())
    }

    /// Checks that every count is the sum of the guest's and the host's references.
    fn assert_sums(&self, held: &References) -> Result<()> {
        ensure!(self.number("torn")? == 0, "a branch disagreed with its key");
        for (name, host) in held {
            if name == "patchbay_test_shared_key" {
                continue;
            }
            let (count, guest) = self.keys.get(name).copied().unwrap_or_default();
            ensure!(
                count == host + guest,
                "{name}: count {count}, the host holds {host} references, the guest {guest}"
            );
        }
        Ok(())
    }
}

/// Returns the number in an environment variable.
fn number(variable: &str, unless_set: u32) -> Result<u32> {
    match std::env::var(variable) {
        Ok(value) => value.parse().context(variable.to_owned()),
        Err(_) => Ok(unless_set),
    }
}

async fn list(guest: &mut Guest) -> Result<Vec<StaticKey>> {
    let request = ListStaticKeysRequest {
        patterns: vec!["patchbay_test:*".to_owned()],
        page_size: 10_000,
        ..Default::default()
    };
    let response = guest.static_keys().list_static_keys(request).await?;
    Ok(response.into_inner().keys)
}

/// Checks that every site of every key agrees with its key's count.
async fn assert_sites(guest: &mut Guest) -> Result<()> {
    for key in list(guest).await? {
        let name = key.name;
        let key = guest.key(&name).await?;
        for site in key
            .sites
            .iter()
            .filter(|site| site.obstacle_message.is_empty())
        {
            let jumps = site.disassembly.starts_with("jmp");
            ensure!(
                jumps == ((key.count > 0) != site.likely) && site.disassembly != "unknown",
                "site {:#x} of {name} with count {} says {}",
                site.address,
                key.count,
                site.disassembly
            );
        }
    }
    Ok(())
}

/// Activity in the guest besides its threads, until the file `/calm` exists.
const BESIDE: [&str; 2] = [
    "insmod /lib/modules/patchbay_test_user.ko; rmmod patchbay_test_user; sleep 0.3",
    "echo 1 > /sys/kernel/tracing/events/sched/enable; sleep 0.1; \
     echo 0 > /sys/kernel/tracing/events/sched/enable; sleep 0.3",
];

/// Checks the counts and sites while both sides change them. Threads of the guest take and drop
/// references and attach kprobes next to branches, modules are loaded and unloaded, and events are
/// switched on and off, while the host takes and drops references on a thousand keys. At the end
/// each count is the sum of both sides' references, each site agrees with its count, no thread has
/// found a branch that disagreed with a reference that it held, and the kernel has not complained.
#[tokio::test]
async fn guest_and_host_flip_the_same_thousand_keys() -> Result<()> {
    let rounds = number("PATCHBAY_STORM_ROUNDS", 60)?;
    let vcpus = number("PATCHBAY_STORM_VCPUS", 1)?;
    let Some(mut guest) = Guest::with_test_keys(vcpus).await? else {
        return Ok(());
    };
    for work in BESIDE {
        guest
            .shell(&format!("(while [ ! -e /calm ]; do {work}; done) &"))
            .await?;
    }
    guest
        .shell(&format!("echo '{THREADS} {rounds}' > {TEST}/storm"))
        .await?;

    let mut held = keys();
    // The seed is the same in every run.
    let mut random = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
    let (mut made, mut ops, mut paused, mut busy, mut attempts) = (0, 0, 0, 0, 0);
    let mut report = Report::read(&mut guest).await?;
    while report.number("running")? > 0 || ops < 1000 {
        for _ in 0..10 {
            let (updates, after) = draw(&held, &mut random);
            let count = updates.len();
            let request = UpdateStaticKeysRequest {
                updates,
                retry_timeout: Some(Duration::from_secs(10).try_into()?),
                ..Default::default()
            };
            match guest.static_keys().update_static_keys(request).await {
                Ok(answer) => {
                    let flip = answer.into_inner().report.unwrap_or_default();
                    held.extend(after);
                    made += 1;
                    ops += count;
                    paused += u32::from(flip.paused);
                    attempts += flip.attempts;
                }
                // The guest was busy until the limit, so nothing was changed. The sums verify that.
                Err(refusal) => {
                    ensure!(refusal.code() == Code::Unavailable, "{refusal:?}");
                    busy += 1;
                }
            }
        }
        report = Report::read(&mut guest).await?;
    }
    println!(
        "{made} transactions with {ops} ops, {paused} pauses, {attempts} attempts, {busy} given up; \
         the guest: {} rounds, {} kprobes, {} refused",
        report.number("rounds")?,
        report.number("probes")?,
        report.number("refused")?
    );
    let probed = report.number("probes")? > 0 && report.number("refused")? > 0;
    ensure!(ops >= 1000 && probed, "the storm was none");

    // The storm is over, but the references of the guest's threads are not dropped yet.
    report.assert_sums(&held)?;
    guest.shell("touch /calm; wait; rm /calm").await?;
    guest.shell(&format!("echo '0 0' > {TEST}/storm")).await?;
    let report = Report::read(&mut guest).await?;
    ensure!(report.keys.values().all(|(_, guest)| *guest == 0));
    report.assert_sums(&held)?;
    for key in list(&mut guest).await? {
        let name = key.name.strip_prefix("patchbay_test:");
        if let Some(references) = name.and_then(|name| held.get(name)) {
            ensure!(key.count == *references, "{key:?}: {references} are held");
        }
    }
    assert_sites(&mut guest).await?;
    // The guest also checks its own branches.
    let on = held
        .iter()
        .filter(|(name, references)| name.starts_with("bench") && **references > 0);
    let on = on.count().to_string();
    for file in ["on", "taken"] {
        let seen = guest.shell(&format!("cat {TEST}/bench/{file}")).await?;
        ensure!(
            seen == on,
            "{file}: the guest sees {seen}, the host holds {on}"
        );
    }
    guest.assert_no_warnings().await
}
