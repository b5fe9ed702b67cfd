// SPDX-License-Identifier: Apache-2.0
//! The audit log: JSON lines that are appended, an intent before each change and its outcome
//! afterwards.
//!
//! An intent is on the disk (`fdatasync`) before the guest is stopped for the change. If the intent
//! cannot be written, the change is not made. Outcomes are written but not synced: an outcome
//! survives a crash of the monitor, and survives a crash of the host once the next intent is
//! synced. So it is unknown whether the change of an intent without an outcome was made. A guest of
//! our own monitor ends with the monitor. In an attached guest the watchdog rolls back a partial
//! change.
//!
//! A line that a full disk or a crash cut short stays in the file. The next line starts on a new
//! line.
//!
//! On SIGHUP the monitor opens the file by its name again, between two lines, so that later lines
//! do not go to a file that was renamed.
//!
//! The executor records changes. A task that serves a client records that the client reads the
//! guest's log or events ([`Reading`]), so that a long change does not delay a reader. The lines
//! of readers do not delay a change by more than two syncs either, however many readers there are:
//! lines are written one at a time, and synced together ([`syncs`]).

mod file;
mod json;
mod lines;
mod reading;
mod syncs;

use std::borrow::Cow;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use patchbay_guest::log_file::LogPath;
use patchbay_proto::text::printable_json;
use serde::Serialize;

pub(in crate::keys) use self::file::AuditFile;
use self::file::Written;
pub use self::lines::{
    AuditOutcome, AuditedChange, Body, ClaimSet, Copied, IntendedKeys, IntendedOp, IntendedPlan,
    Intent, LedgerImport, Renewal, millis,
};
pub use self::reading::{Reader, Reading};
use super::error::KeysError;
use crate::trace_id::TraceId;

/// A handle to the open log. Without a file, lines go to tracing only.
#[derive(Clone, Debug, Default)]
pub struct AuditLog {
    log: Arc<Mutex<Log>>,
    /// The trace to which the lines of this handle belong.
    trace_id: Option<TraceId>,
}

/// The log that all handles share.
#[derive(Debug, Default)]
struct Log {
    file: Option<AuditFile>,
    next_id: u64,
}

/// The fields that begin each line.
#[derive(Serialize)]
struct Head {
    /// Milliseconds since 1970.
    time_ms: u64,
    /// Number that links an outcome to its intent within one run of the monitor.
    id: u64,
    pid: u32,
    event: &'static str,
    /// The trace of the call that asked for the change, or that reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<TraceId>,
}

impl AuditLog {
    /// Opens the log for appending, mode 0600, and never through a symbolic link.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let log = Log {
            file: Some(AuditFile::open(Arc::new(LogPath::new(path)?))?),
            next_id: 0,
        };
        Ok(Self {
            log: Arc::new(Mutex::new(log)),
            trace_id: None,
        })
    }

    /// Returns the path of the file.
    /// [`Keys::reopen_audit_log`](super::Keys::reopen_audit_log) opens it again after a rename.
    pub fn place(&self) -> Option<Arc<LogPath>> {
        Some(Arc::clone(self.lock().file.as_ref()?.place()))
    }

    /// Sets the trace to which later lines belong.
    pub(super) fn set_trace(&mut self, trace_id: Option<TraceId>) {
        self.trace_id = trace_id;
    }

    /// Writes later lines of all handles to another file. The lines of the earlier one are synced,
    /// because later intents are no longer synced together with them.
    pub(super) fn replace(&mut self, file: AuditFile) {
        let earlier = self.lock().file.replace(file);
        if let Some(Err(error)) = earlier.map(|earlier| earlier.sync()) {
            tracing::warn!(%error, "the renamed audit log cannot be synced to the disk");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the intent, syncs it to the disk and returns its number, which the outcome repeats.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the change must not be made.
    pub fn intent(&mut self, intent: &Intent<'_>) -> Result<u64, KeysError> {
        self.promise("intent", intent)
    }

    /// Writes a renewal and syncs it to the disk. There is no outcome, because a renewal cannot
    /// fail.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the holds must not be renewed.
    pub fn renewal(&mut self, renewal: &Renewal<'_>) -> Result<(), KeysError> {
        self.promise("renewal", renewal).map(drop)
    }

    /// Writes a set of claims and syncs it to the disk.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the claims must not be made.
    pub fn claims(&mut self, claims: &ClaimSet<'_>) -> Result<(), KeysError> {
        self.promise("claims", claims).map(drop)
    }

    /// Writes the import of a ledger and syncs it to the disk. Returns the id for the outcome,
    /// which is written if the import fails.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the ledger must not be imported.
    pub fn ledger_import(&mut self, import: &LedgerImport<'_>) -> Result<u64, KeysError> {
        self.promise("ledger_import", import)
    }

    /// Writes that the guest begins as a copy of another one, and syncs it to the disk. Returns the
    /// id for the outcome, which is written if the copy's kernel cannot be registered.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the copy must not be started.
    pub fn copied(&mut self, copied: &Copied<'_>) -> Result<u64, KeysError> {
        self.promise("copied", copied)
    }

    fn promise(&mut self, event: &'static str, body: &impl Body) -> Result<u64, KeysError> {
        let (id, written) = {
            let mut log = self.lock();
            let id = log.next_id;
            log.next_id += 1;
            (id, log.append(self.trace_id, event, id, body)?)
        };
        // The lock is not held, so that other lines are written meanwhile.
        if let Some(Err(error)) = written.map(|written| written.sync()) {
            self.outcome(
                id,
                &AuditOutcome::Failed {
                    reason: error.reason(),
                    error: error.to_string(),
                },
            );
            return Err(error);
        }
        Ok(id)
    }

    /// Writes the outcome. The change is already made, so a failure is only logged. The next intent
    /// then fails too, and its change is refused.
    pub fn outcome(&mut self, id: u64, outcome: &AuditOutcome<'_>) {
        let written = self.lock().append(self.trace_id, "outcome", id, outcome);
        if let Err(error) = written {
            tracing::error!(%error, id, ?outcome, "an outcome is missing in the audit log");
        }
    }
}

impl Log {
    /// Writes a line. Returns it if it goes to a file, where it is not synced.
    fn append(
        &mut self,
        trace_id: Option<TraceId>,
        event: &'static str,
        id: u64,
        body: &impl Body,
    ) -> Result<Option<Written>, KeysError> {
        let Some(log) = &mut self.file else {
            if tracing::enabled!(tracing::Level::INFO) {
                let trace_id = trace_id.map(tracing::field::display);
                // JSON is much cheaper than the debug format of a thousand keys.
                let mut text = "{}".to_owned();
                let _ = body.add_to(&mut text);
                let body = printable_json(&text);
                tracing::info!(event, id, trace_id, %body, "audit");
            }
            return Ok(None);
        };
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let head = Head {
            time_ms,
            id,
            pid: std::process::id(),
            event,
            trace_id,
        };
        let text = serde_json::to_string(&head).and_then(|mut text| {
            body.add_to(&mut text)?;
            Ok(text)
        });
        let text = text.map_err(|error| log.unwritable(error.into()))?;
        // Control characters from clients and guests are escaped, so that the file can be shown in
        // a terminal.
        let text = match printable_json(&text) {
            Cow::Borrowed(_) => text,
            Cow::Owned(escaped) => escaped,
        };
        match log.append(text.into_bytes()) {
            Ok(written) => Ok(Some(written)),
            Err(error) => Err(log.unwritable(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn intent() -> Intent<'static> {
        Intent {
            owner: "uid:0",
            reason: "a test",
            request_id: "r1",
            force: false,
            plan: None,
            updates: vec![IntendedOp {
                keys: IntendedKeys::Name { key: "key" },
                op: "inc",
            }],
            declared: Vec::new(),
        }
    }

    #[test]
    fn lines_are_appended_and_joined_by_id() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        std::fs::write(&path, "{\"earlier\":true}\n").expect("writable");
        let mut log = AuditLog::open(&path).expect("opens");
        let id = log.intent(&intent()).expect("written");
        let changes = vec![AuditedChange {
            key: "key",
            before: 0,
            after: 1,
            sites: 2,
        }];
        log.outcome(id, &AuditOutcome::Committed { changes });
        let text = std::fs::read_to_string(&path).expect("readable");
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[0]["earlier"], true);
        assert_eq!(lines[1]["event"], "intent");
        assert_eq!(lines[1]["updates"][0]["op"], "inc");
        assert_eq!(lines[2]["id"], lines[1]["id"]);
        assert_eq!(lines[2]["result"], "committed");
        assert_eq!(lines[2]["changes"][0]["after"], 1);
    }

    #[test]
    fn control_characters_of_clients_are_escaped() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        let mut log = AuditLog::open(&path).expect("opens");
        let reason = "\u{9b}2J\u{1b}]0;t\u{7}\n\u{7f}\u{202e}";
        let hostile = Intent { reason, ..intent() };
        log.intent(&hostile).expect("written");
        let text = std::fs::read_to_string(&path).expect("readable");
        let line = text.strip_suffix('\n').expect("a whole line");
        assert!(
            !line.contains(|c: char| c.is_control() || c == '\u{202e}'),
            "{line:?}"
        );
        let read: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(read["reason"], reason);
    }

    /// A line that a crash or a full disk cut short does not corrupt the next one.
    #[test]
    fn a_line_that_was_cut_short_ends_before_the_next() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        std::fs::write(&path, "{\"whole\":true}\n{\"cut\":").expect("writable");
        let mut log = AuditLog::open(&path).expect("opens");
        log.intent(&intent()).expect("written");
        log.intent(&intent()).expect("written");
        let text = std::fs::read_to_string(&path).expect("readable");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[1], "{\"cut\":");
        for line in &lines[2..] {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        }
    }

    /// logrotate renames the file and then sends SIGHUP.
    #[test]
    fn lines_go_on_in_a_new_file() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        let mut log = AuditLog::open(&path).expect("opens");
        let first = log.intent(&intent()).expect("written");
        let aside = folder.path().join("audit.jsonl.1");
        std::fs::rename(&path, &aside).expect("renamed");
        log.intent(&intent()).expect("written");
        assert!(
            !path.exists(),
            "the lines go on to the file as it is now named"
        );
        let place = log.place().expect("a file");
        log.replace(AuditFile::open(place).expect("opens"));
        let last = log.intent(&intent()).expect("written");
        assert_eq!((first, last), (0, 2), "numbers go on as well");
        let lines = |path| {
            std::fs::read_to_string(path)
                .expect("readable")
                .lines()
                .count()
        };
        assert_eq!((lines(aside), lines(path)), (2, 1));
    }

    /// A pipe to a logger cannot be synced.
    #[test]
    fn a_pipe_takes_the_lines_too() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).expect("a pipe");
        let reader = path.clone();
        let reader = std::thread::spawn(move || std::fs::read_to_string(reader));
        let mut log = AuditLog::open(&path).expect("opens");
        log.intent(&intent()).expect("written");
        drop(log);
        let text = reader.join().expect("no panic").expect("readable");
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    /// The end of a change and the intent of the next one are written while a slow disk syncs the
    /// line of a reader. Neither the reader nor the intent is answered before.
    #[test]
    fn lines_are_written_while_another_one_is_synced() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        let log = AuditLog::open(&path).expect("opens");
        let file = log.lock().file.as_ref().expect("a file").open_file();
        let (mut change, mut reader) = (log.clone(), log);
        let made = AuditOutcome::Committed { changes: vec![] };
        std::thread::scope(|scope| {
            let mut threads = vec![];
            let mut seen = vec![];
            let slow = || {
                threads.push(scope.spawn(move || reader.intent(&intent())));
                seen.push(lines_until(&path, 1));
                threads.push(scope.spawn(move || {
                    change.outcome(7, &made);
                    change.intent(&intent())
                }));
                seen.push(lines_until(&path, 3));
                seen.push(threads.iter().filter(|thread| thread.is_finished()).count());
                Ok(())
            };
            file.sync_by(slow).expect("synced");
            assert_eq!(seen, [1, 3, 0], "lines, and answers before they are synced");
            let answers = threads.into_iter().map(|thread| thread.join());
            let ids: Vec<_> = answers
                .map(|id| id.expect("no panic").expect("synced"))
                .collect();
            assert_eq!(ids, [0, 1]);
        });
        let expected = [("intent", 0), ("outcome", 7), ("intent", 1)];
        assert_eq!(
            events(&path),
            expected.map(|(event, id)| (event.to_owned(), id))
        );
    }

    /// Waits until the file has this many lines. Returns their number, which is smaller if none is
    /// written for long.
    fn lines_until(path: &Path, count: usize) -> usize {
        let mut found = 0;
        until(|| {
            let text = std::fs::read_to_string(path).expect("readable");
            found = text.matches('\n').count();
            found >= count
        });
        found
    }

    /// Waits until the condition holds. Returns false if it does not for long.
    fn until(mut holds: impl FnMut() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(60);
        while !holds() {
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Returns the event and the id of each line.
    fn events(path: &Path) -> Vec<(String, u64)> {
        let text = std::fs::read_to_string(path).expect("readable");
        let lines = text.lines().map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let event = line["event"].as_str().expect("an event").to_owned();
            (event, line["id"].as_u64().expect("a number"))
        });
        lines.collect()
    }

    /// A regular file of /proc takes what is written to it and cannot be synced.
    #[test]
    fn a_line_that_cannot_be_synced_is_an_error() {
        let mut log = AuditLog::open(Path::new("/proc/thread-self/comm")).expect("opens");
        let error = log.intent(&intent()).expect_err("not on a disk");
        assert_eq!(error.reason(), "AUDIT_LOG_UNWRITABLE");
        assert!(error.to_string().contains("Invalid argument"), "{error}");
    }

    /// The file is renamed while the line of a reader waits for a sync, which fails. The outcome
    /// goes to the new file.
    #[test]
    fn a_line_in_a_renamed_file_that_cannot_be_synced_is_an_error() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        let aside = folder.path().join("audit.jsonl.1");
        let mut log = AuditLog::open(&path).expect("opens");
        let file = log.lock().file.as_ref().expect("a file").open_file();
        let place = log.place().expect("a file");
        let mut reader = log.clone();
        let answer = std::thread::scope(|scope| {
            let (mut thread, mut is_free) = (None, false);
            let failed = file.sync_by(|| {
                thread = Some(scope.spawn(move || reader.intent(&intent())));
                lines_until(&path, 1);
                std::fs::rename(&path, &aside).expect("renamed");
                let mut new = Some(AuditFile::open(place).expect("opens"));
                // The line is in the file before its writer releases the lock.
                is_free = until(|| {
                    let locked = log.log.try_lock();
                    locked.map(|mut log| log.file = new.take()).is_ok()
                });
                Err(std::io::Error::other("the disk is gone"))
            });
            failed.expect_err("the disk is gone");
            assert!(is_free, "nothing holds the lock during a sync");
            thread.expect("started").join().expect("no panic")
        });
        let error = answer.expect_err("perhaps not on the disk");
        assert_eq!(error.reason(), "AUDIT_LOG_UNWRITABLE");
        log.intent(&intent()).expect("the new file works");
        assert_eq!(events(&aside), [("intent".to_owned(), 0)]);
        let expected = [("outcome".to_owned(), 0), ("intent".to_owned(), 1)];
        assert_eq!(events(&path), expected);
    }

    /// /dev/full stands in for a full disk.
    #[test]
    fn unwritable_log_is_an_error() {
        let mut log = AuditLog::open(Path::new("/dev/full")).expect("opens");
        let error = log.intent(&intent()).expect_err("no room");
        assert_eq!(error.reason(), "AUDIT_LOG_UNWRITABLE");
        assert!(error.to_string().contains("/dev/full"), "{error}");
    }
}
