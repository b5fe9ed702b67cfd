// SPDX-License-Identifier: Apache-2.0
//! Tests a stock kernel in a QEMU with KVM.

mod support;

use patchbay_attach::PauseWay;
use support::Accelerator::Kvm;
use support::Memory::SharedMemfd;

#[tokio::test(flavor = "multi_thread")]
async fn stock_kernel_by_qmp() {
    support::stock::stock(Kvm, PauseWay::Qmp, SharedMemfd).await;
}

#[test]
fn a_guest_that_runs_a_guest() {
    support::nested::runs_a_guest();
}

#[test]
fn the_log_of_a_stock_kernel() {
    support::log::log(Kvm);
}

#[test]
fn the_trace_events_of_a_stock_kernel() {
    support::trace::trace(Kvm);
}
