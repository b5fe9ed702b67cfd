// SPDX-License-Identifier: Apache-2.0
//! Implements the traits through which the service discovers the guest's kernel.

use std::time::Duration;

use patchbay_guest::discovery::Discoverable;
use patchbay_memory::{Cpu, PhysicalMemory};

use crate::guest::VmGuest;

/// Time allowed for the vCPUs to report their registers.
const PATIENCE: Duration = Duration::from_secs(2);

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

    /// Returns 0, because a reset ends the guest, and no other kernel follows.
    fn resets(&self) -> u64 {
        0
    }

    fn is_held(&self) -> bool {
        self.vm().is_held()
    }
}
