// SPDX-License-Identifier: Apache-2.0
//! The file of the audit log.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use patchbay_guest::log_file::{LogPath, length};
use rustix::fs::OFlags;

use super::syncs::Syncs;
use crate::keys::error::KeysError;

/// An open audit log file. One thread at a time writes to it.
#[derive(Debug)]
pub struct AuditFile {
    open: Arc<OpenFile>,
    /// The last line has no newline.
    cut_short: bool,
}

/// The part of an [`AuditFile`] that lines refer to until they are synced.
#[derive(Debug)]
pub(super) struct OpenFile {
    place: Arc<LogPath>,
    file: File,
    /// False for a pipe or a device, which cannot be synced.
    can_sync: bool,
    syncs: Syncs,
}

/// A line that was written.
#[derive(Debug)]
#[must_use = "it may not be on the disk"]
pub(super) struct Written {
    open: Arc<OpenFile>,
    number: u64,
}

impl AuditFile {
    /// Opens the file, and creates it if it does not exist.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(place: Arc<LogPath>) -> std::io::Result<Self> {
        let file = place.open(OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
        let length = length(&file)?;
        Ok(Self {
            cut_short: length.is_some_and(|length| is_cut_short(&place, length)),
            open: Arc::new(OpenFile {
                place,
                file,
                can_sync: length.is_some(),
                syncs: Syncs::default(),
            }),
        })
    }

    /// Returns the path of the file.
    pub(super) fn place(&self) -> &Arc<LogPath> {
        &self.open.place
    }

    /// Appends one line, in a single write unless the kernel accepts only part of it.
    pub(super) fn append(&mut self, mut text: Vec<u8>) -> std::io::Result<Written> {
        text.push(b'\n');
        if self.cut_short {
            text.insert(0, b'\n');
        }
        let open = &self.open;
        let number = open.syncs.begin();
        let mut rest = &text[..];
        while !rest.is_empty() {
            match (&open.file).write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    rest = &rest[written..];
                    self.cut_short = !rest.is_empty();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        open.syncs.end(number);
        Ok(Written {
            open: Arc::clone(open),
            number,
        })
    }

    /// Syncs all lines, and what the file contained when it was opened.
    pub(super) fn sync(&self) -> std::io::Result<()> {
        self.open.sync(self.open.syncs.last())
    }

    pub(super) fn unwritable(&self, error: std::io::Error) -> KeysError {
        self.open.unwritable(error)
    }

    /// Returns the open file, for a test that pretends a slow disk.
    #[cfg(test)]
    pub(super) fn open_file(&self) -> Arc<OpenFile> {
        Arc::clone(&self.open)
    }
}

impl OpenFile {
    fn sync(&self, line: u64) -> std::io::Result<()> {
        match self.can_sync {
            true => self.syncs.wait(line, || self.file.sync_data()),
            false => Ok(()),
        }
    }

    fn unwritable(&self, error: std::io::Error) -> KeysError {
        KeysError::AuditLogUnwritable {
            path: self.place.path().display().to_string(),
            error: error.to_string(),
        }
    }

    /// Syncs all lines by `sync`.
    #[cfg(test)]
    pub(super) fn sync_by(
        &self,
        sync: impl FnOnce() -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        self.syncs.wait(self.syncs.last(), sync)
    }
}

impl Written {
    /// Waits until the line is on the disk.
    ///
    /// # Errors
    /// [`KeysError::AuditLogUnwritable`]: the line may not be on the disk.
    pub(super) fn sync(&self) -> Result<(), KeysError> {
        let synced = self.open.sync(self.number);
        synced.map_err(|error| self.open.unwritable(error))
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
