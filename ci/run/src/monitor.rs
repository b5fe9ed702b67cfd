// SPDX-License-Identifier: Apache-2.0
//! The monitor's command, and the files of a guest's temporary directory.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use patchbay_proto::EXEC_PORT;
use tokio::net::UnixListener;

/// The API socket in a guest's directory.
pub const API_SOCKET: &str = "api.sock";
/// The file name in a guest's directory that the monitor gets as `--vsock`.
pub const VSOCK: &str = "vsock";

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
pub(crate) fn copy(program: &Path, folder: &Path, snapshot: &Path) -> Command {
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
