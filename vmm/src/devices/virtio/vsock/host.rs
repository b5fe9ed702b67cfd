// SPDX-License-Identifier: Apache-2.0

//! Unix sockets on the host: the listener that clients connect to, and the clients that have not
//! named a port yet.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::VsockError;
use patchbay_proto::socket::ListeningSocket;

/// Limit on clients that have not named a port. A new client replaces the one that has waited
/// longest.
const GREETINGS_MAX: usize = 64;

/// Length of the longest greeting: `CONNECT 4294967295` and a newline.
const GREETING_MAX: usize = 19;

/// Limit on clients accepted and events handled in one batch.
const BATCH: usize = 64;

/// Limit on the events returned by one call of [`Host::events`].
pub(super) const EVENTS_MAX: usize = BATCH;

/// Token of the listener in the epoll instance; streams have other tokens.
const LISTENER: u64 = 0;

#[derive(Debug)]
pub(super) enum HostEvent {
    /// A client wants to connect to a port of the guest.
    Connect(UnixStream, u32),
    /// A stream passed to [`Host::watch`] is ready; the token identifies it.
    Stream {
        token: u64,
        readable: bool,
        writable: bool,
        hung_up: bool,
    },
}

/// The host's sockets.
pub(super) struct Host {
    path: PathBuf,
    /// Dropping the socket also removes its file. It is dropped only once, because the path may
    /// belong to another monitor afterwards.
    socket: Option<ListeningSocket>,
    epoll: Epoll,
    /// Clients may wait to be accepted.
    accept: bool,
    greetings: BTreeMap<u64, UnixStream>,
    last_token: u64,
}

impl Host {
    /// Listens on `path` with mode 0600. Replaces the socket of a monitor that has ended.
    pub fn listen(path: &Path) -> Result<Self, VsockError> {
        let unusable = |error: std::io::Error| VsockError::Unusable {
            path: path.to_owned(),
            error,
        };
        let socket = ListeningSocket::bind(path)?;
        let epoll = Epoll::new().map_err(unusable)?;
        epoll
            .ctl(
                ControlOperation::Add,
                socket.listener().as_raw_fd(),
                EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, LISTENER),
            )
            .map_err(unusable)?;
        Ok(Self {
            path: path.to_owned(),
            socket: Some(socket),
            epoll,
            accept: true,
            greetings: BTreeMap::new(),
            last_token: LISTENER,
        })
    }

    /// Returns a descriptor that becomes readable when [`events`](Self::events) may return
    /// something.
    pub fn event_source(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Watches a stream and returns the token of its events. Dropping the stream ends the watch.
    pub fn watch(&mut self, stream: &UnixStream) -> std::io::Result<u64> {
        self.last_token += 1;
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP;
        self.epoll.ctl(
            ControlOperation::Add,
            stream.as_raw_fd(),
            EpollEvent::new(events | EventSet::EDGE_TRIGGERED, self.last_token),
        )?;
        Ok(self.last_token)
    }

    /// Stops watching a stream, so that it can get another token.
    fn unwatch(&self, stream: &UnixStream) {
        // Fails only for a stream that is not watched, which is harmless.
        let _ = self.epoll.ctl(
            ControlOperation::Delete,
            stream.as_raw_fd(),
            EpollEvent::default(),
        );
    }

    /// Removes the socket and drops the waiting clients.
    pub fn close(&mut self) {
        self.greetings.clear();
        self.socket = None;
    }

    /// Connects to the socket of the program on the host that serves `port`.
    pub fn connect(&self, port: u32) -> std::io::Result<UnixStream> {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        // Fails at once if the program's backlog is full.
        connect(&socket, &SocketAddrUnix::new(PathBuf::from(path))?)?;
        Ok(UnixStream::from(socket))
    }

    /// Returns pending events and whether there may be more.
    pub fn events(&mut self) -> (Vec<HostEvent>, bool) {
        let mut ready = [EpollEvent::default(); BATCH];
        // On EINTR the caller calls again when the descriptor is readable.
        let count = self.epoll.wait(0, &mut ready).unwrap_or(0);
        let mut events = vec![];
        for event in &ready[..count] {
            let set = event.event_set();
            let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            match event.data() {
                LISTENER => self.accept = true,
                token if self.greetings.contains_key(&token) => {
                    events.extend(self.greeting(token, hung_up));
                }
                token => events.push(HostEvent::Stream {
                    token,
                    readable: set.intersects(EventSet::IN | EventSet::READ_HANG_UP) || hung_up,
                    writable: set.contains(EventSet::OUT),
                    hung_up,
                }),
            }
        }
        // Greetings of new clients are events of the next call.
        let accepted = self.accept_clients();
        (events, accepted || count == BATCH)
    }

    /// Accepts waiting clients. Returns true if there are new clients or may be more.
    fn accept_clients(&mut self) -> bool {
        let mut accepted = false;
        for _ in 0..BATCH {
            let Some(socket) = self.socket.as_ref().filter(|_| self.accept) else {
                break;
            };
            match socket.listener().accept() {
                Ok((stream, _)) => {
                    accepted = true;
                    if self.greetings.len() == GREETINGS_MAX {
                        self.greetings.pop_first();
                    }
                    // A client that cannot be watched is dropped. Watching reports a greeting that
                    // has already arrived.
                    if stream.set_nonblocking(true).is_ok()
                        && let Ok(token) = self.watch(&stream)
                    {
                        self.greetings.insert(token, stream);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.accept = false,
                // The process is out of descriptors. The next event retries, for example one that
                // ends a connection. Returning true would make the caller spin until then.
                Err(_) => return accepted,
            }
        }
        accepted || self.accept
    }

    /// Handles a client that has not named its port and that has sent data or disconnected.
    fn greeting(&mut self, token: u64, hung_up: bool) -> Option<HostEvent> {
        let stream = self.greetings.get_mut(&token)?;
        match read_greeting(stream) {
            Greeting::Partial if !hung_up => None,
            Greeting::Partial | Greeting::Wrong => {
                self.greetings.remove(&token);
                None
            }
            Greeting::Port(port) => {
                let stream = self.greetings.remove(&token)?;
                self.unwatch(&stream);
                Some(HostEvent::Connect(stream, port))
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Greeting {
    Partial,
    Wrong,
    Port(u32),
}

/// Takes `CONNECT <port>\n` from a stream. Leaves the bytes after it, because they are for the
/// guest. Takes nothing while the greeting is incomplete.
fn read_greeting(stream: &mut UnixStream) -> Greeting {
    let mut bytes = [0; GREETING_MAX];
    let length = match recv(&*stream, &mut bytes[..], RecvFlags::PEEK) {
        Ok((_, length)) if length > 0 => length,
        Err(error) if error.kind() == ErrorKind::WouldBlock => return Greeting::Partial,
        _ => return Greeting::Wrong,
    };
    let Some(end) = bytes[..length].iter().position(|byte| *byte == b'\n') else {
        return match length {
            GREETING_MAX => Greeting::Wrong,
            _ => Greeting::Partial,
        };
    };
    let mut line = [0; GREETING_MAX];
    if stream.read_exact(&mut line[..=end]).is_err() {
        return Greeting::Wrong;
    }
    let port = std::str::from_utf8(&line[..end])
        .ok()
        .and_then(|line| line.strip_prefix("CONNECT "))
        .filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|port| port.parse().ok());
    port.map_or(Greeting::Wrong, Greeting::Port)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn greeting(said: &[u8]) -> (Greeting, Vec<u8>) {
        let (mut client, mut stream) = UnixStream::pair().unwrap();
        client.write_all(said).unwrap();
        stream.set_nonblocking(true).unwrap();
        let greeting = read_greeting(&mut stream);
        drop(client);
        let mut left = vec![];
        stream.read_to_end(&mut left).unwrap();
        (greeting, left)
    }

    #[test]
    fn a_greeting_takes_its_line_and_no_more() {
        assert_eq!(
            greeting(b"CONNECT 52\nhello"),
            (Greeting::Port(52), b"hello".to_vec())
        );
        assert_eq!(
            greeting(b"CONNECT 4294967295\n").0,
            Greeting::Port(u32::MAX)
        );
    }

    #[test]
    fn half_a_greeting_waits_and_is_left_in_place() {
        assert_eq!(greeting(b"CONN"), (Greeting::Partial, b"CONN".to_vec()));
        assert_eq!(greeting(b"").0, Greeting::Partial);
    }

    #[test]
    fn wrong_greetings() {
        for said in [
            &b"\n"[..],
            b"CONNECT \n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 1 2\n",
            b"connect 1\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xfe\n",
            b"CONNECT 00000000000000000000000001\n",
        ] {
            assert_eq!(greeting(said).0, Greeting::Wrong, "{said:?}");
        }
    }
}
