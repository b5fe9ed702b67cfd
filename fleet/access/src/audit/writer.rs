// SPDX-License-Identifier: Apache-2.0
//! Runs the only thread that writes the log. Intents that arrive together share a sync.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::text::cut;
use tokio::sync::{mpsc, oneshot};

use super::log::AuditLog;
use super::record::{Entry, Record};

/// The limits for lines of denied calls, which keep clients from filling the disk. `BURST_BYTES` is
/// the maximum burst. `BYTES_PER_SECOND` is the rate, which is 88 MB a day. Lines of refused
/// certificates have a separate budget with the same limits, so that clients without an accepted
/// certificate cannot hide the denials of others.
const BURST_BYTES: u64 = 256 << 10;
const BYTES_PER_SECOND: u64 = 1 << 10;
/// The limits for lines of calls that read a guest's log or its events. These calls change nothing,
/// so no cap of the policy limits them. The rate is 353 MB a day.
const READING_BURST_BYTES: u64 = 4 << 20;
const READING_BYTES_PER_SECOND: u64 = 4 << 10;
/// The length in bytes that is charged in advance for the outcome of such a call.
const READING_OUTCOME_BYTES: u64 = 512;
/// The maximum length in bytes of a line that reports the number of lines that were left out.
const LEFT_OUT_BYTES: u64 = 256;
/// The maximum size of an outcome's message, in bytes. A longer one is cut.
const MAX_MESSAGE_BYTES: usize = 4096;
/// The maximum size of a denial's reason and of its guest's name, in bytes.
const MAX_WHY_BYTES: usize = 1024;
const MAX_NAME_BYTES: usize = 256;
/// The daemon warns if fewer bytes than this are free for the log, because a full disk blocks every
/// change.
const LOW_ROOM: u64 = 256 << 20;
/// The interval at which the free space is checked, in addition to the checks after each write.
/// Lines that were left out are reported at the same interval.
const TICK: Duration = Duration::from_secs(60);

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
    /// A line that is not synced.
    Event(Entry),
    LookAtRoom,
    Flush(oneshot::Sender<()>),
}

/// A handle to the log that all calls share.
#[derive(Clone)]
pub struct Audit {
    lines: mpsc::UnboundedSender<Line>,
    budgets: Arc<Mutex<Budgets>>,
    records: Arc<AtomicU64>,
    failures: Arc<AtomicU64>,
    room: Arc<AtomicU64>,
}

/// The limits on lines that clients can cause without a change.
struct Budgets {
    denied: Budget,
    refused: Budget,
    reading: Budget,
}

struct Budget {
    /// The maximum number of bytes in `left`.
    burst: u64,
    per_second: u64,
    /// The number of bytes that may be written now.
    left: u64,
    since: Instant,
    /// The number of lines that were left out and not reported yet.
    left_out: u64,
}

impl Audit {
    /// Starts the thread. When the last clone and the last [`Pending`] are dropped, the thread ends
    /// and the log is closed.
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
            budgets: Arc::new(Mutex::new(Budgets::new(Instant::now()))),
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

    /// Returns whether the intent and the outcome of a call that reads records may be written. If
    /// not, the call must be refused, because clients could otherwise fill the disk, or read
    /// without a record.
    #[must_use]
    pub fn admits_reading(&self, entry: &Entry) -> bool {
        let bytes = Record::bytes(entry).saturating_add(READING_OUTCOME_BYTES);
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        budgets.reading.takes(Instant::now(), bytes)
    }

    /// Records that a call was denied, unless there are too many such calls.
    /// `person` is the person for whom the principal makes the call; empty if it has asserted none.
    pub fn denied(&self, principal: &str, person: &str, method: &str, guest: &str, why: &str) {
        let entry = Entry::Denied {
            principal: short(principal, MAX_NAME_BYTES),
            person: short(person, MAX_NAME_BYTES),
            method: method.to_owned(),
            guest: short(guest, MAX_NAME_BYTES),
            why: short(why, MAX_WHY_BYTES),
        };
        self.event(entry, |budgets| &mut budgets.denied);
    }

    /// Records that the certificate of a new connection was not accepted, unless there are too many
    /// such connections. `principal` is empty if no trusted CA has issued the certificate.
    pub fn refused(&self, address: &str, principal: &str, why: &str) {
        let entry = Entry::Refused {
            address: address.to_owned(),
            principal: short(principal, MAX_NAME_BYTES),
            why: short(why, MAX_WHY_BYTES),
        };
        self.event(entry, |budgets| &mut budgets.refused);
    }

    /// Writes a line if its budget admits it. The number of lines that were left out before it is
    /// written first.
    fn event(&self, entry: Entry, budget: impl FnOnce(&mut Budgets) -> &mut Budget) {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        if budget(&mut budgets).admits(Instant::now(), Record::bytes(&entry)) {
            self.send_left_out(&mut budgets);
            let _ = self.lines.send(Line::Event(entry));
        }
    }

    fn send_left_out(&self, budgets: &mut Budgets) {
        if let Some(entry) = budgets.take_left_out() {
            let _ = self.lines.send(Line::Event(entry));
        }
    }

    /// Records the number of lines that were left out since the last such record.
    fn report_left_out(&self) {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        self.send_left_out(&mut budgets);
    }

    /// Checks the free space for the log in an endless loop, because other programs may fill the
    /// disk while the log is idle. Also records the number of lines that were left out, because no
    /// other line may follow them.
    pub async fn watch(self) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            self.report_left_out();
            let _ = self.lines.send(Line::LookAtRoom);
        }
    }

    /// Returns the free bytes on the log's file system; `None` if unknown.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        Some(self.room.load(Ordering::Relaxed)).filter(|room| *room != u64::MAX)
    }

    /// Waits until all earlier lines and the number of left-out lines are written.
    pub async fn flush(&self) {
        self.report_left_out();
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

impl Budgets {
    fn new(now: Instant) -> Self {
        Self {
            denied: Budget::new(now, BURST_BYTES, BYTES_PER_SECOND),
            refused: Budget::new(now, BURST_BYTES, BYTES_PER_SECOND),
            reading: Budget::new(now, READING_BURST_BYTES, READING_BYTES_PER_SECOND),
        }
    }

    /// Returns the line that reports the lines that were left out, and forgets them; `None` if
    /// there are none.
    fn take_left_out(&mut self) -> Option<Entry> {
        let denied = std::mem::take(&mut self.denied.left_out);
        let refused = std::mem::take(&mut self.refused.left_out);
        (denied > 0 || refused > 0).then_some(Entry::LeftOut { denied, refused })
    }
}

impl Budget {
    fn new(now: Instant, burst: u64, per_second: u64) -> Self {
        Self {
            burst,
            per_second,
            left: burst,
            since: now,
            left_out: 0,
        }
    }

    /// Takes this many bytes and returns true. If fewer are left, takes nothing and returns false.
    fn takes(&mut self, now: Instant, bytes: u64) -> bool {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            let earned = seconds.saturating_mul(self.per_second);
            self.left = self.left.saturating_add(earned).min(self.burst);
            self.since = now;
        }
        let left = self.left.checked_sub(bytes);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }

    /// Returns whether a line of this many bytes may be written, and otherwise counts it as left
    /// out. The first line that is admitted after left-out lines is also charged for the line that
    /// reports them.
    fn admits(&mut self, now: Instant, bytes: u64) -> bool {
        let report = match self.left_out {
            0 => 0,
            _ => LEFT_OUT_BYTES,
        };
        let admitted = self.takes(now, bytes.saturating_add(report));
        if !admitted {
            self.left_out = self.left_out.saturating_add(1);
        }
        admitted
    }
}

fn short(text: &str, bytes: usize) -> String {
    cut(text, bytes).into_owned()
}

/// An intent that waits for its outcome. If it is dropped without [`Self::finish`], the outcome
/// CANCELLED is written.
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
            // Nothing is written. `run` checks the free space after each batch of lines.
            Line::LookAtRoom => {}
            Line::Flush(done) => {
                let _ = done.send(());
            }
            Line::Event(entry) => {
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
            person: String::new(),
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
        let mut budgets = Budgets::new(start);
        let line = 2 << 10;
        let admits = |budgets: &mut Budgets, seconds, bytes| {
            let now = start + Duration::from_secs(seconds);
            budgets.denied.admits(now, bytes)
        };
        let burst = (0..1000).filter(|_| admits(&mut budgets, 0, line)).count() as u64;
        assert_eq!(burst, BURST_BYTES / line);
        // Each second earns half a line. The admitted line is also charged for the report.
        assert!(!admits(&mut budgets, 2, line));
        assert!(admits(&mut budgets, 3, line));
        let (denied, refused) = (1000 - burst + 1, 0);
        assert_eq!(
            budgets.take_left_out(),
            Some(Entry::LeftOut { denied, refused })
        );
        assert_eq!(budgets.take_left_out(), None);
        // Short lines are charged by their own length.
        assert!(admits(&mut budgets, 4, 300) && admits(&mut budgets, 4, 300));
        assert!(
            budgets.refused.admits(start, line),
            "another budget for refused certificates"
        );
    }

    #[tokio::test]
    async fn calls_that_read_cannot_fill_the_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
        let entry = intent("a");
        let bytes = Record::bytes(&entry) + READING_OUTCOME_BYTES;
        let admitted = (0..100_000).filter(|_| audit.admits_reading(&entry));
        let admitted = admitted.count() as u64;
        let burst = READING_BURST_BYTES / bytes;
        // On a slow machine, the rate allows some more.
        assert!((burst..2 * burst).contains(&admitted), "{admitted}");
        let mut budget = Budget::new(Instant::now(), 100, 10);
        let after = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert!(budget.takes(after(0), 100) && !budget.takes(after(0), 1));
        assert!(budget.takes(after(5), 50), "the rate refills the budget");
    }

    /// Checks that the limit holds for strings of any length, even if JSON escapes each byte to six
    /// bytes, and that the log records how many lines are missing.
    #[tokio::test]
    async fn denied_calls_are_bound_in_bytes() {
        for text in ["x", "\u{1}", "\"", "\u{9b}"] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("audit.jsonl");
            let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
            let long = text.repeat(64 << 10);
            for _ in 0..1000 {
                audit.denied(
                    &long,
                    &long,
                    "/patchbay.v1.GuestService/PauseGuest",
                    &long,
                    &long,
                );
                audit.refused("192.0.2.1:7", &long, &long);
            }
            audit.flush().await;
            let length = std::fs::metadata(&path).expect("a log").len();
            // On a slow machine the limits allow some more lines while the calls are made.
            assert!(length < 3 * BURST_BYTES, "{text:?}: {length}");
            let (mut written, mut left_out) = ([0; 2], [0; 2]);
            for (_, entry) in entries(&path) {
                match entry {
                    Entry::Denied { .. } => written[0] += 1,
                    Entry::Refused { .. } => written[1] += 1,
                    Entry::LeftOut { denied, refused } => {
                        left_out = [left_out[0] + denied, left_out[1] + refused];
                    }
                    other => panic!("{other:?}"),
                }
            }
            for (written, left_out) in written.into_iter().zip(left_out) {
                assert!(written > 0 && left_out > 0, "{text:?}");
                assert_eq!(written + left_out, 1000, "{text:?}");
            }
        }
    }

    /// Checks that the number of left-out lines is recorded even if no other line follows them.
    #[tokio::test(start_paused = true)]
    async fn lines_that_were_left_out_are_counted_without_another_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let audit = Audit::start(AuditLog::open(&path).expect("new")).expect("a thread");
        let watching = tokio::spawn(audit.clone().watch());
        tokio::task::yield_now().await;
        let long = "x".repeat(MAX_WHY_BYTES);
        for _ in 0..1000 {
            audit.denied(
                "alice",
                "",
                "/patchbay.v1.GuestService/PauseGuest",
                "a",
                &long,
            );
        }
        tokio::time::sleep(TICK + Duration::from_secs(1)).await;
        watching.abort();
        let _ = watching.await;
        // The thread writes the line before it closes the log.
        drop(audit);
        let last = loop {
            match AuditLog::open(&path) {
                Ok(_) => break entries(&path).pop(),
                Err(crate::audit::AuditError::InUse { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        assert!(
            matches!(last, Some((_, Entry::LeftOut { denied, .. })) if denied > 500),
            "{last:?}"
        );
    }
}
