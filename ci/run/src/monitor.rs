// SPDX-License-Identifier: Apache-2.0
//! The monitor's command, the files of a guest's temporary directory, and snapshots.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use patchbay_proto::EXEC_PORT;
use patchbay_proto::snapshot::{SnapshotError, SnapshotFiles};
use patchbay_proto::v1::SnapshotGuestRequest;
use patchbay_proto::v1::guest_service_client::GuestServiceClient;
use tokio::net::UnixListener;
use tonic::Request;
use tonic::transport::Channel;

use crate::keys::sentence;
use crate::place::patience;

/// The API socket in a guest's directory.
pub const API_SOCKET: &str = "api.sock";
/// The file name in a guest's directory that the monitor gets as `--vsock`.
pub const VSOCK: &str = "vsock";

/// The time limit for saving a guest.
const SAVE_TIME: Duration = Duration::from_secs(120);
/// Additional time for the monitor to say that the time has passed.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// Returns the command of a monitor with the options that every guest needs. `memory` is in the
/// monitor's format.
pub fn command(
    program: &Path,
    folder: &Path,
    (kernel, command_line): (&Path, &str),
    memory: &str,
    vcpus: u32,
) -> Command {
    let mut command = with_socket(program, folder);
    command
        .arg("--kernel")
        .arg(kernel)
        .args(["--cmdline", command_line.trim_end()])
        .args(["--memory", memory])
        .args(["--vcpus", &vcpus.to_string()]);
    command
}

/// Returns the command of a monitor that starts a copy of the guest in a snapshot.
pub fn copy(program: &Path, folder: &Path, snapshot: &Path) -> Command {
    let mut command = with_socket(program, folder);
    command.arg("--from").arg(snapshot);
    command
}

fn with_socket(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .arg("--api-socket")
        .arg(folder.join(API_SOCKET))
        .stdin(Stdio::null());
    command
}

/// Listens for the connection of the guest's agent, which runs commands.
///
/// # Errors
/// The socket cannot be created.
pub fn listen(folder: &Path) -> Result<UnixListener> {
    let socket = folder.join(format!("{VSOCK}_{EXEC_PORT}"));
    UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))
}

/// Saves the guest of a monitor in a new folder, which only this user may read because it has all
/// of the guest's memory. The guest runs on. The folder appears when it is complete.
///
/// # Errors
/// The monitor cannot save the guest, or the folder exists or cannot be written.
pub async fn save(monitor: Channel, folder: &Path) -> Result<()> {
    let cannot_create = || format!("cannot create {}", folder.display());
    if folder.symlink_metadata().is_ok() {
        bail!("{}: it exists", cannot_create());
    }
    let parent = folder.parent().with_context(cannot_create)?;
    // The folder of `tempfile` has mode 0700.
    let hidden = tempfile::Builder::new()
        .prefix(".patchbay-snapshot-")
        .tempdir_in(parent)
        .with_context(cannot_create)?;
    let saved = save_in(monitor, hidden.path()).await?;
    // An error names the folder that the caller knows.
    saved.with_context(|| cannot_write(folder))?;
    std::fs::rename(hidden.path(), folder).with_context(cannot_create)
}

/// Writes the files of a snapshot.
///
/// # Errors
/// The outer error is the monitor's, and the inner one is that of the files.
async fn save_in(monitor: Channel, folder: &Path) -> Result<Result<(), SnapshotError>> {
    let mut files = match SnapshotFiles::create(folder) {
        Ok(files) => files,
        Err(error) => return Ok(Err(error.into())),
    };
    let limit = patience(SAVE_TIME);
    let mut request = Request::new(SnapshotGuestRequest {
        timeout: Some(limit.try_into()?),
        ..Default::default()
    });
    request.set_timeout(limit + ANSWER_TIME);
    let mut service = GuestServiceClient::new(monitor);
    let parts = service.snapshot_guest(request).await;
    let mut parts = parts.map_err(sentence)?.into_inner();
    while let Some(part) = parts.message().await.map_err(sentence)? {
        if let Err(error) = files.add(&part) {
            return Ok(Err(error));
        }
    }
    Ok(files.finish())
}

pub(crate) fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
