// SPDX-License-Identifier: Apache-2.0

//! The minimal ACPI tables for a stock kernel to find its processors and virtio devices and to
//! power off (ACPI 6.5, chapter 5): RSDP, XSDT, FADT with FACS and DSDT, MADT.

use acpi_tables::facs::FACS;
use acpi_tables::fadt::FADTBuilder;
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, aml};

use super::{io_apic_id, low_half};
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

const OEM: [u8; 6] = *b"PBAY  ";
const OEM_TABLE: [u8; 8] = *b"PATCHBAY";

/// A virtio device with its registers in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmioDevice {
    pub(crate) address: u32,
    pub(crate) size: u32,
    pub(crate) interrupt: u32,
}

fn bytes_of(object: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    object.to_aml_bytes(&mut bytes);
    bytes
}

/// Returns the device in the form that Linux's virtio_mmio driver expects: `_HID` LNRO0005, its
/// registers and an edge-triggered interrupt (ACPI 6.5, 6.4.3.4 and 6.4.3.6).
fn virtio_device(index: u8, device: MmioDevice) -> Vec<u8> {
    let name = format!("VIO{}", char::from(b'A' + index));
    bytes_of(&aml::Device::new(
        aml::Path::new(&name),
        vec![
            &aml::Name::new("_HID".into(), &"LNRO0005"),
            &aml::Name::new("_UID".into(), &index),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![
                    &aml::Memory32Fixed::new(true, device.address, device.size),
                    &aml::Interrupt::new(true, true, false, false, device.interrupt),
                ]),
            ),
        ],
    ))
}

/// Returns the contents of the DSDT: `Name (_S5_, Package () {5, 5, 0, 0})` (ACPI 6.5, 7.4.2.6) and
/// the devices below `\_SB`.
fn definitions(devices: &[MmioDevice]) -> Vec<u8> {
    let off = aml::Package::new(vec![
        &SLEEP_TYPE_OFF,
        &SLEEP_TYPE_OFF,
        &aml::ZERO,
        &aml::ZERO,
    ]);
    let mut body = bytes_of(&aml::Name::new("_S5_".into(), &off));
    if !devices.is_empty() {
        let devices = (0..).zip(devices);
        let devices = devices.flat_map(|(index, device)| virtio_device(index, *device));
        body.extend(aml::Scope::raw("\\_SB_".into(), devices.collect()));
    }
    body
}

/// Returns a table with its header (ACPI 6.5, 5.2.6).
fn table(signature: &[u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    let mut table = Sdt::new(*signature, 36, revision, OEM, OEM_TABLE, 1);
    table.append_slice(body);
    table.as_slice().to_vec()
}

/// Returns the generic address of an I/O register (ACPI 6.5, 5.2.3.2).
fn io_register(port: u16, bits: u8) -> GAS {
    let access = match bits {
        8 => AccessSize::ByteAccess,
        16 => AccessSize::WordAccess,
        _ => AccessSize::DwordAccess,
    };
    GAS::new(AddressSpace::SystemIo, bits, 0, access, port.into())
}

fn fadt(facs: u64, dsdt: u64) -> Vec<u8> {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, 1);
    // Both tables are below 4 GiB, so the 32-bit fields can hold their addresses too. Kernels use
    // the 64-bit fields.
    fadt.firmware_ctrl = low_half(facs).into();
    fadt.dsdt = low_half(dsdt).into();
    fadt.x_firmware_ctrl = facs.into();
    fadt.x_dsdt = dsdt.into();
    fadt.sci_int = SCI.into();
    fadt.pm1a_evt_blk = u32::from(PM1_EVENT).into();
    fadt.pm1a_cnt_blk = u32::from(PM1_CONTROL).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1_cnt_len = 2;
    // Latencies above the limits mean that there are no processor power states.
    fadt.p_lvl2_lat = 101.into();
    fadt.p_lvl3_lat = 1001.into();
    fadt.iapc_boot_arch = FADT_BOOT_FLAGS.into();
    fadt.flags = FADT_FLAGS.into();
    fadt.reset_reg = io_register(0x64, 8);
    fadt.reset_value = 0xfe;
    fadt.x_pm1a_evt_blk = io_register(PM1_EVENT, 32);
    fadt.x_pm1a_cnt_blk = io_register(PM1_CONTROL, 16);
    bytes_of(&fadt.finalize())
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
    // The SCI is level-triggered and active high.
    let [sci, _] = SCI.to_le_bytes();
    body.extend_from_slice(&[2, 10, 0, sci, sci, 0, 0, 0, 0x0d, 0]);
    // NMI is on LINT1 of every processor.
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
    let mut facs = FACS::new();
    facs.version = 2;
    let facs = append(&bytes_of(&facs));
    let dsdt = append(&table(b"DSDT", 2, &definitions(devices)));
    let fadt = append(&fadt(facs, dsdt));
    let madt = append(&madt(vcpus));
    let entries: Vec<u8> = [fadt, madt]
        .iter()
        .flat_map(|at| at.to_le_bytes())
        .collect();
    let xsdt = append(&table(b"XSDT", 1, &entries));

    bytes[..36].copy_from_slice(&bytes_of(&Rsdp::new(OEM, xsdt)));
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
            &b"\x5b\x82\x3aVIOB"[..],
            b"\x08_HID\x0dLNRO0005\0",
            b"\x08_UID\x01",
            b"\x08_CRS\x11\x1a\x0a\x17",
            b"\x86\x09\0\x01\0\x10\0\xd0\0\x10\0\0",
            b"\x89\x06\0\x03\x01\x06\0\0\0\x79\0",
        ]
        .concat();
        assert_eq!(virtio_device(1, device), expected);
        let off = b"\x08_S5_\x12\x08\x04\x0a\x05\x0a\x05\0\0";
        assert_eq!(definitions(&[]), off);
        // The package length of a scope with six devices takes two bytes.
        let all = definitions(&[device; 6]);
        let scope = &all[off.len()..];
        assert_eq!((scope[0], scope[1] >> 6), (0x10, 1));
        let length = usize::from(scope[1] & 0xf) | usize::from(scope[2]) << 4;
        assert_eq!(length, scope.len() - 1);
        assert_eq!(&scope[3..8], b"\\_SB_");
    }
}
