// SPDX-License-Identifier: Apache-2.0

//! Initial state of an x86 machine: registers, CPUID, and the tables that firmware provides.

pub(crate) mod acpi;
pub(crate) mod cpuid;
pub(crate) mod mp_table;
pub(crate) mod registers;

/// Returns the low 32 bits.
pub(crate) fn low_half(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Returns the sum of the bytes; a valid table sums to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte))
}

/// Returns the checksum byte for a table in which this byte is still zero.
fn checksum_byte(bytes: &[u8]) -> u8 {
    0_u8.wrapping_sub(checksum(bytes))
}

/// Returns the APIC id of the I/O APIC: the first one that no vCPU uses.
fn io_apic_id(vcpus: u8) -> u8 {
    vcpus
}
