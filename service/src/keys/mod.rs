// SPDX-License-Identifier: Apache-2.0
//! The guest's static keys: what it registered, who holds what, and the one owner of changes.
//!
//! ```text
//!  vCPU threads ── requests ──▶ Registry ── snapshots ──┬──▶ Owner (one thread) ──▶ pause, commit
//!                                   │                   │       │  ▲
//!                                   ▼                   ▼       │  │ commands
//!  watchers ◀──────────────────  Journal ◀──────────────────────┘  │
//!  clients ──────────────────▶  Keys (list, get, holds) ───────────┘
//! ```

pub(crate) mod address_space;
pub mod audit;
mod clock;
mod draft;
mod error;
mod flip;
mod holds;
mod journal;
mod near;
mod owner;
mod pattern;
mod registration;
pub mod registry;
pub mod replay;
mod selection;
pub mod symbols;
mod view;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use patchbay_proto::v1;
use static_keys::Op;
use tokio::sync::oneshot;

pub use self::address_space::PageTable;
pub use self::clock::{Clock, SystemClock};
pub use self::error::KeysError;
pub use self::holds::{Hold, Holds, KeyInstance};
pub use self::journal::{Author, Event, Journal, Limits, Revision, Watcher};
use self::owner::{Command, Owner, Reply};
pub use self::pattern::{MAX_PATTERNS, Patterns};
pub use self::registry::{Description, KernelTables, Refused, RegistrationPhase, Registry};
use self::replay::Replay;
use self::symbols::Symbols;
use crate::guest::{Guest, Machine};
use crate::threads::{PlainThreads, ThreadKind, Threads};

/// Commands that wait for the owner; beyond them callers are turned away.
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
    /// By which holds lapse.
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
    /// Each that is found when the change is made, and may be changed.
    Selection(Selection),
}

/// Keys by what they have in common.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// By name.
    pub patterns: Patterns,
    /// All if empty.
    pub classes: Vec<v1::KeyClass>,
}

/// A transaction.
#[derive(Clone, Debug)]
pub struct UpdateRequest {
    /// In order, at least one.
    pub updates: Vec<KeyUpdate>,
    /// "uid:N".
    pub owner: String,
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
    /// Answer with the summary alone.
    pub summary_only: bool,
    /// Kept with the holds.
    pub reason: String,
    /// When the references taken lapse.
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
        owner: String,
        stop_timeout: Duration,
        deadline: Instant,
    ) -> Self {
        Self {
            updates,
            owner,
            request_id: String::new(),
            content: replay::Content::default(),
            validate_only: false,
            allow_guarded: false,
            force: false,
            summary_only: false,
            reason: String::new(),
            ttl: None,
            stop_timeout,
            deadline,
        }
    }
}

/// What a transaction did, or would do.
#[derive(Clone, Debug, Default)]
pub struct UpdateOutcome {
    /// One per key, in the order of its first op; none if only the summary was asked for.
    pub results: Vec<v1::KeyResult>,
    /// In numbers.
    pub summary: v1::UpdateSummary,
    /// Of the journal.
    pub revision: u64,
    /// What it cost the guest.
    pub report: Option<v1::FlipReport>,
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

/// What the owner and the readers share. Locks here are held for a look or a change, never across a
/// pause.
struct Shared {
    registry: Arc<Registry>,
    book: Mutex<Book>,
    symbols: Symbols,
    clock: Arc<dyn Clock>,
    paused: AtomicBool,
}

/// What is remembered about keys; only the owner changes it.
#[derive(Debug, Default)]
struct Book {
    holds: Holds,
    /// Why a key is not to be flipped.
    quarantine: HashMap<KeyInstance, String>,
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        // The owner replaces whole values under this lock.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }
}

/// Handle to the keys of one guest. Clones share it; the owner thread ends with the last.
#[derive(Clone)]
pub struct Keys {
    shared: Arc<Shared>,
    machine: Arc<dyn Machine>,
    commands: SyncSender<Command>,
}

impl Keys {
    /// Starts the owner thread. `registry` must be the one that answers this guest's requests.
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
            paused: AtomicBool::new(false),
        });
        let (commands, receiver) = sync_channel(QUEUE);
        let owner = Owner {
            guest: Arc::clone(&guest),
            shared: Arc::clone(&shared),
            audit: config.audit,
            replay: Replay::new(REPLAYED_ANSWERS, REPLAYED_RESULTS),
            allow_guarded: config.allow_guarded,
            pruned: 0,
        };
        let body = Box::new(move || owner.run(&receiver));
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

    /// Number of the newest change.
    pub fn revision(&self) -> u64 {
        self.shared.registry.journal().latest()
    }

    /// Whether an operator holds the guest paused.
    pub fn is_paused(&self) -> bool {
        self.shared.paused.load(Ordering::Relaxed)
    }

    /// Makes one transaction. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// [`KeysError`].
    pub async fn update(&self, request: UpdateRequest) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.ask(|reply| Command::Update(Box::new(request), reply))
            .await
    }

    /// Stops the guest until [`Keys::resume`]; how long the vCPUs took, or 0 if they were stopped.
    ///
    /// # Errors
    /// [`KeysError::NotStopped`].
    pub async fn pause(&self, timeout: Duration) -> Result<Duration, KeysError> {
        self.ask(|reply| Command::Pause(timeout, reply)).await
    }

    /// Lets the guest run on.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn resume(&self) -> Result<(), KeysError> {
        self.ask(Command::Resume).await
    }

    /// Makes the owner look at its clock; for clocks that are set by hand.
    ///
    /// # Errors
    /// [`KeysError::QueueFull`].
    pub async fn tick(&self) -> Result<(), KeysError> {
        self.ask(Command::Tick).await
    }

    /// Reads changes from the revision `start` on, or from now on if that is 0.
    ///
    /// # Errors
    /// [`KeysError::Compacted`], [`KeysError::RevisionInFuture`].
    pub fn watch(&self, start: u64) -> Result<Watcher, KeysError> {
        self.shared.registry.journal().watch(start)
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, KeysError> {
        let (reply, answer) = oneshot::channel();
        match self.commands.try_send(command(reply)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(KeysError::QueueFull { waiting: QUEUE }),
            Err(TrySendError::Disconnected(_)) => return Err(KeysError::GuestStopped),
        }
        answer.await.unwrap_or(Err(KeysError::GuestStopped))
    }
}

/// A duration as the API tells it.
pub(crate) fn to_proto(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration {
        seconds: i64::MAX,
        nanos: 0,
    })
}

/// What a client must send back to change only what it has seen.
fn etag(generation: u64, count: i32) -> String {
    format!("{generation:x}-{count}")
}
