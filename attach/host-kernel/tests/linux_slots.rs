// SPDX-License-Identifier: Apache-2.0
//! Tests a QEMU in the lab, where KVM is a module and there is /proc/kcore.

mod support;

#[test]
fn the_map_is_qemus() {
    support::the_map_is_qemus();
}

#[test]
fn a_vm_is_listed() {
    support::a_vm_is_listed();
}
