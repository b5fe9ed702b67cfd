// SPDX-License-Identifier: Apache-2.0
//! Runs a guest in QEMU, with its QMP socket.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Command;

use crate::Foreign;

/// Timeout for QEMU's answers. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(480);

/// A guest of QEMU, and a client of its QMP socket.
#[derive(Debug)]
pub struct Qemu {
    pub guest: Foreign,
    socket: PathBuf,
    qmp: Option<BufReader<UnixStream>>,
}

impl Qemu {
    /// Starts QEMU without waiting for the guest, whose init is the one in `initramfs`. `options`
    /// choose the accelerator, the memory and further devices, and `append` adds words to the
    /// kernel's command line. Returns `None` if QEMU is not installed.
    pub fn start(
        kernel: &Path,
        initramfs: &Path,
        append: &str,
        options: &[&str],
    ) -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let qmp = folder.path().join("qmp");
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-serial", "stdio", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", qmp.display()))
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", &format!("console=ttyS0 panic=-1 {append}")])
            .args(options);
        let target = [
            "qemu",
            "--qmp",
            &qmp.display().to_string(),
            "--name",
            "qemu",
        ];
        let target = target.map(str::to_owned).to_vec();
        let guest = match Foreign::start(command, folder) {
            Err(error) if is_missing(&error) => return Ok(None),
            guest => guest?.named(target),
        };
        Ok(Some(Self {
            guest,
            socket: qmp,
            qmp: None,
        }))
    }

    /// Runs a command of QMP and returns QEMU's answer. The guest must have booted, and no other
    /// client may be connected to the QMP socket.
    pub async fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        if self.qmp.is_none() {
            let stream = UnixStream::connect(&self.socket).await?;
            let mut qmp = BufReader::new(stream);
            // QMP requires this command before any other.
            tokio::time::timeout(PATIENCE, answer(&mut qmp, "qmp_capabilities", &json!({})))
                .await
                .context("QEMU does not answer qmp_capabilities")??;
            self.qmp = Some(qmp);
        }
        let qmp = self.qmp.as_mut().context("connected above")?;
        tokio::time::timeout(PATIENCE, answer(qmp, name, &arguments))
            .await
            .with_context(|| format!("QEMU does not answer {name}"))?
    }
}

/// Returns whether there is no such program.
fn is_missing(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Sends a command of QMP and waits for its answer. Skips events and the greeting.
async fn answer(qmp: &mut BufReader<UnixStream>, name: &str, arguments: &Value) -> Result<Value> {
    let request = format!("{}\n", json!({"execute": name, "arguments": arguments}));
    qmp.write_all(request.as_bytes()).await?;
    loop {
        let mut line = String::new();
        qmp.read_line(&mut line).await?;
        ensure!(line.ends_with('\n'), "QEMU closed its QMP socket on {name}");
        let mut message: Value = serde_json::from_str(&line)?;
        ensure!(
            message.get("error").is_none(),
            "QEMU refuses {name}: {message}"
        );
        if let Some(answer) = message.get_mut("return") {
            return Ok(answer.take());
        }
    }
}
