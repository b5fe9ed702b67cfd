// SPDX-License-Identifier: Apache-2.0
//! Static keys and their changes.

use std::fmt;
use std::sync::Arc;

/// Identifies a static key by the guest-virtual address of its `struct static_key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The rules for changes of a key from outside the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// A key of no other class. Changes need the operator's explicit permission.
    Guarded,
    /// The guest declares that references may be taken from outside.
    Ref,
    /// The key of a `struct tracepoint`: on or off, never counted above 1.
    Tracepoint,
    /// The key of a pr_debug() (`struct _ddebug`): on or off, never counted above 1.
    DynamicDebug,
    /// The branch leads to a static call that may be NULL. Such a key is never changed.
    Never,
}

impl Class {
    /// Returns the name that requests and messages use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Guarded => "guarded",
            Self::Ref => "ref",
            Self::Tracepoint => "tracepoint",
            Self::DynamicDebug => "dyndbg",
            Self::Never => "never",
        }
    }
}

/// A key of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Guest-virtual address of the `struct static_key`.
    pub id: KeyId,
    /// "name" or "module:name"; unique.
    pub full_name: Arc<str>,
    /// Length of the module's name in `full_name`; 0 for a key of the kernel image.
    pub module_length: usize,
    /// The rules for changes of this key.
    pub class: Class,
    /// Address of the `struct tracepoint`; 0 unless the class is [`Class::Tracepoint`].
    pub tracepoint: u64,
    /// The tracepoint has a `regfunc` or `unregfunc` that must run when the tracepoint is switched,
    /// so a change of the key alone is not enough.
    pub switched_by_function: bool,
}

/// Splits a full name into the module's name, empty for the kernel image, and the key's own name.
/// Events, "system:name", are split in the same way.
#[must_use]
pub fn split_name(full_name: &str) -> (&str, &str) {
    // The names of modules and keys contain no colon: see `clean`.
    full_name.split_once(':').unwrap_or(("", full_name))
}

impl Key {
    /// Returns the name of the module; empty for the kernel image.
    #[must_use]
    pub fn module(&self) -> &str {
        &self.full_name[..self.module_length]
    }

    /// Returns the key's name without the module.
    #[must_use]
    pub fn name(&self) -> &str {
        match self.module_length {
            0 => &self.full_name,
            length => &self.full_name[length + 1..],
        }
    }
}

/// The change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// The changed key.
    pub key: KeyId,
    /// Full name of the key.
    pub name: Arc<str>,
    /// `enabled` before the change, never negative.
    pub before: i32,
    /// `enabled` after the change, never negative.
    pub after: i32,
    /// Number of sites that change.
    pub sites: u32,
}
