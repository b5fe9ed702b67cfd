// SPDX-License-Identifier: Apache-2.0
//! Serves metrics for Prometheus on a loopback address or a unix socket. They have no access
//! control, so they are not served beyond the host.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use patchbay_proto::socket::{ListeningSocket, SocketError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// The maximum number of connections that read metrics.
const MAX_CONNECTIONS: usize = 16;
const TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A listener for Prometheus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A unix socket with mode 0600.
    Unix(PathBuf),
    /// A loopback address.
    Loopback(SocketAddr),
}

impl std::str::FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Self::Loopback(address)),
            Ok(address) => Err(format!(
                "{address} can be reached from other hosts, and metrics have no access control; give a loopback address or unix:PATH"
            )),
            Err(_) => Err(format!(
                "{text:?} is no address; give 127.0.0.1:PORT or unix:PATH"
            )),
        }
    }
}

/// The error of a TCP listener that cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("{address} cannot be listened on: {error}; give another address")]
pub struct ListenError {
    /// The address that was given.
    pub address: SocketAddr,
    /// The operating system's error.
    pub error: io::Error,
}

/// The reason why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ScrapeError {
    /// The socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The address cannot be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The operating system refused the socket.
    #[error("metrics cannot be served")]
    Start(#[from] io::Error),
}

/// Binds the address. The returned future serves `text` at `/metrics` until it is dropped.
///
/// # Errors
/// [`ScrapeError`].
pub async fn serve<T, F>(
    address: &MetricsAddress,
    text: T,
) -> Result<Pin<Box<dyn Future<Output = ()> + Send>>, ScrapeError>
where
    T: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = Result<String, fmt::Error>> + Send + 'static,
{
    match *address {
        MetricsAddress::Unix(ref path) => {
            let socket = ListeningSocket::bind(path)?;
            let listener = socket.tokio_listener()?;
            Ok(Box::pin(accept((socket, listener), text)))
        }
        MetricsAddress::Loopback(address) => {
            let listener = TcpListener::bind(address).await;
            let listener = listener.map_err(|error| ListenError { address, error })?;
            tracing::info!(address = %listener.local_addr()?, "metrics");
            Ok(Box::pin(accept(listener, text)))
        }
    }
}

/// A listener on a TCP or unix socket.
trait Listener: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        Ok(Self::accept(self).await?.0)
    }
}

impl Listener for (ListeningSocket, tokio::net::UnixListener) {
    type Stream = tokio::net::UnixStream;

    async fn accept(&self) -> io::Result<Self::Stream> {
        Ok(self.1.accept().await?.0)
    }
}

async fn accept<L, T, F>(listener: L, text: T)
where
    L: Listener,
    T: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = Result<String, fmt::Error>> + Send + 'static,
{
    let (text, permits) = (Arc::new(text), Arc::new(Semaphore::new(MAX_CONNECTIONS)));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection for metrics cannot be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let text = Arc::clone(&text);
        tokio::spawn(async move {
            let _permit = permit;
            let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
                let text = (request.uri().path() == "/metrics").then(|| text());
                async move {
                    let text = match text {
                        Some(text) => Some(text.await),
                        None => None,
                    };
                    Ok::<_, std::convert::Infallible>(answer(text))
                }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(TIMEOUT, connection).await;
        });
    }
}

/// Creates the response. `None` is for a path that has no metrics.
fn answer(text: Option<Result<String, fmt::Error>>) -> http::Response<Full<bytes::Bytes>> {
    let (status, text) = match text {
        Some(Ok(text)) => (http::StatusCode::OK, text),
        Some(Err(error)) => (http::StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        None => (
            http::StatusCode::NOT_FOUND,
            "metrics are at /metrics\n".to_owned(),
        ),
    };
    let mut answer = http::Response::new(Full::from(text));
    *answer.status_mut() = status;
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    answer
        .headers_mut()
        .insert("content-type", http::HeaderValue::from_static(openmetrics));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_stay_on_the_host() {
        for good in ["127.0.0.1:9100", "[::1]:0", "unix:/run/x.sock"] {
            assert!(good.parse::<MetricsAddress>().is_ok(), "{good}");
        }
        for bad in ["0.0.0.0:9100", "[::]:1", "192.0.2.1:9100", "localhost", ""] {
            let error = bad.parse::<MetricsAddress>().expect_err(bad);
            assert!(error.contains("unix:PATH"), "{error}");
        }
    }
}
