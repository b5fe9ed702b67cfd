// SPDX-License-Identifier: Apache-2.0
//! Delays restarts of processes, and tells whether one serves its socket.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The first delay before a process is restarted.
pub const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_LAST: Duration = Duration::from_secs(60);
/// The running time after which a process is restarted without a delay.
const STEADY: Duration = Duration::from_secs(60);
/// The interval at which the socket of a process is checked that is not a child of this one.
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

/// Returns whether a process listens on the socket.
#[must_use]
pub fn runs(socket: &Path) -> bool {
    UnixStream::connect(socket).is_ok()
}
