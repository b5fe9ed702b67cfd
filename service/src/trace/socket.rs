// SPDX-License-Identifier: Apache-2.0
//! The socket on which the agent's connections arrive.

use std::path::{Path, PathBuf};

use super::link::PORT;
use crate::socket::{ListeningSocket, SocketError};

/// The socket on which the agent's connections arrive: that of the vsock device with the port.
///
/// Firecracker's convention (`docs/vsock.md` there), which the device follows.
pub fn socket_path(vsock: &Path) -> PathBuf {
    let mut path = vsock.as_os_str().to_owned();
    path.push(format!("_{PORT}"));
    path.into()
}

/// The bound socket on which the agent's connections arrive; removed when dropped.
#[derive(Debug)]
pub struct AgentSocket(ListeningSocket);

impl AgentSocket {
    /// Binds the socket beside that of the vsock device, replacing one that a dead monitor left.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(vsock: &Path) -> Result<Self, SocketError> {
        ListeningSocket::bind(&socket_path(vsock)).map(Self)
    }

    /// The listener, for the current runtime.
    ///
    /// # Errors
    /// Of the operating system.
    pub(super) fn listener(&self) -> std::io::Result<tokio::net::UnixListener> {
        self.0.tokio_listener()
    }
}
