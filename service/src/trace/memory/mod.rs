// SPDX-License-Identifier: Apache-2.0
//! Reads trace events from the rings in the guest's memory.
//!
//! ```text
//!  registry: finds the rings ──▶ reader: whole events, losses ──▶ stream: the client's selection
//! ```
//!
//! The guest's kernel records the events that its command line enables, or a user in the guest. A
//! [`reader::Reader`] needs no agent and writes nothing to the guest. As for the kernel's log, each
//! client has its own reader, which is polled only after the client has taken the previous events.

mod formats;
mod gaps;
mod reader;
mod stream;

pub use patchbay_observe::trace::Counters;

pub use self::reader::counters;
pub use self::stream::{MemoryStream, Wanted};
