// SPDX-License-Identifier: Apache-2.0
//! Work of the engine alone: it reads a kernel's memory on one thread.

use std::sync::Arc;

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_guest::memory::GuestRam;
use patchbay_kernel_image::live::{Finder, Way};
use patchbay_memory::paging::{Levels, PageTable};
use patchbay_observe::testing::rings::{ARRAY, BASE, Rings, Version};
use patchbay_observe::trace::{Page, Rings as Reader, Start};
use patchbay_vmm::memory;

use super::callgrind;
use super::craft_guest;
use super::kernel::{self, MEMORY_BYTES, PAGE_TABLE};
use super::rows::CALLS;

/// The number of events in the ring, of which none is overwritten.
pub const EVENTS: u64 = 2000;
/// The size of an event's payload, which is about that of sched_switch.
const PAYLOAD: usize = 64;
/// The number of pages of the ring.
const PAGES: usize = 63;
const WARM_UP: u64 = 3;
const TURNS: u64 = WARM_UP + CALLS;

/// The work that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads events from a ring in the guest's memory, and finds their payloads.
    Ring,
    /// Discovers a small kernel for the first time.
    Discovery,
    /// Discovers the same kernel again.
    Rediscovery,
    /// Checks that the vCPUs still run the kernel.
    Confirmation,
}

/// Does the work: uncounted turns, and as many counted ones as a call has.
pub fn perform(work: Work) {
    match work {
        Work::Ring => ring(),
        _ => discovery(work),
    }
}

/// Does the work, and counts it after the uncounted turns.
fn counted(turn: u64, work: impl FnOnce()) {
    if turn < WARM_UP {
        return work();
    }
    callgrind::start();
    work();
    callgrind::stop();
}

fn ring() {
    let ram = memory::GuestRam::new(MEMORY_BYTES).expect("memory");
    kernel::map(&ram);
    let rings = Rings::new(Version::V6_12, 1, PAGES);
    for number in 0..EVENTS {
        let mut payload = [0; PAYLOAD];
        payload[8..16].copy_from_slice(&number.to_le_bytes());
        rings.write(|writer| writer.event(0, 1000 * number, &payload));
    }
    rings.write(|writer| kernel::write(&ram, BASE, writer.memory()));
    let table = PageTable {
        root: PAGE_TABLE,
        levels: Levels::Four,
    };
    let ram: GuestRam = Arc::new(ram);
    let memory = KernelMemory::new(&ram, table);
    for turn in 0..TURNS {
        let mut reader = Reader::new(rings.source(), ARRAY, Start::Oldest);
        let (mut events, mut lost) = (0, 0);
        counted(turn, || {
            let batch = reader.poll(&memory, 1 << 20);
            lost += batch.lost;
            for chunk in &batch.chunks {
                let page = Page::parse(&chunk.page).expect("a page");
                events += page.events().filter(|event| event.is_ok()).count() as u64;
            }
        });
        assert_eq!((events, lost), (EVENTS, 0));
    }
}

fn discovery(work: Work) {
    let guest = craft_guest::guest();
    for turn in 0..TURNS {
        let mut finder = Finder::default();
        if work != Work::Discovery {
            let found = finder.find(&guest, &guest.cpus, Way::Image);
            assert!(!found.expect("a kernel").evidence.again);
        }
        counted(turn, || match work {
            Work::Confirmation => {
                let confirmed = finder.confirm(&guest, &guest.cpus);
                confirmed.expect("the same kernel");
            }
            _ => {
                let found = finder.find(&guest, &guest.cpus, Way::Image);
                let is_again = found.expect("a kernel").evidence.again;
                assert_eq!(is_again, work == Work::Rediscovery);
            }
        });
    }
}
