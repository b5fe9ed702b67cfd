// SPDX-License-Identifier: Apache-2.0
//! Reads the inputs of a discovery of the guest's kernel.

use std::path::Path;
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use patchbay_guest::discovery::Discoverable;
use patchbay_memory::{Cpu, PhysicalMemory};

use crate::guest::QemuGuest;
use crate::hotplug::Watch;
use crate::kvm;
use crate::nested::Nesting;

/// Timeout for the registers.
const PATIENCE: Duration = Duration::from_secs(2);

impl Discoverable for QemuGuest {
    fn memory(&self) -> &dyn PhysicalMemory {
        self.memory()
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        let nesting = || {
            let folder = Path::new(kvm::FOLDER);
            let counted = Nesting::in_debugfs(folder, kvm::pid_namespace(), |id| {
                self.process().has_thread(id)
            });
            counted.or_else(|| self.monitor().nesting(PATIENCE))
        };
        let looks = || (nesting(), self.monitor().registers(PATIENCE), nesting());
        let (before, registers, after) = unless_held(&self.watch, || self.is_held(), looks)?;
        let registers = registers.map_err(|error| error.to_string())?;
        let never = Nesting::never_between(before.as_ref(), after.as_ref(), registers.len());
        let cpu = |vcpu: &crate::registers::Registers| Cpu {
            cr0: vcpu.cr0,
            cr3: vcpu.cr3,
            cr4: vcpu.cr4,
            idt_base: vcpu.idt_base,
            // The run page has no MSRs of FRED.
            fred_config: None,
            may_be_nested: !never && Cpu::can_run_guests(vcpu.cr4, vcpu.efer),
        };
        Ok(Some(registers.iter().map(cpu).collect()))
    }

    fn resets(&self) -> u64 {
        self.life().resets()
    }

    /// Requires a check of the running kernel in addition to the events, because libvirt may
    /// deliver a RESET late, and QEMU may reset a guest without one.
    fn confirms(&self) -> bool {
        true
    }

    fn is_held(&self) -> bool {
        self.is_held()
    }

    fn memory_changes(&self, anyway: bool) -> u64 {
        self.memory_changes(anyway)
    }
}

/// Reads the registers, unless the guest is held. No pause begins meanwhile.
///
/// A thread has only one tracer, and vCPUs that are held do not return from `KVM_RUN`. For KVM's
/// counts, QEMU's main loop waits for the thread of each vCPU. A frozen thread would keep the main
/// loop from answering anything, so the change would fail and be undone. A pause sets `held` and
/// then takes the lock.
///
/// # Errors
/// The guest is held, or is about to be held.
fn unless_held<T>(
    watch: &Mutex<Watch>,
    is_held: impl FnOnce() -> bool,
    ask: impl FnOnce() -> T,
) -> Result<T, String> {
    let watch = match watch.try_lock() {
        Ok(watch) => Some(watch),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    match watch {
        Some(_watch) if !is_held() => Ok(ask()),
        _ => Err("the guest is held stopped".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_asked_for_only_while_no_pause_can_begin() {
        let watch = Mutex::new(Watch::default());
        let ask = || assert!(watch.try_lock().is_err(), "a pause would begin");
        assert_eq!(unless_held(&watch, || false, ask), Ok(()));
        assert!(watch.try_lock().is_ok());
        let never = || panic!("QEMU is asked");
        // The two cases are a pause that is about to take the lock, and one that holds it.
        unless_held(&watch, || true, never).expect_err("held");
        let _held = watch.lock().expect("no panic");
        unless_held(&watch, || false, never).expect_err("held");
    }
}
