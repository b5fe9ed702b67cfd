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
//! | others | as given in the configuration, else absent: reads as all ones |

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

/// Dispatches accesses to the devices by port and address.
pub(crate) struct Bus {
    console: Arc<Console>,
    power: Arc<PowerManagement>,
    virtio: Arc<Virtio>,
    extra: Vec<(RangeInclusive<u16>, Arc<dyn PortDevice>)>,
}

impl Bus {
    pub fn new(
        console: Arc<Console>,
        virtio: Arc<Virtio>,
        power: Arc<PowerManagement>,
        extra: Vec<(RangeInclusive<u16>, Arc<dyn PortDevice>)>,
    ) -> Self {
        Self {
            console,
            power,
            virtio,
            extra,
        }
    }

    /// Handles a read from a port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            SERIAL..=0x3ff => self.console.port_read(offset(port), data),
            // Both buffers of the keyboard controller are empty.
            0x60 | 0x64 | 0x70 | 0x71 => data.fill(0),
            power::PM1_EVENT..=power::PM1_LAST => self.power.read(port, data),
            _ => match self.extra(port) {
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
                if let Some(device) = self.extra(port) {
                    device.write(port, data);
                }
            }
        }
        None
    }

    /// Handles a read from device memory.
    pub fn memory_read(&self, address: u64, data: &mut [u8]) {
        if !self.virtio.read(address, data) {
            // The bus floats high where there is no device.
            data.fill(0xff);
        }
    }

    /// Handles a write to device memory.
    pub fn memory_write(&self, address: u64, data: &[u8]) {
        self.virtio.write(address, data);
    }

    fn extra(&self, port: u16) -> Option<&dyn PortDevice> {
        self.extra
            .iter()
            .find(|(ports, _)| ports.contains(&port))
            .map(|(_, device)| device.as_ref())
    }
}

/// Register of the serial port, 0 to 7.
fn offset(port: u16) -> u8 {
    let [low, _] = (port - SERIAL).to_le_bytes();
    low
}
