// SPDX-License-Identifier: Apache-2.0

//! Reopens log files after they were renamed. A dedicated thread reopens them, because the filters
//! of the other threads forbid opening files.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use anyhow::Context;
use patchbay_guest::log_file::LogPath;
use patchbay_service::keys::Keys;
use patchbay_vmm::devices::Console;
use patchbay_vmm::seccomp::ThreadKind;
use patchbay_vmm::thread;

/// Handle of the thread. Dropping it ends the thread.
pub struct Logs(SyncSender<()>);

impl Logs {
    pub fn start(
        audit: Option<Arc<LogPath>>,
        keys: Keys,
        console: Arc<Console>,
    ) -> anyhow::Result<Self> {
        let (sender, orders) = sync_channel(1);
        thread::spawn("logs", ThreadKind::LogFiles, move || {
            for () in orders {
                if let Some(path) = &audit {
                    keys.reopen_audit_log(path);
                }
                console.reopen();
            }
        })
        .context("the log file thread cannot be started; raise the limit on processes")?;
        Ok(Self(sender))
    }

    /// Asks the thread to reopen the log files.
    pub fn reopen(&self) {
        // The queue is full only if a request is pending, which suffices.
        let _ = self.0.try_send(());
    }
}
