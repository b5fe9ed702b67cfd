// SPDX-License-Identifier: Apache-2.0
//! Connections of clients.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Endpoint, Uri};
use tower::Service;

use crate::stream::Stream;

/// Flow-control window of a stream in bytes. It is small compared with [`CONNECTION_WINDOW`], so
/// that a stream that is not read waits for its reader. With other windows the h2 library ends the
/// whole connection with ENHANCE_YOUR_CALM ("too_many_data_frames"): it counts the unread messages
/// below 256 bytes against half of the connection's window.
const STREAM_WINDOW: u32 = 128 << 10;
/// Flow-control window of a connection in bytes.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// An endpoint for a connector: its URI is never resolved.
pub fn endpoint() -> Endpoint {
    Endpoint::from_static("http://patchbay.invalid")
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
}

type Connection = TokioIo<Stream>;
type Connecting = Pin<Box<dyn Future<Output = io::Result<Connection>> + Send>>;

/// A connector to the unix socket at `path`.
pub fn unix_socket(
    path: impl Into<PathBuf>,
) -> impl Service<Uri, Response = Connection, Error = io::Error, Future = Connecting> + Send + 'static
{
    let path = path.into();
    tower::service_fn(move |_| -> Connecting {
        let path = path.clone();
        Box::pin(async move {
            let socket = UnixStream::connect(path).await?;
            Stream::new(socket).map(TokioIo::new)
        })
    })
}
