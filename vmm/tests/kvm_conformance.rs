// SPDX-License-Identifier: Apache-2.0

//! Runs the conformance suite of the service's traits on the monitor, with a guest that consists of
//! one branch site.

mod bare_metal;

use std::sync::Arc;

use bare_metal::{branch_guest, counters, watchdog};
use patchbay_service::guest::Guest;
use patchbay_service::testing::conformance;
use patchbay_vmm::guest::VmGuest;

const VCPUS: u8 = 2;
/// End of the branch guest's memory, and two unused pages in it.
const END: u64 = 4 << 20;
const SCRATCH: u64 = 3 << 20;

fn guest() -> Option<(Arc<VmGuest>, impl Fn() -> Vec<u64>)> {
    let vm = Arc::new(branch_guest(VCPUS)?);
    let guest = Arc::new(VmGuest::new("conformance".to_owned(), Arc::clone(&vm)));
    let progress = move || {
        let rounds = |vcpu| counters(vm.ram(), vcpu).not_taken;
        (0..VCPUS).map(rounds).collect()
    };
    Some((guest, progress))
}

#[test]
fn memory() {
    let Some((guest, _)) = guest() else { return };
    conformance::memory(guest.ram(), SCRATCH, END);
}

#[test]
fn pause() {
    let _watchdog = watchdog(120);
    let Some((guest, progress)) = guest() else {
        return;
    };
    conformance::pause(&*guest, progress);
}

#[test]
fn lifecycle() {
    let _watchdog = watchdog(120);
    let Some((guest, _)) = guest() else { return };
    conformance::lifecycle(&guest);
}
