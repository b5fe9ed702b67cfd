// SPDX-License-Identifier: Apache-2.0

//! Tests disks on their threads: host I/O that hangs, and rate limits.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;

use super::super::block::{Block, DiskConfig};
use super::super::device::{Device, HostDone, NextTurn};
use super::super::queue::{Broken, Chain, Ring};
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

#[test]
fn a_reset_does_not_wait_for_a_disk_that_hangs() {
    let (started, has_started) = channel();
    let (release, go_on) = channel();
    let mut driver = Driver::new(Stalled {
        under_way: None,
        started,
        go_on: Arc::new(Mutex::new(go_on)),
    });
    let transport = driver.transport.clone();
    let thread = DeviceThread::new("disk0".into(), [transport.clone()].into()).unwrap();
    thread.start(|why| panic!("{why}")).unwrap();
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
