// SPDX-License-Identifier: Apache-2.0
//! The interface by which the service discovers a kernel that does not register.

use std::fmt::Debug;

use patchbay_memory::{Cpu, PhysicalMemory};

/// A guest whose kernel can be discovered in its memory.
pub trait Discoverable: Send + Sync + Debug {
    /// Returns the guest's memory. It is read while the guest runs.
    fn memory(&self) -> &dyn PhysicalMemory;

    /// Returns the registers of the vCPUs, or `None` from a monitor that never has any and
    /// therefore always returns `None`. The service then searches all memory for the kernel, and
    /// cannot tell it from a kernel that no longer runs.
    ///
    /// # Errors
    /// The reason why the registers are not known now. The guest is not searched.
    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String>;

    /// Returns a number that changes with each known event after which another kernel, or an
    /// earlier state of the same kernel, may run: a reset, or the loading of a snapshot. Earlier
    /// changes are void then.
    fn resets(&self) -> u64;

    /// Returns whether each change must first check that the vCPUs still run the discovered kernel,
    /// because `resets` may change late. A reset leaves the memory of the kernel unchanged, with
    /// all gates open.
    fn confirms(&self) -> bool {
        false
    }

    /// Returns whether the guest is held stopped. It is not searched then, and keeps its
    /// registration.
    fn is_held(&self) -> bool;

    /// Returns the number of times that memory was plugged into the guest or removed from it. The
    /// monitor looks for such a change if something suggests one, or if `anyway` is set.
    fn memory_changes(&self, _anyway: bool) -> u64 {
        0
    }
}
