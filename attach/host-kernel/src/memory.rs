// SPDX-License-Identifier: Apache-2.0
//! The interface of the transports that read the memory of the host's kernel.

/// The error of a read from the kernel's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Nothing is mapped at this address.
    #[error("nothing is mapped at {0:#x} in the host's kernel")]
    Unmapped(u64),
    /// The transport failed.
    #[error("{0}")]
    Transport(String),
}

/// Reads from the memory of the kernel that runs this process.
pub trait KernelMemory: std::fmt::Debug + Send {
    /// Returns the transport's name.
    fn name(&self) -> &'static str;

    /// Reads bytes at a virtual address.
    ///
    /// # Errors
    /// [`ReadError`]. The contents of `bytes` are then unspecified.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), ReadError>;

    /// Reads the word at this offset of the calling thread's own `struct task_struct`. Every walk
    /// begins with this read, because it needs no address.
    ///
    /// # Errors
    /// [`ReadError`].
    fn own_task(&mut self, offset: u32) -> Result<u64, ReadError>;
}

/// The error of a transport that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {error}; {next}")]
pub struct TransportError {
    /// The operation that failed.
    pub what: &'static str,
    /// The reason.
    pub error: String,
    /// The next step for the user.
    pub next: &'static str,
}
