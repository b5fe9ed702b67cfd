// SPDX-License-Identifier: Apache-2.0

//! Virtio devices of the guest: vsock, disks, entropy (virtio 1.2).
//!
//! ```text
//!  vCPU threads ── registers ──▶ transport ◀── one batch at a time ── device threads
//!       │                                                                ▲  │
//!       └── QueueNotify ─ ioeventfd (or an exit) ────────────────────────┘  │
//!  guest ◀─────────────── irqfd ────────────────────────────────────────────┘
//! ```
//!
//! Each device has one page of registers from [`MMIO_START`] on and its own interrupt line. Guests
//! find the devices through the kernel command line (`virtio_mmio.device=`) or ACPI, both in
//! Linux's `drivers/virtio/virtio_mmio.c`.
//!
//! The guest's driver is hostile. A driver error stops that one device until the driver resets it
//! (NEEDS_RESET). It never stops the monitor.

mod block;
mod device;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzzing;
mod queue;
mod rate;
mod rng;
#[cfg(any(test, feature = "testing"))]
mod testing;
#[cfg(test)]
mod tests;
mod thread;
mod transport;
mod vsock;

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_ioctls::{IoEventAddress, VmFd};
use patchbay_guest::snapshot::{MemorySink, SaveError};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::GuestMemoryMmap;

pub use block::{DiskConfig, DiskError};
pub use rate::{DiskLimits, Rate};
pub use vsock::{CID_MIN, VsockConfig, VsockError};

use device::Device;
use thread::DeviceThread;
use transport::Transport;

use crate::dirty::DirtyBitmap;
use crate::snapshot::{DeviceState, SnapshotError};
use crate::x86::acpi::MmioDevice;

type Memory = GuestMemoryMmap<DirtyBitmap>;

/// Guest-physical address of the first device's registers.
pub const MMIO_START: u64 = 0xd000_0000;

/// Size of a device's registers in bytes.
const MMIO_SIZE: u64 = 0x1000;

/// Limit on the disks of a guest.
pub const DISKS_MAX: usize = 4;

/// Interrupt lines for devices: the unused lines of the ISA bus.
const IRQS: [u32; 6] = [5, 6, 7, 10, 11, 12];

/// Time allowed for requests that the host works on when the guest is saved.
const DISK_PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks at a request that the host works on.
const BUSY_POLL: Duration = Duration::from_millis(1);

/// Configuration of a guest's virtio devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtioConfig {
    /// An entropy device, fed by the host.
    pub rng: bool,
    /// Stream sockets between guest and host.
    pub vsock: Option<VsockConfig>,
    /// Disks, in the order in which the guest finds them; at most 4.
    pub disks: Vec<DiskConfig>,
}

/// The devices cannot be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum VirtioError {
    #[error("{0} disks are more than the 4 that a guest can have; remove some")]
    TooManyDisks(usize),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Vsock(#[from] VsockError),
    #[error(
        "the device threads cannot be set up ({0}); raise the limits on threads and open files"
    )]
    Host(std::io::Error),
    #[error("KVM cannot connect a device's interrupt ({0}); use a kernel of 5.10 or later")]
    Interrupt(kvm_ioctls::Error),
}

impl From<std::io::Error> for VirtioError {
    fn from(error: std::io::Error) -> Self {
        Self::Host(error)
    }
}

/// Virtio devices of a guest.
pub(crate) struct Virtio {
    transports: Vec<Arc<Transport>>,
    /// One thread per disk, and one for all other devices.
    threads: Vec<DeviceThread>,
}

impl Virtio {
    /// Opens the host's files and sockets of the devices.
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

    /// Returns the words for the guest's kernel command line, each with a leading space.
    pub fn command_line(&self) -> String {
        let mut words = String::new();
        for (index, irq) in self.lines() {
            // Writing to a String cannot fail.
            let _ = write!(words, " virtio_mmio.device=4K@{:#x}:{irq}", address(index));
        }
        words
    }

    /// Returns the devices' registers and interrupts, for ACPI.
    pub(crate) fn mmio_devices(&self) -> Vec<MmioDevice> {
        let device = |(index, interrupt)| {
            Some(MmioDevice {
                address: u32::try_from(address(index)).ok()?,
                size: MMIO_SIZE as u32,
                interrupt,
            })
        };
        self.lines().filter_map(device).collect()
    }

    fn lines(&self) -> impl Iterator<Item = (usize, u32)> {
        (0..self.transports.len()).zip(IRQS)
    }

    /// Connects the interrupts, and also the notifications if KVM supports ioeventfds.
    pub fn connect(&self, vm: &VmFd) -> Result<(), VirtioError> {
        for (index, irq) in self.lines() {
            let transport = &self.transports[index];
            vm.register_irqfd(transport.interrupt(), irq)
                .map_err(VirtioError::Interrupt)?;
            let notify = address(index) + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY);
            for queue in (0_u32..).take(transport.queue_count()) {
                // Without an ioeventfd the guest's write exits to user space and arrives in
                // `write`.
                let _ = vm.register_ioevent(transport.kick(), &IoEventAddress::Mmio(notify), queue);
            }
        }
        Ok(())
    }

    /// Starts the device threads. If a thread cannot continue, `failed` is called with the reason.
    pub fn start(
        &self,
        failed: impl FnOnce(String) + Clone + Send + 'static,
    ) -> Result<(), VirtioError> {
        for thread in &self.threads {
            thread.start(failed.clone())?;
        }
        Ok(())
    }

    /// Keeps the devices from accessing guest memory until the returned value is dropped. Waits for
    /// requests that the host works on, until the sink closes or [`DISK_PATIENCE`] has passed. The
    /// guest must be paused.
    ///
    /// # Errors
    /// The sink is closed, or the host has not finished a request.
    pub fn freeze(&self, sink: &mut dyn MemorySink) -> Result<Frozen<'_>, SaveError> {
        let frozen = Frozen(self);
        let deadline = Instant::now() + DISK_PATIENCE;
        for (index, transport) in self.transports.iter().enumerate() {
            while !transport.freeze() {
                sink.check()?;
                if Instant::now() >= deadline {
                    return Err(SaveError::Unable(format!(
                        "the host has not finished a request of virtio device {index} within {DISK_PATIENCE:?}; check the host's storage"
                    )));
                }
                std::thread::sleep(BUSY_POLL);
            }
        }
        Ok(frozen)
    }

    /// Sets the state of the devices of a guest that was saved.
    pub fn restore(&self, saved: &[DeviceState]) -> Result<(), SnapshotError> {
        if saved.len() != self.transports.len() {
            return Err(SnapshotError::DeviceCount {
                saved: saved.len(),
                given: self.transports.len(),
            });
        }
        for (index, (transport, saved)) in self.transports.iter().zip(saved).enumerate() {
            transport
                .restore(saved)
                .map_err(|what| SnapshotError::Device { index, what })?;
        }
        Ok(())
    }

    /// Stops the device threads after their current batch, and closes the sockets that clients on
    /// the host connect to. May be called more than once.
    pub fn close(&self) {
        for thread in &self.threads {
            thread.stop();
        }
        for transport in &self.transports {
            transport.close();
        }
    }

    /// Handles a read of the guest. Returns false if no device is at the address.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address) {
            Some((transport, offset)) => {
                transport.read(offset, data);
                true
            }
            None => false,
        }
    }

    /// Handles a write of the guest.
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

/// Devices that do not access guest memory. Dropping this lets them work again.
pub(crate) struct Frozen<'a>(&'a Virtio);

impl Frozen<'_> {
    /// Returns the state of the devices, in the order of their addresses.
    pub fn save(&self) -> Vec<DeviceState> {
        let transports = self.0.transports.iter();
        transports.map(|transport| transport.save()).collect()
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        for transport in &self.0.transports {
            transport.thaw();
        }
    }
}

/// Returns the address of a device's registers.
fn address(index: usize) -> u64 {
    MMIO_START + index as u64 * MMIO_SIZE
}
