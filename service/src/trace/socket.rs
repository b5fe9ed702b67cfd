// SPDX-License-Identifier: Apache-2.0
//! The socket on which the agent's connections arrive.

use std::path::{Path, PathBuf};

use super::link::PORT;
use crate::socket::{ListeningSocket, SocketError};

/// Path of the socket that the agent's connections arrive on: the vsock device's path with the port
/// appended.
///
/// The device follows Firecracker's convention (`docs/vsock.md` there).
pub fn socket_path(vsock: &Path) -> PathBuf {
    let mut path = vsock.as_os_str().to_owned();
    path.push(format!("_{PORT}"));
    path.into()
}

/// The bound socket for the agent's connections. Dropping it removes the file.
#[derive(Debug)]
pub struct AgentSocket(ListeningSocket);

impl AgentSocket {
    /// Binds the socket beside the vsock device's. Replaces a socket that a dead monitor left.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(vsock: &Path) -> Result<Self, SocketError> {
        ListeningSocket::bind(&socket_path(vsock)).map(Self)
    }

    /// The listener, registered with the current runtime.
    ///
    /// # Errors
    /// An I/O error.
    pub(super) fn listener(&self) -> std::io::Result<tokio::net::UnixListener> {
        self.0.tokio_listener()
    }
}
