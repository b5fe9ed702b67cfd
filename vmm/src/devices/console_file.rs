// SPDX-License-Identifier: Apache-2.0

//! File output of the console. The guest chooses what it prints, so the size is bounded to two
//! files of [`FULL`] bytes.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use patchbay_guest::log_file::{LogPath, length};
use rustix::fs::OFlags;

use super::console::Sink;

/// Size in bytes at which a new file is started.
const FULL: u64 = 16 << 20;

/// O_APPEND, so that writes continue at the new end of a file that `logrotate` has truncated
/// (`copytruncate`).
const APPENDING: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::APPEND);

pub(super) struct ConsoleFile {
    path: LogPath,
    file: File,
    /// Bytes in the file; `None` for a pipe or a device, which do not grow.
    length: Option<u64>,
    full: u64,
}

impl ConsoleFile {
    /// Opens the file, mode 0600, and empties it.
    pub fn new(path: &Path) -> io::Result<Self> {
        let path = LogPath::new(path)?;
        let file = path.open(APPENDING)?;
        let length = length(&file)?.map(|_| 0);
        if length.is_some() {
            file.set_len(0)?;
        }
        Ok(Self {
            path,
            file,
            length,
            full: FULL,
        })
    }

    /// Opens the path again, which creates a new file if the previous one was renamed.
    fn begin(&mut self) -> io::Result<()> {
        let file = self.path.open(APPENDING)?;
        self.length = length(&file)?;
        self.file = file;
        Ok(())
    }

    /// Continues in a new file. If none can be created, the current file is truncated: its size
    /// must stay bounded, and the newest output matters most.
    fn rotate(&mut self) {
        let begun = self.path.set_aside().and_then(|()| self.begin());
        if let Err(error) = begun {
            self.complain(&error, "the current file is truncated and used again");
            if let Err(error) = self.file.set_len(0) {
                self.complain(&error, "the current file grows on");
            }
            self.length = Some(0);
        }
    }

    fn complain(&self, error: &io::Error, but: &str) {
        let path = self.path.path().display();
        tracing::warn!("the new console file {path} cannot be created ({error}); {but}");
    }
}

impl Write for ConsoleFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.length.is_some_and(|length| length >= self.full) {
            self.rotate();
        }
        let room = self
            .length
            .map_or(u64::MAX, |length| self.full - length.min(self.full));
        let room = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
        let written = self.file.write(&bytes[..room])?;
        if let Some(length) = &mut self.length {
            *length += written as u64;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sink for ConsoleFile {
    fn reopen(&mut self) {
        if self.length.is_some()
            && let Err(error) = self.begin()
        {
            self.complain(&error, "output continues in the old file");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{read, read_dir, rename, write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    struct Case {
        _folder: tempfile::TempDir,
        path: PathBuf,
    }

    fn case() -> Case {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        Case {
            _folder: folder,
            path,
        }
    }

    #[test]
    fn it_is_private_emptied_and_no_link() {
        let case = case();
        write(&case.path, "earlier").unwrap();
        ConsoleFile::new(&case.path).unwrap();
        assert_eq!(read(&case.path).unwrap(), b"");
        std::fs::remove_file(&case.path).unwrap();
        ConsoleFile::new(&case.path).unwrap();
        let mode = std::fs::metadata(&case.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let link = case.path.with_extension("link");
        symlink(&case.path, &link).unwrap();
        write(&case.path, "precious").unwrap();
        assert!(ConsoleFile::new(&link).is_err());
        assert_eq!(read(&case.path).unwrap(), b"precious");
    }

    #[test]
    fn two_files_bound_what_a_guest_can_print() {
        let case = case();
        let mut file = ConsoleFile::new(&case.path).unwrap();
        file.full = 10;
        file.write_all(b"0123456789abcdefghijKLM").unwrap();
        let aside = case.path.with_file_name("console.1");
        assert_eq!(read(&aside).unwrap(), b"abcdefghij");
        assert_eq!(read(&case.path).unwrap(), b"KLM");
        let folder = case.path.parent().unwrap();
        assert_eq!(read_dir(folder).unwrap().count(), 2);
        assert_eq!(FULL, 16 << 20);
    }

    #[test]
    fn without_a_new_file_the_old_one_does_not_grow() {
        let case = case();
        let mut file = ConsoleFile::new(&case.path).unwrap();
        file.full = 10;
        // A directory with that name cannot be replaced by a file.
        std::fs::create_dir(case.path.with_file_name("console.1")).unwrap();
        file.write_all(b"0123456789KLM").unwrap();
        assert_eq!(read(&case.path).unwrap(), b"KLM");
    }

    #[test]
    fn it_continues_in_a_new_file_after_a_rename() {
        let case = case();
        let mut file = ConsoleFile::new(&case.path).unwrap();
        file.write_all(b"before").unwrap();
        let aside = case.path.with_file_name("console-yesterday");
        rename(&case.path, &aside).unwrap();
        file.write_all(b", still").unwrap();
        file.reopen();
        file.write_all(b"after").unwrap();
        assert_eq!(read(&aside).unwrap(), b"before, still");
        assert_eq!(read(&case.path).unwrap(), b"after");
        // The file was not renamed, so the same one is used.
        file.reopen();
        file.write_all(b" all").unwrap();
        assert_eq!(read(&case.path).unwrap(), b"after all");
    }

    #[test]
    fn a_device_is_written_as_it_is() {
        let mut file = ConsoleFile::new(Path::new("/dev/null")).unwrap();
        file.full = 1;
        file.write_all(b"far more than one byte").unwrap();
        file.reopen();
        file.write_all(b"still").unwrap();
    }
}
