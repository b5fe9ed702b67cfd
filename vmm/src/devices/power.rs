// SPDX-License-Identifier: Apache-2.0

//! Power-off and reset of a guest, and the power button.
//!
//! A guest powers off through the PM1a control register (ACPI sleep state S5). It resets through
//! the keyboard controller's reset line, which is also ACPI's reset register, or by a triple fault.
//! Linux needs no extra driver for these.
//!
//! The power button is ACPI fixed hardware (ACPI 6.5, 4.8.2.2.1.1). A press sets PWRBTN_STS; while
//! PWRBTN_EN is also set, the SCI is raised. The guest clears the status by writing a one. The SCI
//! is raised by a pulse (an irqfd) whenever both bits are set: at the press, and when the guest
//! writes one of the registers and both bits remain set.

use std::sync::atomic::{AtomicU16, Ordering::SeqCst};

use vmm_sys_util::eventfd::EventFd;

/// First port of the PM1a event block: the status register, then the enable register, 16 bits each
/// (ACPI 6.5, 4.8.3.1).
pub(crate) const PM1_EVENT: u16 = 0x600;

/// The enable register of that block.
const PM1_ENABLE: u16 = PM1_EVENT + 2;

/// The PM1a control register, 16 bits (ACPI 6.5, 4.8.3.2).
pub(crate) const PM1_CONTROL: u16 = 0x604;

/// Last port of the event block and the control register.
pub(super) const PM1_LAST: u16 = PM1_CONTROL + 1;

/// Sleep type in our `_S5` object.
pub(crate) const SLEEP_TYPE_OFF: u8 = 5;

/// Bit of the power button in the status and enable registers (ACPI 6.5, 4.8.3.1.1 and 4.8.3.1.2).
const POWER_BUTTON: u16 = 1 << 8;

/// Bit of the control register: ACPI mode is on. There is no other mode.
const SCI_ENABLE: u16 = 1;
/// Bit of the control register: enter the sleep state in bits 12:10.
const SLEEP_ENABLE: u16 = 1 << 13;

/// Keyboard controller command that pulses the reset line (bit 0 low).
const PULSE_RESET: u8 = 0xfe;

/// A power action of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestPower {
    /// The guest powered off.
    Off,
    /// The guest reset itself.
    Reset,
}

/// ACPI fixed hardware: the power button and the entry to S5.
#[derive(Debug)]
pub(crate) struct PowerManagement {
    status: AtomicU16,
    enable: AtomicU16,
    interrupt: EventFd,
}

impl PowerManagement {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            status: AtomicU16::new(0),
            enable: AtomicU16::new(0),
            interrupt: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Returns the status and the enable register.
    pub fn registers(&self) -> (u16, u16) {
        (self.status.load(SeqCst), self.enable.load(SeqCst))
    }

    /// Sets both registers, and raises the interrupt if it is pending.
    pub fn set_registers(&self, status: u16, enable: u16) {
        self.status.store(status, SeqCst);
        self.enable.store(enable, SeqCst);
        self.interrupt_if_pending();
    }

    /// Returns the SCI's interrupt line.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    pub fn press(&self) {
        self.status.fetch_or(POWER_BUTTON, SeqCst);
        self.interrupt_if_pending();
    }

    /// Withdraws a press that the guest has not seen. Returns false if the guest has seen it.
    pub fn take_back(&self) -> bool {
        self.status.fetch_and(!POWER_BUTTON, SeqCst) & POWER_BUTTON != 0
    }

    fn interrupt_if_pending(&self) {
        if self.status.load(SeqCst) & self.enable.load(SeqCst) != 0 {
            // The write fails only if the counter of the eventfd is full. The line is then already
            // raised.
            let _ = self.interrupt.write(1);
        }
    }

    pub fn read(&self, port: u16, data: &mut [u8]) {
        let [status_low, status_high] = self.status.load(SeqCst).to_le_bytes();
        let [enable_low, enable_high] = self.enable.load(SeqCst).to_le_bytes();
        let [control_low, control_high] = SCI_ENABLE.to_le_bytes();
        let block = [
            status_low,
            status_high,
            enable_low,
            enable_high,
            control_low,
            control_high,
        ];
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
        match port {
            PM1_EVENT => {
                // Writing a one clears the bit.
                self.status.fetch_and(!value, SeqCst);
                self.interrupt_if_pending();
            }
            PM1_ENABLE => {
                self.enable.store(value, SeqCst);
                self.interrupt_if_pending();
            }
            _ => {}
        }
        let off = port == PM1_CONTROL
            && value & SLEEP_ENABLE != 0
            && (value >> 10) & 7 == u16::from(SLEEP_TYPE_OFF);
        off.then_some(GuestPower::Off)
    }
}

/// Handles a command to the keyboard controller.
pub(super) fn keyboard_command(data: &[u8]) -> Option<GuestPower> {
    (data == [PULSE_RESET]).then_some(GuestPower::Reset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_state_five_switches_off_and_others_do_not() {
        let pm = PowerManagement::new().unwrap();
        let write = |value: u16| pm.write(PM1_CONTROL, &value.to_le_bytes());
        assert_eq!(write(SLEEP_ENABLE | 5 << 10), Some(GuestPower::Off));
        assert_eq!(write(SLEEP_ENABLE | 3 << 10), None);
        assert_eq!(write(5 << 10), None);
        assert_eq!(pm.write(PM1_EVENT, &[0xff, 0xff]), None);
        assert_eq!(pm.write(PM1_CONTROL, &[0; 4]), None);
    }

    #[test]
    fn registers_read_as_documented_whatever_the_width() {
        let pm = PowerManagement::new().unwrap();
        assert_eq!(pm.write(PM1_EVENT + 2, &0x0120_u16.to_le_bytes()), None);
        let mut bytes = [0xaa; 8];
        pm.read(PM1_EVENT, &mut bytes);
        assert_eq!(bytes, [0, 0, 0x20, 1, 1, 0, 0xff, 0xff]);
    }

    #[test]
    fn the_power_button_interrupts_a_guest_that_listens() {
        let pm = PowerManagement::new().unwrap();
        let write = |port, value: u16| assert_eq!(pm.write(port, &value.to_le_bytes()), None);
        let status = || {
            let mut bytes = [0; 2];
            pm.read(PM1_EVENT, &mut bytes);
            u16::from_le_bytes(bytes)
        };
        let interrupted = || pm.interrupt().read().is_ok();
        // A press is pending until the guest enables the button.
        pm.press();
        assert_eq!((status(), interrupted()), (POWER_BUTTON, false));
        write(PM1_ENABLE, POWER_BUTTON);
        assert!(interrupted());
        // Writing other bits does not clear the press and raises the line again.
        write(PM1_EVENT, !POWER_BUTTON);
        assert_eq!((status(), interrupted()), (POWER_BUTTON, true));
        write(PM1_EVENT, POWER_BUTTON);
        assert_eq!((status(), interrupted()), (0, false));
        assert!(!pm.take_back(), "the guest has seen it");
        pm.press();
        assert!(interrupted());
        assert!(pm.take_back());
        write(PM1_ENABLE, POWER_BUTTON);
        assert_eq!((status(), interrupted()), (0, false));
    }

    /// No write of a guest makes it see an event that did not happen.
    #[test]
    fn a_guest_cannot_press_its_own_button() {
        let pm = PowerManagement::new().unwrap();
        for value in [0, POWER_BUTTON, u16::MAX] {
            for port in [PM1_EVENT, PM1_ENABLE] {
                let _ = pm.write(port, &value.to_le_bytes());
                assert!(pm.interrupt().read().is_err());
            }
        }
    }

    #[test]
    fn only_the_pulse_command_resets() {
        assert_eq!(keyboard_command(&[0xfe]), Some(GuestPower::Reset));
        assert_eq!(keyboard_command(&[0xd1]), None);
        assert_eq!(keyboard_command(&[0xfe, 0xfe]), None);
    }
}
