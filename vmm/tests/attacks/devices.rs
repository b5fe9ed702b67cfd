// SPDX-License-Identifier: Apache-2.0

//! Misuse of devices: ports, device memory, virtio queues.

use patchbay_vmm::devices::virtio::{
    DiskConfig, DiskLimits, MMIO_START, VirtioConfig, VsockConfig,
};
use static_keys::Op;

use super::kernel::*;
use super::program::{Program, RESULT, ROUNDS};
use super::rig::{Rig, Setup, count, site};

/// Memory that devices may write to.
const BUFFERS: u64 = 4 << 20;

#[test]
fn string_instructions_on_every_kind_of_port() {
    // Serial console, keyboard controller, clock, power management, KVM's own chips, and an unused
    // port.
    let ports = [
        0x3f8, 0x3f9, 0x3fc, 0x3ff, 0x60, 0x70, 0x71, 0x600, 0x602, 0x605, 0x606, 0x20, 0x43, 0x80,
        0xcf8, 0xcfc, 0x500, 0xffff,
    ];
    // The programs write 0x00, which is neither a reset nor a sleep state. The reads go to a
    // separate page.
    let program = Program::strings(&ports, BUFFERS, BUFFERS + 0x2000, 64);
    let Some(rig) = Rig::registered(vec![program]) else {
        return;
    };
    rig.wait_until("the program has used every port", || {
        rig.scratch(1, ROUNDS) > 0
    });
    let own = BUFFERS + 0x2000..BUFFERS + 0x3000;
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA), own]);
    rig.survives();
}

#[test]
fn a_flood_of_console_output() {
    let Some(rig) = Rig::registered(vec![Program::print(0x3f8), Program::print(0x3f8)]) else {
        return;
    };
    rig.wait_for_rounds(1, 1000);
    rig.wait_for_rounds(2, 1000);
    for _ in 0..50 {
        rig.change(&["beta"], Op::Enable).unwrap();
        rig.change(&["beta"], Op::Disable).unwrap();
    }
    assert!(rig.vm.console().read(0).bytes.len() >= 2000);
    rig.survives();
}

/// Returns a device of each kind. Dropping the directory removes their files and sockets.
fn every_device() -> (tempfile::TempDir, VirtioConfig) {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    std::fs::write(&image, vec![0xda; 64 << 10]).unwrap();
    let config = VirtioConfig {
        rng: true,
        vsock: Some(VsockConfig {
            path: folder.path().join("vsock"),
            cid: 3,
            privileged: vec![],
        }),
        disks: vec![DiskConfig {
            path: image,
            read_only: false,
            limits: DiskLimits::default(),
        }],
    };
    (folder, config)
}

#[test]
fn device_memory_at_every_offset_in_every_width() {
    let (_folder, virtio) = every_device();
    let end = MMIO_START + 0x3000;
    let programs = vec![
        // The registers of the three devices in single steps, and the gaps in larger ones.
        Program::sweep(MMIO_START, MMIO_START + 0x120, 1),
        Program::sweep(MMIO_START + 0x1000, MMIO_START + 0x1120, 1),
        Program::sweep(MMIO_START + 0x2000, MMIO_START + 0x2120, 1),
        Program::sweep(end - 64, end + 64, 1),
        Program::sweep(0xc000_0000, 0xd000_0000, 0x0100_1001),
    ];
    let vcpus = programs.len() as u64;
    let Some(rig) = Rig::with(Setup {
        programs,
        virtio,
        ..Setup::default()
    }) else {
        return;
    };
    rig.register();
    for vcpu in 1..=vcpus {
        rig.wait_until("every offset was touched", || rig.scratch(vcpu, ROUNDS) > 0);
    }
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Status register: the driver must reset the device.
const NEEDS_RESET: u32 = 0x40;
const DRIVER_OK: u32 = 0xf;

/// Addresses of the parts of a queue.
fn queue(number: u64) -> [u64; 3] {
    let base = BUFFERS + 0x1_0000 * number;
    [base, base + 0x1000, base + 0x2000]
}

/// Returns the register writes of a driver up to its first notification, with `queues` queues of 16
/// entries. The last queue is notified.
fn drive(device: u64, queues: u64) -> Vec<(u64, u32)> {
    let base = MMIO_START + device * 0x1000;
    let mut writes = vec![
        (0x70, 0),
        (0x70, 1),
        (0x70, 3),
        (0x24, 0),
        (0x20, 0x1000_0000),
        (0x24, 1),
        (0x20, 1),
        (0x70, 0xb),
    ];
    for number in 0..queues {
        writes.extend([(0x30, u32::try_from(number).unwrap()), (0x38, 16)]);
        for (register, part) in [0x80, 0x90, 0xa0].into_iter().zip(queue(number)) {
            writes.extend([(register, u32::try_from(part).unwrap()), (register + 4, 0)]);
        }
        writes.push((0x44, 1));
    }
    writes.extend([
        (0x70, DRIVER_OK),
        (0x50, u32::try_from(queues - 1).unwrap()),
    ]);
    writes
        .into_iter()
        .map(|(register, value)| (base + register, value))
        .collect()
}

/// Address, length, flags and next of a descriptor.
type Descriptor = (u64, u32, u16, u16);

fn bytes((address, length, flags, next): Descriptor) -> Vec<u8> {
    [
        &address.to_le_bytes()[..],
        &length.to_le_bytes(),
        &flags.to_le_bytes(),
        &next.to_le_bytes(),
    ]
    .concat()
}

/// Offers a chain to each device. The device must detect the error and write nothing.
fn broken(table: &[Descriptor], elsewhere: &[(u64, Descriptor)], available: u16) {
    // The entropy device, vsock's transmit queue, the disk.
    for (device, queues) in [(0, 1), (1, 2), (2, 1)] {
        let (_folder, virtio) = every_device();
        let status = MMIO_START + device * 0x1000 + 0x70;
        let program = Program::pokes(&drive(device, queues), status);
        let Some(rig) = Rig::with(Setup {
            programs: vec![program],
            virtio,
            ..Setup::default()
        }) else {
            return;
        };
        rig.register();
        let [descriptors, available_ring, _] = queue(queues - 1);
        let table: Vec<u8> = table.iter().copied().flat_map(bytes).collect();
        rig.memory().write_physical(descriptors, &table);
        for (at, descriptor) in elsewhere {
            rig.memory().write_physical(*at, &bytes(*descriptor));
        }
        rig.memory()
            .write_physical(available_ring + 2, &available.to_le_bytes());
        let before = rig.picture();
        rig.let_go(1);
        rig.wait_until("the device asks for a reset", || {
            rig.scratch(1, RESULT) == u64::from(NEEDS_RESET | DRIVER_OK)
        });
        rig.only_changed(&before, &[]);
        rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
        rig.survives();
    }
}

#[test]
fn queues_with_loops() {
    broken(&[(BUFFERS, 64, NEXT, 0)], &[], 1);
    broken(
        &[
            (BUFFERS, 64, NEXT | WRITE, 1),
            (BUFFERS, 64, NEXT | WRITE, 0),
        ],
        &[],
        1,
    );
}

#[test]
fn queues_with_buffers_outside_memory() {
    for (address, length) in [
        (MEMORY, 64),
        (MEMORY - 63, 64),
        (u64::MAX - 62, 64),
        (BUFFERS, u32::MAX),
        (0xfee0_0000, 64),
    ] {
        broken(&[(address, length, WRITE, 0)], &[], 1);
    }
}

#[test]
fn queues_with_indirect_tables_of_indirect_tables() {
    let table = BUFFERS + 0x10_0000;
    let indirect = (table, 16, INDIRECT, 0);
    broken(&[indirect], &[(table, indirect)], 1);
    broken(
        &[(table, 17, INDIRECT, 0)],
        &[(table, (BUFFERS, 64, 0, 0))],
        1,
    );
    broken(&[(MEMORY, 16, INDIRECT, 0)], &[], 1);
}

#[test]
fn queues_that_offer_more_than_they_hold() {
    broken(&[(BUFFERS, 64, WRITE, 0)], &[], 17);
    broken(&[(BUFFERS, 64, WRITE, 0)], &[], u16::MAX);
}

/// Queues outside memory, at address 0, misaligned, with overlapping parts, and of invalid sizes.
#[test]
fn queues_in_wrong_places() {
    let (_folder, virtio) = every_device();
    let mut writes = vec![];
    for device in 0..3_u64 {
        let base = MMIO_START + device * 0x1000;
        for (size, at) in [
            (16, MEMORY),
            (16, 0xfee0_0000),
            (0, BUFFERS),
            (3, BUFFERS),
            (0x1_0000, BUFFERS),
            (256, MEMORY - 16),
            (16, BUFFERS + 1),
            (16, 0),
        ] {
            let mut drive = drive(device, 1);
            for (register, value) in &mut drive {
                match *register - base {
                    0x38 => *value = size,
                    0x80 | 0x90 | 0xa0 => *value = u32::try_from(at).unwrap(),
                    _ => {}
                }
            }
            writes.extend(drive);
        }
    }
    let status = MMIO_START + 0x70;
    let Some(rig) = Rig::with(Setup {
        programs: vec![Program::pokes(&writes, status)],
        virtio,
        ..Setup::default()
    }) else {
        return;
    };
    rig.register();
    let before = rig.picture();
    rig.let_go(1);
    rig.wait_until("the device asks for a reset", || {
        rig.scratch(1, RESULT) & u64::from(NEEDS_RESET) != 0
    });
    rig.only_changed(&before, &[]);
    rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    rig.survives();
}
