// SPDX-License-Identifier: Apache-2.0

//! Devices of the guest. KVM provides the interrupt controllers and the timer. The virtio devices
//! are memory-mapped, see [`virtio`]. The other devices are on I/O ports:
//!
//! | ports | device |
//! |---|---|
//! | 0x3f8..=0x3ff | 16550 serial console, IRQ 4 |
//! | 0x60, 0x64 | keyboard controller: only its reset line |
//! | 0x70, 0x71 | CMOS clock: absent, reads as 0 |
//! | 0x600..=0x605 | ACPI power management: event (the power button) and control block |
//! | others | from the configuration, else absent: reads as all ones |

mod console;
mod console_file;
mod power;
pub mod virtio;

use std::ops::RangeInclusive;
use std::sync::Arc;

pub use console::{Console, ConsoleError, ConsoleOutput};
pub use power::GuestPower;
pub(crate) use power::{PM1_CONTROL, PM1_EVENT, PowerManagement, SLEEP_TYPE_OFF};
pub(crate) use virtio::Virtio;

/// First port of the serial console (COM1).
const SERIAL: u16 = 0x3f8;

/// A device on I/O ports, for guests that need more than the built-in ones.
///
/// The methods are called on vCPU threads, possibly on several at once. A vCPU cannot be paused
/// until the call returns.
pub trait PortDevice: Send + Sync {
    /// Handles a read by the guest and fills in `data`.
    fn read(&self, port: u16, data: &mut [u8]);
    /// Handles a write by the guest.
    fn write(&self, port: u16, data: &[u8]);
}

/// A device in guest-physical memory, for guests that need more than the built-in ones. The rules
/// of [`PortDevice`] apply.
pub trait MemoryDevice: Send + Sync {
    /// Handles a read by the guest and fills in `data`.
    fn read(&self, address: u64, data: &mut [u8]);
    /// Handles a write by the guest.
    fn write(&self, address: u64, data: &[u8]);
}

/// Devices of a configuration by their ports.
pub type PortDevices = Vec<(RangeInclusive<u16>, Arc<dyn PortDevice>)>;
/// Devices of a configuration by their guest-physical addresses.
pub type MemoryDevices = Vec<(RangeInclusive<u64>, Arc<dyn MemoryDevice>)>;

/// Dispatches accesses to the devices by port and address.
pub(crate) struct Bus {
    console: Arc<Console>,
    power: Arc<PowerManagement>,
    virtio: Arc<Virtio>,
    ports: PortDevices,
    memory: MemoryDevices,
}

impl Bus {
    pub fn new(
        console: Arc<Console>,
        virtio: Arc<Virtio>,
        power: Arc<PowerManagement>,
        ports: PortDevices,
        memory: MemoryDevices,
    ) -> Self {
        Self {
            console,
            power,
            virtio,
            ports,
            memory,
        }
    }

    /// Handles a read from a port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            SERIAL..=0x3ff => self.console.port_read(offset(port), data),
            // Both buffers of the keyboard controller are empty.
            0x60 | 0x64 | 0x70 | 0x71 => data.fill(0),
            power::PM1_EVENT..=power::PM1_LAST => self.power.read(port, data),
            _ => match at(&self.ports, port) {
                Some(device) => device.read(port, data),
                None => data.fill(0xff),
            },
        }
    }

    /// Handles a write to a port.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<GuestPower> {
        match port {
            SERIAL..=0x3ff => self.console.port_write(offset(port), data),
            0x64 => return power::keyboard_command(data),
            power::PM1_EVENT..=power::PM1_LAST => return self.power.write(port, data),
            _ => {
                if let Some(device) = at(&self.ports, port) {
                    device.write(port, data);
                }
            }
        }
        None
    }

    /// Handles a read from device memory.
    pub fn memory_read(&self, address: u64, data: &mut [u8]) {
        if let Some(device) = at(&self.memory, address) {
            device.read(address, data);
        } else if !self.virtio.read(address, data) {
            // An address without a device reads as all ones, because the bus of a PC floats high.
            data.fill(0xff);
        }
    }

    /// Handles a write to device memory.
    pub fn memory_write(&self, address: u64, data: &[u8]) {
        match at(&self.memory, address) {
            Some(device) => device.write(address, data),
            None => self.virtio.write(address, data),
        }
    }
}

/// Returns the device of a configuration at a port or an address.
fn at<A: PartialOrd, D: ?Sized>(devices: &[(RangeInclusive<A>, Arc<D>)], at: A) -> Option<&D> {
    let found = devices.iter().find(|(range, _)| range.contains(&at));
    found.map(|(_, device)| device.as_ref())
}

/// Returns the register of the serial port, 0 to 7.
fn offset(port: u16) -> u8 {
    let [low, _] = (port - SERIAL).to_le_bytes();
    low
}
