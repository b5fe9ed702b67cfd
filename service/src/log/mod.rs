// SPDX-License-Identifier: Apache-2.0
//! Reads the log of the guest's kernel from the guest's memory.
//!
//! ```text
//!  registry: where the log is ──▶ reader: whole records, losses ──▶ stream: what a client asked for
//! ```
//!
//! A [`Reader`] asks nothing of the guest and writes nothing to it, so it works in a guest that is
//! paused, hangs or has panicked. Each client has a reader of its own, which is polled only after
//! the client has taken what was read before. A client that does not read therefore costs nothing
//! and delays nobody; it learns how many records the kernel has overwritten meanwhile.

mod reader;
mod stream;
mod text;

pub use self::reader::Place;
pub use self::stream::{LogStream, Wanted};

#[cfg(test)]
mod tests;
