// SPDX-License-Identifier: Apache-2.0
//! What a discovery of the guest's kernel reads.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use patchbay_kernel_image::live::{Cpu, PhysicalMemory};
use patchbay_service::keys::registry::discovery::Discoverable;

use crate::guest::QemuGuest;
use crate::memory::AttachedRam;
use crate::nested::{self, Nesting};

/// For the registers.
const PATIENCE: Duration = Duration::from_secs(2);

impl PhysicalMemory for AttachedRam {
    fn ram(&self) -> Vec<Range<u64>> {
        self.filled()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.copy(address, bytes)
    }
}

impl Discoverable for QemuGuest {
    fn memory(&self) -> &dyn PhysicalMemory {
        self.memory()
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        let nesting = || Nesting::of(Path::new(nested::FOLDER), self.process().pid());
        let before = nesting();
        let registers = self
            .monitor()
            .registers(PATIENCE)
            .map_err(|error| error.to_string())?;
        let never = Nesting::never_between(before.as_ref(), nesting().as_ref());
        let cpu = |vcpu: &crate::registers::Registers| Cpu {
            cr0: vcpu.cr0,
            cr3: vcpu.cr3,
            cr4: vcpu.cr4,
            idt_base: vcpu.idt_base,
            may_be_nested: !never && Cpu::can_run_guests(vcpu.cr4, vcpu.efer),
        };
        Ok(Some(registers.iter().map(cpu).collect()))
    }

    fn resets(&self) -> u64 {
        self.life().resets()
    }

    fn is_held(&self) -> bool {
        self.is_held()
    }

    fn memory_changes(&self, anyway: bool) -> u64 {
        self.memory_changes(anyway)
    }
}
