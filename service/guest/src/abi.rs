// SPDX-License-Identifier: Apache-2.0
//! The guest ABI, version 1: a mirror of `include/uapi/linux/patchbay.h` in the kernel patch
//! series.
//!
//! The structures are read by value out of a copied page ([`zerocopy::FromBytes`]), so no value
//! here points into guest memory. All integers are little endian. Addresses are guest-virtual in
//! the kernel's own page table unless a field says physical.
//!
//! Later versions may append fields to a structure. The size that the guest states must therefore
//! be at least the size that this version knows, and bytes after that size are ignored. A later
//! version that adds something the host must not ignore announces it by a flag or in a reserved
//! field. Unknown flags and nonzero reserved fields are therefore refused.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the ABI that this host implements.
pub const ABI_VERSION: u16 = 1;
/// Signature in ebx, ecx and edx of the CPUID base leaf.
pub const CPUID_SIGNATURE: [u8; 12] = *b"PatchbayKeys";
/// Transport bit: the hypercall instruction with `KVM_HC_MAP_GPA_RANGE`.
pub const TRANSPORT_HYPERCALL: u32 = 1 << 0;
/// Transport bit: WRMSR to the index in the CPUID leaf.
pub const TRANSPORT_MSR: u32 = 1 << 1;
/// Upper 32 bits of argument a2 of the hypercall ("PBAY").
pub const HYPERCALL_MAGIC: u32 = 0x5941_4250;
/// First word of every request page ("PBAY").
pub const HEADER_MAGIC: u32 = 0x5941_4250;
/// Size of the page that a request may fill, in bytes.
pub const REQUEST_PAGE_SIZE: usize = 4096;
/// Offset of `status` in [`Header`], in bytes.
pub const STATUS_OFFSET: u64 = 12;

/// Registers the kernel. The request is a [`Descriptor`].
pub const OP_REGISTER: u32 = 1;
/// Withdraws the registration. The request is a [`Header`]. Idempotent.
pub const OP_UNREGISTER: u32 = 2;
/// Reports that the jump entries of a module are linked. The request is a [`Module`].
pub const OP_MODULE_ADD: u32 = 3;
/// Reports that the jump entries of a module are about to be removed. The request is a [`Module`],
/// of which only the header and `module` are read. Idempotent. The guest also sends it while
/// nothing is registered, with the generation of the last registration.
pub const OP_MODULE_DEL: u32 = 4;

/// Key class: flips need an explicit permission on the host.
pub const KEY_GUARDED: u16 = 0;
/// Key class: the guest declares that references may be taken from outside.
pub const KEY_REF: u16 = 1;
/// Key class: the key of a `struct tracepoint`.
pub const KEY_TRACEPOINT: u16 = 2;

/// Key flag: the tracepoint has a `regfunc` or `unregfunc`, which the kernel calls when the
/// tracepoint is switched.
pub const KEY_REGFUNC: u16 = 1 << 0;

/// `{s32 code, s32 target, s64 key}`, each relative to its own address.
pub const FORMAT_RELATIVE: u32 = 1;
/// `{u64 code, u64 target, u64 key}`.
pub const FORMAT_ABSOLUTE64: u32 = 2;
/// `{u32 code, u32 target, u32 key}`.
pub const FORMAT_ABSOLUTE32: u32 = 3;
/// A kernel without jump labels: flips write the count alone.
pub const FORMAT_NONE: u32 = 4;

/// Gate: `system_state`.
pub const GATE_SYSTEM_STATE: u32 = 1;
/// Gate: `jump_label_mutex`.
pub const GATE_JUMP_LABEL_MUTEX: u32 = 2;
/// Gate: `text_mutex`.
pub const GATE_TEXT_MUTEX: u32 = 3;
/// Gate: a text change in progress.
pub const GATE_TEXT_POKE: u32 = 4;
/// Gate: text changes queued.
pub const GATE_TEXT_POKE_QUEUE: u32 = 5;
/// Gate: `tracepoints_mutex`.
pub const GATE_TRACEPOINTS_MUTEX: u32 = 6;
/// Gate: `module_mutex`.
pub const GATE_MODULE_MUTEX: u32 = 7;

/// Gate flag: the word exists once per CPU.
pub const GATE_PER_CPU: u8 = 1 << 0;

/// Descriptor flag: 5-level page tables.
pub const FLAG_LA57: u32 = 1 << 0;
/// Descriptor flag: page table isolation is on.
pub const FLAG_PTI: u32 = 1 << 1;

/// The header at the start of every request page.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// [`HEADER_MAGIC`].
    pub magic: u32,
    /// [`ABI_VERSION`].
    pub abi_version: u16,
    /// The operation, the same as in the call.
    pub op: u16,
    /// Size of the whole structure, in bytes; at least the size that this version defines.
    pub size: u32,
    /// Written by the host: 0 or a negative errno.
    pub status: i32,
    /// Number that the guest chooses at [`OP_REGISTER`]. It is the same in all later requests, and
    /// never 0.
    pub generation: u64,
}

/// The address range `[start, end)`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
}

/// One key of a [`Directory`].
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Key {
    /// Address of the `struct static_key`.
    pub address: u64,
    /// Offset into the names block, in bytes.
    pub name: u32,
    /// `KEY_*`.
    pub class: u16,
    /// [`KEY_REGFUNC`].
    pub flags: u16,
    /// Address of the `struct tracepoint`, or 0.
    pub tracepoint: u64,
    /// Address of the `struct module` that defines the key; 0 for the kernel image.
    pub module: u64,
}

/// An array of [`Key`] and a block of NUL-terminated names.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Directory {
    /// Address of the array.
    pub keys: u64,
    /// Address of the names block.
    pub names: u64,
    /// Number of entries in the array.
    pub key_count: u32,
    /// Size of the names block in bytes, the last NUL included.
    pub names_size: u32,
    /// Distance between the starts of two entries, in bytes.
    pub key_size: u32,
    /// Zero.
    pub reserved: u32,
}

/// A word that has a known value while the guest is not changing its own text.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Gate {
    /// Address of the word. With [`GATE_PER_CPU`], the address is added to the offset of each CPU.
    pub address: u64,
    /// Bits that are compared.
    pub mask: u64,
    /// The value of these bits while the gate is open.
    pub wanted: u64,
    /// `GATE_*`. A kind that is unknown to the host is accepted.
    pub kind: u32,
    /// Kinds of changes that the gate forbids while it is closed: bits of [`static_keys::Concerns`]
    /// without `DYNAMIC_DEBUG`.
    pub concerns: u32,
    /// Width of the word: 1, 2, 4 or 8 bytes.
    pub width: u8,
    /// [`GATE_PER_CPU`].
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// Name for messages, NUL-padded.
    pub name: [u8; 28],
}

/// Request that registers a kernel.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Descriptor {
    /// Header with [`OP_REGISTER`].
    pub header: Header,
    /// Random number of the boot, never 0. It is the same in each registration of one running
    /// kernel.
    pub boot: u64,
    /// `FORMAT_*`.
    pub entry_format: u32,
    /// Size of a jump entry, in bytes.
    pub entry_size: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Number of entries in the array at `gates`.
    pub gate_count: u32,
    /// `__start___jump_table .. __stop___jump_table`.
    pub jump_table: Range,
    /// `_stext .. _etext`.
    pub text: Range,
    /// Range of the keys that are sealed after init.
    pub ro_after_init: Range,
    /// Physical address of `init_top_pgt`.
    pub page_table: u64,
    /// The offset of the kernel's text by KASLR, in bytes.
    pub kaslr_offset: u64,
    /// Address of an array of [`Gate`].
    pub gates: u64,
    /// Address of an array of u64: the offset of each possible CPU's per-CPU data.
    pub cpu_offsets: u64,
    /// Number of entries in the array at `cpu_offsets`.
    pub cpu_count: u32,
    /// Distance between the starts of two [`Gate`]s of the array, in bytes.
    pub gate_size: u32,
    /// Offset of `type` in `struct static_key`.
    pub static_key_type: u32,
    /// Offset of `next` in `struct static_key_mod`.
    pub static_key_mod_next: u32,
    /// Offset of `entries` in `struct static_key_mod`.
    pub static_key_mod_entries: u32,
    /// Offset of `mod` in `struct static_key_mod`.
    pub static_key_mod_mod: u32,
    /// Offset of the u32 `state` in `struct module`.
    pub module_state: u32,
    /// Value of `MODULE_STATE_LIVE`.
    pub module_state_live: u32,
    /// Offset of `key` in `struct tracepoint`.
    pub tracepoint_key: u32,
    /// Offset of `funcs` in `struct tracepoint`.
    pub tracepoint_funcs: u32,
    /// The kernel image's keys.
    pub directory: Directory,
    /// Address of the ring of records that the host writes for the guest: {u64 sequence number from
    /// 1, u64 key, u64 nanoseconds since 1970, s32 count before, s32 count after}. If the sequence
    /// number is 0, or has changed after the record was read, the host is writing the record.
    pub records: u64,
    /// Number of records in the ring. If it is 0, the host writes no records.
    pub record_count: u32,
    /// Distance between the starts of two records, in bytes.
    pub record_size: u32,
    /// `utsname()->release`, NUL-padded.
    pub release: [u8; 64],
    /// GNU build id of vmlinux; zero if unknown.
    pub build_id: [u8; 20],
    /// Zero.
    pub reserved: u32,
}

/// Request that adds or removes a module.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Module {
    /// Header with [`OP_MODULE_ADD`] or [`OP_MODULE_DEL`].
    pub header: Header,
    /// Address of the `struct module`.
    pub module: u64,
    /// Number of this load, never 0 and never used twice in one boot.
    pub load: u64,
    /// The module's jump table.
    pub jump_table: Range,
    /// The module's text.
    pub text: Range,
    /// Range of the keys that are sealed once the module is live.
    pub ro_after_init: Range,
    /// Keys that the module defines or branches on.
    pub directory: Directory,
    /// NUL-padded name.
    pub name: [u8; 64],
    /// A negative errno that says why the directory is empty, or 0.
    pub directory_error: i32,
    /// Zero.
    pub reserved: u32,
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// The offsets are copied by hand from the header file. Moving a field would break every guest
    /// that uses this version.
    #[test]
    fn layout_is_the_headers() {
        assert_eq!(size_of::<Header>(), 24);
        assert_eq!(offset_of!(Header, op), 6);
        assert_eq!(offset_of!(Header, status) as u64, STATUS_OFFSET);
        assert_eq!(offset_of!(Header, generation), 16);
        assert_eq!(size_of::<Range>(), 16);
        assert_eq!(size_of::<Key>(), 32);
        assert_eq!(offset_of!(Key, class), 12);
        assert_eq!(offset_of!(Key, flags), 14);
        assert_eq!(offset_of!(Key, tracepoint), 16);
        assert_eq!(offset_of!(Key, module), 24);
        assert_eq!(size_of::<Directory>(), 32);
        assert_eq!(offset_of!(Directory, key_count), 16);
        assert_eq!(offset_of!(Directory, key_size), 24);

        assert_eq!(size_of::<Gate>(), 64);
        assert_eq!(offset_of!(Gate, wanted), 16);
        assert_eq!(offset_of!(Gate, kind), 24);
        assert_eq!(offset_of!(Gate, concerns), 28);
        assert_eq!(offset_of!(Gate, width), 32);
        assert_eq!(offset_of!(Gate, flags), 33);
        assert_eq!(offset_of!(Gate, name), 36);

        assert_eq!(size_of::<Descriptor>(), 304);
        assert_eq!(offset_of!(Descriptor, boot), 24);
        assert_eq!(offset_of!(Descriptor, entry_format), 32);
        assert_eq!(offset_of!(Descriptor, gate_count), 44);
        assert_eq!(offset_of!(Descriptor, jump_table), 48);
        assert_eq!(offset_of!(Descriptor, ro_after_init), 80);
        assert_eq!(offset_of!(Descriptor, page_table), 96);
        assert_eq!(offset_of!(Descriptor, gates), 112);
        assert_eq!(offset_of!(Descriptor, cpu_offsets), 120);
        assert_eq!(offset_of!(Descriptor, cpu_count), 128);
        assert_eq!(offset_of!(Descriptor, gate_size), 132);
        assert_eq!(offset_of!(Descriptor, static_key_type), 136);
        assert_eq!(offset_of!(Descriptor, module_state), 152);
        assert_eq!(offset_of!(Descriptor, tracepoint_funcs), 164);
        assert_eq!(offset_of!(Descriptor, directory), 168);
        assert_eq!(offset_of!(Descriptor, records), 200);
        assert_eq!(offset_of!(Descriptor, record_count), 208);
        assert_eq!(offset_of!(Descriptor, record_size), 212);
        assert_eq!(offset_of!(Descriptor, release), 216);
        assert_eq!(offset_of!(Descriptor, build_id), 280);
        assert_eq!(offset_of!(Descriptor, reserved), 300);

        assert_eq!(size_of::<Module>(), 192);
        assert_eq!(offset_of!(Module, module), 24);
        assert_eq!(offset_of!(Module, load), 32);
        assert_eq!(offset_of!(Module, jump_table), 40);
        assert_eq!(offset_of!(Module, ro_after_init), 72);
        assert_eq!(offset_of!(Module, directory), 88);
        assert_eq!(offset_of!(Module, name), 120);
        assert_eq!(offset_of!(Module, directory_error), 184);
    }

    /// In a memory dump, both magic numbers read "PBAY".
    #[test]
    fn magic_reads_pbay() {
        assert_eq!(&HEADER_MAGIC.to_le_bytes(), b"PBAY");
        assert_eq!(HYPERCALL_MAGIC, HEADER_MAGIC);
    }
}
