// SPDX-License-Identifier: Apache-2.0
//! A guest of QEMU. A test replaces its memory, and implements
//! [`Guest`](patchbay_guest::guest::Guest) for it; the rest is forwarded.

use patchbay_attach::guest::QemuGuest;
use patchbay_guest::console::Console;
use patchbay_guest::guest::{GuestDescription, Machine};
use patchbay_guest::memory::GuestRam;

pub struct Wrapped<T> {
    pub guest: QemuGuest,
    pub ram: GuestRam,
    pub with: T,
}

impl<T: Send + Sync> Machine for Wrapped<T> {
    fn description(&self) -> GuestDescription {
        self.guest.description()
    }

    fn has_ended(&self) -> bool {
        self.guest.has_ended()
    }

    fn shut_down(&self) {
        self.guest.shut_down();
    }

    fn press_power_button(&self) {
        self.guest.press_power_button();
    }

    fn take_back_press(&self) -> bool {
        self.guest.take_back_press()
    }

    fn console(&self) -> &dyn Console {
        self.guest.console()
    }
}
