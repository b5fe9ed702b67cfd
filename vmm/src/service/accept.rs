// SPDX-License-Identifier: Apache-2.0
//! The API's incoming connections.

use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// How long to wait when accept(2) fails: for want of descriptors it fails at once and without end,
/// and nothing tells when there are some again.
const RETRY: Duration = Duration::from_millis(100);

/// Accepts connections until the stream is dropped; an accept that fails is tried again a little later.
pub(super) fn connections(listener: UnixListener) -> ReceiverStream<std::io::Result<UnixStream>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut failing = false;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = sender.closed() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    failing = false;
                    if sender.send(Ok(stream)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "the API accepts no connections; raise the limit on open files");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    });
    ReceiverStream::new(receiver)
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    /// A socket that does not listen fails at once and without end, as a listener without descriptors does. The
    /// clock, which runs only while nothing else does, would stand still if accepting did not pause.
    #[tokio::test(start_paused = true)]
    async fn an_accept_that_fails_is_not_tried_without_pause() {
        let family = rustix::net::AddressFamily::UNIX;
        let kind = rustix::net::SocketType::STREAM;
        let flags = rustix::net::SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
        let listener = std::os::unix::net::UnixListener::from(socket);
        assert_eq!(
            listener.accept().unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
        let mut incoming = connections(UnixListener::from_std(listener).unwrap());
        let taken = async {
            while let Some(connection) = incoming.next().await {
                // As tonic does.
                let _ = connection.map_err(drop);
            }
        };
        let taken = tokio::time::timeout(Duration::from_secs(60), taken).await;
        taken.expect_err("no connection, and no end");
    }
}
