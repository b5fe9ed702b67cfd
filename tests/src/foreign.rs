// SPDX-License-Identifier: Apache-2.0
//! Runs a guest in another monitor, and the attacher that serves its API.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::attacher::{self, Attacher};
use crate::serial::SerialConsole;
use crate::{Qemu, StockKernel};

/// A running monitor and the attacher of its guest; both end when this is dropped.
#[derive(Debug)]
pub struct Foreign {
    /// The id of the monitor's process.
    pub pid: u32,
    _process: Child,
    console: SerialConsole,
    attacher: Option<Attacher>,
    /// The words after `patchbay attach` that name the guest.
    target: Vec<String>,
    folder: tempfile::TempDir,
}

impl Foreign {
    /// Starts a guest of QEMU with KVM, 1 vCPU and a kernel of a distribution, without waiting for
    /// the guest.
    pub fn qemu(kernel: &StockKernel, initramfs: &Path, devices: &[&str]) -> Result<Self> {
        let machine = ["-accel", "kvm", "-cpu", "host", "-smp", "1", "-m", "512M"];
        let memory = [
            "-machine",
            "q35,memory-backend=ram",
            "-object",
            "memory-backend-memfd,id=ram,size=512M,share=on",
        ];
        let options = [&machine[..], &memory, devices].concat();
        let qemu = Qemu::start(&kernel.kernel, initramfs, "quiet noxsave", &options)?;
        let qemu = qemu.context("there is no qemu-system-x86_64; install qemu-system-x86")?;
        Ok(qemu.guest)
    }

    /// Starts a guest of libkrun with 1 vCPU, 512 MiB and a kernel of a distribution, without
    /// waiting for the guest.
    pub fn libkrun(program: &Path, kernel: &StockKernel) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(program);
        command
            .args(["1", "512"])
            .arg(unpacked(kernel, folder.path())?)
            .arg("console=ttyS0 panic=-1 quiet noxsave")
            .arg(&kernel.initramfs);
        Self::start(command, folder)
    }

    /// Starts a guest of Firecracker with 1 vCPU, 512 MiB, a vsock device and a kernel of a
    /// distribution, without waiting for the guest.
    pub fn firecracker(program: &Path, kernel: &StockKernel, initramfs: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = json!({
            "boot-source": {
                "kernel_image_path": unpacked(kernel, folder.path())?,
                "initrd_path": initramfs,
                "boot_args": "console=ttyS0 panic=-1 quiet noxsave pci=off reboot=k",
            },
            "drives": [],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": 512 },
            "vsock": { "guest_cid": 3, "uds_path": folder.path().join("v.sock") },
        });
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string())?;
        let mut command = Command::new(program);
        command.args(["--no-api", "--id", "agent-1", "--config-file"]);
        command.arg(path);
        Self::start(command, folder)
    }

    /// Starts a monitor whose standard input and output are the guest's serial console. The
    /// attacher finds the guest by the monitor's process.
    pub(crate) fn start(mut command: Command, folder: tempfile::TempDir) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{command:?} cannot be started"))?;
        let console = SerialConsole::of(&mut process)?;
        let pid = process.id().context("the monitor has ended")?;
        Ok(Self {
            pid,
            _process: process,
            console,
            attacher: None,
            target: vec!["process".to_owned(), pid.to_string()],
            folder,
        })
    }

    /// Waits until the guest's shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        self.console.wait_for_shell().await
    }

    /// Makes attachers find the guest by these words, instead of by the monitor's process.
    pub(crate) fn named(self, target: Vec<String>) -> Self {
        Self { target, ..self }
    }

    /// Attaches to the guest, with additional options. An earlier attacher ends first.
    pub async fn attach(&mut self, cli: &Path, options: &[&str]) -> Result<()> {
        self.detach().await?;
        let target = self.target.iter().map(String::as_str);
        let words = target.chain(options.iter().copied());
        self.attacher = Some(Attacher::start(cli, self.folder.path(), words).await?);
        Ok(())
    }

    /// Attaches to the guest by the monitor's process alone. An earlier attacher ends first.
    pub async fn attach_to_process(&mut self, cli: &Path) -> Result<()> {
        self.detach().await?;
        let pid = self.pid.to_string();
        let words = ["process", pid.as_str()];
        self.attacher = Some(Attacher::start(cli, self.folder.path(), words).await?);
        Ok(())
    }

    /// Ends the attacher.
    pub async fn detach(&mut self) -> Result<()> {
        if let Some(attacher) = self.attacher.take() {
            attacher.kill().await?;
        }
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

/// Unpacks the kernel to an ELF file in the folder, and returns its path.
fn unpacked(kernel: &StockKernel, folder: &Path) -> Result<PathBuf> {
    let packed = std::fs::read(&kernel.kernel)?;
    let path = folder.join("vmlinux");
    std::fs::write(&path, &patchbay_kernel_image::unpack(&packed)?.elf)?;
    Ok(path)
}
