// SPDX-License-Identifier: Apache-2.0
//! The numbers that a guest registers about its kernel and modules. None of them is trusted.

use crate::entry::{EntryFormat, JumpEntry};
use crate::gates::Gates;
use crate::instruction::Nops;
use crate::key::Class;
use crate::records::RecordRing;

/// A range of guest-virtual addresses, `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
}

impl Range {
    /// Returns the length in bytes; `None` if the range ends before it starts.
    #[must_use]
    pub const fn len(self) -> Option<u64> {
        self.end.checked_sub(self.start)
    }

    /// Returns whether the range has no bytes.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Returns whether the range contains all `len` bytes from `address` on.
    #[must_use]
    pub const fn contains(self, address: u64, len: u64) -> bool {
        match address.checked_add(len) {
            Some(end) => self.start <= address && end <= self.end,
            None => false,
        }
    }

    /// Returns whether the range contains any of the `len` bytes from `address` on.
    #[must_use]
    pub fn overlaps(self, address: u64, len: u64) -> bool {
        let end = address.saturating_add(len);
        self.start.max(address) < self.end.min(end)
    }
}

/// Location of the key directory: an array of records {u64 address, u32 name offset, u16 class, u16
/// flags, u64 tracepoint, u64 defining module} and a block of NUL-terminated names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// Address of the records.
    pub keys: u64,
    /// Number of records.
    pub key_count: u32,
    /// Distance from one record to the next, in bytes. Bytes after the known fields are ignored.
    pub key_size: u32,
    /// Address of the names block.
    pub names: u64,
    /// Size of the names block, including the last NUL.
    pub names_size: u32,
}

/// Offsets in the guest's structures, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// `type` in `struct static_key`.
    pub static_key_type: u32,
    /// `next` in `struct static_key_mod`.
    pub static_key_mod_next: u32,
    /// `entries` in `struct static_key_mod`.
    pub static_key_mod_entries: u32,
    /// `mod` in `struct static_key_mod`.
    pub static_key_mod_mod: u32,
    /// `state`, a u32, in `struct module`.
    pub module_state: u32,
    /// Value of `MODULE_STATE_LIVE`.
    pub module_state_live: u32,
    /// `key` in `struct tracepoint`.
    pub tracepoint_key: u32,
    /// `funcs` in `struct tracepoint`.
    pub tracepoint_funcs: u32,
}

/// Registration of the kernel image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Format of all jump tables, modules included.
    pub format: EntryFormat,
    /// Jump table, sorted by key, with init bits set.
    pub jump_table: Range,
    /// Kernel text, `_stext.._etext`.
    pub text: Range,
    /// Keys in this range cannot change after init.
    pub ro_after_init: Range,
    /// Offsets in the kernel's structures.
    pub layout: Layout,
    /// Words that must have a known value before keys may be changed.
    pub gates: Gates,
    /// Keys defined in the image.
    pub directory: Directory,
    /// The ring in which changes are recorded for the guest.
    pub records: RecordRing,
}

/// A kernel whose tables were found in the guest's memory. It holds the contents of the tables,
/// whereas a [`Kernel`] holds only their addresses.
#[derive(Clone, Debug)]
pub struct FoundKernel {
    /// Format of all jump tables.
    pub format: EntryFormat,
    /// The NOPs that the kernel writes to its sites.
    pub nops: Nops,
    /// Offsets in the kernel's structures.
    pub layout: Layout,
    /// Words that must have a known value before keys may be changed.
    pub gates: Gates,
    /// The kernel image, then the modules.
    pub images: Vec<FoundImage>,
}

/// The kernel image or a module of a [`FoundKernel`].
#[derive(Clone, Debug)]
pub struct FoundImage {
    /// Address of the `struct module`; 0 for the kernel.
    pub id: u64,
    /// Name of the module.
    pub name: String,
    /// Text without init text.
    pub text: Range,
    /// Keys in this range cannot change after init.
    pub ro_after_init: Range,
    /// Address range of the entries.
    pub jump_table: Range,
    /// All entries of the table, sorted by key.
    pub entries: Vec<JumpEntry>,
    /// Keys defined in the image.
    pub keys: Vec<FoundKey>,
}

/// A key of a [`FoundImage`].
#[derive(Clone, Debug)]
pub struct FoundKey {
    /// Address of the `struct static_key`.
    pub address: u64,
    /// Name of the key, without the name of the image.
    pub name: String,
    /// The rules for changes of this key.
    pub class: Class,
    /// Address of the `struct tracepoint`; 0 for a key of another class.
    pub tracepoint: u64,
    /// The tracepoint has a function that must run when the tracepoint is switched.
    pub switched_by_function: bool,
}

/// Registration of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module<'a> {
    /// Address of the `struct module`, which identifies the module; never 0.
    pub id: u64,
    /// Name of the module, read up to the first NUL.
    pub name: &'a [u8],
    /// Jump table, sorted by key, with init bits set.
    pub jump_table: Range,
    /// Module text without init text.
    pub text: Range,
    /// Keys in this range cannot change after init.
    pub ro_after_init: Range,
    /// Keys that the module defines or branches on.
    pub directory: Directory,
}
