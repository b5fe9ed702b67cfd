// SPDX-License-Identifier: Apache-2.0
//! The guest's static keys: what it registered, who holds what, and the one thread that changes keys.
//!
//! ```text
//!  vCPU threads ── requests ──▶ Registry ── snapshots ──┬──▶ Executor (one thread) ──▶ pause, commit
//!                                   │                   │       │  ▲
//!                                   ▼                   ▼       │  │ commands
//!  watchers ◀──────────────────  Journal ◀──────────────────────┘  │
//!  clients ──────────────────▶  Keys (list, get, holds) ───────────┘
//! ```

pub(crate) mod address_space;
pub mod audit;
mod boot;
mod clock;
mod draft;
mod error;
mod estimate;
mod executor;
mod expiry;
mod flip;
mod gate;
mod hold_list;
mod holds;
mod incarnation;
mod journal;
mod near;
mod outcome;
mod pages;
mod planning;
mod plans;
mod prepare;
mod quarantine;
mod refused;
mod registration;
pub mod registry;
mod release;
pub mod replay;
mod selection;
mod standstill;
pub mod symbols;
mod view;

use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use foldhash::fast::RandomState;
use static_keys::{Class, Op, Patterns};
use tokio::sync::{oneshot, watch};

pub use self::address_space::PageTable;
use self::audit::AuditFile;
pub use self::clock::{Clock, SystemClock};
pub use self::error::{KeyRefusal, KeysError};
use self::executor::{Command, Executor, Reply};
pub use self::gate::ClosedGate;
pub use self::hold_list::{HoldPage, HoldQuery, HoldView};
pub use self::holds::{Hold, Holds, KeyInstance};
pub use self::incarnation::Incarnation;
pub use self::journal::{Author, Event, Journal, Limits, Revision, Watcher};
pub use self::outcome::{FlipReport, KeyOutcome, PauseTimes, UpdateOutcome, UpdateSummary};
use self::pages::ResultPages;
pub use self::pages::ResultsPage;
pub use self::plans::{CommitRequest, DiscardRequest, PrepareOutcome, PrepareRequest};
pub use self::quarantine::{Quarantine, QuarantineCause};
pub use self::registry::{Description, KernelTables, Refused, RegistrationPhase, Registry};
pub use self::release::{ReleaseRequest, RenewRequest};
use self::replay::Replay;
use self::symbols::Symbols;
pub(crate) use self::view::PAGE_BYTES;
pub use self::view::{KeyDetails, KeyPage, KeyView, SiteView};
use crate::guest::{Guest, Machine};
use crate::threads::{PlainThreads, ThreadKind, Threads, contain};

/// Commands that wait for the executor; beyond them callers are turned away.
const QUEUE: usize = 256;
/// Most ops on keys in one transaction.
pub const MAX_UPDATES: usize = 65_536;
const REPLAYED_ANSWERS: usize = 1024;
const REPLAYED_RESULTS: usize = 1 << 18;

/// How keys are handled.
pub struct KeysConfig {
    /// Intents and outcomes go there.
    pub audit: audit::AuditLog,
    /// For the names of functions.
    pub symbols: Symbols,
    /// Whether guarded keys may be changed at all.
    pub allow_guarded: bool,
    /// By which holds expire.
    pub clock: Arc<dyn Clock>,
    /// Starts the thread that changes the keys.
    pub threads: Arc<dyn Threads>,
}

impl Default for KeysConfig {
    fn default() -> Self {
        Self {
            audit: audit::AuditLog::default(),
            symbols: Symbols::default(),
            allow_guarded: false,
            clock: Arc::new(SystemClock),
            threads: Arc::new(PlainThreads),
        }
    }
}

/// One op, on one key or on many.
#[derive(Clone, Debug)]
pub struct KeyUpdate {
    /// On which.
    pub keys: Target,
    /// What to do.
    pub op: Op,
    /// Of the one key; checked if not empty.
    pub etag: String,
}

/// The keys of an op.
#[derive(Clone, Debug)]
pub enum Target {
    /// "name" or "module:name".
    Name(String),
    /// The key that a hold is on, and not another that has come by its name since.
    Held {
        /// "name" or "module:name".
        name: Arc<str>,
        /// Which.
        instance: KeyInstance,
    },
    /// Each that is found when the change is made, and may be changed.
    Selection(Selection),
}

/// Keys by what they have in common.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// By name.
    pub patterns: Patterns,
    /// All if empty.
    pub classes: Vec<Class>,
}

/// What becomes of the holds on tracepoints that tracing switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracepointUpdate {
    /// Enable, and hold also what is on; a hold that the caller has gets the new expiry.
    Fire,
    /// Disable what nobody else holds, also if the caller does not.
    Park,
    /// End the caller's holds, and disable what nobody else holds or traces.
    Leave,
    /// Disable and end all holds.
    Silence,
    /// Enable for others in the guest, and end all holds.
    HandOver,
}

/// A transaction.
#[derive(Clone, Debug)]
pub struct UpdateRequest {
    /// In order, at least one.
    pub updates: Vec<KeyUpdate>,
    /// "uid:N".
    pub principal: String,
    /// Empty: cannot be repeated.
    pub request_id: String,
    /// Digest of everything but the request id.
    pub content: replay::Content,
    /// Check and change nothing.
    pub validate_only: bool,
    /// Allow guarded keys, if the monitor does.
    pub allow_guarded: bool,
    /// Drop references of others.
    pub force: bool,
    /// `None`: by the rules of the ops.
    pub tracepoints: Option<TracepointUpdate>,
    /// Answer with the summary alone.
    pub summary_only: bool,
    /// Kept with the holds.
    pub reason: String,
    /// When the references taken expire.
    pub ttl: Option<Duration>,
    /// How long the vCPUs may take to stop.
    pub stop_timeout: Duration,
    /// When to stop trying.
    pub deadline: Instant,
}

impl KeyUpdate {
    /// An op on a key, whatever the key's etag.
    #[must_use]
    pub fn new(name: impl Into<String>, op: Op) -> Self {
        Self {
            keys: Target::Name(name.into()),
            op,
            etag: String::new(),
        }
    }
}

impl UpdateRequest {
    /// A change that is made once, without a reason, for good, and with no more rights than any client has.
    #[must_use]
    pub fn new(
        updates: Vec<KeyUpdate>,
        principal: String,
        stop_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            updates,
            principal,
            request_id: String::new(),
            content: replay::Content::default(),
            validate_only: false,
            allow_guarded: false,
            force: false,
            tracepoints: None,
            summary_only: false,
            reason: String::new(),
            ttl: None,
            stop_timeout,
            deadline,
        }
    }
}

/// A pause that lasts until it is resumed or expires.
#[derive(Clone, Copy, Debug)]
pub struct PauseRequest {
    /// How long the vCPUs may take to stop.
    pub timeout: Duration,
    /// When the guest is resumed without being asked.
    pub ttl: Duration,
}

/// The guest is paused.
#[derive(Clone, Copy, Debug)]
pub struct PauseOutcome {
    /// How long the vCPUs took; 0 if they were stopped already.
    pub stop_time: Duration,
    /// When the guest is resumed without being asked; `None` if it was held already because a change
    /// could not be undone.
    pub expires_at: Option<SystemTime>,
}

/// Whether the guest is held paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseState {
    /// It is not.
    #[default]
    Running,
    /// An operator's pause, which expires.
    Until(SystemTime),
    /// A change could not be undone: until an operator resumes it.
    UntilResumed,
}

/// Which keys to list.
#[derive(Clone, Debug, Default)]
pub struct ListQuery {
    /// At least 1.
    pub page_size: usize,
    /// Of the page before; empty for the first.
    pub page_token: String,
    /// Which keys.
    pub keys: Selection,
    /// On, off, or both.
    pub enabled: Option<bool>,
}

/// What the executor and the readers share. Locks here are held for a look or a change, never across a
/// pause.
struct Shared {
    registry: Arc<Registry>,
    book: Mutex<Book>,
    symbols: Symbols,
    clock: Arc<dyn Clock>,
    incarnation: Incarnation,
    pause: watch::Sender<PauseState>,
    pages: Mutex<ResultPages>,
    /// Set when the executor thread has ended: empty, or why it failed.
    ended: watch::Sender<Option<String>>,
}

/// What is remembered about keys; only the executor changes it.
#[derive(Debug, Default)]
struct Book {
    holds: Holds,
    /// Why a key is not to be flipped.
    quarantine: HashMap<KeyInstance, Quarantine>,
    /// Revision of a key's last change.
    revisions: HashMap<KeyInstance, u64, RandomState>,
}

impl Book {
    /// Revision of the key's last change; 0 if there was none.
    fn revision(&self, key: KeyInstance) -> u64 {
        self.revisions.get(&key).copied().unwrap_or_default()
    }

    /// Forgets keys that are no more.
    fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) {
        self.holds.retain(&mut exists);
        self.quarantine.retain(|key, _| exists(*key));
        self.revisions.retain(|key, _| exists(*key));
    }
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        // The executor replaces whole values under this lock.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_pause(&self, state: PauseState) {
        self.pause.send_replace(state);
    }

    fn pages(&self) -> MutexGuard<'_, ResultPages> {
        // Every method leaves whole lists.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle to the keys of one guest. Clones share it; the executor thread ends with the last.
#[derive(Clone)]
pub struct Keys {
    shared: Arc<Shared>,
    machine: Arc<dyn Machine>,
    commands: SyncSender<Command>,
}

impl Keys {
    /// Starts the executor thread. `registry` must be the one that answers this guest's requests.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start<G: Guest>(
        guest: Arc<G>,
        registry: Arc<Registry>,
        config: KeysConfig,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        registry.attach(guest.ram().clone());
        let shared = Arc::new(Shared {
            registry,
            book: Mutex::default(),
            symbols: config.symbols,
            clock: config.clock,
            incarnation: Incarnation::new(),
            pause: watch::Sender::default(),
            pages: Mutex::default(),
            ended: watch::Sender::new(None),
        });
        let (commands, receiver) = sync_channel(QUEUE);
        let executor = Executor {
            guest: Arc::clone(&guest),
            shared: Arc::clone(&shared),
            audit: config.audit,
            replay: Replay::new(REPLAYED_ANSWERS, REPLAYED_RESULTS),
            replayed_boot: None,
            allow_guarded: config.allow_guarded,
            pruned: 0,
            expiries: expiry::Expiries::default(),
            plans: plans::Plans::default(),
            pauses: estimate::PauseEstimate::default(),
        };
        let told = Arc::clone(&shared);
        let body = Box::new(move || {
            let ended = contain("the keys", || executor.run(&receiver));
            told.ended
                .send_replace(Some(ended.err().unwrap_or_default()));
        });
        let thread = config.threads.spawn(ThreadKind::Keys, body)?;
        Ok((
            Self {
                shared,
                machine: guest,
                commands,
            },
            thread,
        ))
    }

    /// The guest.
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// What is registered.
    pub fn describe(&self) -> Description {
        self.shared.registry.describe()
    }

    /// The process that revisions, etags, holds and plans belong to.
    pub fn incarnation(&self) -> &Incarnation {
        &self.shared.incarnation
    }

    /// Number of the newest change.
    pub fn revision(&self) -> u64 {
        self.shared.registry.journal().latest()
    }

    /// Whether the guest is held paused.
    pub fn pause_state(&self) -> PauseState {
        *self.shared.pause.borrow()
    }

    /// Changes with [`Self::pause_state`].
    pub fn pause_changes(&self) -> watch::Receiver<PauseState> {
        self.shared.pause.subscribe()
    }

    /// Changes with [`Self::describe`].
    pub fn registration_changes(&self) -> watch::Receiver<()> {
        self.shared.registry.changes()
    }

    /// Makes one transaction. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// [`KeysError`].
    pub async fn update(&self, request: UpdateRequest) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.ask(|reply| Command::Update(Box::new(request), reply))
            .await
    }

    /// Plans a change and keeps the plan for [`Keys::commit`]. The guest is not changed.
    ///
    /// # Errors
    /// As [`Keys::update`]; [`KeysError::TooManyPlans`].
    pub async fn prepare(&self, request: PrepareRequest) -> Result<Arc<PrepareOutcome>, KeysError> {
        self.ask(|reply| Command::Prepare(Box::new(request), reply))
            .await
    }

    /// Makes a prepared change. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// As [`Keys::update`]; [`KeysError::PlanNotFound`], [`KeysError::PlanNotOwned`],
    /// [`KeysError::PlanStale`].
    pub async fn commit(&self, request: CommitRequest) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.ask(|reply| Command::Commit(Box::new(request), reply))
            .await
    }

    /// Forgets a prepared change.
    ///
    /// # Errors
    /// [`KeysError::PlanNotOwned`].
    pub async fn discard(&self, request: DiscardRequest) -> Result<(), KeysError> {
        self.ask(|reply| Command::Discard(request, reply)).await
    }

    /// As many results of a change as fit into one answer. [`Keys::more_results`] has the others.
    #[must_use]
    pub fn first_results(&self, outcome: Arc<UpdateOutcome>, principal: &str) -> ResultsPage {
        let now = self.shared.clock.now();
        let incarnation = &self.shared.incarnation;
        self.shared
            .pages()
            .first(outcome, principal, incarnation, now)
    }

    /// The results that a page token stands for.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] if they are not kept any more, or are another principal's.
    pub fn more_results(&self, token: &str, principal: &str) -> Result<ResultsPage, KeysError> {
        let now = self.shared.clock.now();
        let incarnation = &self.shared.incarnation;
        self.shared.pages().next(token, principal, incarnation, now)
    }

    /// Stops the guest until [`Keys::resume`], or until the pause expires. A guest that is paused
    /// stays so at least for the request's time to live.
    ///
    /// # Errors
    /// [`KeysError::NotStopped`].
    pub async fn pause(&self, request: PauseRequest) -> Result<PauseOutcome, KeysError> {
        self.ask(|reply| Command::Pause(request, reply)).await
    }

    /// Lets the guest run on.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn resume(&self) -> Result<(), KeysError> {
        self.ask(Command::Resume).await
    }

    /// Makes the executor look at its clock; for clocks that are set by hand.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn tick(&self) -> Result<(), KeysError> {
        self.ask(Command::Tick).await
    }

    /// Reads changes from the revision `start` of `incarnation` on, or from now on if that is 0.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] for a revision of no incarnation,
    /// [`KeysError::IncarnationChanged`], [`KeysError::Compacted`], [`KeysError::RevisionInFuture`].
    pub fn watch(&self, start: u64, incarnation: &str) -> Result<Watcher, KeysError> {
        if start != 0 && incarnation.is_empty() {
            return Err(KeysError::InvalidArgument {
                field: "incarnation",
                message: format!(
                    "is empty; give the one that start_revision {start} belongs to, from the same answer"
                ),
            });
        }
        // Also without a revision: who gives one has seen keys of that incarnation.
        let current = self.incarnation().as_str();
        if !incarnation.is_empty() && incarnation != current {
            return Err(KeysError::IncarnationChanged {
                given: incarnation.chars().take(current.len()).collect(),
                current: current.to_owned(),
            });
        }
        self.shared.registry.journal().watch(start)
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, KeysError> {
        let (reply, answer) = oneshot::channel();
        match self.commands.try_send(command(reply)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(KeysError::QueueFull { waiting: QUEUE }),
            Err(TrySendError::Disconnected(_)) => return Err(self.ended().await),
        }
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(self.ended().await),
        }
    }

    /// Why the executor thread, which has dropped a command, has ended.
    async fn ended(&self) -> KeysError {
        let mut ended = self.shared.ended.subscribe();
        match ended.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(why)) if !why.is_empty() => KeysError::Internal {
                message: format!("{why}; restart the guest before you change keys"),
            },
            _ => KeysError::GuestStopped,
        }
    }

    /// Has the audit log go on in this file. Waits for room in the queue of commands.
    pub fn replace_audit_file(&self, file: AuditFile) {
        // An executor thread that has ended writes no more.
        let _ = self.commands.send(Command::AuditFile(file));
    }
}

/// Names a hold for clients. Those of another incarnation mean nothing to this one.
fn hold_id(incarnation: &Incarnation, number: u64) -> String {
    format!("{}-h{number}", incarnation.short())
}

/// The number in the id of a hold; `None` if the id is malformed or another incarnation's.
fn hold_number(incarnation: &Incarnation, id: &str) -> Option<u64> {
    let (of, number) = id.split_once("-h")?;
    let canonical = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
    (of == incarnation.short() && canonical).then(|| number.parse().ok())?
}

fn invalid(field: &'static str, message: String) -> KeysError {
    KeysError::InvalidArgument { field, message }
}

/// A client sends it back to change only what it has seen: the same key of the same incarnation, with
/// the same count, and not changed by this service since. The guest's own changes there and back do not
/// show.
fn etag(incarnation: &Incarnation, key: KeyInstance, revision: u64, count: i32) -> String {
    let epoch = key.epoch;
    format!("{}-{epoch:x}-{revision:x}-{count}", incarnation.short())
}
