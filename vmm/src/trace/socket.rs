// SPDX-License-Identifier: Apache-2.0
//! The socket on which the agent's connections arrive.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::link::PORT;

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
pub struct AgentSocket {
    listener: std::os::unix::net::UnixListener,
    path: PathBuf,
}

impl AgentSocket {
    /// Binds the socket beside that of the vsock device, replacing one that a dead monitor left.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn bind(vsock: &Path) -> std::io::Result<Self> {
        let path = socket_path(vsock);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl AgentSocket {
    /// The listener, for a runtime.
    ///
    /// # Errors
    /// Of the operating system.
    pub(super) fn listener(&self) -> std::io::Result<std::os::unix::net::UnixListener> {
        self.listener.try_clone()
    }
}
