// SPDX-License-Identifier: Apache-2.0
//! Runs a storm: the host changes keys of a guest again and again, while the guest changes keys of
//! its own, some of which are the host's too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_kernel_image::Report;
use patchbay_service::keys::{KeyDetails, KeyUpdate, Keys, ListQuery, UpdateRequest};
use static_keys::{Branch, Op};

use super::{DEADLINE, until};

/// The number of transactions. If it is given, all keys and sites are compared with the kernel's
/// file and checked after the storm, and otherwise one of [`SPARSE`] keys.
const FLIPS: &str = "PATCHBAY_TEST_MONITOR_FLIPS";
/// Describing a key with its sites takes about 10 ms in an emulated computer.
const SPARSE: usize = 16;
/// The guest's number of vCPUs and its memory in MiB, separated by a comma.
const GUEST: &str = "PATCHBAY_TEST_MONITOR_GUEST";
/// The prefix of the names of the keys that the guest changes.
const SHARED: &str = "drivers/base/";
/// The prefixes of the names of the keys that the host changes.
const CHANGED: [&str; 3] = [SHARED, "fs/", "kernel/"];
/// Changes the keys of [`SHARED`] again and again. Otherwise the same as the first program of other
/// guests.
pub const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t sysfs s /sys
/bin/busybox mount -t proc p /proc
/bin/busybox mount -t devtmpfs d /dev
/bin/busybox echo READY
while :; do
    for flags in +p -p; do
        /bin/busybox echo \"file drivers/base/* $flags\" > /proc/dynamic_debug/control
        /bin/busybox usleep 50000
    done
done &
while :; do
    /bin/busybox usleep 100000
    /bin/busybox echo change > /sys/class/mem/null/uevent
    /bin/busybox echo alive
done
";

/// The size of a guest.
pub struct Size {
    pub vcpus: u32,
    pub mib: u64,
}

impl Size {
    /// Returns the size in the environment, or 2 vCPUs and 512 MiB.
    pub fn given() -> Self {
        let Ok(text) = std::env::var(GUEST) else {
            return Self { vcpus: 2, mib: 512 };
        };
        let (vcpus, mib) = text.split_once(',').expect("VCPUS,MIB");
        Self {
            vcpus: vcpus.parse().expect("a number of vCPUs"),
            mib: mib.parse().expect("a number of MiB"),
        }
    }
}

/// Returns the number of transactions, and of how many keys one is checked.
fn extent() -> (u32, usize) {
    match std::env::var(FLIPS) {
        Ok(flips) => (flips.parse().expect("a number"), 1),
        Err(_) => (10, SPARSE),
    }
}

fn details(keys: &Keys, name: &str) -> KeyDetails {
    let details = keys.get(name, 10_000, "").expect("it is there");
    assert_eq!(details.sites.len(), details.key.site_count, "{name}");
    details
}

/// Checks that each site of a key that the guest does not change agrees with its count.
fn agrees(details: &KeyDetails) {
    let is_on = details.key.count > 0;
    for site in details.sites.iter().map(|site| &site.state) {
        let expected = match is_on == site.likely {
            true => Branch::Nop,
            false => Branch::Jump,
        };
        let agrees = site.branch == Some(expected) || site.patchable.is_err();
        assert!(agrees, "{}: {site:?}", details.key.name);
    }
}

/// Compares keys and their sites with those in the kernel's file, apart from code that is freed
/// after boot.
pub fn same_as_in_the_file(keys: &Keys, report: &Report) {
    let query = ListQuery {
        page_size: 10_000,
        ..ListQuery::default()
    };
    let listed = keys.list(&query).expect("they are found").keys;
    let addresses = |name: &str| {
        let sites = details(keys, name).sites.into_iter();
        sites
            .map(|site| site.state.address)
            .collect::<BTreeSet<u64>>()
    };
    let (mut compared, mut sites, mut moved) = (0, 0, None);
    for key in report.keys.iter().step_by(extent().1) {
        let expected = key.sites.iter().filter(|site| !site.init);
        let expected: BTreeSet<u64> = expected.map(|site| site.address).collect();
        let Some(first) = expected.first() else {
            continue;
        };
        assert!(
            listed.iter().any(|one| *one.name == *key.name),
            "{} is not found",
            key.name
        );
        let init = key.sites.iter().filter(|site| site.init);
        let init: BTreeSet<u64> = init.map(|site| site.address).collect();
        let found = addresses(&key.name);
        // KASLR moves all sites by the same distance.
        let moved = *moved.get_or_insert_with(|| {
            let least = *found.first().expect("it has sites");
            least.wrapping_sub(*first)
        });
        let found = found.into_iter().map(|site| site.wrapping_sub(moved));
        let found: BTreeSet<u64> = found.filter(|site| !init.contains(site)).collect();
        assert_eq!(found, expected, "{}", key.name);
        (compared, sites) = (compared + 1, sites + found.len());
    }
    println!(
        "{compared} of {} keys, with {sites} sites, as in the file, moved by {:#x}",
        listed.len(),
        moved.unwrap_or_default()
    );
}

/// Checks transactions of keys while the guest changes its own. Each is made as a whole or not at
/// all. Afterwards all keys that the guest does not change are off, as before.
///
/// Prints a row: the monitor, the guest's vCPUs, MiB and keys, the transactions, attempts and
/// refusals, the changes of keys and sites, and the time for which the guest was stopped.
pub async fn storm(keys: &Keys, name: &str) {
    let (flips, step) = extent();
    let query = ListQuery {
        page_size: 10_000,
        ..ListQuery::default()
    };
    let is_shared = |name: &str| name.starts_with(SHARED);
    until("the guest changes its keys", || {
        let listed = keys.list(&query).expect("they are found").keys;
        let mut shared = listed.iter().filter(|key| is_shared(&key.name));
        shared.any(|key| key.count != 0)
    });
    let listed = keys.list(&query).expect("they are found").keys;
    let lines = listed.iter().filter(|key| {
        CHANGED.iter().any(|prefix| key.name.starts_with(prefix))
            && key.name.contains(".c/")
            && (key.count == 0 || is_shared(&key.name))
    });
    let names: Vec<Arc<str>> = lines.map(|key| Arc::clone(&key.name)).collect();
    let shared = names.iter().filter(|name| is_shared(name)).count();
    assert!(shared > 20 && names.len() > shared + 20, "{names:?}");
    let mut on = BTreeSet::new();
    // The seed is the same in every run.
    let mut random = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
    let (mut made, mut attempts, mut given_up, mut ops, mut sites) = (0_u32, 0, 0_u32, 0, 0);
    let mut stopped = Vec::new();
    while made < flips {
        let is_on = random.bool();
        let count = 1 + random.usize(..40);
        let chosen = (0..count).map(|_| &names[random.usize(..names.len())]);
        let chosen: BTreeSet<&Arc<str>> = chosen.collect();
        let op = if is_on { Op::Enable } else { Op::Disable };
        let updates = chosen.iter().map(|name| KeyUpdate::new(&***name, op));
        let outcome = match keys.update(forced(updates.collect())).await {
            Ok(outcome) => outcome,
            // The guest changed its own keys until the limit of the change.
            Err(refusal) => {
                println!("given up: {}: {refusal}", refusal.reason());
                given_up += 1;
                assert!(given_up < 20 + made / 10, "nothing succeeds: {refusal}");
                continue;
            }
        };
        for result in &outcome.results {
            assert_eq!(result.count_after != 0, is_on, "{result:?}");
            if is_shared(&result.key) {
                continue;
            }
            let was = match is_on {
                true => !on.insert(Arc::clone(&result.key)),
                false => on.remove(&result.key),
            };
            assert_eq!(result.count_before, i32::from(was), "{result:?}");
        }
        let report = outcome.report.expect("made");
        made += 1;
        attempts += report.attempts;
        ops += outcome.results.len();
        sites += outcome.summary.sites_patched;
        stopped.extend(
            report
                .pause
                .map(|pause| pause.stop + pause.patch + pause.resume),
        );
        let own = chosen.into_iter().find(|name| !is_shared(name));
        own.inspect(|name| agrees(&details(keys, name)));
    }
    while !on.is_empty() {
        let off = on.iter().map(|name| KeyUpdate::new(&**name, Op::Disable));
        match keys.update(forced(off.collect())).await {
            Ok(_) => on.clear(),
            Err(refusal) => {
                given_up += 1;
                assert!(given_up < 20 + made / 10, "nothing succeeds: {refusal}");
            }
        }
    }
    let own = names.iter().filter(|name| !is_shared(name));
    for name in own.step_by(step) {
        let details = details(keys, name);
        assert_eq!(details.key.count, 0, "{name}");
        agrees(&details);
    }
    let Size { vcpus, mib } = Size::given();
    println!(
        "| {name} | {vcpus} | {mib} | {} | {made} | {attempts} | {given_up} | {ops} | {sites} | {} |",
        listed.len(),
        percentiles(stopped)
    );
}

/// Returns an update that also drops references that the guest has taken.
fn forced(updates: Vec<KeyUpdate>) -> UpdateRequest {
    let end = Instant::now() + DEADLINE;
    let mut request = UpdateRequest::new(updates, "uid:0".to_owned(), DEADLINE, end);
    request.force = true;
    request
}

/// Returns the 50th and the 99th percentile in microseconds.
fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len() * percent / 100);
    let micros = |percent| at(percent).map_or(0, Duration::as_micros);
    format!("{} / {}", micros(50), micros(99))
}
