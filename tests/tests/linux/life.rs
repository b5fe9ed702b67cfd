// SPDX-License-Identifier: Apache-2.0
//! Tests the end of a kernel and of its CPUs: the host uses the registered addresses only while
//! they are valid.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    DescribeGuestResponse, KeyOp, KeyUpdate, ListHoldsRequest, RegistrationState,
    ShutdownGuestRequest, UpdateStaticKeysRequest, WatchStaticKeysRequest,
};
use patchbay_tests::{Environment, Guest, GuestBuilder, SHELL_READS, TestGuest, until};
use tonic::Code;

const KEY: &str = "patchbay_test:ref_key";
const SEEN: &str = "/sys/kernel/debug/patchbay_test/keys/ref_key";

fn environment_and_guest() -> Option<(Environment, GuestBuilder)> {
    let environment = Environment::linux_guest()?;
    let builder = Guest::builder(&environment);
    Some((environment, builder))
}

/// Fails unless the guest has withdrawn its registration and no key can be changed.
async fn assert_withdrawn(guest: &mut Guest) -> Result<DescribeGuestResponse> {
    let description = guest.describe().await?;
    ensure!(
        description.guest_status().registration() == RegistrationState::Withdrawn,
        "{description:?}"
    );
    let refusal = guest
        .update(&[("getppid_key", KeyOp::Inc)])
        .await
        .expect_err("nothing is registered");
    ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    Ok(description)
}

/// Runs `command` in the guest, and expects the monitor to exit successfully.
async fn assert_ends(builder: GuestBuilder, command: &str) -> Result<()> {
    let mut guest = builder.boot().await?;
    guest.assert_registered().await?;
    guest.console().type_line(command).await?;
    let status = guest.wait().await?;
    ensure!(
        status.success(),
        "{command}: the monitor ended with {status}: {}",
        guest.monitor_log()
    );
    Ok(())
}

#[tokio::test]
async fn a_reset_ends_the_monitor() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    assert_ends(builder.clone(), "reboot -f").await?;
    // A panic leads to a reset: the tests' guests boot with panic=-1.
    assert_ends(builder, "echo c > /proc/sysrq-trigger").await
}

/// Checks a triple fault, which is a kernel's last way to reset itself.
#[tokio::test]
async fn a_triple_fault_is_a_reset() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    assert_ends(builder.command_line("reboot=t"), "reboot -f").await
}

async fn shut_down(
    guest: &mut Guest,
    request: ShutdownGuestRequest,
) -> Result<bool, tonic::Status> {
    let response = guest.guest_service().shutdown_guest(request).await?;
    Ok(response.into_inner().power_cut)
}

fn within(seconds: i64) -> ShutdownGuestRequest {
    ShutdownGuestRequest {
        timeout: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..Default::default()
    }
}

#[tokio::test]
async fn a_guest_that_listens_to_its_power_button_powers_itself_off() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    let mut guest = builder.acpi().vcpus(2).boot().await?;
    // acpid and systemd-logind do the same: they wait for an event of the button's input device.
    let device = guest
        .shell("grep -l 'Power Button' /sys/class/input/event*/device/name | cut -d/ -f5")
        .await?;
    ensure!(device.starts_with("event"), "no power button: {device:?}");
    let listener = format!("((head -c 1 /dev/input/{device} && poweroff -f) >/dev/null 2>&1 &)");
    guest.shell(&listener).await?;
    ensure!(!shut_down(&mut guest, within(120)).await?, "it was cut");
    let status = guest.wait().await?;
    ensure!(status.success(), "{status}: {}", guest.monitor_log());
    Ok(())
}

#[tokio::test]
async fn a_guest_that_does_not_listen_runs_on_or_is_cut() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    for (builder, why) in [
        (builder.clone().acpi(), "has seen the power button"),
        (builder, "does not listen to the power button"),
    ] {
        let mut guest = builder.boot().await?;
        let refusal = shut_down(&mut guest, within(2)).await;
        let refusal = refusal.expect_err("nobody in the guest listens");
        ensure!(
            refusal.code() == Code::DeadlineExceeded && refusal.message().contains(why),
            "{refusal:?}"
        );
        guest.assert_no_warnings().await?;
        let cut = ShutdownGuestRequest {
            cut_after_timeout: true,
            ..within(1)
        };
        ensure!(shut_down(&mut guest, cut).await?, "it powered itself off");
        let status = guest.wait().await?;
        ensure!(status.success(), "{status}: {}", guest.monitor_log());
    }
    Ok(())
}

#[tokio::test]
async fn power_off_through_acpi_ends_the_monitor() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    assert_ends(builder.acpi().vcpus(2), "poweroff -f").await
}

#[tokio::test]
async fn a_halted_kernel_has_taken_its_registration_back() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    let mut guest = builder.vcpus(2).boot().await?;
    guest.assert_registered().await?;
    // With this log level, the console shows the message "System halted".
    guest.shell("dmesg -n 8").await?;
    guest.console().type_line("halt -f").await?;
    guest.console().wait_for("System halted").await?;
    assert_withdrawn(&mut guest).await?;
    Ok(())
}

#[tokio::test]
async fn a_panicked_kernel_has_taken_its_registration_back() -> Result<()> {
    let Some((_, builder)) = environment_and_guest() else {
        return Ok(());
    };
    let mut guest = builder.vcpus(2).command_line("panic=0").boot().await?;
    guest.assert_registered().await?;
    guest
        .console()
        .type_line("echo c > /proc/sysrq-trigger")
        .await?;
    guest.console().wait_for("end Kernel panic").await?;
    assert_withdrawn(&mut guest).await?;
    Ok(())
}

/// Copies a file as a disk image, padded to whole sectors. Returns the monitor's argument for the
/// disk and the length of the file.
fn as_disk(file: &Path, folder: &Path, name: &str) -> Result<(String, usize)> {
    let mut content = std::fs::read(file).with_context(|| file.display().to_string())?;
    let length = content.len();
    content.resize(length.next_multiple_of(512), 0);
    let image = folder.join(name);
    std::fs::write(&image, content)?;
    Ok((format!("--disk={},readonly", image.display()), length))
}

#[tokio::test]
async fn a_kexeced_kernel_registers_anew() -> Result<()> {
    let Some((environment, builder)) = environment_and_guest() else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let (kernel, kernel_length) = as_disk(&environment.kernel, folder.path(), "kernel")?;
    let (initrd, initrd_length) = as_disk(&environment.initramfs, folder.path(), "initrd")?;
    // ACPI is on, because the MP table is in ordinary memory, which the first kernel may overwrite.
    let mut guest = builder
        .acpi()
        .vcpus(2)
        .argument(&kernel)
        .argument(&initrd)
        .argument("--allow-guarded")
        .boot()
        .await?;
    let before = guest.assert_registered().await?;
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    guest
        .shell(&format!(
            "head -c {kernel_length} /dev/vda >/tmp/kernel; head -c {initrd_length} /dev/vdb >/tmp/initrd"
        ))
        .await?;
    guest
        .console()
        .type_line("kexec_tool /tmp/kernel /tmp/initrd")
        .await?;
    guest.console().wait_for(SHELL_READS).await?;
    guest.shell("dmesg -n 1").await?;

    let after = guest.assert_registered().await?;
    ensure!(
        after.guest_status().generation != before.guest_status().generation && after.modules == 0,
        "{before:?} {after:?}"
    );
    let gone = guest.update(&[(KEY, KeyOp::Inc)]).await;
    let gone = gone.expect_err("its module went with the old kernel");
    ensure!(gone.code() == Code::NotFound, "{gone:?}");
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    for (op, taken) in [(KeyOp::Inc, "1"), (KeyOp::Dec, "0")] {
        guest.update(&[(KEY, op)]).await?;
        let seen = guest.shell(&format!("cat {SEEN}/unlikely")).await?;
        ensure!(seen == taken, "{op:?}: the new kernel sees {seen}");
    }
    guest.assert_no_warnings().await
}

/// Checks a hibernation that stops before its last step (pm_test) and returns: the same kernel
/// registers again with its counts.
#[tokio::test]
async fn a_hibernation_that_does_not_happen_keeps_holds_and_quarantines() -> Result<()> {
    const FOREIGN: &str = "/sys/kernel/debug/patchbay_test/keys/array_key_0/foreign";
    const QUARANTINED: &str = "patchbay_test:array_keys[0]";
    let Some(mut guest) = Guest::with_test_keys(2).await? else {
        return Ok(());
    };
    let before = guest.assert_registered().await?;
    guest.shell(&format!("echo 1 >{FOREIGN}")).await?;
    let loss = guest.update(&[(QUARANTINED, KeyOp::Inc)]).await;
    ensure!(loss.is_err_and(|loss| loss.code() == Code::DataLoss));
    guest.shell(&format!("echo 0 >{FOREIGN}")).await?;
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    let watch = WatchStaticKeysRequest::default();
    let mut changes = guest
        .static_keys()
        .watch_static_keys(watch)
        .await?
        .into_inner();
    let brief = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: "patchbay_test:many_key".to_owned(),
            op: KeyOp::Inc.into(),
            ..Default::default()
        }],
        ttl: Some(std::time::Duration::from_secs(1).try_into()?),
        ..Default::default()
    };
    guest.static_keys().update_static_keys(brief).await?;

    guest
        .shell("echo core >/sys/power/pm_test && echo disk >/sys/power/state")
        .await?;

    // A hold that expires during the hibernation is released afterwards, when the guest has
    // registered the key's module again. The guest registers modules last.
    loop {
        let change = changes.message().await?.context("the watch ended")?;
        let given_back = |name: &str, by: &str| name == "patchbay_test:many_key" && by == "monitor";
        let mut events = change.events.iter();
        if events.any(|event| given_back(&event.name, &event.principal)) {
            break;
        }
    }
    // On a slow machine the hold expires before the hibernation begins, so this waits for the
    // registration.
    until(async || {
        let after = guest.describe().await?;
        let registered = after.guest_status().registration() == RegistrationState::Registered;
        Ok(registered
            && after.guest_status().generation != before.guest_status().generation
            && (after.modules, after.keys) == (before.modules, before.keys))
    })
    .await?;
    let seen = guest.seen("many_key").await?;
    ensure!(seen.raw == 0 && !seen.unlikely, "{seen:?}");
    let holds = guest
        .static_keys()
        .list_holds(ListHoldsRequest::default())
        .await?
        .into_inner()
        .holds;
    ensure!(
        holds.len() == 1 && holds[0].key == KEY && holds[0].references == 1,
        "{holds:?}"
    );
    ensure!(guest.key(QUARANTINED).await?.quarantine.is_some());
    let seen = guest.seen("ref_key").await?;
    ensure!(seen.raw == 1 && seen.unlikely, "{seen:?}");
    // Force is not needed, because the reference is the client's own.
    guest.update(&[(KEY, KeyOp::Dec)]).await?;
    let seen = guest.seen("ref_key").await?;
    ensure!(seen.raw == 0 && !seen.unlikely, "{seen:?}");
    guest.assert_no_warnings().await
}

/// Fails unless the branch reads as `taken` on each of these CPUs.
async fn assert_seen_by(guest: &mut Guest, cpus: u32, taken: &str) -> Result<()> {
    let command = format!(
        "for cpu in $(seq 0 {}); do taskset -c $cpu cat {SEEN}/unlikely; done",
        cpus - 1
    );
    let seen = guest.shell(&command).await?;
    ensure!(
        seen.lines().count() == cpus as usize && seen.lines().all(|cpu| cpu == taken),
        "{taken} expected on each of {cpus} CPUs:\n{seen}"
    );
    Ok(())
}

#[tokio::test]
async fn more_vcpus_than_cores_all_see_a_flip() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(8).await? else {
        return Ok(());
    };
    ensure!(guest.shell("nproc").await? == "8");
    for (op, taken) in [(KeyOp::Inc, "1"), (KeyOp::Dec, "0")] {
        guest.update(&[(KEY, op)]).await?;
        assert_seen_by(&mut guest, 8, taken).await?;
    }
    guest.assert_no_warnings().await
}

/// Checks that CPUs that go offline and come online see the flips. With page-table isolation, a
/// vCPU may be stopped while it uses the page tables of a process, which map almost nothing of the
/// kernel. An offline CPU halts during the flips and must see them when it comes online again.
#[tokio::test]
async fn cpus_come_and_go_and_see_the_flips() -> Result<()> {
    let Some((_environment, builder)) = environment_and_guest() else {
        return Ok(());
    };
    let mut guest = builder.vcpus(4).command_line("pti=on").boot().await?;
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    let description = guest.assert_registered().await?;
    ensure!(description.page_table_isolation, "{description:?}");
    // These loops leave user mode only for the timer.
    let spin = "for i in 1 2; do (while :; do :; done) & done";
    guest.shell(spin).await?;

    let online = "/sys/devices/system/cpu/cpu";
    for (op, cpu, taken) in [(KeyOp::Inc, 1, "1"), (KeyOp::Dec, 3, "0")] {
        let off = format!("echo 0 >{online}{cpu}/online && nproc");
        ensure!(guest.shell(&off).await? == "3");
        guest.update(&[(KEY, op)]).await?;
        let seen = guest.shell(&format!("cat {SEEN}/unlikely")).await?;
        ensure!(seen == taken, "{op:?} with CPU {cpu} off: {seen}");
        let on = format!("echo 1 >{online}{cpu}/online && nproc");
        ensure!(guest.shell(&on).await? == "4");
        assert_seen_by(&mut guest, 4, taken).await?;
    }

    // The guest takes CPUs offline and online while the host flips. This loop is not a job of the
    // shell, because `kill $(jobs -p)` below must end only the spinning loops.
    let storm = format!(
        "((for cpu in 3 2 1; do \
         echo 0 >{online}$cpu/online; echo 1 >{online}$cpu/online; \
         done; echo done >/tmp/storm) >/dev/null 2>&1 &)"
    );
    guest.shell(&storm).await?;
    let mut flips = 0;
    while guest.shell("cat /tmp/storm 2>/dev/null || true").await? != "done" {
        for (op, taken) in [(KeyOp::Inc, "1"), (KeyOp::Dec, "0")] {
            guest.update(&[(KEY, op)]).await?;
            let seen = guest.shell(&format!("cat {SEEN}/unlikely")).await?;
            ensure!(seen == taken, "{op:?} amid the storm: {seen}");
            flips += 1;
        }
    }
    ensure!(flips > 0, "the storm was over before a flip");
    guest.shell("kill $(jobs -p)").await?;
    ensure!(guest.shell("nproc").await? == "4");
    assert_seen_by(&mut guest, 4, "0").await?;
    guest.assert_no_warnings().await
}
