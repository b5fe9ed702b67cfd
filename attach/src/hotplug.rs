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

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use patchbay_guest::limited;
use patchbay_guest::pause::PauseError;

use crate::error::AttachError;
use crate::guest::{QemuGuest, unable};
use crate::monitor::MAP_PATIENCE;

/// Minimum time between two reads of the memory map that are caused only by accesses to missing
/// memory. A guest can cause such accesses at any rate, because its tables may contain any address.
const REST: Duration = Duration::from_secs(1);
/// Time between two attempts of a pause to take the lock.
const POLL: Duration = Duration::from_millis(1);

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
        let deadline = Instant::now() + MAP_PATIENCE;
        let ranges = self.monitor.ram(deadline)?;
        self.memory
            .update(&self.process, ranges, deadline, |address| {
                self.monitor.host_address(&(address..address + 1), deadline)
            })
    }
}

/// Takes the lock for a pause. Waits at most `patience`, because the monitor decides how long a
/// read of the memory map or of the registers takes.
///
/// # Errors
/// [`PauseError::Unable`].
pub(crate) fn lock_within(
    watch: &Mutex<Watch>,
    patience: Duration,
) -> Result<MutexGuard<'_, Watch>, PauseError> {
    let deadline = Instant::now() + patience;
    loop {
        match watch.try_lock() {
            Ok(watch) => return Ok(watch),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(POLL);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(unable(format!(
                    "the map of the guest's memory or the registers are still being read after {patience:?}, so the guest is not stopped; \
                     try again, and check whether the guest's monitor hangs"
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::PATIENCE;

    #[test]
    fn a_pause_does_not_wait_for_the_map_without_limit() {
        let watch = Mutex::new(Watch::default());
        let held = watch.lock().expect("no panic");
        let error = lock_within(&watch, Duration::ZERO).expect_err("held");
        assert!(error.to_string().contains("being read"), "{error}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock_within(&watch, PATIENCE).map(drop));
            drop(held);
            let locked = waiting.join().expect("no panic");
            locked.expect("it is released in time");
        });
    }
}
