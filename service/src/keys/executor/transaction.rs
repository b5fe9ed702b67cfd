// SPDX-License-Identifier: Apache-2.0
//! A transaction, and what one attempt at it results in.

use std::sync::Arc;

use static_keys::{Busy, KeyChange};

use crate::keys::audit::IntendedPlan;
use crate::keys::draft::{Draft, Terms};
use crate::keys::error::KeysError;
use crate::keys::gate::ClosedGate;
use crate::keys::outcome::FlipReport;
use crate::keys::planned::Planned;
use crate::keys::request::UpdateRequest;

/// A change of keys in progress.
pub(super) struct Transaction<'a> {
    /// The change. For the release of holds, the executor creates the request itself.
    pub request: &'a UpdateRequest,
    pub terms: Terms,
    /// The prepared plan that is committed, for the audit log.
    pub plan: Option<IntendedPlan<'a>>,
}

/// The reason why an attempt failed.
pub(super) enum Failure {
    /// The guest was busy. Another attempt may succeed.
    Busy(Blocker),
    /// Another attempt would be refused too.
    Refused(KeysError),
}

impl From<Blocker> for Failure {
    fn from(blocker: Blocker) -> Self {
        Self::Busy(blocker)
    }
}

impl From<KeysError> for Failure {
    fn from(error: KeysError) -> Self {
        Self::Refused(error)
    }
}

/// A closed gate, or a change by the guest, that stopped an attempt.
pub(super) struct Blocker {
    pub kind: ClosedGate,
    pub name: String,
    /// True if the blocker stops every change, regardless of the keys.
    pub every_key: bool,
    /// True if another attempt with the same plan cannot succeed, so that a new plan is needed.
    pub outdates_plan: bool,
}

impl Blocker {
    /// Creates the blocker of a call whose time has ended, as `how` describes.
    pub(super) fn time_is_over(how: &str) -> Self {
        Self {
            kind: ClosedGate::RegistrationChanged,
            name: how.to_owned(),
            every_key: true,
            outdates_plan: false,
        }
    }

    /// Returns the error after this many attempts.
    pub(super) fn busy_in(self, attempts: u32) -> KeysError {
        KeysError::Busy {
            kind: self.kind,
            gate: self.name,
            attempts,
            every_key: self.every_key,
        }
    }
}

impl From<&Busy> for Blocker {
    fn from(busy: &Busy) -> Self {
        Self {
            kind: busy.into(),
            name: busy.to_string(),
            every_key: busy.blocks_every_key(),
            outdates_plan: busy.outdates_plan(),
        }
    }
}

/// A transaction that was made, or validated.
pub(super) struct Flip {
    /// One per key, in the order of its first op.
    pub changes: Arc<[KeyChange]>,
    /// The same keys, as instances that outlive the registration, and their holds.
    pub draft: Draft,
    /// Keys that a selection matched and left out.
    pub left_out: usize,
    /// The cost of the change; `None` if it was only validated. The executor fills in `attempts`.
    pub report: Option<FlipReport>,
}

impl Flip {
    /// Creates the outcome of a plan. `draft` contains the holds after the change.
    pub fn new(planned: &Planned, draft: Draft, report: Option<FlipReport>) -> Self {
        Self {
            changes: Arc::clone(planned.plan.changes()),
            draft,
            left_out: planned.resolved.left_out.iter().map(|of| of.count).sum(),
            report,
        }
    }
}
