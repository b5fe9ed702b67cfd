// SPDX-License-Identifier: Apache-2.0
//! Runs a guest in QEMU with KVM, its console, and the attacher that serves its API.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use patchbay_testing::{SHELL_READS, connect};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::StockKernel;

/// Timeout for the boot and for each command. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(600);
/// The mark that is printed after the output of a command.
const END: &str = "end of output";

/// A running QEMU and its attacher; both end when this is dropped.
#[derive(Debug)]
pub struct Qemu {
    _process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    attacher: Option<Child>,
    folder: tempfile::TempDir,
}

impl Qemu {
    /// Starts QEMU without waiting for the guest, whose init is that of the kernel's own initramfs.
    pub fn start(kernel: &StockKernel, initramfs: &Path, devices: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let qmp = folder.path().join("qmp");
        let mut process = Command::new("qemu-system-x86_64")
            .args(["-accel", "kvm", "-cpu", "host", "-smp", "1", "-m", "512M"])
            .args(["-machine", "q35,memory-backend=ram"])
            .args(["-object", "memory-backend-memfd,id=ram,size=512M,share=on"])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-serial", "stdio", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", qmp.display()))
            .arg("-kernel")
            .arg(&kernel.kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet panic=-1 noxsave"])
            .args(devices)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("qemu-system-x86_64 cannot be started; install qemu-system-x86")?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("QEMU has no standard input or output");
        };
        Ok(Self {
            _process: process,
            input,
            output: BufReader::new(output),
            attacher: None,
            folder,
        })
    }

    /// Waits until the guest's shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        self.wait_for(SHELL_READS).await.map(drop)
    }

    /// Attaches to the guest, with additional options. An earlier attacher ends first.
    pub async fn attach(&mut self, cli: &Path, options: &[&str]) -> Result<()> {
        if let Some(mut earlier) = self.attacher.take() {
            earlier.kill().await?;
        }
        let process = Command::new(cli)
            .args(["attach", "qemu", "--qmp"])
            .arg(self.folder.path().join("qmp"))
            .args(["--name", "qemu", "--api-socket"])
            .arg(self.socket())
            .args(options)
            .stderr(std::fs::File::create(self.log())?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} cannot be started", cli.display()))?;
        self.attacher = Some(process);
        let served = async {
            // There is no event for a socket that becomes connectable, so this polls.
            while connect(&self.socket()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, served)
            .await
            .context("the attacher serves no API")
    }

    /// Returns the attacher's API socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("api.sock")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("attacher.log")
    }

    /// Returns the output of the attacher.
    pub fn attacher_log(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Runs a command in the guest's shell and returns its output.
    pub async fn shell(&mut self, command: &str) -> Result<String> {
        // The quotes keep an echo of the line from looking like the mark.
        let line = format!("{command}\necho 'end of'' output'\n");
        self.input.write_all(line.as_bytes()).await?;
        let output = self.wait_for(END).await?;
        Ok(output.replace('\r', "").replace(END, ""))
    }

    async fn wait_for(&mut self, text: &str) -> Result<String> {
        let read = async {
            let mut seen = String::new();
            while !seen.contains(text) {
                let mut bytes = Vec::new();
                if self.output.read_until(b'\n', &mut bytes).await? == 0 {
                    bail!("QEMU ended before its guest printed {text:?}:\n{seen}");
                }
                seen.push_str(&String::from_utf8_lossy(&bytes));
            }
            Ok(seen)
        };
        tokio::time::timeout(PATIENCE, read)
            .await
            .with_context(|| format!("QEMU's guest did not print {text:?}"))?
    }
}
