// SPDX-License-Identifier: Apache-2.0
//! Limits on the connections and calls that the API serves at the same time.
//!
//! A client beyond the limit gets RESOURCE_EXHAUSTED instead of waiting. For this, a few
//! connections beyond the limit are accepted and all their calls are refused. Further connections
//! are closed at once.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body_util::BodyExt;
use patchbay_proto::stream::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::transport::server::Connected;
use tower::{Layer, Service};

use super::status;
use crate::accept::accept;

/// Maximum number of connections.
const CONNECTIONS: usize = 64;
/// Maximum number of connections beyond the limit whose calls are answered with an error.
const REFUSED_CONNECTIONS: usize = 16;
/// Maximum number of concurrent calls per connection, including streams.
const CALLS: usize = 128;
/// Maximum number of HTTP/2 streams per connection. It is high enough that a call beyond the limit
/// arrives and can be refused. RFC 9113, 6.5.2, recommends at least 100.
pub const HTTP2_STREAMS: u32 = 160;
/// The peer of a connection, as a request extension.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The peer's uid; `None` if the kernel does not report it.
    pub uid: Option<u32>,
    /// Permits for calls; `None` for a connection beyond the limit.
    calls: Option<Arc<Semaphore>>,
}

#[cfg(test)]
impl Peer {
    pub fn with_uid(uid: Option<u32>) -> Self {
        Self { uid, calls: None }
    }
}

/// An accepted connection.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    peer: Peer,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// Returns a stream of accepted connections.
pub fn incoming(listener: UnixListener) -> ReceiverStream<std::io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(1);
    let served = Arc::new(Semaphore::new(CONNECTIONS));
    let refused = Arc::new(Semaphore::new(REFUSED_CONNECTIONS));
    tokio::spawn(async move {
        loop {
            let stream = tokio::select! {
                (stream, _) = accept(|| listener.accept()) => stream,
                () = sender.closed() => return,
            };
            let permit = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).try_acquire_owned();
            let admitted = match permit(&served) {
                Ok(permit) => Some((permit, Some(Arc::new(Semaphore::new(CALLS))))),
                Err(_) => permit(&refused).ok().map(|permit| (permit, None)),
            };
            let Some((permit, calls)) = admitted else {
                continue;
            };
            let uid = stream.peer_cred().ok().map(|peer| peer.uid());
            // The connection is closed if there is no descriptor or memory for it.
            let Ok(stream) = Stream::new(stream) else {
                continue;
            };
            let connection = Connection {
                stream,
                peer: Peer { uid, calls },
                _permit: permit,
            };
            if sender.send(Ok(connection)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(receiver)
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Middleware that refuses calls beyond the limits.
#[derive(Clone, Debug)]
pub struct CallLimit;

impl<S> Layer<S> for CallLimit {
    type Service = LimitedCalls<S>;

    fn layer(&self, inner: S) -> LimitedCalls<S> {
        LimitedCalls(inner)
    }
}

/// A service wrapped by [`CallLimit`].
#[derive(Clone, Debug)]
pub struct LimitedCalls<S>(S);

impl<S> Service<http::Request<Body>> for LimitedCalls<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let permit = match admit(request.extensions().get()) {
            Ok(permit) => permit,
            Err(status) => return Box::pin(std::future::ready(Ok(status.into_http()))),
        };
        let answer = self.0.call(request);
        Box::pin(async move {
            // A stream counts as a call until its last message.
            let hold = |body: Body| {
                Body::new(body.map_frame(move |frame| {
                    let _ = &permit;
                    frame
                }))
            };
            Ok(answer.await?.map(hold))
        })
    }
}

fn admit(peer: Option<&Peer>) -> Result<Option<OwnedSemaphorePermit>, Box<Status>> {
    let Some(peer) = peer else { return Ok(None) };
    let Some(calls) = &peer.calls else {
        let message = format!(
            "{CONNECTIONS} clients are connected to this monitor already; end one of them and connect again"
        );
        return Err(Box::new(status::exhausted("TOO_MANY_CONNECTIONS", message)));
    };
    Arc::clone(calls)
        .try_acquire_owned()
        .map(Some)
        .map_err(|_| {
            let message = format!(
                "{CALLS} calls of this connection are in progress already; end one of them"
            );
            Box::new(status::exhausted("TOO_MANY_CALLS", message))
        })
}
