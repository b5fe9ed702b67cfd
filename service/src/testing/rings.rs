// SPDX-License-Identifier: Apache-2.0
//! The trace events of a kernel, in the memory of the guest in memory.

use std::sync::{Arc, Mutex, PoisonError};

use patchbay_guest::guest::Guest;
use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::testing::InMemoryGuest;
use patchbay_observe::testing::rings::{BASE, Rings, Version, Writer};
use static_keys::GuestMemory;

use super::GuestLog;
use super::discovery::found;
use crate::keys::registry::Registry;

/// Returns the payload of an event `test:numbered`.
pub fn numbered(number: u64) -> Vec<u8> {
    let mut payload = vec![7, 0, 0, 0, 42, 0, 0, 0];
    payload.extend_from_slice(&number.to_le_bytes());
    payload.extend_from_slice(b"a task\0\0\0\0\0\0\0\0\0\0");
    payload.extend_from_slice(&(5_u32 << 16 | 40).to_le_bytes());
    payload.extend_from_slice(b"abc\0text\0\0\0\0");
    payload
}

/// Rings of two CPUs in the memory of a guest that has registered.
pub struct GuestRings {
    rings: Mutex<Rings>,
    log: GuestLog,
    ram: GuestRam,
    table: patchbay_memory::paging::PageTable,
}

impl GuestRings {
    /// Puts empty rings with 4 pages each into the guest's memory.
    ///
    /// # Panics
    /// If the guest has not registered.
    pub fn new(guest: &Arc<InMemoryGuest>) -> Self {
        let rings = Rings::new(Version::V6_12, 2, 4);
        let log = GuestLog::new(guest).with_trace(rings.source());
        let own = Self {
            rings: Mutex::new(rings),
            log,
            ram: guest.ram().clone(),
            table: found(guest).page_table,
        };
        own.put(&[], |_| {});
        own
    }

    /// Returns the log of the same kernel.
    pub fn log(&self) -> &GuestLog {
        &self.log
    }

    /// Tells the registry where the rings are, as a discovery does.
    pub fn found_by(&self, registry: &Registry) {
        self.log.found_by(registry);
    }

    /// Writes to the rings.
    ///
    /// # Panics
    /// If the guest's memory does not map the rings.
    pub fn write(&self, write: impl FnOnce(&mut Writer)) {
        let before = {
            let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
            rings.write(|writer| writer.memory().to_vec())
        };
        self.put(&before, write);
    }

    /// Writes to the rings, and copies what differs from `before` to the guest.
    fn put(&self, before: &[u8], write: impl FnOnce(&mut Writer)) {
        let memory = KernelMemory::new(&self.ram, self.table);
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        rings.write(write);
        let after = rings.write(|writer| writer.memory().to_vec());
        for (index, new) in after.chunks(32).enumerate() {
            let at = index * 32;
            if before.get(at..at + new.len()) != Some(new) {
                let place = memory.locate(BASE + at as u64, new.len()).expect("mapped");
                memory.write(place, new).expect("writable");
            }
        }
    }
}
