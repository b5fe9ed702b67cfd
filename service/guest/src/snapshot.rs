// SPDX-License-Identifier: Apache-2.0
//! Saving a stopped guest, so that copies of it can be started later.

/// The service's part of a snapshot: the guest's origin, the requests by which its kernel has
/// registered its tables, and the holds and claims on its keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlState {
    /// Name of the guest that is saved.
    pub guest: String,
    /// Incarnation of the service that saves it.
    pub incarnation: String,
    /// The requests that make up the current registration, in the order in which they were
    /// accepted. Empty for a kernel that does not register.
    pub requests: Vec<KeptRequest>,
    /// Holds and claims as the bytes of a ledger. Empty if there are none.
    pub ledger: Vec<u8>,
}

/// A request of the guest that the service has accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptRequest {
    /// The operation (`PATCHBAY_OP_*`).
    pub op: u32,
    /// The content of the request's page.
    pub page: Vec<u8>,
    /// The arrays that the page refers to and that the guest may have freed since.
    pub arrays: Vec<KeptArray>,
}

/// An array that a request refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptArray {
    /// The guest-virtual address in the request.
    pub address: u64,
    /// The content of the array.
    pub bytes: Vec<u8>,
}

/// Receiver of a guest's memory.
pub trait MemorySink {
    /// Takes bytes of the snapshot's memory file from `offset` on. Bytes that are never passed are
    /// zero. May wait for the receiver.
    ///
    /// # Errors
    /// [`SinkClosed`]: the receiver needs no more bytes.
    fn take(&mut self, offset: u64, bytes: Vec<u8>) -> Result<(), SinkClosed>;

    /// Checks, without blocking, that the receiver still waits. While the guest is stopped, this is
    /// called regularly even if there is nothing to pass, so that the guest does not stay stopped
    /// for a receiver that has gone.
    ///
    /// # Errors
    /// [`SinkClosed`]: the receiver needs no more bytes.
    fn check(&mut self) -> Result<(), SinkClosed>;
}

/// The receiver of a snapshot has gone or was too slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkClosed;

/// A guest cannot be saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SaveError {
    /// The reason, as a sentence.
    #[error("{0}")]
    Unable(String),
    /// The receiver has gone or was too slow.
    #[error(
        "the guest was not saved in time, because the client, the host's storage or an earlier command was slow; repeat the command with a longer --timeout"
    )]
    Closed,
}

impl From<SinkClosed> for SaveError {
    fn from(_: SinkClosed) -> Self {
        Self::Closed
    }
}
