// SPDX-License-Identifier: Apache-2.0

//! The devices that KVM emulates for the whole guest: interrupt controllers, timer, clock.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VmFd;
use patchbay_guest::snapshot::SaveError;

use super::state::{from_bytes, to_bytes};
use super::{MachineState, SnapshotError};

const CHIPS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];

/// Reads the chips into the state.
pub(crate) fn save(vm: &VmFd, state: &mut MachineState) -> Result<(), SaveError> {
    let failed =
        |what: &str, error| SaveError::Unable(format!("KVM does not report {what} ({error})"));
    for chip_id in CHIPS {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip)
            .map_err(|error| failed("an interrupt controller", error))?;
        state.irqchips.push(to_bytes(&chip));
    }
    let pit = vm.get_pit2().map_err(|error| failed("the timer", error))?;
    state.pit = to_bytes(&pit);
    let clock = vm.get_clock().map_err(|error| failed("the clock", error))?;
    state.clock = clock.clock;
    Ok(())
}

/// Sets the chips. The local APICs and the TSCs of all vCPUs must be set, because an interrupt that
/// waits in the I/O APIC is delivered at once, and the clock is computed from the TSC.
pub(crate) fn restore(vm: &VmFd, state: &MachineState) -> Result<(), SnapshotError> {
    if state.irqchips.len() != CHIPS.len() {
        return Err(SnapshotError::Invalid("it lacks interrupt controllers"));
    }
    for (chip_id, bytes) in CHIPS.into_iter().zip(&state.irqchips) {
        let chip: kvm_irqchip = from_bytes("an interrupt controller", bytes)?;
        if chip.chip_id != chip_id {
            return Err(SnapshotError::Invalid(
                "its interrupt controllers are mixed up",
            ));
        }
        vm.set_irqchip(&chip)
            .map_err(SnapshotError::kvm("set an interrupt controller"))?;
    }
    let pit = from_bytes("the timer", &state.pit)?;
    vm.set_pit2(&pit)
        .map_err(SnapshotError::kvm("set the timer"))?;
    // Without flags, the clock continues where it was.
    let clock = kvm_clock_data {
        clock: state.clock,
        ..Default::default()
    };
    vm.set_clock(&clock)
        .map_err(SnapshotError::kvm("set the clock"))
}
