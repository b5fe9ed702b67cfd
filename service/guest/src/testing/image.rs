// SPDX-License-Identifier: Apache-2.0
//! The test kernel: its parts and their addresses.

use crate::abi;

/// Guest-virtual address of the image. It has room for 65,536 keys with one site each.
pub(super) const IMAGE: u64 = 0xffff_ffff_8100_0000;
/// Guest-physical address of the image.
pub(super) const IMAGE_PHYSICAL: u64 = 2 << 20;
pub(super) const IMAGE_BYTES: u64 = 64 << 20;
pub(super) const MEMORY_BYTES: u64 = 72 << 20;
pub(super) const PAGE_TABLE: u64 = 0x1000;
pub(super) const REQUEST_PAGE: u64 = 0x10_0000;

pub(super) const TEXT: u64 = IMAGE;
pub(super) const TEXT_END: u64 = IMAGE + 0x10_0000;
pub(super) const JUMP_TABLE: u64 = IMAGE + 0x20_0000;
pub(super) const KEYS: u64 = IMAGE + 0x80_0000;
pub(super) const SEALED_KEYS: u64 = IMAGE + 0x91_0000;
pub(super) const SEALED_KEYS_END: u64 = IMAGE + 0x92_0000;
pub(super) const GATE_WORDS: u64 = IMAGE + 0x92_0000;
/// Address of the array that describes the gates. It has pages of its own.
pub(super) const GATES: u64 = IMAGE + 0x92_8000;
/// Address of the ring in which the host records changes.
pub(super) const RECORDS: u64 = IMAGE + 0x92_a000;
pub(super) const RECORD_COUNT: u32 = 8;
/// Address of the arrays of probes, one per tracepoint.
pub(super) const PROBES: u64 = IMAGE + 0x95_0000;
pub(super) const PROBES_BYTES: u64 = 0x80;
pub(super) const TRACEPOINTS: u64 = IMAGE + 0x93_0000;
pub(super) const DIRECTORY: u64 = IMAGE + 0x100_0000;
pub(super) const NAMES: u64 = IMAGE + 0x200_0000;
pub(super) const MODULES: u64 = IMAGE + 0x60_0000;
/// Space of a module in bytes: text, table, keys, directory, names, and the `struct module`.
pub(super) const MODULE_BYTES: u64 = 0x1_0000;

pub(super) const KEY_BYTES: u64 = 16;
pub(super) const ENTRY_BYTES: u64 = 16;
pub(super) const SITE_STRIDE: u64 = 16;
/// Distance from a site to the target of its JMP.
pub(super) const TARGET_DISTANCE: u64 = 0x1000;
pub(super) const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
pub(super) const MODULE_STATE: u64 = 0;
pub(super) const TRACEPOINT_BYTES: u64 = 64;
/// Offset of the key in a `struct tracepoint`.
pub(super) const TRACEPOINT_KEY: u64 = 8;
/// Offset of the probes in a `struct tracepoint`.
pub(super) const TRACEPOINT_FUNCS: u64 = 40;
/// Size of a `struct tracepoint_func`.
pub(super) const PROBE_BYTES: u64 = 24;

/// A key of the test kernel.
#[derive(Clone, Debug)]
pub struct TestKey {
    /// Name in the directory.
    pub name: String,
    /// Class, `abi::KEY_*`.
    pub class: u16,
    /// Count at boot.
    pub count: i32,
    /// Number of branch sites.
    pub sites: u64,
    /// True for DEFINE_STATIC_KEY_TRUE, with likely sites.
    pub initially_true: bool,
    /// True for a key in ro_after_init data.
    pub sealed: bool,
    /// True if a probe is attached to the tracepoint.
    pub probe: bool,
}

impl TestKey {
    /// Creates a key of class ref that is off.
    pub fn new(name: &str, sites: u64) -> Self {
        Self {
            name: name.to_owned(),
            class: abi::KEY_REF,
            count: 0,
            sites,
            initially_true: false,
            sealed: false,
            probe: false,
        }
    }

    /// Returns a tracepoint's key.
    pub fn tracepoint(name: &str, probe: bool) -> Self {
        Self {
            class: abi::KEY_TRACEPOINT,
            probe,
            ..Self::new(name, 1)
        }
    }

    /// Returns a guarded key.
    pub fn guarded(name: &str) -> Self {
        Self {
            class: abi::KEY_GUARDED,
            ..Self::new(name, 1)
        }
    }

    pub(super) fn jumps(&self) -> bool {
        (self.count > 0) != self.initially_true
    }
}

/// Addresses of the parts of the kernel image or of a module.
pub(super) struct Layout {
    pub text: u64,
    pub table: u64,
    pub keys: u64,
    pub directory: u64,
    pub names: u64,
    /// Address of the `struct module`, 0 for the kernel.
    pub module: u64,
}
