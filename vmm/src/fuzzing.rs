// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets of the monitor. Each is a function of the fuzzer's bytes and panics if an invariant
//! is broken. libFuzzer calls them from `vmm/fuzz`. A test calls them over the corpus and a few
//! thousand mutations.

use std::sync::Arc;

use patchbay_guest::abi;
use patchbay_guest::fuzzing::{Numbers, Target};
use patchbay_guest::requests::GuestRequests;

use crate::memory::{GuestRam, MEMORY_MIN, PAGE_SIZE};
use crate::request::{HYPERCALL, MSR_INDEX, RequestPort};

pub use crate::devices::virtio::fuzzing::{virtio, vsock};

/// Name and entry point of each fuzz target.
pub const TARGETS: &[(&str, Target)] = &[
    ("hypercalls", hypercalls),
    ("virtio", virtio),
    ("vsock", vsock),
];

/// Makes hypercalls and MSR writes with arbitrary arguments and values.
pub fn hypercalls(data: &[u8]) {
    #[derive(Default)]
    struct Asked(std::sync::Mutex<Vec<u64>>);
    impl GuestRequests for Asked {
        fn attach(&self, _: patchbay_guest::memory::GuestRam) {}

        fn request(&self, op: u32, page: u64) -> i32 {
            self.0.lock().expect("not poisoned").push(page);
            op.cast_signed()
        }
    }
    let mut numbers = Numbers(data);
    let ram = GuestRam::new(MEMORY_MIN).expect("the host has 2 MiB");
    let asked = Arc::new(Asked::default());
    let port = RequestPort::new(ram.clone(), asked.clone());
    for _ in 0..16 {
        if !numbers.more() {
            break;
        }
        let shape = numbers.u8();
        let mut arguments = [0; 6].map(|_: u8| numbers.u64());
        // Most arguments are nearly valid.
        if shape & 1 == 0 {
            arguments[1] = 1;
        }
        if shape & 2 == 0 {
            arguments[2] |= u64::from(abi::HYPERCALL_MAGIC) << 32;
        }
        if shape & 4 == 0 {
            arguments[3] = 0;
        }
        if shape & 8 == 0 {
            arguments[0] &= MEMORY_MIN | (MEMORY_MIN - PAGE_SIZE);
        }
        let (number, index) = match shape & 16 {
            0 => (HYPERCALL, MSR_INDEX),
            _ => (arguments[4], numbers.u32()),
        };
        let by_call = port.decode_hypercall(number, &arguments);
        assert!(by_call.is_none() || number == HYPERCALL);
        let by_msr = port.decode_msr(index, arguments[0]);
        assert_eq!(by_msr.is_some(), index == MSR_INDEX);
        for request in by_call.into_iter().chain(by_msr) {
            let status = port.answer(request);
            let pages = std::mem::take(&mut *asked.0.lock().expect("not poisoned"));
            let inside = request.page.is_multiple_of(PAGE_SIZE) && request.page < MEMORY_MIN;
            if inside {
                assert_eq!(pages, [request.page]);
                assert_eq!(status, request.op.cast_signed());
                let mut page = [0; 4096];
                ram.read(request.page, &mut page).expect("inside");
                assert_eq!(page[12..16], status.to_le_bytes());
                assert!(page[..12].iter().chain(&page[16..]).all(|byte| *byte == 0));
                ram.write(request.page + 12, &[0; 4]).expect("inside");
            } else {
                assert_eq!((&pages[..], status), (&[][..], -libc::EFAULT));
            }
        }
    }
}

#[cfg(test)]
#[path = "../../engine/static-keys/fuzz/src/short_run.rs"]
mod short_run;

#[cfg(test)]
mod tests {
    use super::{TARGETS, short_run};

    short_run::short_runs!(TARGETS, 1500; hypercalls, virtio, vsock);
}
