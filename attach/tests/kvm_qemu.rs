// SPDX-License-Identifier: Apache-2.0
//! The seams on a QEMU with KVM.

mod support;

use patchbay_attach::PauseWay;
use support::Accelerator::Kvm;

#[test]
fn memory() {
    support::memory(Kvm);
}

#[test]
fn holes() {
    support::holes(Kvm);
}

#[test]
fn pause_by_ptrace() {
    support::pause(Kvm, PauseWay::Freeze);
}

#[test]
fn pause_by_qmp() {
    support::pause(Kvm, PauseWay::Qmp);
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
fn lifecycle() {
    support::lifecycle(Kvm);
}

#[test]
fn kill() {
    support::kill(Kvm);
}

#[test]
fn refusals() {
    support::refusals(Kvm);
}

#[test]
#[ignore = "run by the test kill"]
fn holder() {
    support::holder();
}
