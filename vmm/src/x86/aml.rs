// SPDX-License-Identifier: Apache-2.0

//! ACPI Machine Language for devices in memory (ACPI 6.5, chapter 20): one object per device in the
//! scope `\_SB`.

use super::low_half;

/// A virtio device with registers in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmioDevice {
    /// Guest-physical address of the registers.
    pub address: u64,
    pub length: u32,
    /// Interrupt line, edge-triggered.
    pub irq: u32,
}

/// Hardware id of virtio-mmio, assigned to QEMU (`virtio_mmio_acpi_match`,
/// `drivers/virtio/virtio_mmio.c`).
const VIRTIO_MMIO: &[u8] = b"LNRO0005\0";

/// `Scope (\_SB) { Device (VMxx) {…} … }`.
pub(crate) fn scope(devices: &[MmioDevice]) -> Vec<u8> {
    let mut body = b"\\_SB_".to_vec();
    for (number, mmio) in (0_u8..).zip(devices) {
        body.extend(device(number, mmio));
    }
    let mut scope = vec![0x10];
    scope.extend(with_length(&body));
    scope
}

fn device(number: u8, device: &MmioDevice) -> Vec<u8> {
    let digit = |value: u8| b"0123456789ABCDEF"[usize::from(value & 15)];
    let mut body = vec![b'V', b'M', digit(number >> 4), digit(number)];
    body.extend_from_slice(b"\x08_HID\x0d");
    body.extend_from_slice(VIRTIO_MMIO);
    body.extend_from_slice(b"\x08_UID\x0a");
    body.push(number);
    let resources = resources(device);
    let mut buffer = vec![0x0a, u8::try_from(resources.len()).unwrap_or(u8::MAX)];
    buffer.extend(resources);
    body.extend_from_slice(b"\x08_CRS\x11");
    body.extend(with_length(&buffer));
    let mut object = vec![0x5b, 0x82];
    object.extend(with_length(&body));
    object
}

/// Memory32Fixed, an extended interrupt (consumer, edge, active high, exclusive) and the end tag
/// (ACPI 6.5, 6.4).
fn resources(device: &MmioDevice) -> Vec<u8> {
    let mut bytes = vec![0x86, 9, 0, 1];
    bytes.extend(low_half(device.address).to_le_bytes());
    bytes.extend(device.length.to_le_bytes());
    bytes.extend([0x89, 6, 0, 3, 1]);
    bytes.extend(device.irq.to_le_bytes());
    bytes.extend([0x79, 0]);
    bytes
}

/// Puts a package length of 2 bytes before the body; it counts itself (ACPI 6.5, 20.2.4).
fn with_length(body: &[u8]) -> Vec<u8> {
    let length = body.len() + 2;
    debug_assert!(length < 1 << 12);
    let low = u8::try_from(length & 15).unwrap_or(0);
    let high = u8::try_from(length >> 4 & 0xff).unwrap_or(0);
    let mut bytes = vec![1 << 6 | low, high];
    bytes.extend_from_slice(body);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths add up at each level, and the resources are those of the device.
    #[test]
    fn each_device_has_its_registers_and_its_interrupt() {
        let devices: Vec<MmioDevice> = (0..6)
            .map(|index| MmioDevice {
                address: 0xd000_0000 + 0x1000 * index,
                length: 0x1000,
                irq: 5,
            })
            .collect();
        let scope = scope(&devices);
        let length = |at: usize| usize::from(scope[at] & 15) | usize::from(scope[at + 1]) << 4;
        assert_eq!((scope[0], &scope[3..8]), (0x10, &b"\\_SB_"[..]));
        assert_eq!(1 + length(1), scope.len());
        let mut at = 8;
        for (number, device) in devices.iter().enumerate() {
            assert_eq!(scope[at..at + 2], [0x5b, 0x82]);
            let end = at + 2 + length(at + 2);
            let body = &scope[at + 4..end];
            assert_eq!(
                body[..4],
                [b'V', b'M', b'0', b'0' + u8::try_from(number).unwrap()]
            );
            let mut wanted = vec![0x86, 9, 0, 1];
            wanted.extend(low_half(device.address).to_le_bytes());
            wanted.extend([0, 0x10, 0, 0, 0x89, 6, 0, 3, 1, 5, 0, 0, 0, 0x79, 0]);
            assert!(body.ends_with(&wanted), "{body:x?}");
            at = end;
        }
        assert_eq!(at, scope.len());
    }
}
