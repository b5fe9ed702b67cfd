// SPDX-License-Identifier: Apache-2.0

//! The MP table, by which a kernel without ACPI finds processors and interrupts (Intel
//! MultiProcessor Specification 1.4, chapter 4).

use super::{checksum_byte, io_apic_id, low_half};
use crate::boot::layout::{IO_APIC, LOCAL_APIC, MP_TABLE};

/// Version of the local APICs, as KVM emulates them.
const APIC_VERSION: u8 = 0x14;
/// Version of the I/O APIC, as KVM emulates it.
const IO_APIC_VERSION: u8 = 0x11;
/// Number of interrupt lines of the ISA bus.
const ISA_LINES: u8 = 16;

const ENABLED: u8 = 1;
const BOOT_PROCESSOR: u8 = 2;

/// Builds the table for `vcpus` vCPUs, to be written to [`MP_TABLE`].
pub(crate) fn build(vcpus: u8) -> Vec<u8> {
    let mut entries = vec![];
    let mut count = 0_u16;
    let mut entry = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..vcpus {
        let boot = if id == 0 { BOOT_PROCESSOR } else { 0 };
        let mut processor = [0; 20];
        processor[1..4].copy_from_slice(&[id, APIC_VERSION, ENABLED | boot]);
        // Signature and features: family 6 with FPU and APIC. Kernels read CPUID instead.
        processor[4..8].copy_from_slice(&0x600_u32.to_le_bytes());
        processor[8..12].copy_from_slice(&0x201_u32.to_le_bytes());
        entry(&processor);
    }
    entry(b"\x01\x00ISA   ");
    let io_apic = io_apic_id(vcpus);
    let [a, b, c, d] = IO_APIC.to_le_bytes();
    entry(&[2, io_apic, IO_APIC_VERSION, ENABLED, a, b, c, d]);
    for line in 0..ISA_LINES {
        // Vectored interrupt with the bus's polarity and trigger: ISA line n on pin n.
        entry(&[3, 0, 0, 0, 0, line, io_apic, line]);
    }
    // Local interrupts: the 8259 on LINT0 of the boot vCPU, NMI on LINT1 of every vCPU.
    entry(&[4, 3, 0, 0, 0, 0, 0, 0]);
    entry(&[4, 1, 0, 0, 0, 0, 0xff, 1]);

    let mut table = vec![];
    let table_address = low_half(MP_TABLE + 16);
    let length = u16::try_from(44 + entries.len()).unwrap_or(u16::MAX);
    table.extend_from_slice(b"PCMP");
    table.extend_from_slice(&length.to_le_bytes());
    table.extend_from_slice(&[4, 0]);
    table.extend_from_slice(b"PATCHBAYGUEST       ");
    table.extend_from_slice(&[0; 6]);
    table.extend_from_slice(&count.to_le_bytes());
    table.extend_from_slice(&LOCAL_APIC.to_le_bytes());
    table.extend_from_slice(&[0; 4]);
    table.extend_from_slice(&entries);
    table[7] = checksum_byte(&table);

    let mut pointer = vec![];
    pointer.extend_from_slice(b"_MP_");
    pointer.extend_from_slice(&table_address.to_le_bytes());
    pointer.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]);
    pointer[10] = checksum_byte(&pointer);
    pointer.extend_from_slice(&table);
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::layout::MP_TABLE_MAX;
    use crate::x86::checksum;

    #[test]
    fn tables_fit_and_add_up() {
        for vcpus in 1..=16 {
            let table = build(vcpus);
            assert!(table.len() <= MP_TABLE_MAX, "{vcpus}: {}", table.len());
            assert_eq!(checksum(&table[..16]), 0);
            assert_eq!(checksum(&table[16..]), 0);
            let length = u16::from_le_bytes([table[20], table[21]]);
            assert_eq!(usize::from(length), table.len() - 16);
            let entries = u16::from_le_bytes([table[50], table[51]]);
            assert_eq!(entries, u16::from(vcpus) + 20);
            assert_eq!(table[16..].len(), 44 + 20 * usize::from(vcpus) + 8 * 20);
        }
    }
}
