// SPDX-License-Identifier: Apache-2.0

//! How a guest switches itself off or resets itself.
//!
//! Off: the ACPI sleep state S5 through the PM1a control register. Reset: the
//! keyboard controller's reset line, which is also ACPI's reset register, or a
//! triple fault. Linux uses these by itself; nothing is needed in the guest.

use std::sync::atomic::{AtomicU16, Ordering};

/// First port of the PM1a event block: status, then enable, 16 bits each
/// (ACPI 6.5, 4.8.3.1).
pub(crate) const PM1_EVENT: u16 = 0x600;

/// The PM1a control register, 16 bits (ACPI 6.5, 4.8.3.2).
pub(crate) const PM1_CONTROL: u16 = 0x604;

/// Last port of both.
pub(super) const PM1_LAST: u16 = PM1_CONTROL + 1;

/// The sleep type that our `_S5` object names.
pub(crate) const SLEEP_TYPE_OFF: u8 = 5;

/// In the control register: the guest uses ACPI. There is no other mode.
const SCI_ENABLE: u16 = 1;
/// In the control register: go to the sleep state in bits 12:10.
const SLEEP_ENABLE: u16 = 1 << 13;

/// Keyboard controller command: pulse the reset line (bit 0 low).
const PULSE_RESET: u8 = 0xfe;

/// What the guest did to its power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestPower {
    /// Switched itself off.
    Off,
    /// Reset itself.
    Reset,
}

/// The ACPI fixed hardware, as far as a guest without events needs it.
#[derive(Debug, Default)]
pub(super) struct PowerManagement {
    enable: AtomicU16,
}

impl PowerManagement {
    pub fn read(&self, port: u16, data: &mut [u8]) {
        let [enable_low, enable_high] = self.enable.load(Ordering::Relaxed).to_le_bytes();
        let [control_low, control_high] = SCI_ENABLE.to_le_bytes();
        // No event ever happens: the status register is zero.
        let block = [0, 0, enable_low, enable_high, control_low, control_high];
        let start = usize::from(port - PM1_EVENT);
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = block.get(start + index).copied().unwrap_or(0xff);
        }
    }

    pub fn write(&self, port: u16, data: &[u8]) -> Option<GuestPower> {
        let [low, high] = *data else {
            return None;
        };
        let value = u16::from_le_bytes([low, high]);
        if port == PM1_EVENT + 2 {
            self.enable.store(value, Ordering::Relaxed);
        }
        let off = port == PM1_CONTROL
            && value & SLEEP_ENABLE != 0
            && (value >> 10) & 7 == u16::from(SLEEP_TYPE_OFF);
        off.then_some(GuestPower::Off)
    }
}

/// A command to the keyboard controller.
pub(super) fn keyboard_command(data: &[u8]) -> Option<GuestPower> {
    (data == [PULSE_RESET]).then_some(GuestPower::Reset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_state_five_switches_off_and_others_do_not() {
        let pm = PowerManagement::default();
        let write = |value: u16| pm.write(PM1_CONTROL, &value.to_le_bytes());
        assert_eq!(write(SLEEP_ENABLE | 5 << 10), Some(GuestPower::Off));
        assert_eq!(write(SLEEP_ENABLE | 3 << 10), None);
        assert_eq!(write(5 << 10), None);
        assert_eq!(pm.write(PM1_EVENT, &[0xff, 0xff]), None);
        assert_eq!(pm.write(PM1_CONTROL, &[0; 4]), None);
    }

    #[test]
    fn registers_read_as_documented_whatever_the_width() {
        let pm = PowerManagement::default();
        assert_eq!(pm.write(PM1_EVENT + 2, &0x0120_u16.to_le_bytes()), None);
        let mut bytes = [0xaa; 8];
        pm.read(PM1_EVENT, &mut bytes);
        assert_eq!(bytes, [0, 0, 0x20, 1, 1, 0, 0xff, 0xff]);
    }

    #[test]
    fn only_the_pulse_command_resets() {
        assert_eq!(keyboard_command(&[0xfe]), Some(GuestPower::Reset));
        assert_eq!(keyboard_command(&[0xd1]), None);
        assert_eq!(keyboard_command(&[0xfe, 0xfe]), None);
    }
}
