// SPDX-License-Identifier: Apache-2.0
//! Runs commands in a guest through its agent.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use patchbay_ci::overlay::{self, Contents};
use patchbay_ci::session::{End, Session, Sink};
use patchbay_ci::{monitor, programs};
use patchbay_proto::agent::v1::ExecStart;
use tokio::net::UnixListener;

use crate::console::Shell;
use crate::guest::Made;

/// Name of the initramfs in the guest's directory.
pub(crate) const INITRAMFS: &str = "initramfs";

/// Time limit of a command.
const LIMIT: Duration = Duration::from_secs(600);
/// The maximum length of the output that is kept of each stream of a command.
const KEPT: usize = 16 << 20;

/// The outcome of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandOutput {
    /// The exit status; 128 + n if signal n ended the command.
    pub status: i32,
    /// Standard output. Bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error. Bytes that are not UTF-8 are replaced.
    pub stderr: String,
}

impl CommandOutput {
    /// Returns standard output without the last newline if the exit status is 0.
    ///
    /// # Errors
    /// The exit status is not 0; the message contains standard error.
    pub fn success(self) -> Result<String> {
        ensure!(
            self.status == 0,
            "the command ended with status {}: {}{}",
            self.status,
            self.stdout,
            self.stderr
        );
        let text = self.stdout.strip_suffix('\n');
        Ok(text.map_or(self.stdout.clone(), str::to_owned))
    }
}

/// Keeps the beginning of both streams, so that the guest cannot exhaust this process's memory.
#[derive(Debug, Default)]
struct Kept {
    streams: [Vec<u8>; 2],
    exceeded: bool,
}

impl Sink for Kept {
    async fn take(&mut self, descriptor: u32, data: &[u8]) {
        let stream = &mut self.streams[usize::from(descriptor != 1)];
        let room = KEPT.saturating_sub(stream.len());
        self.exceeded |= data.len() > room;
        stream.extend_from_slice(&data[..data.len().min(room)]);
    }
}

/// The host's side of the connection to a guest's agent.
#[derive(Debug)]
pub(crate) struct Commands {
    listener: UnixListener,
    session: Option<Session>,
    environment: Vec<String>,
    /// The kernel finds virtio-mmio devices only by ACPI, not by its command line.
    pub(crate) acpi_devices: bool,
    count: u32,
}

impl Commands {
    /// Makes the initramfs in the guest's directory and listens for the agent.
    pub(crate) fn prepare(made: &Made, folder: &Path) -> Result<Self> {
        let overlay = overlay::make(&Contents {
            initrd: None,
            busybox: &programs::busybox()?,
            agent: &programs::agent(made.agent.as_deref())?,
            copies: made.copies.clone(),
            modules: made.modules.as_deref(),
            directory: Path::new("/"),
        })?;
        let initramfs = folder.join(INITRAMFS);
        std::fs::write(&initramfs, &overlay.bytes)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        Ok(Self {
            listener: monitor::listen(folder)?,
            session: None,
            environment: overlay.environment()?,
            acpi_devices: overlay.acpi_devices,
            count: 0,
        })
    }

    /// Waits for the agent. If the guest's init cannot start the agent, fails with init's message.
    pub(crate) async fn connect(&mut self, console: &mut Shell) -> Result<()> {
        let stream = tokio::select! {
            accepted = self.listener.accept() => accepted?.0,
            complaint = console.read_until("patchbay-init: error: ") => {
                complaint?;
                let why = console.read_until("\n").await?;
                bail!("the guest did not boot: {}", why.trim());
            }
        };
        let (session, _) = Session::start(stream).await?;
        self.session = Some(session);
        Ok(())
    }

    fn session(&mut self) -> Result<&mut Session> {
        self.session
            .as_mut()
            .context("the connection to the agent in the guest ended")
    }

    pub(crate) async fn run(&mut self, command: &[&str]) -> Result<CommandOutput> {
        self.count += 1;
        let start = ExecStart {
            argv: command.iter().map(|&word| word.to_owned()).collect(),
            environment: self.environment.clone(),
            directory: "/".to_owned(),
            mark: self.count.to_string(),
        };
        let mut kept = Kept::default();
        let status = match self.session()?.run(start, LIMIT, &mut kept).await? {
            End::Exited(status) => status,
            End::Signal(signal) => signal.saturating_add(128),
            End::NotStarted(why) => bail!(why),
            End::TimedOut => bail!("it did not end within {} s", LIMIT.as_secs()),
            End::Hung => {
                self.session = None;
                bail!(
                    "it did not end within {} s and could not be killed: the guest hangs",
                    LIMIT.as_secs()
                );
            }
            End::Lost => {
                self.session = None;
                bail!("the connection to the agent in the guest ended");
            }
        };
        ensure!(
            !kept.exceeded,
            "its output exceeds {} MiB; write it to a file and collect that",
            KEPT >> 20
        );
        let [stdout, stderr] = kept
            .streams
            .map(|stream| String::from_utf8_lossy(&stream).into_owned());
        Ok(CommandOutput {
            status,
            stdout,
            stderr,
        })
    }

    pub(crate) async fn collect(&mut self, path: &str, into: &Path) -> Result<usize> {
        std::fs::create_dir_all(into)
            .with_context(|| format!("cannot create {}", into.display()))?;
        self.session()?.fetch(path, into).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_flood_is_not_kept() {
        let mut kept = Kept::default();
        let part = vec![b'x'; KEPT / 4];
        for _ in 0..4 {
            kept.take(1, &part).await;
        }
        assert!(!kept.exceeded);
        kept.take(2, b"other").await;
        kept.take(1, b"y").await;
        assert!(kept.exceeded);
        assert_eq!(kept.streams.map(|stream| stream.len()), [KEPT, 5]);
    }

    #[test]
    fn only_status_zero_succeeds() {
        let output = |status| CommandOutput {
            status,
            stdout: "out\n\n".to_owned(),
            stderr: "why".to_owned(),
        };
        assert_eq!(output(0).success().unwrap(), "out\n");
        let error = output(3).success().unwrap_err().to_string();
        assert!(
            error.contains("status 3") && error.contains("why"),
            "{error}"
        );
    }
}
