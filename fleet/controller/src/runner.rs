// SPDX-License-Identifier: Apache-2.0
//! Drives one rollout. It steps the machine, saves the changes, performs the actions, and reports
//! their outcomes.
//!
//! No action is sent, and no command is answered, before the change is saved.

mod command;
pub mod guests;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use patchbay_access::spans;
use patchbay_proto::TraceParent;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;

use crate::clock::Clocks;
pub use crate::clock::now;
use crate::gates::commands::Commands;
use crate::hosts::{Following, Hosts};
use crate::metrics::Metrics;
use crate::plan::Asks;
use crate::rollout::{
    Action, ClaimOutcome, GateAnswer, Member, Millis, NO_RECORD, NotLegal, ReleaseOutcome, Rollout,
};
use crate::spec::Spec;
use crate::storage::{Archive, Keys, NotArchived, RecordKeys};
use crate::store::{Fence, Store, StoreError, commit_all};
use crate::{gates, hosts, storage};
pub use command::Command;
pub use guests::no_host;
use guests::{Answered, Outcome, check, claim, release};

/// The maximum number of commands that wait for the runner.
const QUEUE: usize = 64;
/// The delay between attempts to reach the store.
const STORE_RETRY: Duration = Duration::from_millis(500);
/// The minimum interval between two checks of the guests that changes of the registry cause.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum time between two steps, in milliseconds.
const MAX_WAIT: Millis = 60_000;

enum Asked {
    Command {
        command: Command,
        principal: String,
        reply: oneshot::Sender<Result<(), NotLegal>>,
    },
    Delete {
        principal: String,
        reply: DeleteReply,
    },
}

type DeleteReply = oneshot::Sender<Result<PathBuf, NotDeleted>>;

/// The reason why a rollout is not deleted.
#[derive(Debug, thiserror::Error)]
pub enum NotDeleted {
    #[error(transparent)]
    NotLegal(#[from] NotLegal),
    #[error("rollout {rollout} is not deleted: {why}")]
    NotArchived { rollout: String, why: NotArchived },
    #[error("no rollout {0} is out of service any more; `rollout list` names them")]
    InService(String),
    /// The store does not let this replica lead any more.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A rollout with its runner.
pub struct Running {
    pub spec: Spec,
    pub asks: Arc<Asks>,
    rollout: Mutex<Rollout>,
    commands: mpsc::Sender<Asked>,
    version: watch::Sender<u64>,
    /// The number of the latest entry of the timeline that is in the store.
    saved_entries: AtomicU64,
    /// The runner's task, set when it is started.
    task: OnceLock<Id>,
}

/// The reason why a command has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// The runner had already ended. The command was not carried out.
    #[error("this replica does not lead any more")]
    NotSent,
    /// The runner ended during the command. The store may contain its effect.
    #[error(
        "this replica stopped leading while it carried out the command; `rollout status` shows \
         whether the command took effect"
    )]
    Lost,
}

/// The parts of a term that a runner needs.
#[derive(Clone)]
pub struct Context {
    pub store: Arc<dyn Store>,
    pub fence: Fence,
    pub hosts: Hosts,
    /// A counter that advances with every saved change of any rollout.
    pub changes: watch::Sender<u64>,
    pub metrics: Metrics,
    pub archive: Archive,
    pub commands: Commands,
    pub keys: RecordKeys,
}

/// The reason why a runner ends.
pub enum Ended {
    /// The store does not let this replica lead any more.
    Term(StoreError),
    /// The store will never take a change of this rollout.
    Refused { name: String, why: StoreError },
    /// The rollout is deleted from the store, and `archived` is its file.
    Deleted {
        name: String,
        archived: PathBuf,
        reply: DeleteReply,
    },
}

impl Running {
    /// Starts the runner as one of the term's tasks.
    pub fn start(
        rollout: Rollout,
        spec: Spec,
        context: Context,
        tasks: &mut JoinSet<Ended>,
    ) -> Arc<Self> {
        let (commands, asked) = mpsc::channel(QUEUE);
        let running = Arc::new(Self {
            saved_entries: AtomicU64::new(rollout.header().entries),
            asks: Arc::new(Asks::new(rollout.header(), &spec)),
            spec,
            rollout: Mutex::new(rollout),
            commands,
            version: watch::Sender::new(0),
            task: OnceLock::new(),
        });
        let task = tasks.spawn(Arc::clone(&running).run(context, asked));
        // Nothing else sets it.
        let _ = running.task.set(task.id());
        running
    }

    pub fn rollout(&self) -> MutexGuard<'_, Rollout> {
        // The machine does not panic between two assignments, so a poisoned lock is consistent.
        self.rollout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a counter that changes with every saved change.
    pub fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns whether the runner is this task.
    pub fn is_task(&self, id: Id) -> bool {
        self.task.get() == Some(&id)
    }

    /// Waits until the runner has ended.
    pub async fn ended(&self) {
        self.commands.closed().await;
    }

    /// Returns the number of the latest entry of the timeline that is in the store. Another leader
    /// may give the number of a later one to another event.
    pub fn saved_entries(&self) -> u64 {
        self.saved_entries.load(Ordering::Acquire)
    }

    /// Wakes those who watch the rollout.
    pub fn changed(&self) {
        self.version.send_modify(|version| *version += 1);
    }

    /// Sends the command, and waits until its effect is saved.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub async fn command(
        &self,
        command: Command,
        principal: &str,
    ) -> Result<Result<(), NotLegal>, NoAnswer> {
        let (reply, answer) = oneshot::channel();
        let asked = Asked::Command {
            command,
            principal: principal.to_owned(),
            reply,
        };
        self.ask(asked, answer).await
    }

    /// Deletes the rollout from the store, and returns the file to which it was written.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub async fn delete(&self, principal: &str) -> Result<Result<PathBuf, NotDeleted>, NoAnswer> {
        let (reply, answer) = oneshot::channel();
        let principal = principal.to_owned();
        let asked = Asked::Delete { principal, reply };
        self.ask(asked, answer).await
    }

    /// Sends a request to the runner, and waits for the reply.
    async fn ask<T>(&self, asked: Asked, answer: oneshot::Receiver<T>) -> Result<T, NoAnswer> {
        let sent = self.commands.send(asked).await;
        sent.map_err(|_| NoAnswer::NotSent)?;
        answer.await.map_err(|_| NoAnswer::Lost)
    }

    async fn run(self: Arc<Self>, context: Context, mut asked: mpsc::Receiver<Asked>) -> Ended {
        let mut actions = JoinSet::new();
        let mut replies: Vec<(oneshot::Sender<_>, Result<(), NotLegal>)> = Vec::new();
        let mut clocks = Clocks::read();
        let mut registry = Following::new(&context.hosts);
        let (mut looked, mut has_changed) = (Instant::now(), false);
        loop {
            self.follow(&mut clocks);
            let step = self.rollout().step(now());
            match self.save(&context).await {
                Ok(()) => {}
                Err(why @ StoreError::TooLarge { .. }) => {
                    let name = self.rollout().header().name.clone();
                    return Ended::Refused { name, why };
                }
                Err(error) => return Ended::Term(error),
            }
            for (reply, result) in replies.drain(..) {
                // The client may have disconnected.
                let _ = reply.send(result);
            }
            for action in step.actions {
                self.perform(action, &context, &mut actions);
            }
            let wake = async {
                match step.wake_at {
                    Some(at) => {
                        tokio::time::sleep(Duration::from_millis(wait(at, now()))).await;
                    }
                    None => std::future::pending().await,
                }
            };
            let look = async {
                // The change must outlive this iteration.
                if !has_changed {
                    registry.changed().await;
                    has_changed = true;
                }
                tokio::time::sleep_until(looked + LOOK_INTERVAL).await;
            };
            tokio::select! {
                Some(outcome) = actions.join_next() => {
                    self.follow(&mut clocks);
                    self.report(outcome);
                    // Further outcomes that are ready go into the same step and the same save.
                    while let Some(outcome) = actions.try_join_next() {
                        self.report(outcome);
                    }
                }
                Some(asked) = asked.recv() => match asked {
                    Asked::Command { command, principal, reply } => {
                        self.follow(&mut clocks);
                        let breaks_glass = command.breaks_glass();
                        let result = self.obey(command, &principal);
                        if breaks_glass && result.is_ok() {
                            context.metrics.glass_broken();
                        }
                        replies.push((reply, result));
                    }
                    Asked::Delete { principal, reply } => {
                        match self.remove(&context, &principal).await {
                            Ok(archived) => {
                                let name = self.rollout().header().name.clone();
                                return Ended::Deleted { name, archived, reply };
                            }
                            Err(NotDeleted::Store(error)) => return Ended::Term(error),
                            // The client may have disconnected.
                            Err(error) => drop(reply.send(Err(error))),
                        }
                    }
                },
                () = look => {
                    has_changed = false;
                    looked = Instant::now();
                    let news = registry.take();
                    self.rollout().look_again(&news);
                }
                () = wake => {}
            }
        }
    }

    /// Reports a jump of the wall clock to the rollout, before the rollout gets a time of that
    /// clock.
    fn follow(&self, clocks: &mut Clocks) {
        let read = Clocks::read();
        if let Some(by) = clocks.jump_until(&read) {
            tracing::warn!(milliseconds = by, "the wall clock jumped");
            self.rollout().clock_jumped(by);
        }
        *clocks = read;
    }

    /// Saves the changes. If the store cannot be reached, the rollout is blocked until it can.
    async fn save(&self, context: &Context) -> Result<(), StoreError> {
        let (writes, entries) = {
            let mut rollout = self.rollout();
            let writes = storage::changed(&mut rollout);
            let header = rollout.header();
            (context.keys.signed(&header.run, writes), header.entries)
        };
        if writes.is_empty() {
            return Ok(());
        }
        let (store, fence) = (context.store.as_ref(), &context.fence);
        let saved = persist(context, || commit_all(store, fence, &writes)).await;
        if saved.is_ok() {
            self.saved_entries.store(entries, Ordering::Release);
        }
        self.changed();
        context.changes.send_modify(|changes| *changes += 1);
        saved
    }

    /// Deletes the rollout from the store.
    async fn remove(&self, context: &Context, principal: &str) -> Result<PathBuf, NotDeleted> {
        let rollout = {
            let rollout = self.rollout();
            rollout.check_deletable()?;
            rollout.header().name.clone()
        };
        delete(context, &rollout, Keys::Own, principal).await
    }

    fn obey(&self, command: Command, principal: &str) -> Result<(), NotLegal> {
        let mut rollout = self.rollout();
        let now = now();
        tracing::info!(
            rollout = rollout.header().name,
            principal,
            ?command,
            trace_id = format!("{:032x}", rollout.header().trace()),
            "command"
        );
        command.apply(&mut rollout, &self.spec, principal, now)
    }

    fn report(&self, outcome: Result<(Instant, Outcome), tokio::task::JoinError>) {
        let mut rollout = self.rollout();
        let Ok((ended, outcome)) = outcome else {
            // A task that panicked reports no outcome, and may be any of those in progress.
            rollout.send_all_again();
            return;
        };
        // The store may not have been reached since, while the guest's claims came closer to their
        // end.
        let elapsed = u64::try_from(ended.elapsed().as_millis()).unwrap_or(u64::MAX);
        outcome.report(&mut rollout, now().saturating_sub(elapsed));
    }

    fn perform(
        &self,
        action: Action,
        context: &Context,
        actions: &mut JoinSet<(Instant, Outcome)>,
    ) {
        let rollout = self.rollout();
        let trace_id = rollout.header().trace();
        let (hosts, metrics) = (context.hosts.clone(), context.metrics.clone());
        let acting = |index: usize| {
            let hosts = context.hosts.acting_for(rollout.person(index));
            (rollout.members()[index].clone(), hosts)
        };
        let (name, asks) = (rollout.header().name.clone(), Arc::clone(&self.asks));
        match action {
            Action::Claim {
                member: index,
                generation,
            } => {
                let (member, hosts) = acting(index);
                actions.spawn(timed(async move {
                    let began = SystemTime::now();
                    let claiming = claim(&hosts, &asks, &member, generation);
                    let (outcome, moved) = hosts::traced(trace_id, claiming).await;
                    let (error, pause_us) = match &outcome {
                        ClaimOutcome::Made { pause_us, .. } => (None, Some(*pause_us)),
                        ClaimOutcome::Failed { why, .. } | ClaimOutcome::NotMade { why, .. } => {
                            (Some(why.as_str()), None)
                        }
                        ClaimOutcome::Stale { .. } => (Some("GENERATION_STALE"), None),
                        ClaimOutcome::Booted { .. } => (Some("BOOT_CHANGED"), None),
                    };
                    record("claim", trace_id, began, &name, &member, error);
                    metrics.claimed(pause_us);
                    Outcome::Claim(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::Release {
                member: index,
                generation,
            } => {
                let (member, hosts) = acting(index);
                actions.spawn(timed(async move {
                    let began = SystemTime::now();
                    let releasing = release(&hosts, &asks, &member, generation);
                    let (outcome, moved) = hosts::traced(trace_id, releasing).await;
                    let error = match &outcome {
                        ReleaseOutcome::Released { .. } => None,
                        ReleaseOutcome::Failed { why } => Some(why.as_str()),
                        ReleaseOutcome::Unknown => Some(NO_RECORD),
                        ReleaseOutcome::Stale { .. } => Some("GENERATION_STALE"),
                    };
                    record("release", trace_id, began, &name, &member, error);
                    metrics.released(error.is_none());
                    Outcome::Release(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::Observe {
                member: index,
                generation,
            } => {
                let member = rollout.members()[index].clone();
                actions.spawn(timed(async move {
                    let observing = gates::observe(&hosts, &member.host, &member.guest);
                    let health = hosts::traced(trace_id, observing).await;
                    Outcome::Observed {
                        member: index,
                        generation,
                        health,
                    }
                }));
            }
            Action::Check {
                member: index,
                generation,
            } => {
                let (member, hosts) = acting(index);
                actions.spawn(timed(async move {
                    let (outcome, moved) = check(&hosts, &asks.owner, &member).await;
                    Outcome::Checked(Answered {
                        member: index,
                        generation,
                        outcome,
                        moved,
                    })
                }));
            }
            Action::RunGate { wave, gate, asked } => {
                let kind = rollout.header().policy.gates[gate].kind.clone();
                let of_wave = &rollout.header().waves[wave];
                let members = gates::observed(&rollout.members()[of_wave.members()]);
                let (commands, wave_name) = (context.commands.clone(), of_wave.name.clone());
                actions.spawn(timed(async move {
                    let asking = gates::Asking {
                        hosts: &hosts,
                        commands: &commands,
                        rollout: &name,
                        wave: &wave_name,
                    };
                    let asking = gates::ask(&kind, &asking, members);
                    let answer = hosts::traced(trace_id, asking).await;
                    if matches!(answer, GateAnswer::Failed(_)) {
                        metrics.gate_closed();
                    }
                    Outcome::Gate {
                        wave,
                        gate,
                        asked,
                        answer,
                    }
                }));
            }
        }
    }
}

/// Returns the milliseconds to sleep until a step that is due at `at`. The sleep is limited,
/// because the wall clock may be set forward during it.
pub fn wait(at: Millis, now: Millis) -> Millis {
    at.saturating_sub(now).min(MAX_WAIT)
}

/// Makes an action, and returns the time at which it ended.
async fn timed(action: impl Future<Output = Outcome>) -> (Instant, Outcome) {
    let outcome = action.await;
    (Instant::now(), outcome)
}

/// Writes a rollout to a file, deletes it from the store, and returns the path of the file. If the
/// store cannot be reached, it waits until it can.
///
/// # Errors
/// [`NotDeleted`].
pub async fn delete(
    context: &Context,
    rollout: &str,
    keys: Keys,
    principal: &str,
) -> Result<PathBuf, NotDeleted> {
    let store = context.store.as_ref();
    let entries = persist(context, || storage::entries(store, rollout, keys)).await?;
    let deletions = storage::deletions(&entries);
    let archived = context.archive.write(rollout, entries).await;
    let archived = archived.map_err(|why| {
        context.metrics.archive_failed();
        let rollout = rollout.to_owned();
        NotDeleted::NotArchived { rollout, why }
    })?;
    persist(context, || commit_all(store, &context.fence, &deletions)).await?;
    let file = archived.display();
    tracing::info!(
        rollout,
        principal,
        "the rollout is deleted, and kept in {file}"
    );
    Ok(archived)
}

/// Repeats the call until the store can be reached.
async fn persist<T, F: Future<Output = Result<T, StoreError>>>(
    context: &Context,
    call: impl Fn() -> F,
) -> Result<T, StoreError> {
    loop {
        match call().await {
            Err(StoreError::Unavailable(why)) => {
                tracing::warn!("a rollout waits for the store: {why}");
                context.metrics.waits_for_store();
                tokio::time::sleep(STORE_RETRY).await;
            }
            other => return other,
        }
    }
}

/// Records a span of the rollout's trace.
fn record(
    name: &'static str,
    trace_id: u128,
    began: SystemTime,
    rollout: &str,
    member: &Member,
    error: Option<&str>,
) {
    // The rollout itself has no span, so the span's parent is one that is never exported.
    let span_id = u64::try_from(trace_id >> 64).unwrap_or(0) | 1;
    let parent = TraceParent { trace_id, span_id };
    let attributes = vec![
        KeyValue::new("patchbay.rollout", rollout.to_owned()),
        KeyValue::new("patchbay.host", member.host.clone()),
        KeyValue::new("patchbay.guest", member.guest.clone()),
    ];
    spans::record(name, parent, began, attributes, error);
}
