// SPDX-License-Identifier: Apache-2.0
//! A change after planning and before its holds and etags are checked.

use static_keys::{Class, Plan, Update};

use super::holds::KeyInstance;
use super::outcome::LeftOut;
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
    /// The key of each update.
    pub keys: Vec<ResolvedKey>,
    /// Etags that the request gives, each with the index of its op, in ascending order.
    pub etags: Vec<(usize, String)>,
    /// Number of keys of each selection, in order.
    pub selected: Vec<usize>,
    /// Keys that a selection matched and left out, by reason.
    pub left_out: Vec<LeftOut>,
}

/// The facts about a key that a change needs, so that the key is not looked up again.
#[derive(Clone, Copy)]
pub(super) struct ResolvedKey {
    pub instance: KeyInstance,
    pub class: Class,
}
