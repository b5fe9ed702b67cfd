// SPDX-License-Identifier: Apache-2.0
//! Streams a snapshot of the guest.
//!
//! ```text
//!  executor ── memory ──▶ pieces ──▶ forward ──▶ client
//!     └───────── state ──────────────▲  └── timed out, or the client is gone: pieces closes
//! ```
//!
//! The executor waits for room in `pieces`, so the guest stays stopped as long as the client reads.
//! `forward` limits this time.

use std::time::Duration;

use patchbay_guest::snapshot::{MemorySink, SinkClosed};
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
                next = pieces.recv().await;
            }
            // Ends the wait of the executor.
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
                message: format!(
                    "the client did not take the snapshot within {timeout:?}; repeat the command with a longer --timeout"
                ),
            },
        };
        let _ = sender.send(Err(last.into())).await;
    });
    ReceiverStream::new(receiver)
}
