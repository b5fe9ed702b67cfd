// SPDX-License-Identifier: Apache-2.0
//! Verifies the chain of hashes over all files of a log.
//!
//! `audit.jsonl` continues `audit.jsonl.2`, which continues `audit.jsonl.1`. The oldest files may
//! be removed, because the first line of each file has the last hash of the previous file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::record::{Entry, Record, hash};

/// The hash that the first line of a log gives as the hash of the line before it.
pub const START: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The maximum length of a line; a longer one means that the log is damaged.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The reason why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file cannot be opened, read or written.
    #[error("the audit log {path}: {error}")]
    File {
        /// The path of the log.
        path: String,
        /// The operating system's error.
        error: io::Error,
    },
    /// Another process is writing to the log.
    #[error("the audit log {path} is in use by another process")]
    InUse {
        /// The path of the log.
        path: String,
    },
    /// A line differs from what was written.
    #[error(
        "the audit log {path} is damaged at line {line}: {why}; keep the log and its archives as evidence in another folder, and a daemon that starts without them begins a new chain"
    )]
    Damaged {
        /// The path of the log.
        path: String,
        /// The number of the line, from 1.
        line: usize,
        /// The fault of the line.
        why: String,
    },
}

/// The state of a log after all its lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The number of lines, including those in removed files.
    pub records: usize,
    /// The number of lines in removed files.
    pub missing: usize,
    /// The hash of the last line. The next line contains it as its previous hash.
    pub head: String,
    /// An incomplete last line. The daemon removes it when it starts.
    pub torn: Option<Torn>,
    /// The number of the next intent.
    pub(super) next_id: u64,
    /// The number of the file that the last one continues; 0 if there is none.
    pub(super) continues: u64,
}

/// An incomplete last line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Torn {
    /// The offset in the file at which the line begins.
    pub offset: u64,
    /// The bytes of the line that were written.
    pub bytes: Vec<u8>,
}

/// Reads a log to its end, beginning with its oldest file, and checks its chain. Calls `each` with
/// every record.
///
/// # Errors
/// [`AuditError`].
pub fn verify(path: &Path, mut each: impl FnMut(&Record)) -> Result<Chain, AuditError> {
    // This file is opened before the older ones are listed, so that a file that is rotated
    // meanwhile is not missed.
    let file = File::open(path).map_err(|error| file_error(path, error))?;
    let mut chain = None;
    for (_, archive) in archives(path)? {
        let older = File::open(&archive).map_err(|error| file_error(&archive, error))?;
        if is_same(&older, &file).map_err(|error| file_error(&archive, error))? {
            break;
        }
        let whole = verify_file(&archive, &older, chain.take(), &mut each)?;
        if whole.torn.is_some() {
            return Err(damaged(&archive, 0, "its last line is incomplete"));
        }
        chain = Some(whole);
    }
    verify_file(path, &file, chain, &mut each)
}

/// Reads one file. `before` is the chain of the file that it continues, or `None` for the oldest
/// file.
pub fn verify_file(
    path: &Path,
    file: &File,
    before: Option<Chain>,
    each: &mut impl FnMut(&Record),
) -> Result<Chain, AuditError> {
    let mut reader = BufReader::new(file);
    let is_oldest = before.is_none();
    let mut chain = before.unwrap_or_else(|| Chain {
        records: 0,
        missing: 0,
        head: START.to_owned(),
        torn: None,
        next_id: 0,
        continues: 0,
    });
    let mut offset = 0;
    for number in 1.. {
        let damaged = |why: &str| damaged(path, number, why);
        let mut line = Vec::new();
        let read = (&mut reader)
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line);
        let read = read.map_err(|error| file_error(path, error))? as u64;
        if line.is_empty() {
            break;
        }
        if line.last() != Some(&b'\n') {
            if read == MAX_LINE_BYTES {
                return Err(damaged("it is longer than any line that the daemon writes"));
            }
            chain.torn = Some(Torn {
                offset,
                bytes: line,
            });
            break;
        }
        line.pop();
        offset += read;
        let record: Record =
            serde_json::from_slice(&line).map_err(|error| damaged(&error.to_string()))?;
        if let (1, Entry::Continued { file, records }) = (number, &record.entry) {
            chain.continues = archive_number(file);
            if is_oldest {
                chain.head.clone_from(&record.previous);
                chain.records = *records;
                chain.missing = *records;
            }
        }
        if record.previous != chain.head {
            return Err(damaged(&format!(
                "it follows {}, and the line before it is {}",
                record.previous, chain.head
            )));
        }
        chain.head = hash(&line);
        chain.next_id = chain.next_id.max(record.id.saturating_add(1));
        chain.records += 1;
        each(&record);
    }
    Ok(chain)
}

/// Returns the older files of the log and their numbers, the oldest first.
pub fn archives(path: &Path) -> Result<Vec<(u64, PathBuf)>, AuditError> {
    let folder = folder_of(path);
    let mut prefix = path.file_name().unwrap_or_default().to_owned();
    prefix.push(".");
    let mut found = vec![];
    let unreadable = |error| file_error(folder, error);
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let Some((name, prefix)) = name.to_str().zip(prefix.to_str()) else {
            continue;
        };
        let number = name.strip_prefix(prefix).and_then(|rest| rest.parse().ok());
        // The daemon does not create names such as "007" and "+7".
        if let Some(number) = number.filter(|number| *name == format!("{prefix}{number}")) {
            found.push((number, folder.join(name)));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the path of the older file with this number.
pub fn archive(path: &Path, number: u64) -> PathBuf {
    with_suffix(path, &number.to_string())
}

/// Returns the path with a suffix appended.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".");
    name.push(suffix);
    name.into()
}

fn archive_number(file: &str) -> u64 {
    let number = file.rsplit('.').next().and_then(|word| word.parse().ok());
    number.unwrap_or(0)
}

pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Returns whether two descriptors refer to the same file.
pub fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

pub fn file_error(path: &Path, error: io::Error) -> AuditError {
    let path = path.display().to_string();
    AuditError::File { path, error }
}

fn damaged(path: &Path, line: usize, why: &str) -> AuditError {
    AuditError::Damaged {
        path: path.display().to_string(),
        line,
        why: why.to_owned(),
    }
}
