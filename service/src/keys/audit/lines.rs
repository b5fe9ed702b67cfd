// SPDX-License-Identifier: Apache-2.0
//! The content of the lines of the audit log.

use std::fmt::Debug;
use std::time::Duration;

use serde::Serialize;

use super::json;
use crate::keys::declared::Declaration;

/// The content of a line.
pub trait Body: Debug + Serialize {
    /// Adds the fields of the content to the text of a JSON object.
    ///
    /// # Errors
    /// It has no representation in JSON.
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        Ok(())
    }
}

/// A change that is about to be made.
#[derive(Debug, Serialize)]
pub struct Intent<'a> {
    /// "uid:N"; "monitor" if a hold or a claim ended by itself; "others in the guest" if the event
    /// was fired or parked for other users in the guest; "--trace-events" if it was parked because
    /// the guest's command line arms it.
    pub owner: &'a str,
    /// Reason of the client.
    pub reason: &'a str,
    /// Request id of the client.
    pub request_id: &'a str,
    /// References of other holders may be dropped.
    pub force: bool,
    /// The prepared plan that is committed; `None` for an update.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<IntendedPlan<'a>>,
    /// The ops, in the order of the request.
    #[serde(skip)]
    pub updates: Vec<IntendedOp<'a>>,
    /// Declarations of the host that permit the change of a key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub declared: Vec<&'a Declaration>,
}

impl Body for Intent<'_> {
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        // Most ops of a transaction are the same.
        let (mut last, mut rest) = (None, String::new());
        json::add_list(object, "updates", &self.updates, |to, update| {
            let IntendedKeys::Name { key } = update.keys else {
                return json::add(to, update);
            };
            if last.replace(update.op) != Some(update.op) {
                rest = [",\"op\":\"", update.op, "\"}"].concat();
            }
            json::add_keyed(to, key, &rest)
        })
    }
}

/// The plan of an [`Intent`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IntendedPlan<'a> {
    /// Plan id, as the client sends it.
    pub id: &'a str,
    /// SHA-256 of the plan, in hexadecimal.
    pub digest: &'a str,
}

/// One op of an [`Intent`].
#[derive(Debug, Serialize)]
pub struct IntendedOp<'a> {
    /// The key or keys.
    #[serde(flatten)]
    pub keys: IntendedKeys<'a>,
    /// "inc", "dec", "enable" or "disable".
    pub op: &'static str,
}

/// The keys that an [`IntendedOp`] changes.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum IntendedKeys<'a> {
    /// A single key.
    Name {
        /// Name, as the client gives it.
        key: &'a str,
    },
    /// Every key that a selection matches. The outcome lists the keys.
    Selection {
        /// Patterns, as the client gives them.
        patterns: &'a [String],
        /// Classes, as the client gives them; empty for all.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        classes: Vec<&'static str>,
        /// Number of keys that matched.
        keys: usize,
    },
    /// The keys of the lines of dynamic debug that queries select. The outcome lists the keys.
    Debug {
        /// Queries, as the client gives them.
        debug_queries: &'a [String],
        /// Number of keys that matched.
        keys: usize,
    },
}

/// Holds that get a new expiry.
#[derive(Debug, Serialize)]
pub struct Renewal<'a> {
    /// The holder.
    pub owner: &'a str,
    /// Hold ids.
    pub holds: &'a [String],
    /// New time to live in milliseconds; `None` for holds that no longer expire.
    pub ttl_ms: Option<u64>,
}

impl Body for Renewal<'_> {}

/// A set of claims that is about to replace the one of its owner. An [`Intent`] follows if it
/// changes counts.
#[derive(Debug, Serialize)]
pub struct ClaimSet<'a> {
    /// The principal of the owner.
    pub owner: &'a str,
    /// The name that the principal chose.
    pub name: &'a str,
    /// The person for whom the principal makes the call, according to the host's daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub person: Option<&'a str>,
    /// The generation.
    pub generation: u64,
    /// SHA-256 of the keys and the wanted state of each, in hexadecimal.
    pub intent_digest: &'a str,
    /// Number of keys; 0 if the owner's claims end.
    pub keys: usize,
    /// References of the guest's own code may be taken away.
    pub force: bool,
    /// Guarded keys may be claimed.
    pub allow_guarded: bool,
    /// Time to live in milliseconds; `None` for claims that do not expire.
    pub ttl_ms: Option<u64>,
    /// Reason of the client.
    pub reason: &'a str,
}

impl Body for ClaimSet<'_> {}

/// A ledger of another host that is about to become the guest's.
#[derive(Debug, Serialize)]
pub struct LedgerImport<'a> {
    /// The principal who imports it.
    pub owner: &'a str,
    /// Name of the guest's boot.
    pub boot: &'a str,
    /// Path of the guest's ledger.
    pub ledger: &'a str,
    /// SHA-256 of all bytes of the imported ledger, in hexadecimal.
    pub sha256: &'a str,
    /// Number of holds.
    pub holds: usize,
    /// Number of claims.
    pub claims: usize,
    /// Number of owners, with or without claims.
    pub owners: usize,
    /// A change is pending, and the counts tell the next attacher whether it was made.
    pub pending: bool,
}

impl Body for LedgerImport<'_> {}

/// A guest that begins as a copy of another one.
#[derive(Debug, Serialize)]
pub struct Copied<'a> {
    /// Name of the guest that was saved.
    pub origin: &'a str,
    /// Incarnation of the service that saved it.
    pub origin_incarnation: &'a str,
    /// SHA-256 of the snapshot's state, in hexadecimal.
    pub snapshot: &'a str,
    /// Number of holds of the guest that was saved.
    pub holds: usize,
    /// Number of claims of the guest that was saved.
    pub claims: usize,
}

impl Body for Copied<'_> {}

/// Returns a duration as the log has it.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The end of a change.
#[derive(Debug, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum AuditOutcome<'a> {
    /// The change was made.
    Committed {
        /// One per key.
        #[serde(skip)]
        changes: Vec<AuditedChange<'a>>,
    },
    /// A client has read records.
    Read {
        /// Number of records that were sent to the client.
        records: u64,
        /// Number of bytes of the messages with these records.
        bytes: u64,
        /// The error that ended the stream.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The change was not made, or nothing was read. The guest is unchanged unless the error says
    /// otherwise.
    Failed {
        /// Reason of the error, as in `patchbay.v1.ErrorReason`.
        reason: &'static str,
        /// Message of the error.
        error: String,
    },
}

impl Body for AuditOutcome<'_> {
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        if let Self::Committed { changes } = self {
            // Most keys of a transaction have the same numbers.
            let (mut last, mut rest) = (None, String::new());
            json::add_list(object, "changes", changes, |to, change| {
                let AuditedChange {
                    before,
                    after,
                    sites,
                    ..
                } = *change;
                if last.replace((before, after, sites)) != Some((before, after, sites)) {
                    rest = format!(",\"before\":{before},\"after\":{after},\"sites\":{sites}}}");
                }
                json::add_keyed(to, change.key, &rest)
            })?;
        }
        Ok(())
    }
}

/// A key's count before and after.
#[derive(Debug)]
pub struct AuditedChange<'a> {
    /// Full name of the key.
    pub key: &'a str,
    /// Count before the change.
    pub before: i32,
    /// Count after the change.
    pub after: i32,
    /// Number of sites that were patched.
    pub sites: u32,
}
