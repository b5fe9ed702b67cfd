// SPDX-License-Identifier: Apache-2.0

//! Patchbay's control service: the static keys and the tracepoints of one guest, and the gRPC
//! interface to them, regardless of which monitor runs the guest.
//!
//! ```text
//!   api ──▶ trace, log ──▶ keys ──▶ static-keys (the engine)
//!    │          │           │
//!    └──────────┴───────────┴──▶ the seams (patchbay-guest)
//! ```
//!
//! A monitor implements the seams and passes itself to [`keys::Keys::start`], and the result to
//! [`api::ServedGuest::start`]. An [`api::Endpoint`] serves one guest or several:
//!
//! | seam | where its contract is |
//! |---|---|
//! | memory, pause, lifecycle, console, threads | [`patchbay_guest`] |
//! | the guest's requests, or its discovered kernel | [`keys::registry::Registry`]; the rules are in `keys/registry/tables.rs` |
//! | the agent in the guest | [`trace::AgentSocket`], a bound socket that it connects to |
//!
//! With the feature `testing`, the module `testing` has a clock that is set by hand, and discovers
//! the kernel of [`patchbay_guest`]'s guest in memory.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod accept;
pub mod api;
pub mod auth;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod keys;
mod log;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod trace;
pub mod trace_id;
