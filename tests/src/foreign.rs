// SPDX-License-Identifier: Apache-2.0
//! Runs a guest in a monitor that does not cooperate, and the attacher that serves its API.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::StockKernel;
use crate::attacher::{self, Attacher};
use crate::serial::SerialConsole;

/// A running monitor and the attacher of its guest; both end when this is dropped.
#[derive(Debug)]
pub struct Foreign {
    process: Child,
    console: SerialConsole,
    attacher: Option<Attacher>,
    folder: tempfile::TempDir,
}

impl Foreign {
    /// Returns the program that runs a guest with libkrun, or the reason why there is none.
    ///
    /// # Errors
    /// The program is not built.
    pub fn libkrun_program() -> Result<PathBuf, String> {
        let program = std::env::var_os("PATCHBAY_TEST_LIBKRUN").map(PathBuf::from);
        program.ok_or_else(|| {
            let reason = std::env::var("PATCHBAY_TEST_NO_LIBKRUN");
            reason.unwrap_or_else(|_| "PATCHBAY_TEST_LIBKRUN is not set".to_owned())
        })
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

    fn start(mut command: Command, folder: tempfile::TempDir) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{command:?} cannot be started"))?;
        let console = SerialConsole::of(&mut process)?;
        Ok(Self {
            process,
            console,
            attacher: None,
            folder,
        })
    }

    /// Waits until the guest's shell reads the console.
    pub async fn wait_for_shell(&mut self) -> Result<()> {
        self.console.wait_for_shell().await
    }

    /// Attaches to the guest by its process.
    pub async fn attach(&mut self, cli: &Path) -> Result<()> {
        let pid = self.pid()?.to_string();
        let arguments = ["process", &pid];
        self.attacher = Some(Attacher::start(cli, self.folder.path(), arguments).await?);
        Ok(())
    }

    /// Returns the id of the monitor's process.
    pub fn pid(&self) -> Result<u32> {
        self.process.id().context("the monitor has ended")
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
