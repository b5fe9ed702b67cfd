// SPDX-License-Identifier: Apache-2.0
//! The one thread that changes the guest's keys.
//!
//! ```text
//!            ┌────────────────────────── wait ◀──────────────────────────────┐
//!            │ command, or a batch of expired holds                          │
//!            ▼                                                               │
//!        ┌─ check ── replayed, or refused: answer ──────────────────────────▶│
//!        │   │ names, etags, holds                                           │
//!        │   ▼                                                               │
//!        │  plan ─── refused: answer; validate only: answer ────────────────▶│
//!        │   │ intent written to the audit log (first attempt)               │
//!        │   │                                                               │
//!        │   ├─ nothing crosses zero ─▶ compare-and-swap ──────┬─ done ──┐   │
//!        │   ▼                                                 │ raced   │   │
//!        │  pause ── late vCPU: answer ─────────────────────── │ ───────▶│──▶│
//!        │   ▼                                                 │         │   │
//!        │  verify ─ foreign bytes: quarantine, answer ─────── │ ───────▶│──▶│
//!        │   │    └─ a gate is closed, or another version ─▶ busy        │   │
//!        │   ▼                                                 │         │   │
//!        │  commit ─ fault: undone, answer ─────────────────── │ ───────▶│──▶│
//!        │   ▼                                                 │         │   │
//!        │  resume ───────────────────────────────────────────────────▶ report
//!        │                                                     │   holds, journal,
//!        └──── wait ≥ 1 ms with jitter, unless the deadline ◀──┘   audit, replay
//! ```
//!
//! A prepare goes as far as the plan and keeps it. A commit starts with the holds and etags of a
//! kept plan. If a gate finds the plan out of date, the answer is PLAN_STALE, because a commit does
//! not plan.
//!
//! Why one thread: flips of one guest exclude each other anyway (there is one pause). With one
//! thread the holds, the audit log, replayed answers and an operator's pause need no locks between
//! them and are always consistent. It is a plain thread because verify and commit must not share a
//! thread with other tasks.
//!
//! Deadlock rule: a vCPU thread may hold the registry's mutex when it is asked to stop. So no lock
//! that a vCPU thread takes is held or taken between the start of the pause and the resume. One
//! atomic load tells whether the plan's registration is current. The registry's fence is no
//! exception: it is held for a change beside the running guest, around the version check and the
//! compare-and-swaps, without a pause or I/O inside. vCPUs that an operator holds paused stopped
//! outside of requests and do not hold it.
//!
//! Cancellation: each attempt first checks that the client still waits. From the pause on the
//! change is completed, and its answer is kept for the request id.

pub(super) mod expiry;
pub(super) mod flip;
mod opening;
pub(super) mod planning;
mod prepare;
pub(super) mod release;
pub(super) mod repair;
mod retry;
mod standstill;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use patchbay_guest::guest::{Guest, PausedGuest};
use static_keys::KeyChange;
use tokio::sync::oneshot;

use self::expiry::Expiries;
use self::flip::{Flip, Transaction};
use self::planning::Planned;
use self::repair::{RepairOutcome, RepairRequest};
use self::standstill::Standstill;
use crate::keys::advice;
use crate::keys::audit::{
    AuditFile, AuditLog, AuditOutcome, AuditedChange, IntendedKeys, IntendedOp, Intent,
};
use crate::keys::declared::Declaration;
use crate::keys::draft::{Drops, Terms};
use crate::keys::error::KeysError;
use crate::keys::estimate::PauseEstimate;
use crate::keys::holds::KeyInstance;
use crate::keys::journal::{Author, Event};
use crate::keys::plans::{CommitRequest, DiscardRequest, Plans, PrepareOutcome, PrepareRequest};
use crate::keys::registry::Registration;
use crate::keys::replay::{Content, Replay};
use crate::keys::{
    FlipReport, HoldView, KeyOutcome, PauseOutcome, PauseRequest, PauseState, ReleaseRequest,
    RenewRequest, Shared, Target, TracepointUpdate, UpdateOutcome, UpdateRequest, UpdateSummary,
    etag, hold_id,
};
use crate::trace_id::{self, TraceId};

/// Sender of a command's answer.
pub(super) type Reply<T> = oneshot::Sender<Result<T, KeysError>>;

/// A command, and the trace of the call that gave it.
pub(super) struct Traced {
    trace_id: Option<TraceId>,
    command: Command,
}

/// Commands to the executor.
pub(super) enum Command {
    Update(Box<UpdateRequest>, Reply<Arc<UpdateOutcome>>),
    Prepare(Box<PrepareRequest>, Reply<Arc<PrepareOutcome>>),
    Commit(Box<CommitRequest>, Reply<Arc<UpdateOutcome>>),
    Discard(DiscardRequest, Reply<()>),
    Release(Box<ReleaseRequest>, Reply<Arc<UpdateOutcome>>),
    Renew(RenewRequest, Reply<Vec<HoldView>>),
    Repair(Box<RepairRequest>, Reply<RepairOutcome>),
    Pause(PauseRequest, Reply<PauseOutcome>),
    Resume(Reply<()>),
    /// Continue the audit log in this file.
    AuditFile(AuditFile),
    /// Read the clock; answered when nothing is due.
    Tick(Reply<()>),
}

impl Command {
    /// Returns the command with the trace of the call that this task serves.
    pub fn traced(self) -> Traced {
        let (trace_id, command) = (trace_id::current(), self);
        Traced { trace_id, command }
    }
}

/// State of the executor thread.
pub(super) struct Executor<G: Guest> {
    pub guest: Arc<G>,
    pub shared: Arc<Shared>,
    pub audit: AuditLog,
    pub replay: Replay<UpdateOutcome>,
    /// Boot that the replayed answers belong to.
    pub replayed_boot: Option<u64>,
    pub allow_guarded: bool,
    pub allow_text_checker: bool,
    /// Version of the registration at the last removal of holds on keys that no longer exist.
    pub pruned: u64,
    pub expiries: Expiries,
    pub plans: Plans,
    /// Pauses of earlier changes.
    pub pauses: PauseEstimate,
}

impl<G: Guest> Executor<G> {
    /// Serves commands until the last sender is dropped.
    pub fn run(mut self, commands: &Receiver<Traced>) {
        let guest = Arc::clone(&self.guest);
        let mut standstill = Standstill::none(&*guest);
        let mut ticks = Vec::new();
        loop {
            self.audit.set_trace(None);
            let mut next = self.next_expiry();
            if next == Some(Duration::ZERO) {
                // One batch and one command in turn, so that neither starves the other.
                self.expire(&mut standstill);
                next = self.next_expiry();
            }
            if next != Some(Duration::ZERO) {
                for reply in ticks.drain(..) {
                    let _ = Reply::send(reply, Ok(()));
                }
            }
            let now = self.shared.clock.now();
            let until = |at: Instant| at.saturating_duration_since(now);
            let expiry = standstill.expiry();
            let left = [expiry, self.plans.next_expiry()].map(|at| at.map(until));
            let next = left.into_iter().flatten().chain(next).min();
            let command = match next {
                None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(left) => commands.recv_timeout(left),
            };
            // Checked before each command, so that a stream of commands does not keep the guest
            // stopped.
            if expiry.is_some_and(|at| self.shared.clock.now() >= at) {
                self.resume(&mut standstill);
            }
            self.plans.expire(self.shared.clock.now());
            let command = command.map(|traced| {
                self.audit.set_trace(traced.trace_id);
                traced.command
            });
            match command {
                Ok(Command::Update(request, reply)) => {
                    let result = self.update(&request, &reply, &mut standstill);
                    // A client that is gone repeats the request with its id.
                    let _ = reply.send(result);
                }
                Ok(Command::Prepare(request, reply)) => {
                    let result = self.prepare(*request, &reply, &mut standstill);
                    // The plan of a client that is gone expires.
                    let _ = reply.send(result);
                }
                Ok(Command::Commit(request, reply)) => {
                    let result = self.commit(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Discard(request, reply)) => {
                    let _ = reply.send(self.plans.discard(&request));
                }
                Ok(Command::Release(request, reply)) => {
                    let result = self.release(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Renew(request, reply)) => {
                    let _ = reply.send(self.renew(&request));
                }
                Ok(Command::Repair(request, reply)) => {
                    let result = self.repair(&request, &reply, &mut standstill);
                    let _ = reply.send(result);
                }
                Ok(Command::Pause(request, reply)) => {
                    let _ = reply.send(self.hold(&request, &mut standstill));
                }
                Ok(Command::Resume(reply)) => {
                    self.resume(&mut standstill);
                    let _ = reply.send(Ok(()));
                }
                Ok(Command::AuditFile(file)) => self.audit.replace(file),
                Ok(Command::Tick(reply)) => ticks.push(reply),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Stops the guest for an operator, or extends the pause.
    fn hold(
        &self,
        request: &PauseRequest,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<PauseOutcome, KeysError> {
        let now = self.shared.clock.now();
        let until = now + request.ttl;
        let stop_time = if standstill.held().is_some() {
            standstill.prolong(until);
            Duration::ZERO
        } else {
            let paused = standstill.pause(request.timeout)?;
            let stop_time = paused.stop_time();
            standstill.hold(paused, Some(until));
            stop_time
        };
        let expires_at = standstill
            .expiry()
            .map(|at| SystemTime::now() + at.saturating_duration_since(now));
        self.shared.set_pause(match expires_at {
            Some(at) => PauseState::Until(at),
            None => PauseState::UntilResumed,
        });
        Ok(PauseOutcome {
            stop_time,
            expires_at,
        })
    }

    fn resume(&self, standstill: &mut Standstill<'_, G>) {
        standstill.end();
        self.shared.set_pause(PauseState::Running);
    }

    fn update(
        &mut self,
        request: &UpdateRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        standstill: &mut Standstill<'_, G>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        let (principal, id) = (&request.principal, &request.request_id);
        if let Some(earlier) = self.replayed(principal, id, &request.content)? {
            return Ok(earlier);
        }
        let now = self.shared.clock.now();
        let drops = match request.tracepoints {
            Some(TracepointUpdate::Park) => Drops::Park,
            Some(TracepointUpdate::Leave) => Drops::Leave,
            Some(TracepointUpdate::Silence) => Drops::Anyones,
            Some(TracepointUpdate::HandOver) => Drops::HandOver,
            Some(TracepointUpdate::Fire) | None => Drops::of(request.force),
        };
        let expires = request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl));
        let terms = Terms::new(&request.principal, &request.reason, drops, expires);
        let transaction = Transaction {
            updates: &request.updates,
            terms: match request.tracepoints {
                Some(TracepointUpdate::Fire) => terms.firing(),
                _ => terms,
            },
            plan: None,
            allow_guarded: request.allow_guarded,
            validate_only: request.validate_only,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
            request_id: &request.request_id,
            summary_only: request.summary_only,
        };
        let outcome = Arc::new(self.transact(&transaction, standstill, || reply.is_closed())?);
        if !request.validate_only {
            self.replay.remember(
                &request.principal,
                &request.request_id,
                request.content,
                &outcome,
                outcome.results.len(),
            );
        }
        Ok(outcome)
    }

    /// Returns the answer to an earlier request with this id, unless it was made in another boot.
    pub(super) fn replayed(
        &mut self,
        principal: &str,
        request_id: &str,
        content: &Content,
    ) -> Result<Option<Arc<UpdateOutcome>>, KeysError> {
        let boot = self.shared.registry.boot();
        if self.replayed_boot != boot {
            self.replay.clear();
            self.replayed_boot = boot;
        }
        self.replay.find(principal, request_id, content)
    }

    /// Plans and makes a transaction.
    fn transact<'g>(
        &mut self,
        transaction: &Transaction<'_>,
        standstill: &mut Standstill<'g, G>,
        cancelled: impl Fn() -> bool,
    ) -> Result<UpdateOutcome, KeysError> {
        let mut intent = None;
        let attempt = |executor: &mut Self, standstill: &mut Standstill<'g, G>| {
            executor.attempt(transaction, standstill, &mut intent)
        };
        let result = self.persist(transaction.deadline, standstill, cancelled, attempt);
        self.conclude(transaction, result, intent)
    }

    /// Records a transaction that was made, or logs its failure.
    fn conclude(
        &mut self,
        transaction: &Transaction<'_>,
        result: Result<(Flip, u32), KeysError>,
        intent: Option<u64>,
    ) -> Result<UpdateOutcome, KeysError> {
        match result {
            Ok((flip, attempts)) => Ok(self.report(transaction, flip, attempts, intent)),
            Err(error) => {
                if let Some(id) = intent {
                    self.audit.outcome(
                        id,
                        &AuditOutcome::Failed {
                            reason: error.reason(),
                            error: error.to_string(),
                        },
                    );
                }
                Err(error)
            }
        }
    }

    /// Writes the intent before the first attempt that may change something. `selected` has the
    /// number of keys of each selection.
    fn intend(
        &mut self,
        transaction: &Transaction<'_>,
        registration: &Registration,
        planned: &Planned,
        intent: &mut Option<u64>,
    ) -> Result<(), KeysError> {
        if intent.is_none() {
            let mut selected = planned.selected.iter().copied();
            let declared: BTreeMap<&str, &Declaration> = planned
                .ops
                .iter()
                .filter_map(|op| registration.declared.get(&op.key.id))
                .map(|declaration| (declaration.key.as_str(), &**declaration))
                .collect();
            *intent = Some(
                self.audit.intent(&Intent {
                    owner: transaction.terms.holder(),
                    reason: transaction.terms.reason(),
                    request_id: transaction.request_id,
                    force: transaction.terms.drops == Drops::Anyones,
                    plan: transaction.plan,
                    updates: transaction
                        .updates
                        .iter()
                        .map(|update| IntendedOp {
                            keys: intended(&update.keys, &mut selected),
                            op: update.op.name(),
                        })
                        .collect(),
                    declared: declared.into_values().collect(),
                })?,
            );
        }
        Ok(())
    }

    /// Records a transaction that was made, and builds the answer.
    fn report(
        &mut self,
        transaction: &Transaction<'_>,
        mut flip: Flip,
        attempts: u32,
        intent: Option<u64>,
    ) -> UpdateOutcome {
        let summary = summary(&flip);
        let journal = self.shared.registry.journal();
        if transaction.validate_only {
            return UpdateOutcome {
                results: self.results(transaction, &flip, &[]),
                summary,
                revision: journal.latest(),
                report: None,
            };
        }
        let author = Arc::new(Author {
            principal: transaction.terms.holder().to_string(),
            reason: transaction.terms.reason().to_string(),
            request_id: transaction.request_id.to_owned(),
        });
        let changed = |change: &&KeyChange| change.before != change.after;
        let events: Vec<Event> = flip
            .changes
            .iter()
            .filter(changed)
            .map(|change| Event::Changed {
                key: Arc::clone(&change.name),
                count: change.after,
                by: Arc::clone(&author),
            })
            .collect();
        let draft = std::mem::take(&mut flip.draft);
        let taken = draft.book(&mut self.shared.book().holds, &transaction.terms);
        let revision = if events.is_empty() {
            journal.latest()
        } else {
            journal.append(events)
        };
        {
            let changes = flip.changes.iter().zip(&flip.keys);
            let changed = changes.filter(|(change, _)| changed(change));
            let mut book = self.shared.book();
            book.revisions
                .extend(changed.map(|(_, &key)| (key, revision)));
        }
        let results = self.results(transaction, &flip, &taken);
        if let Some(id) = intent {
            let changes = flip.changes.iter().map(|change| AuditedChange {
                key: &change.name,
                before: change.before,
                after: change.after,
                sites: change.sites,
            });
            self.audit.outcome(
                id,
                &AuditOutcome::Committed {
                    changes: changes.collect(),
                },
            );
        }
        let report = flip.report.map(|report| FlipReport { attempts, ..report });
        if let Some(times) = report.and_then(|report| report.pause) {
            self.pauses.observe(times, summary.sites_patched);
        }
        UpdateOutcome {
            results,
            summary,
            revision,
            report,
        }
    }

    /// Returns the result of each key with its new etag, or the current one if nothing was changed.
    /// `taken` has the number of the hold that took each key's references.
    fn results(
        &self,
        transaction: &Transaction<'_>,
        flip: &Flip,
        taken: &[Option<u64>],
    ) -> Vec<KeyOutcome> {
        if transaction.summary_only {
            return Vec::new();
        }
        let book = self.shared.book();
        // Most keys share a hold.
        let mut last: Option<(_, Arc<str>)> = None;
        let mut etag_of = |key: KeyInstance, count| {
            let of = (key.epoch, book.revision(key), count);
            match &last {
                Some((same, etag)) if *same == of => Arc::clone(etag),
                _ => {
                    let etag = etag(&self.shared.incarnation, key, of.1, count);
                    let etag: Arc<str> = etag.into();
                    last = Some((of, Arc::clone(&etag)));
                    etag
                }
            }
        };
        let registration = self.shared.registry.known().ok();
        let registration = registration.as_ref().map(|known| &*known.registration);
        let known = |key: KeyInstance| {
            let registration = registration?;
            advice::of(registration.catalog.key(key.id)?, &registration.release)
        };
        let mut taken = taken.iter().copied();
        let result = |(change, &key): (&KeyChange, &KeyInstance)| {
            let hold = taken.next().flatten();
            let count = if transaction.validate_only {
                change.before
            } else {
                change.after
            };
            KeyOutcome {
                key: Arc::clone(&change.name),
                count_before: change.before,
                count_after: change.after,
                sites_patched: change.sites,
                etag: etag_of(key, count),
                hold_id: hold.map_or_else(String::new, |number| {
                    hold_id(&self.shared.incarnation, number)
                }),
                known: known(key),
            }
        };
        let changes = flip.changes.iter().zip(&flip.keys);
        changes.map(result).collect()
    }
}

/// Returns the keys of an op, for the audit log.
fn intended<'a>(
    target: &'a Target,
    selected: &mut impl Iterator<Item = usize>,
) -> IntendedKeys<'a> {
    match target {
        Target::Name(key) => IntendedKeys::Name { key },
        Target::Held { name: key, .. } => IntendedKeys::Name { key },
        Target::Selection(selection) => IntendedKeys::Selection {
            patterns: selection.patterns.texts(),
            classes: selection.class_names(),
            keys: selected.next().unwrap_or_default(),
        },
        Target::Debug(queries) => IntendedKeys::Debug {
            debug_queries: queries.texts(),
            keys: selected.next().unwrap_or_default(),
        },
    }
}

/// Returns the totals.
fn summary(flip: &Flip) -> UpdateSummary {
    let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let changed = |change: &&KeyChange| change.before != change.after;
    UpdateSummary {
        keys: to_u32(flip.changes.len()),
        keys_changed: to_u32(flip.changes.iter().filter(changed).count()),
        sites_patched: flip.changes.iter().map(|change| change.sites).sum(),
        keys_left_out: to_u32(flip.left_out),
    }
}
