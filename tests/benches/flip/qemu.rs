// SPDX-License-Identifier: Apache-2.0
//! Measures QEMU with the same kernel and initramfs, stopped and continued over QMP.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use patchbay_tests::{Environment, SHELL_READS};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};

use crate::figures::Samples;

/// Timeout for the guest's boot and for the answer to a command.
const PATIENCE: Duration = Duration::from_secs(120);

/// Durations of QEMU's commands, from sending one to its answer.
#[derive(Debug, Default)]
pub struct Times {
    pub stop: Samples,
    pub cont: Samples,
    pub both: Samples,
}

struct Qemu {
    _process: Child,
    requests: OwnedWriteHalf,
    answers: tokio::io::Lines<BufReader<OwnedReadHalf>>,
}

/// Measures `stop` and `cont`; `None` if QEMU is not installed.
pub async fn measure(
    environment: &Environment,
    vcpus: u32,
    rounds: usize,
) -> Result<Option<Times>> {
    let folder = tempfile::tempdir()?;
    let Some(mut qemu) = boot(environment, vcpus, folder.path()).await? else {
        return Ok(None);
    };
    let mut times = Times::default();
    for _ in 0..rounds {
        let began = Instant::now();
        qemu.command("stop").await?;
        let stopped = Instant::now();
        qemu.command("cont").await?;
        let continued = Instant::now();
        times.stop.add(stopped - began);
        times.cont.add(continued - stopped);
        times.both.add(continued - began);
        // The guest resumes its work.
        tokio::time::sleep(super::BETWEEN).await;
    }
    Ok(Some(times))
}

async fn boot(
    environment: &Environment,
    vcpus: u32,
    folder: &std::path::Path,
) -> Result<Option<Qemu>> {
    let socket = folder.join("qmp.sock");
    let listener = UnixListener::bind(&socket)?;
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-accel", "kvm", "-cpu", "host", "-M", "q35", "-m", "256"])
        .args(["-smp", &vcpus.to_string(), "-serial", "stdio"])
        .args(["-append", "console=ttyS0 quiet panic=-1 noxsave"])
        .arg("-kernel")
        .arg(&environment.kernel)
        .arg("-initrd")
        .arg(&environment.initramfs)
        .arg("-qmp")
        .arg(format!("unix:{}", socket.display()))
        // Standard input stays open while QEMU runs, because the guest's shell would end with it.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut process = match command.spawn() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        spawned => spawned?,
    };
    let mut console = process.stdout.take().context("the console is piped")?;
    let (stream, _) = tokio::time::timeout(PATIENCE, listener.accept())
        .await
        .context("QEMU does not connect")??;
    let (reader, writer) = stream.into_split();
    let mut qemu = Qemu {
        _process: process,
        requests: writer,
        answers: BufReader::new(reader).lines(),
    };
    // QMP requires this command before any other.
    qemu.command("qmp_capabilities").await?;
    let mut printed = Vec::new();
    let booted = async {
        while !String::from_utf8_lossy(&printed).contains(SHELL_READS) {
            let mut bytes = [0; 4096];
            let length = console.read(&mut bytes).await?;
            ensure!(length > 0, "QEMU's guest ended");
            printed.extend_from_slice(&bytes[..length]);
        }
        Ok(())
    };
    tokio::time::timeout(PATIENCE, booted)
        .await
        .context("QEMU's guest does not boot")??;
    // The rest of the output is read too, so that the guest does not block.
    tokio::spawn(async move { tokio::io::copy(&mut console, &mut tokio::io::sink()).await });
    Ok(Some(qemu))
}

impl Qemu {
    /// Sends a command and waits for its answer; skips events and the greeting.
    async fn command(&mut self, name: &str) -> Result<()> {
        let request = format!("{{\"execute\":\"{name}\"}}\n");
        self.requests.write_all(request.as_bytes()).await?;
        loop {
            let line = tokio::time::timeout(PATIENCE, self.answers.next_line())
                .await
                .with_context(|| format!("QEMU does not answer {name}"))??
                .with_context(|| format!("QEMU ended on {name}"))?;
            let answer: Value = serde_json::from_str(&line)?;
            ensure!(
                answer.get("error").is_none(),
                "QEMU refuses {name}: {answer}"
            );
            if answer.get("return").is_some() {
                return Ok(());
            }
        }
    }
}
