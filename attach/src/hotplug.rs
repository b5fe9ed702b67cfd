// SPDX-License-Identifier: Apache-2.0
//! Follows memory that is plugged in and removed while the service runs.
//!
//! QEMU does not report `device_add`. So the memory map is read again in three cases: before each
//! discovery, when an access misses memory, and after an event that may have changed the map.
//!
//! `object_del`, which frees the memory, may follow a removal. The memory's address in QEMU's
//! process may then belong to another mapping, and a guest can eject a DIMM at any time. So during
//! each stop, once no vCPU runs, this process checks that KVM still has every region in one slot at
//! its address, or asks QEMU if the host's kernel cannot be read. A region that is not confirmed is
//! no longer accessed. A confirmed DIMM stays until the resume: only a vCPU's write to the ejection
//! register removes it from the guest, and QEMU does not delete the backend of a device. The memory
//! of any other device, such as virtio-mem or ivshmem, can be removed by the monitor alone, so it
//! is only read unless it is shared.

use std::sync::TryLockError;
use std::time::{Duration, Instant};

use patchbay_guest::limited;

use crate::error::AttachError;
use crate::guest::QemuGuest;
use crate::monitor::PATIENCE;

/// Minimum time between two reads of the memory map that are caused only by accesses to missing
/// memory. A guest can cause such accesses at any rate, because its tables may contain any address.
const REST: Duration = Duration::from_secs(1);

/// Records when the memory map was read. Its lock is held during a stop, so that the regions do not
/// change, and while registers are read, so that no stop begins in that time.
#[derive(Debug, Default)]
pub struct Watch {
    events: u64,
    next: Option<Instant>,
}

impl QemuGuest {
    /// Returns the number of changes of the guest's memory for `Discoverable`. Reads the memory
    /// map first if that is due, but not during a stop.
    #[must_use]
    pub fn memory_changes(&self, anyway: bool) -> u64 {
        let mut watch = match self.watch.try_lock() {
            Ok(watch) => watch,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.memory.changes(),
        };
        let events = self.life.memory_events();
        let rests = watch.next.is_some_and(|next| Instant::now() < next);
        let doubted = (anyway || !rests) && self.memory.take_doubt();
        if !anyway && !doubted && watch.events == events {
            return self.memory.changes();
        }
        watch.events = events;
        match self.update_memory() {
            Ok(true) => {
                let bytes = self.memory.bytes();
                limited!(info, bytes, "the guest's memory has changed");
            }
            Ok(false) if doubted && !anyway => watch.next = Some(Instant::now() + REST),
            Ok(false) => {}
            Err(error) => {
                // The map must be read again.
                self.memory.doubt();
                watch.next = Some(Instant::now() + REST);
                limited!(warn, %error, "the map of the guest's memory cannot be read again; the known memory is used, and the map is read again in 1 s");
            }
        }
        self.memory.changes()
    }

    fn update_memory(&self) -> Result<bool, AttachError> {
        let ranges = self.monitor.ram()?;
        self.memory.update(&self.process, ranges, |address| {
            self.monitor.host_address(&(address..address + 1), PATIENCE)
        })
    }
}
