// SPDX-License-Identifier: Apache-2.0
//! The requests by which a guest's kernel registers its keys.

use crate::memory::GuestRam;

/// Handler of a guest's requests: the key service, or a test.
pub trait GuestRequests: Send + Sync {
    /// Passes the guest's memory, which contains the pages of the requests, to the handler. The
    /// monitor calls this before the guest's first request. Only the first call has an effect.
    fn attach(&self, ram: GuestRam);

    /// Handles operation `op` (`PATCHBAY_OP_*`, unchecked) with the page of guest memory at `page`.
    /// The page is aligned and wholly in memory; its contents are unchecked.
    ///
    /// Runs on the vCPU's thread, which cannot be paused meanwhile. An implementation must not wait
    /// for anything that itself waits for a pause.
    ///
    /// Returns 0 or a negative errno. The guest gets this value as the call's result and in the
    /// page's header.
    fn request(&self, op: u32, page: u64) -> i32;
}
