// SPDX-License-Identifier: Apache-2.0
//! The keys that a call may change, as the daemon of a host asserts them to a monitor.
//!
//! The daemon knows the policy, and the monitor knows which keys a call changes. So the daemon
//! sends the rules that may permit the call with it, and the monitor checks the keys immediately
//! before it changes them.

use prost::Message;

/// Metadata key of an encoded [`Scope`]. It belongs to a role that [`SCOPED`] marks.
pub const SCOPE_METADATA: &str = "patchbay-scope-bin";
/// The end of a role in [`ROLE_METADATA`](crate::ROLE_METADATA) if a [`Scope`] limits the call. A
/// monitor that does not check scopes knows no such role, and refuses the call.
pub const SCOPED: &str = "/scoped";
/// The end of a role, instead of [`SCOPED`], if the [`Scope`] has rules for a person. A monitor
/// that does not check these rules does not know such a role, and refuses the call.
pub const SCOPED_BY_PERSON: &str = "/scoped-by-person";
/// The maximum size of an encoded scope, in bytes.
pub const MAX_SCOPE_BYTES: usize = 128 << 10;

/// The keys that a call may change.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Scope {
    /// The rules, in the order of the policy. The first that permits every key of the call counts.
    #[prost(message, repeated, tag = "1")]
    pub rules: Vec<ScopeRule>,
    /// The time at which the caller's credentials expire, in seconds since 1970; 0 if they do not.
    #[prost(int64, tag = "2")]
    pub expires: i64,
    /// The rules for the person for whom the caller makes the call. They must also permit the call.
    #[prost(message, optional, tag = "3")]
    pub person: Option<PersonScope>,
}

/// The keys that a person may change.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PersonScope {
    /// The person's principal.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The rules, in the order of the policy. The first that permits every key of the call counts.
    #[prost(message, repeated, tag = "2")]
    pub rules: Vec<ScopeRule>,
}

/// A rule of the policy.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ScopeRule {
    /// The rule's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Globs of keys; empty for all.
    #[prost(string, repeated, tag = "2")]
    pub keys: Vec<String>,
    /// The number of different keys that the principal may change in the guest within an hour.
    #[prost(uint32, optional, tag = "3")]
    pub max_keys: Option<u32>,
    /// The reason why another cap of the rule is reached; empty if none is. If one is reached, the
    /// rule permits only calls that release what the principal holds.
    #[prost(string, tag = "4")]
    pub exhausted: String,
}
