// SPDX-License-Identifier: Apache-2.0
//! Stock kernels in QEMUs with KVM, attached to by the programs as they are installed.

mod support;

use support::Accelerator::Kvm;

#[test]
fn the_daemon_finds_a_qemu() {
    support::daemon::finds(Kvm);
}

#[test]
fn a_domain_of_libvirt_is_attached_to_by_its_name() {
    support::libvirt::flips();
}
