// SPDX-License-Identifier: Apache-2.0
//! The audit log: JSON lines, appended, an intent before each change and its outcome after.
//!
//! A line reaches the kernel with one `write` before the change is made, so it survives the
//! monitor's death (a crash of the host may take the last lines with it: nothing is synced, because
//! that would cost each flip milliseconds). If the intent cannot be written, the change is not made.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::error::KeysError;

/// Where the lines go; without a file they go to tracing alone.
#[derive(Debug, Default)]
pub struct AuditLog {
    file: Option<(PathBuf, File)>,
    next_id: u64,
}

/// What a client is about to do.
#[derive(Debug, Serialize)]
pub struct Intent<'a> {
    /// "uid:N", or "monitor" for a lapsed hold.
    pub owner: &'a str,
    /// As the client gave it.
    pub reason: &'a str,
    /// As the client gave it.
    pub request_id: &'a str,
    /// Whether references of others may be dropped.
    pub force: bool,
    /// In order.
    pub updates: Vec<IntendedOp<'a>>,
}

/// One op of an [`Intent`].
#[derive(Debug, Serialize)]
pub struct IntendedOp<'a> {
    /// Full name.
    pub key: &'a str,
    /// "inc", "dec", "enable" or "disable".
    pub op: &'a str,
}

/// What became of it.
#[derive(Debug, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Outcome {
    /// Done.
    Committed {
        /// One per key.
        changes: Vec<Change>,
    },
    /// Not done; the guest is as it was unless the error says otherwise.
    Failed {
        /// Reason of the error.
        reason: &'static str,
        /// Sentence.
        error: String,
    },
}

/// A key's count before and after.
#[derive(Debug, Serialize)]
pub struct Change {
    /// Full name.
    pub key: String,
    /// Count.
    pub before: i32,
    /// Count.
    pub after: i32,
    /// Patched.
    pub sites: u32,
}

#[derive(Serialize)]
struct Line<'a, T: Serialize> {
    /// Milliseconds since 1970.
    time_ms: u64,
    /// Joins an outcome to its intent within one run of the monitor.
    id: u64,
    pid: u32,
    event: &'static str,
    #[serde(flatten)]
    body: &'a T,
}

impl AuditLog {
    /// Opens the log for appending, mode 0600.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        Ok(Self {
            file: Some((path.to_owned(), file)),
            next_id: 0,
        })
    }

    /// Writes the intent; its number joins the outcome to it.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the change must not be made.
    pub fn intent(&mut self, intent: &Intent<'_>) -> Result<u64, KeysError> {
        let id = self.next_id;
        self.next_id += 1;
        self.append("intent", id, intent)?;
        Ok(id)
    }

    /// Writes the outcome. The change is made by then, so a failure is logged and no more: the next
    /// intent will meet it.
    pub fn outcome(&mut self, id: u64, outcome: &Outcome) {
        if let Err(error) = self.append("outcome", id, outcome) {
            tracing::error!(%error, id, ?outcome, "the outcome of a change is missing in the audit log");
        }
    }

    fn append<T: Serialize + std::fmt::Debug>(
        &mut self,
        event: &'static str,
        id: u64,
        body: &T,
    ) -> Result<(), KeysError> {
        let Some((path, file)) = &mut self.file else {
            tracing::info!(event, id, ?body, "audit");
            return Ok(());
        };
        let unwritable = |error: String| KeysError::AuditLogUnwritable {
            path: path.display().to_string(),
            error,
        };
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let line = Line {
            time_ms,
            id,
            pid: std::process::id(),
            event,
            body,
        };
        let mut text = serde_json::to_vec(&line).map_err(|error| unwritable(error.to_string()))?;
        text.push(b'\n');
        file.write_all(&text)
            .map_err(|error| unwritable(error.to_string()))
    }
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
            updates: vec![IntendedOp {
                key: "key",
                op: "inc",
            }],
        }
    }

    #[test]
    fn lines_are_appended_and_joined_by_id() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("audit.jsonl");
        std::fs::write(&path, "{\"earlier\":true}\n").expect("writable");
        let mut log = AuditLog::open(&path).expect("opens");
        let id = log.intent(&intent()).expect("written");
        let changes = vec![Change {
            key: "key".into(),
            before: 0,
            after: 1,
            sites: 2,
        }];
        log.outcome(id, &Outcome::Committed { changes });
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

    /// A full disk, as the kernel offers one for tests.
    #[test]
    fn unwritable_log_is_an_error() {
        let mut log = AuditLog::open(Path::new("/dev/full")).expect("opens");
        let error = log.intent(&intent()).expect_err("no room");
        assert_eq!(error.reason(), "AUDIT_LOG_UNWRITABLE");
        assert!(error.to_string().contains("/dev/full"), "{error}");
    }
}
