// SPDX-License-Identifier: Apache-2.0
//! Tests unpatched kernels of a distribution, whose keys the monitor discovers.
//!
//! `PATCHBAY_STOCK_FLIPS` sets the number of the host's transactions in the storm (default 40),
//! and `PATCHBAY_STOCK_REBOOTS` the number of the guest's reboots meanwhile (default 1).

/// Defines a test for each kernel that only `cargo xtask test --kernels all` provides.
macro_rules! of_other_kernels {
    ($function:ident: $($test:ident $kernel:literal,)*) => {$(
        #[tokio::test]
        async fn $test() -> Result<()> {
            $function($kernel).await
        }
    )*};
}

mod agent;
mod guarded;
mod hog;
mod installed;
mod log;
mod queries;
mod snapshot;
mod state;
mod storm;
mod trace;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    DescribeGuestResponse, DiscoveryWay, KeyOp, KeyUpdate, ListStaticKeysRequest,
    RegistrationState, StaticKey, TableSource, UpdateStaticKeysRequest,
};
use patchbay_tests::{
    Guest, StockKernel, TestGuest, enabled_tracepoints, switch_tracepoints, without_functions,
};
use tonic::Code;

/// pr_debug() lines of one file.
struct DebugLines {
    /// The pattern of their keys.
    keys: &'static str,
    /// A command that makes the kernel execute the lines.
    command: &'static str,
    /// The output of one of the lines when its key is on.
    printed: &'static str,
}

/// Lines that the registration and removal of an interpreter execute.
const BINFMT: DebugLines = DebugLines {
    keys: "binfmt_misc:fs/binfmt_misc.c/*",
    command: "cd /proc/sys/fs/binfmt_misc; echo ':x:M::xyz:/bin/true:' >register; echo -1 >x; cd /",
    printed: "register: received",
};
const EVENT: &str = "sched_process_exec";
const TRACING: &str = "/sys/kernel/tracing";

#[tokio::test]
async fn keys_of_debian_6_12_cloud() -> Result<()> {
    keys_of("6_12").await
}

#[tokio::test]
async fn keys_of_debian_6_1_cloud() -> Result<()> {
    keys_of("6_1").await
}

/// Tests a kernel that chooses its NOPs for the processor, so they differ from those that the
/// compiler emitted.
#[tokio::test]
async fn keys_of_debian_5_10_cloud() -> Result<()> {
    keys_of("5_10").await
}

/// Tests the kernel for real hardware.
#[tokio::test]
async fn keys_of_debian_6_1() -> Result<()> {
    keys_of("6_1_GENERIC").await
}

/// Tests the kernel for real hardware.
#[tokio::test]
async fn keys_of_debian_6_12() -> Result<()> {
    keys_of("6_12_GENERIC").await
}

of_other_kernels! { keys_of:
    keys_of_debian_6_12_rt "6_12_RT",
    keys_of_debian_6_16_cloud "6_16",
    keys_of_debian_6_18_cloud "6_18",
    keys_of_debian_backports_cloud "BACKPORTS",
}

/// Tests commands in a kernel whose vsock and virtio-mmio drivers are modules and which finds its
/// devices by ACPI.
#[test]
fn commands_run_in_a_kernel_of_debian_with_its_keys_on_both_sides() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(&kernel.cli);
        command.args(["ci", "run", "--kernel"]).arg(&kernel.kernel);
        command.arg("--modules").arg(&kernel.modules);
        command.args(arguments).output()
    };
    let output = run(&["--", "sh", "-c", "uname -r; exit 7"])?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(7) && text.contains("-cloud-amd64"),
        "{output:?}"
    );
    let matrix = ["--allow-guarded", "--matrix", "sched_asym_cpucapacity"];
    let output = run(&[&matrix[..], &["--ktap", "--", "true"]].concat())?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.contains("ok 2 sched_asym_cpucapacity=on"),
        "{output:?}"
    );
    Ok(())
}

/// Discovers the keys, and flips lines of pr_debug() and a tracepoint. Then starts the next kernel
/// by kexec and discovers its keys, although most of the first kernel's memory still has its old
/// content.
async fn keys_of(version: &str) -> Result<()> {
    let Some(kernel) = StockKernel::named(version) else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let initramfs = folder.path().join("initramfs");
    kernel.initramfs_with(&[("kernel", 0o644, &kernel.kernel)], &initramfs)?;
    let mut guest = Guest::stock(&kernel)
        .initramfs(&initramfs)
        .argument("--allow-guarded")
        .boot()
        .await?;
    let absent = guest.describe().await?;
    ensure!(absent.guest_status().registration() == RegistrationState::Absent);
    let before = in_one_boot(&mut guest).await?;

    // The initrd of the second kernel is made from the files that the first one has unpacked.
    guest
        .shell(
            "mkdir -p /tmp/root/dev /tmp/root/proc /tmp/root/sys /tmp/root/tmp; cp -a /bin /init /lib /tmp/root; \
             mknod /tmp/root/dev/console c 5 1; cd /tmp/root; find . | cpio -o -H newc >/tmp/initrd; cd /",
        )
        .await?;
    guest
        .console()
        .type_line("kexec_tool /kernel /tmp/initrd")
        .await?;
    guest.wait_for_shell().await?;
    load_module(&mut guest).await?;
    ensure!(list(&mut guest, &[]).await?.len() > 1500);
    let after = guest.describe().await?;
    ensure!(
        after.guest_status().generation != before.guest_status().generation,
        "the second kernel is the first: {after:?}"
    );
    lines_of_dynamic_debug(&mut guest, &BINFMT).await
}

async fn in_one_boot(guest: &mut Guest) -> Result<DescribeGuestResponse> {
    // The log is cleared, so that complaints of the kernel before any change are not counted.
    guest.shell("dmesg -c >/dev/null").await?;
    let without = list(guest, &[]).await?;
    ensure!(
        !without
            .iter()
            .any(|key| key.name.starts_with("binfmt_misc:"))
    );
    let modules = guest.describe().await?.modules;
    load_module(guest).await?;
    let began = Instant::now();
    let keys = list(guest, &[]).await?;
    let listed = began.elapsed();
    let description = guest.describe().await?;
    let status = description.guest_status();
    let discovery = description.discovery.as_ref().context("discovered")?;
    println!(
        "{}: {} keys, {} sites, {} modules; by {:?} in {:?}, listed in {listed:?}",
        status.kernel_release,
        description.keys,
        description.sites,
        description.modules,
        discovery.way(),
        discovery
            .time
            .map(Duration::try_from)
            .transpose()?
            .unwrap_or_default(),
    );
    ensure!(status.table_source() == TableSource::Discovered);
    ensure!(discovery.way() == DiscoveryWay::Image, "{discovery:?}");
    ensure!(description.modules == modules + 1, "{description:?}");
    ensure!(keys.len() > 1500 && keys.len() > without.len());

    lines_of_dynamic_debug(guest, &BINFMT).await?;
    queries::select_as_the_kernels_do(guest).await?;
    tracepoint(guest).await?;
    guest.assert_no_warnings().await?;
    Ok(description)
}

async fn load_module(guest: &mut Guest) -> Result<()> {
    guest.shell("insmod /lib/modules/*-binfmt_misc.ko").await?;
    let mount = "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc";
    guest.shell(mount).await.map(drop)
}

/// Checks that the lines are on the console while the host has turned their keys on.
async fn lines_of_dynamic_debug(guest: &mut Guest, lines: &DebugLines) -> Result<()> {
    let names: Vec<String> = list(guest, &[lines.keys])
        .await?
        .into_iter()
        .map(|key| key.name)
        .collect();
    ensure!(names.len() > 3, "{names:?}");
    let mut by_kernel = Vec::new();
    for (op, on) in [
        (None, false),
        (Some(KeyOp::Enable), true),
        (Some(KeyOp::Disable), false),
    ] {
        if let Some(op) = op {
            let updates: Vec<_> = names.iter().map(|name| (name.as_str(), op)).collect();
            let answer = guest.update(&updates).await?;
            println!("{op:?}: {:?} {:?}", answer.summary, answer.report);
        }
        let mut bytes = Vec::new();
        for name in &names {
            let key = guest.key(name).await?;
            assert_sites(&key, Some(on))?;
            bytes.extend(key.sites.into_iter().map(|site| site.current_bytes));
        }
        if op.is_none() {
            by_kernel = bytes;
        } else {
            ensure!((bytes != by_kernel) == on, "{bytes:x?}, not {by_kernel:x?}");
        }
        let before = printed(guest, lines).await?;
        let console = shown(guest, lines);
        // The log level is restored afterwards, so that the kernel's lines do not mix with the
        // shell's output.
        let command = format!("dmesg -n 8; {} && dmesg -n 1", lines.command);
        guest.shell(&command).await?;
        let more = printed(guest, lines).await? > before;
        let shown = shown(guest, lines) > console;
        ensure!(
            more == on && shown == on,
            "{op:?}: the console ends with {}",
            guest.console().transcript()
        );
    }
    Ok(())
}

/// Returns the number of times that the line is on the console.
fn shown(guest: &mut Guest, lines: &DebugLines) -> usize {
    guest.console().transcript().matches(lines.printed).count()
}

/// Returns the number of times that the kernel has printed the line.
async fn printed(guest: &mut Guest, lines: &DebugLines) -> Result<usize> {
    // Printing the whole log on an emulated console would take long.
    let count = format!("dmesg | grep -c '{}' || true", lines.printed);
    Ok(guest.shell(&count).await?.trim().parse()?)
}

/// Checks that every site of the key agrees with its count, and that the host has found the
/// function of every site.
fn assert_sites(key: &StaticKey, on: Option<bool>) -> Result<()> {
    if let Some(on) = on {
        ensure!(
            (key.count != 0) == on,
            "{} has count {}",
            key.name,
            key.count
        );
    }
    for site in &key.sites {
        ensure!(
            !site.symbol.is_empty(),
            "site {:#x} of {} has no function",
            site.address,
            key.name
        );
        if !site.obstacle_message.is_empty() {
            continue;
        }
        let jumps = site.disassembly.starts_with("jmp");
        ensure!(
            jumps == ((key.count > 0) != site.likely) && site.disassembly != "unknown",
            "site {:#x} of {} with count {} says {}",
            site.address,
            key.name,
            key.count,
            site.disassembly
        );
    }
    Ok(())
}

/// Makes the guest trace, and makes the host park and fire the tracepoint.
async fn tracepoint(guest: &mut Guest) -> Result<()> {
    let enable = format!("{TRACING}/events/sched/{EVENT}/enable");
    guest.shell(&format!("echo 1 >{enable}")).await?;
    for (op, on) in [
        (None, true),
        (Some(KeyOp::Disable), false),
        (Some(KeyOp::Enable), true),
    ] {
        if let Some(op) = op {
            let updates = vec![KeyUpdate {
                name: EVENT.to_owned(),
                op: op.into(),
                ..Default::default()
            }];
            let request = UpdateStaticKeysRequest {
                updates,
                // `force` is set, because the guest itself holds the reference.
                force: true,
                ..Default::default()
            };
            guest.static_keys().update_static_keys(request).await?;
        }
        assert_sites(&guest.key(EVENT).await?, Some(on))?;
        let seen = guest
            .shell(&format!(
                "echo >{TRACING}/trace; busybox true; cat {TRACING}/trace"
            ))
            .await?;
        ensure!(seen.contains(&format!("{EVENT}:")) == on, "{op:?}: {seen}");
    }
    guest.shell(&format!("echo 0 >{enable}")).await?;
    assert_sites(&guest.key(EVENT).await?, Some(false))
}

async fn list(guest: &mut Guest, patterns: &[&str]) -> Result<Vec<StaticKey>> {
    let mut keys = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListStaticKeysRequest {
            patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
            page_size: 10_000,
            page_token,
            ..Default::default()
        };
        let page = guest
            .static_keys()
            .list_static_keys(request)
            .await?
            .into_inner();
        keys.extend(page.keys);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(keys);
        }
    }
}

/// Makes the guest turn on all its events, and makes the host park and fire their tracepoints in
/// one transaction each.
#[tokio::test]
async fn all_tracepoints_of_an_unpatched_kernel_at_once() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let mut guest = Guest::stock(&kernel).boot().await?;
    guest.shell("dmesg -c >/dev/null").await?;
    let events = format!("{TRACING}/events/enable");
    let own = guest.shell(&format!("time echo 1 >{events}")).await?;
    println!("the guest itself: {}", own.replace('\n', " "));
    let enabled = enabled_tracepoints(&mut guest).await?;
    let names = without_functions(&mut guest, enabled).await?;
    ensure!(names.len() > 500, "{} tracepoints are on", names.len());
    for op in [KeyOp::Disable, KeyOp::Enable] {
        let request = switch_tracepoints(&names, op);
        let began = Instant::now();
        let answer = guest
            .static_keys()
            .update_static_keys(request)
            .await?
            .into_inner();
        println!(
            "{op:?}: {:?} {:?} in {:?}",
            answer.summary,
            answer.report,
            began.elapsed()
        );
        let changed = answer.summary.map(|summary| summary.keys_changed);
        ensure!(changed.map(|changed| changed as usize) == Some(names.len()));
        for name in names.iter().step_by(10) {
            assert_sites(&guest.key(name).await?, Some(op == KeyOp::Enable))?;
        }
    }
    let own = guest.shell(&format!("time echo 0 >{events}")).await?;
    println!("the guest itself: {}", own.replace('\n', " "));
    guest.assert_no_warnings().await?;
    nothing_changes_in_a_panic(&mut guest, &names).await
}

/// Makes the kernel panic, and waits until it has. It stays in the panic and does not reboot.
async fn crash(guest: &mut Guest) -> Result<()> {
    guest.shell("echo 0 >/proc/sys/kernel/panic").await?;
    let console = guest.console();
    console.type_line("echo c >/proc/sysrq-trigger").await?;
    console.wait_for("end Kernel panic - not syncing").await?;
    Ok(())
}

/// Checks that the host changes no key after a panic. The panicked kernel keeps one CPU in a loop,
/// so only its memory reveals the panic.
async fn nothing_changes_in_a_panic(guest: &mut Guest, names: &[String]) -> Result<()> {
    crash(guest).await?;
    let request = UpdateStaticKeysRequest {
        retry_timeout: Some(Duration::from_secs(10).try_into()?),
        ..switch_tracepoints(names, KeyOp::Disable)
    };
    let answer = guest.static_keys().update_static_keys(request).await;
    let refusal = answer.err().context("a kernel in panic was changed")?;
    println!("in panic: {refusal:?}");
    ensure!(
        refusal.code() == Code::FailedPrecondition
            && refusal.message().contains("its kernel panics on CPU 0"),
        "{refusal:?}"
    );
    // They can still be read.
    let listed = list(guest, &[]).await?;
    ensure!(!listed.is_empty());
    let status = guest.describe().await?;
    ensure!(
        status.guest_status().registration() == RegistrationState::Absent,
        "{status:?}"
    );
    Ok(())
}
