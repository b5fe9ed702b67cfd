// SPDX-License-Identifier: Apache-2.0
//! Why a key may not be changed any more.

/// Kept until the key's module is loaded again, or the guest has booted again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// For programs.
    pub cause: QuarantineCause,
    /// For people.
    pub message: String,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuarantineCause {
    /// A site holds neither its NOP nor its JMP.
    ForeignBytes,
    /// A change could not be undone.
    UndoIncomplete,
}
