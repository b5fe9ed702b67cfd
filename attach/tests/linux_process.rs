// SPDX-License-Identifier: Apache-2.0
//! Tests a stock kernel in monitors that do not cooperate.

mod support;

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_firecracker() {
    support::foreign::firecracker().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_cloud_hypervisor() {
    support::foreign::cloud_hypervisor().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_libkrun() {
    support::foreign::libkrun().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_qemu() {
    support::foreign::qemu().await;
}
