// SPDX-License-Identifier: Apache-2.0

//! Implements the traits through which the service discovers the guest's kernel.

use std::ops::Range;
use std::time::Duration;

use patchbay_service::keys::registry::discovery::{Cpu, Discoverable, PhysicalMemory};

use crate::guest::VmGuest;
use crate::memory::{DEVICE_GAP_END, GuestRam};

/// Time allowed for the vCPUs to report their registers.
const PATIENCE: Duration = Duration::from_secs(2);

impl PhysicalMemory for GuestRam {
    fn ram(&self) -> Vec<Range<u64>> {
        let low = 0..self.low_bytes();
        let high = DEVICE_GAP_END..DEVICE_GAP_END + self.high_bytes();
        let ranges = [low, high].into_iter();
        ranges.filter(|range| !range.is_empty()).collect()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.read(address, bytes).is_ok()
    }
}

impl Discoverable for VmGuest {
    fn memory(&self) -> &dyn PhysicalMemory {
        self.vm().ram()
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        let registers = self.vm().system_registers(PATIENCE);
        let registers = registers.map_err(|error| error.to_string())?;
        let cpus = registers.iter().map(|vcpu| Cpu {
            cr0: vcpu.cr0,
            cr3: vcpu.cr3,
            cr4: vcpu.cr4,
            idt_base: vcpu.idt_base,
            fred_config: vcpu.fred_config,
            may_be_nested: Cpu::can_run_guests(vcpu.cr4, vcpu.efer),
        });
        Ok(Some(cpus.collect()))
    }

    /// A reset ends the guest.
    fn resets(&self) -> u64 {
        0
    }

    fn is_held(&self) -> bool {
        self.vm().is_held()
    }
}
