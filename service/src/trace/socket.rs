// SPDX-License-Identifier: Apache-2.0
//! The socket on which the agent's connections arrive.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::log_limit::limited;
use patchbay_proto::socket::{ListeningSocket, SocketError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::link::PORT;

/// `VMADDR_CID_ANY`, `include/uapi/linux/vm_sockets.h`.
const ANY_CID: u32 = u32::MAX;
/// Linux requires CAP_NET_BIND_SERVICE for lower ports (`LAST_RESERVED_PORT`,
/// `net/vmw_vsock/af_vsock.c`).
const FIRST_UNPRIVILEGED_PORT: u32 = 1024;
const BACKLOG: i32 = 128;
/// Minimum time between two decisions of an [`Admission`], because a guest may connect as often as
/// it likes.
const BETWEEN_DECISIONS: Duration = Duration::from_secs(1);

/// Decides whether to admit a connection from the guest's CID. An error is the reason why the
/// connection is closed.
struct Admission(Box<dyn Fn() -> Result<(), String> + Send + Sync>);

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Admission")
    }
}

/// Returns the path of the socket on which the agent's connections arrive: the vsock device's path
/// with the port appended.
///
/// The device follows the convention of Firecracker (`docs/vsock.md` there).
pub fn socket_path(vsock: &Path) -> PathBuf {
    let mut path = vsock.as_os_str().to_owned();
    path.push(format!("_{PORT}"));
    path.into()
}

/// The bound socket for the agent's connections.
#[derive(Debug)]
pub struct AgentSocket(Bound);

#[derive(Debug)]
enum Bound {
    /// The monitor's vsock device forwards connections to this socket. Dropping the socket removes
    /// its file.
    Unix(ListeningSocket),
    /// A monitor whose process has this id in this PID namespace forwards connections to this
    /// socket. The caller of [`AgentSocket::of_monitor`] has its file.
    Monitor { listener: StdListener, pid: u32 },
    /// The host kernel's vhost-vsock device forwards the connections of every guest to this socket.
    Vsock {
        listener: Socket,
        guest: u32,
        admission: Option<Arc<Admission>>,
    },
}

impl AgentSocket {
    /// Binds the socket next to the vsock device's socket. Replaces a socket that a monitor has
    /// left behind.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(vsock: &Path) -> Result<Self, SocketError> {
        Ok(Self(Bound::Unix(ListeningSocket::bind(&socket_path(
            vsock,
        ))?)))
    }

    /// Serves a socket that is bound already. Only the connections of the process with this id are
    /// accepted, because other processes of the monitor's user can connect as well. A later process
    /// with this id is not recognised, so drop the socket when the process ends.
    #[must_use]
    pub fn of_monitor(listener: StdListener, pid: u32) -> Self {
        Self(Bound::Monitor { listener, pid })
    }

    /// Listens on a port of this host's AF_VSOCK for the guest with CID `guest`. All guests share
    /// the host's ports, so connections from other guests are closed.
    ///
    /// # Errors
    /// The host has no AF_VSOCK, or the port is in use.
    pub fn bind_vsock(guest: u32, port: u32) -> io::Result<Self> {
        let listener = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
        listener.bind(&SockAddr::vsock(ANY_CID, port))?;
        listener.listen(BACKLOG)?;
        listener.set_nonblocking(true)?;
        Ok(Self(Bound::Vsock {
            listener,
            guest,
            admission: None,
        }))
    }

    /// Calls `admission` for each connection to an AF_VSOCK port, at most once a second. Its error
    /// is the reason why the connection is closed.
    #[must_use]
    pub fn admitting(
        mut self,
        admission: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        if let Bound::Vsock {
            admission: asked, ..
        } = &mut self.0
        {
            *asked = Some(Arc::new(Admission(Box::new(admission))));
        }
        self
    }

    /// Returns the listener, registered with the current runtime.
    ///
    /// # Errors
    /// An I/O error.
    pub(super) fn listener(&self) -> io::Result<AgentListener> {
        Ok(match &self.0 {
            Bound::Unix(socket) => AgentListener::Unix(socket.tokio_listener()?),
            Bound::Monitor { listener, pid } => {
                let listener = listener.try_clone()?;
                listener.set_nonblocking(true)?;
                let pid = i32::try_from(*pid).map_err(|_| io::ErrorKind::InvalidInput)?;
                AgentListener::Monitor(UnixListener::from_std(listener)?, pid)
            }
            Bound::Vsock {
                listener,
                guest,
                admission,
            } => {
                let (listener, guest) = (listener.try_clone()?, *guest);
                let admission = admission.clone();
                let (own, threads) = StdStream::pair()?;
                let (sender, accepted) = mpsc::channel(1);
                std::thread::Builder::new()
                    .name("agent-vsock".to_owned())
                    .spawn(move || {
                        accept_vsock(&listener, guest, admission.as_deref(), &threads, &sender);
                    })?;
                AgentListener::Vsock {
                    accepted: tokio::sync::Mutex::new(accepted),
                    _thread: own,
                }
            }
        })
    }
}

/// Accepts the connections.
#[derive(Debug)]
pub enum AgentListener {
    Unix(UnixListener),
    /// Accepts only the connections of the process with this id.
    Monitor(UnixListener, i32),
    /// tokio has no vsock sockets, so a thread accepts the connections. The thread ends when the
    /// peer of `_thread` is closed.
    Vsock {
        accepted: tokio::sync::Mutex<mpsc::Receiver<io::Result<StdStream>>>,
        _thread: StdStream,
    },
}

impl AgentListener {
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        match self {
            Self::Unix(listener) => Ok(listener.accept().await?.0),
            Self::Monitor(listener, pid) => loop {
                let stream = listener.accept().await?.0;
                let peer = stream.peer_cred()?.pid();
                if peer == Some(*pid) {
                    return Ok(stream);
                }
                limited!(
                    info,
                    ?peer,
                    "a connection that is not the monitor's was closed"
                );
            },
            Self::Vsock { accepted, .. } => {
                let next = accepted.lock().await.recv().await;
                UnixStream::from_std(next.ok_or(io::ErrorKind::BrokenPipe)??)
            }
        }
    }
}

/// Accepts connections on the thread. Returns when the peer of `stop` is closed.
fn accept_vsock(
    listener: &Socket,
    guest: u32,
    admission: Option<&Admission>,
    stop: &StdStream,
    accepted: &mpsc::Sender<io::Result<StdStream>>,
) {
    let mut next_decision = Instant::now();
    loop {
        let mut fds =
            [listener.as_fd(), stop.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Ok(_) if fds[1].revents().is_empty() => {}
            Err(Errno::INTR) => continue,
            _ => return,
        }
        let next = match listener.accept() {
            // A Unix stream calls read(), write() and shutdown(), which work alike on every stream
            // socket.
            Ok((stream, peer)) if is_agent(peer.as_vsock_address(), guest) => {
                if let Some(Admission(decide)) = admission {
                    if ends_before(stop, next_decision) {
                        return;
                    }
                    // The decision is made while the connection is open. The guest has then not
                    // ended.
                    let decision = decide();
                    next_decision = Instant::now() + BETWEEN_DECISIONS;
                    if let Err(why) = decision {
                        limited!(warn, why, "a connection of the agent was closed");
                        continue;
                    }
                }
                let prepared = stream.set_nonblocking(true);
                prepared.map(|()| StdStream::from(OwnedFd::from(stream)))
            }
            Ok((_, peer)) => {
                let peer = peer.as_vsock_address();
                limited!(
                    info,
                    ?peer,
                    "a vsock connection that is not the agent's was closed"
                );
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => Err(error),
        };
        if accepted.blocking_send(next).is_err() {
            return;
        }
    }
}

/// Waits until `time` or the end of the listener. Returns whether the listener ended.
fn ends_before(stop: &StdStream, time: Instant) -> bool {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        let mut fds = [PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => {}
            ended => return ended != Ok(0),
        }
    }
}

/// Returns whether the peer may be the agent. The monitor's own vsock device makes the same check
/// of the port.
fn is_agent(peer: Option<(u32, u32)>, guest: u32) -> bool {
    peer.is_some_and(|(cid, port)| cid == guest && port < FIRST_UNPRIVILEGED_PORT)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[test]
    fn only_privileged_programs_of_the_guest_are_the_agent() {
        assert!(is_agent(Some((7, 1023)), 7));
        for other in [None, Some((8, 1023)), Some((7, 1024)), Some((2, 1))] {
            assert!(!is_agent(other, 7), "{other:?}");
        }
    }

    #[tokio::test]
    async fn only_the_monitor_forwards_connections() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("vsock_1024");
        let accepted = async |pid| {
            let _ = std::fs::remove_file(&path);
            let listener = StdListener::bind(&path).expect("free");
            let socket = AgentSocket::of_monitor(listener, pid);
            let listener = socket.listener().expect("bound");
            let mut client = UnixStream::connect(&path).await.expect("it listens");
            tokio::select! {
                accepted = listener.accept() => accepted.is_ok(),
                // The connection is closed.
                read = client.read_u8() => read.is_ok(),
            }
        };
        assert!(accepted(std::process::id()).await);
        assert!(!accepted(std::os::unix::process::parent_id()).await);
    }

    #[test]
    fn the_time_until_a_decision_ends_with_the_listener() {
        let (ours, theirs) = StdStream::pair().expect("a pair");
        assert!(!ends_before(&theirs, Instant::now()));
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(!ends_before(&theirs, soon) && Instant::now() >= soon);
        drop(ours);
        assert!(ends_before(
            &theirs,
            Instant::now() + Duration::from_secs(1000)
        ));
    }

    /// The thread ends with the listener, and closing the socket frees the port.
    #[tokio::test]
    async fn a_port_of_the_host_is_bound_once() {
        // The port is above all ports that others use.
        let port = 0x5000_0000 | std::process::id();
        let socket = match AgentSocket::bind_vsock(7, port) {
            Ok(socket) => socket,
            Err(error) => {
                eprintln!("SKIPPED: this machine has no AF_VSOCK ({error})");
                return;
            }
        };
        let error = AgentSocket::bind_vsock(8, port).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let listener = socket.listener().expect("a thread");
        drop(socket);
        let error = AgentSocket::bind_vsock(8, port).expect_err("in use by the thread");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        while AgentSocket::bind_vsock(8, port).is_err() {
            tokio::task::yield_now().await;
        }
    }
}
