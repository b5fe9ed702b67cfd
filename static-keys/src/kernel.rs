// SPDX-License-Identifier: Apache-2.0
//! What a guest tells about its kernel and its modules, as plain numbers. None of them is trusted.

use crate::entry::EntryFormat;
use crate::gates::Gates;
use crate::records::RecordRing;

/// Guest-virtual addresses `start..end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
}

impl Range {
    /// In bytes; `None` if it ends before it starts.
    #[must_use]
    pub const fn len(self) -> Option<u64> {
        self.end.checked_sub(self.start)
    }

    /// Whether it has no byte.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Whether all of the `len` bytes from `address` on lie in it.
    #[must_use]
    pub const fn contains(self, address: u64, len: u64) -> bool {
        match address.checked_add(len) {
            Some(end) => self.start <= address && end <= self.end,
            None => false,
        }
    }

    /// Whether any of the `len` bytes from `address` on lies in it.
    #[must_use]
    pub fn overlaps(self, address: u64, len: u64) -> bool {
        let end = address.saturating_add(len);
        self.start.max(address) < self.end.min(end)
    }
}

/// Where the list of keys is: an array of records {u64 address, u32 offset of the name, u32 class,
/// u64 tracepoint, u64 module that defines it} and a block of NUL-terminated names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// Address of the array.
    pub keys: u64,
    /// Records in it.
    pub key_count: u32,
    /// From one record to the next, in bytes; what follows the fields above is ignored.
    pub key_size: u32,
    /// Address of the block.
    pub names: u64,
    /// Its bytes, the last NUL included.
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

/// The kernel image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Of its table and those of its modules.
    pub format: EntryFormat,
    /// Sorted by key, init bits set.
    pub jump_table: Range,
    /// `_stext.._etext`.
    pub text: Range,
    /// Keys in here cannot change after init.
    pub ro_after_init: Range,
    /// Structure offsets.
    pub layout: Layout,
    /// Words that tell whether the kernel is at work on its own text.
    pub gates: Gates,
    /// Keys defined in the image.
    pub directory: Directory,
    /// Where changes are recorded for the guest.
    pub records: RecordRing,
}

/// A module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module<'a> {
    /// Address of the `struct module`, the module's identity; never 0.
    pub id: u64,
    /// Up to the first NUL.
    pub name: &'a [u8],
    /// Sorted by key, init bits set.
    pub jump_table: Range,
    /// Without init text.
    pub text: Range,
    /// Keys in here cannot change after init.
    pub ro_after_init: Range,
    /// Keys that it defines or branches on.
    pub directory: Directory,
}
