// SPDX-License-Identifier: Apache-2.0
//! Runs a storm: the host changes keys of a guest again and again, while the guest changes some of
//! the same keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_kernel_image::Report;
use patchbay_service::keys::{
    KeyDetails, KeyUpdate, Keys, ListQuery, Selection, UpdateOutcome, UpdateRequest,
};
use static_keys::{Branch, Op, Patterns};

use super::{DEADLINE, until};

/// The variable that gives the number of transactions. With it, the sites of all keys are compared
/// with the kernel's file and checked after the storm, and otherwise those of one in [`SPARSE`]
/// keys.
const FLIPS: &str = "PATCHBAY_TEST_MONITOR_FLIPS";
/// One of this many keys is checked, because describing a key with its sites takes about 10 ms in
/// an emulated computer.
const SPARSE: usize = 16;
/// The variable that gives the guest's number of vCPUs and its memory in MiB, separated by a comma.
const GUEST: &str = "PATCHBAY_TEST_MONITOR_GUEST";
/// Timeout for a change while the guest changes its own keys.
const LIMIT: Duration = Duration::from_secs(10);
/// The prefix of the names of the keys that the guest changes.
const SHARED: &str = "drivers/base/core.c/";
/// The keys that the host changes, those of [`SHARED`] among them.
const CHANGED: [&str; 3] = ["drivers/base/core.c/*", "fs/*.c/*", "kernel/*.c/*"];
/// Changes the keys of [`SHARED`] again and again. Otherwise it does the same as the first program
/// of [`super::stock::Boot::prepare`].
pub const INIT: &[u8] = b"#!/bin/busybox sh
/bin/busybox mount -t sysfs s /sys
/bin/busybox mount -t proc p /proc
/bin/busybox mount -t devtmpfs d /dev
/bin/busybox echo READY
while :; do
    for flags in +p -p; do
        /bin/busybox echo \"file drivers/base/core.c $flags\" > /proc/dynamic_debug/control
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

/// Returns the number of transactions, and the distance from one checked key to the next.
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
        "{compared} keys with {sites} sites as in the file, moved by {:#x}",
        moved.unwrap_or_default()
    );
    assert!(compared > 100 && sites >= compared);
}

/// Checks transactions of keys while the guest changes some of the same keys. Each is made as a
/// whole or not at all, and the guest changes keys between them. Afterwards all keys that the guest
/// does not change are off, as before.
///
/// Prints a row: the monitor, the guest's vCPUs, its MiB, the number of keys, the transactions,
/// attempts and refusals, the changes of keys and sites, and the time for which the guest was
/// stopped.
pub async fn storm(keys: &Keys, name: &str) {
    let (flips, step) = extent();
    let is_shared = |name: &str| name.starts_with(SHARED);
    let query = ListQuery {
        page_size: 10_000,
        keys: Selection {
            patterns: Patterns::parse(&CHANGED.map(str::to_owned)).expect("well-formed"),
            ..Selection::default()
        },
        ..ListQuery::default()
    };
    let listed = || keys.list(&query).expect("they are found").keys;
    let off = listed().into_iter();
    let off = off.filter(|key| key.count == 0 || is_shared(&key.name));
    let names: Vec<Arc<str>> = off.map(|key| key.name).collect();
    let own: BTreeSet<&Arc<str>> = names.iter().filter(|name| !is_shared(name)).collect();
    assert!(own.len() > 20 && names.len() > own.len() + 20, "{names:?}");
    // The state in which the host has left the keys that it has changed.
    let mut left = BTreeMap::new();
    // The seed is the same in every run.
    let mut random = fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15);
    let mut tally = Tally::default();
    while tally.made < flips || tally.contended == 0 {
        assert!(tally.made < flips + 1_000, "the guest changes no key");
        let is_on = random.bool();
        let count = 1 + random.usize(..40);
        let chosen = (0..count).map(|_| &names[random.usize(..names.len())]);
        let chosen: BTreeSet<&Arc<str>> = chosen.collect();
        let Some(outcome) = tally.change(keys, &chosen, is_on).await else {
            continue;
        };
        for result in &outcome.results {
            let was = left.insert(Arc::clone(&result.key), is_on);
            match is_shared(&result.key) {
                true => {
                    let changed = was.is_some_and(|was| was != (result.count_before != 0));
                    tally.contended += u32::from(changed);
                }
                false => {
                    let was = i32::from(was.unwrap_or(false));
                    assert_eq!(result.count_before, was, "{result:?}");
                }
            }
        }
        if let Some(name) = chosen.into_iter().find(|name| !is_shared(name)) {
            let details = details(keys, name);
            assert_eq!(details.key.count != 0, is_on, "{name}");
            agrees(&details);
        }
    }
    let on = |name: &&Arc<str>| left.get(*name) == Some(&true);
    let on: BTreeSet<&Arc<str>> = own.iter().copied().filter(on).collect();
    let outcome = loop {
        if let Some(outcome) = tally.change(keys, &on, false).await {
            break outcome;
        }
    };
    for result in &outcome.results {
        assert_eq!(result.count_before, 1, "{result:?}");
    }
    for key in listed().iter().filter(|key| own.contains(&key.name)) {
        assert_eq!(key.count, 0, "{key:?}");
    }
    for name in own.iter().step_by(step) {
        agrees(&details(keys, name));
    }
    let shared = || {
        let listed = listed().into_iter();
        let shared = listed.filter(|key| is_shared(&key.name));
        shared.map(|key| key.count).collect::<Vec<i32>>()
    };
    let before = shared();
    until("the guest still changes its keys", || shared() != before);
    let Size { vcpus, mib } = Size::given();
    println!(
        "| {name} | {vcpus} | {mib} | {} | {} |",
        names.len(),
        tally.row()
    );
}

/// The outcomes of the transactions.
#[derive(Default)]
struct Tally {
    made: u32,
    attempts: u32,
    given_up: u32,
    /// The number of times that a key was not as the host had left it.
    contended: u32,
    keys: usize,
    sites: u32,
    stopped: Vec<Duration>,
}

impl Tally {
    /// Makes a transaction, which also drops references that the guest has taken. Returns `None` if
    /// the guest changed its own keys until the limit.
    async fn change(
        &mut self,
        keys: &Keys,
        names: &BTreeSet<&Arc<str>>,
        is_on: bool,
    ) -> Option<Arc<UpdateOutcome>> {
        let op = if is_on { Op::Enable } else { Op::Disable };
        let updates = names.iter().map(|name| KeyUpdate::new(&***name, op));
        let end = Instant::now() + LIMIT;
        let caller = "uid:0".to_owned();
        let mut request = UpdateRequest::new(updates.collect(), caller, DEADLINE, end);
        request.force = true;
        let outcome = match keys.update(request).await {
            Ok(outcome) => outcome,
            Err(refusal) => {
                assert_eq!(refusal.reason(), "GUEST_BUSY", "{refusal}");
                println!("given up: {refusal}");
                self.given_up += 1;
                assert!(
                    self.given_up < 20 + self.made / 10,
                    "nothing succeeds: {refusal}"
                );
                return None;
            }
        };
        let mut results = outcome.results.iter();
        assert!(
            results.all(|result| (result.count_after != 0) == is_on),
            "{outcome:?}"
        );
        assert_eq!(outcome.results.len(), names.len());
        let report = outcome.report.as_ref().expect("made");
        self.made += 1;
        self.attempts += report.attempts;
        self.keys += names.len();
        self.sites += report.sites_patched;
        let stopped = report
            .pause
            .map(|pause| pause.stop + pause.patch + pause.resume);
        self.stopped.extend(stopped);
        Some(outcome)
    }

    /// Returns the cells of a row. Of the times, it has the 50th and the 99th percentile in
    /// microseconds.
    fn row(mut self) -> String {
        self.stopped.sort_unstable();
        let at = |percent: usize| self.stopped.get(self.stopped.len() * percent / 100);
        let micros = |percent| at(percent).map_or(0, Duration::as_micros);
        let Self {
            made,
            attempts,
            given_up,
            keys,
            sites,
            ..
        } = self;
        format!(
            "{made} | {attempts} | {given_up} | {keys} | {sites} | {} / {}",
            micros(50),
            micros(99)
        )
    }
}
