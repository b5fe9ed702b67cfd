// SPDX-License-Identifier: Apache-2.0
//! Writes the host's audit log, which consists of JSON lines and is only appended to.
//!
//! An intent is on the disk before its change is sent to a monitor. Without an intent, the change
//! is not made. The outcome is written after the change. Each line contains the SHA-256 of the line
//! before it, so a changed, removed or inserted line is detected. Only the end of the log can be
//! cut off unnoticed, and a copy of the last hash elsewhere ([`Chain::head`](super::Chain::head))
//! reveals that too.
//!
//! A full file is renamed to a numbered name, and a new file continues the chain. The daemon
//! removes no file, because otherwise a client that causes enough lines could make old lines
//! disappear.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstatvfs, open};

use super::chain::{
    AuditError, Chain, archive, archives, file_error, folder_of, is_same, verify_file, with_suffix,
};
use super::record::{Entry, Record, hash};

/// The size at which a file is rotated.
const FILE_BYTES: u64 = 64 << 20;
/// If a file could not be rotated, it grows by this many bytes before the next attempt.
const RETRY_BYTES: u64 = 1 << 20;

/// The log, open for appending.
#[derive(Debug)]
pub struct AuditLog {
    path: PathBuf,
    file: File,
    head: String,
    next_id: u64,
    records: usize,
    /// The length of the file up to the end of its last complete line.
    length: u64,
    /// True if a partial line may be at the end of the file, because its removal failed.
    dirty: bool,
    /// A repair that is not recorded in the log yet.
    repaired: Option<Entry>,
    file_bytes: u64,
    /// The maximum length of the file. A line that would exceed it causes a rotation.
    rotate_at: u64,
    next_archive: u64,
}

impl AuditLog {
    /// Opens the log with mode 0600, verifies it, and appends to it. Removes an incomplete last
    /// line and records the removal in a new line. Leaves a log with any other damage unchanged.
    ///
    /// # Errors
    /// [`AuditError`].
    pub fn open(path: &Path) -> Result<Self, AuditError> {
        Self::open_with(path, FILE_BYTES)
    }

    /// Opens the log like [`Self::open`], and rotates a file before it grows beyond `file_bytes`.
    ///
    /// # Errors
    /// [`AuditError`].
    pub fn open_with(path: &Path, file_bytes: u64) -> Result<Self, AuditError> {
        let file = open_locked(path, OFlags::empty())?;
        let mut older = archives(path)?;
        if let Some((_, newest)) = older.last() {
            let unreadable = |error| file_error(newest, error);
            let archived = File::open(newest).map_err(unreadable)?;
            // The previous daemon was killed during a rotation, so `newest` is a second name of the
            // open file.
            if is_same(&archived, &file).map_err(unreadable)? {
                std::fs::remove_file(newest).map_err(unreadable)?;
                older.pop();
            }
        }
        let chain = verify_file(path, &file, None, &mut |_| {})?;
        let newest = older.last().map_or(0, |(number, _)| *number);
        let length = file
            .metadata()
            .map_err(|error| file_error(path, error))?
            .len();
        let mut log = Self {
            path: path.to_owned(),
            file,
            head: chain.head,
            next_id: chain.next_id,
            records: chain.records,
            length,
            dirty: false,
            repaired: None,
            file_bytes,
            rotate_at: file_bytes,
            next_archive: newest.max(chain.continues).saturating_add(1),
        };
        if let Some(torn) = chain.torn {
            log.length = torn.offset;
            log.repair(&torn.bytes);
        }
        if let (0, Some((number, newest))) = (log.length, older.last()) {
            log.continue_from(*number, newest)?;
        }
        Ok(log)
    }

    /// Removes the incomplete last line. If the line is an intent, its change was not sent to a
    /// monitor, because intents are synced first.
    fn repair(&mut self, torn: &[u8]) {
        let bytes = torn.len() as u64;
        tracing::warn!(
            log = %self.path.display(),
            bytes,
            "the last line of the audit log is incomplete; it is removed, and the next line records it"
        );
        self.dirty = true;
        self.repaired = Some(Entry::Repaired {
            bytes,
            sha256: hash(torn),
            text: String::from_utf8_lossy(torn).into_owned(),
        });
        // If this fails, for example on a full disk, it is retried before the next intent.
        if let Err(error) = self.report_repair().and_then(|()| self.sync()) {
            tracing::error!(%error, "the line that records the repair of the audit log cannot be written yet; it is written before the next intent");
        }
    }

    fn report_repair(&mut self) -> Result<(), AuditError> {
        if let Some(entry) = &self.repaired {
            self.append(self.next_id, entry.clone())?;
            self.repaired = None;
            self.next_id += 1;
        }
        Ok(())
    }

    /// Begins an empty file as the continuation of `newest`, the previous file, which another
    /// process has renamed.
    fn continue_from(&mut self, number: u64, newest: &Path) -> Result<(), AuditError> {
        let file = File::open(newest).map_err(|error| file_error(newest, error))?;
        let Chain {
            head,
            next_id,
            records,
            ..
        } = verify_file(newest, &file, None, &mut |_| {})?;
        (self.head, self.next_id, self.records) = (head, next_id, records);
        self.append(self.last_id(), self.continued(number))?;
        self.sync()
    }

    /// Returns the id for an [`Entry::Continued`] line, which is the id of the last intent. A
    /// reader that has only the new file computes the id of the next intent from it.
    fn last_id(&self) -> u64 {
        self.next_id.saturating_sub(1)
    }

    fn continued(&self, number: u64) -> Entry {
        let file = archive(&self.path, number);
        let name = file.file_name().unwrap_or_default();
        Entry::Continued {
            file: name.to_string_lossy().into_owned(),
            records: self.records,
        }
    }

    /// Writes an intent and returns its number, by which the outcome refers to it. The change must
    /// wait for [`AuditLog::sync`].
    ///
    /// # Errors
    /// [`AuditError`], in which case the change must not be made.
    pub fn intent(&mut self, entry: Entry) -> Result<u64, AuditError> {
        self.report_repair()?;
        let id = self.next_id;
        self.append(id, entry)?;
        self.next_id += 1;
        Ok(id)
    }

    /// Waits until all written lines are on the disk.
    ///
    /// # Errors
    /// [`AuditError`], in which case changes whose intents were not synced before must not be made.
    pub fn sync(&mut self) -> Result<(), AuditError> {
        let sync = self.file.sync_data();
        sync.map_err(|error| file_error(&self.path, error))
    }

    /// Writes the outcome of the intent `id`.
    ///
    /// # Errors
    /// [`AuditError`]; the change has been made nevertheless.
    pub fn outcome(&mut self, id: u64, code: &str, message: &str) -> Result<(), AuditError> {
        let (code, message) = (code.to_owned(), message.to_owned());
        self.append(id, Entry::Outcome { code, message })
    }

    /// Returns the number of lines in the log.
    #[must_use]
    pub fn records(&self) -> usize {
        self.records
    }

    /// Returns the free bytes for this user on the log's file system; `None` if they cannot be
    /// read.
    #[must_use]
    pub fn room(&self) -> Option<u64> {
        let status = fstatvfs(&self.file).ok()?;
        Some(status.f_bavail.saturating_mul(status.f_frsize))
    }

    fn append(&mut self, id: u64, mut entry: Entry) -> Result<(), AuditError> {
        entry.cut();
        let mut line = self.line(id, &entry)?;
        if self.length > 0 && self.length + line.len() as u64 > self.rotate_at {
            self.rotate_or_log();
            // The rotation writes a line, so the hash of the previous line is a different one.
            line = self.line(id, &entry)?;
        }
        self.write(&line)
    }

    /// Returns a line with its line break.
    fn line(&self, id: u64, entry: &Entry) -> Result<Vec<u8>, AuditError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let record = Record {
            time_ms: since.map_or(0, |since| {
                u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
            }),
            id,
            entry: entry.clone(),
            previous: self.head.clone(),
        };
        let line = record.line();
        let mut line = line.map_err(|error| file_error(&self.path, error.into()))?;
        line.push(b'\n');
        Ok(line)
    }

    /// Removes the part of a line that could not be written completely.
    fn take_back(&mut self) -> Result<(), AuditError> {
        if self.dirty {
            let cut = self.file.set_len(self.length);
            cut.map_err(|error| file_error(&self.path, error))?;
            self.dirty = false;
        }
        Ok(())
    }

    fn write(&mut self, line: &[u8]) -> Result<(), AuditError> {
        self.take_back()?;
        if let Err(error) = self.file.write_all(line) {
            // A partial line would make the whole log look damaged.
            self.dirty = self.file.set_len(self.length).is_err();
            return Err(file_error(&self.path, error));
        }
        self.length += line.len() as u64;
        self.head = hash(&line[..line.len() - 1]);
        self.records += 1;
        Ok(())
    }

    /// Rotates the file. If that fails, the log continues in the old file.
    fn rotate_or_log(&mut self) {
        match self.rotate() {
            Ok(()) => self.rotate_at = self.file_bytes,
            Err(error) => {
                tracing::error!(%error, "the audit log cannot be rotated; it keeps growing");
                self.rotate_at = self.length + RETRY_BYTES;
            }
        }
    }

    fn rotate(&mut self) -> Result<(), AuditError> {
        self.take_back()?;
        self.sync()?;
        let fresh = with_suffix(&self.path, "new");
        let aside = archive(&self.path, self.next_archive);
        let _ = std::fs::remove_file(&fresh);
        let mut file = open_locked(&fresh, OFlags::EXCL)?;
        let line = self.line(self.last_id(), &self.continued(self.next_archive))?;
        let written = file.write_all(&line).and_then(|()| file.sync_data());
        written.map_err(|error| file_error(&fresh, error))?;
        // A file with the log's name exists at all times; otherwise another daemon would create
        // one.
        std::fs::hard_link(&self.path, &aside).map_err(|error| file_error(&aside, error))?;
        if let Err(error) = std::fs::rename(&fresh, &self.path) {
            let _ = std::fs::remove_file(&aside);
            return Err(file_error(&fresh, error));
        }
        let folder = File::open(folder_of(&self.path)).and_then(|folder| folder.sync_all());
        if let Err(error) = folder {
            tracing::warn!(%error, "the folder of the audit log cannot be synced to the disk");
        }
        tracing::info!(file = %aside.display(), "the audit log is rotated");
        self.file = file;
        self.head = hash(&line[..line.len() - 1]);
        self.length = line.len() as u64;
        self.records += 1;
        self.next_archive += 1;
        Ok(())
    }
}

/// Opens a file of the log for appending and locks it against other daemons.
fn open_locked(path: &Path, more: OFlags) -> Result<File, AuditError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: File = open(path, flags | more, Mode::RUSR | Mode::WUSR)
        .map_err(|error| file_error(path, error.into()))?
        .into();
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let path = path.display().to_string();
        return Err(AuditError::InUse { path });
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::super::chain::{START, verify};
    use super::*;

    fn intent() -> Entry {
        Entry::Intent {
            principal: "uid:0".to_owned(),
            person: String::new(),
            method: "/patchbay.v1.StaticKeysService/UpdateStaticKeys".to_owned(),
            guest: "web-1".to_owned(),
            rule: "on-call".to_owned(),
            request: "enable net_a".to_owned(),
            trace_id: String::new(),
        }
    }

    /// Returns a log with three changes.
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
            (format!("{whole}{{}}\n"), 7),
            (format!("{}{whole}", lines[0].to_owned() + "\n"), 2),
        ] {
            std::fs::write(&path, &forged).expect("forged");
            let error = verify(&path, |_| {}).expect_err(&forged);
            assert!(
                error.to_string().contains(&format!("line {line}:")),
                "{error}"
            );
            // Nothing is appended to a damaged log, and its content is kept.
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
            length: 0,
            dirty: false,
            repaired: None,
            file_bytes: FILE_BYTES,
            rotate_at: FILE_BYTES,
            next_archive: 1,
        };
        let error = full.intent(intent()).expect_err("full");
        assert!(error.to_string().contains("/dev/full"), "{error}");
        assert_eq!((full.head.as_str(), full.next_id), (START, 0));
    }

    #[test]
    fn a_last_line_without_an_end_is_taken_out_and_reported() {
        let (_folder, path) = log();
        let whole = std::fs::read(&path).expect("a log");
        let last = whole[..whole.len() - 1]
            .iter()
            .rposition(|byte| *byte == b'\n');
        let last = last.expect("six lines") + 1;
        for end in [last + 1, last + 40, whole.len() - 1] {
            std::fs::write(&path, &whole[..end]).expect("cut");
            let torn = verify(&path, |_| {}).expect("readable").torn.expect("torn");
            assert_eq!(
                (torn.offset, torn.bytes.as_slice()),
                (last as u64, &whole[last..end])
            );
            let mut log = AuditLog::open(&path).expect("repaired");
            log.intent(intent()).expect("written");
            drop(log);
            let mut entries = vec![];
            let chain = verify(&path, |record| entries.push(record.entry.clone()));
            let chain = chain.expect("whole");
            assert_eq!((chain.records, chain.torn), (7, None));
            let Entry::Repaired {
                bytes,
                sha256,
                text,
            } = &entries[5]
            else {
                panic!("{entries:?}");
            };
            assert_eq!(
                (*bytes, sha256),
                ((end - last) as u64, &hash(&whole[last..end]))
            );
            assert!(text.starts_with('{'), "{text}");
        }
        // Only the new length of this file has reached the disk, and not the data at its end.
        std::fs::write(&path, [whole.as_slice(), &[0; 700]].concat()).expect("zeros");
        AuditLog::open(&path).expect("repaired");
        assert_eq!(verify(&path, |_| {}).expect("whole").records, 7);
    }

    /// Returns the names of the files in the folder, sorted.
    fn files(path: &Path) -> Vec<String> {
        let files = std::fs::read_dir(folder_of(path)).expect("a folder");
        let name = |file: std::io::Result<std::fs::DirEntry>| {
            let name = file.expect("listed").file_name();
            name.into_string().expect("a name")
        };
        let mut names: Vec<_> = files.map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_full_file_is_set_aside_and_the_chain_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.jsonl");
        let mut log = AuditLog::open_with(&path, 2000).expect("new");
        for number in 0..12 {
            assert_eq!(log.intent(intent()).expect("written"), number);
            log.outcome(number, "OK", "").expect("written");
        }
        let names = files(&path);
        assert!(names.len() > 2 && names[1] == "audit.jsonl.1", "{names:?}");
        for name in &names {
            let length = std::fs::metadata(folder.path().join(name))
                .expect("there")
                .len();
            assert!(length <= 2000, "{name}: {length}");
        }
        let (head, records) = (log.head.clone(), log.records());
        drop(log);
        let mut ids = vec![];
        let chain = verify(&path, |record| {
            if matches!(record.entry, Entry::Intent { .. }) {
                ids.push(record.id);
            }
        });
        let chain = chain.expect("whole");
        assert_eq!(ids, Vec::from_iter(0..12));
        assert_eq!(
            (chain.head, chain.records, chain.missing),
            (head, records, 0)
        );
        // The log is valid without its oldest files, and the missing lines are reported.
        std::fs::remove_file(folder.path().join("audit.jsonl.1")).expect("removed");
        let chain = verify(&path, |_| {}).expect("whole");
        assert!(chain.missing > 0 && chain.records == records, "{chain:?}");
        let mut log = AuditLog::open_with(&path, 2000).expect("whole");
        assert_eq!(
            (log.intent(intent()).expect("written"), log.records()),
            (12, records + 1)
        );
        // The log is invalid if a file in its middle is missing.
        for _ in 0..12 {
            log.intent(intent()).expect("written");
        }
        std::fs::remove_file(folder.path().join("audit.jsonl.3")).expect("removed");
        let error = verify(&path, |_| {}).expect_err("a gap").to_string();
        assert!(
            error.contains("audit.jsonl.4 is damaged at line 1"),
            "{error}"
        );
    }

    #[test]
    fn a_daemon_that_dies_while_it_sets_a_file_aside_leaves_a_whole_log() {
        let (folder, path) = log();
        // The daemon was killed after it linked the second name, and before it gave the first name
        // to the new file.
        std::fs::hard_link(&path, folder.path().join("audit.jsonl.1")).expect("linked");
        std::fs::write(folder.path().join("audit.jsonl.new"), "{").expect("written");
        assert_eq!(verify(&path, |_| {}).expect("whole").records, 6);
        let mut log = AuditLog::open_with(&path, 1).expect("whole");
        assert_eq!(files(&path), ["audit.jsonl", "audit.jsonl.new"]);
        log.intent(intent()).expect("written");
        assert_eq!(files(&path), ["audit.jsonl", "audit.jsonl.1"]);
        assert_eq!(verify(&path, |_| {}).expect("whole").records, 8);
        drop(log);
        // An administrator has moved the file away.
        std::fs::rename(&path, folder.path().join("audit.jsonl.2")).expect("moved");
        let mut log = AuditLog::open(&path).expect("continued");
        assert_eq!(log.intent(intent()).expect("written"), 4);
        assert_eq!(verify(&path, |_| {}).expect("whole").records, 10);
    }

    #[test]
    fn a_file_that_cannot_be_set_aside_grows_on() {
        let (folder, path) = log();
        let mut log = AuditLog::open_with(&path, 1).expect("whole");
        std::fs::create_dir(folder.path().join("audit.jsonl.new")).expect("in the way");
        std::fs::write(folder.path().join("audit.jsonl.new/file"), "").expect("in the way");
        for _ in 0..3 {
            log.intent(intent()).expect("written");
        }
        assert_eq!(verify(&path, |_| {}).expect("whole").records, 9);
    }

    #[test]
    fn lines_hold_nothing_that_a_terminal_acts_on_and_no_endless_text() {
        let (_folder, path) = log();
        let mut log = AuditLog::open(&path).expect("whole");
        let hostile = format!("\u{9b}2J\u{1b}[1m\u{7f}\n{}", "\u{1}".repeat(1 << 20));
        let entry = Entry::Denied {
            principal: hostile.clone(),
            person: String::new(),
            method: String::new(),
            guest: hostile.clone(),
            why: hostile.clone(),
        };
        log.intent(entry).expect("written");
        let text = std::fs::read_to_string(&path).expect("a log");
        let last = text.lines().last().expect("a line");
        assert!(!last.chars().any(char::is_control) && last.len() < 1 << 18);
        let mut whole = String::new();
        verify(&path, |record| {
            if let Entry::Denied { why, .. } = &record.entry {
                whole.clone_from(why);
            }
        })
        .expect("readable");
        assert!(whole.starts_with("\u{9b}2J\u{1b}[1m"), "the value is kept");
    }
}
