// SPDX-License-Identifier: Apache-2.0
//! One attempt at a transaction: resolve, plan, stop, verify, commit, resume.

use std::sync::Arc;
use std::time::{Duration, Instant};

use static_keys::{
    Busy, CommitError, Key, KeyChange, Options, Plan, PlanError, RunningError, Undo, Update,
    VerifyError,
};

use super::address_space::{KernelMemory, Place};
use super::draft::{Draft, Terms};
use super::error::{KeyRefusal, KeysError};
use super::holds::KeyInstance;
use super::owner::Owner;
use super::registry::{Instances, Registration, Snapshot};
use super::selection::{KeyOp, Resolved};
use super::standstill::Standstill;
use super::{
    Event, FlipReport, GateKind, KeyUpdate, PauseState, PauseTimes, Quarantine, QuarantineCause,
    etag,
};
use crate::guest::{Guest, PausedGuest};
use crate::log_limit::limited;

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
    /// Another attempt may find it gone.
    Busy(InTheWay),
}

/// What was in the way of an attempt.
pub(super) struct InTheWay {
    pub kind: GateKind,
    pub name: String,
    /// Of any change, whatever its keys.
    pub every_key: bool,
}

impl InTheWay {
    /// The error after so many attempts.
    pub(super) fn busy_in(self, attempts: u32) -> KeysError {
        KeysError::Busy {
            kind: self.kind,
            gate: self.name,
            attempts,
            every_key: self.every_key,
        }
    }
}

impl From<&Busy> for InTheWay {
    fn from(busy: &Busy) -> Self {
        Self {
            kind: busy.into(),
            name: busy.to_string(),
            every_key: busy.blocks_every_key(),
        }
    }
}

/// A transaction that was made, or validated.
pub(super) struct Flip {
    /// One per key, in the order of its first op.
    pub changes: Vec<KeyChange>,
    /// The same keys, for as long as they exist.
    pub keys: Vec<KeyInstance>,
    pub draft: Draft,
    /// Keys that selections matched and left out.
    pub left_out: usize,
    /// None if it was only validated. `attempts` is left to the owner.
    pub report: Option<FlipReport>,
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
        standstill: &mut Standstill<'_, G>,
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
            let live = self.shared.registry.live_epochs();
            let mut book = self.shared.book();
            book.retain(|key| live.contains(&key.epoch));
            self.pruned = snapshot.version;
        }
        let plan = match Plan::new(&registration.catalog, &memory, &updates, &options) {
            Ok(plan) => plan,
            Err(PlanError::Busy(busy)) => {
                registration.check_refused(&busy)?;
                return Ok(Attempt::Busy((&busy).into()));
            }
            // The call permits it, and the monitor does not.
            Err(PlanError::Guarded { key }) if transaction.allow_guarded => {
                return Err(KeysError::KeyRefused {
                    key: key.to_string(),
                    reason: KeyRefusal::Guarded,
                    message: format!(
                        "key {key} is guarded, and its monitor was started without permission for such keys; start it with permission"
                    ),
                });
            }
            Err(error) => return Err(refused(&error)),
        };
        let draft = self.follow(registration, &memory, transaction, &resolved.ops, &plan)?;
        let flip = |plan: Plan<Place>, report| Flip {
            changes: plan.into_changes(),
            keys: draft.keys().collect(),
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
        let obstacle = match self.make(patience, &snapshot, &memory, &plan, standstill)? {
            Ok(report) => return Ok(Attempt::Done(flip(plan, Some(report)))),
            Err(obstacle) => obstacle,
        };
        let busy = |kind, name, every_key| {
            Ok(Attempt::Busy(InTheWay {
                kind,
                name,
                every_key,
            }))
        };
        match obstacle {
            Obstacle::Verify(VerifyError::Busy(found)) => Ok(Attempt::Busy((&found).into())),
            Obstacle::Version => busy(GateKind::RegistrationChanged, obstacle.to_string(), true),
            Obstacle::Breakpoint => busy(GateKind::BreakpointPending, obstacle.to_string(), true),
            Obstacle::Verify(VerifyError::Fault(_)) => {
                busy(GateKind::Memory, obstacle.to_string(), false)
            }
            Obstacle::Unseen => Err(KeysError::KeyRefused {
                key: String::new(),
                reason: KeyRefusal::VcpusUnknown,
                message: obstacle.to_string(),
            }),
            Obstacle::Verify(VerifyError::ForeignBytes { ref key, .. })
                if registration.catalog.find(key).is_none() =>
            {
                busy(GateKind::KeyChanged, format!("key {key} is gone"), false)
            }
            Obstacle::Verify(error) => Err(self.foreign_bytes(registration, &error)),
            Obstacle::Commit(error) => Err(self.write_fault(registration, &plan, &error)),
            Obstacle::Entangled { key, left } => {
                self.take_back(registration, transaction, standstill, left)?;
                let name = format!("the guest counts on key {key}");
                busy(GateKind::KeyChanged, name, false)
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
                    reason: KeyRefusal::Quarantined,
                    message: format!(
                        "key {} is quarantined ({}); {}",
                        key.full_name,
                        why.message,
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
        memory: &KernelMemory,
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
            let instance = instances.instance(key);
            if !given.is_empty() {
                let revision = book.revision(instance);
                let current = etag(&self.shared.incarnation, instance, revision, count);
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
                // Later than the plan, which makes them a gate.
                let probes = registration.probes(memory, key);
                draft.open(&book.holds, instance, count, probes);
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
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Result<FlipReport, Obstacle>, KeysError> {
        if !plan.needs_pause() {
            let registry = &self.shared.registry;
            let made = registry.at_version(snapshot.version, || plan.commit_running(memory));
            return Ok(match made {
                None => Err(Obstacle::Version),
                Some(made) => made.map(|_| FlipReport::default()).map_err(Into::into),
            });
        }
        if let Some(held) = standstill.held() {
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
        let paused = standstill.pause(patience)?;
        // From here to the drop the guest stands still: nothing that allocates, logs or takes a lock.
        let stopped = Instant::now();
        let made = self.verify_and_commit(snapshot, memory, plan, &paused);
        let patched = Instant::now();
        let stop = paused.stop_time();
        if matches!(&made, Err(Obstacle::Commit(error)) if error.undo != Undo::Complete) {
            // A vCPU may stand before half an instruction.
            standstill.hold(paused, None);
            self.shared.set_pause(PauseState::UntilResumed);
        } else {
            drop(paused);
        }
        let resume = patched.elapsed();
        Ok(made.map(|outcome| flip_report(outcome, stop, patched - stopped, resume)))
    }

    /// Gives back references that the guest has made the last of their keys, so that only a stopped
    /// guest can be without them.
    fn take_back(
        &self,
        taken_from: &Registration,
        transaction: &Transaction<'_>,
        standstill: &mut Standstill<'_, G>,
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
            let live = self.shared.registry.live_epochs();
            left.retain(|update| {
                let key = taken_from.catalog.key(update.key);
                key.is_some_and(|key| live.contains(&taken_from.instance(key).epoch))
            });
            let memory = registration.memory(self.guest.ram());
            let patience = transaction.stop_timeout;
            let why = match Plan::new(&registration.catalog, &memory, &left, &options) {
                Err(error) => error.to_string(),
                Ok(plan) => match self.make(patience, &snapshot, &memory, &plan, standstill) {
                    Ok(Ok(_)) => return Ok(()),
                    Ok(Err(Obstacle::Commit(error))) if error.undo != Undo::Complete => {
                        return Err(self.write_fault(registration, &plan, &error));
                    }
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
    ) -> Result<static_keys::CommitOutcome, Obstacle> {
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
    fn foreign_bytes(&self, registration: &Registration, error: &VerifyError) -> KeysError {
        let message = error.to_string();
        let name = match error {
            VerifyError::ForeignBytes { key, .. } => key.to_string(),
            VerifyError::Busy(_) | VerifyError::Fault(_) => String::new(),
        };
        let key = registration.catalog.find(&name);
        self.quarantine(registration, key, QuarantineCause::ForeignBytes, &message);
        KeysError::ForeignBytes {
            key: name,
            message,
            way_out: way_out(key.map_or("", Key::module)),
        }
    }

    /// Words a commit that failed. If it could not be undone, the keys are put out of reach; if it had
    /// stopped the guest, that is held by now.
    fn write_fault(
        &self,
        registration: &Registration,
        plan: &Plan<Place>,
        error: &CommitError,
    ) -> KeysError {
        let mut message = error.to_string();
        if error.undo != Undo::Complete {
            let keys = plan.changes().map(|change| change.key);
            let keys = keys.filter_map(|key| registration.catalog.key(key));
            self.quarantine(
                registration,
                keys,
                QuarantineCause::UndoIncomplete,
                &message,
            );
            message += "; its keys are quarantined";
            if plan.needs_pause() {
                message += ", and it is held paused, because it may run into half an instruction when it is resumed";
            }
        }
        KeysError::WriteFault { message }
    }

    /// Puts keys out of reach.
    fn quarantine<'a>(
        &self,
        registration: &Registration,
        keys: impl IntoIterator<Item = &'a Key>,
        cause: QuarantineCause,
        message: &str,
    ) {
        let mut events = Vec::new();
        {
            let mut book = self.shared.book();
            for key in keys {
                let instance = registration.instance(key);
                let why = Quarantine {
                    cause,
                    message: message.to_owned(),
                };
                book.quarantine.insert(instance, why.clone());
                let key = Arc::clone(&key.full_name);
                events.push(Event::Quarantined { key, why });
            }
        }
        let keys = events.len();
        limited!(error, keys, why = message, "quarantined");
        if !events.is_empty() {
            self.shared.registry.journal().append(events);
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
pub(super) fn refused(error: &PlanError) -> KeysError {
    let (key, reason) = match error {
        PlanError::Guarded { key } => (key.to_string(), KeyRefusal::Guarded),
        PlanError::WouldWarn { key, .. } | PlanError::GuardedCount { key } => {
            (key.to_string(), KeyRefusal::WouldWarn)
        }
        PlanError::Sealed { key } => (key.to_string(), KeyRefusal::Sealed),
        PlanError::Tracepoint { key, .. } => (key.to_string(), KeyRefusal::Tracepoint),
        PlanError::SiteOutsideText { key, .. }
        | PlanError::OutOfReach { key, .. }
        | PlanError::Overlap { key, .. } => (key.to_string(), KeyRefusal::TableRefused),
        PlanError::UnknownKey { key } => (key.to_string(), KeyRefusal::TableRefused),
        PlanError::Unreadable { address, .. } => {
            (format!("{address:#x}"), KeyRefusal::TableRefused)
        }
        PlanError::Busy(busy) => return InTheWay::from(busy).busy_in(1),
    };
    KeysError::KeyRefused {
        key,
        reason,
        message: error.to_string(),
    }
}

fn flip_report(
    outcome: static_keys::CommitOutcome,
    stop: Duration,
    patch: Duration,
    resume: Duration,
) -> FlipReport {
    FlipReport {
        pause: Some(PauseTimes {
            stop,
            patch,
            resume,
        }),
        sites_patched: u32::try_from(outcome.sites).unwrap_or(u32::MAX),
        attempts: 0,
    }
}

#[cfg(test)]
mod tests;
