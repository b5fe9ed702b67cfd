// SPDX-License-Identifier: Apache-2.0
//! The process that a revision, an etag, a hold or a plan belongs to.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// Random name of this process's service of one guest. Ids from another incarnation are invalid
/// here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incarnation(String);

impl Incarnation {
    pub(super) fn new() -> Self {
        // The standard library seeds each RandomState from the system's random numbers.
        let word = |of: u8| RandomState::new().hash_one(of);
        Self(format!("{:016x}{:016x}", word(0), word(1)))
    }

    /// 32 hexadecimal digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the first 8 digits, for ids.
    pub(super) fn short(&self) -> &str {
        &self.0[..8]
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
