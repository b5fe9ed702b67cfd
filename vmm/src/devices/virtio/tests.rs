// SPDX-License-Identifier: Apache-2.0

//! Tests the transport, the entropy device and disks, with a driver that follows the rules.

mod disk;
mod hostile;

use std::io::Write;
use std::path::Path;

use virtio_bindings::virtio_mmio::*;

use super::block::{Block, DiskConfig, DiskError};
use super::device::{Device, NextTurn};
use super::queue::{Broken, Ring};
use super::rng::Rng;
use super::testing::{Buffer, Driver, NEEDS_RESET};
use super::thread::DeviceThread;
use super::{DiskLimits, MMIO_START, Memory, Virtio, VirtioConfig, VirtioError};

#[test]
fn the_registers_tell_what_the_device_is() {
    let driver = Driver::new(Rng);
    assert_eq!(
        driver.register(VIRTIO_MMIO_MAGIC_VALUE),
        u32::from_le_bytes(*b"virt")
    );
    assert_eq!(driver.register(VIRTIO_MMIO_VERSION), 2);
    assert_eq!(driver.register(VIRTIO_MMIO_DEVICE_ID), 4);
    assert_eq!(driver.register(VIRTIO_MMIO_QUEUE_NUM_MAX), 256);
    driver.set(VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(driver.register(VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
    driver.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(driver.register(VIRTIO_MMIO_DEVICE_FEATURES), 0);
    assert_eq!(driver.register(VIRTIO_MMIO_SHM_LEN_HIGH), u32::MAX);
}

#[test]
fn accesses_of_odd_widths_and_places_do_nothing() {
    let driver = Driver::new(Rng);
    for offset in [0, 1, 0x70, 0x72, 0xff, 0x100, 0xfff, u64::MAX] {
        for width in [1, 2, 3, 8] {
            let mut bytes = vec![0xaa; width];
            driver.transport.read(offset, &mut bytes);
            assert_eq!(bytes, vec![0; width], "{offset:#x}");
            driver.transport.write(offset, &bytes);
        }
    }
    assert_eq!(driver.register(VIRTIO_MMIO_STATUS), 0xf);
}

#[test]
fn features_are_refused_without_version_1_or_if_not_offered() {
    for (half, features) in [(0, 0), (1, 1 << 8 | 1), (1, 3), (0, 1)] {
        let driver = Driver::new(Rng);
        driver.set(VIRTIO_MMIO_STATUS, 0);
        driver.set(VIRTIO_MMIO_STATUS, 3);
        driver.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
        driver.set(VIRTIO_MMIO_DRIVER_FEATURES, features);
        driver.set(VIRTIO_MMIO_STATUS, 0xb);
        assert_eq!(
            driver.register(VIRTIO_MMIO_STATUS),
            3,
            "{half} {features:#x}"
        );
        // The driver cannot continue as if the features had been accepted.
        driver.set(VIRTIO_MMIO_STATUS, 7);
        assert_eq!(driver.register(VIRTIO_MMIO_STATUS), 3);
    }
}

#[test]
fn queues_cannot_be_moved_while_the_device_works() {
    let mut driver = Driver::new(Rng);
    driver.set(VIRTIO_MMIO_QUEUE_SEL, 0);
    driver.set(VIRTIO_MMIO_QUEUE_DESC_LOW, 0x8000);
    driver.set(VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(driver.register(VIRTIO_MMIO_QUEUE_READY), 1);
    driver.chain(0, &[Buffer::In(16)]);
    driver.run();
    assert_eq!(driver.used(0), [(0, 16)]);
}

#[test]
fn bad_queues_need_a_reset() {
    let good = super::testing::queue_at(0);
    let [descriptors, available, used] = good;
    for (size, parts) in [
        (0, good),
        (3, good),
        (512, good),
        (0x1_0010, good),
        (16, [descriptors + 8, available, used]),
        (16, [descriptors, available + 1, used]),
        (16, [descriptors, available, used + 2]),
        (16, [0, available, used]),
        (16, [descriptors, 0, used]),
        (16, [descriptors, available, 1 << 40]),
        (16, [0x40_0000 - 16, available, used]),
        (16, [descriptors, 0x40_0000 - 4, used]),
        (16, [descriptors, available, 0x40_0000 - 4]),
        (16, [u64::MAX - 15, available, used]),
    ] {
        let mut driver = Driver::new(Rng);
        driver.set(VIRTIO_MMIO_STATUS, 0);
        driver.negotiate();
        driver.set_queue(0, size, parts);
        driver.set(VIRTIO_MMIO_STATUS, 0xf);
        assert!(driver.needs_reset(), "{size} {parts:x?}");
        assert!(driver.interrupted());
        assert_eq!(
            driver.register(VIRTIO_MMIO_INTERRUPT_STATUS),
            VIRTIO_MMIO_INT_CONFIG
        );
        // Setting status bits does not help; a reset does.
        driver.set(VIRTIO_MMIO_STATUS, 0xf);
        assert_ne!(driver.register(VIRTIO_MMIO_STATUS) & NEEDS_RESET, 0);
        driver.start();
        assert!(!driver.needs_reset());
    }
}

#[test]
fn interrupts_are_raised_acknowledged_and_suppressed() {
    let mut driver = Driver::new(Rng);
    driver.run();
    assert!(!driver.interrupted());
    driver.chain(0, &[Buffer::In(16)]);
    driver.run();
    assert!(driver.interrupted());
    assert_eq!(
        driver.register(VIRTIO_MMIO_INTERRUPT_STATUS),
        VIRTIO_MMIO_INT_VRING
    );
    driver.set(VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INT_VRING);
    assert_eq!(driver.register(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    // The driver disables interrupts.
    let flags = super::testing::queue_at(0)[1];
    vm_memory::Bytes::write_obj(&driver.memory, 1_u16, vm_memory::GuestAddress(flags)).unwrap();
    driver.chain(0, &[Buffer::In(16)]);
    driver.run();
    assert!(!driver.interrupted());
    assert_eq!(driver.used(0).len(), 2);
}

#[test]
fn after_a_reset_the_device_leaves_the_queues_alone() {
    let mut driver = Driver::new(Rng);
    driver.chain(0, &[Buffer::In(16)]);
    driver.set(VIRTIO_MMIO_STATUS, 0);
    driver.run();
    assert!(driver.used(0).is_empty());
}

#[test]
fn randomness_fills_what_is_asked_for_up_to_a_page() {
    let mut driver = Driver::new(Rng);
    let buffers = driver.chain(0, &[Buffer::In(40), Buffer::In(0), Buffer::In(24)]);
    driver.chain(0, &[Buffer::In(100_000)]);
    driver.chain(0, &[Buffer::Out(b"nonsense")]);
    driver.run();
    assert_eq!(driver.used(0), [(0, 64), (3, 4096), (4, 0)]);
    assert!(driver.bytes(buffers[0], 40).iter().any(|byte| *byte != 0));
    assert!(driver.bytes(buffers[2], 24).iter().any(|byte| *byte != 0));
}

/// Returns an image of 8 sectors, each filled with its number.
fn image(folder: &Path) -> DiskConfig {
    let path = folder.join("image");
    let bytes: Vec<u8> = (0..8).flat_map(|sector| [sector; 512]).collect();
    std::fs::write(&path, bytes).unwrap();
    DiskConfig {
        path,
        read_only: false,
        limits: DiskLimits::default(),
    }
}

fn head(kind: u32, sector: u64) -> Vec<u8> {
    let mut head = kind.to_le_bytes().to_vec();
    head.extend_from_slice(&[0; 4]);
    head.extend_from_slice(&sector.to_le_bytes());
    head
}

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DONE: u8 = 0;
const FAILED: u8 = 1;
const UNKNOWN: u8 = 2;

/// Carries out a request. Returns its status, its data, and the number of bytes written.
fn request(driver: &mut Driver, head: &[u8], out: &[u8], room: usize) -> (u8, Vec<u8>, u32) {
    let buffers = driver.chain(
        0,
        &[
            Buffer::Out(head),
            Buffer::Out(out),
            Buffer::In(room),
            Buffer::In(1),
        ],
    );
    driver.run();
    let used = driver.used(0);
    assert_eq!(used.len(), 1, "{used:?}");
    let status = driver.bytes(buffers[3], 1)[0];
    (status, driver.bytes(buffers[2], room), used[0].1)
}

#[test]
fn sectors_are_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let mut driver = Driver::new(Block::open(&config, 0).unwrap());
    let mut capacity = [0; 8];
    driver.transport.read(0x100, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 8);

    let (status, data, written) = request(&mut driver, &head(READ, 3), &[], 1024);
    assert_eq!((status, written), (DONE, 1025));
    assert_eq!(data, [[3; 512], [4; 512]].concat());

    let (status, _, written) = request(&mut driver, &head(WRITE, 7), &[0x77; 512], 0);
    assert_eq!((status, written), (DONE, 1));
    let (status, ..) = request(&mut driver, &head(FLUSH, 0), &[], 0);
    assert_eq!(status, DONE);
    let bytes = std::fs::read(&config.path).unwrap();
    assert_eq!(bytes.len(), 4096);
    assert_eq!(bytes[7 * 512..], [0x77; 512]);
    assert_eq!(bytes[6 * 512..7 * 512], [6; 512]);
}

#[test]
fn a_request_may_come_in_any_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(Block::open(&image(folder.path()), 0).unwrap());
    let mut bytes = head(WRITE, 1);
    bytes.extend_from_slice(&[0x11; 512]);
    let (first, rest) = bytes.split_at(5);
    let (second, third) = rest.split_at(300);
    driver.chain(
        0,
        &[
            Buffer::Out(first),
            Buffer::Out(second),
            Buffer::Out(third),
            Buffer::In(1),
        ],
    );
    // Data and status in one buffer.
    let buffers = driver.chain(0, &[Buffer::Out(&head(READ, 1)), Buffer::In(513)]);
    driver.run();
    assert_eq!(driver.used(0), [(0, 1), (4, 513)]);
    assert_eq!(
        driver.bytes(buffers[1], 513),
        [&[0x11; 512][..], &[DONE]].concat()
    );
}

#[test]
fn what_lies_outside_the_disk_fails_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let mut driver = Driver::new(Block::open(&config, 0).unwrap());
    let before = std::fs::read(&config.path).unwrap();
    for (sector, length) in [
        (8, 512),
        (7, 1024),
        (u64::MAX, 512),
        (u64::MAX / 512, 512),
        (1 << 55, 512),
        (0, 100),
        (0, 513),
    ] {
        let (status, data, written) = request(&mut driver, &head(READ, sector), &[], length);
        assert_eq!((status, written), (FAILED, 1), "{sector} {length}");
        assert_eq!(data, vec![0; length]);
        let (status, ..) = request(&mut driver, &head(WRITE, sector), &vec![1; length], 0);
        assert_eq!(status, FAILED, "{sector} {length}");
    }
    assert_eq!(std::fs::read(&config.path).unwrap(), before);
    let (status, ..) = request(&mut driver, &head(99, 0), &[], 0);
    assert_eq!(status, UNKNOWN);
    assert!(!driver.needs_reset());
}

#[test]
fn an_image_that_shrinks_gives_errors() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let mut driver = Driver::new(Block::open(&config, 0).unwrap());
    let file = std::fs::File::options()
        .write(true)
        .open(&config.path)
        .unwrap();
    file.set_len(512).unwrap();
    assert_eq!(request(&mut driver, &head(READ, 4), &[], 512).0, FAILED);
    assert_eq!(request(&mut driver, &head(READ, 0), &[], 512).0, DONE);
}

#[test]
fn the_disk_has_an_identity() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(Block::open(&image(folder.path()), 2).unwrap());
    let (status, id, _) = request(&mut driver, &head(GET_ID, 0), &[], 20);
    assert_eq!(
        (status, &id[..]),
        (DONE, &b"patchbay-disk2\0\0\0\0\0\0"[..])
    );
    let (status, id, _) = request(&mut driver, &head(GET_ID, 0), &[], 3);
    assert_eq!((status, &id[..]), (DONE, &b"pat"[..]));
}

#[test]
fn a_read_only_disk_says_so_and_refuses_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = image(folder.path());
    config.read_only = true;
    let before = std::fs::read(&config.path).unwrap();
    let mut driver = Driver::new(Block::open(&config, 0).unwrap());
    driver.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
    assert_ne!(driver.register(VIRTIO_MMIO_DEVICE_FEATURES) & 1 << 5, 0);
    assert_eq!(
        request(&mut driver, &head(WRITE, 0), &[9; 512], 0).0,
        FAILED
    );
    assert_eq!(request(&mut driver, &head(FLUSH, 0), &[], 0).0, DONE);
    assert_eq!(std::fs::read(&config.path).unwrap(), before);
}

#[test]
fn invalid_images_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let disk = |name: &str| DiskConfig {
        path: folder.path().join(name),
        read_only: false,
        limits: DiskLimits::default(),
    };
    let odd = disk("odd");
    std::fs::write(&odd.path, [0; 513]).unwrap();
    assert!(matches!(
        Block::open(&odd, 0),
        Err(DiskError::Size { bytes: 513, .. })
    ));
    let empty = disk("empty");
    std::fs::write(&empty.path, []).unwrap();
    assert!(matches!(
        Block::open(&empty, 0),
        Err(DiskError::Size { bytes: 0, .. })
    ));
    let missing = Block::open(&disk("missing"), 0).unwrap_err();
    assert!(missing.to_string().contains("missing"), "{missing}");
    assert!(matches!(
        Block::open(&disk(""), 0),
        Err(DiskError::NotAnImage(_))
    ));
}

#[test]
fn an_image_has_one_writer_or_many_readers() {
    let folder = tempfile::tempdir().unwrap();
    let writer = image(folder.path());
    let reader = DiskConfig {
        read_only: true,
        ..writer.clone()
    };
    let first = Block::open(&writer, 0).unwrap();
    assert!(matches!(Block::open(&writer, 1), Err(DiskError::InUse(_))));
    assert!(matches!(Block::open(&reader, 1), Err(DiskError::InUse(_))));
    drop(first);
    let _first = Block::open(&reader, 0).unwrap();
    let _second = Block::open(&reader, 1).unwrap();
    assert!(matches!(Block::open(&writer, 2), Err(DiskError::InUse(_))));
}

fn memory() -> Memory {
    Memory::from_ranges(&[(vm_memory::GuestAddress(0), 1 << 20)]).unwrap()
}

#[test]
fn each_device_has_its_page_and_its_word() {
    let folder = tempfile::tempdir().unwrap();
    let config = VirtioConfig {
        rng: true,
        vsock: None,
        disks: vec![image(folder.path())],
    };
    let virtio = Virtio::new(&config, &memory()).unwrap();
    assert_eq!(
        virtio.command_line(),
        " virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6"
    );
    let found: Vec<_> = virtio
        .mmio_devices()
        .iter()
        .map(|device| (device.address, device.size, device.interrupt))
        .collect();
    assert_eq!(found, [(0xd000_0000, 4096, 5), (0xd000_1000, 4096, 6)]);
    let mut id = [0; 4];
    assert!(virtio.read(MMIO_START + 8, &mut id));
    assert_eq!(id, [4, 0, 0, 0]);
    assert!(virtio.read(MMIO_START + 0x1008, &mut id));
    assert_eq!(id, [2, 0, 0, 0]);
    for nowhere in [0, MMIO_START - 4, MMIO_START + 0x2000, u64::MAX] {
        assert!(!virtio.read(nowhere, &mut id), "{nowhere:#x}");
        virtio.write(nowhere, &id);
    }
}

#[test]
fn more_than_four_disks_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = VirtioConfig {
        disks: vec![image(folder.path()); 5],
        ..VirtioConfig::default()
    };
    assert!(matches!(
        Virtio::new(&config, &memory()),
        Err(VirtioError::TooManyDisks(5))
    ));
}

#[test]
fn the_thread_answers_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = image(folder.path());
    config.read_only = true;
    let driver = Driver::new(Block::open(&config, 0).unwrap());
    let transport = driver.transport.clone();
    let thread = DeviceThread::new("disk0".into(), [transport.clone()].into()).unwrap();
    thread.start(|why| panic!("{why}")).unwrap();
    let interrupt = transport.interrupt().try_clone().unwrap();
    // The chain has no end. The thread detects this and raises an interrupt.
    super::testing::write_descriptor(&driver.memory, 0x1_0000, (0, 0, 1, 0));
    vm_memory::Bytes::write_obj(&driver.memory, 1_u16, vm_memory::GuestAddress(0x1_1002)).unwrap();
    transport.write(0x50, &[0; 4]);
    while interrupt.read().is_err() {
        std::thread::yield_now();
    }
    let mut status = [0; 4];
    transport.read(0x70, &mut status);
    assert_ne!(u32::from_le_bytes(status) & NEEDS_RESET, 0);
    thread.stop();
    thread.stop();
}

/// A device that panics.
struct Buggy;

impl Device for Buggy {
    fn id(&self) -> u32 {
        4
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> usize {
        1
    }

    fn config(&self) -> Vec<u8> {
        vec![]
    }

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {}

    fn process(&mut self, _: &mut [Option<Ring>], _: &Memory) -> Result<NextTurn, Broken> {
        panic!("a bug");
    }
}

#[test]
fn a_panic_in_a_device_is_reported() {
    let driver = Driver::new(Buggy);
    let thread = DeviceThread::new("devices".into(), [driver.transport.clone()].into()).unwrap();
    let (sender, reported) = std::sync::mpsc::channel();
    thread.start(move |why| sender.send(why).unwrap()).unwrap();
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    let why = reported.recv().expect("the thread says why it ends");
    assert!(why.contains("devices panicked: a bug"), "{why}");
    thread.stop();
    // Neither the guest nor the monitor is blocked by the device.
    driver.register(VIRTIO_MMIO_STATUS);
    driver.transport.close();
}

#[test]
fn the_image_is_not_truncated_by_opening() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let mut file = std::fs::File::options()
        .append(true)
        .open(&config.path)
        .unwrap();
    file.write_all(&[0; 512]).unwrap();
    drop(Block::open(&config, 0).unwrap());
    assert_eq!(std::fs::metadata(&config.path).unwrap().len(), 4608);
}
