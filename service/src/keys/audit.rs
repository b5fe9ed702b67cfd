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

mod json;

use std::borrow::Cow;
use std::fmt::Debug;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use patchbay_guest::log_file::{LogPath, length};
use patchbay_proto::text::printable_json;
use rustix::fs::OFlags;
use serde::Serialize;

use super::declared::Declaration;
use super::error::KeysError;
use crate::trace_id::TraceId;

/// The open log. Without a file, lines go to tracing only.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<AuditFile>,
    next_id: u64,
    trace_id: Option<TraceId>,
}

/// An open audit log file.
#[derive(Debug)]
pub struct AuditFile {
    place: Arc<LogPath>,
    file: File,
    /// The file can be synced; false for a pipe or a device.
    syncs: bool,
    /// The last line has no newline.
    cut_short: bool,
}

/// The content of a line.
pub trait Body: Debug + Serialize {
    /// Adds the fields of the content to the text of a JSON object.
    ///
    /// # Errors
    /// It has no representation in JSON.
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        Ok(())
    }
}

/// A change that is about to be made.
#[derive(Debug, Serialize)]
pub struct Intent<'a> {
    /// "uid:N"; "monitor" if a hold or a claim ended by itself; "others in the guest" if the event
    /// was fired or parked for other users in the guest.
    pub owner: &'a str,
    /// Reason of the client.
    pub reason: &'a str,
    /// Request id of the client.
    pub request_id: &'a str,
    /// References of other holders may be dropped.
    pub force: bool,
    /// The prepared plan that is committed; `None` for an update.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<IntendedPlan<'a>>,
    /// The ops, in the order of the request.
    #[serde(skip)]
    pub updates: Vec<IntendedOp<'a>>,
    /// Declarations of the host that permit the change of a key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub declared: Vec<&'a Declaration>,
}

impl Body for Intent<'_> {
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        // Most ops of a transaction are the same.
        let (mut last, mut rest) = (None, String::new());
        json::add_list(object, "updates", &self.updates, |to, update| {
            let IntendedKeys::Name { key } = update.keys else {
                return json::add(to, update);
            };
            if last.replace(update.op) != Some(update.op) {
                rest = [",\"op\":\"", update.op, "\"}"].concat();
            }
            json::add_keyed(to, key, &rest)
        })
    }
}

/// The plan of an [`Intent`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IntendedPlan<'a> {
    /// Plan id, as the client sends it.
    pub id: &'a str,
    /// SHA-256 of the plan, in hexadecimal.
    pub digest: &'a str,
}

/// One op of an [`Intent`].
#[derive(Debug, Serialize)]
pub struct IntendedOp<'a> {
    /// The key or keys.
    #[serde(flatten)]
    pub keys: IntendedKeys<'a>,
    /// "inc", "dec", "enable" or "disable".
    pub op: &'static str,
}

/// The keys that an [`IntendedOp`] changes.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum IntendedKeys<'a> {
    /// A single key.
    Name {
        /// Name, as the client gives it.
        key: &'a str,
    },
    /// Every key that a selection matches. The outcome lists the keys.
    Selection {
        /// Patterns, as the client gives them.
        patterns: &'a [String],
        /// Classes, as the client gives them; empty for all.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        classes: Vec<&'static str>,
        /// Number of keys that matched.
        keys: usize,
    },
    /// The keys of the lines of dynamic debug that queries select. The outcome lists the keys.
    Debug {
        /// Queries, as the client gives them.
        debug_queries: &'a [String],
        /// Number of keys that matched.
        keys: usize,
    },
}

/// Holds that get a new expiry.
#[derive(Debug, Serialize)]
pub struct Renewal<'a> {
    /// The holder.
    pub owner: &'a str,
    /// Hold ids.
    pub holds: &'a [String],
    /// New time to live in milliseconds; `None` for holds that no longer expire.
    pub ttl_ms: Option<u64>,
}

impl Body for Renewal<'_> {}

/// A set of claims that is about to replace the one of its owner. An [`Intent`] follows if it
/// changes counts.
#[derive(Debug, Serialize)]
pub struct ClaimSet<'a> {
    /// The principal of the owner.
    pub owner: &'a str,
    /// The name that the principal chose.
    pub name: &'a str,
    /// The person for whom the principal makes the call, according to the host's daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub person: Option<&'a str>,
    /// The generation.
    pub generation: u64,
    /// SHA-256 of the keys and the wanted state of each, in hexadecimal.
    pub intent_digest: &'a str,
    /// Number of keys; 0 if the owner's claims end.
    pub keys: usize,
    /// References of the guest's own code may be taken away.
    pub force: bool,
    /// Guarded keys may be claimed.
    pub allow_guarded: bool,
    /// Time to live in milliseconds; `None` for claims that do not expire.
    pub ttl_ms: Option<u64>,
    /// Reason of the client.
    pub reason: &'a str,
}

impl Body for ClaimSet<'_> {}

/// Returns a duration as the log has it.
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The end of a change.
#[derive(Debug, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum AuditOutcome<'a> {
    /// The change was made.
    Committed {
        /// One per key.
        #[serde(skip)]
        changes: Vec<AuditedChange<'a>>,
    },
    /// The change was not made. The guest is unchanged unless the error says otherwise.
    Failed {
        /// Reason of the error, as in `patchbay.v1.ErrorReason`.
        reason: &'static str,
        /// Message of the error.
        error: String,
    },
}

impl Body for AuditOutcome<'_> {
    fn add_to(&self, object: &mut String) -> serde_json::Result<()> {
        json::join(object, &serde_json::to_string(self)?);
        if let Self::Committed { changes } = self {
            // Most keys of a transaction have the same numbers.
            let (mut last, mut rest) = (None, String::new());
            json::add_list(object, "changes", changes, |to, change| {
                let AuditedChange {
                    before,
                    after,
                    sites,
                    ..
                } = *change;
                if last.replace((before, after, sites)) != Some((before, after, sites)) {
                    rest = format!(",\"before\":{before},\"after\":{after},\"sites\":{sites}}}");
                }
                json::add_keyed(to, change.key, &rest)
            })?;
        }
        Ok(())
    }
}

/// A key's count before and after.
#[derive(Debug)]
pub struct AuditedChange<'a> {
    /// Full name of the key.
    pub key: &'a str,
    /// Count before the change.
    pub before: i32,
    /// Count after the change.
    pub after: i32,
    /// Number of sites that were patched.
    pub sites: u32,
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
    /// The trace of the call that asked for the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<TraceId>,
}

impl AuditLog {
    /// Opens the log for appending, mode 0600, and never through a symbolic link.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        Ok(Self {
            file: Some(AuditFile::open(Arc::new(LogPath::new(path)?))?),
            next_id: 0,
            trace_id: None,
        })
    }

    /// Returns the path of the file. [`AuditFile::open`] opens it again after a rename.
    pub fn place(&self) -> Option<Arc<LogPath>> {
        Some(self.file.as_ref()?.place.clone())
    }

    /// Sets the trace to which later lines belong.
    pub(super) fn set_trace(&mut self, trace_id: Option<TraceId>) {
        self.trace_id = trace_id;
    }

    /// Writes later lines to another file.
    pub(super) fn replace(&mut self, file: AuditFile) {
        self.file = Some(file);
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

    fn promise(&mut self, event: &'static str, body: &impl Body) -> Result<u64, KeysError> {
        let id = self.next_id;
        self.next_id += 1;
        self.append(event, id, body)?;
        let Some(log) = &self.file else {
            return Ok(id);
        };
        if let Err(error) = log.sync() {
            let error = log.unwritable(error);
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
        if let Err(error) = self.append("outcome", id, outcome) {
            tracing::error!(%error, id, ?outcome, "the outcome of a change is missing in the audit log");
        }
    }

    fn append(&mut self, event: &'static str, id: u64, body: &impl Body) -> Result<(), KeysError> {
        let Some(log) = &mut self.file else {
            if tracing::enabled!(tracing::Level::INFO) {
                let trace_id = self.trace_id.map(tracing::field::display);
                // JSON is much cheaper than the debug format of a thousand keys.
                let mut text = "{}".to_owned();
                let _ = body.add_to(&mut text);
                let body = printable_json(&text);
                tracing::info!(event, id, trace_id, %body, "audit");
            }
            return Ok(());
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
            trace_id: self.trace_id,
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
        log.append(text.into_bytes())
            .map_err(|error| log.unwritable(error))
    }
}

impl AuditFile {
    /// Opens the file at `path`, and creates it if it does not exist.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(place: Arc<LogPath>) -> std::io::Result<Self> {
        let file = place.open(OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
        let length = length(&file)?;
        Ok(Self {
            syncs: length.is_some(),
            cut_short: length.is_some_and(|length| is_cut_short(&place, length)),
            place,
            file,
        })
    }

    /// Appends one line, in a single write unless the kernel accepts only part of it.
    fn append(&mut self, mut text: Vec<u8>) -> std::io::Result<()> {
        text.push(b'\n');
        if self.cut_short {
            text.insert(0, b'\n');
        }
        let mut rest = &text[..];
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    rest = &rest[written..];
                    self.cut_short = !rest.is_empty();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        if self.syncs {
            self.file.sync_data()
        } else {
            Ok(())
        }
    }

    fn unwritable(&self, error: std::io::Error) -> KeysError {
        KeysError::AuditLogUnwritable {
            path: self.place.path().display().to_string(),
            error: error.to_string(),
        }
    }
}

/// Returns whether the file ends without a newline. A file that cannot be read counts as complete.
fn is_cut_short(place: &LogPath, length: u64) -> bool {
    let mut last = [b'\n'];
    if let (Some(end), Ok(file)) = (length.checked_sub(1), place.open(OFlags::RDONLY)) {
        let _ = file.read_exact_at(&mut last, end);
    }
    last != [b'\n']
}

#[cfg(test)]
mod tests {
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

    /// /dev/full stands in for a full disk.
    #[test]
    fn unwritable_log_is_an_error() {
        let mut log = AuditLog::open(Path::new("/dev/full")).expect("opens");
        let error = log.intent(&intent()).expect_err("no room");
        assert_eq!(error.reason(), "AUDIT_LOG_UNWRITABLE");
        assert!(error.to_string().contains("/dev/full"), "{error}");
    }
}
