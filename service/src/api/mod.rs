// SPDX-License-Identifier: Apache-2.0
//! The gRPC services of guests on a unix socket.
//!
//! ```text
//!  client ══ socket ══▶ limits ──▶ a service ──▶ access ──▶ guest ──▶ keys, trace
//!                                                  │
//!                             who asks, which guest, the method's role
//! ```

mod access;
pub(crate) mod claims;
mod convert;
mod debug_sites;
mod ending;
mod endpoint;
mod guest;
mod guests;
mod holds;
mod kernel_log;
mod limits;
mod plans;
mod reading;
mod repair;
mod requests;
mod services;
mod snapshot;
mod static_keys;
mod status;
mod trace_events;
mod trace_stats;
mod tracepoints;

pub use self::access::Access;
pub use self::endpoint::{Endpoint, ServeError, serve};
pub use self::guests::{AddError, Guests, ServedGuest};
pub use self::tracepoints::TracepointsApi;
pub use patchbay_proto::socket::{ListeningSocket as ApiSocket, SocketError};
