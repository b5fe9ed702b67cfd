// SPDX-License-Identifier: Apache-2.0
//! A change after planning and before its holds and etags are checked.

use static_keys::{Plan, Update};

use patchbay_guest::kernel_memory::Place;

/// A plan that may be made. Holds and etags are checked at each attempt.
pub(super) struct Planned {
    pub plan: Plan<Place>,
    pub resolved: Resolved,
}

/// The ops of a request, each on one key. A selection is replaced by one op on each of its keys.
#[derive(Default)]
pub(super) struct Resolved {
    /// The updates, in the order of the request. Several may be on the same key.
    pub updates: Vec<Update>,
    /// Etags that the request gives, each with the index of its op, in ascending order.
    pub etags: Vec<(usize, String)>,
    /// Number of keys of each selection, in order.
    pub selected: Vec<usize>,
    /// Keys that a selection matched and left out.
    pub left_out: usize,
}
