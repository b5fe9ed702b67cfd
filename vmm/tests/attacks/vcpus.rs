// SPDX-License-Identifier: Apache-2.0

//! vCPUs that do not stop, or that end during a change.

use std::time::Duration;

use patchbay_guest::abi;
use patchbay_service::keys::RegistrationPhase;
use patchbay_vmm::vm::ExitReason;
use static_keys::Op;

use super::kernel::*;
use super::program::Program;
use super::rig::{Rig, count, site};

/// Changes keys while vCPUs run these programs. All vCPUs must stop each time.
fn stops(programs: Vec<Program>) {
    let Some(rig) = Rig::registered(programs.clone()) else {
        return;
    };
    for vcpu in 1..=programs.len() as u64 {
        rig.wait_for_rounds(vcpu, 0);
    }
    for _ in 0..20 {
        rig.flips(&["beta"], &[site(BETA_SITE), count(BETA)]);
    }
    rig.survives();
}

#[test]
fn vcpus_in_a_tight_loop() {
    stops(vec![Program::spin(false), Program::spin(true)]);
}

#[test]
fn vcpus_that_halt() {
    stops(vec![Program::halt(), Program::halt(), Program::spin(true)]);
}

#[test]
fn registering_from_user_mode() {
    let program = Program::request_from_user_mode(REQUEST | u64::from(abi::OP_REGISTER));
    let Some(rig) = Rig::new(vec![program]) else {
        return;
    };
    use zerocopy::IntoBytes;
    rig.memory()
        .write_physical(REQUEST, descriptor().as_bytes());
    rig.let_go(1);
    // WRMSR faults at privilege level 3, and this guest has no handler.
    let reason = rig.vm.wait();
    assert!(
        matches!(reason, ExitReason::TripleFault { vcpu: 1, .. }),
        "{reason:?}"
    );
    assert_eq!(rig.keys.describe().phase, RegistrationPhase::Absent);
    let mut status = [0; 4];
    rig.vm
        .ram()
        .read(REQUEST + abi::STATUS_OFFSET, &mut status)
        .unwrap();
    assert_eq!(i32::from_le_bytes(status), -38, "nobody answered");
}

/// Ends the guest from its second vCPU during changes. Each change is made completely or not at
/// all.
fn ends(program: Program, expected: fn(&ExitReason) -> bool) {
    let Some(rig) = Rig::registered(vec![program]) else {
        return;
    };
    rig.change(&["beta"], Op::Enable).unwrap();
    let names = ["alpha", "beta", "event"];
    let mut on = false;
    rig.change(&["beta"], Op::Disable).unwrap();
    for round in 0.. {
        if round == 20 {
            rig.let_go(1);
        }
        let op = if on { Op::Disable } else { Op::Enable };
        match rig.change(&names, op) {
            Ok(_) => on = !on,
            Err(error) => {
                assert_eq!(error.reason(), "GUEST_STOPPED", "{error}");
                break;
            }
        }
    }
    let reason = rig.vm.wait();
    assert!(expected(&reason), "{reason:?}");
    let memory = rig.memory();
    for key in [ALPHA, BETA, EVENT] {
        assert_eq!(memory.count(key), i32::from(on));
    }
    for (at, target) in [
        (EXECUTED, EXECUTED_TARGET),
        (STRADDLING, TARGET),
        (BETA_SITE, TARGET),
        (EVENT_SITE, TARGET),
    ] {
        assert_eq!(memory.read(at), if on { jump(at, target) } else { NOP });
    }
    // No vCPU is left to stop, and a request for a pause is harmless.
    assert!(rig.vm.pause(Duration::from_secs(1)).is_err());
    rig.look_at_everything();
    assert_eq!(
        rig.change(&names, Op::Enable).unwrap_err().reason(),
        "GUEST_STOPPED"
    );
}

#[test]
fn a_triple_fault_during_changes() {
    ends(Program::fault(), |reason| {
        matches!(reason, ExitReason::TripleFault { vcpu: 1, .. })
    });
}

#[test]
fn a_power_off_during_changes() {
    ends(Program::power(true), |reason| {
        *reason == ExitReason::PowerOff
    });
}

#[test]
fn a_reset_during_changes() {
    ends(Program::power(false), |reason| *reason == ExitReason::Reset);
}

/// The client's deadline passes while its change waits for a guest that is always busy.
#[test]
fn a_busy_guest_and_an_impatient_client() {
    let Some(rig) = Rig::registered(vec![]) else {
        return;
    };
    rig.memory().write_u64(gate_word(Gate::TextMutex), 8);
    let before = rig.picture();
    for _ in 0..50 {
        let error = rig
            .change_within(&["beta"], Op::Enable, Duration::from_millis(1))
            .unwrap_err();
        assert!(
            ["GUEST_BUSY", "CANCELLED"].contains(&error.reason()),
            "{error}"
        );
    }
    rig.only_changed(&before, &[]);
    rig.wait_until("the guest runs", || rig.scratch(0, 0) > 0);
    rig.survives();
}
