// SPDX-License-Identifier: Apache-2.0
//! The guest's static keys: what it registered, who holds what, and the one thread that changes
//! keys.
//!
//! ```text
//!  vCPU threads ── requests ──▶ Registry ── snapshots ──┬──▶ Executor (one thread) ──▶ pause, commit
//!                                   │                   │       │  ▲
//!                                   ▼                   ▼       │  │ commands
//!  watchers ◀──────────────────  Journal ◀──────────────────────┘  │
//!  clients ──────────────────▶  Keys (list, get, holds) ───────────┘
//! ```

pub(crate) mod address_space;
mod advice;
pub mod audit;
mod boot;
mod clock;
pub mod debug;
pub mod declared;
mod draft;
mod error;
mod estimate;
mod executor;
mod find_kernel;
mod gate;
mod hold_list;
mod holds;
mod incarnation;
mod journal;
mod near;
mod outcome;
mod pages;
mod plans;
mod quarantine;
mod refused;
mod registration;
pub mod registry;
pub mod replay;
mod request;
mod selection;
pub mod symbols;
mod text_checker;
mod view;

use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use foldhash::fast::RandomState;
use patchbay_guest::guest::{Guest, Machine};
use patchbay_guest::threads::{PlainThreads, ThreadKind, Threads, contain};
use static_keys::Patterns;
use tokio::sync::{oneshot, watch};

pub use self::advice::{Advice, Known, Safety};
use self::audit::AuditFile;
pub use self::clock::{Clock, SystemClock};
use self::declared::Declarations;
pub use self::error::{KeyRefusal, KeysError};
pub use self::executor::release::{ReleaseRequest, RenewRequest};
pub use self::executor::repair::{
    MAX_TORN, RepairOutcome, RepairRequest, RepairedSite, TornKey, Verification,
};
use self::executor::{Command, Executor, Reply, Traced};
pub use self::gate::ClosedGate;
pub use self::hold_list::{HoldPage, HoldQuery, HoldView};
pub use self::holds::{Hold, Holds, KeyInstance};
pub use self::incarnation::Incarnation;
pub use self::journal::{Author, Event, Journal, Limits, Revision, Watcher};
pub use self::outcome::{FlipReport, KeyOutcome, PauseTimes, UpdateOutcome, UpdateSummary};
use self::pages::ResultPages;
pub use self::pages::ResultsPage;
pub use self::plans::{CommitRequest, DiscardRequest, PlanUsage, PrepareOutcome, PrepareRequest};
pub use self::quarantine::{Quarantine, QuarantineCause};
pub use self::registry::{Description, KernelTables, Refused, RegistrationPhase, Registry};
use self::replay::Replay;
pub use self::request::{
    KeyUpdate, ListQuery, PauseOutcome, PauseRequest, PauseState, Selection, Target,
    TracepointUpdate, UpdateRequest,
};
use self::symbols::Symbols;
pub(crate) use self::view::PAGE_BYTES;
pub use self::view::{KeyDetails, KeyPage, KeyView, SiteView};

/// Capacity of the command queue; beyond it calls are refused.
const QUEUE: usize = 256;
/// Maximum number of ops in one transaction.
pub const MAX_UPDATES: usize = 65_536;
const REPLAYED_ANSWERS: usize = 1024;
const REPLAYED_RESULTS: usize = 1 << 18;

/// Options of the keys of a guest.
pub struct KeysConfig {
    /// Log of intents and outcomes.
    pub audit: audit::AuditLog,
    /// Symbols that give sites their function names.
    pub symbols: Symbols,
    /// Whether guarded keys may be changed at all.
    pub allow_guarded: bool,
    /// Whether sites may be changed in a guest that checks its kernel's text.
    pub allow_text_checker: bool,
    /// Guarded keys that the host declares as class ref.
    pub declared: Declarations,
    /// Clock of hold expiry.
    pub clock: Arc<dyn Clock>,
    /// Starts the executor thread.
    pub threads: Arc<dyn Threads>,
}

impl Default for KeysConfig {
    fn default() -> Self {
        Self {
            audit: audit::AuditLog::default(),
            symbols: Symbols::default(),
            allow_guarded: false,
            allow_text_checker: false,
            declared: Declarations::default(),
            clock: Arc::new(SystemClock),
            threads: Arc::new(PlainThreads),
        }
    }
}

/// State that the executor and readers share. No lock in it is held across a pause.
struct Shared {
    registry: Arc<Registry>,
    book: Mutex<Book>,
    symbols: Symbols,
    clock: Arc<dyn Clock>,
    incarnation: Incarnation,
    pause: watch::Sender<PauseState>,
    pages: Mutex<ResultPages>,
    /// Set when the executor thread has ended: empty, or the error.
    ended: watch::Sender<Option<String>>,
}

/// State of keys outside guest memory. Only the executor changes it.
#[derive(Debug, Default)]
struct Book {
    holds: Holds,
    /// Quarantined keys.
    quarantine: HashMap<KeyInstance, Quarantine>,
    /// Revision of each key's last change.
    revisions: HashMap<KeyInstance, u64, RandomState>,
}

impl Book {
    /// Revision of the key's last change; 0 if there was none.
    fn revision(&self, key: KeyInstance) -> u64 {
        self.revisions.get(&key).copied().unwrap_or_default()
    }

    /// Drops keys that no longer exist.
    fn retain(&mut self, mut exists: impl FnMut(KeyInstance) -> bool) {
        self.holds.retain(&mut exists);
        self.quarantine.retain(|key, _| exists(*key));
        self.revisions.retain(|key, _| exists(*key));
    }
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        // The executor replaces whole values under this lock, so a panic leaves no half state.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_pause(&self, state: PauseState) {
        self.pause.send_replace(state);
    }

    fn pages(&self) -> MutexGuard<'_, ResultPages> {
        // Each method replaces whole lists, so a panic leaves no half state.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle to the keys of one guest. Clones share it; the executor thread ends with the last.
#[derive(Clone)]
pub struct Keys {
    shared: Arc<Shared>,
    machine: Arc<dyn Machine>,
    commands: SyncSender<Traced>,
}

impl Keys {
    /// Starts the executor thread. `registry` must be the one that serves this guest's requests.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start<G: Guest>(
        guest: Arc<G>,
        registry: Arc<Registry>,
        config: KeysConfig,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        advice::load();
        registry.declare(config.declared);
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
            allow_text_checker: config.allow_text_checker,
            pruned: 0,
            expiries: executor::expiry::Expiries::default(),
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

    /// Returns the guest.
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// Returns the registration's description.
    pub fn describe(&self) -> Description {
        self.shared.registry.describe()
    }

    /// Returns the incarnation of this service.
    pub fn incarnation(&self) -> &Incarnation {
        &self.shared.incarnation
    }

    /// Returns the journal's newest revision.
    pub fn revision(&self) -> u64 {
        self.shared.registry.journal().latest()
    }

    /// Returns whether the guest is held paused, and until when.
    pub fn pause_state(&self) -> PauseState {
        *self.shared.pause.borrow()
    }

    /// Signals changes of [`Self::pause_state`].
    pub fn pause_changes(&self) -> watch::Receiver<PauseState> {
        self.shared.pause.subscribe()
    }

    /// Signals changes of [`Self::describe`].
    pub fn registration_changes(&self) -> watch::Receiver<()> {
        self.shared.registry.changes()
    }

    /// Makes one transaction. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// [`KeysError`].
    pub async fn update(&self, request: UpdateRequest) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.find_kernel(request.deadline).await;
        self.ask(|reply| Command::Update(Box::new(request), reply))
            .await
    }

    /// Plans a change and keeps the plan for [`Keys::commit`]. The guest is not changed.
    ///
    /// # Errors
    /// Those of [`Keys::update`]; [`KeysError::TooManyPlans`].
    pub async fn prepare(&self, request: PrepareRequest) -> Result<Arc<PrepareOutcome>, KeysError> {
        self.find_kernel(request.deadline).await;
        self.ask(|reply| Command::Prepare(Box::new(request), reply))
            .await
    }

    /// Makes a prepared change. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// Those of [`Keys::update`]; [`KeysError::PlanNotFound`], [`KeysError::PlanNotOwned`],
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

    /// Returns the first page of a change's results. [`Keys::more_results`] returns the other
    /// pages.
    #[must_use]
    pub fn first_results(&self, outcome: Arc<UpdateOutcome>, principal: &str) -> ResultsPage {
        let now = self.shared.clock.now();
        let incarnation = &self.shared.incarnation;
        self.shared
            .pages()
            .first(outcome, principal, incarnation, now)
    }

    /// Returns the page of results that a token identifies.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] if the results are no longer kept or belong to another
    /// principal.
    pub fn more_results(&self, token: &str, principal: &str) -> Result<ResultsPage, KeysError> {
        let now = self.shared.clock.now();
        let incarnation = &self.shared.incarnation;
        self.shared.pages().next(token, principal, incarnation, now)
    }

    /// Stops the guest until [`Keys::resume`] or until the pause expires. A guest that is already
    /// paused stays paused for at least the request's time to live.
    ///
    /// # Errors
    /// [`KeysError::NotStopped`].
    pub async fn pause(&self, request: PauseRequest) -> Result<PauseOutcome, KeysError> {
        self.ask(|reply| Command::Pause(request, reply)).await
    }

    /// Resumes the guest.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn resume(&self) -> Result<(), KeysError> {
        self.ask(Command::Resume).await
    }

    /// Makes the executor read its clock again, for clocks that are set by hand.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn tick(&self) -> Result<(), KeysError> {
        self.ask(Command::Tick).await
    }

    /// Watches changes from revision `start` of `incarnation`, or from the next one if `start` is
    /// 0.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] for a revision of no incarnation,
    /// [`KeysError::IncarnationChanged`], [`KeysError::Compacted`],
    /// [`KeysError::RevisionInFuture`].
    pub fn watch(&self, start: u64, incarnation: &str) -> Result<Watcher, KeysError> {
        if start != 0 && incarnation.is_empty() {
            return Err(KeysError::InvalidArgument {
                field: "incarnation",
                message: format!(
                    "is empty; give the one that start_revision {start} belongs to, from the same answer"
                ),
            });
        }
        // Checked without a revision too: a client that names an incarnation has seen its keys.
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
        match self.commands.try_send(command(reply).traced()) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(KeysError::QueueFull { waiting: QUEUE }),
            Err(TrySendError::Disconnected(_)) => return Err(self.ended().await),
        }
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(self.ended().await),
        }
    }

    /// Returns the reason why the executor thread ended and dropped a command.
    async fn ended(&self) -> KeysError {
        let mut ended = self.shared.ended.subscribe();
        match ended.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(why)) if !why.is_empty() => KeysError::Internal {
                message: format!("{why}; restart the guest before you change keys"),
            },
            _ => KeysError::GuestStopped,
        }
    }

    /// Continues the audit log in this file. Waits for room in the command queue.
    pub fn replace_audit_file(&self, file: AuditFile) {
        // An executor thread that has ended writes no more.
        let _ = self.commands.send(Command::AuditFile(file).traced());
    }
}

/// Returns the id of a hold. It is only valid in this incarnation.
fn hold_id(incarnation: &Incarnation, number: u64) -> String {
    format!("{}-h{number}", incarnation.short())
}

/// Returns the number in a hold's id; `None` if the id is malformed or from another incarnation.
fn hold_number(incarnation: &Incarnation, id: &str) -> Option<u64> {
    let (of, number) = id.split_once("-h")?;
    let canonical = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
    (of == incarnation.short() && canonical).then(|| number.parse().ok())?
}

fn invalid(field: &'static str, message: String) -> KeysError {
    KeysError::InvalidArgument { field, message }
}

/// Returns the etag of a key. A client sends it back to change only what it has seen: the same key
/// of the same incarnation with the same count, not changed by this service since. Changes that the
/// guest makes and reverts by itself are not detected.
fn etag(incarnation: &Incarnation, key: KeyInstance, revision: u64, count: i32) -> String {
    let epoch = key.epoch;
    format!("{}-{epoch:x}-{revision:x}-{count}", incarnation.short())
}
