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
//!     max_keys: 200          # keys and guests that one principal may change in an hour
//!     max_guests: 50
//!   - name: everybody
//!     principals: ["*"]
//!     role: viewer
//! revoked_certificates: []   # SHA-256 of certificates that may not be used any more
//! ```
//!
//! Principals, guests and keys are globs as everywhere in Patchbay. In a principal, `*` does not match a slash:
//! `spiffe://example.org/net/*` is whoever is right below `net`, and `spiffe://example.org/net/**` whoever is
//! anywhere below it. A `*` alone is everybody. A principal with `!` is taken away with all that is below it. A rule
//! without `guests` or `keys` covers all of them.
//!
//! # Caps
//!
//! `max_keys` and `max_guests` bound what one principal may change under the rule within any hour (3,600 s):
//! so many different keys, by their names whichever guest they are in, and so many different guests. A key or a
//! guest that was changed already counts once, from its last change on. A change that would exceed a cap is left
//! to the next rule. Dry runs, prepared plans and refused calls are not counted; what was sent to a monitor is,
//! even if it failed there. Pausing, powering off and the console count as a change of the guest.
//!
//! The counts are kept while the daemon runs, over changes of the policy too, and begin anew with it. A cap in a
//! rule for viewers is refused, because it has no effect: they change nothing.

mod decide;
mod file;
mod live;
mod spent;

pub use self::decide::{Decision, Question, Want};
pub use patchbay_proto::methods::Role;

pub use self::file::{MAX_POLICY_BYTES, Policy, PolicyError, Rule};
pub use self::live::LivePolicy;
pub use self::spent::WINDOW;
