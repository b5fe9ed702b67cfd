// SPDX-License-Identifier: Apache-2.0
//! The interface by which the service discovers a kernel that does not register.

use std::fmt::Debug;

use patchbay_memory::{Cpu, PhysicalMemory};

/// A guest whose kernel can be discovered in its memory.
pub trait Discoverable: Send + Sync + Debug {
    /// Returns the guest's memory. It is read while the guest runs.
    fn memory(&self) -> &dyn PhysicalMemory;

    /// Returns the registers of the vCPUs, or `None` if the monitor can never read them. In that
    /// case the service searches all memory for the kernel, and cannot distinguish it from the
    /// remains of a kernel that no longer runs.
    ///
    /// # Errors
    /// The reason why the registers cannot be read now. The service then does not search the guest.
    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String>;

    /// Returns a number that changes when the monitor notices an event after which another kernel,
    /// or an earlier state of the same kernel, may run: a reset, or the loading of a snapshot.
    /// Changes made before such an event are lost.
    fn resets(&self) -> u64;

    /// Returns whether the service must check before each change that the vCPUs still run the
    /// discovered kernel. This is needed if `resets` may change late: a reset leaves the memory of
    /// the kernel unchanged, with all gates open, so no other check would detect it.
    fn confirms(&self) -> bool {
        false
    }

    /// Returns whether this process holds the guest stopped. Meanwhile the service does not search
    /// the guest, and keeps the kernel's registration.
    fn is_held(&self) -> bool;

    /// Returns the number of times that memory was plugged into the guest or removed from it. The
    /// monitor checks for such a change if it has a reason to expect one, or if `anyway` is set.
    fn memory_changes(&self, _anyway: bool) -> u64 {
        0
    }
}
