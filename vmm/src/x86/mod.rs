// SPDX-License-Identifier: Apache-2.0

//! What an x86 machine looks like to its kernel before the first instruction:
//! registers, CPUID, and the tables that firmware would have left.

pub(crate) mod acpi;
pub(crate) mod cpuid;
pub(crate) mod mp_table;
pub(crate) mod registers;

/// Adds up bytes; tables are valid if all of theirs add up to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte))
}

/// The byte that makes a table with a zero in its place valid.
fn checksum_byte(bytes: &[u8]) -> u8 {
    0_u8.wrapping_sub(checksum(bytes))
}

/// APIC id of the I/O APIC: the first that no vCPU has.
fn io_apic_id(vcpus: u8) -> u8 {
    vcpus
}
