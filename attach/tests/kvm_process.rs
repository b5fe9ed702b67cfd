// SPDX-License-Identifier: Apache-2.0
//! Tests guests of KVM that are attached to by their process.

mod support;

use support::foreign;
use support::kill::kill_with;

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
    foreign::counting(foreign::counting_firecracker);
}

#[test]
fn a_guest_of_firecracker_in_its_jail() {
    foreign::counting(foreign::jailed_firecracker);
}

#[test]
fn a_guest_of_cloud_hypervisor() {
    foreign::counting(foreign::counting_cloud_hypervisor);
}

#[test]
fn a_guest_of_libkrun() {
    foreign::counting(foreign::listed_libkrun);
}

#[test]
fn the_agents_socket_of_firecracker() {
    support::hybrid_vsock::firecracker();
}

#[test]
fn the_agents_socket_of_firecracker_in_its_jail() {
    support::hybrid_vsock::jailed_firecracker();
}

#[test]
fn the_agents_socket_of_cloud_hypervisor() {
    support::hybrid_vsock::cloud_hypervisor();
}

#[test]
fn processes_whose_guest_cannot_be_attached_to() {
    support::process::refusals();
}

#[test]
fn kill() {
    support::kill::kill_by_process();
}

#[test]
fn kill_with_firecracker() {
    kill_with("kill_with_firecracker", foreign::jailed_firecracker);
}

#[test]
fn kill_with_cloud_hypervisor() {
    kill_with(
        "kill_with_cloud_hypervisor",
        foreign::counting_cloud_hypervisor,
    );
}

#[test]
fn kill_with_libkrun() {
    kill_with("kill_with_libkrun", foreign::counting_libkrun);
}

#[test]
fn the_daemon_finds_every_guest() {
    support::all::the_daemon("the_daemon_finds_every_guest");
}

#[test]
fn a_guest_that_cannot_be_attached_to_is_reported_once() {
    support::all::reports_once("a_guest_that_cannot_be_attached_to_is_reported_once");
}

#[test]
fn all_guests_are_served_in_the_foreground() {
    support::all::the_foreground("all_guests_are_served_in_the_foreground");
}

#[test]
fn attachers_that_see_different_mounts_of_proc() {
    support::all::another_proc("attachers_that_see_different_mounts_of_proc");
}
