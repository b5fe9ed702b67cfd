// SPDX-License-Identifier: Apache-2.0

//! Addresses of the structures that the monitor writes to guest memory before the guest's first
//! instruction.
//!
//! Everything below 1 MiB is reserved for the monitor, except the ranges that the memory map
//! reports as RAM. The guest may overwrite those ranges after boot.

/// Global descriptor table.
pub const GDT: u64 = 0x500;
/// `struct hvm_start_info` of the PVH protocol, followed by its tables.
pub const PVH_START_INFO: u64 = 0x6000;
/// `struct boot_params` of the Linux boot protocol.
pub const ZERO_PAGE: u64 = 0x7000;
/// End of the boot vCPU's stack.
pub const BOOT_STACK_TOP: u64 = 0x8ff0;
/// Top-level page table, followed by the tables of the lower levels.
pub const PAGE_TABLES: u64 = 0x9000;
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Number of bytes reserved for the command line, including its NUL.
pub const COMMAND_LINE_MAX: usize = 0x1_0000;
/// Last KiB of conventional memory, where kernels look for the MP table.
pub const MP_TABLE: u64 = 0x9_fc00;
/// Number of bytes reserved for the MP table.
pub const MP_TABLE_MAX: usize = 0x400;
/// BIOS read-only memory, where kernels look for the ACPI tables.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Number of bytes reserved for the ACPI tables.
pub const ACPI_TABLES_MAX: usize = 0x2_0000;
/// Lowest address at which a kernel is loaded.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// Registers of the local APICs (architectural default).
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Registers of the I/O APIC (KVM's address).
pub const IO_APIC: u32 = 0xfec0_0000;
/// Three pages that KVM uses on Intel hosts (KVM API 4.35, `KVM_SET_TSS_ADDR`).
pub const KVM_TSS: usize = 0xfffb_d000;
