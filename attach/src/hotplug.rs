// SPDX-License-Identifier: Apache-2.0
//! Memory that is plugged in and removed while the service runs.
//!
//! QEMU does not report `device_add`. So the flat view is read again before each discovery, when the guest's memory does not have an
//! address that was asked for, and after an event that may mean another view.
//!
//! A removal may be followed by `object_del`, which frees the memory. Its address in QEMU's process may then be another mapping's,
//! and a guest ejects a DIMM when it likes. So each stop asks, once no vCPU runs, whether QEMU still has every removable region where
//! it was, and what is not confirmed is not accessed any more. A DIMM that was there then stays until the resume: only a vCPU's write
//! to the ejection register removes it from the guest, and QEMU does not delete the backend of a device. The monitor alone can remove
//! the memory of any other device, such as virtio-mem or ivshmem, so what is not shared of it is read and not written.

use std::sync::TryLockError;
use std::time::{Duration, Instant};

use patchbay_service::limited;

use crate::error::AttachError;
use crate::guest::QemuGuest;
use crate::monitor::PATIENCE;

/// Minimum time between two looks that only missing memory causes: a guest can name any address.
const REST: Duration = Duration::from_secs(1);

/// When the flat view was read. Held during a stop, so that the regions stay as they are, and while QEMU is asked for registers, so
/// that no stop begins then.
#[derive(Debug, Default)]
pub struct Watch {
    events: u64,
    next: Option<Instant>,
}

impl QemuGuest {
    /// As `Discoverable` asks for it. During a stop it does not look.
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
                // Another look is due.
                self.memory.doubt();
                watch.next = Some(Instant::now() + REST);
                limited!(warn, %error, "the guest's memory cannot be read from QEMU again; the known memory is used, and QEMU is asked again in 1 s");
            }
        }
        self.memory.changes()
    }

    fn update_memory(&self) -> Result<bool, AttachError> {
        let ranges = self.monitor.ram()?;
        self.memory.update(&self.process, ranges, |address| {
            self.monitor.host_address(address, PATIENCE)
        })
    }
}
