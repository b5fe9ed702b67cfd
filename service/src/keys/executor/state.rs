// SPDX-License-Identifier: Apache-2.0
//! The state of the executor thread.

use std::sync::Arc;

use patchbay_guest::guest::Guest;

use super::claim_end::Ending;
use super::ledger::Keeper;
use crate::keys::audit::AuditLog;
use crate::keys::estimate::PauseEstimate;
use crate::keys::holds::KeyInstance;
use crate::keys::outcome::UpdateOutcome;
use crate::keys::plans::Plans;
use crate::keys::replay::Replay;
use crate::keys::shared::Shared;

const REPLAYED_ANSWERS: usize = 1024;
const REPLAYED_RESULTS: usize = 1 << 18;

/// The changes that the monitor permits beyond the usual ones.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::keys) struct Settings {
    /// Guarded keys may be changed.
    pub allow_guarded: bool,
    /// Sites may be changed in a guest that checks its kernel's text.
    pub allow_text_checker: bool,
}

/// State of the executor thread.
pub(in crate::keys) struct Executor<G: Guest> {
    pub guest: Arc<G>,
    pub shared: Arc<Shared>,
    pub audit: AuditLog,
    pub replay: Replay<UpdateOutcome>,
    /// Boot that the replayed answers belong to.
    pub replayed_boot: Option<u64>,
    pub settings: Settings,
    /// Version of the registration at the last removal of holds on keys that no longer exist.
    pub pruned: u64,
    pub(super) expiries: Expiries,
    pub plans: Plans,
    /// The file that keeps claims and holds.
    pub(super) ledger: Keeper,
    /// Pauses of earlier changes.
    pub pauses: PauseEstimate,
}

/// Keys with expired holds and claims, in batches that are tried one by one.
#[derive(Debug, Default)]
pub(super) struct Expiries {
    pub batches: Vec<Vec<KeyInstance>>,
    /// Keys on which claims end.
    pub endings: Vec<Ending>,
    /// The next turn is that of claims. Holds and claims take turns.
    pub is_claims_turn: bool,
}

impl<G: Guest> Executor<G> {
    /// Creates the state of a thread that has changed nothing yet.
    pub fn new(guest: Arc<G>, shared: Arc<Shared>, audit: AuditLog, settings: Settings) -> Self {
        Self {
            guest,
            shared,
            audit,
            replay: Replay::new(REPLAYED_ANSWERS, REPLAYED_RESULTS),
            replayed_boot: None,
            settings,
            pruned: 0,
            expiries: Expiries::default(),
            plans: Plans::default(),
            ledger: Keeper::default(),
            pauses: PauseEstimate::default(),
        }
    }

    /// Keeps claims and holds in this ledger.
    #[must_use]
    pub fn keeping(mut self, ledger: Keeper) -> Self {
        self.ledger = ledger;
        self
    }
}
