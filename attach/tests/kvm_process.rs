// SPDX-License-Identifier: Apache-2.0
//! Tests guests of KVM that are attached to by their process.

mod support;

#[test]
fn the_kernels_map_is_qemus() {
    support::process::same_map();
}

#[test]
fn a_guest_of_qemu() {
    support::process::without_monitor();
}

#[test]
fn a_guest_whose_dirty_pages_are_logged() {
    support::process::dirty_logging();
}

#[test]
fn memory_slots_that_change() {
    support::process::slots();
}

#[test]
fn a_guest_of_firecracker() {
    support::foreign::counting_firecracker();
}

#[test]
fn a_guest_of_firecracker_in_its_jail() {
    support::foreign::jailed_firecracker();
}

#[test]
fn a_guest_of_cloud_hypervisor() {
    support::foreign::counting_cloud_hypervisor();
}

#[test]
fn processes_whose_guest_cannot_be_attached_to() {
    support::process::refusals();
}

#[test]
fn kill() {
    support::kill::kill_by_process();
}
