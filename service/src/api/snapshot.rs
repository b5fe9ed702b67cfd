// SPDX-License-Identifier: Apache-2.0
//! Streams a snapshot of the guest.
//!
//! ```text
//!  executor ── memory ──▶ pieces ──▶ forward ──▶ client
//!     └───────── state ──────────────▲  └── timed out, or the client is gone: pieces closes
//! ```
//!
//! The executor waits for room in `pieces`, so the guest stays stopped as long as the client reads.
//! `forward` limits this time. The executor also checks `pieces` while it skips pages of zeros.

use std::time::Duration;

use patchbay_guest::snapshot::{MemorySink, SaveError, SinkClosed};
use patchbay_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::guests::ServedGuest;
use super::reading::Records;
use crate::keys::{KeysError, SaveRequest};

/// Time that the vCPUs have to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Number of pieces that wait for the client, of at most 1 MiB each.
const PIECES: usize = 4;
/// Maximum size of a piece of the state in bytes.
const PIECE: usize = 1 << 20;

impl Records for v1::SnapshotGuestResponse {
    /// Returns the number of runs of pages.
    fn records(&self) -> usize {
        usize::from(!self.memory.is_empty())
    }
}

struct Pieces(mpsc::Sender<v1::SnapshotGuestResponse>);

impl MemorySink for Pieces {
    fn take(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), SinkClosed> {
        let piece = v1::SnapshotGuestResponse {
            memory_offset: offset,
            memory: bytes,
            ..Default::default()
        };
        self.0.blocking_send(piece).map_err(|_| SinkClosed)
    }

    fn check(&mut self) -> Result<(), SinkClosed> {
        match self.0.is_closed() {
            true => Err(SinkClosed),
            false => Ok(()),
        }
    }
}

/// Starts to save the guest. The stream ends with an error if the guest is not saved in time.
pub fn save(
    guest: &ServedGuest,
    timeout: Duration,
) -> ReceiverStream<Result<v1::SnapshotGuestResponse, Status>> {
    let (sender, receiver) = mpsc::channel(1);
    let keys = guest.keys.clone();
    tokio::spawn(async move {
        let (piece, mut pieces) = mpsc::channel(PIECES);
        let first = v1::SnapshotGuestResponse {
            memory_bytes: keys.machine().description().memory_bytes,
            ..Default::default()
        };
        let save = keys.save(SaveRequest {
            timeout: STOP_TIMEOUT,
            sink: Box::new(Pieces(piece)),
        });
        let forward = async {
            let mut next = Some(first);
            while let Some(message) = next {
                if sender.send(Ok(message)).await.is_err() {
                    break;
                }
                next = tokio::select! {
                    piece = pieces.recv() => piece,
                    // There may be no piece for long, because pages of zeros are not sent.
                    () = sender.closed() => None,
                };
            }
            // The executor, which waits for room or looks for a page to send, then gives up.
            drop(pieces);
        };
        let both = async { tokio::join!(save, forward).0 };
        let last = match tokio::time::timeout(timeout, both).await {
            Ok(Ok(state)) => {
                for piece in state.chunks(PIECE) {
                    let message = v1::SnapshotGuestResponse {
                        state: piece.to_vec(),
                        ..Default::default()
                    };
                    if sender.send(Ok(message)).await.is_err() {
                        return;
                    }
                }
                return;
            }
            Ok(Err(error)) => error,
            Err(_) => KeysError::NotSaved {
                message: SaveError::Closed.to_string(),
            },
        };
        let _ = sender.send(Err(last.into())).await;
    });
    ReceiverStream::new(receiver)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use patchbay_guest::testing::{InMemoryGuest, TestKey};
    use tokio::sync::mpsc::UnboundedReceiver;
    use tokio_stream::{Stream, StreamExt};

    use super::*;
    use crate::keys::{Keys, KeysConfig, PauseState, Registry};
    use crate::trace::Tracing;

    /// Time after which a save that nobody ends gives up.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Serves a guest with an endless memory of zeros. The receiver gets `None` when a save begins,
    /// and then its error.
    fn serve_zeros() -> (ServedGuest, UnboundedReceiver<Option<SaveError>>) {
        let registry = Arc::new(Registry::default());
        let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
        let (steps, seen) = mpsc::unbounded_channel();
        guest.on_save(move |sink| {
            steps.send(None).expect("the test runs");
            let deadline = Instant::now() + PATIENCE;
            let error = loop {
                match sink.check() {
                    Ok(()) if Instant::now() < deadline => std::thread::yield_now(),
                    Ok(()) => break SaveError::Unable("nobody has ended it".to_owned()),
                    Err(closed) => break closed.into(),
                }
            };
            steps.send(Some(error.clone())).expect("the test runs");
            Err(error)
        });
        let (keys, _) = Keys::start(guest, registry, KeysConfig::default()).expect("a thread");
        let served = ServedGuest::start(keys, Tracing::default()).expect("served");
        (served, seen)
    }

    /// Returns what the stream ends with.
    async fn last<T>(stream: impl Stream<Item = T>) -> T {
        let all: Vec<T> = stream.collect().await;
        all.into_iter().next_back().expect("an answer")
    }

    #[tokio::test]
    async fn a_client_that_leaves_ends_a_save_of_zeros() {
        let (guest, mut seen) = serve_zeros();
        let mut stream = save(&guest, Duration::from_secs(3600));
        let first = stream.next().await.expect("one").expect("no error");
        assert!(first.memory_bytes > 0);
        assert_eq!(seen.recv().await, Some(None));
        drop(stream);
        assert_eq!(seen.recv().await, Some(Some(SaveError::Closed)));
        guest.keys.resume().await.expect("served");
        assert_eq!(guest.keys.pause_state(), PauseState::Running);
    }

    #[tokio::test]
    async fn the_deadline_ends_a_save_of_zeros() {
        let (guest, mut seen) = serve_zeros();
        let error = last(save(&guest, Duration::from_millis(50))).await;
        let text = error.expect_err("not saved").message().to_owned();
        assert!(text.contains("--timeout"), "{text}");
        // The next command is served after the save, which may not have begun.
        guest.keys.resume().await.expect("served");
        if seen.try_recv().is_ok() {
            assert_eq!(seen.try_recv(), Ok(Some(SaveError::Closed)));
        }
    }

    #[tokio::test]
    async fn a_client_that_left_before_its_turn_does_not_stop_the_guest() {
        let (guest, mut seen) = serve_zeros();
        let first = save(&guest, Duration::from_secs(3600));
        assert_eq!(seen.recv().await, Some(None));
        // This one waits for the first one.
        let second = last(save(&guest, Duration::from_millis(1))).await;
        second.expect_err("not saved");
        drop(first);
        assert_eq!(seen.recv().await, Some(Some(SaveError::Closed)));
        guest.keys.resume().await.expect("served");
        assert!(seen.try_recv().is_err(), "the second one has begun");
    }
}
