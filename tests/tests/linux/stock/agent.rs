// SPDX-License-Identifier: Apache-2.0
//! Tests the agent in guests of other monitors: of QEMU over vhost-vsock, and of Firecracker over
//! its own vsock device, which is a Unix socket of the host.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::trace_field::Value;
use patchbay_proto::v1::tracepoints_service_client::TracepointsServiceClient;
use patchbay_proto::v1::{StreamTracepointEventsRequest, TraceEvent};
use patchbay_tests::{
    AGENT_INSTANCE, Environment, EventStream, Foreign, StockKernel, connect, programs, skip, until,
};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::BINFMT;

/// The guest's drivers for vsock, in the order in which they can be loaded.
const MODULES: [&str; 4] = [
    "virtio_mmio",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
];
const EXEC: &str = "sched:sched_process_exec";

/// A guest whose attacher the CLI calls.
struct Lab {
    guest: Foreign,
    kernel: StockKernel,
}

impl Lab {
    /// Runs the CLI, and returns whether it succeeded and its output.
    async fn patchbay(&self, words: &[&str]) -> Result<(bool, String)> {
        let mut command = Command::new(&self.kernel.cli);
        command.arg("--socket").arg(self.guest.socket());
        // The timeout is long, because an emulated computer is slow.
        command.args(["--timeout", "2m"]).args(words);
        let output = command.output().await?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        Ok((output.status.success(), text))
    }

    async fn ok(&self, words: &[&str]) -> Result<String> {
        let (success, text) = self.patchbay(words).await?;
        ensure!(
            success,
            "patchbay {words:?}: {text}{}",
            self.guest.attacher_log()
        );
        Ok(text)
    }

    /// Runs a program with this file name, which appears in its exec event.
    async fn run(&mut self, name: &str) -> Result<()> {
        let line = format!("ln -s /bin/busybox /tmp/{name}; /tmp/{name} 2>/dev/null");
        self.guest.shell(&line).await.map(drop)
    }
}

fn program(event: &TraceEvent) -> Option<&str> {
    let field = event.fields.iter().find(|field| field.name == "filename")?;
    match &field.value {
        Some(Value::Text(text)) => text.strip_prefix("/tmp/"),
        _ => None,
    }
}

/// A kernel, and an initramfs with the agent and its drivers.
struct Prepared {
    kernel: StockKernel,
    initramfs: PathBuf,
    folder: tempfile::TempDir,
}

impl Prepared {
    /// Returns `None` if there is no kernel or no agent.
    fn make() -> Result<Option<Self>> {
        let Some((kernel, agent)) = StockKernel::named("6_12").zip(Environment::agent()) else {
            return Ok(None);
        };
        let folder = tempfile::tempdir()?;
        let initramfs = folder.path().join("initramfs");
        let modules = MODULES.map(|name| {
            let file = kernel.modules.join("kernel").join(format!("{name}.ko"));
            (format!("{name}.ko"), file)
        });
        let mut files = vec![("bin/patchbay-agent", 0o755, agent.as_path())];
        files.extend(
            modules
                .iter()
                .map(|(name, file)| (name.as_str(), 0o644, file.as_path())),
        );
        kernel.initramfs_with(&files, &initramfs)?;
        Ok(Some(Self {
            kernel,
            initramfs,
            folder,
        }))
    }
}

#[tokio::test]
async fn the_agent_of_a_guest_of_qemu_traces() -> Result<()> {
    let Some(prepared) = Prepared::make()? else {
        return Ok(());
    };
    if !Path::new("/dev/vhost-vsock").exists() {
        skip("there is no /dev/vhost-vsock; run `modprobe vhost_vsock`");
        return Ok(());
    }
    // The CIDs 0 to 2 are reserved.
    let cid = 3 + std::process::id();
    let device = format!("vhost-vsock-pci,guest-cid={cid}");
    let options = ["-device", &device];
    let guest = Foreign::qemu(&prepared.kernel, &prepared.initramfs, &options)?;
    traces(guest, prepared.kernel).await
}

#[tokio::test]
async fn the_agent_of_a_guest_of_firecracker_traces() -> Result<()> {
    let Some(prepared) = Prepared::make()? else {
        return Ok(());
    };
    let Some(program) = programs::program("firecracker", prepared.folder.path()) else {
        return Ok(());
    };
    let guest = Foreign::firecracker(&program, &prepared.kernel, &prepared.initramfs)?;
    traces(guest, prepared.kernel).await
}

/// Checks that the agent arms, fires, parks and streams events as in a guest of our monitor.
async fn traces(mut guest: Foreign, kernel: StockKernel) -> Result<()> {
    guest.wait_for_shell().await?;
    guest.attach(&kernel.cli, &[]).await?;
    let mut lab = Lab { guest, kernel };

    let (armed, text) = lab.patchbay(&["trace", "arm", EXEC]).await?;
    ensure!(!armed && text.contains("agent"), "{text}");
    let load = MODULES
        .map(|name| format!("insmod /{name}.ko"))
        .join(" && ");
    lab.guest
        .shell(&format!(
            "{load} && patchbay-agent </dev/null >/dev/kmsg 2>&1 &"
        ))
        .await?;
    until(async || Ok(lab.patchbay(&["trace", "agent"]).await?.0)).await?;
    println!("{}", lab.ok(&["trace", "agent"]).await?);

    lab.ok(&["trace", "arm", EXEC]).await?;
    let channel = connect(&lab.guest.socket()).await?;
    let request = StreamTracepointEventsRequest::default();
    let mut events =
        EventStream::open(&mut TracepointsServiceClient::new(channel), request).await?;
    // Each round runs one program while the event is parked, and one while it fires.
    for round in 0..3 {
        lab.run(&format!("parked-{round}")).await?;
        lab.ok(&["trace", "fire", EXEC]).await?;
        let fired = format!("fired-{round}");
        lab.run(&fired).await?;
        let seen = events.until(|event| program(event) == Some(&fired)).await?;
        let names: Vec<_> = seen.iter().filter_map(program).collect();
        ensure!(
            !names.iter().any(|name| name.starts_with("parked")),
            "a parked event fired: {names:?}"
        );
        lab.ok(&["trace", "park", EXEC]).await?;
    }
    drop(events);
    follows_debug_lines(&mut lab).await?;
    lab.ok(&["trace", "disarm", EXEC]).await?;
    let left = lab
        .guest
        .shell(&format!("cat {AGENT_INSTANCE}/set_event"))
        .await?;
    ensure!(!left.contains("sched"), "the probe is left: {left}");
    Ok(())
}

/// Checks that `debug on --follow` reads lines of pr_debug() from the kernel's log. The attacher
/// has no access to the guest's console, which belongs to the monitor.
async fn follows_debug_lines(lab: &mut Lab) -> Result<()> {
    lab.guest
        .shell("insmod /lib/modules/*-binfmt_misc.ko; mount -t binfmt_misc none /proc/sys/fs/binfmt_misc")
        .await?;
    let mut follow = Command::new(&lab.kernel.cli)
        .arg("--socket")
        .arg(lab.guest.socket())
        .args(["--timeout", "10m"])
        .args(["debug", "on", "module binfmt_misc", "--follow"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = BufReader::new(follow.stdout.take().context("piped")?).lines();
    while !lines
        .next_line()
        .await?
        .context("it ended before the change")?
        .contains("keys changed")
    {}
    lab.guest.shell(BINFMT.command).await?;
    while !lines
        .next_line()
        .await?
        .context("it ended before the line")?
        .contains(BINFMT.printed)
    {}
    Ok(())
}
