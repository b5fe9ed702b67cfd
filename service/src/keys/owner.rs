// SPDX-License-Identifier: Apache-2.0
//! The one thread that changes the guest's keys.
//!
//! ```text
//!            ┌────────────────────────── wait ◀──────────────────────────────┐
//!            │ command, or a hold lapses                                     │
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
//! Why one thread: flips of one guest exclude each other anyway (there is one pause), and with one
//! owner the holds, the audit log, the answers kept for their request ids and a pause that an
//! operator asked for need no locks between them and cannot be seen half-way. It is a plain thread
//! because verify and commit must not share a thread with anything else that wants to run.
//!
//! Deadlock rule: a vCPU thread may hold the registry's mutex when it is asked to stop. So no lock
//! that a vCPU thread takes is held, or taken, from before the pause until after the resume; whether
//! the plan is still the registered kernel's is decided by one atomic load.
//!
//! Cancellation: a client that is gone is noticed before each attempt. From the pause on, the change
//! is made, and its answer is kept for its request id.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use patchbay_proto::v1;
use static_keys::{Class, Key, KeyChange, Op, split_name};
use tokio::sync::oneshot;

use super::audit::{AuditLog, Change, IntendedKeys, IntendedOp, Intent, Outcome};
use super::draft::Terms;
use super::error::KeysError;
use super::flip::{Attempt, Flip, Transaction};
use super::holds::KeyInstance;
use super::journal::{Author, Event};
use super::replay::Replay;
use super::{KeyUpdate, Shared, Target, UpdateOutcome, UpdateRequest, etag};
use crate::guest::{Guest, PausedGuest};

/// Owner of what the monitor does by itself.
const MONITOR: &str = "monitor";
/// Longest that giving back one key's lapsed holds may keep others waiting.
const LAPSE_BUDGET: Duration = Duration::from_millis(200);
const LAPSE_STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// When a hold that could not be given back is tried again.
const LAPSE_RETRY: Duration = Duration::from_secs(1);
const FIRST_BACKOFF: Duration = Duration::from_millis(1);
const LAST_BACKOFF: Duration = Duration::from_millis(16);

/// Where an answer goes.
pub(super) type Reply<T> = oneshot::Sender<Result<T, KeysError>>;

/// What the owner is asked to do.
pub(super) enum Command {
    Update(Box<UpdateRequest>, Reply<Arc<UpdateOutcome>>),
    Pause(Duration, Reply<Duration>),
    Resume(Reply<()>),
    /// Look at the clock.
    Tick(Reply<()>),
}

/// State of the owner thread.
pub(super) struct Owner<G: Guest> {
    pub guest: Arc<G>,
    pub shared: Arc<Shared>,
    pub audit: AuditLog,
    pub replay: Replay<UpdateOutcome>,
    pub allow_guarded: bool,
    /// Version of the registration when holds on keys that are gone were last looked for.
    pub pruned: u64,
}

impl<G: Guest> Owner<G> {
    /// Serves commands until the last sender is gone.
    pub fn run(mut self, commands: &Receiver<Command>) {
        let guest = Arc::clone(&self.guest);
        // A pause that an operator asked for.
        let mut held: Option<G::Paused<'_>> = None;
        loop {
            let next = self.shared.book().holds.next_expiry();
            let command = match next {
                None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => {
                    commands.recv_timeout(at.saturating_duration_since(self.shared.clock.now()))
                }
            };
            match command {
                Ok(Command::Update(request, reply)) => {
                    let result = self.update(&request, &reply, held.as_ref());
                    // A client that has gone asks again with its request id.
                    let _ = reply.send(result);
                }
                Ok(Command::Pause(timeout, reply)) => {
                    let result = match &held {
                        Some(_) => Ok(Duration::ZERO),
                        None => guest.pause(timeout).map_err(KeysError::from).map(|paused| {
                            let stop_time = paused.stop_time();
                            held = Some(paused);
                            stop_time
                        }),
                    };
                    self.shared.set_paused(held.is_some());
                    let _ = reply.send(result);
                }
                Ok(Command::Resume(reply)) => {
                    held = None;
                    self.shared.set_paused(false);
                    let _ = reply.send(Ok(()));
                }
                Ok(Command::Tick(reply)) => {
                    self.give_back_lapsed(held.as_ref());
                    let _ = reply.send(Ok(()));
                }
                Err(RecvTimeoutError::Timeout) => self.give_back_lapsed(held.as_ref()),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn update(
        &mut self,
        request: &UpdateRequest,
        reply: &Reply<Arc<UpdateOutcome>>,
        held: Option<&G::Paused<'_>>,
    ) -> Result<Arc<UpdateOutcome>, KeysError> {
        if let Some(earlier) =
            self.replay
                .find(&request.owner, &request.request_id, &request.content)?
        {
            return Ok(earlier);
        }
        let now = self.shared.clock.now();
        let transaction = Transaction {
            updates: &request.updates,
            terms: Terms::new(
                &request.owner,
                &request.reason,
                request.force,
                request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl)),
            ),
            allow_guarded: request.allow_guarded,
            validate_only: request.validate_only,
            stop_timeout: request.stop_timeout,
            deadline: request.deadline,
            request_id: &request.request_id,
            summary_only: request.summary_only,
        };
        let outcome = Arc::new(self.transact(&transaction, held, || reply.is_closed())?);
        if !request.validate_only {
            self.replay.remember(
                &request.owner,
                &request.request_id,
                request.content,
                &outcome,
                outcome.results.len(),
            );
        }
        Ok(outcome)
    }

    /// Attempts until it is done, refused, or the deadline has passed.
    fn transact(
        &mut self,
        transaction: &Transaction<'_>,
        held: Option<&G::Paused<'_>>,
        cancelled: impl Fn() -> bool,
    ) -> Result<UpdateOutcome, KeysError> {
        let mut attempts = 0;
        let mut intent = None;
        let mut backoff = FIRST_BACKOFF;
        let result = loop {
            if cancelled() || attempts == 0 && Instant::now() >= transaction.deadline {
                break Err(KeysError::Cancelled);
            }
            attempts += 1;
            match self.attempt(transaction, held, &mut intent) {
                Err(error) => break Err(error),
                Ok(Attempt::Done(flip)) => break Ok(flip),
                // Nothing will change for as long as the guest is held.
                Ok(Attempt::Busy(gate)) if held.is_some() => {
                    let gate = format!("{gate} (the guest is held paused: resume it)");
                    break Err(KeysError::Busy { gate, attempts });
                }
                Ok(Attempt::Busy(gate)) => {
                    let wait = with_jitter(backoff);
                    if Instant::now() + wait >= transaction.deadline {
                        break Err(KeysError::Busy { gate, attempts });
                    }
                    std::thread::sleep(wait);
                    backoff = (backoff * 2).min(LAST_BACKOFF);
                }
            }
        };
        match result {
            Ok(flip) => Ok(self.report(transaction, flip, attempts, intent)),
            Err(error) => {
                if let Some(id) = intent {
                    self.audit.outcome(
                        id,
                        &Outcome::Failed {
                            reason: error.reason(),
                            error: error.to_string(),
                        },
                    );
                }
                Err(error)
            }
        }
    }

    /// Writes the intent before the first attempt that may change something; `selected` has the number
    /// of keys of each selection.
    pub(super) fn intend(
        &mut self,
        transaction: &Transaction<'_>,
        selected: &[usize],
        intent: &mut Option<u64>,
    ) -> Result<(), KeysError> {
        if intent.is_none() {
            let mut selected = selected.iter().copied();
            *intent = Some(
                self.audit.intent(&Intent {
                    owner: transaction.terms.owner(),
                    reason: transaction.terms.reason(),
                    request_id: transaction.request_id,
                    force: transaction.terms.force,
                    updates: transaction
                        .updates
                        .iter()
                        .map(|update| IntendedOp {
                            keys: intended(&update.keys, &mut selected),
                            op: update.op.name(),
                        })
                        .collect(),
                })?,
            );
        }
        Ok(())
    }

    /// Books a transaction that was made, and words the answer.
    fn report(
        &mut self,
        transaction: &Transaction<'_>,
        flip: Flip,
        attempts: u32,
        intent: Option<u64>,
    ) -> UpdateOutcome {
        let results = if transaction.summary_only {
            Vec::new()
        } else {
            results(&flip)
        };
        let summary = summary(&flip);
        let journal = self.shared.registry.journal();
        if transaction.validate_only {
            return UpdateOutcome {
                results,
                summary,
                revision: journal.latest(),
                report: None,
            };
        }
        flip.draft.book(&mut self.shared.book().holds);
        let changed = flip
            .changes
            .iter()
            .filter(|change| change.before != change.after);
        let author = Arc::new(Author {
            owner: transaction.terms.owner().to_string(),
            reason: transaction.terms.reason().to_string(),
            request_id: transaction.request_id.to_owned(),
        });
        let events: Vec<Event> = changed
            .map(|change| Event::Changed {
                name: Arc::clone(&change.name),
                count: change.after,
                by: Arc::clone(&author),
            })
            .collect();
        let revision = if events.is_empty() {
            journal.latest()
        } else {
            journal.append(events)
        };
        if let Some(id) = intent {
            let changes = flip.changes.iter().map(|change| Change {
                key: &change.name,
                before: change.before,
                after: change.after,
                sites: change.sites,
            });
            self.audit.outcome(
                id,
                &Outcome::Committed {
                    changes: changes.collect(),
                },
            );
        }
        let report = flip
            .report
            .map(|report| v1::FlipReport { attempts, ..report });
        UpdateOutcome {
            results,
            summary,
            revision,
            report,
        }
    }

    /// Gives back what has lapsed, key by key, so that one that cannot be given back does not keep
    /// the others.
    fn give_back_lapsed(&mut self, held: Option<&G::Paused<'_>>) {
        let now = self.shared.clock.now();
        let lapsed = self.shared.book().holds.lapsed(now);
        for (instance, _) in lapsed {
            if let Err(error) = self.give_back(instance, now, held) {
                tracing::warn!(key = %instance.id, %error, "a lapsed hold cannot be given back yet");
            }
        }
        // Whatever is left is tried again, and does not make the owner spin until then.
        self.shared.book().holds.postpone(now, now + LAPSE_RETRY);
    }

    fn give_back(
        &mut self,
        instance: KeyInstance,
        now: Instant,
        held: Option<&G::Paused<'_>>,
    ) -> Result<(), KeysError> {
        let snapshot = self.shared.registry.snapshot();
        let registration = snapshot
            .as_ref()
            .ok()
            .map(|snapshot| &*snapshot.registration);
        let found = registration
            .filter(|registration| registration.has(instance))
            .and_then(|registration| {
                let key = registration.catalog.key(instance.id)?;
                let count = registration
                    .catalog
                    .enabled(&registration.memory(self.guest.ram()), key.id)
                    .ok()?;
                Some((key, count))
            });
        let Some((key, count)) = found else {
            // The key is gone, and its references with it.
            self.shared.book().holds.retain(|key| key != instance);
            return Ok(());
        };
        let references = {
            let mut book = self.shared.book();
            // The guest itself may have dropped some.
            if count >= 0 {
                book.holds.trim(instance, count);
            }
            book.holds.lapsed_of(instance, now)
        };
        if references == 0 {
            return Ok(());
        }
        // Tracepoints are on or off.
        let op = if key.class == Class::Tracepoint {
            Op::Disable
        } else {
            Op::Dec
        };
        let updates: Vec<KeyUpdate> = (0..references)
            .map(|_| KeyUpdate::new(&*key.full_name, op))
            .collect();
        let transaction = Transaction {
            updates: &updates,
            // By force, as the monitor holds none itself: of clients' references that which lapses
            // first is dropped, and so those that have lapsed.
            terms: Terms::new(MONITOR, "the hold lapsed", true, None),
            // Permission was given when the hold was taken.
            allow_guarded: true,
            validate_only: false,
            stop_timeout: LAPSE_STOP_TIMEOUT,
            deadline: Instant::now() + LAPSE_BUDGET,
            request_id: "",
            summary_only: true,
        };
        self.transact(&transaction, held, || false).map(drop)
    }
}

/// The keys of an op, for the audit log.
fn intended<'a>(
    target: &'a Target,
    selected: &mut impl Iterator<Item = usize>,
) -> IntendedKeys<'a> {
    match target {
        Target::Name(key) => IntendedKeys::Name { key },
        Target::Selection(selection) => IntendedKeys::Selection {
            patterns: selection.patterns.texts(),
            classes: selection.class_names(),
            keys: selected.next().unwrap_or_default(),
        },
    }
}

/// Each key.
fn results(flip: &Flip) -> Vec<v1::KeyResult> {
    // Mostly the same for many keys.
    let mut last = (0, etag(flip.generation, 0));
    let result = |change: &KeyChange| {
        if last.0 != change.after {
            last = (change.after, etag(flip.generation, change.after));
        }
        let (module, name) = split_name(&change.name);
        v1::KeyResult {
            name: name.to_owned(),
            module: module.to_owned(),
            count_before: change.before,
            count_after: change.after,
            sites_patched: change.sites,
            etag: last.1.clone(),
        }
    };
    flip.changes.iter().map(result).collect()
}

/// The whole in numbers.
fn summary(flip: &Flip) -> v1::UpdateSummary {
    let to_u32 = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let changed = |change: &&KeyChange| change.before != change.after;
    v1::UpdateSummary {
        keys: to_u32(flip.changes.len()),
        keys_changed: to_u32(flip.changes.iter().filter(changed).count()),
        sites_patched: flip.changes.iter().map(|change| change.sites).sum(),
        keys_left_out: to_u32(flip.left_out),
    }
}

/// An event about one key.
pub(super) fn event_of(key: &Key, kind: v1::key_event::Kind) -> v1::KeyEvent {
    v1::KeyEvent {
        kind: kind.into(),
        name: key.name().to_owned(),
        module: key.module().to_owned(),
        ..v1::KeyEvent::default()
    }
}

/// Up to half as long again, so that the attempts do not keep step with what the guest does.
fn with_jitter(wait: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(wait) % 512;
    wait + wait * u32::try_from(random).unwrap_or(0) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_only_lengthens_by_up_to_half() {
        for _ in 0..1000 {
            let wait = with_jitter(FIRST_BACKOFF);
            assert!(
                (FIRST_BACKOFF..=FIRST_BACKOFF * 3 / 2).contains(&wait),
                "{wait:?}"
            );
        }
    }
}
