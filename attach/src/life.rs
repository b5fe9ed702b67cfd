// SPDX-License-Identifier: Apache-2.0
//! Tracks resets, stops and the end of the guest, by QEMU's events and the end of its process.
//!
//! `loadvm` and `snapshot-load` restore an earlier state of the guest's memory and emit no RESET.
//! They stop a running guest and resume it, so a STOP or RESUME that this process did not cause
//! counts as a new boot. While this process holds the guest stopped by QMP, no such event occurs.
//! Then a job that begins counts as a new boot; HMP's `loadvm` is not noticed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::console::NoConsole;
use crate::process::Process;
use crate::qmp::Event;
use crate::watchdog::Watchdog;

/// The maximum number of STOP and RESUME events that are kept until QEMU answers a `stop`.
const MAX_CHANGES: usize = 256;
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
///   None ─ stop_begins ─▶ Sent ─ stop_was_answered ─▶ Ours ─ stop_ends ─▶ Ends ─ RESUME ─▶ None
///                          │                           └─ RESUME by another client ─▶ None
///                          └─ another client's stop ─▶ None
/// ```
#[derive(Debug, Default)]
enum Stop {
    /// This process has not stopped the guest.
    #[default]
    None,
    /// This process has sent `stop`. Whether it stopped the guest follows from the answer and these
    /// events.
    Sent(Vec<Change>),
    /// This process has stopped the guest, and the guest has not been resumed since.
    Ours,
    /// This process has sent `cont`.
    Ends,
}

/// A STOP or RESUME.
#[derive(Debug)]
struct Change {
    /// The number of earlier events of the connection.
    number: u64,
    runs: bool,
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
        *self.stop() = Stop::Sent(Vec::new());
    }

    /// Decides who made the stop that this process sent, and returns whether this process did.
    ///
    /// `ran` is QEMU's answer to the query immediately before the `stop`. `window` contains the
    /// numbers of the events between that answer and the one to `stop`; `None` if the events do not
    /// come in order with the answers. The last event in the window shows the state in which the
    /// `stop` left the guest: a STOP follows only a running guest, so it is not the stop that the
    /// query found.
    pub fn stop_was_answered(&self, ran: bool, window: Option<Range<u64>>) -> bool {
        let mut stop = self.stop();
        let changes = match std::mem::take(&mut *stop) {
            Stop::Sent(changes) => changes,
            decided => {
                let is_ours = !matches!(decided, Stop::None);
                *stop = decided;
                return is_ours;
            }
        };
        let (stopped, resumed_since) = match &window {
            None => (ran, false),
            Some(window) => {
                let within = |change: &&Change| window.contains(&change.number);
                let last = changes.iter().rfind(within);
                let since = |change: &Change| change.number >= window.end && change.runs;
                let stopped = last.map_or(ran, |change| !change.runs);
                (stopped, changes.iter().any(since))
            }
        };
        let is_ours = stopped && !resumed_since && changes.len() < MAX_CHANGES;
        if is_ours {
            *stop = Stop::Ours;
        }
        drop(stop);
        // A RESUME was counted when it arrived.
        if !stopped && !changes.iter().any(|change| change.runs) {
            self.set_back();
        }
        if !is_ours {
            self.tell_resumed();
        }
        is_ours
    }

    /// Records that `cont` is about to be sent. Returns false if this process no longer owns the
    /// stop and must not send `cont`.
    #[must_use]
    pub fn stop_ends(&self) -> bool {
        let mut stop = self.stop();
        let is_ours = !matches!(*stop, Stop::None);
        if is_ours {
            *stop = Stop::Ends;
        }
        is_ours
    }

    /// Records that no further command about a stop follows.
    pub fn stop_is_over(&self) {
        *self.stop() = Stop::None;
    }

    /// Returns whether this process holds the guest stopped, according to the events.
    #[must_use]
    pub fn is_stopped_by_us(&self) -> bool {
        !matches!(*self.stop(), Stop::None)
    }

    /// Registers the watchdog that is told when another client ends a stop of this process.
    pub fn tell(&self, watchdog: Weak<Mutex<Watchdog>>) {
        let _ = self.watchdog.set(watchdog);
    }

    /// Tells the watchdog that this process no longer holds the guest stopped.
    fn tell_resumed(&self) {
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
            "STOP" => self.stopped(event.number),
            "RESUME" => self.resumed(event.number),
            // The event does not show the job's type. In a running guest, a job stops the guest
            // before it loads anything.
            "JOB_STATUS_CHANGE"
                if event.data["status"] == "created"
                    && matches!(*self.stop(), Stop::Sent(_) | Stop::Ours) =>
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

    fn stopped(&self, number: u64) {
        let mut stop = self.stop();
        match &mut *stop {
            Stop::Sent(changes) => keep(changes, number, false),
            // Through libvirt, the STOP of this process may arrive after the answer to its `stop`.
            Stop::Ours => {}
            Stop::None | Stop::Ends => self.set_back(),
        }
    }

    fn resumed(&self, number: u64) {
        let mut stop = self.stop();
        match &mut *stop {
            Stop::Sent(changes) => {
                keep(changes, number, true);
                self.set_back();
            }
            Stop::Ends => *stop = Stop::None,
            Stop::Ours | Stop::None => {
                *stop = Stop::None;
                drop(stop);
                self.set_back();
                self.tell_resumed();
            }
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

fn keep(changes: &mut Vec<Change>, number: u64, runs: bool) {
    if changes.len() < MAX_CHANGES {
        changes.push(Change { number, runs });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn event(life: &Life, name: &str, number: u64) {
        life.event(&Event {
            name: name.to_owned(),
            data: Value::Null,
            number,
        });
    }

    /// Returns whether the stop is this process's, and whether a reset was counted, after these
    /// events. The query was answered after two events, and `stop` after six.
    fn judge(ran: bool, events: &[(&str, u64)]) -> (bool, bool) {
        let life = Life::default();
        life.stop_begins();
        for (name, number) in events {
            event(&life, name, *number);
        }
        let is_ours = life.stop_was_answered(ran, Some(2..6));
        assert_eq!(life.is_stopped_by_us(), is_ours);
        (is_ours, life.resets() > 0)
    }

    #[test]
    fn the_last_event_before_the_answer_shows_who_stopped_the_guest() {
        let (ours, anothers) = ((true, false), (false, true));
        assert_eq!(judge(true, &[("STOP", 2)]), ours);
        assert_eq!(judge(true, &[]), ours, "an event that is missing");
        // Another client's stop came before the query.
        assert_eq!(judge(false, &[]), anothers);
        assert_eq!(judge(false, &[("STOP", 1)]), anothers);
        assert_eq!(judge(false, &[("RESUME", 0), ("STOP", 1)]), anothers);
        // It ended between the query and this process's stop.
        let again = (true, true);
        assert_eq!(judge(false, &[("RESUME", 2), ("STOP", 3)]), again);
        assert_eq!(
            judge(true, &[("STOP", 2), ("RESUME", 3), ("STOP", 4)]),
            again
        );
        // Another client has resumed the guest since.
        assert_eq!(judge(true, &[("STOP", 2), ("RESUME", 5)]), anothers);
        assert_eq!(judge(true, &[("STOP", 2), ("RESUME", 6)]), anothers);
        let since = [("STOP", 2), ("RESUME", 6), ("STOP", 7)];
        assert_eq!(judge(true, &since), anothers);
    }

    #[test]
    fn events_that_come_in_no_order_do_not_decide() {
        for (ran, is_ours) in [(true, true), (false, false)] {
            let life = Life::default();
            life.stop_begins();
            event(&life, "RESUME", 0);
            assert_eq!(life.stop_was_answered(ran, None), is_ours);
            assert_eq!(life.resets(), 1);
        }
    }

    #[test]
    fn a_flood_of_events_takes_bounded_memory_and_leaves_the_guest_to_its_cause() {
        let life = Life::default();
        life.stop_begins();
        for number in 0..100_000 {
            let name = if number % 2 == 0 { "STOP" } else { "RESUME" };
            event(&life, name, number);
        }
        assert!(matches!(&*life.stop(), Stop::Sent(changes) if changes.len() == MAX_CHANGES));
        assert!(!life.stop_was_answered(true, Some(0..u64::MAX)));
    }

    #[test]
    fn a_stop_ends_once() {
        let life = Life::default();
        life.stop_begins();
        event(&life, "STOP", 0);
        assert!(life.stop_was_answered(true, Some(0..1)));
        assert!(life.stop_was_answered(false, Some(0..1)), "it is decided");
        assert!(life.stop_ends());
        event(&life, "RESUME", 1);
        assert!(!life.is_stopped_by_us() && !life.stop_ends());
        assert_eq!(life.resets(), 0, "all of this was this process");
        event(&life, "STOP", 2);
        event(&life, "RESUME", 3);
        assert_eq!(life.resets(), 2);
    }
}
