// SPDX-License-Identifier: Apache-2.0
//! Accepts connections of clients on a unix socket, and over TCP with mutual TLS.
//!
//! A connection reaches the HTTP/2 server only after its peer is identified. Until then it counts
//! towards the handshakes of its address, and afterwards towards the connections of its principal:
//!
//! ```text
//!  TCP ──▶ handshakes, by address ──▶ TLS ──▶ connections over TCP, by principal ──▶ HTTP/2
//!  unix socket ─────────────────────────────▶ connections over the socket, by uid ──▶
//! ```
//!
//! The pools are separate, so clients without a certificate cannot keep out clients that have one,
//! and clients over TCP cannot keep out users of this host.

pub mod admission;
pub mod client_cas;
pub mod slots;
pub mod tls;

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use patchbay_proto::socket::ListeningSocket;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use self::admission::Admission;
use self::slots::{Full, Slot, Slots, network};
use self::tls::{Tls, shake};
use crate::identity::Identity;

/// The default maximum age of a stream.
pub const DEFAULT_STREAM_AGE: Duration = Duration::from_hours(12);

/// The maximum number of TLS handshakes in progress.
pub const MAX_HANDSHAKES: usize = 512;
/// The maximum number of TLS handshakes in progress from one address. An IPv6 /64 network counts as
/// one address.
pub const MAX_ADDRESS_HANDSHAKES: usize = 32;
/// The maximum number of connections over TCP with a verified certificate.
pub const MAX_TCP_CONNECTIONS: usize = 512;
/// The maximum number of connections over the unix socket.
pub const MAX_UNIX_CONNECTIONS: usize = 256;
/// The number of connections over the unix socket that are reserved for root and the daemon's own
/// user.
pub const RESERVED_UNIX_CONNECTIONS: usize = 32;
/// The maximum number of connections of one principal. All principals that no rule of the policy
/// names share one such limit. It does not apply to root and the daemon's own user on the unix
/// socket.
pub const MAX_PRINCIPAL_CONNECTIONS: usize = 64;
/// The maximum number of calls of one connection, including streams.
pub const MAX_CALLS: usize = 128;
/// The timeout for a client's TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The delay before a listener that cannot accept is tried again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The peer of a connection. Each request has it in its extensions.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The peer's name.
    pub identity: Arc<Identity>,
    /// A semaphore with one permit for each call of the connection.
    pub calls: Arc<Semaphore>,
}

enum Stream {
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection whose client is known.
pub struct Connection {
    stream: Stream,
    peer: Peer,
    _slot: Slot<String>,
}

/// The sending end of the channel that passes connections to the server.
pub struct Incoming {
    sender: mpsc::Sender<io::Result<Connection>>,
    admission: Admission,
    handshakes: Slots<IpAddr>,
    /// The slots of connections over TCP, by principal.
    tcp: Slots<String>,
    /// The slots of connections over the unix socket, by principal.
    unix: Slots<String>,
}

impl Incoming {
    /// Returns the sending and the receiving end. `admission` decides about certificates.
    #[must_use]
    pub fn new(admission: Admission) -> (Self, ReceiverStream<io::Result<Connection>>) {
        let (sender, receiver) = mpsc::channel(16);
        let each = MAX_PRINCIPAL_CONNECTIONS;
        let incoming = Self {
            sender,
            admission,
            handshakes: Slots::new(MAX_HANDSHAKES, MAX_ADDRESS_HANDSHAKES, 0),
            tcp: Slots::new(MAX_TCP_CONNECTIONS, each, 0),
            unix: Slots::new(MAX_UNIX_CONNECTIONS, each, RESERVED_UNIX_CONNECTIONS),
        };
        (incoming, ReceiverStream::new(receiver))
    }

    /// Accepts on a unix socket until the server ends.
    pub async fn serve_unix(&self, socket: &ListeningSocket) -> io::Result<()> {
        let listener = socket.tokio_listener()?;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.sender.closed() => return Ok(()),
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    not_accepted(&error).await;
                    continue;
                }
            };
            let uid = match stream.peer_cred() {
                Ok(peer) => peer.uid(),
                Err(error) => {
                    tracing::warn!(%error, "a peer's uid cannot be read; its connection is closed");
                    continue;
                }
            };
            let identity = Identity::of_uid(uid);
            let is_privileged = uid == 0 || uid == geteuid().as_raw();
            let holder = holder(&self.admission, &identity);
            match self.unix.take(holder, is_privileged) {
                Ok(slot) => {
                    let connection = Connection::new(Stream::Unix(stream), identity, slot);
                    let _ = self.sender.send(Ok(connection)).await;
                }
                Err(full) => not_served(&identity.principal, full),
            }
        }
    }

    /// Accepts on a TCP socket until the server ends. Handshakes run concurrently.
    pub async fn serve_tcp(&self, listener: TcpListener, tls: Tls) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.sender.closed() => return,
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    not_accepted(&error).await;
                    continue;
                }
            };
            // The peer may have no certificate, so it gets no answer.
            let handshake = match self.handshakes.take(network(address.ip()), false) {
                Ok(handshake) => handshake,
                Err(full) => {
                    tracing::info!(%address, "closed before its TLS handshake: {full}");
                    continue;
                }
            };
            let (sender, current) = (self.sender.clone(), tls.current());
            let (admission, tcp) = (self.admission.clone(), self.tcp.clone());
            tokio::spawn(async move {
                let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, shake(stream, &current));
                let (stream, identity) = match shaken.await {
                    Ok(Ok(known)) => known,
                    Ok(Err(error)) => {
                        tracing::info!(%address, error, "TLS handshake refused");
                        return;
                    }
                    Err(_) => {
                        tracing::info!(%address, "TLS handshake not finished in time");
                        return;
                    }
                };
                drop(handshake);
                if let Err(refusal) = admission.check(&identity) {
                    let (principal, error) = (&identity.principal, refusal.to_string());
                    tracing::info!(%address, principal, error, "TLS handshake refused");
                    return;
                }
                match tcp.take(holder(&admission, &identity), false) {
                    Ok(slot) => {
                        let stream = Stream::Tls(Box::new(stream));
                        let connection = Connection::new(stream, identity, slot);
                        let _ = sender.send(Ok(connection)).await;
                    }
                    Err(full) => not_served(&identity.principal, full),
                }
            });
        }
    }
}

/// Returns the holder of a connection's slot. A principal that no rule names can only connect and
/// be refused. A CA or a host may have any number of such principals, so all of them count as one
/// holder and cannot exhaust the pool.
fn holder(admission: &Admission, identity: &Identity) -> String {
    match admission.policy().current().names(&identity.principal) {
        true => identity.principal.clone(),
        false => String::new(),
    }
}

fn not_served(principal: &str, full: Full) {
    tracing::warn!(principal, "a connection is closed: {full}");
}

async fn not_accepted(error: &io::Error) {
    tracing::warn!(%error, "a connection cannot be accepted; raise the limit on open files");
    tokio::time::sleep(ACCEPT_RETRY).await;
}

impl Connection {
    fn new(stream: Stream, identity: Identity, slot: Slot<String>) -> Self {
        let peer = Peer {
            identity: Arc::new(identity),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        };
        Self {
            stream,
            peer,
            _slot: slot,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Unix(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::LivePolicy;

    #[test]
    fn principals_whom_no_rule_names_share_their_places() {
        let admission = Admission::new(LivePolicy::own_user_only(7), None);
        let slots = Slots::new(MAX_UNIX_CONNECTIONS, MAX_PRINCIPAL_CONNECTIONS, 0);
        let take = |uid| slots.take(holder(&admission, &Identity::of_uid(uid)), false);
        let strangers = 100..100 + u32::try_from(MAX_UNIX_CONNECTIONS).expect("few");
        let taken: Vec<_> = strangers.map_while(|uid| take(uid).ok()).collect();
        assert_eq!(taken.len(), MAX_PRINCIPAL_CONNECTIONS);
        let own: Vec<_> = (0..MAX_PRINCIPAL_CONNECTIONS)
            .map(|_| take(7).expect("a slot of its own"))
            .collect();
        assert_eq!(take(7).err(), Some(Full::Holder(MAX_PRINCIPAL_CONNECTIONS)));
        drop((taken, own));
    }
}
