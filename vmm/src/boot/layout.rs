// SPDX-License-Identifier: Apache-2.0

//! Where the monitor puts what the guest needs at its first instruction.
//!
//! Below 1 MiB everything is ours but for what the memory map calls RAM: there
//! the guest may overwrite it once it has booted.

/// Global descriptor table.
pub const GDT: u64 = 0x500;
/// `struct hvm_start_info` of the PVH protocol, with its tables behind it.
pub const PVH_START_INFO: u64 = 0x6000;
/// `struct boot_params` of the Linux boot protocol.
pub const ZERO_PAGE: u64 = 0x7000;
/// The boot vCPU's stack ends here.
pub const BOOT_STACK_TOP: u64 = 0x8ff0;
/// The top page table; the others follow it.
pub const PAGE_TABLES: u64 = 0x9000;
/// The command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Bytes reserved for the command line, its NUL included.
pub const COMMAND_LINE_MAX: usize = 0x1_0000;
/// Last KiB of conventional memory: the MP table, where kernels look for it.
pub const MP_TABLE: u64 = 0x9_fc00;
/// Bytes reserved for the MP table.
pub const MP_TABLE_MAX: usize = 0x400;
/// The BIOS's read-only memory: the ACPI tables, where kernels look for them.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Bytes reserved for the ACPI tables.
pub const ACPI_TABLES_MAX: usize = 0x2_0000;
/// Kernels are loaded from here on.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// The local APICs' registers (architectural default).
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// The I/O APIC's registers (where KVM has it).
pub const IO_APIC: u32 = 0xfec0_0000;
/// Three pages for KVM's use on Intel hosts (KVM API 4.35, `KVM_SET_TSS_ADDR`).
pub const KVM_TSS: usize = 0xfffb_d000;
