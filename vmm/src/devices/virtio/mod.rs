// SPDX-License-Identifier: Apache-2.0

//! The guest's virtio devices: vsock, disks, randomness (virtio 1.2).
//!
//! ```text
//!  vCPU threads ── registers ──▶ transport ◀── one batch at a time ── device threads
//!       │                                                                ▲  │
//!       └── QueueNotify ─ ioeventfd (or an exit) ────────────────────────┘  │
//!  guest ◀─────────────── irqfd ────────────────────────────────────────────┘
//! ```
//!
//! Each device has one page of registers from [`MMIO_START`] on and an interrupt
//! line of its own. Guests find them by words on the kernel's command line
//! (`virtio_mmio.device=`, Linux's `drivers/virtio/virtio_mmio.c`).
//!
//! The guest's driver is hostile input. What it breaks stops the one device until
//! it resets it (NEEDS_RESET); it never stops the monitor.

mod block;
mod device;
#[cfg(test)]
mod disk_tests;
#[cfg(any(test, feature = "testing"))]
mod driver;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod hostile_tests;
mod queue;
mod rate;
mod rng;
#[cfg(test)]
mod tests;
mod thread;
mod transport;
mod vsock;

use std::fmt::Write;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, VmFd};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::GuestMemoryMmap;

pub use block::{DiskConfig, DiskError};
pub use rate::{DiskLimits, Rate};
pub use vsock::{CID_MIN, VsockConfig, VsockError};

use device::Device;
use thread::DeviceThread;
use transport::Transport;

use crate::dirty::DirtyBitmap;

/// The guest's memory.
type Memory = GuestMemoryMmap<DirtyBitmap>;

/// Guest-physical address of the first device's registers.
pub const MMIO_START: u64 = 0xd000_0000;

/// Bytes of registers per device.
const MMIO_SIZE: u64 = 0x1000;

/// Disks that a guest can have.
pub const DISKS_MAX: usize = 4;

/// Interrupt lines for devices: those of the ISA bus that have no other use here.
const IRQS: [u32; 6] = [5, 6, 7, 10, 11, 12];

/// The virtio devices of a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtioConfig {
    /// Randomness from the host.
    pub rng: bool,
    /// Stream sockets between guest and host.
    pub vsock: Option<VsockConfig>,
    /// Disks, in the order in which the guest finds them; 4 at most.
    pub disks: Vec<DiskConfig>,
}

/// Why the devices cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum VirtioError {
    /// Too many disks.
    #[error("{0} disks are not possible; give 4 at most")]
    TooManyDisks(usize),
    /// A disk image.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The vsock device.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// The host refused a thread or descriptors.
    #[error(
        "the device threads cannot be set up ({0}): raise the limits on threads and open files"
    )]
    Host(#[from] std::io::Error),
    /// KVM does not connect an interrupt line.
    #[error("KVM does not connect a device's interrupt ({0}); use a kernel of 5.10 or later")]
    Interrupt(kvm_ioctls::Error),
}

/// A guest's virtio devices.
pub(crate) struct Virtio {
    transports: Vec<Arc<Transport>>,
    /// One for each disk, and one for all others.
    threads: Vec<DeviceThread>,
}

impl Virtio {
    /// Opens what the devices need of the host.
    pub fn new(config: &VirtioConfig, memory: &Memory) -> Result<Self, VirtioError> {
        if config.disks.len() > DISKS_MAX {
            return Err(VirtioError::TooManyDisks(config.disks.len()));
        }
        let mut devices: Vec<Box<dyn Device>> = vec![];
        if config.rng {
            devices.push(Box::new(rng::Rng));
        }
        if let Some(vsock) = &config.vsock {
            devices.push(Box::new(vsock::Vsock::new(vsock)?));
        }
        let others = devices.len();
        for (index, disk) in config.disks.iter().enumerate() {
            devices.push(Box::new(block::Block::open(disk, index)?));
        }
        let transports = devices
            .into_iter()
            .map(|device| Transport::new(device, memory.clone()).map(Arc::new))
            .collect::<std::io::Result<Vec<_>>>()?;
        let (others, disks) = transports.split_at(others);
        let mut threads = vec![];
        if !others.is_empty() {
            threads.push(DeviceThread::new("devices".to_owned(), others.into())?);
        }
        for (index, disk) in disks.iter().enumerate() {
            let name = format!("disk{index}");
            threads.push(DeviceThread::new(name, [Arc::clone(disk)].into())?);
        }
        Ok(Self {
            transports,
            threads,
        })
    }

    /// What the guest's kernel must be told, with a space before each word.
    pub fn command_line(&self) -> String {
        let mut words = String::new();
        for (index, irq) in self.lines() {
            // Writing to a string does not fail.
            let _ = write!(words, " virtio_mmio.device=4K@{:#x}:{irq}", address(index));
        }
        words
    }

    fn lines(&self) -> impl Iterator<Item = (usize, u32)> {
        (0..self.transports.len()).zip(IRQS)
    }

    /// Connects interrupts, and notifications where KVM can carry them itself.
    pub fn connect(&self, vm: &VmFd) -> Result<(), VirtioError> {
        for (index, irq) in self.lines() {
            let transport = &self.transports[index];
            vm.register_irqfd(transport.interrupt(), irq)
                .map_err(VirtioError::Interrupt)?;
            let notify = address(index) + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY);
            for queue in (0_u32..).take(transport.queue_count()) {
                // Without it the guest's write leaves KVM and ends up in `write`.
                let _ = vm.register_ioevent(transport.kick(), &IoEventAddress::Mmio(notify), queue);
            }
        }
        Ok(())
    }

    /// Starts the device threads. `failed` is told why if one cannot go on.
    pub fn start(
        &self,
        failed: impl FnOnce(String) + Clone + Send + 'static,
    ) -> Result<(), VirtioError> {
        for thread in &self.threads {
            thread.start(failed.clone())?;
        }
        Ok(())
    }

    /// Ends the device threads, once their batches are done, and what clients on
    /// the host could connect to. May be called more than once.
    pub fn close(&self) {
        for thread in &self.threads {
            thread.stop();
        }
        for transport in &self.transports {
            transport.close();
        }
    }

    /// The guest reads. False: no device lives there.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address) {
            Some((transport, offset)) => {
                transport.read(offset, data);
                true
            }
            None => false,
        }
    }

    /// The guest writes.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.find(address) {
            transport.write(offset, data);
        }
    }

    fn find(&self, address: u64) -> Option<(&Transport, u64)> {
        let offset = address.checked_sub(MMIO_START)?;
        let index = usize::try_from(offset / MMIO_SIZE).ok()?;
        Some((self.transports.get(index)?, offset % MMIO_SIZE))
    }
}

/// Where a device's registers are.
fn address(index: usize) -> u64 {
    MMIO_START + index as u64 * MMIO_SIZE
}
