// SPDX-License-Identifier: Apache-2.0

//! The registers of one virtio-mmio device, version 2 (virtio 1.2, 4.2.2), and the device behind
//! them.
//!
//! ```text
//!  reset ─▶ ACKNOWLEDGE ─▶ DRIVER ─▶ FEATURES_OK ─▶ queues ─▶ DRIVER_OK ─▶ active
//!    ▲                                                             │
//!    └──────────── 0 written ◀── NEEDS_RESET ◀── driver error ◀────┘
//! ```
//!
//! vCPU threads access the registers; the device thread runs the device. While the device runs, a
//! vCPU takes no lock to notify, to read or acknowledge interrupts, or to read the status. A reset
//! waits for the part of a batch that accesses guest memory, but never for I/O on the host's files.
//! Such I/O holds no lock and touches no guest memory, and its result is dropped if the device was
//! reset meanwhile. A disk that hangs therefore never delays a pause.
//!
//! Lock order: `registers`, then `backend`. The device thread takes only `backend`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use patchbay_guest::limited;
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vmm_sys_util::eventfd::EventFd;

use super::Memory;
use super::device::{Device, NextTurn};
use super::queue::{Broken, QueueAddresses, Ring};
use crate::snapshot::{DeviceState, QueueState};
use crate::thread::lock;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "PBAY", little-endian.
const VENDOR: u32 = 0x5941_4250;

/// Limit on the entries of a queue.
pub(super) const QUEUE_MAX: u16 = 256;

/// Features that every device offers.
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// Status bits that a driver may set.
const DRIVER_BITS: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_DRIVER_OK
    | VIRTIO_CONFIG_S_FAILED;

/// The driver's configuration so far.
#[derive(Debug, Default)]
struct Registers {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: Vec<QueueRegisters>,
}

#[derive(Debug, Clone, Copy, Default)]
struct QueueRegisters {
    addresses: QueueAddresses,
    ready: bool,
}

impl From<&QueueState> for QueueRegisters {
    fn from(saved: &QueueState) -> Self {
        Self {
            addresses: QueueAddresses {
                size: saved.size,
                descriptors: saved.descriptors,
                available: saved.available,
                used: saved.used,
            },
            ready: saved.ready,
        }
    }
}

struct Backend {
    device: Box<dyn Device>,
    rings: Vec<Option<Ring>>,
    active: bool,
    /// Incremented when a reset or a driver error stops the device, so that results of earlier host
    /// work are recognised and dropped.
    epoch: u64,
}

impl Backend {
    fn activate(&mut self, rings: Vec<Option<Ring>>, features: u64) {
        self.rings = rings;
        self.device.activate(features);
        self.active = true;
    }

    fn stop(&mut self) {
        self.active = false;
        self.epoch += 1;
        self.rings.clear();
        self.device.reset();
    }
}

/// Limit on the turns of a device in one call of [`Transport::run`].
const TURNS: usize = 16;

/// A device and its registers.
pub(super) struct Transport {
    id: u32,
    features: u64,
    config: Vec<u8>,
    queue_count: usize,
    memory: Memory,
    status: AtomicU32,
    interrupt_status: AtomicU32,
    interrupt: EventFd,
    kick: EventFd,
    registers: Mutex<Registers>,
    backend: Mutex<Backend>,
    /// A reset waits for `backend`; the device thread must not take the lock.
    resetting: AtomicBool,
    /// The guest is being saved. The device starts nothing.
    frozen: AtomicBool,
}

impl Transport {
    pub fn new(device: Box<dyn Device>, memory: Memory) -> std::io::Result<Self> {
        let queue_count = device.queues();
        Ok(Self {
            id: device.id(),
            features: device.features() | FEATURES,
            config: device.config(),
            queue_count,
            memory,
            status: AtomicU32::new(0),
            interrupt_status: AtomicU32::new(0),
            interrupt: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            kick: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            registers: Mutex::new(Registers {
                queues: vec![QueueRegisters::default(); queue_count],
                ..Registers::default()
            }),
            backend: Mutex::new(Backend {
                device,
                rings: vec![],
                active: false,
                epoch: 0,
            }),
            resetting: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        })
    }

    /// Returns the interrupt line.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Returns the eventfd that is written when the driver notifies a queue, or when the device has
    /// more to do.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// Ends the device, because the guest has ended.
    pub fn close(&self) {
        self.stop();
        lock(&self.backend).device.close();
    }

    pub fn queue_count(&self) -> usize {
        self.queue_count
    }

    /// Returns the device's own event descriptor, if it has one.
    pub fn event_source(&self) -> Option<std::os::fd::RawFd> {
        lock(&self.backend).device.event_source()
    }

    /// Runs the device for some turns, on the device thread. Returns the time at which the device
    /// needs another turn if no event comes first.
    pub fn run(&self) -> Option<Instant> {
        for _ in 0..TURNS {
            let (epoch, work) = {
                let mut backend = self.lock_to_work()?;
                if self.frozen.load(SeqCst) {
                    return None;
                }
                let backend = &mut *backend;
                match backend.device.process(&mut backend.rings, &self.memory) {
                    Ok(next) => {
                        self.interrupt_if_wanted(backend);
                        match next {
                            NextTurn::Wait => return None,
                            NextTurn::Again => break,
                            NextTurn::At(time) => return Some(time),
                            NextTurn::Host(work) => (backend.epoch, work),
                        }
                    }
                    Err(broken) => {
                        self.fail(backend, broken);
                        return None;
                    }
                }
            };
            let done = work();
            let mut backend = self.lock_to_work()?;
            let backend = &mut *backend;
            if backend.epoch == epoch {
                match backend
                    .device
                    .finish(done, &mut backend.rings, &self.memory)
                {
                    Ok(()) => self.interrupt_if_wanted(backend),
                    Err(broken) => {
                        self.fail(backend, broken);
                        return None;
                    }
                }
            }
        }
        self.wake();
        None
    }

    /// Locks the device for a turn. Returns `None` if it is not active or is being reset.
    fn lock_to_work(&self) -> Option<MutexGuard<'_, Backend>> {
        if self.resetting.load(SeqCst) {
            return None;
        }
        let backend = lock(&self.backend);
        backend.active.then_some(backend)
    }

    /// Keeps the device from starting work. Returns false if the host still works on a request.
    pub fn freeze(&self) -> bool {
        self.frozen.store(true, SeqCst);
        // A turn holds this lock from the check of `frozen` until its end.
        !lock(&self.backend).device.is_busy()
    }

    /// Lets the device work again.
    pub fn thaw(&self) {
        self.frozen.store(false, SeqCst);
        self.wake();
    }

    /// Returns the state of the device, which is frozen, and whose driver is stopped.
    pub fn save(&self) -> DeviceState {
        let registers = lock(&self.registers);
        let backend = lock(&self.backend);
        let queue = |(index, queue): (usize, &QueueRegisters)| {
            let ring = backend.rings.get(index).and_then(Option::as_ref);
            QueueState {
                size: queue.addresses.size,
                descriptors: queue.addresses.descriptors,
                available: queue.addresses.available,
                used: queue.addresses.used,
                ready: queue.ready,
                active: ring.map(|ring| ring.positions(backend.device.unused(index))),
            }
        };
        DeviceState {
            id: self.id,
            features: self.features,
            config: self.config.clone(),
            status: self.status.load(SeqCst),
            interrupt_status: self.interrupt_status.load(SeqCst),
            device_features_sel: registers.device_features_sel,
            driver_features_sel: registers.driver_features_sel,
            driver_features: registers.driver_features,
            queue_sel: registers.queue_sel,
            queues: registers.queues.iter().enumerate().map(queue).collect(),
            active: backend.active,
        }
    }

    /// Sets the state of a device that no driver has used.
    ///
    /// # Errors
    /// The difference between the device and the saved one.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), &'static str> {
        let mut registers = lock(&self.registers);
        let mut backend = lock(&self.backend);
        if saved.id != self.id {
            return Err("it is of another type");
        }
        if saved.features != self.features {
            return Err("it offers other features, for example because a disk is read-only");
        }
        if saved.config != self.config && !backend.device.may_change_config() {
            return Err("it has another size");
        }
        if saved.queues.len() != self.queue_count {
            return Err("it has another number of queues");
        }
        let status = DRIVER_BITS | VIRTIO_CONFIG_S_NEEDS_RESET;
        let accepted = saved.driver_features & !self.features == 0;
        if saved.status & !status != 0 || saved.active && !accepted {
            return Err("its driver is in an impossible state");
        }
        *registers = Registers {
            device_features_sel: saved.device_features_sel,
            driver_features_sel: saved.driver_features_sel,
            driver_features: saved.driver_features,
            queue_sel: saved.queue_sel,
            queues: saved.queues.iter().map(QueueRegisters::from).collect(),
        };
        if saved.active {
            let rings = registers.queues.iter().zip(&saved.queues);
            let rings = rings.map(|(queue, saved)| match (queue.ready, saved.active) {
                (true, Some(positions)) => {
                    let mut ring = Ring::new(queue.addresses, QUEUE_MAX, &self.memory)
                        .map_err(|Broken(why)| why)?;
                    match ring.set_positions(positions) {
                        true => Ok(Some(ring)),
                        false => Err("a queue's position is impossible"),
                    }
                }
                (false, None) => Ok(None),
                _ => Err("a queue is in an impossible state"),
            });
            backend.activate(rings.collect::<Result<_, _>>()?, registers.driver_features);
            backend.device.resume();
        }
        self.status.store(saved.status, SeqCst);
        if saved.interrupt_status != 0 {
            // The interrupt may have been on its way to the guest. A driver ignores a second one.
            self.raise(saved.interrupt_status);
        }
        self.wake();
        Ok(())
    }

    fn interrupt_if_wanted(&self, backend: &mut Backend) {
        let mut interrupt = false;
        for ring in backend.rings.iter_mut().flatten() {
            interrupt |= ring.interrupt_wanted();
        }
        if interrupt {
            self.raise(VIRTIO_MMIO_INT_VRING);
        }
    }

    fn wake(&self) {
        // Fails only if the counter is full, and then the thread is woken anyway.
        let _ = self.kick.write(1);
    }

    fn raise(&self, cause: u32) {
        self.interrupt_status.fetch_or(cause, SeqCst);
        // Fails only if the counter is full, and then the line is raised anyway.
        let _ = self.interrupt.write(1);
    }

    /// Any state ──── driver error ────▶ NEEDS_RESET
    fn fail(&self, backend: &mut Backend, broken: Broken) {
        // Chains returned before the error are signalled too.
        self.interrupt_if_wanted(backend);
        backend.stop();
        self.status.fetch_or(VIRTIO_CONFIG_S_NEEDS_RESET, SeqCst);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
        limited!(warn, device = self.id, "virtio: {broken}");
    }

    /// Handles a read of `data.len()` bytes at `offset` in the device's page.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            for (byte, value) in data.iter_mut().zip(self.config.iter().skip(at)) {
                *byte = *value;
            }
        } else if let (Ok(data), Ok(offset)) = (<&mut [u8; 4]>::try_from(data), offset.try_into()) {
            *data = self.read_register(offset).to_le_bytes();
        }
    }

    fn read_register(&self, offset: u32) -> u32 {
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => return MAGIC,
            VIRTIO_MMIO_VERSION => return VERSION,
            VIRTIO_MMIO_DEVICE_ID => return self.id,
            VIRTIO_MMIO_VENDOR_ID => return VENDOR,
            VIRTIO_MMIO_INTERRUPT_STATUS => return self.interrupt_status.load(SeqCst),
            VIRTIO_MMIO_STATUS => return self.status.load(SeqCst),
            // There is no shared memory: the length reads as all ones (virtio 1.2, 4.2.2.1).
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => return u32::MAX,
            _ => {}
        }
        let registers = lock(&self.registers);
        let queue = registers.queues.get(registers.queue_sel as usize);
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.features, registers.device_features_sel),
            VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |_| QUEUE_MAX.into()),
            VIRTIO_MMIO_QUEUE_READY => queue.map_or(0, |queue| queue.ready.into()),
            // This includes the configuration generation, which never changes.
            _ => 0,
        }
    }

    /// Handles a write of `data` at `offset` in the device's page. Writes that are invalid, or
    /// invalid in this state, are ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let (Ok(data), Ok(offset)) = (<[u8; 4]>::try_from(data), u32::try_from(offset)) else {
            return;
        };
        let value = u32::from_le_bytes(data);
        match offset {
            // Reached only if KVM does not write `kick` itself.
            VIRTIO_MMIO_QUEUE_NOTIFY => return self.wake(),
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.interrupt_status.fetch_and(!value, SeqCst);
                return;
            }
            _ => {}
        }
        let mut registers = lock(&self.registers);
        let registers = &mut *registers;
        let status = self.status.load(SeqCst);
        match offset {
            VIRTIO_MMIO_STATUS => return self.write_status(registers, status, value),
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES if status & VIRTIO_CONFIG_S_FEATURES_OK == 0 => {
                match registers.driver_features_sel {
                    0 => set_low(&mut registers.driver_features, value),
                    1 => set_high(&mut registers.driver_features, value),
                    _ => {}
                }
            }
            _ => {}
        }
        let configurable = VIRTIO_CONFIG_S_FEATURES_OK;
        if status & (configurable | VIRTIO_CONFIG_S_DRIVER_OK) != configurable {
            return;
        }
        let Some(queue) = registers.queues.get_mut(registers.queue_sel as usize) else {
            return;
        };
        let addresses = &mut queue.addresses;
        match offset {
            VIRTIO_MMIO_QUEUE_READY => queue.ready = value == 1,
            VIRTIO_MMIO_QUEUE_NUM => addresses.size = value,
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut addresses.descriptors, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut addresses.descriptors, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut addresses.available, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut addresses.available, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut addresses.used, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut addresses.used, value),
            _ => {}
        }
    }

    fn write_status(&self, registers: &mut Registers, status: u32, value: u32) {
        if value == 0 {
            return self.reset(registers);
        }
        // Only a reset clears bits.
        let mut added = value & DRIVER_BITS & !status;
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            let features = registers.driver_features;
            let acceptable =
                features & !self.features == 0 && features & 1 << VIRTIO_F_VERSION_1 != 0;
            if !acceptable || (status | added) & VIRTIO_CONFIG_S_DRIVER == 0 {
                // The driver reads the status back and sees that the bit is missing.
                added &= !VIRTIO_CONFIG_S_FEATURES_OK;
            }
        }
        if (status | added) & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            added &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        self.status.fetch_or(added, SeqCst);
        if added & VIRTIO_CONFIG_S_FAILED != 0 {
            self.stop();
        } else if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.activate(registers);
        }
    }

    /// FEATURES_OK ──── DRIVER_OK written ────▶ active, or NEEDS_RESET
    fn activate(&self, registers: &Registers) {
        let mut backend = lock(&self.backend);
        let rings = registers.queues.iter().map(|queue| match queue.ready {
            true => Ring::new(queue.addresses, QUEUE_MAX, &self.memory).map(Some),
            false => Ok(None),
        });
        match rings.collect() {
            Ok(rings) => {
                backend.activate(rings, registers.driver_features);
                drop(backend);
                self.wake();
            }
            Err(broken) => self.fail(&mut backend, broken),
        }
    }

    /// Any state ──── 0 written ────▶ reset. After this returns, the device does not touch guest
    /// memory.
    fn reset(&self, registers: &mut Registers) {
        self.stop();
        self.status.store(0, SeqCst);
        self.interrupt_status.store(0, SeqCst);
        *registers = Registers {
            queues: vec![QueueRegisters::default(); self.queue_count],
            ..Registers::default()
        };
    }

    fn stop(&self) {
        self.resetting.store(true, SeqCst);
        lock(&self.backend).stop();
        self.resetting.store(false, SeqCst);
    }
}

/// Returns the half of `value` selected by `select`: 0 is low, 1 is high.
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_low(word: &mut u64, value: u32) {
    *word = *word & !u64::from(u32::MAX) | u64::from(value);
}

fn set_high(word: &mut u64, value: u32) {
    *word = *word & u64::from(u32::MAX) | u64::from(value) << 32;
}
