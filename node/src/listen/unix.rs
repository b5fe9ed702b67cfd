// SPDX-License-Identifier: Apache-2.0
//! The host's unix socket.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

const BACKLOG: i32 = 128;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another program serves it.
    #[error("{} is served by a running program; give another path, or stop that program", .0.display())]
    InUse(PathBuf),
    /// Something else has that name.
    #[error("{} exists and is not a socket; give another path", .0.display())]
    NotASocket(PathBuf),
    /// From the operating system.
    #[error("socket {} cannot be created: {error}; give a path of at most 107 bytes in a folder that you may write to", path.display())]
    Unusable {
        /// The path that was given.
        path: PathBuf,
        /// From the operating system.
        error: std::io::Error,
    },
}

/// The bound socket. Dropping it removes its file.
///
/// Its mode lets every local user connect by default: who may do what is the policy's to say, by the
/// peer's uid. A narrower mode keeps others out altogether.
#[derive(Debug)]
pub struct NodeSocket {
    path: PathBuf,
    listener: UnixListener,
    /// Held from before `path` is looked at, so that two hosts' daemons never remove each other's.
    lock: File,
}

impl NodeSocket {
    /// Binds `path`; the socket that a dead program left there is replaced.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, SocketError> {
        let unusable = |error: std::io::Error| SocketError::Unusable {
            path: path.to_owned(),
            error,
        };
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(lock_path)
            .map_err(unusable)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(SocketError::InUse(path.to_owned()));
        }
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(unusable(error)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(SocketError::NotASocket(path.to_owned()));
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                return Err(SocketError::InUse(path.to_owned()));
            }
            Ok(_) => std::fs::remove_file(path).map_err(unusable)?,
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|error| unusable(error.into()))?;
        // Before bind(): Linux gives the file the mode of the socket, so it is never wider.
        fchmod(&socket, Mode::from_raw_mode(mode)).map_err(|error| unusable(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| unusable(error.into()))?;
        bind(&socket, &address).map_err(|error| unusable(error.into()))?;
        // The umask took its part away at bind().
        rustix::fs::chmod(path, Mode::from_raw_mode(mode))
            .map_err(|error| unusable(error.into()))?;
        listen(&socket, BACKLOG).map_err(|error| unusable(error.into()))?;
        Ok(Self {
            path: path.to_owned(),
            listener: UnixListener::from(socket),
            lock,
        })
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For the current tokio runtime.
    ///
    /// # Errors
    /// From the operating system.
    pub fn tokio_listener(&self) -> std::io::Result<tokio::net::UnixListener> {
        tokio::net::UnixListener::from_std(self.listener.try_clone()?)
    }
}

impl Drop for NodeSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // A forked process may hold a copy of the descriptor; this ends the lock for all copies.
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_mode_is_as_given_and_the_file_goes_with_the_daemon() {
        let folder = tempfile::tempdir().expect("a folder");
        for mode in [0o600, 0o660, 0o666] {
            let path = folder.path().join("node.sock");
            let socket = NodeSocket::bind(&path, mode).expect("free");
            let found = std::fs::metadata(&path).expect("bound").permissions();
            assert_eq!(found.mode() & 0o777, mode);
            drop(socket);
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_others_serve_and_keep_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("node.sock");
        // Dropping a std listener leaves its file, as a killed daemon does.
        drop(UnixListener::bind(&path).expect("free"));
        let live = NodeSocket::bind(&path, 0o600).expect("a stale socket is replaced");
        let error = NodeSocket::bind(&path, 0o600).expect_err("served");
        assert!(matches!(error, SocketError::InUse(_)), "{error}");
        assert!(UnixStream::connect(live.path()).is_ok());
        let foreign = folder.path().join("foreign.sock");
        let _listener = UnixListener::bind(&foreign).expect("free");
        let error = NodeSocket::bind(&foreign, 0o600).expect_err("served");
        assert!(matches!(error, SocketError::InUse(_)), "{error}");
        let file = folder.path().join("file");
        std::fs::write(&file, "precious").expect("written");
        let error = NodeSocket::bind(&file, 0o600).expect_err("a file");
        assert!(matches!(error, SocketError::NotASocket(_)), "{error}");
        assert_eq!(std::fs::read_to_string(&file).expect("kept"), "precious");
    }
}
