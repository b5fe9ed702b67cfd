// SPDX-License-Identifier: Apache-2.0
//! The request to replace an owner's claims, and its outcome.

use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::{KeyAnswer, Want, intent_digest};
use crate::keys::advice::Known;
use crate::keys::outcome::{FlipReport, LeftOut};
use crate::keys::request::Selection;
use crate::keys::scope::Caller;

/// Digest of a request, by which a repeat is recognised.
pub type Content = [u8; 32];

/// Returns the digest of an encoded request.
#[must_use]
pub fn content(encoded: &[u8]) -> Content {
    Sha256::digest(encoded).into()
}

/// A request to replace the claims of an owner.
#[derive(Clone, Debug)]
pub struct ClaimsRequest {
    /// The caller, who is the principal of the owner.
    pub caller: Caller,
    /// The name of the owner, 1 to [`MAX_NAME_BYTES`](super::MAX_NAME_BYTES).
    pub name: String,
    /// The generation, at least 1.
    pub generation: u64,
    /// Digest of the request.
    pub content: Content,
    /// The boot that the claims are for; not checked if empty.
    pub boot: String,
    /// The ledger that must have the owner's claims of this generation, or of a later one, as made.
    pub after: Option<(String, u64)>,
    /// The digest that the claims must have; not checked if empty.
    pub intent_digest: String,
    /// The keys and the wanted state of each. No key is listed twice.
    pub claims: Vec<(String, Want)>,
    /// Patterns that select more keys, and the wanted state of the keys of each. The API accepts
    /// them only with `validate_only`.
    pub selections: Vec<(Selection, Want)>,
    /// Time to live of the claims, counted from the change.
    pub ttl: Option<Duration>,
    /// Time at which the owner first wanted these claims; `None` if they are to be the newest.
    pub made_at: Option<SystemTime>,
    /// Check the request only.
    pub validate_only: bool,
    /// Permit guarded keys if the monitor permits them too.
    pub allow_guarded: bool,
    /// An OFF may take away references of the guest's own code.
    pub force: bool,
    /// Reason, for the audit log.
    pub reason: String,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

impl ClaimsRequest {
    /// Creates a request of these claims for any boot, without expiry, force or reason.
    #[must_use]
    pub fn new(
        caller: Caller,
        name: &str,
        generation: u64,
        claims: Vec<(String, Want)>,
        stop_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            caller,
            name: name.to_owned(),
            generation,
            content: content(intent_digest(&claims).as_bytes()),
            boot: String::new(),
            after: None,
            intent_digest: String::new(),
            claims,
            selections: Vec::new(),
            ttl: None,
            made_at: None,
            validate_only: false,
            allow_guarded: false,
            force: false,
            reason: String::new(),
            stop_timeout,
            deadline,
        }
    }
}

/// The outcome of a [`ClaimsRequest`].
#[derive(Clone, Debug, Default)]
pub struct ClaimsOutcome {
    /// The guest's boot, as requests name it.
    pub boot: String,
    /// The highest earlier generation of the owner whose claims were made in this boot; 0 if there
    /// is none.
    pub generation_before: u64,
    /// Digest of the intent.
    pub intent_digest: String,
    /// SHA-256 of the plan; empty if nothing was to be changed.
    pub plan_digest: String,
    /// One per key.
    pub keys: Vec<KeyAnswer>,
    /// The cost of the change; `None` if nothing was changed.
    pub report: Option<FlipReport>,
    /// The number of sites that were patched or, in a validation, would be.
    pub sites_patched: u32,
    /// Predicted pause of a validated change. Zero if no pause is needed; `None` if no count would
    /// change, and before the first pause of this guest.
    pub predicted_pause: Option<Duration>,
    /// Keys that patterns matched and left out, by reason.
    pub left_out: Vec<LeftOut>,
    /// The guarded keys among those that a validation claims, ordered by name, with the known facts
    /// about them.
    pub guarded: Vec<(String, Option<Known>)>,
    /// The answer of an earlier request with this generation.
    pub repeated: bool,
    /// The journal's newest revision.
    pub revision: u64,
}
