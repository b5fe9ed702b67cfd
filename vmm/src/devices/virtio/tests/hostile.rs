// SPDX-License-Identifier: Apache-2.0

//! Runs every device against a driver that breaks the rules. The device must become idle (the test
//! driver checks this), request a reset if it cannot continue, and work after the reset.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::super::DiskLimits;
use super::super::block::{Block, DiskConfig};
use super::super::device::Device;
use super::super::rng::Rng;
use super::super::testing::{
    BUFFERS, Buffer, Driver, INDIRECT, MEMORY, NEXT, QUEUE, WRITE, queue_at, write_descriptor,
};
use super::super::vsock::{CID_MIN, Vsock, VsockConfig};

/// A new device of each kind, with the queue that it reads chains from.
fn devices(folder: &std::path::Path) -> Vec<(Box<dyn Device>, usize)> {
    let image = folder.join("image");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disk = DiskConfig {
        path: image,
        read_only: false,
        limits: DiskLimits::default(),
    };
    let vsock = VsockConfig {
        path: folder.join("vsock"),
        cid: CID_MIN,
        privileged: vec![],
    };
    vec![
        (Box::new(Rng), 0),
        (Box::new(Block::open(&disk, 0).unwrap()), 0),
        (Box::new(Vsock::new(&vsock).unwrap()), 1),
    ]
}

/// Runs `attack` on each device. The device must request a reset and work after it.
fn needs_reset(attack: impl Fn(&mut Driver, usize)) {
    let folder = tempfile::tempdir().unwrap();
    for (device, queue) in devices(folder.path()) {
        let id = device.id();
        let mut driver = Driver::new(device);
        attack(&mut driver, queue);
        driver.run();
        assert!(driver.needs_reset(), "device {id}");
        assert!(driver.interrupted(), "device {id}");
        // The device does nothing until the reset.
        driver.used(queue);
        driver.chain(queue, &[Buffer::Out(&[0; 64]), Buffer::In(64)]);
        driver.run();
        assert_eq!(driver.used(queue), [], "device {id}");
        driver.start();
        driver.chain(queue, &[Buffer::Out(&[0; 64]), Buffer::In(64)]);
        driver.run();
        assert_eq!(driver.used(queue).len(), 1, "device {id}");
        assert!(!driver.needs_reset(), "device {id}");
    }
}

#[test]
fn a_chain_that_is_its_own_next() {
    needs_reset(|driver, queue| {
        driver.describe(queue, 0, (BUFFERS, 64, NEXT, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn a_chain_that_loops_over_two() {
    needs_reset(|driver, queue| {
        driver.describe(queue, 0, (BUFFERS, 64, NEXT | WRITE, 1));
        driver.describe(queue, 1, (BUFFERS, 64, NEXT | WRITE, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn a_loop_of_buffers_whose_lengths_overflow() {
    needs_reset(|driver, queue| {
        driver.describe(queue, 0, (0, MEMORY as u32, NEXT, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn a_next_outside_the_table() {
    for next in [QUEUE, 0xffff] {
        needs_reset(|driver, queue| {
            driver.describe(queue, 0, (BUFFERS, 64, NEXT, next));
            driver.offer(queue, 0);
        });
    }
}

#[test]
fn a_head_outside_the_table() {
    for head in [QUEUE, 0xffff] {
        needs_reset(|driver, queue| driver.offer(queue, head));
    }
}

#[test]
fn buffers_outside_memory() {
    for address in [
        MEMORY as u64,
        MEMORY as u64 - 63,
        super::super::MMIO_START,
        u64::MAX,
        u64::MAX - 63,
        1 << 63,
    ] {
        for flags in [0, WRITE] {
            needs_reset(|driver, queue| {
                driver.describe(queue, 0, (address, 64, flags, 0));
                driver.offer(queue, 0);
            });
        }
    }
    needs_reset(|driver, queue| {
        driver.describe(queue, 0, (BUFFERS, u32::MAX, 0, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn more_available_than_the_queue_holds() {
    for index in [QUEUE + 1, 0x8000, 0xffff] {
        needs_reset(|driver, queue| {
            driver.describe(queue, 0, (BUFFERS, 64, WRITE, 0));
            driver.set_available(queue, index);
        });
    }
}

#[test]
fn a_readable_buffer_after_a_writable_one() {
    needs_reset(|driver, queue| {
        driver.describe(queue, 0, (BUFFERS, 64, NEXT | WRITE, 1));
        driver.describe(queue, 1, (BUFFERS, 64, 0, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn indirect_tables_that_break_the_rules() {
    let table = BUFFERS + 0x1_0000;
    // The length of the table, and its first entry.
    for (length, first) in [
        (0, (BUFFERS, 64, 0, 0)),
        (8, (BUFFERS, 64, 0, 0)),
        (17, (BUFFERS, 64, 0, 0)),
        (16, (BUFFERS, 64, NEXT, 0)),
        (16, (BUFFERS, 64, NEXT, 1)),
        (16, (table, 16, INDIRECT, 0)),
        (u32::MAX - 15, (BUFFERS, 64, 0, 0)),
        (16 * 0xffff, (BUFFERS, 1, NEXT, 0)),
    ] {
        needs_reset(|driver, queue| {
            write_descriptor(&driver.memory, table, first);
            driver.describe(queue, 0, (table, length, INDIRECT, 0));
            driver.offer(queue, 0);
        });
    }
    for outside in [MEMORY as u64, u64::MAX - 15] {
        needs_reset(|driver, queue| {
            driver.describe(queue, 0, (outside, 16, INDIRECT, 0));
            driver.offer(queue, 0);
        });
    }
}

#[test]
fn an_indirect_table_longer_than_any_chain_may_be() {
    needs_reset(|driver, queue| {
        let table = BUFFERS + 0x1_0000;
        for index in 0..257_u16 {
            let flags = if index == 256 { 0 } else { NEXT };
            let at = table + 16 * u64::from(index);
            write_descriptor(&driver.memory, at, (BUFFERS, 1, flags, index + 1));
        }
        driver.describe(queue, 0, (table, 16 * 257, INDIRECT, 0));
        driver.offer(queue, 0);
    });
}

#[test]
fn an_indirect_table_that_follows_the_rules_works() {
    let mut driver = Driver::new(Rng);
    let table = BUFFERS + 0x1_0000;
    write_descriptor(&driver.memory, table, (BUFFERS, 8, NEXT | WRITE, 1));
    write_descriptor(&driver.memory, table + 16, (BUFFERS + 8, 8, WRITE, 0));
    driver.describe(0, 3, (table, 32, INDIRECT, 0));
    driver.offer(0, 3);
    driver.run();
    assert_eq!(driver.used(0), [(3, 16)]);
}

#[test]
fn a_flood_of_notifications_is_one() {
    let folder = tempfile::tempdir().unwrap();
    for (device, _) in devices(folder.path()) {
        let driver = Driver::new(device);
        for queue in 0..100_000 {
            driver.set(0x50, queue);
        }
        driver.run();
        assert!(!driver.interrupted());
        assert!(!driver.needs_reset());
    }
}

#[test]
fn the_same_chain_over_and_over() {
    let mut driver = Driver::new(Rng);
    driver.describe(0, 0, (BUFFERS, 64, WRITE, 0));
    for _ in 0..QUEUE {
        driver.offer(0, 0);
    }
    driver.run();
    assert_eq!(driver.used(0), vec![(0, 64); QUEUE.into()]);
}

#[test]
fn a_disk_request_without_head_or_status() {
    let folder = tempfile::tempdir().unwrap();
    for buffers in [
        &[Buffer::Out(&[0; 15]), Buffer::In(1)][..],
        &[Buffer::In(1)],
        &[Buffer::Out(&[0; 16])],
        &[Buffer::Out(&[0; 16]), Buffer::In(0)],
        &[Buffer::Out(&[])],
    ] {
        let (device, _) = devices(folder.path()).swap_remove(1);
        let mut driver = Driver::new(device);
        driver.chain(0, buffers);
        driver.run();
        assert!(driver.needs_reset(), "{buffers:?}");
    }
}

#[test]
fn a_disk_request_of_overlapping_buffers_that_add_up_to_too_much() {
    let folder = tempfile::tempdir().unwrap();
    let (device, _) = devices(folder.path()).swap_remove(1);
    let driver = Driver::new(device);
    // Eight descriptors for the same 3 MiB add up to more data than a request may have.
    driver.describe(0, 0, (0, 16, NEXT, 1));
    for index in 1..9 {
        driver.describe(0, index, (0, 3 << 20, NEXT | WRITE, index + 1));
    }
    driver.describe(0, 9, (BUFFERS, 1, WRITE, 0));
    driver.offer(0, 0);
    driver
        .memory
        .write_obj(0xaa_u8, GuestAddress(BUFFERS))
        .unwrap();
    driver.run();
    assert_eq!(driver.bytes(BUFFERS, 1), [1], "an I/O error");
}

/// A guest that rewrites its tables while the device works.
#[test]
fn tables_that_change_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    for (device, queue) in devices(folder.path()) {
        let mut driver = Driver::new(device);
        let memory = driver.memory.clone();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let table = queue_at(queue)[0];
                let mut word = 1_u64;
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    // xorshift.
                    word ^= word << 13;
                    word ^= word >> 7;
                    word ^= word << 17;
                    let at = table + word % (16 * u64::from(QUEUE)) / 8 * 8;
                    let value = [word, word % MEMORY as u64, BUFFERS, 1 << 32 | 64];
                    let value = value[(word >> 60) as usize % 4];
                    memory.write_obj(value, GuestAddress(at)).unwrap();
                }
            });
            for _ in 0..2000 {
                driver.chain(queue, &[Buffer::Out(&[0; 64]), Buffer::In(600)]);
                driver.run();
                if driver.needs_reset() {
                    driver.start();
                }
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}

/// Generates mostly plausible addresses. The others fail at the first check.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => BUFFERS..BUFFERS + 0x1_0000,
        1 => 0..0x5_0000_u64,
        1 => any::<u64>(),
    ]
}

fn descriptor() -> impl Strategy<Value = (u64, u32, u16, u16)> {
    let length = prop_oneof![4 => 0..5000_u32, 1 => any::<u32>()];
    let flags = prop_oneof![4 => 0..4_u16, 1 => any::<u16>()];
    let next = prop_oneof![4 => 0..QUEUE, 1 => any::<u16>()];
    (address(), length, flags, next)
}

#[derive(Debug, Clone)]
enum Step {
    Describe(u16, (u64, u32, u16, u16)),
    Offer(u16),
    Available(u16),
    Bytes(u64, Vec<u8>),
    Register(u32, u32),
    Run,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop::collection::vec(0..8_u8, 0..64);
    prop_oneof![
        6 => (0..QUEUE, descriptor()).prop_map(|(at, it)| Step::Describe(at, it)),
        6 => (0..QUEUE + 1).prop_map(Step::Offer),
        1 => any::<u16>().prop_map(Step::Available),
        4 => (address(), bytes).prop_map(|(at, bytes)| Step::Bytes(at, bytes)),
        2 => (0..0x110_u32, any::<u32>()).prop_map(|(at, value)| Step::Register(at, value)),
        6 => Just(Step::Run),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// For any driver, the device does not panic and becomes idle.
    #[test]
    fn any_driver(steps in prop::collection::vec(step(), 1..80)) {
        let folder = tempfile::tempdir().unwrap();
        for (device, queue) in devices(folder.path()) {
            let mut driver = Driver::new(device);
            for step in &steps {
                match step {
                    Step::Describe(at, it) => driver.describe(queue, *at, *it),
                    Step::Offer(head) => driver.offer(queue, *head),
                    Step::Available(index) => driver.set_available(queue, *index),
                    Step::Bytes(at, bytes) => {
                        // Writes outside memory have no effect.
                        let _ = driver.memory.write_slice(bytes, GuestAddress(*at));
                    }
                    Step::Register(at, value) => driver.set(*at, *value),
                    Step::Run => driver.run(),
                    Step::Restart => driver.start(),
                }
            }
            driver.run();
            driver.start();
            prop_assert!(!driver.needs_reset());
        }
    }
}
