// SPDX-License-Identifier: Apache-2.0
//! Writes a snapshot of a guest to a folder.
//!
//! The files are written to a hidden folder beside the final one, synced, and then renamed. So the
//! final folder either does not exist or is complete. On any error, and on SIGINT and SIGTERM, the
//! hidden folder is removed.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use patchbay_proto::snapshot::{SnapshotError, SnapshotFiles};
use patchbay_proto::v1;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::StreamExt;

use crate::args::output::Output;
use crate::client::{ANSWER_TIME, Client, to_proto};
use crate::failure::Failure;
use crate::print::{Printable, print};

/// The time to take a snapshot, unless --timeout is given.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A snapshot that was written.
#[derive(Debug, Serialize)]
pub struct Taken {
    folder: PathBuf,
    /// The guest's memory in bytes.
    memory_bytes: u64,
    /// Bytes of memory that are not zero pages, and bytes of the other state.
    written_bytes: u64,
}

impl Printable for Taken {
    fn table(&self) -> String {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        format!(
            "{0}: {1} MiB written for {2} MiB of memory; start a copy with `patchbay guest run --name NAME --from {0}`\n",
            self.folder.display(),
            mib(self.written_bytes),
            mib(self.memory_bytes),
        )
    }

    fn names(&self) -> Vec<&str> {
        vec![]
    }
}

/// Saves the guest in a new folder.
///
/// # Errors
/// The guest cannot be saved, or the folder exists or cannot be written.
pub async fn snapshot(
    client: &Client,
    folder: &Path,
    timeout: Option<Duration>,
    output: Output,
) -> Result<(), Failure> {
    let timeout = timeout.unwrap_or(TIMEOUT);
    // Signals are caught before there is a folder to remove.
    let interrupted = interruption()?;
    let mut unfinished = Unfinished::create(folder)?;
    let mut request = client.stream(v1::SnapshotGuestRequest {
        timeout: to_proto(Some(timeout)),
        ..Default::default()
    });
    request.set_timeout(timeout + ANSWER_TIME);
    let receive = async {
        let mut guest = client.guest();
        let mut parts = guest.snapshot_guest(request).await?.into_inner();
        while let Some(part) = parts.next().await {
            unfinished.add(&part?)?;
        }
        Ok::<_, Failure>(())
    };
    let what = format!("saving {}", client.guest_name());
    tokio::select! {
        received = client.progress().during(&what, receive) => received?,
        () = interrupted => {
            return Err(Failure::error("interrupted; nothing is left of the snapshot"));
        }
    }
    print(output, &unfinished.finish()?)
}

/// Catches the signals that end this command. The returned future waits for one.
fn interruption() -> Result<impl Future<Output = ()>, Failure> {
    let catch = |kind| {
        signal(kind).map_err(|error| Failure::error(format!("signals cannot be caught: {error}")))
    };
    let mut interrupt = catch(SignalKind::interrupt())?;
    let mut terminate = catch(SignalKind::terminate())?;
    let mut hangup = catch(SignalKind::hangup())?;
    let mut quit = catch(SignalKind::quit())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => (),
            _ = terminate.recv() => (),
            _ = hangup.recv() => (),
            _ = quit.recv() => (),
        }
    })
}

/// A folder that is being written.
struct Unfinished {
    hidden: tempfile::TempDir,
    files: SnapshotFiles,
    /// The final folder.
    folder: PathBuf,
}

impl Unfinished {
    fn create(folder: &Path) -> Result<Self, Failure> {
        let Some(name) = folder.file_name() else {
            return Err(Failure::usage(format!(
                "{folder:?} does not name a new folder; give a path that ends in its name"
            )));
        };
        // Without a "." at its end, to which no folder can be renamed.
        let folder = folder.with_file_name(name);
        let failed = |error| failed(&folder, &error);
        if folder.symlink_metadata().is_ok() {
            return Err(Failure::error(format!(
                "{} exists; give a folder that does not exist",
                folder.display()
            )));
        }
        let parent = match folder.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        // Only this user may read what is in the guest's memory.
        let hidden = tempfile::Builder::new()
            .prefix(".patchbay-snapshot-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .map_err(failed)?;
        Ok(Self {
            files: SnapshotFiles::create(hidden.path()).map_err(failed)?,
            hidden,
            folder,
        })
    }

    fn add(&mut self, part: &v1::SnapshotGuestResponse) -> Result<(), Failure> {
        let added = self.files.add(part);
        added.map_err(|error| self.failed(error))
    }

    /// Makes the folder appear under its name.
    fn finish(self) -> Result<Taken, Failure> {
        let finished = self.files.finish();
        finished.map_err(|error| self.failed(error))?;
        let rename = || {
            self.files.sync()?;
            File::open(self.hidden.path())?.sync_all()?;
            let parent = File::open(self.hidden.path().join(".."))?;
            // Fails if another command has made a folder with content meanwhile.
            std::fs::rename(self.hidden.path(), &self.folder)?;
            Ok(parent)
        };
        let parent = rename().map_err(|error| failed(&self.folder, &error))?;
        parent.sync_all().map_err(|error| {
            Failure::error(format!(
                "the snapshot is in {}, but may be lost if the machine loses power: its parent cannot be synced ({error})",
                self.folder.display()
            ))
        })?;
        Ok(Taken {
            memory_bytes: self.files.memory_bytes(),
            written_bytes: self.files.written_bytes(),
            folder: self.folder,
        })
    }

    fn failed(&self, error: SnapshotError) -> Failure {
        match error {
            SnapshotError::Write(error) => failed(&self.folder, &error),
            error => Failure::error(error.to_string()),
        }
    }
}

fn failed(folder: &Path, error: &std::io::Error) -> Failure {
    Failure::error(format!(
        "the snapshot cannot be written to {}: {error}; nothing is left of it",
        folder.display()
    ))
}
