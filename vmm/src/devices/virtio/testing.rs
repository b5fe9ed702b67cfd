// SPDX-License-Identifier: Apache-2.0

//! A guest driver for tests. It follows the rules of virtio, and has methods that break them.

#![cfg_attr(
    not(test),
    allow(dead_code, reason = "the fuzz targets use a part of it")
)]

use std::sync::Arc;

use virtio_bindings::virtio_mmio::*;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

use super::Memory;
use super::device::Device;
use super::transport::Transport;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

pub(super) const NEEDS_RESET: u32 = 0x40;
const DRIVER_OK: u32 = 0xf;

pub(super) const MEMORY: usize = 4 << 20;
/// Entries of each queue.
pub(super) const QUEUE: u16 = 16;
/// Address of the first buffer.
pub(super) const BUFFERS: u64 = 0x10_0000;
/// Limit on the number of batches after which a device must be idle.
const BATCHES_MAX: usize = 1000;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub(super) enum Buffer<'a> {
    /// Readable by the device, with this content.
    Out(&'a [u8]),
    /// Writable by the device, of this length.
    In(usize),
}

pub(super) struct Driver {
    pub memory: Memory,
    pub transport: Arc<Transport>,
    /// Address of the next buffer, and next descriptor of each queue.
    next_buffer: u64,
    next_descriptor: Vec<u16>,
    seen: Vec<u16>,
}

/// Addresses of a queue's descriptor table, available ring and used ring.
pub(super) fn queue_at(queue: usize) -> [u64; 3] {
    let base = 0x1_0000 * (queue as u64 + 1);
    [base, base + 0x1000, base + 0x2000]
}

impl Driver {
    /// Initialises the device like Linux does.
    pub fn new(device: impl Device + 'static) -> Self {
        let memory = Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
        let transport = Arc::new(Transport::new(Box::new(device), memory.clone()).unwrap());
        let queues = transport.queue_count();
        let mut driver = Self {
            memory,
            transport,
            next_buffer: BUFFERS,
            next_descriptor: vec![0; queues],
            seen: vec![0; queues],
        };
        driver.start();
        assert_eq!(driver.register(VIRTIO_MMIO_STATUS), DRIVER_OK);
        driver
    }

    /// Returns the driver of a copy of the guest, which shares the guest's memory.
    pub fn copy(&self, device: impl Device + 'static) -> Result<Self, &'static str> {
        let memory = self.memory.clone();
        let transport = Transport::new(Box::new(device), memory.clone()).unwrap();
        transport.restore(&self.transport.save())?;
        Ok(Self {
            memory,
            transport: Arc::new(transport),
            next_buffer: self.next_buffer,
            next_descriptor: self.next_descriptor.clone(),
            seen: self.seen.clone(),
        })
    }

    /// Goes from reset to DRIVER_OK.
    pub fn start(&mut self) {
        self.set(VIRTIO_MMIO_STATUS, 0);
        self.negotiate();
        for queue in 0..self.transport.queue_count() {
            self.set_queue(queue, QUEUE.into(), queue_at(queue));
        }
        self.set(VIRTIO_MMIO_STATUS, DRIVER_OK);
    }

    /// Goes from reset to FEATURES_OK and accepts every offered feature.
    pub fn negotiate(&mut self) {
        self.set(VIRTIO_MMIO_STATUS, 1);
        self.set(VIRTIO_MMIO_STATUS, 3);
        for half in [0, 1] {
            self.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, half);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            let features = self.register(VIRTIO_MMIO_DEVICE_FEATURES);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, features);
        }
        self.set(VIRTIO_MMIO_STATUS, 0xb);
        assert_eq!(self.register(VIRTIO_MMIO_STATUS), 0xb);
        self.next_buffer = BUFFERS;
        self.next_descriptor.fill(0);
        self.seen.fill(0);
    }

    /// Sets the size and addresses of a queue and makes it ready.
    pub fn set_queue(&mut self, queue: usize, size: u32, parts: [u64; 3]) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, u32::try_from(queue).unwrap());
        assert_eq!(self.register(VIRTIO_MMIO_QUEUE_READY), 0);
        self.set(VIRTIO_MMIO_QUEUE_NUM, size);
        let registers = [
            VIRTIO_MMIO_QUEUE_DESC_LOW,
            VIRTIO_MMIO_QUEUE_AVAIL_LOW,
            VIRTIO_MMIO_QUEUE_USED_LOW,
        ];
        for (register, part) in registers.into_iter().zip(parts) {
            self.set(register, (part & 0xffff_ffff) as u32);
            self.set(register + 4, (part >> 32) as u32);
            // Clears the entries from before the reset.
            let _ = self.memory.write_slice(&[0; 0x800], GuestAddress(part));
        }
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    pub fn register(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub fn set(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub fn needs_reset(&self) -> bool {
        self.register(VIRTIO_MMIO_STATUS) & NEEDS_RESET != 0
    }

    /// Writes a descriptor.
    pub fn describe(&self, queue: usize, index: u16, descriptor: (u64, u32, u16, u16)) {
        let table = queue_at(queue)[0];
        write_descriptor(&self.memory, table + 16 * u64::from(index), descriptor);
    }

    /// Makes a chain available by its head.
    pub fn offer(&self, queue: usize, head: u16) {
        let available = queue_at(queue)[1];
        let index: u16 = self.memory.read_obj(GuestAddress(available + 2)).unwrap();
        let entry = available + 4 + 2 * u64::from(index % QUEUE);
        self.memory.write_obj(head, GuestAddress(entry)).unwrap();
        self.set_available(queue, index.wrapping_add(1));
    }

    /// Sets the index of the available ring.
    pub fn set_available(&self, queue: usize, index: u16) {
        let available = queue_at(queue)[1];
        self.memory
            .write_obj(index, GuestAddress(available + 2))
            .unwrap();
    }

    /// Offers a chain of new buffers and returns their addresses. Buffers and descriptors are
    /// reused, so only a few chains may be in flight.
    pub fn chain(&mut self, queue: usize, buffers: &[Buffer<'_>]) -> Vec<u64> {
        let head = self.next_descriptor[queue];
        let mut addresses = vec![];
        for (position, buffer) in buffers.iter().enumerate() {
            let (length, mut flags) = match buffer {
                Buffer::Out(bytes) => (bytes.len(), 0),
                Buffer::In(length) => (*length, WRITE),
            };
            if self.next_buffer + length as u64 > MEMORY as u64 {
                self.next_buffer = BUFFERS;
            }
            let address = self.next_buffer;
            self.next_buffer += length as u64;
            if let Buffer::Out(bytes) = buffer {
                self.memory
                    .write_slice(bytes, GuestAddress(address))
                    .unwrap();
            }
            let index = self.next_descriptor[queue];
            self.next_descriptor[queue] = (index + 1) % QUEUE;
            if position + 1 < buffers.len() {
                flags |= NEXT;
            }
            let length = u32::try_from(length).unwrap();
            self.describe(queue, index, (address, length, flags, (index + 1) % QUEUE));
            addresses.push(address);
        }
        self.offer(queue, head);
        addresses
    }

    /// Notifies the device and runs it until it is idle.
    pub fn run(&self) {
        self.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
        let mut batches = 0;
        while self.transport.kick().read().is_ok() {
            self.transport.run();
            batches += 1;
            assert!(batches < BATCHES_MAX, "the device does not come to rest");
        }
    }

    /// Returns the head of each chain that the device has used since the last call, with the number
    /// of bytes written to the chain.
    pub fn used(&mut self, queue: usize) -> Vec<(u32, u32)> {
        let used = queue_at(queue)[2];
        let index: u16 = self.memory.read_obj(GuestAddress(used + 2)).unwrap();
        let mut entries = vec![];
        while self.seen[queue] != index {
            let entry = used + 4 + 8 * u64::from(self.seen[queue] % QUEUE);
            let id = self.memory.read_obj(GuestAddress(entry)).unwrap();
            let length = self.memory.read_obj(GuestAddress(entry + 4)).unwrap();
            entries.push((id, length));
            self.seen[queue] = self.seen[queue].wrapping_add(1);
        }
        entries
    }

    pub fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    /// Returns whether the interrupt line was raised since the last call.
    pub fn interrupted(&self) -> bool {
        self.transport.interrupt().read().is_ok()
    }
}

/// Writes a descriptor (address, length, flags, next) to any address.
pub(super) fn write_descriptor(memory: &Memory, at: u64, descriptor: (u64, u32, u16, u16)) {
    let (address, length, flags, next) = descriptor;
    let descriptor = Descriptor::new(address, length, flags, next);
    let raw = virtio_queue::desc::RawDescriptor::from(descriptor);
    memory.write_obj(raw, GuestAddress(at)).unwrap();
}
