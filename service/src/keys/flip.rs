// SPDX-License-Identifier: Apache-2.0
//! One attempt at a transaction: resolve, plan, stop, verify, commit, resume.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_proto::v1;
use static_keys::{
    CommitError, KeyChange, Options, Plan, PlanError, RunningError, Update, VerifyError,
};

use super::address_space::{KernelMemory, Place};
use super::draft::{Draft, Terms};
use super::error::KeysError;
use super::owner::{Owner, event_of};
use super::registry::{Instances, Registration, Snapshot};
use super::selection::{KeyOp, Resolved};
use super::{KeyUpdate, etag, to_proto};
use crate::guest::{Guest, PausedGuest};

/// What is asked for.
pub(super) struct Transaction<'a> {
    pub updates: &'a [KeyUpdate],
    pub terms: Terms,
    pub allow_guarded: bool,
    pub validate_only: bool,
    pub stop_timeout: Duration,
    pub deadline: Instant,
    pub request_id: &'a str,
    pub summary_only: bool,
}

/// How an attempt ended that was not refused.
pub(super) enum Attempt {
    Done(Flip),
    /// What was in the way; another attempt may find it gone.
    Busy(String),
}

/// A transaction that was made, or validated.
pub(super) struct Flip {
    pub generation: u64,
    /// One per key, in the order of its first op.
    pub changes: Vec<KeyChange>,
    pub draft: Draft,
    /// Keys that selections matched and left out.
    pub left_out: usize,
    /// None if it was only validated. `attempts` is left to the owner.
    pub report: Option<v1::FlipReport>,
}

/// How long is tried to give back a reference that only a stopped guest can be without.
const GIVE_BACK_TIME: Duration = Duration::from_secs(1);
const BETWEEN_GIVING_BACK: Duration = Duration::from_millis(1);

/// Why the guest runs on without the change: as it was found, to be worded once it runs.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    /// The registration has changed since the plan.
    #[error("the guest's registration or modules have changed")]
    Version,
    #[error("a breakpoint exception is pending on a vCPU: the guest patches its text")]
    Breakpoint,
    /// Trying again does not help.
    #[error(
        "the guest's monitor cannot tell where the vCPUs stopped; change the key from inside the guest"
    )]
    Unseen,
    #[error(transparent)]
    Verify(VerifyError),
    #[error(transparent)]
    Commit(CommitError),
    /// Only a stopped guest can be without what was changed.
    #[error("the guest counts on key {key}; {} references are left over", .left.len())]
    Entangled { key: Arc<str>, left: Vec<Update> },
}

impl From<RunningError> for Obstacle {
    fn from(error: RunningError) -> Self {
        match error {
            RunningError::Raced(error) => Self::Verify(error),
            RunningError::Failed(error) => Self::Commit(error),
            RunningError::Entangled { key, left } => Self::Entangled { key, left },
        }
    }
}

impl<G: Guest> Owner<G> {
    /// One way from check to report.
    pub(super) fn attempt(
        &mut self,
        transaction: &Transaction<'_>,
        held: Option<&G::Paused<'_>>,
        intent: &mut Option<u64>,
    ) -> Result<Attempt, KeysError> {
        if self.guest.has_ended() {
            return Err(KeysError::GuestStopped);
        }
        let snapshot = self.shared.registry.snapshot()?;
        let registration = &*snapshot.registration;
        let memory = registration.memory(self.guest.ram());
        let resolved = self.resolve(registration, transaction)?;
        let updates = resolved.ops.iter().map(|op| Update {
            key: op.key.id,
            op: op.op,
        });
        let updates: Vec<Update> = updates.collect();
        let options = Options {
            allow_guarded: transaction.allow_guarded && self.allow_guarded,
        };
        if self.pruned != snapshot.version {
            // Holds on keys that are gone.
            let mut book = self.shared.book();
            book.holds.retain(|key| registration.has(key));
            self.pruned = snapshot.version;
        }
        let plan = match Plan::new(&registration.catalog, &memory, &updates, &options) {
            Ok(plan) => plan,
            Err(PlanError::Busy(busy)) => return Ok(Attempt::Busy(busy.to_string())),
            Err(error) => return Err(refused(transaction, &error)),
        };
        let draft = self.follow(registration, transaction, &resolved.ops, &plan)?;
        let flip = |plan: Plan<Place>, report| Flip {
            generation: registration.generation,
            changes: plan.into_changes(),
            draft,
            left_out: resolved.left_out,
            report,
        };
        if transaction.validate_only {
            return Ok(Attempt::Done(flip(plan, None)));
        }
        self.intend(transaction, &resolved.selected, intent)?;
        let left = transaction
            .deadline
            .saturating_duration_since(Instant::now());
        let patience = transaction.stop_timeout.min(left);
        match self.make(patience, &snapshot, &memory, &plan, held)? {
            Ok(report) => Ok(Attempt::Done(flip(plan, Some(report)))),
            Err(Obstacle::Verify(VerifyError::Busy(busy))) => Ok(Attempt::Busy(busy.to_string())),
            Err(
                obstacle @ (Obstacle::Version
                | Obstacle::Breakpoint
                | Obstacle::Verify(VerifyError::Fault(_))),
            ) => Ok(Attempt::Busy(obstacle.to_string())),
            Err(obstacle @ Obstacle::Unseen) => Err(KeysError::KeyRefused {
                key: String::new(),
                reason: "VCPUS_UNKNOWN",
                message: obstacle.to_string(),
            }),
            Err(Obstacle::Verify(VerifyError::ForeignBytes { ref key, .. }))
                if registration.catalog.find(key).is_none() =>
            {
                Ok(Attempt::Busy(format!("key {key} is gone")))
            }
            Err(Obstacle::Verify(error)) => Err(self.quarantine(registration, &error)),
            Err(Obstacle::Commit(error)) => Err(KeysError::WriteFault {
                message: error.to_string(),
            }),
            Err(Obstacle::Entangled { key, left }) => {
                self.take_back(registration, transaction, held, left)?;
                let gate = format!("the guest counts on key {key}");
                Ok(Attempt::Busy(gate))
            }
        }
    }

    /// The keys of the updates; none of them quarantined.
    fn resolve<'a>(
        &self,
        registration: &'a Registration,
        transaction: &Transaction<'a>,
    ) -> Result<Resolved<'a>, KeysError> {
        let resolved = Resolved::new(registration, transaction.updates, transaction.allow_guarded)?;
        let book = self.shared.book();
        if book.quarantine.is_empty() {
            return Ok(resolved);
        }
        for KeyOp { key, .. } in &resolved.ops {
            if let Some(why) = book.quarantine.get(&registration.instance(key)) {
                return Err(KeysError::KeyRefused {
                    key: key.full_name.to_string(),
                    reason: "KEY_QUARANTINED",
                    message: format!(
                        "key {} is quarantined ({why}); {}",
                        key.full_name,
                        way_out(key.module())
                    ),
                });
            }
        }
        Ok(resolved)
    }

    /// Checks etags and holds against the counts that were planned with; answers what becomes of the
    /// holds.
    fn follow(
        &self,
        registration: &Registration,
        transaction: &Transaction<'_>,
        ops: &[KeyOp<'_>],
        plan: &Plan<Place>,
    ) -> Result<Draft, KeysError> {
        let changes: Vec<&KeyChange> = plan.changes().collect();
        let mut instances = Instances::of(registration);
        let book = self.shared.book();
        let mut draft = Draft::with_capacity(changes.len());
        for (
            KeyOp {
                key,
                op,
                etag: given,
            },
            &index,
        ) in ops.iter().zip(plan.folded())
        {
            // Before all ops, which an etag stands for as well.
            let count = changes[index].before;
            if !given.is_empty() {
                let current = etag(registration.generation, count);
                if *given != current {
                    let (key, given) = (key.full_name.to_string(), (*given).to_owned());
                    return Err(KeysError::EtagMismatch {
                        key,
                        given,
                        current,
                        count,
                    });
                }
            }
            if index == draft.len() {
                draft.open(&book.holds, instances.instance(key), count);
            }
            draft.follow(index, &key.full_name, *op, &transaction.terms)?;
        }
        Ok(draft)
    }

    /// Makes a plan: beside the running guest if it needs no pause, else by pause, verify, commit,
    /// resume.
    fn make(
        &self,
        patience: Duration,
        snapshot: &Snapshot,
        memory: &KernelMemory,
        plan: &Plan<Place>,
        held: Option<&G::Paused<'_>>,
    ) -> Result<Result<v1::FlipReport, Obstacle>, KeysError> {
        if !plan.needs_pause() {
            let made = plan.commit_running(memory);
            return Ok(made.map(|_| v1::FlipReport::default()).map_err(Into::into));
        }
        if let Some(held) = held {
            let began = Instant::now();
            let made = self.verify_and_commit(snapshot, memory, plan, held);
            let patch = began.elapsed();
            return Ok(
                made.map(|outcome| flip_report(outcome, Duration::ZERO, patch, Duration::ZERO))
            );
        }
        // A look at the running guest: a gate that has closed since the plan was made costs it no stop.
        if let Err(error @ VerifyError::Busy(_)) = plan.verify_gates(memory) {
            return Ok(Err(Obstacle::Verify(error)));
        }
        let paused = self.guest.pause(patience)?;
        // From here to the drop the guest stands still: nothing that allocates, logs or takes a lock.
        let stopped = Instant::now();
        let made = self.verify_and_commit(snapshot, memory, plan, &paused);
        let patched = Instant::now();
        let stop = paused.stop_time();
        drop(paused);
        let resume = patched.elapsed();
        Ok(made.map(|outcome| flip_report(outcome, stop, patched - stopped, resume)))
    }

    /// Gives back references that the guest has made the last of their keys, so that only a stopped
    /// guest can be without them.
    fn take_back(
        &self,
        taken_from: &Registration,
        transaction: &Transaction<'_>,
        held: Option<&G::Paused<'_>>,
        mut left: Vec<Update>,
    ) -> Result<(), KeysError> {
        // However soon the caller wants an answer: it is to be that nothing has changed.
        let give_up = Instant::now() + GIVE_BACK_TIME;
        let options = Options {
            allow_guarded: true,
        };
        loop {
            let snapshot = self.shared.registry.snapshot()?;
            let registration = &*snapshot.registration;
            // A key that is gone took its references with it.
            left.retain(|update| {
                let key = taken_from.catalog.key(update.key);
                key.is_some_and(|key| registration.has(taken_from.instance(key)))
            });
            let memory = registration.memory(self.guest.ram());
            let patience = transaction.stop_timeout;
            let why = match Plan::new(&registration.catalog, &memory, &left, &options) {
                Err(error) => error.to_string(),
                Ok(plan) => match self.make(patience, &snapshot, &memory, &plan, held) {
                    Ok(Ok(_)) => return Ok(()),
                    Ok(Err(obstacle)) => {
                        // What could not be taken again is given back.
                        if let Obstacle::Entangled { left: given, .. } = &obstacle {
                            left.retain(|update| given.iter().all(|of| of.key != update.key));
                        }
                        obstacle.to_string()
                    }
                    Err(error) => error.to_string(),
                },
            };
            if Instant::now() >= give_up {
                let left = left.len();
                return Err(KeysError::WriteFault {
                    message: format!(
                        "{left} references are left over that the guest made the last of their keys \
                         meanwhile, and cannot be given back: {why}"
                    ),
                });
            }
            std::thread::sleep(BETWEEN_GIVING_BACK);
        }
    }

    fn verify_and_commit(
        &self,
        snapshot: &Snapshot,
        memory: &KernelMemory,
        plan: &Plan<Place>,
        paused: &G::Paused<'_>,
    ) -> Result<static_keys::Outcome, Obstacle> {
        if self.shared.registry.version() != snapshot.version {
            return Err(Obstacle::Version);
        }
        let (Some(rips), Some(breakpoint)) = (paused.rips(), paused.breakpoint_pending()) else {
            return Err(Obstacle::Unseen);
        };
        if breakpoint {
            return Err(Obstacle::Breakpoint);
        }
        plan.verify(memory, rips).map_err(Obstacle::Verify)?;
        plan.commit(memory).map_err(Obstacle::Commit)
    }

    /// Puts the key of foreign bytes out of reach.
    fn quarantine(&self, registration: &Registration, error: &VerifyError) -> KeysError {
        let message = error.to_string();
        tracing::error!(%message, "foreign bytes: the key is quarantined");
        let name = match error {
            VerifyError::ForeignBytes { key, .. } => key.to_string(),
            VerifyError::Busy(_) | VerifyError::Fault(_) => String::new(),
        };
        let mut module = "";
        if let Some(key) = registration.catalog.find(&name) {
            module = key.module();
            {
                let mut book = self.shared.book();
                book.quarantine
                    .retain(|instance, _| registration.has(*instance));
                book.quarantine
                    .insert(registration.instance(key), message.clone());
            }
            let event = event_of(key, v1::key_event::Kind::Quarantined);
            let journal = self.shared.registry.journal();
            let reason = message.clone();
            journal.append(vec![v1::KeyEvent { reason, ..event }.into()]);
        }
        KeysError::ForeignBytes {
            key: name,
            message,
            way_out: way_out(module),
        }
    }
}

/// What ends the quarantine of a key of this module, or of the kernel's.
fn way_out(module: &str) -> String {
    match module {
        "" => "find out what patches the kernel, and restart the guest".to_owned(),
        module => format!(
            "find out what patches the kernel, and load module {module} again or restart the guest"
        ),
    }
}

/// Words a refusal of the engine.
fn refused(transaction: &Transaction<'_>, error: &PlanError) -> KeysError {
    let (key, reason) = match error {
        PlanError::Guarded { key } if transaction.allow_guarded => {
            let message = format!(
                "key {key} is guarded, and its monitor was started without permission for such keys; start it with permission"
            );
            return KeysError::KeyRefused {
                key: key.to_string(),
                reason: "KEY_GUARDED",
                message,
            };
        }
        PlanError::Guarded { key } => (key.to_string(), "KEY_GUARDED"),
        PlanError::WouldWarn { key, .. } => (key.to_string(), "WOULD_WARN"),
        PlanError::Sealed { key } => (key.to_string(), "KEY_SEALED"),
        PlanError::Tracepoint { key, .. } => (key.to_string(), "TRACEPOINT_REFUSED"),
        PlanError::SiteOutsideText { key, .. }
        | PlanError::OutOfReach { key, .. }
        | PlanError::Overlap { key, .. } => (key.to_string(), "TABLE_REFUSED"),
        PlanError::UnknownKey { key } => (key.to_string(), "TABLE_REFUSED"),
        PlanError::Unreadable { address, .. } => (format!("{address:#x}"), "TABLE_REFUSED"),
        PlanError::Busy(busy) => {
            return KeysError::Busy {
                gate: busy.to_string(),
                attempts: 1,
            };
        }
    };
    KeysError::KeyRefused {
        key,
        reason,
        message: error.to_string(),
    }
}

fn flip_report(
    outcome: static_keys::Outcome,
    stop: Duration,
    patch: Duration,
    resume: Duration,
) -> v1::FlipReport {
    v1::FlipReport {
        paused: true,
        sites_patched: u32::try_from(outcome.sites).unwrap_or(u32::MAX),
        stop_time: Some(to_proto(stop)),
        patch_time: Some(to_proto(patch)),
        resume_time: Some(to_proto(resume)),
        attempts: 0,
    }
}
