// SPDX-License-Identifier: Apache-2.0

//! The minimal ACPI tables for a stock kernel to find its processors and virtio devices and to
//! power off (ACPI 6.5, chapter 5): RSDP, XSDT, FADT with FACS and DSDT, MADT.

use super::{checksum_byte, io_apic_id};
use crate::boot::layout::{ACPI_TABLES, IO_APIC, LOCAL_APIC};
use crate::devices::{PM1_CONTROL, PM1_EVENT, SLEEP_TYPE_OFF};

/// Interrupt line of ACPI events (the power button).
pub(crate) const SCI: u16 = 9;

/// FADT flags: WBINVD works; no sleep button; no RTC wake; reset register present. A clear bit 4
/// means that the power button is fixed hardware.
const FADT_FLAGS: u32 = 1 | 1 << 5 | 1 << 6 | 1 << 10;

/// FADT boot flags: ISA devices present (the serial port), no VGA, no CMOS clock, and, by a clear
/// bit, no keyboard controller.
const FADT_BOOT_FLAGS: u16 = 1 | 1 << 2 | 1 << 5;

/// `Name (_S5_, Package () {5, 5, 0, 0})`: ACPI 6.5, 7.4.2.6 and 20.2.
const S5_OBJECT: [u8; 14] = [
    0x08,
    b'_',
    b'S',
    b'5',
    b'_',
    0x12,
    0x08,
    0x04,
    0x0a,
    SLEEP_TYPE_OFF,
    0x0a,
    SLEEP_TYPE_OFF,
    0x00,
    0x00,
];

/// A virtio device with its registers in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmioDevice {
    pub(crate) address: u32,
    pub(crate) size: u32,
    pub(crate) interrupt: u32,
}

/// Returns `opcode`, then the length of the rest including the length itself, then `body` (ACPI
/// 6.5, 20.2.4).
fn package(opcode: &[u8], body: &[u8]) -> Vec<u8> {
    // Bodies are a few hundred bytes, so the length has one or two bytes.
    let short = body.len() + 1;
    let long = body.len() + 2;
    let length = match short {
        ..0x40 => vec![short as u8],
        _ => vec![0x40 | (long & 0xf) as u8, (long >> 4) as u8],
    };
    [opcode, &length, body].concat()
}

/// Returns `Name (NAME, value)`.
fn name(name: &[u8; 4], value: &[u8]) -> Vec<u8> {
    [&[0x08], &name[..], value].concat()
}

/// Returns the device in the form that Linux's virtio_mmio driver expects: `_HID` LNRO0005, its
/// registers and an edge-triggered interrupt (ACPI 6.5, 6.4.3.4 and 6.4.3.6).
fn virtio_device(index: u8, device: MmioDevice) -> Vec<u8> {
    let [address, size, interrupt] =
        [device.address, device.size, device.interrupt].map(u32::to_le_bytes);
    let resources = [
        &[0x86, 9, 0, 1],
        &address[..],
        &size,
        &[0x89, 6, 0, 0b11, 1],
        &interrupt,
        &[0x79, 0],
    ]
    .concat();
    let buffer = [&[0x0a, resources.len() as u8], &resources[..]].concat();
    let body = [
        &[b'V', b'I', b'O', b'A' + index][..],
        &name(b"_HID", b"\x0dLNRO0005\0"),
        &name(b"_UID", &[0x0a, index]),
        &name(b"_CRS", &package(&[0x11], &buffer)),
    ]
    .concat();
    package(&[0x5b, 0x82], &body)
}

/// Returns the contents of the DSDT: the `_S5` object and the devices below `\_SB`.
fn definitions(devices: &[MmioDevice]) -> Vec<u8> {
    let mut body = S5_OBJECT.to_vec();
    if !devices.is_empty() {
        let mut scope = b"\\_SB_".to_vec();
        for (index, device) in (0..).zip(devices) {
            scope.extend(virtio_device(index, *device));
        }
        body.extend(package(&[0x10], &scope));
    }
    body
}

/// Returns a table with its header (ACPI 6.5, 5.2.6).
fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(36 + body.len()).unwrap_or(u32::MAX);
    let mut table = vec![];
    table.extend_from_slice(signature);
    table.extend_from_slice(&length.to_le_bytes());
    table.extend_from_slice(&[revision, 0]);
    table.extend_from_slice(b"PBAY  PATCHBAY");
    table.extend_from_slice(&1_u32.to_le_bytes());
    table.extend_from_slice(b"PBAY");
    table.extend_from_slice(&1_u32.to_le_bytes());
    table.extend_from_slice(body);
    table[9] = checksum_byte(&table);
    table
}

/// Returns the generic address of an I/O register (ACPI 6.5, 5.2.3.2).
fn io_register(port: u16, bits: u8) -> [u8; 12] {
    let access = match bits {
        8 => 1,
        16 => 2,
        _ => 3,
    };
    let [low, high] = port.to_le_bytes();
    [1, bits, 0, access, low, high, 0, 0, 0, 0, 0, 0]
}

fn fadt(facs: u64, dsdt: u64) -> Vec<u8> {
    const HEADER: usize = 36;
    let mut body = [0_u8; 276 - HEADER];
    // Offsets from ACPI 6.5, table 5.9.
    let mut put = |offset: usize, bytes: &[u8]| {
        body[offset - HEADER..offset - HEADER + bytes.len()].copy_from_slice(bytes);
    };
    let [a, b, c, d, ..] = facs.to_le_bytes();
    put(36, &[a, b, c, d]);
    let [a, b, c, d, ..] = dsdt.to_le_bytes();
    put(40, &[a, b, c, d]);
    put(46, &SCI.to_le_bytes());
    put(56, &u32::from(PM1_EVENT).to_le_bytes());
    put(64, &u32::from(PM1_CONTROL).to_le_bytes());
    put(88, &[4, 2]);
    // Latencies above the limits mean that there are no processor power states.
    put(96, &101_u16.to_le_bytes());
    put(98, &1001_u16.to_le_bytes());
    put(109, &FADT_BOOT_FLAGS.to_le_bytes());
    put(112, &FADT_FLAGS.to_le_bytes());
    put(116, &io_register(0x64, 8));
    put(128, &[0xfe]);
    put(132, &facs.to_le_bytes());
    put(140, &dsdt.to_le_bytes());
    put(148, &io_register(PM1_EVENT, 32));
    put(172, &io_register(PM1_CONTROL, 16));
    table(b"FACP", 6, &body)
}

fn madt(vcpus: u8) -> Vec<u8> {
    let mut body = vec![];
    body.extend_from_slice(&LOCAL_APIC.to_le_bytes());
    // Flag: there are 8259s too.
    body.extend_from_slice(&1_u32.to_le_bytes());
    for id in 0..vcpus {
        body.extend_from_slice(&[0, 8, id, id, 1, 0, 0, 0]);
    }
    body.extend_from_slice(&[1, 12, io_apic_id(vcpus), 0]);
    body.extend_from_slice(&IO_APIC.to_le_bytes());
    body.extend_from_slice(&0_u32.to_le_bytes());
    // The SCI is level-triggered, active high.
    let [sci, _] = SCI.to_le_bytes();
    body.extend_from_slice(&[2, 10, 0, sci, sci, 0, 0, 0, 0x0d, 0]);
    // NMI on LINT1 of every processor.
    body.extend_from_slice(&[4, 6, 0xff, 0, 0, 1]);
    table(b"APIC", 4, &body)
}

/// Builds the tables for `vcpus` vCPUs and some devices, to be written to [`ACPI_TABLES`]. The RSDP
/// comes first.
pub(crate) fn build(vcpus: u8, devices: &[MmioDevice]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    let mut append = |table: &[u8]| {
        let at = bytes.len().next_multiple_of(64);
        bytes.resize(at, 0);
        bytes.extend_from_slice(table);
        ACPI_TABLES + at as u64
    };
    let mut facs = [0; 64];
    facs[..8].copy_from_slice(b"FACS\x40\0\0\0");
    facs[32] = 2;
    let facs = append(&facs);
    let dsdt = append(&table(b"DSDT", 2, &definitions(devices)));
    let fadt = append(&fadt(facs, dsdt));
    let madt = append(&madt(vcpus));
    let entries: Vec<u8> = [fadt, madt]
        .iter()
        .flat_map(|at| at.to_le_bytes())
        .collect();
    let xsdt = append(&table(b"XSDT", 1, &entries));

    let mut rsdp = [0_u8; 36];
    rsdp[..8].copy_from_slice(b"RSD PTR ");
    rsdp[9..15].copy_from_slice(b"PBAY  ");
    rsdp[15] = 2;
    rsdp[20..24].copy_from_slice(&36_u32.to_le_bytes());
    rsdp[24..32].copy_from_slice(&xsdt.to_le_bytes());
    rsdp[8] = checksum_byte(&rsdp[..20]);
    rsdp[32] = checksum_byte(&rsdp);
    bytes[..36].copy_from_slice(&rsdp);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::layout::ACPI_TABLES_MAX;
    use crate::x86::checksum;

    fn at(bytes: &[u8], address: &[u8]) -> usize {
        let address = u64::from_le_bytes(address.try_into().unwrap());
        let offset = usize::try_from(address - ACPI_TABLES).unwrap();
        assert!(offset < bytes.len());
        offset
    }

    fn whole(bytes: &[u8], offset: usize) -> &[u8] {
        let length = u32::from_le_bytes(bytes[offset + 4..offset + 8].try_into().unwrap());
        &bytes[offset..offset + length as usize]
    }

    #[test]
    fn every_table_is_found_and_adds_up() {
        for vcpus in 1..=16 {
            let bytes = build(vcpus, &[]);
            assert!(bytes.len() <= ACPI_TABLES_MAX);
            assert_eq!(checksum(&bytes[..20]), 0);
            assert_eq!(checksum(&bytes[..36]), 0);
            let xsdt = whole(&bytes, at(&bytes, &bytes[24..32]));
            assert_eq!(&xsdt[..4], b"XSDT");
            assert_eq!(checksum(xsdt), 0);
            let fadt = whole(&bytes, at(&bytes, &xsdt[36..44]));
            assert_eq!((&fadt[..4], fadt.len()), (&b"FACP"[..], 276));
            // The power button is fixed hardware, and there is no sleep button.
            assert_eq!(fadt[112] & 0x30, 0x20);
            assert_eq!(checksum(fadt), 0);
            let dsdt = whole(&bytes, at(&bytes, &fadt[140..148]));
            assert_eq!((&dsdt[..4], checksum(dsdt)), (&b"DSDT"[..], 0));
            let facs = whole(&bytes, at(&bytes, &fadt[132..140]));
            assert_eq!((&facs[..4], facs.len()), (&b"FACS"[..], 64));
            let madt = whole(&bytes, at(&bytes, &xsdt[44..52]));
            assert_eq!((&madt[..4], checksum(madt)), (&b"APIC"[..], 0));
            assert_eq!(madt.len(), 44 + 8 * usize::from(vcpus) + 12 + 10 + 6);
        }
    }

    #[test]
    fn a_device_is_what_the_specification_says() {
        let device = MmioDevice {
            address: 0xd000_1000,
            size: 0x1000,
            interrupt: 6,
        };
        let expected = [
            &b"\x5b\x82\x3bVIOB"[..],
            b"\x08_HID\x0dLNRO0005\0",
            b"\x08_UID\x0a\x01",
            b"\x08_CRS\x11\x1a\x0a\x17",
            b"\x86\x09\0\x01\0\x10\0\xd0\0\x10\0\0",
            b"\x89\x06\0\x03\x01\x06\0\0\0\x79\0",
        ]
        .concat();
        assert_eq!(virtio_device(1, device), expected);
        // Six devices need a length of two bytes.
        let all = definitions(&[device; 6]);
        let scope = &all[S5_OBJECT.len()..];
        assert_eq!((scope[0], scope[1] >> 6), (0x10, 1));
        let length = usize::from(scope[1] & 0xf) | usize::from(scope[2]) << 4;
        assert_eq!(length, scope.len() - 1);
        assert_eq!(&scope[3..8], b"\\_SB_");
        assert_eq!(definitions(&[]), S5_OBJECT);
    }
}
