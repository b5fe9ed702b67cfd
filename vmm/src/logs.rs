// SPDX-License-Identifier: Apache-2.0

//! Opening log files again after they were renamed. One thread does it: the filters of the others forbid
//! opening.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use anyhow::Context;
use patchbay_service::keys::Keys;
use patchbay_service::keys::audit::AuditFile;
use patchbay_service::log_file::LogPath;
use patchbay_vmm::devices::Console;
use patchbay_vmm::seccomp::ThreadKind;
use patchbay_vmm::thread;

/// The thread. It ends with this.
pub struct Logs(SyncSender<()>);

impl Logs {
    /// Starts it.
    pub fn start(
        audit: Option<Arc<LogPath>>,
        keys: Keys,
        console: Arc<Console>,
    ) -> anyhow::Result<Self> {
        let (sender, orders) = sync_channel(1);
        thread::spawn("logs", ThreadKind::LogFiles, move || {
            for () in orders {
                if let Some(place) = &audit {
                    reopen(place, &keys);
                }
                console.reopen();
            }
        })
        .context("the thread of the log files")?;
        Ok(Self(sender))
    }

    /// Has the log files opened again, soon.
    pub fn reopen(&self) {
        // Full: it has not begun with the last order, which is as good.
        let _ = self.0.try_send(());
    }
}

fn reopen(place: &Arc<LogPath>, keys: &Keys) {
    match AuditFile::open(place.clone()) {
        Ok(file) => keys.replace_audit_file(file),
        Err(error) => tracing::error!(
            "the audit log {} cannot be opened again ({error}); its lines go on to the file that had this name",
            place.path().display()
        ),
    }
}
