// SPDX-License-Identifier: Apache-2.0
//! Tests Debian's kernels with the initrds of initramfs-tools: udev in the initrd loads the
//! drivers, and the root is Debian's on a virtio disk.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{DiscoveryWay, RegistrationState, TableSource};
use patchbay_tests::{Guest, InstalledKernel, SHELL_READS, copy_disk, debugfs};

use super::{DebugLines, lines_of_dynamic_debug, list};

/// pr_debug() lines that each request to the disk executes. Before 6.12 the driver is a module.
const VIRTIO_RING: DebugLines = DebugLines {
    keys: "drivers/virtio/virtio_ring.c/*",
    command: "dd if=/dev/vda of=/dev/null bs=4096 count=1 iflag=direct 2>/dev/null",
    printed: "Added buffer head",
};

#[tokio::test]
async fn debian_6_12_cloud_boots_with_its_initrd() -> Result<()> {
    boots_with_its_initrd("6_12").await
}

#[tokio::test]
async fn debian_6_1_cloud_boots_with_its_initrd() -> Result<()> {
    boots_with_its_initrd("6_1").await
}

/// Tests the kernel for real hardware.
#[tokio::test]
async fn debian_6_12_boots_with_its_initrd() -> Result<()> {
    boots_with_its_initrd("6_12_GENERIC").await
}

/// Tests the kernel for real hardware.
#[tokio::test]
async fn debian_6_1_boots_with_its_initrd() -> Result<()> {
    boots_with_its_initrd("6_1_GENERIC").await
}

async fn boots_with_its_initrd(version: &str) -> Result<()> {
    let Some(kernel) = InstalledKernel::named(version) else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let disk = disk_with_shell(&kernel.disk, folder.path())?;
    let initrd = kernel.initrd.to_str().context("a path in UTF-8")?;
    let mut guest = Guest::builder(&kernel.kernel)
        .monitor(&kernel.monitor)
        .root_disk(&disk)
        .argument("--acpi-devices")
        .argument("--initrd")
        .argument(initrd)
        .argument("--allow-guarded")
        .command_line("init=/shell")
        .boot()
        .await?;
    guest.shell("dmesg -c >/dev/null").await?;
    // The init of initramfs-tools creates this folder, so the initrd was used. The modules come
    // from the initrd, because the disk has none.
    guest.shell("[ -d /run/initramfs ]").await?;
    let modules = guest.shell("cat /proc/modules").await?;
    for driver in ["virtio_mmio", "virtio_blk"] {
        let loaded = modules.lines().any(|line| line.starts_with(driver));
        ensure!(loaded, "udev has not loaded {driver}: {modules}");
    }

    let absent = guest.describe().await?;
    ensure!(absent.guest_status().registration() == RegistrationState::Absent);
    let keys = list(&mut guest, &[]).await?;
    let description = guest.describe().await?;
    let discovery = description.discovery.as_ref().context("discovered")?;
    println!(
        "{}: {} keys, {} sites, {} modules, in {:?}",
        description.guest_status().kernel_release,
        description.keys,
        description.sites,
        description.modules,
        discovery.time,
    );
    ensure!(description.guest_status().table_source() == TableSource::Discovered);
    ensure!(discovery.way() == DiscoveryWay::Image, "{discovery:?}");
    ensure!(keys.len() > 1500, "{} keys", keys.len());

    lines_of_dynamic_debug(&mut guest, &VIRTIO_RING).await?;
    guest.assert_no_warnings().await
}

/// Returns a copy of Debian's disk with an init that only runs a shell on the console.
fn disk_with_shell(disk: &Path, folder: &Path) -> Result<PathBuf> {
    let image = copy_disk(disk, folder)?;
    let shell = folder.join("shell");
    let line = format!("trap : INT; echo \"{SHELL_READS}\"; . /dev/tty");
    let script = format!(
        "#!/bin/sh\nexport PATH=/usr/sbin:/usr/bin:/sbin:/bin\nstty -echo </dev/ttyS0\n\
         setsid --ctty --wait sh -c '{line}' </dev/ttyS0 >/dev/ttyS0 2>&1\n"
    );
    std::fs::write(&shell, script)?;
    debugfs(
        &image,
        &format!(
            "write {} /shell\nset_inode_field /shell mode 0100755\n",
            shell.display()
        ),
    )?;
    Ok(image)
}
