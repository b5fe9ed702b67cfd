// SPDX-License-Identifier: Apache-2.0
//! The process that a revision, an etag, a hold or a plan belongs to.

use std::fmt::{self, Write};
use std::hash::{BuildHasher, RandomState};

use super::holds::KeyInstance;

/// Random name of this process's service for one guest. Ids from another incarnation are invalid in
/// this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incarnation {
    name: String,
    /// The first part of the ids of holds, which outlive a process whose guest runs on.
    holds_of: String,
}

impl Incarnation {
    pub(super) fn new() -> Self {
        // The standard library seeds each RandomState from the system's random numbers.
        let word = |of: u8| RandomState::new().hash_one(of);
        let name = format!("{:016x}{:016x}", word(0), word(1));
        Self {
            holds_of: name[..8].to_owned(),
            name,
        }
    }

    /// Continues the ids of the holds of an earlier incarnation. A malformed first part is ignored.
    pub(super) fn continue_holds(&mut self, holds_of: &str) {
        let is_part = holds_of.len() == 8 && holds_of.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_part {
            holds_of.clone_into(&mut self.holds_of);
        }
    }

    /// Returns the first part of the ids of holds.
    pub(super) fn holds_of(&self) -> &str {
        &self.holds_of
    }

    /// Returns the name, 32 hexadecimal digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Returns the first 8 digits, for ids.
    pub(super) fn short(&self) -> &str {
        &self.name[..8]
    }

    /// Returns the id of a hold. It is only valid in this incarnation, and in those that continue
    /// its holds.
    pub(super) fn hold_id(&self, number: u64) -> String {
        const DIGITS: usize = u64::MAX.ilog10() as usize + 1;
        let mut id = String::with_capacity(self.holds_of.len() + 2 + DIGITS);
        id.push_str(&self.holds_of);
        id.push_str("-h");
        // Writing to a string cannot fail.
        let _ = write!(id, "{number}");
        id
    }

    /// Returns the number in a hold's id; `None` if the id is malformed or from another
    /// incarnation.
    pub(super) fn hold_number(&self, id: &str) -> Option<u64> {
        let (of, number) = id.split_once("-h")?;
        let canonical =
            number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
        (of == self.holds_of && canonical).then(|| number.parse().ok())?
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
