// SPDX-License-Identifier: Apache-2.0
//! Runs a guest in QEMU: its console, its QMP socket, and the attacher that serves its API.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::StockKernel;
use crate::attacher::{self, Attacher};
use crate::serial::SerialConsole;

/// Timeout for QEMU's answers. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(480);

/// A running QEMU and its attacher; both end when this is dropped.
#[derive(Debug)]
pub struct Qemu {
    _process: Child,
    console: SerialConsole,
    qmp: Option<BufReader<UnixStream>>,
    attacher: Option<Attacher>,
    folder: tempfile::TempDir,
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
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut process = match command.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            process => process?,
        };
        let console = SerialConsole::of(&mut process)?;
        Ok(Some(Self {
            _process: process,
            console,
            qmp: None,
            attacher: None,
            folder,
        }))
    }

    /// Starts QEMU with KVM, 1 vCPU and a kernel of a distribution.
    pub fn stock(kernel: &StockKernel, initramfs: &Path, devices: &[&str]) -> Result<Self> {
        let machine = ["-accel", "kvm", "-cpu", "host", "-smp", "1", "-m", "512M"];
        let memory = [
            "-machine",
            "q35,memory-backend=ram",
            "-object",
            "memory-backend-memfd,id=ram,size=512M,share=on",
        ];
        let options = [&machine[..], &memory, devices].concat();
        Self::start(&kernel.kernel, initramfs, "quiet noxsave", &options)?
            .context("there is no qemu-system-x86_64; install qemu-system-x86")
    }

    /// Waits until the guest's shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        self.console.wait_for_shell().await
    }

    /// Runs a command of QMP and returns QEMU's answer. The guest must have booted, and no other
    /// client may be connected to the QMP socket.
    pub async fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        if self.qmp.is_none() {
            let stream = UnixStream::connect(self.folder.path().join("qmp")).await?;
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

    /// Ends the attacher.
    pub async fn detach(&mut self) -> Result<()> {
        if let Some(attacher) = self.attacher.take() {
            attacher.kill().await?;
        }
        Ok(())
    }

    /// Attaches to the guest, with additional options. An earlier attacher ends first.
    pub async fn attach(&mut self, cli: &Path, options: &[&str]) -> Result<()> {
        self.detach().await?;
        let qmp = self.folder.path().join("qmp").display().to_string();
        let arguments = [&["qemu", "--qmp", &qmp, "--name", "qemu"], options].concat();
        self.attacher = Some(Attacher::start(cli, self.folder.path(), arguments).await?);
        Ok(())
    }

    /// Returns the process id of the attacher.
    pub fn attacher_pid(&self) -> Option<u32> {
        self.attacher.as_ref()?.pid()
    }

    /// Returns the attacher's API socket.
    pub fn socket(&self) -> PathBuf {
        attacher::socket(self.folder.path())
    }

    /// Returns the output of the attacher.
    pub fn attacher_log(&self) -> String {
        attacher::log(self.folder.path())
    }

    /// Runs a command in the guest's shell and returns its output.
    pub async fn shell(&mut self, command: &str) -> Result<String> {
        self.console.shell(command).await
    }
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
