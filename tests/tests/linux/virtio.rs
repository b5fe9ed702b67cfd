// SPDX-License-Identifier: Apache-2.0
//! Tests that Linux finds the virtio devices and can use them: randomness, disks, and sockets to
//! the host in both directions.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use patchbay_tests::{Environment, Guest, e2fsprogs};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

/// Creates a file with an empty ext4 of 8 MiB.
fn ext4_image(folder: &Path, name: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    std::fs::File::create(&path)?.set_len(8 << 20)?;
    let output = e2fsprogs("mkfs.ext4", &["-q".as_ref(), &path])?;
    ensure!(
        output.status.success(),
        "mkfs.ext4: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(path)
}

#[tokio::test]
async fn randomness_comes_from_the_host() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let mut guest = Guest::builder(&environment).boot().await?;
    ensure!(
        guest
            .shell("cat /sys/class/misc/hw_random/rng_current")
            .await?
            .starts_with("virtio_rng")
    );
    let read = "dd if=/dev/hwrng bs=512 count=1 2>/dev/null | sha256sum";
    let first = guest.shell(read).await?;
    let second = guest.shell(read).await?;
    ensure!(first != second, "twice the same: {first}");
    let size = guest
        .shell("dd if=/dev/hwrng bs=512 count=4 iflag=fullblock 2>/dev/null | wc -c")
        .await?;
    ensure!(size == "2048", "{size} bytes");
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}

#[tokio::test]
async fn a_guest_without_devices_boots() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let mut guest = Guest::builder(&environment)
        .argument("--rng=false")
        .boot()
        .await?;
    let devices = guest.shell("ls /sys/bus/virtio/devices").await?;
    ensure!(devices.is_empty(), "{devices}");
    guest.power_off().await?;
    Ok(())
}

#[tokio::test]
async fn disks_are_mounted_and_what_is_written_stays() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let image = ext4_image(folder.path(), "disk")?;
    let other = ext4_image(folder.path(), "other")?;
    let mut guest = Guest::builder(&environment)
        .argument(&format!("--disk={}", image.display()))
        .argument(&format!("--disk={},readonly", other.display()))
        .boot()
        .await?;
    ensure!(guest.shell("cat /sys/block/vda/serial").await? == "patchbay-disk0");
    ensure!(
        guest
            .shell("cat /sys/block/vda/ro /sys/block/vdb/ro")
            .await?
            == "0\n1"
    );
    ensure!(guest.shell("cat /sys/block/vda/size").await? == "16384");
    guest
        .shell("mkdir /tmp/a /tmp/b && mount -t ext4 /dev/vda /tmp/a")
        .await?;
    guest
        .shell("dd if=/dev/urandom of=/tmp/a/file bs=64k count=48 2>/dev/null")
        .await?;
    let written = guest.shell("sha256sum </tmp/a/file").await?;
    guest.shell("umount /tmp/a").await?;
    guest
        .shell("mount -t ext4 -o ro /dev/vdb /tmp/b && ls /tmp/b/lost+found")
        .await?;
    let (status, _) = guest
        .console()
        .run("dd if=/dev/zero of=/dev/vdb count=1 2>/dev/null")
        .await?;
    ensure!(status != 0, "a read-only disk was written");
    guest.assert_no_warnings().await?;
    guest.power_off().await?;

    // Another guest, whose disk is read-only, finds the data that the first guest has written.
    let mut guest = Guest::builder(&environment)
        .argument(&format!("--disk={},readonly", image.display()))
        .boot()
        .await?;
    guest
        .shell("mkdir /tmp/a && mount -t ext4 -o ro /dev/vda /tmp/a")
        .await?;
    let found = guest.shell("sha256sum </tmp/a/file").await?;
    ensure!(found == written, "{found}, not {written}");
    guest.power_off().await?;
    Ok(())
}

/// Connects to a port of the guest as clients of the unix socket do.
async fn connect(socket: &Path, port: u32) -> Result<BufReader<UnixStream>> {
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    ensure!(answer.starts_with("OK "), "the answer is {answer:?}");
    Ok(stream)
}

#[tokio::test]
async fn the_host_reaches_a_port_of_the_guest() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let socket = folder.path().join("vsock");
    let mut guest = Guest::builder(&environment)
        .argument(&format!("--vsock={}", socket.display()))
        .boot()
        .await?;
    // There is no listener yet, so the connection ends without an answer.
    let mut refused = UnixStream::connect(&socket).await?;
    refused.write_all(b"CONNECT 52\n").await?;
    let mut answer = vec![];
    refused.read_to_end(&mut answer).await?;
    ensure!(answer.is_empty(), "{answer:?}");

    guest
        .shell("vsock_tool echo 52 >/tmp/log 2>&1 & until grep -q listening /tmp/log; do :; done")
        .await?;
    for round in 0..3_u8 {
        let (mut reader, mut writer) = tokio::io::split(connect(&socket, 52).await?);
        // The data exceeds all buffers on the path, so it must be sent and received at the same
        // time.
        let sent: Vec<u8> = (0..600_000_u32)
            .map(|at| round.wrapping_add((at % 251) as u8))
            .collect();
        let copy = sent.clone();
        let sending = tokio::spawn(async move {
            writer.write_all(&copy).await?;
            writer.shutdown().await
        });
        let mut received = vec![];
        reader.read_to_end(&mut received).await?;
        sending.await??;
        ensure!(received == sent, "{} bytes came back", received.len());
    }
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    ensure!(!socket.exists(), "the socket was left behind");
    Ok(())
}

#[tokio::test]
async fn the_guest_reaches_a_program_on_the_host() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let socket = folder.path().join("vsock");
    let mut guest = Guest::builder(&environment)
        .argument(&format!("--vsock={},cid=77", socket.display()))
        .boot()
        .await?;
    let (status, output) = guest
        .console()
        .run("vsock_tool connect 1234 </dev/null 2>&1")
        .await?;
    ensure!(
        status != 0 && output.contains("Connection reset"),
        "with nobody listening: {status} {output}"
    );

    let listener = UnixListener::bind(folder.path().join("vsock_1234"))?;
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        let mut received = vec![];
        stream.read_to_end(&mut received).await?;
        stream.write_all(&received).await?;
        stream.write_all(b"and goodbye").await?;
        anyhow::Ok(received.len())
    });
    let answer = guest
        .shell("seq 30000 | vsock_tool connect 1234 | tail -n 1")
        .await?;
    ensure!(answer == "and goodbye", "{answer}");
    let expected: usize = (1..=30_000_u32).map(|n| n.to_string().len() + 1).sum();
    ensure!(serving.await?? == expected);
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}
