// SPDX-License-Identifier: Apache-2.0
//! Tracks resets, stops and the end of the guest, by QEMU's events and the end of its process.
//!
//! `loadvm` and `snapshot-load` restore an earlier state of the guest's memory and emit no RESET.
//! They stop a running guest and resume it, so a STOP or RESUME that this process did not cause
//! counts as a new boot. While this process holds the guest stopped by QMP, no such event occurs.
//! Then a job that begins counts as a new boot; HMP's `loadvm` is not noticed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::console::NoConsole;
use crate::process::Process;
use crate::qmp::Event;
use crate::watchdog::Watchdog;

/// Time for which a process may keep running after it has closed its monitor.
const LAST_MOMENTS: Duration = Duration::from_secs(2);

/// The reason why the guest can no longer be patched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest has powered off, or its monitor has ended.
    Guest,
    /// The monitor no longer answers. The guest may still run.
    Connection(String),
}

/// The known state of the guest.
#[derive(Default)]
pub struct Life {
    end: Mutex<Option<End>>,
    ended: Condvar,
    resets: AtomicU64,
    memory_events: AtomicU64,
    stop: Mutex<Stop>,
    watchdog: OnceLock<Weak<Mutex<Watchdog>>>,
    console: NoConsole,
}

/// A stop by QMP.
///
/// ```text
///   None ── stop_begins ──▶ Ours ── stop_ends ──▶ Ends ── RESUME ──▶ None
///                            └──── RESUME by another client ────────▶ None
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stop {
    /// This process has not stopped the guest.
    #[default]
    None,
    /// This process has sent `stop`, and the guest has not been resumed since.
    Ours,
    /// This process has sent `cont`.
    Ends,
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

    /// Records the end. Only the first end is kept.
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

    /// Returns how many times the guest was reset or may have been set back to an earlier state. If
    /// the number has changed, another kernel may run, or the same one with other counts.
    #[must_use]
    pub fn resets(&self) -> u64 {
        self.resets.load(Ordering::SeqCst)
    }

    /// Records a reset, because the guest may have been set back to an earlier state.
    pub fn set_back(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether the guest has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        *self.end() == Some(End::Guest)
    }

    /// Returns the console.
    #[must_use]
    pub fn console(&self) -> &NoConsole {
        &self.console
    }

    fn stop(&self) -> MutexGuard<'_, Stop> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a stop. Call it before this process sends `stop`.
    pub fn stop_begins(&self) {
        *self.stop() = Stop::Ours;
    }

    /// Corrects the record when another client stopped the guest first, so that its STOP was taken
    /// for this process's.
    pub fn stop_was_anothers(&self) {
        *self.stop() = Stop::None;
        self.set_back();
    }

    /// Records that `cont` is about to be sent. Returns false if this process no longer owns the
    /// stop and must not send `cont`.
    #[must_use]
    pub fn stop_ends(&self) -> bool {
        let mut stop = self.stop();
        let ours = *stop != Stop::None;
        if ours {
            *stop = Stop::Ends;
        }
        ours
    }

    /// Records that no further command about a stop follows.
    pub fn stop_is_over(&self) {
        *self.stop() = Stop::None;
    }

    /// Returns whether this process holds the guest stopped, according to the events.
    #[must_use]
    pub fn is_stopped_by_us(&self) -> bool {
        *self.stop() != Stop::None
    }

    /// Registers the watchdog that is told when another client ends a stop of this process.
    pub fn tell(&self, watchdog: Weak<Mutex<Watchdog>>) {
        let _ = self.watchdog.set(watchdog);
    }

    /// Handles a RESUME that this process did not cause.
    fn resumed_by_another(&self) {
        self.set_back();
        if let Some(watchdog) = self.watchdog.get().and_then(Weak::upgrade) {
            let mut watchdog = watchdog.lock().unwrap_or_else(PoisonError::into_inner);
            watchdog.was_resumed();
        }
    }

    /// Returns the number of events after which memory may have been plugged in or removed.
    #[must_use]
    pub fn memory_events(&self) -> u64 {
        self.memory_events.load(Ordering::SeqCst)
    }

    /// Applies an event of QEMU.
    pub fn event(&self, event: &Event) {
        match event.name.as_str() {
            "RESET" => self.set_back(),
            // The STOP of this process arrives before the answer to its `stop`.
            "STOP" if *self.stop() != Stop::Ours => self.set_back(),
            "RESUME" => {
                let before = std::mem::take(&mut *self.stop());
                if before != Stop::Ends {
                    self.resumed_by_another();
                }
            }
            // The event does not show the job's type. In a running guest, a job stops the guest
            // before it loads anything.
            "JOB_STATUS_CHANGE"
                if event.data["status"] == "created" && *self.stop() == Stop::Ours =>
            {
                self.set_back();
            }
            "SHUTDOWN" => self.set_end(End::Guest),
            // ACPI_DEVICE_OST is the guest's answer to an offered device. MEMORY_DEVICE_SIZE_CHANGE
            // comes from virtio-mem.
            "DEVICE_DELETED" | "ACPI_DEVICE_OST" | "MEMORY_DEVICE_SIZE_CHANGE" => {
                self.memory_events.fetch_add(1, Ordering::SeqCst);
            }
            _ => {}
        }
    }

    /// Records that the monitor's connection has ended.
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
