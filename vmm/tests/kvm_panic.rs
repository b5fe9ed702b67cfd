// SPDX-License-Identifier: Apache-2.0

//! A panic in the monitor ends the guest with a message.

mod bare_metal;

use std::sync::Arc;
use std::time::Duration;

use bare_metal::{CODE, branch_code, raw, spinning, started, watchdog};
use patchbay_vmm::config::RawEntry;
use patchbay_vmm::devices::PortDevice;
use patchbay_vmm::pause::PauseError;
use patchbay_vmm::request::NoRequests;
use patchbay_vmm::seccomp::{self, SeccompLevel};
use patchbay_vmm::vm::ExitReason;

const PORT: u16 = 0x500;

/// A device that panics.
struct Buggy;

impl PortDevice for Buggy {
    fn read(&self, _port: u16, _data: &mut [u8]) {}

    fn write(&self, _port: u16, data: &[u8]) {
        panic!("no such command: {data:?}");
    }
}

#[test]
fn a_panic_on_a_vcpu_thread_ends_the_guest_with_its_message() {
    let _watchdog = watchdog(60);
    // Filters are enforced as in the monitor, because the panic is reported under a filter.
    seccomp::enforce(SeccompLevel::On);
    let mut image = branch_code();
    // mov dx, PORT; mov al, 7; out dx, al
    image[..7].copy_from_slice(&[0x66, 0xba, 0, 5, 0xb0, 7, 0xee]);
    let first = RawEntry {
        rip: CODE,
        user_mode: false,
        ..spinning(0)
    };
    let mut config = raw(image, vec![Some(first), Some(spinning(1))]);
    config.ports = vec![(PORT..=PORT, Arc::new(Buggy))];
    let Some(vm) = started(config, Arc::new(NoRequests)) else {
        return;
    };
    // Until the panic, each pause stops the running vCPUs, and none is late.
    let error = loop {
        match vm.pause(Duration::from_secs(30)) {
            Ok(paused) => drop(paused),
            Err(error) => break error,
        }
    };
    assert_eq!(error, PauseError::Ended);
    match vm.wait() {
        ExitReason::Failed(why) => {
            assert!(
                why.contains("vCPU 0 panicked: no such command: [7]"),
                "{why}"
            );
        }
        other => panic!("{other:?}"),
    }
    vm.shutdown();
}
