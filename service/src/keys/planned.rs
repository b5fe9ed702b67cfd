// SPDX-License-Identifier: Apache-2.0
//! A change as it is planned, before its holds and etags are checked.

use static_keys::{Op, Plan, Update};

use super::holds::KeyInstance;
use patchbay_guest::kernel_memory::Place;

/// A plan that may be made. Holds and etags are checked at each attempt.
pub(super) struct Planned {
    pub plan: Plan<Place>,
    pub resolved: Resolved,
}

/// The ops of a request.
#[derive(Default)]
pub(super) struct Resolved {
    /// In the order of the request.
    pub ops: Vec<PlannedOp>,
    /// Number of keys of each selection, in order.
    pub selected: Vec<usize>,
    /// Keys that a selection matched and left out.
    pub left_out: usize,
}

/// One op on one key.
pub(super) struct PlannedOp {
    pub key: KeyInstance,
    pub op: Op,
    pub is_tracepoint: bool,
    /// `None` skips the check.
    pub etag: Option<String>,
}

impl PlannedOp {
    /// Returns the op for the engine.
    pub fn update(&self) -> Update {
        Update {
            key: self.key.id,
            op: self.op,
        }
    }
}
