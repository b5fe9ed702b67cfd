// SPDX-License-Identifier: Apache-2.0
//! Who may do what: a list of rules, of which the first that allows decides. Nothing is allowed that no
//! rule allows.
//!
//! ```yaml
//! rules:
//!   - name: on-call
//!     principals: ["spiffe://example.org/on-call/*", "uid:0"]
//!     role: admin
//!   - name: network team
//!     principals: ["spiffe://example.org/net/*"]
//!     role: operator
//!     guests: ["web-*"]
//!     keys: ["net_*", "!net_high*"]
//!     max_keys: 200
//!     max_guests: 50
//!   - name: everybody
//!     principals: ["*"]
//!     role: viewer
//! revoked_certificates: []   # SHA-256 of certificates that may not be used any more
//! ```
//!
//! Principals, guests and keys are globs as everywhere in Patchbay. A rule without `guests` or `keys`
//! covers all of them. A rule without a cap has none.

mod decide;
mod file;
mod live;

pub use self::decide::{Decision, Question, Want};
pub use patchbay_proto::methods::Role;

pub use self::file::{MAX_POLICY_BYTES, Policy, PolicyError, Rule};
pub use self::live::LivePolicy;
