// SPDX-License-Identifier: Apache-2.0

//! Files that the monitor writes for the life of the guest, and reopens for log rotation.
//!
//! The files are opened relative to a descriptor of their folder, with mode 0600, and never through
//! a symbolic link, which another user may have placed there.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, fsync, open, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The ending of the name of a file's next content while [`LogPath::replace`] writes it.
pub const NEXT: &str = ".new";

/// The path of a log file, with a descriptor of its folder.
#[derive(Debug)]
pub struct LogPath {
    path: PathBuf,
    folder: OwnedFd,
    name: OsString,
}

/// Returns the folder of the file.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Returns the size of a regular file in bytes, or `None` for a pipe or a device. This uses
/// `fstat`, because the threads' seccomp filters refuse the system call that `File::metadata`
/// makes.
///
/// # Errors
/// The error of fstat(2).
pub fn length(file: &File) -> io::Result<Option<u64>> {
    let status = fstat(file)?;
    let regular = FileType::from_raw_mode(status.st_mode).is_file();
    Ok(u64::try_from(status.st_size).ok().filter(|_| regular))
}

/// Returns whether the file belongs to this process's user, and no other user may write it.
///
/// # Errors
/// The error of fstat(2).
pub fn is_own(file: &File) -> io::Result<bool> {
    let status = fstat(file)?;
    let mode = Mode::from_raw_mode(status.st_mode);
    let is_shared = mode.intersects(Mode::WGRP | Mode::WOTH);
    Ok(status.st_uid == geteuid().as_raw() && !is_shared)
}

impl LogPath {
    /// Opens the folder.
    ///
    /// # Errors
    /// The folder cannot be opened, or `path` names no file.
    pub fn new(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            path: path.to_owned(),
            folder: open(folder_of(path), flags, Mode::empty())?,
            name: name.to_owned(),
        })
    }

    /// Returns the path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file, and creates it if `flags` contain O_CREAT.
    ///
    /// # Errors
    /// The error of open(2), which includes a symbolic link at the path.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        match openat(&self.folder, &self.name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(file.into()),
            Err(error @ Errno::LOOP) => Err(io::Error::new(
                io::Error::from(error).kind(),
                "it is a symbolic link, which the monitor does not follow",
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the file by one with this content. The content is on the disk when this returns. If
    /// this fails, the earlier file is intact, and the new content takes no room. A failure to sync
    /// the folder is ignored, because the rename has taken effect by then: only a crash of the host
    /// may bring the earlier file back, not the end of this process.
    ///
    /// # Errors
    /// The error of open(2), write(2), fsync(2) or rename(2).
    pub fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        let mut new = self.name.clone();
        new.push(NEXT);
        let remove = || unlinkat(&self.folder, &new, AtFlags::empty());
        match remove() {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut file: File = openat(&self.folder, &new, flags, Mode::RUSR | Mode::WUSR)?.into();
        let renamed = file
            .write_all(bytes)
            .and_then(|()| file.sync_all())
            .and_then(|()| Ok(renameat(&self.folder, &new, &self.folder, &self.name)?));
        if renamed.is_err() {
            // Other files need the room on a full disk.
            let _ = remove();
            return renamed;
        }
        let _ = self.sync_folder();
        Ok(())
    }

    fn sync_folder(&self) -> io::Result<()> {
        // The descriptor of the folder was opened with O_PATH, which fsync(2) does not accept.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(fsync(openat(&self.folder, ".", flags, Mode::empty())?)?)
    }

    /// Renames the file to `NAME.1`, replacing an earlier one.
    ///
    /// # Errors
    /// The error of rename(2).
    pub fn set_aside(&self) -> io::Result<()> {
        let mut aside = self.name.clone();
        aside.push(".1");
        Ok(renameat(&self.folder, &self.name, &self.folder, &aside)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const NEW: OFlags = OFlags::WRONLY.union(OFlags::CREATE);

    #[test]
    fn new_files_are_private_whatever_the_umask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mask = rustix::process::umask(Mode::empty());
        LogPath::new(&path).unwrap().open(NEW).unwrap();
        rustix::process::umask(mask);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        for target in [&victim, &folder.path().join("nothing")] {
            let path = folder.path().join("log");
            symlink(target, &path).unwrap();
            let error = LogPath::new(&path).unwrap().open(NEW).unwrap_err();
            assert!(error.to_string().contains("symbolic link"), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        assert!(!folder.path().join("nothing").exists());
    }

    #[test]
    fn the_folder_is_kept_when_another_takes_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let [logs, moved] = ["logs", "moved"].map(|name| folder.path().join(name));
        std::fs::create_dir(&logs).unwrap();
        let log = LogPath::new(&logs.join("log")).unwrap();
        std::fs::rename(&logs, &moved).unwrap();
        std::fs::create_dir(&logs).unwrap();
        log.open(NEW).unwrap();
        assert!(moved.join("log").exists() && !logs.join("log").exists());
        log.set_aside().unwrap();
        assert!(moved.join("log.1").exists() && !moved.join("log").exists());
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let ledger = LogPath::new(&path).unwrap();
        ledger.replace(b"one").unwrap();
        // A process that was killed leaves a part of the next content.
        std::fs::write(folder.path().join("ledger.new"), "tw").unwrap();
        ledger.replace(b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        std::fs::create_dir(folder.path().join("ledger.new")).unwrap();
        ledger.replace(b"three").unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        std::fs::remove_dir(folder.path().join("ledger.new")).unwrap();
        // The content is written and cannot take the name.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        ledger.replace(b"three").unwrap_err();
        assert!(!folder.path().join("ledger.new").exists());
    }

    #[test]
    fn paths_that_name_no_file_are_refused() {
        for path in ["", "/", "..", "/nonexistent/log"] {
            assert!(LogPath::new(Path::new(path)).is_err(), "{path}");
        }
        assert_eq!(folder_of(Path::new("log")), Path::new("."));
    }
}
