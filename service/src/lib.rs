// SPDX-License-Identifier: Apache-2.0

//! Patchbay's control service: the static keys and the tracepoints of one guest, and the gRPC
//! interface to them, whatever monitor runs the guest.
//!
//! ```text
//!   api ──▶ trace ──▶ keys ──▶ static-keys (the engine)
//!    │        │         │
//!    └────────┴─────────┴──▶ the seams: guest, memory, console, threads
//! ```
//!
//! A monitor implements the seams and hands itself to [`keys::Keys::start`], and what that returns
//! to [`api::ServedGuest::start`]. An [`api::Endpoint`] serves one guest or several:
//!
//! | seam | what the monitor gives |
//! |---|---|
//! | [`memory::Ram`] | the guest's physical memory |
//! | [`guest::Guest::pause`] | every vCPU stopped, and where |
//! | [`keys::registry::Registry`] | receives the registrations; the rules are in `keys/registry/source.rs` |
//! | [`guest::Machine`] | what the guest is, whether it has ended, its power switch |
//! | [`console::Console`] | the guest's serial console |
//! | [`trace::AgentSocket`] | a bound socket that the agent in the guest connects to |
//! | [`threads::Threads`] | starts the service's threads, under the monitor's filters |
//!
//! With the feature `testing`, the module `testing` has a guest in memory, and a conformance suite
//! that every implementation of the seams must pass.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod abi;
pub mod api;
pub mod auth;
pub mod console;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod guest;
pub mod keys;
pub mod log_file;
pub mod log_limit;
pub mod memory;
pub mod paging;
pub mod pause;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
pub mod trace;
pub mod trace_id;
