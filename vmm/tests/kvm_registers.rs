// SPDX-License-Identifier: Apache-2.0

//! Tests that system registers are read while the guest runs.

mod bare_metal;

use std::time::Duration;

use bare_metal::{branch_guest, counters, wait_until, watchdog};
use patchbay_vmm::system_registers::RegistersError;

/// Timeout that no correct run reaches.
const DEADLINE: Duration = Duration::from_secs(30);
const PAGING: u64 = 1 << 31;

#[test]
fn registers_are_read_from_spinning_vcpus_that_run_on() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(2) else { return };
    let rounds = |vcpu| counters(vm.ram(), vcpu).not_taken;
    for _ in 0..100 {
        let before = [0, 1].map(rounds);
        let registers = vm.system_registers(DEADLINE).unwrap();
        assert_eq!(registers.len(), 2);
        for vcpu in &registers {
            assert!(vcpu.cr0 & PAGING != 0 && vcpu.cr3 != 0, "{registers:x?}");
        }
        assert_eq!(registers[0].cr3, registers[1].cr3);
        wait_until("both vCPUs run on", || {
            rounds(0) > before[0] && rounds(1) > before[1]
        });
    }
}

#[test]
fn a_parked_vcpu_does_not_answer_and_an_ended_one_has_no_registers() {
    let _watchdog = watchdog(120);
    let Some(vm) = branch_guest(2) else { return };
    vm.system_registers(DEADLINE).unwrap();
    let paused = vm.pause(DEADLINE).unwrap();
    let late = vm.system_registers(Duration::from_millis(20)).unwrap_err();
    assert!(
        matches!(late, RegistersError::Late { vcpu: 0, .. }),
        "{late}"
    );
    assert!(vm.is_held());
    drop(paused);
    assert!(!vm.is_held());
    // A request that was not answered does not disturb the next one.
    assert_eq!(vm.system_registers(DEADLINE).unwrap().len(), 2);
    vm.shutdown();
    let _ = vm.wait();
    let ended = vm.system_registers(DEADLINE).unwrap_err();
    assert_eq!(ended, RegistersError::NoVcpu);
}
