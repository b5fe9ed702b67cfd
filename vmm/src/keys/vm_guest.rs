// SPDX-License-Identifier: Apache-2.0
//! A KVM guest as the keys see it.

use std::sync::Arc;
use std::time::Duration;

use super::guest::{Guest, GuestDescription, Machine, Transport};
use crate::devices::Console;
use crate::memory::GuestRam;
use crate::pause::{PauseError, Paused};
use crate::vm::Vm;

/// A [`Vm`] with its name.
pub struct VmGuest {
    name: String,
    vm: Arc<Vm>,
}

impl VmGuest {
    /// Names a guest.
    pub fn new(name: String, vm: Arc<Vm>) -> Self {
        Self { name, vm }
    }
}

impl Machine for VmGuest {
    fn description(&self) -> GuestDescription {
        let offered = self.vm.transports();
        let transports = [
            (offered.hypercall, Transport::Hypercall),
            (offered.msr, Transport::Msr),
        ];
        GuestDescription {
            name: self.name.clone(),
            vcpus: self.vm.vcpus().into(),
            memory_bytes: self.vm.ram().low_bytes() + self.vm.ram().high_bytes(),
            transports: transports
                .into_iter()
                .filter(|(works, _)| *works)
                .map(|(_, transport)| transport)
                .collect(),
        }
    }

    fn has_ended(&self) -> bool {
        self.vm.exit_reason().is_some()
    }

    fn shut_down(&self) {
        self.vm.shutdown();
    }

    fn press_power_button(&self) {
        self.vm.press_power_button();
    }

    fn take_back_press(&self) -> bool {
        self.vm.take_back_press()
    }

    fn console(&self) -> &Console {
        self.vm.console()
    }
}

impl Guest for VmGuest {
    type Paused<'a> = Paused<'a>;

    fn ram(&self) -> &GuestRam {
        self.vm.ram()
    }

    fn pause(&self, timeout: Duration) -> Result<Paused<'_>, PauseError> {
        self.vm.pause(timeout)
    }
}
