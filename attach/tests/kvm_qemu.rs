// SPDX-License-Identifier: Apache-2.0
//! The seams on a QEMU with KVM. Where the guest's memory is and who may look into the process do not
//! depend on what runs the vCPUs: `qemu.rs` tests them alone.

mod support;

use patchbay_attach::PauseWay;
use support::Accelerator::Kvm;

#[test]
fn pause_by_ptrace() {
    support::pause(Kvm, PauseWay::Freeze);
}

#[test]
fn pause_by_qmp() {
    support::pause(Kvm, PauseWay::Qmp);
}

#[test]
fn a_monitor_answers_while_a_guest_that_uses_its_devices_is_frozen() {
    support::answers_while_frozen(Kvm);
}

#[test]
fn migration_by_ptrace() {
    support::migration(Kvm, PauseWay::Freeze);
}

#[test]
fn migration_by_qmp() {
    support::migration(Kvm, PauseWay::Qmp);
}

#[test]
fn a_guest_that_moves_to_another_qemu() {
    support::bad_input::moves(Kvm);
}

#[test]
fn guests_without_a_kernel_of_64_bits() {
    support::bad_input::no_kernel(Kvm);
}

#[test]
fn lifecycle() {
    support::lifecycle(Kvm);
}

#[test]
fn kill() {
    support::kill::kill(Kvm);
}

#[test]
fn refusals() {
    support::refusals(Kvm);
}
