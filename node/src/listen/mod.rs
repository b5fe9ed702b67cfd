// SPDX-License-Identifier: Apache-2.0
//! Connections of clients: a unix socket, and TCP with mutual TLS.
//!
//! A connection reaches the HTTP/2 server only when it is known who is at its other end.

pub mod tls;

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use patchbay_proto::socket::ListeningSocket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::identity::Identity;
use tls::Tls;

/// Connections that are served at once, handshakes included.
pub const MAX_CONNECTIONS: usize = 512;
/// Calls of one connection, streams among them.
pub const MAX_CALLS: usize = 128;
/// A client that has not finished the TLS handshake by then is closed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// When a listener that cannot accept is tried again.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The other end of a connection. Each request carries it in its extensions.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The peer's name.
    pub identity: Arc<Identity>,
    /// One permit for each call of the connection.
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
    _permit: OwnedSemaphorePermit,
}

/// Connections as the server takes them.
pub struct Incoming {
    sender: mpsc::Sender<io::Result<Connection>>,
    permits: Arc<Semaphore>,
}

impl Incoming {
    /// The sending and the receiving end.
    #[must_use]
    pub fn new() -> (Self, ReceiverStream<io::Result<Connection>>) {
        let (sender, receiver) = mpsc::channel(16);
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        (Self { sender, permits }, ReceiverStream::new(receiver))
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
            let Some(permit) = self.permit() else {
                continue;
            };
            match stream.peer_cred() {
                Ok(peer) => {
                    let identity = Identity::of_uid(peer.uid());
                    let connection = Connection::new(Stream::Unix(stream), identity, permit);
                    let _ = self.sender.send(Ok(connection)).await;
                }
                Err(error) => tracing::warn!(%error, "a peer's uid is not known; closed"),
            }
        }
    }

    /// Accepts on a TCP socket until the server ends. Handshakes run beside each other.
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
            let Some(permit) = self.permit() else {
                continue;
            };
            let (sender, acceptor) = (self.sender.clone(), tls.acceptor());
            tokio::spawn(async move {
                let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, async {
                    stream
                        .set_nodelay(true)
                        .map_err(|error| error.to_string())?;
                    let stream = acceptor
                        .accept(stream)
                        .await
                        .map_err(|error| error.to_string())?;
                    let identity = tls::identity(&stream)?;
                    Ok::<_, String>((stream, identity))
                });
                match handshake.await {
                    Ok(Ok((stream, identity))) => {
                        let stream = Stream::Tls(Box::new(stream));
                        let connection = Connection::new(stream, identity, permit);
                        let _ = sender.send(Ok(connection)).await;
                    }
                    Ok(Err(error)) => tracing::info!(%address, error, "TLS handshake refused"),
                    Err(_) => tracing::info!(%address, "TLS handshake not finished in time"),
                }
            });
        }
    }

    /// A client beyond the limit is closed: it may have no certificate, so it is owed no answer.
    fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        if permit.is_err() {
            tracing::warn!("{MAX_CONNECTIONS} connections are open; another is closed");
        }
        permit.ok()
    }
}

async fn not_accepted(error: &io::Error) {
    tracing::warn!(%error, "a connection cannot be accepted; raise the limit on open files");
    tokio::time::sleep(ACCEPT_RETRY).await;
}

impl Connection {
    fn new(stream: Stream, identity: Identity, permit: OwnedSemaphorePermit) -> Self {
        let peer = Peer {
            identity: Arc::new(identity),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        };
        Self {
            stream,
            peer,
            _permit: permit,
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
