// SPDX-License-Identifier: Apache-2.0
//! The process that a revision, an etag, a hold or a plan belongs to.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use super::holds::KeyInstance;

/// Random name of this process's service for one guest. Ids from another incarnation are invalid in
/// this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incarnation {
    name: String,
    /// The first part of the ids of holds, which outlive a process whose guest runs on.
    holds_of: Arc<str>,
}

/// The id of a hold. It is only valid in the incarnation that gave it, and in those that continue
/// its holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldId {
    of: Arc<str>,
    number: u64,
}

impl HoldId {
    /// Returns the id as clients know it.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.len());
        text.push_str(&self.of);
        text.push_str("-h");
        text.push_str(itoa::Buffer::new().format(self.number));
        text
    }

    /// Returns the length of the text in bytes.
    pub(super) fn len(&self) -> usize {
        let digits = self.number.checked_ilog10().unwrap_or(0) as usize + 1;
        self.of.len() + "-h".len() + digits
    }
}

impl Incarnation {
    pub(super) fn new() -> Self {
        // The standard library seeds each RandomState from the system's random numbers.
        let word = |of: u8| RandomState::new().hash_one(of);
        let name = format!("{:016x}{:016x}", word(0), word(1));
        Self {
            holds_of: name[..8].into(),
            name,
        }
    }

    /// Continues the ids of the holds of an earlier incarnation. A malformed first part is ignored.
    pub(super) fn continue_holds(&mut self, holds_of: &str) {
        let is_part = holds_of.len() == 8 && holds_of.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_part {
            self.holds_of = holds_of.into();
        }
    }

    /// Returns the name, 32 hexadecimal digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Returns the name of the ledger, which is the first part of the ids of its holds. A process
    /// that has lost the ledger of an earlier one has another name for its own.
    #[must_use]
    pub fn ledger(&self) -> &str {
        &self.holds_of
    }

    /// Returns the first 8 digits, for ids.
    pub(super) fn short(&self) -> &str {
        &self.name[..8]
    }

    /// Returns the id of a hold.
    pub(super) fn hold_id(&self, number: u64) -> HoldId {
        let of = Arc::clone(&self.holds_of);
        HoldId { of, number }
    }

    /// Returns the number in a hold's id; `None` if the id is malformed or from another
    /// incarnation.
    pub(super) fn hold_number(&self, id: &str) -> Option<u64> {
        let (of, number) = id.split_once("-h")?;
        let canonical =
            number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
        (*of == *self.holds_of && canonical).then(|| number.parse().ok())?
    }

    /// Returns the etag of a key. A client sends the etag back to change a key only as it has seen
    /// the key: the same key of the same incarnation, with the same count, and not changed by this
    /// service since. A change that the guest makes and reverts by itself is not detected.
    pub(super) fn etag(&self, key: KeyInstance, revision: u64, count: i32) -> String {
        let epoch = key.epoch;
        format!("{}-{epoch:x}-{revision:x}-{count}", self.short())
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
