// SPDX-License-Identifier: Apache-2.0
//! Runs a guest with libkrun, a monitor that does not cooperate, and the attacher that serves its
//! API.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result};
use tokio::process::{Child, Command};

use crate::StockKernel;
use crate::attacher::{self, Attacher};
use crate::serial::SerialConsole;

/// A running guest of libkrun and its attacher; both end when this is dropped.
#[derive(Debug)]
pub struct Libkrun {
    process: Child,
    console: SerialConsole,
    attacher: Option<Attacher>,
    folder: tempfile::TempDir,
}

impl Libkrun {
    /// Returns the program that runs a guest with libkrun, or the reason why there is none.
    ///
    /// # Errors
    /// The program is not built.
    pub fn program() -> Result<PathBuf, String> {
        let program = std::env::var_os("PATCHBAY_TEST_LIBKRUN").map(PathBuf::from);
        program.ok_or_else(|| {
            let reason = std::env::var("PATCHBAY_TEST_NO_LIBKRUN");
            reason.unwrap_or_else(|_| "PATCHBAY_TEST_LIBKRUN is not set".to_owned())
        })
    }

    /// Starts a guest with 1 vCPU, 512 MiB and a kernel of a distribution, without waiting for the
    /// guest.
    pub fn stock(program: &Path, kernel: &StockKernel) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let packed = std::fs::read(&kernel.kernel)?;
        let unpacked = patchbay_kernel_image::unpack(&packed)?;
        let vmlinux = folder.path().join("vmlinux");
        std::fs::write(&vmlinux, &unpacked.elf)?;
        let mut process = Command::new(program)
            .args(["1", "512"])
            .arg(&vmlinux)
            .arg("console=ttyS0 panic=-1 quiet noxsave")
            .arg(&kernel.initramfs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
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
        self.process.id().context("libkrun has ended")
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
