// SPDX-License-Identifier: Apache-2.0
//! Tests that a copy of a Linux guest runs on from the moment of its snapshot: its clocks, timers,
//! disks and sockets, and the holds on its keys.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use patchbay_proto::v1::static_keys_service_client::StaticKeysServiceClient;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{
    DescribeAgentRequest, DescribeGuestRequest, DescribeGuestResponse, Hold, KeyOp,
    ListHoldsRequest, ReleaseHoldsRequest, VerifyStaticKeysRequest, VerifyStaticKeysResponse,
};
use patchbay_tests::{Environment, Guest, Shell, TEST_KEYS, connect, until};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tonic::transport::Channel;

const KEY: &str = "patchbay_test:ref_key";
const COUNT: &str = "cat /tmp/count";
pub const NO_REPORTS: &str =
    "! dmesg | grep -E 'BUG:|WARNING:|Oops|detected stall|lockup|blocked for more'";
const READ_DISK: &str = "dd if=/dev/vda bs=64k iflag=direct 2>/dev/null | sha256sum";

/// Runs a command of `patchbay` that must succeed.
pub async fn patchbay(cli: &Path, socket: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(cli)
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .await?;
    ensure!(output.status.success(), "{arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the holds on a guest's keys.
pub async fn holds(channel: &Channel) -> Result<Vec<Hold>> {
    let mut keys = StaticKeysServiceClient::new(channel.clone());
    let holds = keys.list_holds(ListHoldsRequest::default()).await?;
    Ok(holds.into_inner().holds)
}

async fn describe(channel: &Channel) -> Result<DescribeGuestResponse> {
    let mut guest = GuestServiceClient::new(channel.clone());
    let description = guest.describe_guest(DescribeGuestRequest::default());
    Ok(description.await?.into_inner())
}

/// Compares all sites with the counts of their keys.
pub async fn verify(channel: &Channel) -> Result<VerifyStaticKeysResponse> {
    let mut keys = StaticKeysServiceClient::new(channel.clone());
    let verified = keys.verify_static_keys(VerifyStaticKeysRequest::default());
    Ok(verified.await?.into_inner())
}

/// A guest that was started from a snapshot; killed when dropped.
pub struct Restored {
    process: Child,
    pub channel: Channel,
    shell: Shell,
    log: PathBuf,
}

impl Restored {
    /// Starts a copy with `patchbay guest run --from`.
    pub async fn start(cli: &Path, folder: &Path, name: &str, arguments: &[&str]) -> Result<Self> {
        let socket = folder.join(format!("{name}.sock"));
        let log = folder.join(format!("{name}.log"));
        let file = std::fs::File::create(&log)?;
        let mut process = Command::new(cli)
            .arg("--socket")
            .arg(&socket)
            .args(["guest", "run", "--name", name, "--from", "snapshot"])
            .args(["--console", "api", "--allow-guarded"])
            .args(["--audit-log", &format!("{name}.audit")])
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .kill_on_drop(true)
            .spawn()?;
        let mut channel = None;
        until(async || {
            channel = connect(&socket).await.ok();
            let said = || std::fs::read_to_string(&log).unwrap_or_default();
            ensure!(process.try_wait()?.is_none(), "it has ended: {}", said());
            Ok(channel.is_some())
        })
        .await?;
        let channel = channel.context("until() connected")?;
        let shell = Shell::attach(channel.clone()).await?;
        Ok(Self {
            process,
            channel,
            shell,
            log,
        })
    }

    /// Runs a command in the copy, which must succeed.
    pub async fn shell(&mut self, command: &str) -> Result<String> {
        let ran = self.shell.run(command).await;
        let (status, output) = ran.with_context(|| {
            let monitor = std::fs::read_to_string(&self.log).unwrap_or_default();
            format!("`{command}` in the copy; its monitor's log:\n{monitor}")
        })?;
        ensure!(status == 0, "`{command}` ended with {status}: {output}");
        Ok(output)
    }

    pub async fn end(mut self) -> Result<ExitStatus> {
        self.shell.type_line("reboot -f").await?;
        Ok(self.process.wait().await?)
    }
}

#[tokio::test]
async fn a_copy_of_a_busy_guest_runs_on_with_its_holds() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let path = folder.path();
    let content: Vec<u8> = (0..4_u32 << 20).map(|at| (at % 251) as u8).collect();
    std::fs::write(path.join("disk"), content)?;
    let disk = format!("--disk={},readonly", path.join("disk").display());
    let mut guest = Guest::builder(&environment)
        .vcpus(2)
        .agent()
        .argument("--allow-guarded")
        .argument(&disk)
        .boot()
        .await?;
    guest.wait_for_agent().await?;
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    guest.assert_registered().await?;
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    let held = holds(&guest.channel()).await?;
    ensure!(held.len() == 1 && held[0].key == KEY, "{held:?}");
    let on_disk = guest.shell(READ_DISK).await?;
    // One process counts, and another one always waits for the disk.
    let load = format!(
        "(i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; done) & \
         (while :; do {READ_DISK} >/dev/null; done) & until {COUNT} 2>/dev/null; do :; done"
    );
    guest.shell(&load).await?;

    let before: u64 = guest.shell(COUNT).await?.parse()?;
    let snapshot = path.join("snapshot");
    let target = snapshot.to_str().context("a UTF-8 path")?;
    let said = patchbay(
        &environment.cli,
        guest.socket(),
        &["guest", "snapshot", target],
    )
    .await?;
    ensure!(said.contains("MiB written for 256 MiB"), "{said}");
    // The guest that was saved runs on.
    let after: u64 = guest.shell(COUNT).await?.parse()?;
    ensure!(after > before, "{before} {after}");

    let vsock = format!("--vsock={}", path.join("copy.vsock").display());
    let mut copy = Restored::start(&environment.cli, path, "copy", &[&disk, &vsock]).await?;
    let first: u64 = copy.shell(COUNT).await?.parse()?;
    ensure!(
        first >= before,
        "the copy counts from {first}, not {before}"
    );
    // Both a timer and the copy's clock work.
    copy.shell("sleep 1").await?;
    let second: u64 = copy.shell(COUNT).await?.parse()?;
    ensure!(second > first, "the copy stands still at {first}");
    ensure!(copy.shell("nproc").await? == "2");
    for cpu in ["0", "1"] {
        copy.shell(&format!("taskset -c {cpu} sleep 0.1")).await?;
    }
    ensure!(copy.shell(READ_DISK).await? == on_disk);
    let random = "dd if=/dev/hwrng bs=512 count=1 2>/dev/null | wc -c";
    ensure!(copy.shell(random).await? == "512");

    let (origin, description) = (guest.describe().await?, describe(&copy.channel).await?);
    ensure!(
        description.guest_status().guest == "copy",
        "{description:?}"
    );
    ensure!(
        (description.keys, description.modules) == (origin.keys, origin.modules),
        "{description:?} of {origin:?}"
    );
    let verified = verify(&copy.channel).await?;
    ensure!(
        verified.keys == description.keys && verified.sites > 0 && verified.torn_total == 0,
        "{verified:?}"
    );
    ensure!(verified.incarnation != verify(&guest.channel()).await?.incarnation);
    ensure!(holds(&copy.channel).await? == held);
    let seen = format!("cat {TEST_KEYS}/ref_key/raw {TEST_KEYS}/ref_key/unlikely");
    ensure!(copy.shell(&seen).await? == "1\n1");
    let audit = std::fs::read_to_string(path.join("copy.audit"))?;
    ensure!(audit.contains(r#""holds":1,"claims":0"#), "{audit}");

    // The agent has lost its connection and makes another one.
    let mut tracepoints = TracepointsServiceClient::new(copy.channel.clone());
    until(async || {
        let agent = tracepoints.describe_agent(DescribeAgentRequest::default());
        Ok(agent.await?.into_inner().absent.is_empty())
    })
    .await?;

    // The copy's hold ends in the copy alone.
    let release = ReleaseHoldsRequest {
        ids: held.iter().map(|hold| hold.id.clone()).collect(),
        ..Default::default()
    };
    let mut keys = StaticKeysServiceClient::new(copy.channel.clone());
    keys.release_holds(release).await?;
    ensure!(copy.shell(&seen).await? == "0\n0");
    ensure!(guest.shell(&seen).await? == "1\n1");
    ensure!(holds(&guest.channel()).await? == held);
    copy.shell(NO_REPORTS).await?;
    guest.assert_no_warnings().await?;
    ensure!(copy.end().await?.success());
    guest.power_off().await?;
    Ok(())
}
