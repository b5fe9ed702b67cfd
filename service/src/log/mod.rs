// SPDX-License-Identifier: Apache-2.0
//! Reads the log of the guest's kernel from the guest's memory.
//!
//! ```text
//!  registry: finds the log ──▶ reader: whole records, losses ──▶ stream: the client's selection
//! ```
//!
//! A [`Reader`] needs no cooperation of the guest and writes nothing to it, so it works for a guest
//! that is paused, hangs or has panicked. Each client has its own reader, which is polled only
//! after the client has taken the previous records. A client that stops reading therefore uses no
//! further memory and delays no other client. When it continues, it gets the number of records that
//! the kernel has overwritten meanwhile.

mod reader;
mod stream;
mod text;

pub use self::reader::{Details, Place};
pub use self::stream::{LogStream, Wanted};
pub use self::text::first_line;

#[cfg(test)]
mod tests;
