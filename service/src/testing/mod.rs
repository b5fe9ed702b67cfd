// SPDX-License-Identifier: Apache-2.0
//! Parts of the service for tests without KVM, beside the guest in memory
//! ([`patchbay_guest::testing`]).

mod clock;
#[cfg(test)]
mod conformance_tests;
mod discovery;
mod log;
mod rings;

pub use self::clock::ManualClock;
pub use self::discovery::{Discovered, discovered_after, found, found_after};
pub use self::log::GuestLog;
pub use self::rings::GuestRings;

use crate::keys::{Keys, Registry};

/// Returns the registry of a service that was started.
#[must_use]
pub fn registry(keys: &Keys) -> &Registry {
    keys.registry()
}
