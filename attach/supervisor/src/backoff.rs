// SPDX-License-Identifier: Apache-2.0
//! Delays restarts of processes, and checks whether a process serves its socket.

use std::time::Duration;

pub use patchbay_proto::socket::is_served as runs;

/// The first delay before a process is restarted.
pub const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_LAST: Duration = Duration::from_secs(60);
/// The running time after which a process is restarted without a delay.
const STEADY: Duration = Duration::from_secs(60);
/// The interval of checks of the socket of a process that is not a child of this one.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The delay before a process is restarted. It doubles with each restart.
#[derive(Debug, Default)]
pub struct Backoff {
    next: Option<Duration>,
}

impl Backoff {
    /// Returns whether the process has not been restarted recently.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.next.is_none()
    }

    /// Returns the delay before the restart of a process that ran for the time `ran`.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= STEADY {
            self.next = None;
            return Duration::ZERO;
        }
        let delay = self.next.unwrap_or(BACKOFF_FIRST);
        self.next = Some((delay * 2).min(BACKOFF_LAST));
        delay
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

    use super::*;

    #[test]
    fn a_server_that_accepts_nothing_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("api.sock");
        assert!(!runs(&path));
        let stream = SocketType::STREAM;
        let socket = socket_with(AddressFamily::UNIX, stream, SocketFlags::CLOEXEC, None);
        let socket = socket.expect("a socket");
        let address = SocketAddrUnix::new(&path).expect("short");
        rustix::net::bind(&socket, &address).expect("free");
        assert!(!runs(&path), "nothing listens");
        rustix::net::listen(&socket, 1).expect("bound");
        // Connections that have ended stay in the queue until they are accepted.
        for _ in 0..8 {
            assert!(runs(&path));
        }
    }
}
