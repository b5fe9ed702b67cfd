// SPDX-License-Identifier: Apache-2.0
//! Implements the service's interfaces for a guest that QEMU runs.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_guest::console::Console;
use patchbay_guest::guest::{Guest, GuestDescription, Intended, Machine, PausedGuest};
use patchbay_guest::kernel_memory::Place;
use patchbay_guest::limited;
use patchbay_guest::memory::{GuestRam, Piece};
use patchbay_guest::pause::{Activity, LateVcpu, PauseError};
use serde_json::Value;
use static_keys::{GateWord, Write};

use crate::events::Events;
use crate::freeze::{FreezeError, Frozen, Point, freeze};
use crate::hotplug::{Watch, lock_within};
use crate::identity::{self, Threads};
use crate::life::Life;
use crate::lock::Lock;
use crate::memory::{AttachedRam, ByStoppedThread};
use crate::monitor::{Migration, Monitor, PATIENCE};
use crate::process::Process;
use crate::qmp::QmpError;
use crate::rollback::{Change, Part, Record, RecordedGate};
use crate::stop::Lease;
use crate::watchdog::Watchdog;

/// Time allowed for a query while the guest is stopped, and for cancelling a migration.
pub(crate) const LOOK: Duration = Duration::from_millis(250);
/// Time allowed during one stop to read the registers, and for all queries about memory that can be
/// removed.
pub(crate) const CONFIRM: Duration = Duration::from_secs(1);

/// The way in which the vCPUs are stopped.
#[derive(Debug)]
pub enum Pauser {
    /// QEMU's `stop` and `cont` are used. `stop` drains and flushes the guest's disks, stops the
    /// guest's clock, and sends an event to all clients. Another client's `cont` ends the stop
    /// early.
    Qmp,
    /// ptrace stops the vCPUs' threads at this point.
    Freeze(Mutex<Threads>, Point),
}

/// A guest that QEMU runs.
#[derive(Debug)]
pub struct QemuGuest {
    /// Dropped first, because it may use the monitor's connection.
    pub(crate) watchdog: Arc<Mutex<Watchdog>>,
    /// The events that libvirt forwards.
    pub(crate) _events: Option<Events>,
    pub(crate) description: GuestDescription,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) process: Arc<Process>,
    pub(crate) memory: Arc<AttachedRam>,
    pub(crate) ram: GuestRam,
    pub(crate) pauser: Pauser,
    pub(crate) life: Arc<Life>,
    /// A value that [`Guest::pause`] returned is alive.
    pub(crate) held: AtomicBool,
    pub(crate) watch: Mutex<Watch>,
    /// Makes this the only attacher.
    pub(crate) _lock: Lock,
}

impl QemuGuest {
    /// Returns the connection to the monitor.
    #[must_use]
    pub fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// Returns the monitor's process.
    #[must_use]
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Returns the guest's memory, with operations that the service does not need.
    #[must_use]
    pub fn memory(&self) -> &AttachedRam {
        &self.memory
    }

    /// Returns the record of the guest's resets, stops and end.
    #[must_use]
    pub fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Returns whether this process holds the guest stopped.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Refuses a guest that does not run or that is being migrated. Returns the last migration.
    fn check(&self) -> Result<Migration, PauseError> {
        let (status, migration) = self.monitor.state(PATIENCE).map_err(unable)?;
        check_status(&status)?;
        if migration.is_contradicted() {
            // Memory that was taken for RAM during a migration may be that of a display.
            self.memory.doubt();
            return Err(contradicted(&migration));
        }
        check_migration(&migration)?;
        Ok(migration)
    }

    /// Adds the state of the memory slots to the report from before the stop. The memory of the
    /// stopped guest is then confirmed by the same slots. A change is made only if they stay the
    /// same until its end.
    fn with_slots(&self, before: Migration, way: &Way<'_>) -> Result<Migration, PauseError> {
        let Some(host) = self.monitor.host() else {
            return Ok(before);
        };
        let slots = match way {
            // The slots were read with the vCPUs' threads.
            Way::Frozen(..) => host.known_slots(),
            Way::Qmp(_) => host.slots(),
        };
        let migration = before.with(slots.map_err(unable)?);
        check_migration(&migration)?;
        Ok(migration)
    }

    /// Returns the parts of the pieces, or `None` if their memory has been removed.
    fn parts(&self, pieces: [Piece; 2]) -> Option<[Part; 2]> {
        let part = |piece: Piece| {
            Some(Part {
                address: match piece.length() {
                    0 => 0,
                    _ => self.memory.monitors_address(piece)?,
                },
                length: u8::try_from(piece.length()).ok()?,
            })
        };
        let [first, second] = pieces;
        Some([part(first)?, part(second)?])
    }

    /// Lets the watchdog leave a mark beside this ledger if this process is killed.
    ///
    /// # Errors
    /// The watchdog has ended.
    pub fn keeps_ledger(&self, path: &Path) -> io::Result<()> {
        self.watchdog().keeps_ledger(path)
    }

    pub(crate) fn watchdog(&self) -> MutexGuard<'_, Watchdog> {
        self.watchdog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn arm(&self, threads: &[u32], point: Point) -> Result<(), PauseError> {
        self.watchdog()
            .arm(threads, point)
            .map_err(|error| unable(format!("the guest is not stopped: {error}; attach again")))
    }

    pub(crate) fn late(
        &self,
        deadline: Duration,
        vcpus: impl Iterator<Item = usize>,
    ) -> PauseError {
        let late = |vcpu| LateVcpu {
            vcpu,
            activity: Activity::Guest,
            last_rip: None,
        };
        PauseError::Late {
            deadline,
            late: vcpus.map(late).collect(),
        }
    }

    /// Stops the threads of all vCPUs. A vCPU that was plugged in after the list was read would
    /// keep running, so the list is read again afterwards. A vCPU that is plugged in later executes
    /// nothing: it waits for a startup interrupt from a stopped vCPU.
    fn stop_by_ptrace(
        &self,
        threads: &Mutex<Threads>,
        point: Point,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Way<'_>, PauseError> {
        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            *threads = identity::vcpus(&self.process, &self.monitor, &threads, PATIENCE)
                .map_err(unable)?;
            let frozen = self.freeze(&mut threads, point, deadline, timeout)?;
            let looking = Instant::now();
            let failed = match threads.are_still_all(&self.monitor, LOOK) {
                Ok(true) => {
                    let ids = threads.distinct();
                    return Ok(Way::Frozen(StoppedThreads {
                        _access: self.memory.by_stopped_thread(&self.process, &ids),
                        frozen,
                        look: looking.elapsed(),
                    }));
                }
                // Either the vCPUs changed, or QEMU waits for a stopped thread.
                Ok(false) | Err(QmpError::TimedOut { .. }) => None,
                Err(error) => Some(unable(error)),
            };
            drop(frozen);
            let late = || self.late(timeout, 0..threads.each.len());
            let failed = failed.or_else(|| (Instant::now() >= deadline).then(late));
            if let Some(error) = failed {
                self.watchdog().disarm();
                return Err(error);
            }
            // The watchdog stays armed, because it would forget the change when disarmed.
        }
    }

    /// Stops the threads of the vCPUs.
    fn freeze(
        &self,
        threads: &mut Threads,
        point: Point,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Frozen, PauseError> {
        let ids = threads.distinct();
        // Another process may have the id of a thread that has ended.
        if !ids.iter().all(|id| self.process.has_thread(*id)) {
            *threads = Threads::default();
            return Err(unable(FreezeError::Gone));
        }
        self.arm(&ids, point)?;
        let error = match freeze(&ids, point, deadline) {
            // A stopped thread keeps its id, so threads that belong to QEMU now belonged to it when
            // they were stopped.
            Ok(frozen) if ids.iter().all(|id| self.process.has_thread(*id)) => {
                return Ok(frozen);
            }
            Ok(_) => {
                *threads = Threads::default();
                unable(FreezeError::Gone)
            }
            Err(FreezeError::Late(late)) => self.late(timeout, late.into_iter()),
            Err(error) => {
                *threads = Threads::default();
                unable(error)
            }
        };
        self.watchdog().disarm();
        Err(error)
    }
}

pub(crate) fn check_status(status: &str) -> Result<(), PauseError> {
    Err(match status {
        "running" => return Ok(()),
        "paused" | "suspended" => PauseError::AlreadyPaused,
        "shutdown" | "guest-panicked" | "internal-error" => PauseError::Ended,
        "postmigrate" => unable("the guest has migrated away; attach to it where it runs now"),
        _ => unable(format!(
            "QEMU says that the guest is {status:?}; wait until it is running"
        )),
    })
}

fn contradicted(migration: &Migration) -> PauseError {
    unable(format!(
        "KVM logs the dirty pages of the guest's memory, but QEMU reports no migration (its status is {:?}), so a copy of the memory that QEMU \
         does not report may miss a write now; end what needs the log, such as a measurement of the dirty rate",
        migration.reported()
    ))
}

fn check_migration(migration: &Migration) -> Result<(), PauseError> {
    if migration.is_under_way() {
        return Err(PauseError::Unable {
            why: format!(
                "a migration of the guest is in progress (its status is {:?}), so a write now may be lost; wait for its end",
                migration.status()
            ),
        });
    }
    Ok(())
}

pub(crate) fn unable(why: impl std::fmt::Display) -> PauseError {
    PauseError::Unable {
        why: why.to_string(),
    }
}

impl Machine for QemuGuest {
    fn description(&self) -> GuestDescription {
        GuestDescription {
            memory_bytes: self.memory.bytes(),
            ..self.description.clone()
        }
    }

    fn has_ended(&self) -> bool {
        self.life.has_ended()
    }

    fn shut_down(&self) {
        if !self.has_ended() {
            // QEMU answers before it ends. The end is awaited even without an answer.
            if let Err(error) = self.monitor.quit(PATIENCE) {
                tracing::warn!(%error, "the monitor may not have ended its guest");
            }
        }
    }

    fn press_power_button(&self) {
        if let Err(error) = self
            .monitor
            .execute("system_powerdown", Value::Null, PATIENCE)
        {
            tracing::warn!(%error, "the power button was not pressed");
        }
    }

    fn has_power_button(&self) -> bool {
        !self.monitor.is_host()
    }

    fn take_back_press(&self) -> bool {
        // QEMU has no command to withdraw a press.
        false
    }

    fn console(&self) -> &dyn Console {
        self.life.console()
    }
}

/// A stopped guest. Dropping it resumes the guest.
#[derive(Debug)]
pub struct Paused<'g> {
    guest: &'g QemuGuest,
    /// `None` only during the drop.
    way: Option<Way<'g>>,
    stop_time: Duration,
    /// QEMU's report of the last migration before the first write.
    migration: RefCell<Migration>,
    /// The lock that keeps the guest's memory map unchanged.
    _watch: MutexGuard<'g, Watch>,
}

#[derive(Debug)]
enum Way<'g> {
    Qmp(Lease<'g>),
    Frozen(StoppedThreads<'g>),
}

/// The stopped threads. Dropping them resumes them, after the access that needs one of them.
#[derive(Debug)]
struct StoppedThreads<'g> {
    _access: ByStoppedThread<'g>,
    frozen: Frozen,
    /// The time that the query of the vCPUs took after the stop.
    look: Duration,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.guest.watchdog().abort_in_panic();
        let frozen = matches!(self.way, Some(Way::Frozen(..)));
        self.way = None;
        if frozen {
            self.guest.watchdog().disarm();
        }
        self.guest.held.store(false, Ordering::SeqCst);
    }
}

impl PausedGuest for Paused<'_> {
    fn rips(&self) -> Option<&[u64]> {
        match &self.way {
            Some(Way::Qmp(lease)) => lease.rips(),
            // The run pages show the last return from `KVM_RUN` only if it was requested before.
            _ => None,
        }
    }

    fn breakpoint_pending(&self) -> Option<bool> {
        None
    }

    fn stop_time(&self) -> Duration {
        self.stop_time
    }

    fn begin_writes(&self) -> Result<(), String> {
        // QEMU's answer comes after the event of a reset or of a stop by another client that
        // preceded the freeze. It also shows a background snapshot that began before the freeze,
        // and that changes no memory slot.
        let state = self.guest.monitor.state(LOOK);
        let (status, migration) = state.map_err(|error| error.to_string())?;
        let is_other = migration != *self.migration.borrow();
        if is_other || migration.is_under_way() || !self.is_here(&status) {
            return Err(moved(&status, &migration));
        }
        *self.migration.borrow_mut() = migration;
        self.guest.watchdog().begin_writes().map_err(|error| {
            format!("no watchdog could roll back a partial change: {error}; attach again")
        })
    }

    fn check_writes(&self) -> Result<(), String> {
        let (status, migration) = self.look()?;
        if migration == *self.migration.borrow() && self.is_here(&status) {
            return Ok(());
        }
        if let Some(Way::Qmp(lease)) = &self.way
            && status == "running"
        {
            // The writes are undone next.
            lease.stop_again();
        }
        Err(moved(&status, &migration))
    }

    fn made(&self) {
        self.guest.watchdog().made();
    }

    /// Cancels a migration that began during the change. QEMU's dirty log does not record this
    /// process's writes. So a page that was copied between the change and its undo would not be
    /// copied again, and the guest would have a part of the change at the destination.
    fn undone(&self) {
        self.guest.watchdog().undone();
        match self.guest.monitor.cancel_migration(LOOK) {
            // Nothing has changed, or only the memory slots have.
            Ok(migration)
                if !migration.is_under_way()
                    && migration.has_same_answer(&self.migration.borrow()) => {}
            Ok(migration) if migration.is_cancelled() => {
                limited!(
                    warn,
                    "a migration that began during a change was cancelled, because it may have copied a part of the change; start the migration again"
                );
            }
            Ok(migration) => {
                let status = migration.status();
                limited!(
                    error,
                    status,
                    "a migration that began during a change was not cancelled; do not run the guest at the destination"
                );
            }
            Err(error) => {
                limited!(warn, %error, "a migration that began during a change is not cancelled until the monitor answers");
            }
        }
    }
}

impl Paused<'_> {
    /// Returns the guest's run state and the report of the last migration.
    /// [`PausedGuest::begin_writes`] must have asked QEMU before: while the vCPUs stay frozen, no
    /// later reset or stop by another client takes effect.
    fn look(&self) -> Result<(String, Migration), String> {
        let monitor = &self.guest.monitor;
        let state = match self.way {
            Some(Way::Frozen(..)) => monitor.frozen_state(&self.migration.borrow(), LOOK),
            _ => monitor.state(LOOK),
        };
        state.map_err(|error| error.to_string())
    }

    /// Returns whether the guest is still stopped in the way in which this process stopped it. QEMU
    /// reports a guest with frozen threads as running.
    fn is_here(&self, status: &str) -> bool {
        match self.way {
            Some(Way::Frozen(..)) => status == "running",
            _ => status == "paused" && self.guest.life.is_stopped_by_us(),
        }
    }
}

fn moved(status: &str, migration: &Migration) -> String {
    format!(
        "a migration of the guest began while it was stopped, or another client has stopped or resumed it, or its memory has changed (the guest is {:?}, migration {:?}), so nothing is changed; try again when the guest runs and no migration is in progress",
        status,
        migration.status()
    )
}

impl Guest for QemuGuest {
    type Paused<'a> = Paused<'a>;

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn will_write(&self, change: Intended<'_>) -> Result<(), PauseError> {
        let record = |write: Write<Place>| {
            let pieces = write.place.pieces(write.length);
            // A place with fewer bytes has no pieces.
            (pieces[0].length() != 0).then_some(())?;
            Some(Record {
                key: u32::try_from(write.key).ok()?,
                parts: self.parts(pieces)?,
                before: write.before,
                after: write.after,
            })
        };
        let gate = |gate: GateWord<Place>| {
            // An aligned word is one piece.
            let [piece, _] = gate.place.pieces(gate.length);
            Some(RecordedGate {
                address: self.memory.monitors_address(piece)?,
                length: u8::try_from(piece.length()).ok()?,
                mask: gate.mask,
                open: gate.open,
            })
        };
        let gone = || unable("memory that would be read or written is gone");
        let ledger = change.ledger;
        let change = Change {
            keys: change.keys.map(str::to_owned).collect(),
            writes: change
                .writes
                .map(record)
                .collect::<Option<_>>()
                .ok_or_else(gone)?,
            gates: change
                .gates
                .map(gate)
                .collect::<Option<_>>()
                .ok_or_else(gone)?,
        };
        self.watchdog()
            .will_write(&change, ledger.as_ref())
            .map_err(|error| {
                unable(format!(
                    "no watchdog could roll back a partial change: {error}; attach again"
                ))
            })
    }

    fn will_keep(&self, digest: &[u8; 32], replaced: Option<&[u8; 32]>) {
        self.watchdog().will_keep(digest, replaced);
    }

    fn will_write_running(&self, ledger: &[u8; 32]) {
        self.watchdog().forget(ledger);
    }

    fn pause(&self, timeout: Duration) -> Result<Paused<'_>, PauseError> {
        if self.has_ended() {
            return Err(PauseError::Ended);
        }
        if self.held.swap(true, Ordering::SeqCst) {
            return Err(PauseError::AlreadyPaused);
        }
        let stop = || {
            let watch = lock_within(&self.watch, PATIENCE)?;
            let migration = self.check()?;
            let began = Instant::now();
            let way = match &self.pauser {
                Pauser::Qmp => Way::Qmp(Lease::stop(self, timeout)?),
                Pauser::Freeze(threads, point) => {
                    self.stop_by_ptrace(threads, *point, began + timeout, timeout)?
                }
            };
            let mut stop_time = match &way {
                Way::Frozen(stopped) => stopped.frozen.stop_time() + stopped.look,
                Way::Qmp(_) => began.elapsed(),
            };
            let confirming = Instant::now();
            let migration = self.with_slots(migration, &way).inspect_err(|_| {
                // A stop by QMP ends by itself, and disarms then.
                if let Way::Frozen(..) = way {
                    self.watchdog().disarm();
                }
            })?;
            let deadline = confirming + CONFIRM;
            self.memory.confirm(&self.process, deadline, |range| {
                self.monitor.host_address(range, deadline)
            });
            stop_time += confirming.elapsed();
            Ok(Paused {
                guest: self,
                way: Some(way),
                stop_time,
                migration: RefCell::new(migration),
                _watch: watch,
            })
        };
        stop().inspect_err(|_| {
            self.held.store(false, Ordering::SeqCst);
        })
    }
}
