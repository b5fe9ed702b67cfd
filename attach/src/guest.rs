// SPDX-License-Identifier: Apache-2.0
//! A guest that a QEMU runs: the seams of the service.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_service::console::Console;
use patchbay_service::guest::{Guest, GuestDescription, Machine, PausedGuest, Write};
use patchbay_service::memory::GuestRam;
use patchbay_service::pause::{Activity, LateVcpu, PauseError};
use serde_json::Value;

use crate::console::NoConsole;
use crate::freeze::{FreezeError, Frozen, Point, freeze};
use crate::hotplug::Watch;
use crate::memory::AttachedRam;
use crate::monitor::{Migration, Monitor, PATIENCE};
use crate::process::Process;
use crate::qmp::{Event, QmpError};
use crate::rollback::Record;
use crate::watchdog::Watchdog;

/// How often QEMU is asked to resume the guest until it answers.
const RESUMES: u32 = 3;
/// Time allowed for a look at the migration while the guest is stopped.
const LOOK: Duration = Duration::from_millis(250);
/// Time allowed for all questions of one stop about registers, and about memory that can be removed.
const CONFIRM: Duration = Duration::from_secs(1);
/// How long a process may live on after it has closed its monitor.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// How the vCPUs are stopped.
#[derive(Debug)]
pub enum Pauser {
    /// QEMU's `stop` and `cont` are used. `stop` drains and flushes the guest's disks, stops the guest's clock, and tells everybody by an
    /// event; another client's `cont` ends it early.
    Qmp,
    /// The vCPUs' threads are stopped by ptrace, at such a point.
    Freeze(Mutex<Threads>, Point),
}

/// The threads of the vCPUs, in QEMU's PID namespace and in this one.
#[derive(Debug, Default)]
pub struct Threads {
    theirs: Vec<u32>,
    ours: Vec<u32>,
}

/// Why there is nothing to patch any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest has powered off, or its monitor has ended.
    Guest,
    /// The monitor cannot be asked any more. The guest may run on.
    Connection(String),
}

/// What is known of the guest's life.
#[derive(Default)]
pub struct Life {
    end: Mutex<Option<End>>,
    ended: Condvar,
    resets: AtomicU64,
    memory_events: AtomicU64,
    console: NoConsole,
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Life")
            .field("end", &self.end)
            .field("resets", &self.resets)
            .finish_non_exhaustive()
    }
}

impl Life {
    fn end(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first end counts.
    pub fn set_end(&self, end: End) {
        let guest = end == End::Guest;
        let first = self.end().get_or_insert(end).clone();
        self.ended.notify_all();
        if guest && first == End::Guest {
            self.console.close();
        }
    }

    /// Waits for the end.
    #[must_use]
    pub fn wait(&self) -> End {
        let mut end = self.end();
        loop {
            if let Some(end) = &*end {
                return end.clone();
            }
            end = self.ended.wait(end).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// How often the guest was reset. Another number: another kernel may run.
    #[must_use]
    pub fn resets(&self) -> u64 {
        self.resets.load(Ordering::SeqCst)
    }

    /// Counts what may mean that memory was plugged in or removed.
    #[must_use]
    pub fn memory_events(&self) -> u64 {
        self.memory_events.load(Ordering::SeqCst)
    }

    /// Applies an event of QEMU.
    pub fn event(&self, event: &Event) {
        match event.name.as_str() {
            "RESET" => {
                self.resets.fetch_add(1, Ordering::SeqCst);
            }
            "SHUTDOWN" => self.set_end(End::Guest),
            // ACPI_DEVICE_OST: the guest answers an offered device. MEMORY_DEVICE_SIZE_CHANGE: virtio-mem.
            "DEVICE_DELETED" | "ACPI_DEVICE_OST" | "MEMORY_DEVICE_SIZE_CHANGE" => {
                self.memory_events.fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// The monitor's connection has ended.
    pub fn disconnected(&self, process: Option<&Process>) {
        match process {
            Some(process) if !process.has_ended_within(LAST_MOMENTS) => {
                self.set_end(End::Connection(
                    "QEMU has closed its QMP connection".to_owned(),
                ));
            }
            _ => self.set_end(End::Guest),
        }
    }
}

/// A guest that a QEMU runs.
#[derive(Debug)]
pub struct QemuGuest {
    /// Dropped first: it may have to speak over the monitor's connection.
    pub(crate) watchdog: Mutex<Watchdog>,
    pub(crate) description: GuestDescription,
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) process: Arc<Process>,
    pub(crate) memory: Arc<AttachedRam>,
    pub(crate) ram: GuestRam,
    pub(crate) pauser: Pauser,
    pub(crate) life: Arc<Life>,
    /// An answer of [`Guest::pause`] lives.
    pub(crate) held: AtomicBool,
    pub(crate) watch: Mutex<Watch>,
    /// Makes this the only attacher.
    pub(crate) _lock: File,
}

impl QemuGuest {
    /// The monitor.
    #[must_use]
    pub fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// The monitor's process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// The guest's memory, with what the service does not need.
    #[must_use]
    pub fn memory(&self) -> &AttachedRam {
        &self.memory
    }

    /// The guest's life.
    #[must_use]
    pub fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Whether this process holds the guest stopped.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Refuses a guest that does not run, or that is on its way to another host.
    fn check(&self) -> Result<Migration, PauseError> {
        let status = self.monitor.status().map_err(unable)?;
        match status.as_str() {
            "running" => {}
            "paused" | "suspended" => return Err(PauseError::AlreadyPaused),
            "shutdown" | "guest-panicked" | "internal-error" => return Err(PauseError::Ended),
            "postmigrate" => {
                return Err(unable(
                    "the guest has migrated away; attach to it where it runs now",
                ));
            }
            _ => {
                return Err(unable(format!(
                    "QEMU says that the guest is {status:?}; wait until it is running"
                )));
            }
        }
        let migration = self.monitor.migration(PATIENCE).map_err(unable)?;
        check_migration(&migration)?;
        Ok(migration)
    }

    fn watchdog(&self) -> MutexGuard<'_, Watchdog> {
        self.watchdog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arm(&self, threads: &[u32], point: Point) -> Result<(), PauseError> {
        self.watchdog()
            .arm(threads, point)
            .map_err(|error| unable(format!("the guest is not stopped: {error}; attach again")))
    }

    fn late(&self, deadline: Duration, vcpus: impl Iterator<Item = usize>) -> PauseError {
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

    fn stop_by_qmp(&self, timeout: Duration) -> Result<Way<'_>, PauseError> {
        let vcpus = self.description.vcpus as usize;
        self.arm(&[], Point::Any)?;
        let mut lease = Lease {
            guest: self,
            rips: Vec::new(),
        };
        match self.monitor.execute("stop", Value::Null, timeout) {
            Ok(_) => {}
            Err(QmpError::TimedOut { .. }) => {
                // QEMU carries out commands in order: the `cont` of the lease ends the stop that comes late.
                return Err(self.late(timeout, 0..vcpus));
            }
            Err(error) => return Err(unable(error)),
        }
        let registers = self.monitor.registers(CONFIRM).map_err(unable)?;
        lease.rips = registers.iter().map(|vcpu| vcpu.rip).collect();
        Ok(Way::Qmp(lease))
    }

    fn stop_by_ptrace(
        &self,
        threads: &Mutex<Threads>,
        point: Point,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Way<'_>, PauseError> {
        let theirs = self.monitor.vcpu_threads().map_err(unable)?;
        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.theirs != theirs {
            let ours = self.process.threads(&theirs);
            *threads = Threads {
                ours: ours.ok_or_else(|| unable("the threads of the guest's vCPUs are not found in QEMU's process; attach again"))?,
                theirs,
            };
        }
        self.arm(&threads.ours, point)?;
        let error = match freeze(&threads.ours, point, deadline) {
            Ok(frozen) => return Ok(Way::Frozen(frozen)),
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

fn check_migration(migration: &Migration) -> Result<(), PauseError> {
    if migration.is_under_way() {
        return Err(PauseError::Unable {
            why: format!(
                "a migration of the guest is under way (QEMU says {:?}), and what is written now may be lost; wait for its end",
                migration.status()
            ),
        });
    }
    Ok(())
}

fn unable(why: impl std::fmt::Display) -> PauseError {
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
        *self.life.end() == Some(End::Guest)
    }

    fn shut_down(&self) {
        if !self.has_ended() {
            // Its answer comes before its end; without one the end is waited for as well.
            let _ = self.monitor.execute("quit", Value::Null, PATIENCE);
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

    fn take_back_press(&self) -> bool {
        // QEMU has no command for it.
        false
    }

    fn console(&self) -> &dyn Console {
        &self.life.console
    }
}

/// The guest, stopped.
#[derive(Debug)]
pub struct Paused<'g> {
    guest: &'g QemuGuest,
    /// `None` only while it is dropped.
    way: Option<Way<'g>>,
    stop_time: Duration,
    migration: Migration,
    /// The memory stays as it is.
    _watch: MutexGuard<'g, Watch>,
}

#[derive(Debug)]
enum Way<'g> {
    Qmp(Lease<'g>),
    Frozen(Frozen),
}

/// A stop by QMP, or one that was asked for. Its drop says `cont`.
#[derive(Debug)]
struct Lease<'g> {
    guest: &'g QemuGuest,
    rips: Vec<u64>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        for _ in 0..RESUMES {
            match self.guest.monitor.execute("cont", Value::Null, PATIENCE) {
                Ok(_) => return self.guest.watchdog().disarm(),
                // Nobody else would resume the guest while this process lives.
                Err(error @ QmpError::TimedOut { .. }) => {
                    tracing::warn!(%error, "the guest may still be stopped");
                }
                Err(error) => {
                    tracing::error!(%error, "the guest was not resumed");
                    return;
                }
            }
        }
        // The watchdog says it again when this process ends.
        tracing::error!("the guest was not resumed; send cont to QEMU, or end this process");
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        let frozen = matches!(self.way, Some(Way::Frozen(_)));
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
            Some(Way::Qmp(lease)) => Some(&lease.rips),
            // QEMU asks the vCPU's own thread for its registers, and would wait for it.
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
        self.guest.watchdog().begin_writes().map_err(|error| {
            format!("nobody would roll back what is written in part: {error}; attach again")
        })
    }

    fn check_writes(&self) -> Result<(), String> {
        let migration = self
            .guest
            .monitor
            .migration(LOOK)
            .map_err(|error| error.to_string())?;
        if migration == self.migration {
            return Ok(());
        }
        Err(format!(
            "a migration of the guest began while it was stopped (QEMU says {:?}), so the change is undone; wait for its end",
            migration.status()
        ))
    }
}

impl Guest for QemuGuest {
    type Paused<'a> = Paused<'a>;

    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn will_write(&self, writes: &mut dyn Iterator<Item = Write>) -> Result<(), PauseError> {
        let record = |write: Write| {
            Some(Record {
                key: u32::try_from(write.key).ok()?,
                address: self.memory.monitors_address(write.piece)?,
                length: u8::try_from(write.piece.length()).ok()?,
                before: write.before,
                after: write.after,
            })
        };
        let records: Option<Vec<Record>> = writes.map(record).collect();
        let records = records.ok_or_else(|| unable("memory that would be written is gone"))?;
        self.watchdog().will_write(&records).map_err(|error| {
            unable(format!(
                "nobody would roll back what is written in part: {error}; attach again"
            ))
        })
    }

    fn pause(&self, timeout: Duration) -> Result<Paused<'_>, PauseError> {
        if self.has_ended() {
            return Err(PauseError::Ended);
        }
        if self.held.swap(true, Ordering::SeqCst) {
            return Err(PauseError::AlreadyPaused);
        }
        let stop = || {
            let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            let migration = self.check()?;
            let began = Instant::now();
            let way = match &self.pauser {
                Pauser::Qmp => self.stop_by_qmp(timeout)?,
                Pauser::Freeze(threads, point) => {
                    self.stop_by_ptrace(threads, *point, began + timeout, timeout)?
                }
            };
            let mut stop_time = match &way {
                Way::Frozen(frozen) => frozen.stop_time(),
                Way::Qmp(_) => began.elapsed(),
            };
            let confirming = Instant::now();
            self.memory.confirm(&self.process, |address| {
                let left = CONFIRM.saturating_sub(confirming.elapsed());
                self.monitor.host_address(address, left)
            });
            stop_time += confirming.elapsed();
            Ok(Paused {
                guest: self,
                way: Some(way),
                stop_time,
                migration,
                _watch: watch,
            })
        };
        stop().inspect_err(|_| {
            self.held.store(false, Ordering::SeqCst);
        })
    }
}
