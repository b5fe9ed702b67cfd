// SPDX-License-Identifier: Apache-2.0
//! Tests stock kernels in QEMU with KVM, using the programs as they are installed.

mod support;

use support::Accelerator::Kvm;

#[test]
fn the_daemon_finds_a_qemu() {
    support::daemon::finds(Kvm);
}

#[test]
fn a_rollout_changes_an_attached_guest_and_takes_it_back() {
    support::rollout::changes(Kvm);
}

#[test]
fn a_rollout_follows_a_guest_that_migrates_with_its_ledger() {
    support::rollout::moves(Kvm);
}

#[test]
fn a_domain_of_libvirt_is_attached_to_by_its_name_and_found_by_the_daemon() {
    support::libvirt::flips();
}
