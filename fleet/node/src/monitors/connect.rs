// SPDX-License-Identifier: Apache-2.0
//! Connects to a monitor as a user that the monitor trusts.
//!
//! A monitor accepts an asserted principal only from the user that the monitor runs as. If the
//! daemon runs as root and the monitor does not, one thread takes the monitor's user id during
//! connect(2), when the kernel records the peer's uid.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use rustix::thread::{Uid, set_thread_res_uid};

/// A connection, and the user that the monitor runs as.
pub struct Connected {
    /// The connection, which is non-blocking.
    pub stream: tokio::net::UnixStream,
    /// The owner of the socket and of the process behind it.
    pub owner: u32,
}

/// Connects to the monitor's socket at `path`.
///
/// # Errors
/// An error of the operating system, or a socket whose owner is not the user that serves it.
pub async fn connect(path: PathBuf) -> io::Result<Connected> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // The thread is not from a pool, so that its user id cannot affect later work.
    std::thread::Builder::new()
        .name("connect".to_owned())
        .spawn(move || {
            let _ = sender.send(connect_as_owner(&path));
        })?;
    let connected = receiver.await;
    let (stream, owner) = connected.map_err(|_| io::Error::other("the thread ended"))??;
    stream.set_nonblocking(true)?;
    let stream = tokio::net::UnixStream::from_std(stream)?;
    Ok(Connected { stream, owner })
}

fn connect_as_owner(path: &Path) -> io::Result<(UnixStream, u32)> {
    let owner = std::fs::symlink_metadata(path)?.uid();
    let own = geteuid().as_raw();
    if own == 0 && owner != 0 {
        let user = Uid::from_raw(owner);
        set_thread_res_uid(None, Some(user), None)?;
    }
    let stream = UnixStream::connect(path)?;
    let served_by = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
    if served_by != owner {
        return Err(io::Error::other(format!(
            "user {served_by} serves a socket of user {owner}; a monitor owns its socket"
        )));
    }
    if own != 0 && owner != own {
        return Err(io::Error::other(format!(
            "it belongs to user {owner}, and this process runs as {own}; run it as that user or as root"
        )));
    }
    Ok((stream, owner))
}
