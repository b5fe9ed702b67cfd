// SPDX-License-Identifier: Apache-2.0
//! Verifies that sites do what their keys' counts say, and repairs keys of which they do not.
//!
//! A process that changes keys in a guest of another monitor may die in the middle of a change, and
//! so may the watchdog that rolls the change back. A later discovery names the keys that are torn,
//! and serves all others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::guest::Guest;
use patchbay_guest::memory::GuestRam;
use static_keys::{Branch, Key, KeyId, NotPatchable, Op, Patterns, Plan, PlanError, count_users};

use super::flip::{Blocker, Failure, Transaction, refused};
use super::opening::await_opening;
use super::standstill::Standstill;
use super::{Command, Executor, Reply};
use crate::keys::audit::{AuditOutcome, AuditedChange, IntendedKeys, IntendedOp, Intent};
use crate::keys::draft::{Drops, Terms};
use crate::keys::error::KeysError;
use crate::keys::registry::{Registration, Snapshot};
use crate::keys::{FlipReport, KeyUpdate, Keys, Quarantine, QuarantineCause};

/// Maximum number of torn keys in an answer.
pub const MAX_TORN: usize = 1000;
/// Looks at a key that seems torn: the guest may be changing it.
const LOOKS: usize = 4;
/// Time between two looks. A change of one of the guest's own keys takes milliseconds.
const INTERVAL: Duration = Duration::from_millis(5);

/// What a verification of keys found.
#[derive(Clone, Debug, Default)]
pub struct Verification {
    /// Number of keys that were looked at.
    pub keys: usize,
    /// Number of their sites that can be patched, or should be.
    pub sites: usize,
    /// The torn keys, at most [`MAX_TORN`].
    pub torn: Vec<TornKey>,
    /// Number of all torn keys.
    pub torn_total: usize,
    /// The journal's newest revision before the verification.
    pub revision: u64,
}

/// A key whose sites do not do what its count says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornKey {
    /// "name" or "module:name".
    pub name: Arc<str>,
    /// `static_key_count()`.
    pub count: i32,
    /// Sites that do what the other state would do.
    pub contrary: u32,
    /// Sites that hold neither their NOP nor their JMP.
    pub foreign: u32,
}

/// A request to repair a key.
#[derive(Clone, Debug)]
pub struct RepairRequest {
    /// "name" or "module:name".
    pub name: String,
    /// "uid:N".
    pub principal: String,
    /// Reason, for the audit log.
    pub reason: String,
    /// Check only.
    pub validate_only: bool,
    /// Time that the vCPUs have to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
}

/// What a repair wrote, or would write.
#[derive(Clone, Debug, Default)]
pub struct RepairOutcome {
    /// "name" or "module:name".
    pub name: Arc<str>,
    /// The key's count, which stays.
    pub count: i32,
    /// The sites, by address.
    pub sites: Vec<RepairedSite>,
    /// What the repair cost; `None` if nothing was written.
    pub report: Option<FlipReport>,
}

/// A site of a [`RepairOutcome`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairedSite {
    /// Guest-virtual address.
    pub address: u64,
    /// The bytes that it held.
    pub before: Vec<u8>,
    /// The bytes that the count asks for.
    pub after: Vec<u8>,
}

impl Registration {
    /// Returns the key's disagreement between sites and count, as memory is now; `None` if they
    /// agree, or the guest is changing them.
    fn torn(&self, ram: &GuestRam, key: &Key, sites: &mut usize) -> Option<TornKey> {
        let memory = self.memory(ram);
        let count = self.catalog.enabled(&memory, key.id).ok()?;
        if count < 0 {
            return None;
        }
        let mut torn = TornKey {
            name: Arc::clone(&key.full_name),
            count: count_users(count),
            contrary: 0,
            foreign: 0,
        };
        for site in self.catalog.sites(&memory, key.id) {
            match (&site.patchable, site.branch) {
                (Ok(()), Some(branch)) => {
                    *sites += 1;
                    torn.contrary += u32::from(branch != Branch::of(count > 0, site.likely));
                }
                (Err(NotPatchable::Foreign), _) => {
                    *sites += 1;
                    torn.foreign += 1;
                }
                _ => {}
            }
        }
        (torn.contrary + torn.foreign > 0).then_some(torn)
    }

    /// The quarantine of a key that a discovery found torn, for as long as it is.
    pub(in crate::keys) fn torn_quarantine(&self, ram: &GuestRam, key: &Key) -> Option<Quarantine> {
        let discovery = self.discovery.as_ref()?;
        if !discovery.torn.contains(&key.id) {
            return None;
        }
        let torn = self.torn(ram, key, &mut 0)?;
        Some(Quarantine {
            cause: QuarantineCause::UndoIncomplete,
            message: format!("{}; repair it (patchbay keys repair)", torn.sentence()),
        })
    }
}

impl TornKey {
    /// Says how sites and count disagree.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self {
            count,
            contrary,
            foreign,
            ..
        } = self;
        format!(
            "its count is {count}, {contrary} of its sites do what the other state would do, and {foreign} hold neither their NOP nor their JMP"
        )
    }
}

impl Keys {
    /// Compares every site of the keys that match with the key's count, while the guest runs. Waits
    /// for milliseconds if a key seems torn; not to be called on a thread that serves other tasks.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`].
    pub fn verify(&self, patterns: &Patterns) -> Result<Verification, KeysError> {
        let mut verification = Verification {
            revision: self.revision(),
            ..Verification::default()
        };
        let Snapshot { registration, .. } = self.registry().snapshot()?;
        let ram = self.ram()?;
        let mut suspects: Vec<KeyId> = Vec::new();
        for key in registration.catalog.keys() {
            if patterns.select(key.module(), key.name()) {
                verification.keys += 1;
                let torn = registration.torn(ram, key, &mut verification.sites);
                suspects.extend(torn.map(|_| key.id));
            }
        }
        let mut torn = Vec::new();
        for look in 1..LOOKS {
            if suspects.is_empty() {
                break;
            }
            std::thread::sleep(INTERVAL);
            torn.clear();
            suspects.retain(|id| {
                let key = registration.catalog.key(*id);
                let still = key.and_then(|key| registration.torn(ram, key, &mut 0));
                let is_torn = still.is_some();
                torn.extend(still.filter(|_| look == LOOKS - 1));
                is_torn
            });
        }
        verification.torn_total = torn.len();
        torn.truncate(MAX_TORN);
        verification.torn = torn;
        Ok(verification)
    }

    /// Writes to the sites of a key what its count asks for.
    ///
    /// # Errors
    /// [`KeysError`]; FOREIGN_BYTES if a site holds no mixture of its NOP and its JMP.
    pub async fn repair(&self, request: RepairRequest) -> Result<RepairOutcome, KeysError> {
        self.ask(|reply| Command::Repair(Box::new(request), reply))
            .await
    }
}

impl<G: Guest> Executor<G> {
    /// Serves [`Keys::repair`].
    pub(super) fn repair<'g>(
        &mut self,
        request: &RepairRequest,
        reply: &Reply<RepairOutcome>,
        standstill: &mut Standstill<'g, G>,
    ) -> Result<RepairOutcome, KeysError> {
        // Its op is not made: the plan is that of a repair.
        let updates = [KeyUpdate::new(&*request.name, Op::Enable)];
        let transaction = Transaction {
            updates: &updates,
            terms: Terms::new(&request.principal, &request.reason, Drops::of(false), None),
            plan: None,
            allow_guarded: true,
            validate_only: request.validate_only,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
            request_id: "",
            summary_only: false,
        };
        let mut intent = None;
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            executor.attempt_repair(&transaction, &request.name, standstill, &mut intent)
        };
        let cancelled = || reply.is_closed();
        let result = self.persist(request.deadline, standstill, cancelled, attempt);
        if let Some(id) = intent {
            let outcome = match &result {
                Ok((outcome, _)) => AuditOutcome::Committed {
                    changes: vec![AuditedChange {
                        key: &outcome.name,
                        before: outcome.count,
                        after: outcome.count,
                        sites: u32::try_from(outcome.sites.len()).unwrap_or(u32::MAX),
                    }],
                },
                Err(error) => AuditOutcome::Failed {
                    reason: error.reason(),
                    error: error.to_string(),
                },
            };
            self.audit.outcome(id, &outcome);
        }
        let (mut outcome, attempts) = result?;
        outcome.report = outcome
            .report
            .map(|report| FlipReport { attempts, ..report });
        Ok(outcome)
    }

    fn attempt_repair(
        &mut self,
        transaction: &Transaction<'_>,
        name: &str,
        standstill: &mut Standstill<'_, G>,
        intent: &mut Option<u64>,
    ) -> Result<RepairOutcome, Failure> {
        let snapshot = self.snapshot()?;
        let registration = &*snapshot.registration;
        let key = registration.find(name)?;
        let memory = registration.memory(self.guest.ram());
        let left = transaction
            .deadline
            .saturating_duration_since(Instant::now());
        let planned = await_opening(left, || {
            Plan::repair(&registration.catalog, &memory, key.id)
        });
        let plan = match planned {
            Ok(plan) => plan,
            Err(PlanError::Busy(busy)) => {
                registration.check_refused(&busy)?;
                return Err(Blocker::from(&busy).into());
            }
            Err(error) => return Err(refused(&error).into()),
        };
        let sites = plan.sites().map(|site| RepairedSite {
            address: site.address,
            before: site.before.to_vec(),
            after: site.after.to_vec(),
        });
        let mut outcome = RepairOutcome {
            name: Arc::clone(&key.full_name),
            count: plan.changes().next().map_or(0, |change| change.before),
            sites: sites.collect(),
            report: None,
        };
        if transaction.validate_only {
            return Ok(outcome);
        }
        if !outcome.sites.is_empty() {
            let plan = self.check_text_checker(registration, plan)?;
            if intent.is_none() {
                *intent = Some(self.audit.intent(&Intent {
                    owner: transaction.terms.holder(),
                    reason: transaction.terms.reason(),
                    request_id: transaction.request_id,
                    force: false,
                    plan: None,
                    updates: vec![IntendedOp {
                        keys: IntendedKeys::Name { key: name },
                        op: "repair",
                    }],
                    declared: Vec::new(),
                })?);
            }
            outcome.report = Some(self.change(transaction, &snapshot, &plan, standstill)?);
        }
        // Every site was looked at and does what the count says.
        let instance = registration.instance(key);
        self.shared.book().quarantine.remove(&instance);
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests;
