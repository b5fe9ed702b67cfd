// SPDX-License-Identifier: Apache-2.0

//! Tests disks on their threads: host I/O that hangs, and rate limits.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use patchbay_guest::snapshot::{MemorySink, SaveError, SinkClosed};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;

use super::super::block::{Block, DiskConfig};
use super::super::device::{Device, HostDone, NextTurn};
use super::super::queue::{Broken, Chain, Ring};
use super::super::rng::Rng;
use super::super::testing::{Buffer, Driver};
use super::super::thread::DeviceThread;
use super::super::{DiskLimits, Memory, Rate, Virtio, VirtioConfig};
use super::{READ, head, image, memory};

/// Timeout of waits in these tests. A correct run never reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A device whose host work blocks until the test releases it.
struct Stalled {
    under_way: Option<Chain>,
    started: Sender<()>,
    go_on: Arc<Mutex<Receiver<()>>>,
}

impl Device for Stalled {
    fn id(&self) -> u32 {
        2
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

    fn reset(&mut self) {
        self.under_way = None;
    }

    fn process(
        &mut self,
        rings: &mut [Option<Ring>],
        _memory: &Memory,
    ) -> Result<NextTurn, Broken> {
        let Some(Some(ring)) = rings.first_mut() else {
            return Ok(NextTurn::Wait);
        };
        self.under_way = ring.pop()?;
        if self.under_way.is_none() {
            return Ok(NextTurn::Wait);
        }
        let (started, go_on) = (self.started.clone(), Arc::clone(&self.go_on));
        Ok(NextTurn::Host(Box::new(move || {
            started.send(()).unwrap();
            go_on.lock().unwrap().recv().unwrap();
            HostDone {
                result: Ok(()),
                data: vec![],
            }
        })))
    }

    fn is_busy(&self) -> bool {
        self.under_way.is_some()
    }

    fn finish(
        &mut self,
        _done: HostDone,
        rings: &mut [Option<Ring>],
        _memory: &Memory,
    ) -> Result<(), Broken> {
        match (self.under_way.take(), rings.first_mut()) {
            (Some(chain), Some(Some(ring))) => ring.push(&chain, 0),
            _ => Ok(()),
        }
    }
}

/// Runs a [`Stalled`] device on its thread. The receiver gets a message when host work starts, and
/// each message to the sender lets one piece of host work end.
fn stalled() -> (Driver, DeviceThread, Receiver<()>, Sender<()>) {
    let (started, has_started) = channel();
    let (release, go_on) = channel();
    let driver = Driver::new(Stalled {
        under_way: None,
        started,
        go_on: Arc::new(Mutex::new(go_on)),
    });
    let thread = DeviceThread::new("disk0".into(), [driver.transport.clone()].into()).unwrap();
    thread.start(|why| panic!("{why}")).unwrap();
    (driver, thread, has_started, release)
}

#[test]
fn a_reset_does_not_wait_for_a_disk_that_hangs() {
    let (mut driver, _thread, has_started, release) = stalled();
    let notify = |driver: &Driver| driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    driver.chain(0, &[Buffer::In(1)]);
    notify(&driver);
    has_started.recv_timeout(PATIENCE).unwrap();
    // The driver resets the device on a thread of its own, as a vCPU does. A reset that waits for
    // the host then fails the test instead of blocking it.
    let (done, is_done) = channel();
    let vcpu = std::thread::spawn(move || {
        driver.start();
        done.send(()).unwrap();
        driver
    });
    let reset = is_done.recv_timeout(PATIENCE);
    release.send(()).unwrap();
    let mut driver = vcpu.join().unwrap();
    reset.expect("the reset waits for the host");
    // The result of the request from before the reset is not given to the driver after the reset.
    driver.chain(0, &[Buffer::In(1), Buffer::In(1)]);
    notify(&driver);
    has_started.recv_timeout(PATIENCE).unwrap();
    assert_eq!(driver.used(0), []);
    release.send(()).unwrap();
    while !driver.interrupted() {
        std::thread::yield_now();
    }
    assert_eq!(driver.used(0), [(0, 0)]);
}

#[test]
fn each_disk_has_a_thread_and_the_others_share_one() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = image(folder.path());
    disk.read_only = true;
    let names = |rng, disks: usize| {
        let config = VirtioConfig {
            rng,
            vsock: None,
            disks: vec![disk.clone(); disks],
        };
        let virtio = Virtio::new(&config, &memory()).unwrap();
        virtio.start(|why| panic!("{why}")).unwrap();
        let threads = virtio.threads.iter();
        threads.map(|thread| thread.name().to_owned()).collect()
    };
    let none: Vec<String> = names(false, 0);
    assert!(none.is_empty());
    assert_eq!(names(true, 2), ["devices", "disk0", "disk1"]);
    assert_eq!(names(false, 1), ["disk0"]);
}

fn limited_disk(limits: DiskLimits) -> (tempfile::TempDir, Driver) {
    let folder = tempfile::tempdir().unwrap();
    let config = DiskConfig {
        limits,
        ..image(folder.path())
    };
    let driver = Driver::new(Block::open(&config, 0).unwrap());
    (folder, driver)
}

fn read_a_sector(driver: &mut Driver) {
    let head = head(READ, 0);
    driver.chain(0, &[Buffer::Out(&head), Buffer::In(512), Buffer::In(1)]);
}

#[test]
fn a_disk_beyond_its_limits_holds_requests_back_also_after_a_reset() {
    let (_folder, mut driver) = limited_disk(DiskLimits {
        bytes: Some(Rate {
            per_second: 1,
            burst: 1,
        }),
        operations: None,
    });
    let now = std::time::Instant::now();
    for _ in 0..2 {
        read_a_sector(&mut driver);
        read_a_sector(&mut driver);
        let again = driver.transport.run().expect("held back");
        assert!(again > now + Duration::from_secs(100));
        let answered = driver.used(0).len();
        driver.start();
        assert!(answered <= 1);
    }
    read_a_sector(&mut driver);
    assert!(driver.transport.run().is_some());
    assert_eq!(driver.used(0), []);
}

#[test]
fn what_limits_hold_back_is_answered_in_time() {
    let (_folder, mut driver) = limited_disk(DiskLimits {
        bytes: None,
        operations: Some(Rate {
            per_second: 1000,
            burst: 1,
        }),
    });
    let transport = driver.transport.clone();
    let thread = DeviceThread::new("disk0".into(), [transport].into()).unwrap();
    thread.start(|why| panic!("{why}")).unwrap();
    for _ in 0..4 {
        read_a_sector(&mut driver);
    }
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    let mut answered = 0;
    while answered < 4 {
        answered += driver.used(0).len();
        std::thread::yield_now();
    }
}

/// Opens a disk that admits two requests at once and then one per second.
fn slow(config: &DiskConfig) -> Block {
    let operations = Some(Rate {
        per_second: 1,
        burst: 1,
    });
    let config = DiskConfig {
        read_only: true,
        limits: DiskLimits {
            operations,
            ..DiskLimits::default()
        },
        ..config.clone()
    };
    Block::open(&config, 0).unwrap()
}

#[test]
fn a_copy_answers_a_request_that_the_limits_held_back() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let mut driver = Driver::new(slow(&config));
    for round in 0.. {
        read_a_sector(&mut driver);
        driver.run();
        if driver.used(0).is_empty() {
            break;
        }
        assert!(round < 10, "no request is held back");
    }
    let mut copy = driver.copy(slow(&config)).unwrap();
    copy.run();
    assert_eq!(copy.used(0).len(), 1);
}

#[test]
fn a_frozen_device_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(slow(&image(folder.path())));
    assert!(driver.transport.freeze());
    read_a_sector(&mut driver);
    driver.run();
    assert_eq!(driver.used(0), []);
    driver.transport.thaw();
    driver.run();
    assert_eq!(driver.used(0).len(), 1);
}

#[test]
fn a_device_is_not_frozen_while_the_host_works() {
    let (mut driver, thread, has_started, release) = stalled();
    driver.chain(0, &[Buffer::In(16)]);
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    has_started.recv_timeout(PATIENCE).unwrap();
    assert!(!driver.transport.freeze());
    release.send(()).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !driver.transport.freeze() {
        assert!(Instant::now() < deadline, "never frozen");
        std::thread::yield_now();
    }
    // The request was answered before, and the next one is not started.
    assert_eq!(driver.used(0).len(), 1);
    driver.chain(0, &[Buffer::In(16)]);
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    thread.stop();
    assert!(has_started.try_recv().is_err());
}

/// A receiver that leaves after a number of checks.
struct Leaving(u32);

impl MemorySink for Leaving {
    fn take(&mut self, _: u64, _: Vec<u8>) -> Result<(), SinkClosed> {
        panic!("devices have no memory");
    }

    fn check(&mut self) -> Result<(), SinkClosed> {
        self.0 = self.0.checked_sub(1).ok_or(SinkClosed)?;
        Ok(())
    }
}

#[test]
fn a_save_waits_for_the_host_only_while_its_receiver_does() {
    let (mut driver, thread, has_started, release) = stalled();
    let virtio = Virtio {
        transports: vec![driver.transport.clone()],
        threads: vec![thread],
    };
    // Dropped before the thread, which waits for it if the test fails.
    let go_on = release;
    driver.chain(0, &[Buffer::In(16)]);
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    has_started.recv_timeout(PATIENCE).unwrap();
    let saved = virtio.freeze(&mut Leaving(2)).map(drop);
    assert_eq!(saved, Err(SaveError::Closed));
    // The device works again.
    driver.chain(0, &[Buffer::In(16)]);
    driver.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    go_on.send(()).unwrap();
    has_started.recv_timeout(PATIENCE).unwrap();
    go_on.send(()).unwrap();
    virtio.close();
}

#[test]
fn another_device_does_not_continue_a_saved_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = image(folder.path());
    let driver = Driver::new(slow(&config));
    assert!(driver.copy(Rng).is_err());
    let path = folder.path().join("larger");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let larger = DiskConfig { path, ..config };
    let refused = driver.copy(slow(&larger)).err();
    assert_eq!(refused, Some("it has another size"));
    let writable = Block::open(&larger, 0).unwrap();
    assert!(driver.copy(writable).err().unwrap().contains("features"));
}
