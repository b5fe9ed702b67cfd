// SPDX-License-Identifier: Apache-2.0
//! The guest's serial console.

/// A part of the console's output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsoleChunk {
    /// Offset of the first byte, in bytes since the guest's start.
    pub offset: u64,
    /// The bytes, at most 32 KiB.
    pub bytes: Vec<u8>,
}

/// A function that is called after each output and when the console closes.
pub type Listener = Box<dyn Fn() + Send + Sync>;

/// A console with a bounded history. No method waits for the guest or for a reader.
pub trait Console: Send + Sync {
    /// Returns the output from `offset` on, or no bytes if there is none yet. If the history no
    /// longer contains `offset`, the chunk starts at the oldest byte that is kept, and its own
    /// offset says so.
    fn read(&self, offset: u64) -> ConsoleChunk;

    /// Types `bytes` into the console and returns how many were accepted. The others do not fit,
    /// because the guest has not read earlier input.
    fn input(&self, bytes: &[u8]) -> usize;

    /// Returns whether the output is complete, because the guest has ended.
    fn is_closed(&self) -> bool;

    /// Registers a listener for the life of the console. [`Console::read`] sees all output that
    /// precedes a call of the listener. The listener may run on a vCPU's thread, so it must return
    /// at once.
    fn on_output(&self, listener: Listener);
}
