// SPDX-License-Identifier: Apache-2.0
//! Tests domains of a real libvirt that run without KVM.

mod support;

#[test]
fn domains_are_attached_to_through_virsh() {
    support::libvirt::refusals_and_pauses();
}
