// SPDX-License-Identifier: Apache-2.0
//! One attempt at a transaction: plan, stop, verify, commit, resume.

mod roll_back;

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::guest::{Guest, Intended, PausedGuest};
use patchbay_guest::log_limit::limited;
use patchbay_guest::pause::PauseError;
use static_keys::{CommitError, Key, Plan, RunningError, Undo, Update, VerifyError};

use super::opening::await_opening;
use super::report::{made, summary};
use super::standstill::Standstill;
use super::state::Executor;
use super::transaction::{Blocker, Failure, Flip, Transaction};
use crate::keys::error::{KeysError, way_out};
use crate::keys::gate::ClosedGate;
use crate::keys::journal::Events;
use crate::keys::outcome::{FlipReport, PauseState, PauseTimes};
use crate::keys::quarantine::{Quarantine, QuarantineCause};
use crate::keys::registry::{Registration, Snapshot};
use patchbay_guest::kernel_memory::{KernelMemory, Place};

/// The reason why a plan of an earlier boot is refused.
const SET_BACK: &str = "the guest was reset, or stopped and resumed by another client, since its kernel was discovered";

/// The maximum number of times that [`Executor::snapshot`] starts again because a newer
/// registration arrived before holds and claims were bound to the last one.
const MAX_FOLLOWED: u32 = 8;

/// The reason why the change was not made. It is formatted only after the guest runs again.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    /// The registration has changed since the plan.
    #[error("the guest's registration or modules have changed")]
    Version,
    /// The kernel of the plan may no longer run.
    #[error("{0}")]
    Boot(String),
    #[error("a breakpoint exception is pending on a vCPU: the guest patches its text")]
    Breakpoint,
    /// The monitor cannot determine where the vCPUs stopped. A retry would have the same result.
    #[error("{}", KeysError::VcpusUnknown)]
    Unseen,
    /// The guest was not stopped, or the change could not be announced before the stop.
    #[error(transparent)]
    NotStopped(#[from] PauseError),
    #[error(transparent)]
    Verify(VerifyError),
    #[error(transparent)]
    Commit(CommitError),
    /// The guest relies on references that were taken: they can be dropped only while it is
    /// stopped.
    #[error("the guest changed key {key} concurrently; {} references are still held", .left.len())]
    Entangled { key: Arc<str>, left: Vec<Update> },
    /// A write did not persist.
    #[error("{why}")]
    Lost { why: String, undo: Undo },
}

impl Obstacle {
    /// Returns whether the undo is incomplete, so that a vCPU may be inside a site.
    fn is_undone_in_part(&self) -> bool {
        match self {
            Self::Commit(error) => error.undo != Undo::Complete,
            Self::Lost { undo, .. } => *undo != Undo::Complete,
            _ => false,
        }
    }
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

impl<G: Guest> Executor<G> {
    /// Makes one attempt at a transaction, from the check to the report.
    pub(super) fn attempt(
        &mut self,
        transaction: &Transaction<'_>,
        standstill: &mut Standstill<'_, G>,
        intent: &mut Option<u64>,
    ) -> Result<Flip, Failure> {
        let snapshot = self.snapshot()?;
        if Instant::now() >= transaction.request.deadline {
            // No time would be left for a pause.
            let how = "the guest's tables were read until the deadline";
            return Err(Blocker::time_is_over(how).into());
        }
        let planned = self.plan(&snapshot, transaction)?;
        let draft = self.follow(&snapshot.registration, &planned, &transaction.terms)?;
        let mut flip = Flip::new(&planned, draft, None);
        if transaction.request.validate_only {
            return Ok(flip);
        }
        self.intend(transaction, &snapshot.registration, &planned, intent)?;
        let made = || made(transaction.request, summary(&flip));
        let changes = planned.plan.changes().iter();
        let kept = self.keep_pending(changes, flip.draft.holds(), None, made)?;
        flip.report = Some(self.change(transaction, &snapshot, &planned.plan, kept, standstill)?);
        Ok(flip)
    }

    /// Returns the current registration. Holds and claims are bound to it, and those on keys that
    /// no longer exist are dropped.
    ///
    /// # Errors
    /// The guest has ended, or no registration is current.
    pub(super) fn snapshot(&mut self) -> Result<Snapshot, KeysError> {
        if self.guest.has_ended() {
            return Err(KeysError::GuestStopped);
        }
        for _ in 0..MAX_FOLLOWED {
            let snapshot = self.shared.registry.snapshot()?;
            let is_followed = self.pruned == snapshot.version && !self.ledger.waits();
            if is_followed || self.follow_registration(&snapshot) {
                return Ok(snapshot);
            }
        }
        Err(KeysError::Busy {
            kind: ClosedGate::RegistrationChanged,
            gate: "the guest's kernel has just been found again".to_owned(),
            attempts: MAX_FOLLOWED,
            every_key: true,
        })
    }

    /// Makes a plan's change. `kept` is the digest of the ledger that has it as pending.
    pub(super) fn change(
        &self,
        transaction: &Transaction<'_>,
        snapshot: &Snapshot,
        plan: &Plan<Place>,
        kept: Option<[u8; 32]>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<FlipReport, Failure> {
        let registration = &*snapshot.registration;
        let memory = registration.memory(self.guest.ram());
        let request = transaction.request;
        let left = request.deadline.saturating_duration_since(Instant::now());
        let patience = request.stop_timeout.min(left);
        let obstacle = match self.make(patience, snapshot, &memory, plan, kept, standstill) {
            Ok(report) => return Ok(report),
            Err(obstacle) => obstacle,
        };
        let blocker = |kind, name, every_key| Blocker {
            kind,
            name,
            every_key,
            outdates_plan: false,
        };
        let outdated = |kind, name, every_key| Blocker {
            outdates_plan: true,
            ..blocker(kind, name, every_key)
        };
        let blocker = match obstacle {
            Obstacle::NotStopped(error) => return Err(KeysError::from(error).into()),
            Obstacle::Verify(VerifyError::Busy(found)) => (&found).into(),
            Obstacle::Version | Obstacle::Boot(_) => {
                outdated(ClosedGate::RegistrationChanged, obstacle.to_string(), true)
            }
            Obstacle::Breakpoint => {
                blocker(ClosedGate::BreakpointPending, obstacle.to_string(), true)
            }
            Obstacle::Verify(VerifyError::Fault(_)) => {
                blocker(ClosedGate::Memory, obstacle.to_string(), false)
            }
            Obstacle::Unseen => return Err(KeysError::VcpusUnknown.into()),
            Obstacle::Verify(VerifyError::ForeignBytes { ref key, .. })
                if registration.catalog.find(key).is_none() =>
            {
                outdated(ClosedGate::KeyChanged, format!("key {key} is gone"), false)
            }
            Obstacle::Verify(ref error @ VerifyError::ForeignBytes { ref key, .. }) => {
                let error = self.foreign_bytes(registration, key, error.to_string());
                return Err(error.into());
            }
            Obstacle::Commit(error) => {
                let (message, undo) = (error.to_string(), error.undo);
                return Err(self.write_fault(registration, plan, message, undo).into());
            }
            Obstacle::Lost {
                why,
                undo: Undo::Complete,
            } => blocker(ClosedGate::Pause, why, true),
            Obstacle::Lost { why, undo } => {
                return Err(self.write_fault(registration, plan, why, undo).into());
            }
            Obstacle::Entangled { key, left } => {
                self.roll_back(registration, transaction, standstill, left)?;
                let name = format!("the guest changed key {key} concurrently");
                outdated(ClosedGate::KeyChanged, name, false)
            }
        };
        Err(blocker.into())
    }

    /// Makes a plan's change: without a pause if none is needed, otherwise by pause, verify, commit
    /// and resume.
    fn make(
        &self,
        patience: Duration,
        snapshot: &Snapshot,
        memory: &KernelMemory,
        plan: &Plan<Place>,
        kept: Option<[u8; 32]>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<FlipReport, Obstacle> {
        if !self.stops_for(plan, &snapshot.registration) {
            if let Some(ledger) = &kept {
                self.guest.will_write_running(ledger);
            }
            let registry = &self.shared.registry;
            let made = registry.at_version(snapshot.version, || plan.commit_running(memory));
            return match made {
                None => Err(Obstacle::Version),
                Some(made) => made.map(|_| FlipReport::default()).map_err(Into::into),
            };
        }
        if let Some(held) = standstill.held() {
            self.will_write(plan, kept)?;
            let began = Instant::now();
            let made = self.verify_and_commit(snapshot, memory, plan, held);
            let patch = began.elapsed();
            return made.map(|outcome| flip_report(outcome, Duration::ZERO, patch, Duration::ZERO));
        }
        // After a reset the old kernel is still in memory and passes every gate. The monitor may
        // take milliseconds to answer, so it is asked before this thread waits for the gates.
        if let Err(why) = self.shared.registry.confirm(&snapshot.registration) {
            return Err(Obstacle::Boot(why));
        }
        // The plan is first verified against the running guest. So a plan that is out of date
        // causes no stop, and the thread waits here for gates to open.
        let opening = await_opening(patience, || plan.verify_running(memory));
        if let Err(error @ VerifyError::Busy(_)) = opening {
            return Err(Obstacle::Verify(error));
        }
        self.will_write(plan, kept)?;
        let paused = standstill.pause(patience)?;
        // From here to the drop the guest is stopped: no allocation, no logging, no lock.
        let stopped = Instant::now();
        let made = self.verify_and_commit(snapshot, memory, plan, &paused);
        let patched = Instant::now();
        let stop = paused.stop_time();
        if made.as_ref().is_err_and(Obstacle::is_undone_in_part) {
            // A vCPU may be inside a site.
            standstill.hold(paused, None);
            self.shared.set_pause(PauseState::UntilResumed);
        } else {
            drop(paused);
        }
        let resume = patched.elapsed();
        made.map(|outcome| flip_report(outcome, stop, patched - stopped, resume))
    }

    fn will_write(&self, plan: &Plan<Place>, kept: Option<[u8; 32]>) -> Result<(), PauseError> {
        self.guest.will_write(Intended {
            keys: &mut plan.changes().iter().map(|change| &*change.name),
            writes: &mut plan.writes(),
            gates: &mut plan.gates(),
            ledger: kept,
        })
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
        let rips = match (paused.rips(), paused.breakpoint_pending()) {
            (_, Some(true)) => return Err(Obstacle::Breakpoint),
            (Some(rips), Some(false)) => rips,
            (Some(rips), _) if snapshot.registration.promises.text_gates => rips,
            (None, _) if snapshot.registration.promises.text_gates && !plan.needs_rips() => &[],
            _ => return Err(Obstacle::Unseen),
        };
        plan.verify(memory, rips).map_err(Obstacle::Verify)?;
        paused.begin_writes().map_err(|why| Obstacle::Lost {
            why,
            undo: Undo::Complete,
        })?;
        // The monitor has answered since the guest was stopped, so it has also reported earlier
        // resets.
        if !self.shared.registry.is_same_boot(&snapshot.registration) {
            return Err(Obstacle::Boot(SET_BACK.to_owned()));
        }
        let outcome = plan.commit(memory).map_err(|error| {
            paused.undone();
            Obstacle::Commit(error)
        })?;
        let checked = paused.check_writes();
        let is_same_boot = self.shared.registry.is_same_boot(&snapshot.registration);
        let why = match checked {
            Ok(()) if is_same_boot => {
                paused.made();
                return Ok(outcome);
            }
            Ok(()) => SET_BACK.to_owned(),
            Err(why) => why,
        };
        // If a snapshot was loaded after the writes, memory contains the snapshot's counts and
        // sites, and these must not be changed back.
        if !is_same_boot && !plan.is_in_place(memory) {
            return Err(Obstacle::Boot(why));
        }
        let undo = plan.revert(memory);
        paused.undone();
        Err(Obstacle::Lost { why, undo })
    }

    /// Returns whether a plan stops the guest. A change of counts alone does not stop the guest if
    /// the memory has atomic exchange and no table can be removed during the change.
    fn stops_for(&self, plan: &Plan<Place>, registration: &Registration) -> bool {
        plan.needs_pause() || !registration.promises.fence || !self.guest.ram().can_exchange()
    }

    /// Quarantines the key whose site has foreign bytes.
    fn foreign_bytes(&self, registration: &Registration, name: &str, message: String) -> KeysError {
        let key = registration.catalog.find(name);
        self.quarantine(registration, key, QuarantineCause::ForeignBytes, &message);
        KeysError::ForeignBytes {
            key: name.to_owned(),
            message,
            way_out: way_out(key.map_or("", Key::module)),
        }
    }

    /// Formats a failed commit. If the undo is incomplete, quarantines the keys; a guest that was
    /// stopped is held paused.
    fn write_fault(
        &self,
        registration: &Registration,
        plan: &Plan<Place>,
        mut message: String,
        undo: Undo,
    ) -> KeysError {
        if undo != Undo::Complete {
            let keys = plan.changes().iter().map(|change| change.key);
            let keys = keys.filter_map(|key| registration.catalog.key(key));
            self.quarantine(
                registration,
                keys,
                QuarantineCause::UndoIncomplete,
                &message,
            );
            message += "; its keys are quarantined";
            if self.stops_for(plan, registration) {
                message += ", and it is held paused, because it may run into half an instruction when it is resumed";
            }
        }
        KeysError::WriteFault { message }
    }

    fn quarantine<'a>(
        &self,
        registration: &Registration,
        keys: impl IntoIterator<Item = &'a Key>,
        cause: QuarantineCause,
        message: &str,
    ) {
        let why = Quarantine {
            cause,
            message: message.to_owned(),
        };
        let mut names = Vec::new();
        {
            let mut book = self.shared.book();
            for key in keys {
                let instance = registration.instance(key);
                book.quarantine.insert(instance, why.clone());
                names.push(Arc::clone(&key.full_name));
            }
        }
        limited!(error, keys = names.len(), why = message, "quarantined");
        if !names.is_empty() {
            let events = Events::Quarantined { keys: names, why };
            self.shared.registry.journal().append(events);
        }
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
