// SPDX-License-Identifier: Apache-2.0
//! The reasons why a registration is invalid.

use crate::limits::{
    ENTRIES_MAX, KEYS_MAX, MODULES_MAX, NAME_MAX, NAMES_SIZE_MAX, RECORD_SIZE, RECORD_SIZE_MAX,
};
use crate::memory::ReadError;
use crate::records::RecordRingError;

/// The guest's registration is invalid and was discarded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum CatalogError {
    /// A table cannot be read.
    #[error(
        "the registered tables cannot be read: {0}; register addresses of the kernel's own page table"
    )]
    Unreadable(#[from] ReadError),
    /// The range ends before it starts, or its length is not a multiple of the entry size.
    #[error(
        "the jump table {start:#x}..{end:#x} is not a whole number of entries of {entry_size} bytes"
    )]
    TableRange {
        start: u64,
        end: u64,
        entry_size: usize,
    },
    /// The limit applies to the tables of all images together.
    #[error("{count} jump entries exceed the limit of {ENTRIES_MAX}")]
    TooManyEntries { count: u64 },
    /// The table is not sorted, and the lookup of a key's entries needs a sorted table.
    #[error(
        "the jump table at {table:#x} is not sorted by key at entry {index}; register after jump_label_init()"
    )]
    NotSorted { table: u64, index: usize },
    /// The limit applies to the keys of all images together.
    #[error("{count} keys exceed the limit of {KEYS_MAX}")]
    TooManyKeys { count: usize },
    /// A record is smaller or larger than any supported record.
    #[error(
        "the directory's records have {bytes} bytes, expected {} to {}",
        RECORD_SIZE,
        RECORD_SIZE_MAX
    )]
    RecordSize { bytes: u32 },
    /// The names block is too large, or overlapping names add up to too much.
    #[error("{bytes} bytes of names exceed the limit of {}", NAMES_SIZE_MAX)]
    NamesTooLong { bytes: u32 },
    /// The offset of a name is out of range.
    #[error("the name of key {address:#x} starts at {offset}, outside the block of names")]
    NameOutside { address: u64, offset: u32 },
    /// A name has no NUL within the limit.
    #[error("the name of key {address:#x} does not end within {} bytes", NAME_MAX)]
    NameUnending { address: u64 },
    /// The address cannot hold a `struct static_key`.
    #[error("no key can be at {address:#x}: it is misaligned or at the end of the address space")]
    KeyAddress { address: u64 },
    /// The key lies in text, so a write to its count would change instructions.
    #[error("key {address:#x} lies in text; keys are data")]
    KeyInText { address: u64 },
    /// A directory lists a key twice, or two images define it.
    #[error("key {address:#x} is listed twice; list each key once, with its image")]
    KeyTwice { address: u64 },
    /// The class is not one of [`Class`](crate::Class); the guest may be newer.
    #[error("key {address:#x} has the unknown class {class}; update the monitor")]
    UnknownClass { address: u64, class: u16 },
    /// A flag is unknown; the guest may be newer.
    #[error("key {address:#x} has the unknown flags {flags:#x}; update the monitor")]
    UnknownFlags { address: u64, flags: u16 },
    /// The address of the tracepoint does not match that of its key.
    #[error("key {address:#x} is not the key of the tracepoint at {tracepoint:#x}")]
    NotTheTracepointsKey { address: u64, tracepoint: u64 },
    /// The ring for records of changes cannot be used.
    #[error(transparent)]
    Records(#[from] RecordRingError),
    /// The list of gates lacks a gate that every kernel must list.
    #[error("the kernel registers no {what}; flips are not safe without it")]
    GateMissing { what: &'static str },
    /// A module has the address 0, which stands for the kernel.
    #[error("module {name} has the address 0")]
    ModuleAddress { name: String },
    /// A module with this address or name is registered.
    #[error("module {name} is registered already; remove it before it is added again")]
    ModuleTwice { name: String },
    /// The guest has more than [`MODULES_MAX`] modules.
    #[error("the guest has more than {MODULES_MAX} modules, which is the limit")]
    TooManyModules,
}
