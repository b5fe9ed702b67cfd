// SPDX-License-Identifier: Apache-2.0
//! Tests that Linux boots by every boot protocol that the monitor offers, registers its keys, takes
//! a branch that the host has flipped, and powers off.

use anyhow::{Result, ensure};
use patchbay_proto::v1::{DescribeGuestResponse, KeyOp, RegistrationState};
use patchbay_tests::{Environment, Guest, GuestBuilder};
use tonic::Code;

/// Returns whether the guest takes the branch in getppid(), which every new shell calls.
async fn branch_taken(guest: &mut Guest) -> Result<bool> {
    guest.shell("dmesg -c >/dev/null; sh -c :").await?;
    Ok(guest.shell("dmesg").await?.contains("I am the true branch"))
}

/// Boots, flips a key on and off, and powers off. Returns the monitor's description of the guest.
async fn boot_and_flip(builder: GuestBuilder, vcpus: u32) -> Result<DescribeGuestResponse> {
    let mut guest = builder.vcpus(vcpus).boot().await?;
    let description = guest.assert_registered().await?;
    ensure!(
        description.vcpus == vcpus && description.keys > 100 && description.sites > 500,
        "{description:?}"
    );
    ensure!(guest.shell("nproc").await? == vcpus.to_string());
    guest.assert_no_warnings().await?;

    ensure!(!branch_taken(&mut guest).await?, "taken before the flip");
    guest.update(&[("getppid_key", KeyOp::Inc)]).await?;
    ensure!(branch_taken(&mut guest).await?, "not taken after the flip");
    guest.update(&[("getppid_key", KeyOp::Dec)]).await?;
    ensure!(
        !branch_taken(&mut guest).await?,
        "taken after the flip back"
    );

    guest.assert_no_warnings().await?;
    let status = guest.power_off().await?;
    ensure!(status.success(), "the monitor ended with {status}");
    Ok(description)
}

macro_rules! boots {
    ($($name:ident: $vcpus:literal, |$environment:ident, $builder:ident| $change:expr;)*) => {$(
        #[tokio::test]
        async fn $name() -> Result<()> {
            let Some($environment) = Environment::linux_guest() else { return Ok(()) };
            let $builder = Guest::builder(&$environment);
            boot_and_flip($change, $vcpus).await.map(drop)
        }
    )*};
}

boots! {
    bzimage_with_1_vcpu: 1, |environment, builder| builder;
    bzimage_with_2_vcpus: 2, |environment, builder| builder;
    bzimage_with_4_vcpus: 4, |environment, builder| builder;
    elf_by_the_64_bit_protocol: 1, |environment, builder| {
        builder.kernel(&environment.vmlinux).argument("--boot-protocol=linux")
    };
    elf_by_pvh: 2, |environment, builder| {
        builder.kernel(&environment.vmlinux).argument("--boot-protocol=pvh")
    };
}

#[tokio::test]
async fn with_kaslr_and_page_table_isolation() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let hardened = Guest::builder(&environment).command_line("pti=on");
    let description = boot_and_flip(hardened, 2).await?;
    ensure!(
        description.kaslr && description.page_table_isolation,
        "{description:?}"
    );
    Ok(())
}

#[tokio::test]
async fn without_kaslr_and_page_table_isolation() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let plain = Guest::builder(&environment).command_line("nokaslr pti=off");
    let description = boot_and_flip(plain, 1).await?;
    ensure!(
        !description.kaslr && !description.page_table_isolation,
        "{description:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_kernel_without_the_series_boots_and_its_keys_are_unknown() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let Some(kernel) = environment.unpatched_kernel.clone() else {
        patchbay_tests::skip("PATCHBAY_TEST_UNPATCHED_KERNEL is not set");
        return Ok(());
    };
    let mut guest = Guest::builder(&environment).kernel(&kernel).boot().await?;
    ensure!(guest.describe().await?.guest_status().registration() == RegistrationState::Absent);
    let refusal = guest.update(&[("getppid_key", KeyOp::Inc)]).await;
    let refusal = refusal.expect_err("no registration, no keys");
    ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
    for part in ["without CONFIG_KALLSYMS_ALL", "--debug-file", "System.map"] {
        ensure!(
            refusal.message().contains(part),
            "not why the keys were not discovered: {}",
            refusal.message()
        );
    }
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}

/// Checks that neither the end of a background job nor Ctrl-C ends the input of the shell that
/// tests drive.
#[tokio::test]
async fn signals_do_not_end_the_consoles_shell() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let mut guest = Guest::builder(&environment).boot().await?;
    // The first job ends while the shell waits for input from the console. The second job waits for
    // that end and then prints a line.
    guest
        .shell(
            "while grep -q ') R' /proc/$$/stat; do :; done & job=$!\n\
             while grep -q ') [RS]' /proc/$job/stat; do :; done 2>/dev/null && echo it has ended &",
        )
        .await?;
    guest.console().wait_for("it has ended").await?;
    guest.shell("true").await?;

    guest.console().type_line("\u{3}").await?;
    guest.shell("true").await?;
    guest.assert_no_warnings().await
}
