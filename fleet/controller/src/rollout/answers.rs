// SPDX-License-Identifier: Apache-2.0
//! Defines the outcomes of actions.

use super::state::{Failure, Millis, Record};

/// The outcome of [`super::Action::Claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// Every claim is made.
    Made {
        boot: String,
        /// The record of the guest's service that has the claims; empty if it has no name.
        ledger: String,
        pause_us: u64,
        /// The time after which the claims end by themselves.
        ttl: Option<Millis>,
    },
    /// Nothing is made, because the guest has booted again, and this is its boot.
    Booted {
        boot: String,
    },
    /// The guest has answered, and some claims are not made.
    NotMade {
        /// The guest has a record of at least one of the claims.
        has_claims: bool,
        /// The guest has a record of all of them, and those that are not made have no effect at
        /// present.
        is_ineffective: bool,
        /// The record of the guest's service, as in `Made`.
        ledger: String,
        /// The time after which these end by themselves.
        ttl: Option<Millis>,
        why: String,
    },
    Failed {
        failure: Failure,
        why: String,
    },
    /// The guest has seen this later generation, so the store is older than the guest's state.
    Stale {
        seen: u64,
    },
}

/// The outcome of [`super::Action::Check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The guest's boot; empty if it is not known.
    pub boot: String,
    /// The service's present record; `None` if it has no name.
    pub record: Option<Record>,
    pub claims: FoundClaims,
    /// The number of the rollout's claims that the guest has; `None` if its service does not count
    /// them.
    pub total: Option<usize>,
}

/// The claims of a rollout that a guest has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundClaims {
    None,
    /// Every claim that the guest has is made.
    Made,
    /// Some claims have no effect, for this reason: another claim or a hold decides, the key's
    /// module is not loaded, or the guest or an operator has changed the key.
    Ineffective(String),
    /// A key's module was unloaded and loaded again, so the key has no claim. All other claims are
    /// made, or have no effect for a reason that does not concern their keys.
    Replaced(String),
    /// The service does not tell whether all claims are made.
    Unclear,
}

/// The outcome of [`super::Action::RunGate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateAnswer {
    Passed,
    Failed(String),
    /// The party that was asked is down, or has not answered the question.
    Inconclusive(String),
}

/// The outcome of [`super::Action::Release`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    Released {
        void: bool,
    },
    Failed {
        why: String,
    },
    /// The guest had confirmed the claims, and knows nothing of them any more.
    Unknown,
    /// The same as in [`ClaimOutcome`].
    Stale {
        seen: u64,
    },
}
