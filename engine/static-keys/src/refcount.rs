// SPDX-License-Identifier: Apache-2.0
//! The effect of an operation on a key's count.
//!
//! `struct static_key` holds one `atomic_t enabled`: the number of users, or −1 while the guest is
//! taking the first reference. The guest's own functions (kernel/jump_label.c,
//! `static_key_slow_inc()`, `__static_key_slow_dec_cpuslocked()`, `static_key_enable_cpuslocked()`,
//! `static_key_disable_cpuslocked()`) follow this table, and so does [`apply`]:
//!
//! | op      | count −1 | 0        | 1        | n ≥ 2 | INT_MAX |
//! |---------|----------|----------|----------|-------|---------|
//! | inc     | busy     | patch, 1 | 2        | n+1   | W       |
//! | dec     | busy     | W        | 0, patch | n−1   | n−1     |
//! | enable  | busy     | patch, 1 | nothing  | W     | W       |
//! | disable | busy     | nothing  | 0, patch | W     | W       |
//! | *count* | 1        | 0        | 1        | n     | n       |
//!
//! W: the guest would WARN, so the operation is refused. The kernel never writes a count below −1.
//! An operation on such a count would WARN or have no effect, so it is W too. This crate never
//! writes −1.

use std::fmt;

/// An operation on a static key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Takes a reference, like `static_branch_inc()`.
    Inc,
    /// Drops a reference, like `static_branch_dec()`.
    Dec,
    /// Turns the key on, like `static_branch_enable()`.
    Enable,
    /// Turns the key off, like `static_branch_disable()`.
    Disable,
}

impl Op {
    /// Returns "inc", "dec", "enable" or "disable".
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inc => "inc",
            Self::Dec => "dec",
            Self::Enable => "enable",
            Self::Disable => "disable",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The count does not permit the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The count is −1.
    #[error("the guest is taking the key's first reference; try again")]
    Busy,
    /// The guest's own function would WARN.
    #[error("{op} at count {count} would make the guest warn: {}", advice(*.count, *.op))]
    WouldWarn {
        /// The refused operation.
        op: Op,
        /// The count before the operation.
        count: i32,
    },
}

fn advice(count: i32, op: Op) -> &'static str {
    match op {
        _ if count < 0 => "the kernel never writes such a count; look for corruption in the guest",
        Op::Inc => "the count is at its maximum",
        Op::Dec => "the key has no reference to drop",
        Op::Enable => "the key is on and has other users; use inc",
        Op::Disable => "the key has other users; drop your own reference with dec",
    }
}

/// Returns the count after `op`; see the table above.
///
/// # Errors
/// [`Refusal`].
pub fn apply(count: i32, op: Op) -> Result<i32, Refusal> {
    match (op, count) {
        (_, -1) => Err(Refusal::Busy),
        (_, ..-1) | (Op::Inc, i32::MAX) | (Op::Dec, 0) | (Op::Enable | Op::Disable, 2..) => {
            Err(Refusal::WouldWarn { op, count })
        }
        (Op::Inc, _) => Ok(count + 1),
        (Op::Dec, _) => Ok(count - 1),
        (Op::Enable, _) => Ok(1),
        (Op::Disable, _) => Ok(0),
    }
}

/// Returns the number of users, like `static_key_count()`: 1 for any negative `enabled`.
#[must_use]
pub fn users(enabled: i32) -> i32 {
    if enabled >= 0 { enabled } else { 1 }
}

/// Returns whether the branches differ between two counts.
#[must_use]
pub fn crosses_zero(before: i32, after: i32) -> bool {
    (before == 0) != (after == 0)
}
