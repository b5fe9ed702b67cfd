// SPDX-License-Identifier: Apache-2.0
//! Runs the only thread that writes the log. Intents that arrive together share a sync.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::text::cut;
use tokio::sync::{mpsc, oneshot};

use super::log::AuditLog;
use super::record::Entry;

/// The limits for lines of denied calls, which keep clients from filling the disk. The first is the
/// maximum burst in bytes. The second is the rate in bytes per second, which is 88 MB a day.
const DENIED_BURST_BYTES: u64 = 256 << 10;
const DENIED_BYTES_PER_SECOND: u64 = 1 << 10;
/// The size of a denied call's line without its strings, in bytes.
const DENIED_LINE_BYTES: u64 = 256;
/// The maximum size of an outcome's message, in bytes. A longer one is cut.
const MAX_MESSAGE_BYTES: usize = 4096;
/// The maximum size of a denial's reason and of its guest's name, in bytes.
const MAX_WHY_BYTES: usize = 1024;
const MAX_NAME_BYTES: usize = 256;
/// The daemon warns if fewer bytes than this are free for the log, because a full disk blocks every
/// change.
const LOW_ROOM: u64 = 256 << 20;
/// The interval of checks of the free space, in addition to those after each write.
const ROOM_INTERVAL: Duration = Duration::from_secs(60);

enum Line {
    Intent {
        entry: Entry,
        done: oneshot::Sender<Result<u64, String>>,
    },
    Outcome {
        id: u64,
        code: String,
        message: String,
    },
    Denied(Entry),
    LookAtRoom,
    Flush(oneshot::Sender<()>),
}

/// A handle to the log that all calls share.
#[derive(Clone)]
pub struct Audit {
    lines: mpsc::UnboundedSender<Line>,
    denied: Arc<Mutex<Denied>>,
    records: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
    room: Arc<AtomicU64>,
}

struct Denied {
    /// The number of bytes that may be written now.
    left: u64,
    since: Instant,
    unwritten: u64,
}

impl Audit {
    /// Starts the thread. It ends, and the log is closed, when the last clone and the last
    /// [`Pending`] are dropped.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(log: AuditLog) -> std::io::Result<Self> {
        let (lines, receiver) = mpsc::unbounded_channel();
        let records = Arc::new(AtomicU64::new(log.records() as u64));
        let failures = Arc::new(AtomicU64::new(0));
        let room = Arc::new(AtomicU64::new(log.room().unwrap_or(u64::MAX)));
        let audit = Self {
            lines,
            denied: Arc::new(Mutex::new(Denied {
                left: DENIED_BURST_BYTES,
                since: Instant::now(),
                unwritten: 0,
            })),
            records: Arc::clone(&records),
            failures: Arc::clone(&failures),
            room: Arc::clone(&room),
        };
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || {
                Writer {
                    log,
                    records,
                    failures,
                    room,
                    is_low: false,
                }
                .run(receiver);
            })?;
        Ok(audit)
    }

    /// Writes an intent, and returns when it is on the disk.
    ///
    /// # Errors
    /// The reason why it could not be written. The change must not be made.
    pub async fn intend(&self, entry: Entry) -> Result<Pending, String> {
        let (done, written) = oneshot::channel();
        let ended = || "the thread that writes the audit log has ended".to_owned();
        self.lines
            .send(Line::Intent { entry, done })
            .map_err(|_| ended())?;
        // A caller that stops waiting leaves an intent without an outcome and makes no change.
        let id = written.await.map_err(|_| ended())??;
        Ok(Pending {
            id: Some(id),
            lines: self.lines.clone(),
        })
    }

    /// Records that a call was denied, unless there are too many such calls.
    pub fn denied(&self, principal: &str, method: &str, guest: &str, why: &str) {
        let short = |text: &str, bytes| cut(text, bytes).into_owned();
        let (principal, guest) = (
            short(principal, MAX_NAME_BYTES),
            short(guest, MAX_NAME_BYTES),
        );
        let why = short(why, MAX_WHY_BYTES);
        let strings = [principal.as_str(), method, &guest, &why];
        let bytes = strings.iter().map(|text| text.len() as u64).sum::<u64>() + DENIED_LINE_BYTES;
        let mut denied = self.denied.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(unwritten) = denied.admit(Instant::now(), bytes) else {
            return;
        };
        let _ = self.lines.send(Line::Denied(Entry::Denied {
            principal,
            method: method.to_owned(),
            guest,
            why,
            unwritten,
        }));
    }

    /// Checks the free space for the log in an endless loop, because other programs may fill the
    /// disk while the log is idle.
    pub async fn watch_room(self) {
        let mut ticks = tokio::time::interval(ROOM_INTERVAL);
        loop {
            ticks.tick().await;
            let _ = self.lines.send(Line::LookAtRoom);
        }
    }

    /// Returns the free bytes on the log's file system; `None` if unknown.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        Some(self.room.load(Ordering::Relaxed)).filter(|room| *room != u64::MAX)
    }

    /// Waits until all earlier lines are written.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.lines.send(Line::Flush(done)).is_ok() {
            let _ = flushed.await;
        }
    }

    /// Returns the number of lines in the log.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Returns the number of writes that failed since the start.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl Denied {
    /// Admits a line of this many bytes and returns the number of lines left out before it; `None`
    /// if this line is left out too.
    fn admit(&mut self, now: Instant, bytes: u64) -> Option<u64> {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            let earned = seconds.saturating_mul(DENIED_BYTES_PER_SECOND);
            self.left = self.left.saturating_add(earned).min(DENIED_BURST_BYTES);
            self.since = now;
        }
        let Some(left) = self.left.checked_sub(bytes) else {
            self.unwritten += 1;
            return None;
        };
        self.left = left;
        Some(std::mem::take(&mut self.unwritten))
    }
}

/// An intent that waits for its outcome. Dropping it without one records that the client left.
#[derive(Debug)]
pub struct Pending {
    id: Option<u64>,
    lines: mpsc::UnboundedSender<Line>,
}

impl Pending {
    /// Writes the outcome.
    pub fn finish(mut self, code: &str, message: &str) {
        self.end(code, message);
    }

    fn end(&mut self, code: &str, message: &str) {
        if let Some(id) = self.id.take() {
            let _ = self.lines.send(Line::Outcome {
                id,
                code: code.to_owned(),
                message: cut(message, MAX_MESSAGE_BYTES).into_owned(),
            });
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.end(
            "CANCELLED",
            "the client left before the answer; the monitor's audit log has the outcome",
        );
    }
}

struct Writer {
    log: AuditLog,
    records: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
    room: Arc<AtomicU64>,
    /// True if a low free space was already logged.
    is_low: bool,
}

impl Writer {
    fn run(mut self, mut lines: mpsc::UnboundedReceiver<Line>) {
        while let Some(first) = lines.blocking_recv() {
            let mut written = vec![];
            let mut next = Some(first);
            while let Some(line) = next {
                self.write(line, &mut written);
                next = lines.try_recv().ok();
            }
            let synced = if written.is_empty() {
                Ok(())
            } else {
                self.log.sync().map_err(|error| self.failed(&error))
            };
            self.records
                .store(self.log.records() as u64, Ordering::Relaxed);
            self.look_at_room();
            for (done, id) in written {
                let _ = done.send(synced.clone().map(|()| id));
            }
        }
    }

    fn write(
        &mut self,
        line: Line,
        written: &mut Vec<(oneshot::Sender<Result<u64, String>>, u64)>,
    ) {
        match line {
            Line::Intent { entry, done } => match self.log.intent(entry) {
                Ok(id) => written.push((done, id)),
                Err(error) => {
                    let _ = done.send(Err(self.failed(&error)));
                }
            },
            Line::Outcome { id, code, message } => {
                if let Err(error) = self.log.outcome(id, &code, &message) {
                    self.failed(&error);
                }
            }
            // The free space is checked after every write.
            Line::LookAtRoom => {}
            Line::Flush(done) => {
                let _ = done.send(());
            }
            Line::Denied(entry) => {
                if let Err(error) = self.log.intent(entry) {
                    self.failed(&error);
                }
            }
        }
    }

    fn look_at_room(&mut self) {
        let Some(room) = self.log.room() else {
            return;
        };
        self.room.store(room, Ordering::Relaxed);
        let was_low = std::mem::replace(&mut self.is_low, room < LOW_ROOM);
        if self.is_low && !was_low {
            tracing::warn!(
                bytes = room,
                "the disk of the audit log is nearly full, and no change is possible on a full disk; free some space, or move older files of the log"
            );
        }
    }

    fn failed(&self, error: &super::AuditError) -> String {
        self.failures.fetch_add(1, Ordering::Relaxed);
        tracing::error!(%error, "the audit log cannot be written; no change is made until it can");
        error.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::verify;

    fn intent(guest: &str) -> Entry {
        Entry::Intent {
            principal: "uid:0".to_owned(),
            method: "/patchbay.v1.GuestService/PauseGuest".to_owned(),
            guest: guest.to_owned(),
            rule: "on-call".to_owned(),
            request: "{}".to_owned(),
            trace_id: String::new(),
        }
    }

    /// Returns the entries in the log once `audit` is closed.
    fn entries(path: &std::path::Path) -> Vec<(u64, Entry)> {
        let mut entries = vec![];
        verify(path, |record| {
            entries.push((record.id, record.entry.clone()))
        })
        .expect("whole");
        entries
    }

    #[tokio::test]
    async fn an_intent_is_in_the_file_before_the_call_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
        let first = audit.intend(intent("a")).await.expect("written");
        assert_eq!(entries(&path), [(0, intent("a"))]);
        let second = audit.intend(intent("b")).await.expect("written");
        drop(second);
        first.finish("OK", "1 key");
        // The next intent comes after both outcomes.
        let third = audit.intend(intent("c")).await.expect("written");
        let found = entries(&path);
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(matches!(&found[2], (1, Entry::Outcome { code, .. }) if code == "CANCELLED"));
        assert!(matches!(&found[3], (0, Entry::Outcome { code, .. }) if code == "OK"));
        assert_eq!(audit.records(), 5);
        drop(third);
    }

    #[test]
    fn denied_calls_cannot_fill_the_disk() {
        let start = Instant::now();
        let mut denied = Denied {
            left: DENIED_BURST_BYTES,
            since: start,
            unwritten: 0,
        };
        let line = 2 << 10;
        let burst = (0..1000).filter(|_| denied.admit(start, line).is_some());
        assert_eq!(burst.count() as u64, DENIED_BURST_BYTES / line);
        let second = Duration::from_secs(1);
        let unwritten = 1000 - DENIED_BURST_BYTES / line;
        assert_eq!(denied.admit(start + second, line), None);
        assert_eq!(denied.admit(start + 2 * second, line), Some(unwritten + 1));
        assert_eq!(denied.admit(start + 2 * second, line), None);
        // Short lines are charged by their own length.
        assert_eq!(denied.admit(start + 3 * second, 300), Some(1));
        assert_eq!(denied.admit(start + 3 * second, 300), Some(0));
    }

    /// Checks that the limit holds for strings of any length in the calls.
    #[tokio::test]
    async fn denied_calls_are_bound_in_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
        let long = "x".repeat(1 << 20);
        for _ in 0..2000 {
            audit.denied(&long, "/patchbay.v1.GuestService/PauseGuest", &long, &long);
        }
        audit.flush().await;
        let length = std::fs::metadata(&path).expect("a log").len();
        // On a slow machine the limit allows some more lines while the calls are made.
        assert!(length < 2 * DENIED_BURST_BYTES, "{length}");
    }
}
