// SPDX-License-Identifier: Apache-2.0
//! Runs `patchbay attach` for the guest of another monitor.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use patchbay_testing::connect;
use tokio::process::{Child, Command};

/// Timeout for the start. It is long, because an emulated computer is slow.
const PATIENCE: Duration = Duration::from_secs(480);

/// A running attacher, which ends when this is dropped.
#[derive(Debug)]
pub struct Attacher(Child);

impl Attacher {
    /// Starts an attacher with its files in a folder, and waits until it serves the API.
    pub async fn start(
        cli: &Path,
        folder: &Path,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Result<Self> {
        let process = Command::new(cli)
            .arg("attach")
            .args(arguments)
            .arg("--api-socket")
            .arg(socket(folder))
            .stderr(std::fs::File::create(log_file(folder))?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} cannot be started", cli.display()))?;
        let mut attacher = Self(process);
        let served = async {
            // There is no event for a socket that becomes connectable, so this polls.
            while connect(&socket(folder)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            _ = attacher.0.wait() => anyhow::bail!("the attacher has ended: {}", log(folder)),
            served = tokio::time::timeout(PATIENCE, served) => {
                served.context("the attacher serves no API")?;
            }
        }
        Ok(attacher)
    }

    /// Returns the attacher's process id.
    pub fn pid(&self) -> Option<u32> {
        self.0.id()
    }

    /// Ends the attacher.
    pub async fn kill(mut self) -> Result<()> {
        Ok(self.0.kill().await?)
    }
}

/// Returns the API socket of an attacher.
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("api.sock")
}

fn log_file(folder: &Path) -> PathBuf {
    folder.join("attacher.log")
}

/// Returns the output of an attacher.
pub fn log(folder: &Path) -> String {
    std::fs::read_to_string(log_file(folder)).unwrap_or_default()
}
