// SPDX-License-Identifier: Apache-2.0
//! The reasons why a key must not be changed.

/// The reason why a key is quarantined. A quarantine lasts until the key's module is reloaded or
/// the guest reboots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// Cause, for programs.
    pub cause: QuarantineCause,
    /// Description, for people.
    pub message: String,
}

/// Cause of a quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuarantineCause {
    /// A site holds neither its NOP nor its JMP.
    ForeignBytes,
    /// A change could not be undone completely.
    UndoIncomplete,
}
