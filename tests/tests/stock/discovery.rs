// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_kernel_image::inspect;
use patchbay_kernel_image::live::{Finder, Kernel, NoteFound, Way, discover};
use static_keys::Branch;
use static_keys::{Class, Concerns, GateKind};

use super::qemu::Guest;

#[tokio::test]
async fn debian_6_1_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_1", "").await
}

#[tokio::test]
async fn debian_6_12_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_12", "").await
}

#[tokio::test]
async fn debian_6_12_cloud_with_page_table_isolation() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_12", "pti=on").await
}

#[tokio::test]
async fn debian_5_10_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_5_10", "").await
}

#[tokio::test]
async fn debian_6_1() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_1_GENERIC", "").await
}

#[tokio::test]
async fn debian_6_1_rt() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_1_RT", "").await
}

#[tokio::test]
async fn debian_6_12() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_12_GENERIC", "").await
}

#[tokio::test]
async fn debian_6_12_rt() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_12_RT", "").await
}

#[tokio::test]
async fn debian_13_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_TRIXIE", "").await
}

#[tokio::test]
async fn debian_6_16_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_16", "").await
}

#[tokio::test]
async fn debian_6_18_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_6_18", "").await
}

#[tokio::test]
async fn debian_backports_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_BACKPORTS", "").await
}

#[tokio::test]
async fn debian_forky_cloud() -> Result<()> {
    check("PATCHBAY_TEST_STOCK_FORKY", "").await
}

async fn check(variable: &str, append: &str) -> Result<()> {
    match std::env::var_os(variable) {
        Some(folder) => check_folder(folder.into(), append).await,
        None => {
            patchbay_tests::skip(&format!(
                "{variable} names no kernel; `cargo xtask test --kernels all` fetches those that the archive has"
            ));
            Ok(())
        }
    }
}

async fn check_folder(folder: PathBuf, append: &str) -> Result<()> {
    let Some(mut guest) = Guest::boot(&folder, append).await? else {
        patchbay_tests::skip("there is no qemu-system-x86_64");
        return Ok(());
    };
    let kernel = stopped(&mut guest).await?;
    println!("{}", summary(&kernel));
    ensure!(kernel.evidence.note == NoteFound::Agrees);
    ensure!(kernel.evidence.cpus == 1);
    ensure!(
        kernel.evidence.missing_gates.is_empty(),
        "{:?}",
        kernel.evidence
    );
    ensure!(kernel.page_table_isolation == Some(append.contains("pti=on")));
    file_agrees(&std::fs::read(folder.join("vmlinuz"))?, &kernel)?;
    ways_agree(&mut guest, &kernel).await?;
    debug_lines_agree(&mut guest, &kernel).await?;
    guest_flips_its_own(&mut guest, &kernel).await?;
    let again = modules_go(&mut guest, &kernel).await?;
    println!("{}", row(&kernel, append, again));
    Ok(())
}

/// Discovers the guest while it is stopped.
async fn stopped(guest: &mut Guest) -> Result<Kernel> {
    guest.stop().await?;
    let cpus = guest.cpus().await?;
    let kernel = discover(&guest.ram, &cpus, Way::Image);
    guest.resume().await?;
    kernel.context("the image way")
}

fn summary(kernel: &Kernel) -> String {
    format!(
        "{}: {:?} NOPs, {} gates, {:?}: {:?}",
        kernel.release,
        kernel.nops,
        kernel.gates.len(),
        time(kernel),
        kernel.evidence.parts,
    )
}

fn time(kernel: &Kernel) -> Duration {
    kernel.evidence.parts.iter().map(|part| part.time).sum()
}

/// Returns a row for the table in `docs/kernels.md`. `cargo xtask test` prints it.
fn row(kernel: &Kernel, append: &str, again: Duration) -> String {
    let class = |class| kernel.keys.iter().filter(|key| key.class == class).count();
    let entries: usize = kernel.images.iter().map(|image| image.sites.len()).sum();
    let release = [&kernel.release, append].join(" ");
    format!(
        "| {} | {entries} | {} | {} / {} / {} | {} | {} ms | {} ms |",
        release.trim_end(),
        kernel.keys.len(),
        class(Class::Tracepoint),
        class(Class::DynamicDebug),
        class(Class::Never),
        kernel.images.len() - 1,
        time(kernel).as_millis(),
        again.as_millis(),
    )
}

/// Checks that the file of the booted kernel has the discovered keys, with the same names, classes
/// and sites.
fn file_agrees(vmlinuz: &[u8], kernel: &Kernel) -> Result<()> {
    let report = inspect(vmlinuz, None)?;
    let moved = kernel.kaslr_offset.context("an offset in VMCOREINFO")?;
    ensure!(report.image.release.as_deref() == Some(kernel.release.as_str()));
    ensure!(report.summary.sites == kernel.images[0].sites.len());
    let mut found: BTreeMap<u64, _> = kernel.keys.iter().map(|key| (key.address, key)).collect();
    for key in &report.keys {
        let live = found
            .remove(&(key.address + moved))
            .with_context(|| format!("{} is in the file and not in the guest", key.name))?;
        ensure!(
            live.class == key.class,
            "{live:?} is {:?} in the file",
            key.class
        );
        ensure!(
            live.name == key.name,
            "{} is {} in the file",
            live.name,
            key.name
        );
        ensure!(
            live.debug == key.debug,
            "{:?} is {:?} in the file",
            live.debug,
            key.debug
        );
        ensure!(
            live.sealed || !key.ro_after_init,
            "{live:?} is sealed in the file"
        );
        let mut sites: Vec<(u64, u64, bool, bool)> = Vec::new();
        for (image, range) in live.sites.iter().filter(|(image, _)| *image == 0) {
            let run = &kernel.images[*image].sites[range.clone()];
            sites.extend(run.iter().map(|site| {
                let entry = &site.entry;
                (
                    entry.code - moved,
                    entry.target - moved,
                    entry.likely,
                    entry.init,
                )
            }));
        }
        sites.sort_unstable();
        let in_file = key.sites.iter();
        let in_file: Vec<_> = in_file
            .map(|site| (site.address, site.target, site.likely, site.init))
            .collect();
        ensure!(sites == in_file, "the sites of {} differ", key.name);
    }
    // The other keys have sites only in modules.
    let left = found
        .values()
        .find(|key| key.sites.iter().any(|(image, _)| *image == 0));
    ensure!(left.is_none(), "{left:?} is not in the file");
    Ok(())
}

/// Checks that the search for VMCOREINFO finds the same kernel with and without the vCPUs'
/// registers.
async fn ways_agree(guest: &mut Guest, kernel: &Kernel) -> Result<()> {
    guest.stop().await?;
    let cpus = guest.cpus().await?;
    for cpus in [cpus.as_slice(), &[]] {
        let began = Instant::now();
        let other = discover(&guest.ram, cpus, Way::Note)?;
        println!(
            "by VMCOREINFO in {:?}, {:?}",
            began.elapsed(),
            other.evidence.parts[0]
        );
        ensure!(other.evidence.note == NoteFound::Searched);
        ensure!(other.boot == kernel.boot && other.page_table == kernel.page_table);
        let same = |a: &Kernel, b: &Kernel| {
            let keys = a.keys.iter().zip(&b.keys);
            a.keys.len() == b.keys.len()
                && keys
                    .into_iter()
                    .all(|(a, b)| (a.address, &a.name) == (b.address, &b.name))
        };
        ensure!(same(&other, kernel), "the two ways find other keys");
    }
    guest.resume().await
}

/// Checks the discovered pr_debug() lines against the kernel's own list: nearly all lines of the
/// list have a site, and a line of virtio_net has the same function.
async fn debug_lines_agree(guest: &mut Guest, kernel: &Kernel) -> Result<()> {
    let said = guest
        .shell("grep -c '^[^#]' /sys/kernel/debug/dynamic_debug/control")
        .await?;
    let listed = said.lines().find_map(|line| line.trim().parse().ok());
    let listed: usize = listed.with_context(|| format!("no number of lines in {said:?}"))?;
    let found = kernel
        .keys
        .iter()
        .filter(|key| key.class == Class::DynamicDebug)
        .count();
    println!("{found} of {listed} lines of dynamic debug have a site");
    ensure!(found <= listed && found * 10 > listed * 9);
    let line = kernel.keys.iter().find_map(|key| {
        let line = key.debug.as_ref()?;
        (line.file == "drivers/net/virtio_net.c").then_some(line)
    });
    let line = line.context("a line of virtio_net")?;
    let pattern = format!("{}:{} ", line.file, line.line);
    let lines = format!("grep -F '{pattern}' /sys/kernel/debug/dynamic_debug/control");
    let listed = guest.shell(&lines).await?;
    ensure!(
        listed.contains(&format!("]{} =", line.function)),
        "{listed}"
    );
    Ok(())
}

/// Checks that counts and sites follow the guest's changes to its own keys.
async fn guest_flips_its_own(guest: &mut Guest, before: &Kernel) -> Result<()> {
    guest
        .shell("echo 1 >/sys/kernel/tracing/events/sched/sched_switch/enable")
        .await?;
    guest
        .shell("echo 'module virtio_net +p' >/sys/kernel/debug/dynamic_debug/control")
        .await?;
    let after = stopped(guest).await?;
    ensure!(after.boot == before.boot);
    let taken = |kernel: &Kernel, name: &str| -> Result<(i32, bool)> {
        let key = kernel.keys.iter().find(|key| key.name == name);
        let key = key.with_context(|| format!("a key {name}"))?;
        let sites = key
            .sites
            .iter()
            .flat_map(|(image, range)| &kernel.images[*image].sites[range.clone()]);
        let mut holds = sites.filter_map(|site| site.holds);
        Ok((key.count, holds.all(|(_, branch)| branch == Branch::Jump)))
    };
    ensure!(taken(before, "sched_switch")? == (0, false));
    ensure!(taken(&after, "sched_switch")? == (1, true));
    let lines = |kernel: &Kernel| {
        let of_module = |key: &&patchbay_kernel_image::live::ObservedKey| {
            key.debug
                .as_ref()
                .is_some_and(|line| line.module == "virtio_net")
        };
        kernel
            .keys
            .iter()
            .filter(of_module)
            .map(|key| key.count)
            .collect::<Vec<_>>()
    };
    ensure!(!lines(before).is_empty() && lines(before).iter().all(|count| *count == 0));
    ensure!(
        lines(&after).iter().all(|count| *count == 1),
        "{:?}",
        lines(&after)
    );
    Ok(())
}

/// Checks that unloading a module removes its keys and changes the values that the gates of the
/// module list expect. Returns the duration of the repeated discovery.
async fn modules_go(guest: &mut Guest, before: &Kernel) -> Result<Duration> {
    // The newest module comes first. Unloading it changes the head of the kernel's list.
    let listed = guest.shell("head -n 1 /proc/modules").await?;
    let newest = listed.lines().find(|line| line.contains(" Live "));
    let newest = newest.and_then(|line| line.split(' ').next());
    let newest = newest.with_context(|| format!("no module in {listed:?}"))?;
    let mut finder = Finder::default();
    guest.stop().await?;
    let cpus = guest.cpus().await?;
    finder.find(&guest.ram, &cpus, Way::Image)?;
    guest.resume().await?;
    guest.shell(&format!("rmmod {newest}")).await?;
    guest.stop().await?;
    let cpus = guest.cpus().await?;
    let after = discover(&guest.ram, &cpus, Way::Image)?;
    let again = finder.find(&guest.ram, &cpus, Way::Image)?;
    guest.resume().await?;
    ensure!(again.evidence.again);
    println!("as a whole {}", summary(&after));
    println!("again {}", summary(&again));
    ensure!(
        format!("{:?} {:?}", again.keys, again.gates)
            == format!("{:?} {:?}", after.keys, after.gates),
        "a repeated discovery differs from a whole one"
    );
    ensure!(after.images.len() + 1 == before.images.len());
    let names = |kernel: &Kernel| kernel.images.iter().any(|image| image.name == newest);
    ensure!(names(before) && !names(&after));
    for kind in [GateKind::ModuleCount, GateKind::ModuleList] {
        let wanted = |kernel: &Kernel| {
            let gates = kernel.gates.iter();
            let gates =
                gates.filter(|gate| gate.kind == kind && gate.concerns == Concerns::MODULES);
            gates
                .map(|gate| (gate.address, gate.wanted))
                .collect::<Vec<_>>()
        };
        ensure!(wanted(before) != wanted(&after), "{kind:?}");
    }
    Ok(time(&again))
}
