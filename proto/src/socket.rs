// SPDX-License-Identifier: Apache-2.0
//! Unix sockets of servers: one live server per path.
//!
//! A server takes a lock on `PATH.lock` before it examines `PATH`, and keeps the lock until it
//! ends. So no server removes the socket of another live one.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, chmod, fchmod, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Backlog of the listener.
const BACKLOG: i32 = 128;

/// The reason why the socket could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another program serves the socket.
    #[error("a running program already serves {}; give another name or path, or stop that program", .0.display())]
    InUse(PathBuf),
    /// The path exists and is no socket.
    #[error("{} exists and is not a socket; give another path", .0.display())]
    NotASocket(PathBuf),
    /// An I/O error.
    #[error("socket {} cannot be created: {error}; give a path in a folder that you may write to, of at most 107 bytes", path.display())]
    Unusable {
        /// Path of the socket.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
}

/// The bound socket. Dropping it removes its file.
#[derive(Debug)]
pub struct ListeningSocket {
    path: PathBuf,
    listener: UnixListener,
    /// The lock shows that the server runs; the kernel releases it when the server ends.
    lock: File,
    owner: u32,
}

/// Parses the mode of a socket, octal 0 to 777.
///
/// # Errors
/// A hint for the user.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("give an octal mode such as 660".to_owned()),
    }
}

impl ListeningSocket {
    /// Binds `path` with mode 0600. Replaces a socket that a server has left behind.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        Self::bind_with_mode(path, 0o600)
    }

    /// Binds `path` with another mode, for a server that checks its peers' user ids.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind_with_mode(path: &Path, mode: u32) -> Result<Self, SocketError> {
        let mode = Mode::from_raw_mode(mode);
        let unusable = |error: std::io::Error| SocketError::Unusable {
            path: path.to_owned(),
            error,
        };
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(lock_path(path))
            .map_err(unusable)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(SocketError::InUse(path.to_owned())),
            Err(error) => return Err(unusable(error.into())),
        }
        remove_stale(path)?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|error| unusable(error.into()))?;
        // Before bind(): on Linux the file inherits the socket's mode, so it is never more
        // permissive.
        fchmod(&socket, mode).map_err(|error| unusable(error.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|error| unusable(error.into()))?;
        bind(&socket, &address).map_err(|error| unusable(error.into()))?;
        // bind() has applied the umask.
        chmod(path, mode).map_err(|error| unusable(error.into()))?;
        listen(&socket, BACKLOG).map_err(|error| unusable(error.into()))?;
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(true).map_err(unusable)?;
        Ok(Self {
            path: path.to_owned(),
            listener,
            lock,
            owner: rustix::process::geteuid().as_raw(),
        })
    }

    /// The uid that bound the socket.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The non-blocking listener.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// The listener, registered with the current tokio runtime.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn tokio_listener(&self) -> std::io::Result<tokio::net::UnixListener> {
        tokio::net::UnixListener::from_std(self.listener.try_clone()?)
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        // The lock file stays: after a removal two servers could lock two files of the same name.
        let _ = std::fs::remove_file(&self.path);
        // A concurrently forked child has a copy of the descriptor, and the lock, until execve().
        // Unlocking releases the lock for all copies (flock(2)).
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Removes a socket without a listener. The caller holds the lock.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(SocketError::Unusable {
                path: path.to_owned(),
                error,
            });
        }
    };
    if !metadata.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    // Another program may serve it without the lock.
    if is_served(path) {
        return Err(SocketError::InUse(path.to_owned()));
    }
    std::fs::remove_file(path).map_err(|error| SocketError::Unusable {
        path: path.to_owned(),
        error,
    })
}

/// Returns whether a program listens on the socket. The call does not wait for a program that
/// accepts no connection.
#[must_use]
pub fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|client| connect(&client, &SocketAddrUnix::new(path)?));
    // The queue of connections is full.
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_mode_is_as_given_and_the_file_goes_with_the_server() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("guest.sock");
        let mode = || {
            let file = std::fs::metadata(&path).expect("bound");
            file.permissions().mode() & 0o777
        };
        for given in [0o600, 0o660, 0o666] {
            let socket = ListeningSocket::bind_with_mode(&path, given).expect("free");
            assert_eq!(mode(), given);
            drop(socket);
            assert!(!path.exists());
        }
        let _socket = ListeningSocket::bind(&path).expect("free");
        assert_eq!(mode(), 0o600);
    }

    #[test]
    fn a_live_server_is_left_alone_and_a_dead_ones_socket_replaced() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("guest.sock");
        // Dropping a std listener leaves its file, as a killed server does.
        drop(UnixListener::bind(&path).expect("free"));
        let live = ListeningSocket::bind(&path).expect("stale socket replaced");
        let error = ListeningSocket::bind(&path).expect_err("in use");
        assert!(matches!(error, SocketError::InUse(_)));
        assert!(error.to_string().contains("another name"), "{error}");
        assert!(
            UnixStream::connect(live.path()).is_ok(),
            "the live one still serves"
        );
    }

    /// Returns whether there was room in the listener's queue.
    fn is_connected(path: &Path) -> bool {
        let flags = SocketFlags::NONBLOCK;
        let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let address = SocketAddrUnix::new(path).expect("short");
        connect(client.expect("a socket"), &address).is_ok()
    }

    #[test]
    fn other_programs_and_files_are_left_alone() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("guest.sock");
        let other = UnixListener::bind(&path).expect("free");
        assert!(matches!(
            ListeningSocket::bind(&path),
            Err(SocketError::InUse(_))
        ));
        // Nobody accepts the connections that fill its queue.
        rustix::net::listen(&other, 1).expect("bound");
        while is_connected(&path) {}
        assert!(matches!(
            ListeningSocket::bind(&path),
            Err(SocketError::InUse(_))
        ));
        drop(other);
        let file = folder.path().join("file");
        std::fs::write(&file, "precious").expect("writable");
        assert!(matches!(
            ListeningSocket::bind(&file),
            Err(SocketError::NotASocket(_))
        ));
        assert_eq!(std::fs::read_to_string(&file).expect("kept"), "precious");
    }

    #[test]
    fn unusable_paths_say_what_to_do() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(120)));
        for path in [Path::new("/nonexistent/guest.sock"), &long] {
            let error = ListeningSocket::bind(path).expect_err("unusable");
            assert!(error.to_string().contains("107 bytes"), "{error}");
        }
    }
}
