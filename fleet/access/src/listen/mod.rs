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
//!
//! A connection does not outlive its client's certificate. Each call on it is refused from the
//! moment at which the certificate is no longer accepted, and the connection is closed soon after.

pub mod admission;
pub mod client_cas;
pub mod slots;
pub mod tls;

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
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
use self::tls::{Current, Tls, shake};
use crate::audit::Audit;
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
/// The time for which a connection stays open after its client's certificate is no longer accepted,
/// so that the client receives the errors that give this reason.
const GRACE: Duration = Duration::from_secs(2);
/// The delay before a listener that cannot accept is tried again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The peer of a connection. Each request carries it in its extensions.
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

/// A connection whose client is known. Reads and writes fail once the client's certificate is no
/// longer accepted.
pub struct Connection {
    stream: Stream,
    peer: Peer,
    end: End,
    _slot: Slot<String>,
}

/// Determines when the daemon ends a connection.
enum End {
    /// No certificate limits the connection.
    Never,
    /// Resolves when the connection must end.
    Awaited(Pin<Box<dyn Future<Output = ()> + Send>>),
    Now,
}

impl End {
    /// Returns the end of a client's connection.
    fn of(admission: &Admission, identity: &Arc<Identity>) -> Self {
        match identity.certificate {
            Some(_) => Self::Awaited(Box::pin(unaccepted(
                admission.clone(),
                Arc::clone(identity),
            ))),
            None => Self::Never,
        }
    }

    /// Fails if the connection must end. Otherwise, wakes the task when the connection must end.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if let Self::Awaited(end) = self
            && end.as_mut().poll(context).is_ready()
        {
            *self = Self::Now;
        }
        match self {
            Self::Now => Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the client's certificate is no longer accepted",
            )),
            Self::Never | Self::Awaited(_) => Ok(()),
        }
    }
}

/// Waits until the client's certificate is not accepted, and is still not accepted after [`GRACE`].
async fn unaccepted(admission: Admission, identity: Arc<Identity>) {
    let refusal = || admission.check(&identity).err();
    loop {
        admission.until(&identity, refusal).await;
        tokio::time::sleep(GRACE).await;
        // The policy or the CAs may have been corrected meanwhile.
        if let Some(refusal) = refusal() {
            let (principal, error) = (&identity.principal, refusal.to_string());
            tracing::info!(principal, error, "an open connection is closed");
            return;
        }
    }
}

/// The sending end of the channel that passes connections to the server.
pub struct Incoming {
    sender: mpsc::Sender<io::Result<Connection>>,
    admission: Admission,
    /// The log in which refused certificates are recorded.
    audit: Option<Audit>,
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
            audit: None,
            handshakes: Slots::new(MAX_HANDSHAKES, MAX_ADDRESS_HANDSHAKES, 0),
            tcp: Slots::new(MAX_TCP_CONNECTIONS, each, 0),
            unix: Slots::new(MAX_UNIX_CONNECTIONS, each, RESERVED_UNIX_CONNECTIONS),
        };
        (incoming, ReceiverStream::new(receiver))
    }

    /// Records refused certificates in this log, if there is one.
    #[must_use]
    pub fn recording(mut self, audit: impl Into<Option<Audit>>) -> Self {
        self.audit = audit.into();
        self
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
                    let stream = Stream::Unix(stream);
                    let connection = Connection::new(stream, identity, slot, &self.admission);
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
            let client = Client {
                address,
                sender: self.sender.clone(),
                admission: self.admission.clone(),
                audit: self.audit.clone(),
                slots: self.tcp.clone(),
            };
            tokio::spawn(client.identify(stream, tls.current(), handshake));
        }
    }
}

/// A client over TCP that is not identified yet.
struct Client {
    address: SocketAddr,
    sender: mpsc::Sender<io::Result<Connection>>,
    admission: Admission,
    audit: Option<Audit>,
    slots: Slots<String>,
}

impl Client {
    /// Identifies the client, and passes its connection to the server.
    async fn identify(self, stream: TcpStream, current: Arc<Current>, handshake: Slot<IpAddr>) {
        let address = self.address;
        let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, shake(stream, &current));
        let (stream, identity) = match shaken.await {
            Ok(Ok(known)) => known,
            Ok(Err(error)) => {
                if error.is_refusal {
                    self.record_refusal("", &error.why);
                }
                tracing::info!(%address, error = error.why, "TLS handshake refused");
                return;
            }
            Err(_) => {
                tracing::info!(%address, "TLS handshake not finished in time");
                return;
            }
        };
        drop(handshake);
        if let Err(refusal) = self.admission.check(&identity) {
            let (principal, error) = (&identity.principal, refusal.to_string());
            self.record_refusal(principal, &error);
            tracing::info!(%address, principal, error, "TLS handshake refused");
            return;
        }
        match self.slots.take(holder(&self.admission, &identity), false) {
            Ok(slot) => {
                let stream = Stream::Tls(Box::new(stream));
                let connection = Connection::new(stream, identity, slot, &self.admission);
                let _ = self.sender.send(Ok(connection)).await;
            }
            Err(full) => not_served(&identity.principal, full),
        }
    }

    fn record_refusal(&self, principal: &str, why: &str) {
        if let Some(audit) = &self.audit {
            audit.refused(&self.address.to_string(), principal, why);
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
    fn new(stream: Stream, identity: Identity, slot: Slot<String>, admission: &Admission) -> Self {
        let peer = Peer {
            identity: Arc::new(identity),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        };
        Self {
            stream,
            end: End::of(admission, &peer.identity),
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
        self.end.check(context)?;
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
        self.end.check(context)?;
        match &mut self.stream {
            Stream::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end.check(context)?;
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::Instant;

    use super::*;
    use crate::identity::Proof;
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

    const RULES: &str = "rules: [{name: a, principals: [alice], role: viewer}]";

    /// A connection of a client with a certificate, and the policy's file.
    struct Open {
        _folder: tempfile::TempDir,
        file: std::path::PathBuf,
        policy: LivePolicy,
        connection: Connection,
        client: UnixStream,
    }

    impl Open {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("policy.yaml");
            std::fs::write(&file, RULES).expect("written");
            let policy = LivePolicy::read(file.clone()).expect("good");
            let admission = Admission::new(policy.clone(), None);
            let identity = Identity {
                principal: "alice".to_owned(),
                certificate: Some(Proof {
                    fingerprint: "ab".repeat(32),
                    not_after: i64::MAX,
                    chain: vec![],
                    generation: 0,
                }),
            };
            let (client, server) = UnixStream::pair().expect("a pair");
            let slot = Slots::new(1, 1, 0).take(String::new(), false);
            let slot = slot.expect("free");
            let connection = Connection::new(Stream::Unix(server), identity, slot, &admission);
            Self {
                _folder: folder,
                file,
                policy,
                connection,
                client,
            }
        }

        fn revoke(&self, revoked: &str) {
            let text = format!("{RULES}\nrevoked_certificates: [{revoked}]");
            std::fs::write(&self.file, text).expect("written");
            self.policy.reload().expect("good");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_connection_is_closed_after_its_certificate_is_revoked() {
        let mut open = Open::new();
        open.client.write_all(b"a").await.expect("open");
        assert_eq!(open.connection.read_u8().await.expect("open"), b'a');
        open.revoke(&format!("'{}'", "ab".repeat(32)));
        let revoked = Instant::now();
        // The connection stays open for the answers to the calls that are in progress.
        open.client.write_all(b"b").await.expect("open");
        assert_eq!(open.connection.read_u8().await.expect("open"), b'b');
        open.connection.write_all(b"c").await.expect("open");
        let error = open.connection.read_u8().await.expect_err("closed");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(revoked.elapsed().as_secs(), GRACE.as_secs());
        let written = open.connection.write_all(b"d").await.expect_err("closed");
        assert_eq!(written.kind(), io::ErrorKind::ConnectionAborted);
        open.connection.flush().await.expect_err("closed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_revocation_that_is_taken_back_at_once_closes_nothing() {
        let mut open = Open::new();
        open.revoke(&format!("'{}'", "ab".repeat(32)));
        let read = tokio::time::timeout(GRACE / 2, open.connection.read_u8());
        read.await.expect_err("nothing to read");
        open.revoke("");
        let read = tokio::time::timeout(GRACE * 10, open.connection.read_u8());
        read.await.expect_err("nothing to read");
        open.client.write_all(b"a").await.expect("open");
        assert_eq!(open.connection.read_u8().await.expect("open"), b'a');
    }
}
