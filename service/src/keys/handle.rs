// SPDX-License-Identifier: Apache-2.0
//! The handle through which callers read and change the keys of a guest.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use patchbay_guest::guest::{Guest, Machine};
use patchbay_guest::log_file::LogPath;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::threads::{PlainThreads, ThreadKind, Threads, contain};
use tokio::sync::{oneshot, watch};

use super::advice;
use super::audit::{AuditFile, AuditLog, Reader, Reading};
use super::claims::{ClaimsOutcome, ClaimsRequest, CopiedHolds, LedgerFile};
use super::clock::{Clock, SystemClock};
use super::declared::Declarations;
use super::error::KeysError;
use super::executor::{Command, Executor, Keeper, Queued, Reply, Settings};
use super::incarnation::Incarnation;
use super::journal::Watcher;
use super::outcome::{
    HoldView, PauseOutcome, PauseState, PrepareOutcome, RepairOutcome, UpdateOutcome,
};
use super::pages::ResultsPage;
use super::registry::{Description, Registry};
use super::request::{
    CommitRequest, DiscardRequest, PauseRequest, PrepareRequest, ReleaseRequest, RenewRequest,
    RepairRequest, SaveRequest, UpdateRequest,
};
use super::scope::{Caller, Use};
use super::shared::{ExecutorEnd, Shared};
use super::symbols::Symbols;
use crate::trace_id;

/// Capacity of the command queue. Calls are refused while it is full.
const QUEUE: usize = 256;

/// Options of the keys of a guest.
pub struct KeysConfig {
    /// Log of intents and outcomes.
    pub audit: AuditLog,
    /// File that keeps claims and holds, for a guest that outlives this process.
    pub ledger: Option<LedgerFile>,
    /// The guest is a copy, which was started from a snapshot.
    pub is_copy: bool,
    /// Holds and claims of the guest that this one is a copy of.
    pub copied: Option<CopiedHolds>,
    /// Symbols that give sites their function names.
    pub symbols: Symbols,
    /// Permits changes of guarded keys. Requests must permit them too.
    pub allow_guarded: bool,
    /// Permits changes of sites in a guest that checks its kernel's text.
    pub allow_text_checker: bool,
    /// Guarded keys that the host declares as class ref.
    pub declared: Declarations,
    /// The clock by which holds expire.
    pub clock: Arc<dyn Clock>,
    /// Starts the executor thread.
    pub threads: Arc<dyn Threads>,
}

impl Default for KeysConfig {
    fn default() -> Self {
        Self {
            audit: AuditLog::default(),
            ledger: None,
            is_copy: false,
            copied: None,
            symbols: Symbols::default(),
            allow_guarded: false,
            allow_text_checker: false,
            declared: Declarations::default(),
            clock: Arc::new(SystemClock),
            threads: Arc::new(PlainThreads),
        }
    }
}

/// Handle to the keys of one guest. All clones use the same executor thread, which ends when the
/// last clone is dropped.
#[derive(Clone)]
pub struct Keys {
    pub(super) shared: Arc<Shared>,
    machine: Arc<dyn Machine>,
    commands: SyncSender<Queued>,
    audit: AuditLog,
}

impl Keys {
    /// Starts the executor thread. `registry` must serve this guest's requests.
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
        let mut shared = Shared::new(registry, config.symbols, config.clock);
        shared.is_copy = config.is_copy;
        let copied = config.copied.map(|copied| copied.0);
        let ledger = Keeper::new(config.ledger, copied, &mut shared.incarnation);
        let shared = Arc::new(shared);
        shared.book().ledger_waits = ledger.waits();
        let (commands, receiver) = sync_channel(QUEUE);
        let settings = Settings {
            allow_guarded: config.allow_guarded,
            allow_text_checker: config.allow_text_checker,
        };
        let audit = config.audit.clone();
        let executor = Executor::new(
            Arc::clone(&guest),
            Arc::clone(&shared),
            config.audit,
            settings,
        )
        .keeping(ledger);
        let told = Arc::clone(&shared);
        let body = Box::new(move || {
            let ended = contain("the keys", || executor.run(&receiver));
            told.ended.send_replace(Some(match ended {
                Ok(()) => ExecutorEnd::Dropped,
                Err(why) => ExecutorEnd::Panicked(why),
            }));
        });
        let thread = config.threads.spawn(ThreadKind::Keys, body)?;
        Ok((
            Self {
                shared,
                machine: guest,
                commands,
                audit,
            },
            thread,
        ))
    }

    /// Returns the guest.
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }

    /// Records that a client begins to read.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: nothing may be read.
    pub(crate) async fn begin_reading(&self, reader: Reader) -> Result<Reading, KeysError> {
        Reading::begin(self.audit.clone(), reader).await
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    pub(crate) fn ram(&self) -> Result<&GuestRam, KeysError> {
        // The memory is attached before the first registration.
        self.shared.registry.ram().ok_or(KeysError::GuestStopped)
    }

    /// Returns the registration's description.
    pub fn describe(&self) -> Description {
        let mut description = self.shared.registry.describe();
        if !description.boot.is_empty() {
            description.boot = self.shared.named_boot(description.boot);
        }
        description
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
        self.find_kernel(request.update.deadline).await;
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

    /// Releases holds in one transaction. Dropping the future before the pause cancels it.
    ///
    /// # Errors
    /// [`KeysError::HoldNotFound`], NOT_HOLDER, and as [`Keys::update`].
    pub async fn release(&self, request: ReleaseRequest) -> Result<Arc<UpdateOutcome>, KeysError> {
        self.find_kernel(request.deadline).await;
        self.ask(|reply| Command::Release(Box::new(request), reply))
            .await
    }

    /// Renews all of the holds or none, in the order of the ids. The guest keeps running.
    ///
    /// # Errors
    /// [`KeysError::HoldNotFound`], NOT_HOLDER, [`KeysError::AuditLogUnwritable`].
    pub async fn renew(&self, request: RenewRequest) -> Result<Vec<HoldView>, KeysError> {
        self.ask(|reply| Command::Renew(request, reply)).await
    }

    /// Waits until the holds and claims are those of the running kernel. Before, they may be those
    /// of an earlier process, or those of the guest before another client stopped and resumed it.
    /// Call this before holds or claims are listed.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] if an earlier process has left holds or claims and the guest's
    /// kernel is not known yet.
    pub async fn adopt_ledger(&self) -> Result<(), KeysError> {
        let waits = self.shared.book().ledger_waits;
        if !waits && !self.shared.is_behind() {
            return Ok(());
        }
        let adopted = self.ask(Command::Adopt).await;
        match waits {
            true => adopted,
            false => Ok(()),
        }
    }

    /// Replaces the claims of an owner by one transaction, in which refused keys are left out. A
    /// repeat with the same generation gets the first answer.
    ///
    /// # Errors
    /// [`KeysError::ClaimsRefused`], and as [`Keys::update`] for errors that concern every key.
    pub async fn set_claims(
        &self,
        request: ClaimsRequest,
    ) -> Result<Arc<ClaimsOutcome>, KeysError> {
        self.find_kernel(request.deadline).await;
        self.ask(|reply| Command::Claim(Box::new(request), reply))
            .await
    }

    /// Writes to the sites of a key the bytes that its count requires.
    ///
    /// # Errors
    /// [`KeysError`]; FOREIGN_BYTES if the bytes of a site are no mixture of its NOP and its JMP.
    pub async fn repair(&self, request: RepairRequest) -> Result<RepairOutcome, KeysError> {
        self.ask(|reply| Command::Repair(Box::new(request), reply))
            .await
    }

    /// Checks whether a caller may use these keys, and counts changed keys against the caps.
    ///
    /// # Errors
    /// [`KeysError::NotPermitted`].
    pub fn permit<'k>(
        &self,
        caller: &Caller,
        keys: impl FnOnce() -> Vec<&'k str>,
        how: Use,
    ) -> Result<(), KeysError> {
        self.shared.permit(caller, keys, how)
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

    /// Saves the guest: passes its memory to the request's sink and returns the rest of its state.
    /// The guest is stopped meanwhile, and other calls wait.
    ///
    /// # Errors
    /// [`KeysError::NotSaved`], [`KeysError::NotStopped`].
    pub async fn save(&self, request: SaveRequest) -> Result<Vec<u8>, KeysError> {
        self.ask(|reply| Command::Save(request, reply)).await
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
        // This is checked even without a revision, because a client that names an incarnation has
        // seen its keys.
        let current = self.incarnation().as_str();
        if !incarnation.is_empty() && incarnation != current {
            return Err(KeysError::IncarnationChanged {
                given: incarnation.chars().take(current.len()).collect(),
                current: current.to_owned(),
            });
        }
        self.shared.registry.journal().watch(start)
    }

    /// Discovers the guest's kernel if it is not known. While the guest is busy, tries again until
    /// the deadline. Dropping the future ends the wait. Afterwards the caller must check whether
    /// the kernel is known.
    pub async fn find_kernel(&self, deadline: Instant) {
        // A tenth of the time is left for the call. So the call's error can say why the guest was
        // busy.
        let rest = deadline.saturating_duration_since(Instant::now()) / 10;
        let deadline = deadline.checked_sub(rest).unwrap_or(deadline);
        while !self.shared.registry.needs_no_discovery() {
            let shared = Arc::clone(&self.shared);
            // A discovery takes tens of milliseconds.
            let look = tokio::task::spawn_blocking(move || shared.registry.look_for_kernel());
            let Ok(Some(rest)) = look.await else { return };
            let next = Instant::now() + rest;
            if next >= deadline {
                return;
            }
            tokio::time::sleep_until(next.into()).await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, KeysError> {
        let (reply, answer) = oneshot::channel();
        let queued = Queued {
            trace_id: trace_id::current(),
            command: command(reply),
        };
        match self.commands.try_send(queued) {
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
            Ok(Some(ExecutorEnd::Panicked(why))) => KeysError::Internal {
                message: format!("{why}; restart the guest before you change keys"),
            },
            _ => KeysError::GuestStopped,
        }
    }

    /// Opens the audit log again by its name, which another file may have. Waits for room in the
    /// command queue. If the file cannot be opened, the log continues in the renamed one.
    pub fn reopen_audit_log(&self, place: &Arc<LogPath>) {
        match AuditFile::open(Arc::clone(place)) {
            // An executor thread that has ended writes nothing more.
            Ok(file) => drop(self.commands.send(Queued {
                trace_id: None,
                command: Command::AuditFile(file),
            })),
            Err(error) => tracing::error!(
                "the audit log {} cannot be reopened ({error}); it continues in the renamed file",
                place.path().display()
            ),
        }
    }
}
