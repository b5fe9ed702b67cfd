// SPDX-License-Identifier: Apache-2.0
//! The host's audit log: JSON lines, appended, each with the hash of the line before it.
//!
//! An intent is on the disk before a change is asked for; without it the change is not made. The outcome
//! follows. Each line carries the SHA-256 of the line before it, so a line that was changed, removed or
//! put in shows; only the end of the log can be cut off unseen, and whoever keeps the last hash elsewhere
//! ([`Chain::head`]) sees that too.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The first line's previous hash.
const START: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// A longer line is damage.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// Joins an outcome to its intent.
    pub id: u64,
    /// What happened.
    #[serde(flatten)]
    pub entry: Entry,
    /// SHA-256 of the line before this one, in hexadecimal.
    pub previous: String,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Entry {
    /// Somebody is about to change something.
    Intent {
        /// The principal of the call.
        principal: String,
        /// Full name of the gRPC method.
        method: String,
        /// On which guest.
        guest: String,
        /// The rule of the policy that allows it.
        rule: String,
        /// The request in a form for people: keys, ops, reason.
        request: String,
        /// W3C trace id of the call, if it had one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        trace_id: String,
    },
    /// The policy does not allow it.
    Denied {
        /// The principal of the call.
        principal: String,
        /// Full name of the gRPC method.
        method: String,
        /// On which guest.
        guest: String,
        /// The policy's sentence.
        why: String,
        /// Earlier denied calls that came too fast to be written.
        #[serde(default, skip_serializing_if = "is_zero")]
        unwritten: u64,
    },
    /// What became of an intent.
    Outcome {
        /// "OK", or the name of the gRPC status.
        code: String,
        /// The answer in short, or the error.
        message: String,
    },
}

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file cannot be opened, read or written.
    #[error("the audit log {path}: {error}")]
    File {
        /// The log.
        path: String,
        /// From the operating system.
        error: io::Error,
    },
    /// Another process writes it.
    #[error("the audit log {path} is in use by another process")]
    InUse {
        /// The log.
        path: String,
    },
    /// A line is not what was written.
    #[error("the audit log {path} is damaged at line {line}: {why}")]
    Damaged {
        /// The log.
        path: String,
        /// Counts from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// What a whole log comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Lines.
    pub records: usize,
    /// Hash of the last line: the previous hash of the next one.
    pub head: String,
    next_id: u64,
}

/// The log, open for appending.
#[derive(Debug)]
pub struct AuditLog {
    path: PathBuf,
    file: File,
    head: String,
    next_id: u64,
    records: usize,
}

impl AuditLog {
    /// Opens the log with mode 0600, verifies it, and goes on at its end. A log that is damaged is left as it is.
    ///
    /// # Errors
    /// [`AuditError`].
    pub fn open(path: &Path) -> Result<Self, AuditError> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file: File = open(path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| file_error(path, error.into()))?
            .into();
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let path = path.display().to_string();
            return Err(AuditError::InUse { path });
        }
        let Chain {
            head,
            next_id,
            records,
        } = verify_lines(path, &file, |_| {})?;
        Ok(Self {
            path: path.to_owned(),
            file,
            head,
            next_id,
            records,
        })
    }

    /// Writes what somebody is about to do. The number joins the outcome to it. The change must wait for
    /// [`AuditLog::sync`].
    ///
    /// # Errors
    /// [`AuditError`]: the change must not be made.
    pub fn intent(&mut self, entry: Entry) -> Result<u64, AuditError> {
        let id = self.next_id;
        self.append(id, entry)?;
        self.next_id += 1;
        Ok(id)
    }

    /// Waits until what was written is on the disk.
    ///
    /// # Errors
    /// [`AuditError`]: no change may be made whose intent was not synced before.
    pub fn sync(&mut self) -> Result<(), AuditError> {
        let sync = self.file.sync_data();
        sync.map_err(|error| file_error(&self.path, error))
    }

    /// Writes what became of the intent `id`.
    ///
    /// # Errors
    /// [`AuditError`]; the change is made by then.
    pub fn outcome(&mut self, id: u64, code: &str, message: &str) -> Result<(), AuditError> {
        let (code, message) = (code.to_owned(), message.to_owned());
        self.append(id, Entry::Outcome { code, message })
    }

    /// How many lines the log has.
    #[must_use]
    pub fn records(&self) -> usize {
        self.records
    }

    fn append(&mut self, id: u64, entry: Entry) -> Result<(), AuditError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let record = Record {
            time_ms: since.map_or(0, |since| {
                u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
            }),
            id,
            entry,
            previous: self.head.clone(),
        };
        let unwritable = |error| file_error(&self.path, error);
        let mut line = serde_json::to_vec(&record).map_err(|error| unwritable(error.into()))?;
        let head = hash(&line);
        line.push(b'\n');
        let length = self.file.metadata().map_err(unwritable)?.len();
        if let Err(error) = self.file.write_all(&line) {
            // Half a line would make the whole log look damaged.
            let _ = self.file.set_len(length);
            return Err(unwritable(error));
        }
        self.head = head;
        self.records += 1;
        Ok(())
    }
}

/// Reads a log to its end and checks its chain; `each` gets every record.
///
/// # Errors
/// [`AuditError`].
pub fn verify(path: &Path, each: impl FnMut(&Record)) -> Result<Chain, AuditError> {
    let file = File::open(path).map_err(|error| file_error(path, error))?;
    verify_lines(path, &file, each)
}

fn verify_lines(
    path: &Path,
    file: &File,
    mut each: impl FnMut(&Record),
) -> Result<Chain, AuditError> {
    let mut reader = BufReader::new(file);
    let mut chain = Chain {
        records: 0,
        head: START.to_owned(),
        next_id: 0,
    };
    loop {
        let damaged = |why: String| AuditError::Damaged {
            path: path.display().to_string(),
            line: chain.records + 1,
            why,
        };
        let mut line = Vec::new();
        let read = (&mut reader)
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line);
        read.map_err(|error| file_error(path, error))?;
        if line.is_empty() {
            return Ok(chain);
        }
        if line.pop() != Some(b'\n') {
            return Err(damaged(
                "it has no end; the writer died, or the line was cut".to_owned(),
            ));
        }
        let record: Record =
            serde_json::from_slice(&line).map_err(|error| damaged(error.to_string()))?;
        if record.previous != chain.head {
            let why = format!(
                "it follows {}, and the line before it is {}",
                record.previous, chain.head
            );
            return Err(damaged(why));
        }
        chain.head = hash(&line);
        chain.next_id = chain.next_id.max(record.id.saturating_add(1));
        chain.records += 1;
        each(&record);
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn hash(line: &[u8]) -> String {
    Sha256::digest(line)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn file_error(path: &Path, error: io::Error) -> AuditError {
    let path = path.display().to_string();
    AuditError::File { path, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intent() -> Entry {
        Entry::Intent {
            principal: "uid:0".to_owned(),
            method: "/patchbay.v1.StaticKeysService/UpdateStaticKeys".to_owned(),
            guest: "web-1".to_owned(),
            rule: "on-call".to_owned(),
            request: "enable net_a".to_owned(),
            trace_id: String::new(),
        }
    }

    /// A log with three changes.
    fn log() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let mut log = AuditLog::open(&path).expect("a new log");
        for number in 0..3 {
            let id = log.intent(intent()).expect("written");
            assert_eq!(id, number);
            log.outcome(id, "OK", "1 key").expect("written");
        }
        (folder, path)
    }

    #[test]
    fn a_log_goes_on_where_it_ended() {
        let (_folder, path) = log();
        let before = verify(&path, |_| {}).expect("whole");
        assert_eq!(before.records, 6);
        let mut log = AuditLog::open(&path).expect("whole");
        assert_eq!(log.intent(intent()).expect("written"), 3);
        drop(log);
        let mut ids = vec![];
        let after = verify(&path, |record| ids.push(record.id)).expect("whole");
        assert_eq!(ids, [0, 0, 1, 1, 2, 2, 3]);
        assert_ne!(after.head, before.head);
    }

    #[test]
    fn what_was_done_to_a_log_shows() {
        let (_folder, path) = log();
        let whole = std::fs::read_to_string(&path).expect("a log");
        let lines: Vec<&str> = whole.lines().collect();
        let without = |gone: usize| {
            let kept = lines.iter().enumerate().filter(|(index, _)| *index != gone);
            kept.map(|(_, line)| format!("{line}\n"))
                .collect::<String>()
        };
        let swapped = [lines[0], lines[2], lines[1], lines[3]].join("\n") + "\n";
        for (forged, line) in [
            (whole.replacen("net_a", "net_b", 1), 2),
            (without(0), 1),
            (without(3), 4),
            (swapped, 2),
            (whole.trim_end().to_owned(), 6),
            (format!("{whole}{{}}\n"), 7),
            (format!("{}{whole}", lines[0].to_owned() + "\n"), 2),
        ] {
            std::fs::write(&path, &forged).expect("forged");
            let error = verify(&path, |_| {}).expect_err(&forged);
            assert!(
                error.to_string().contains(&format!("line {line}:")),
                "{error}"
            );
            // Nothing is appended to a damaged log, and nothing of it is lost.
            AuditLog::open(&path).expect_err("damaged");
            assert_eq!(std::fs::read_to_string(&path).expect("kept"), forged);
        }
    }

    #[test]
    fn one_process_writes_a_log() {
        let (_folder, path) = log();
        let _first = AuditLog::open(&path).expect("free");
        assert!(matches!(
            AuditLog::open(&path),
            Err(AuditError::InUse { .. })
        ));
    }

    #[test]
    fn a_log_that_cannot_be_written_says_so() {
        assert!(AuditLog::open(Path::new("/nonexistent/audit.jsonl")).is_err());
        let mut full = AuditLog {
            path: "/dev/full".into(),
            file: File::options()
                .append(true)
                .open("/dev/full")
                .expect("/dev/full"),
            head: START.to_owned(),
            next_id: 0,
            records: 0,
        };
        let error = full.intent(intent()).expect_err("full");
        assert!(error.to_string().contains("/dev/full"), "{error}");
        assert_eq!((full.head.as_str(), full.next_id), (START, 0));
    }
}
