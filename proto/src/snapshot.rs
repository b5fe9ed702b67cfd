// SPDX-License-Identifier: Apache-2.0
//! Writes the files of a snapshot that a monitor streams.

use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use crate::v1::SnapshotGuestResponse;
use crate::{SNAPSHOT_MEMORY, SNAPSHOT_STATE};

/// A snapshot cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] io::Error),
    /// A part lies beyond the guest's memory.
    #[error("the guest's monitor sent more memory than the guest has; report it")]
    TooMuch,
    /// The stream ended early.
    #[error("the guest's monitor sent only a part of the guest; report it")]
    Incomplete,
}

/// The files of a snapshot that is being written.
#[derive(Debug)]
pub struct SnapshotFiles {
    memory: File,
    state: File,
    memory_bytes: u64,
    written_bytes: u64,
}

impl SnapshotFiles {
    /// Creates the files in a folder, which must have neither.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let create = |name: &str| File::create_new(folder.join(name));
        Ok(Self {
            memory: create(SNAPSHOT_MEMORY)?,
            state: create(SNAPSHOT_STATE)?,
            memory_bytes: 0,
            written_bytes: 0,
        })
    }

    /// Writes the next part of the stream.
    ///
    /// # Errors
    /// A file cannot be written, or the part lies beyond the guest's memory.
    pub fn add(&mut self, part: &SnapshotGuestResponse) -> Result<(), SnapshotError> {
        if part.memory_bytes != 0 {
            self.memory_bytes = part.memory_bytes;
            self.memory.set_len(part.memory_bytes)?;
        }
        let end = part.memory_offset.checked_add(part.memory.len() as u64);
        if end.is_none_or(|end| end > self.memory_bytes) {
            return Err(SnapshotError::TooMuch);
        }
        self.memory.write_all_at(&part.memory, part.memory_offset)?;
        self.state.write_all(&part.state)?;
        self.written_bytes += (part.memory.len() + part.state.len()) as u64;
        Ok(())
    }

    /// Makes the files read-only after the last part. Copies of the guest map the memory, so a
    /// write would change them.
    ///
    /// # Errors
    /// The stream had no memory or no state, or a file cannot be changed.
    pub fn finish(&self) -> Result<(), SnapshotError> {
        let state = self.state.metadata();
        if state.is_ok_and(|state| state.len() == 0) || self.memory_bytes == 0 {
            return Err(SnapshotError::Incomplete);
        }
        for file in [&self.memory, &self.state] {
            file.set_permissions(Permissions::from_mode(0o400))?;
        }
        Ok(())
    }

    /// Waits until the files are on the disk.
    ///
    /// # Errors
    /// A file cannot be synced.
    pub fn sync(&self) -> io::Result<()> {
        self.memory.sync_all()?;
        self.state.sync_all()
    }

    /// The guest's memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Bytes of memory that are not zero pages, and bytes of the other state.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }
}
