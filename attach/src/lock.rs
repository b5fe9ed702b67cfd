// SPDX-License-Identifier: Apache-2.0
//! Makes a process the only attacher of another one.
//!
//! | lock on | excludes |
//! |---|---|
//! | `/proc/PID/maps` | the attachers that see the same mount of /proc. `/proc/locks` names the holder |
//! | a file in [`FOLDER`], taken by root only | the attachers that see another mount of /proc, where the process's files have other inodes. systemd mounts one for a unit with `ProtectProc=` each time it starts |

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use patchbay_host_kernel::Locks;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::process::geteuid;

use crate::error::AttachError;
use crate::ledger;
use crate::process::Process;

/// The folder of the locks that are common to all mounts of /proc.
const FOLDER: &str = "/run/patchbay/.lock";
const EXTENSION: &str = "lock";
/// The maximum number of attempts to lock a file that another attacher removes meanwhile.
const MAX_ATTEMPTS: usize = 16;

/// A lock on a process. It ends with the process that holds it.
#[derive(Debug)]
pub struct Lock {
    maps: File,
    common: Option<File>,
}

impl Lock {
    /// Locks a process, whose file `maps` is open.
    ///
    /// # Errors
    /// Another attacher holds the lock.
    pub(crate) fn take(process: &Process, maps: File) -> Result<Self, AttachError> {
        let common = match geteuid().is_root() {
            true => common(Path::new(FOLDER), process)?,
            false => None,
        };
        lock(&maps, process.pid())?;
        Ok(Self { maps, common })
    }

    /// Returns the locked files. A duplicate of each keeps all other attachers out.
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        std::iter::once(&self.maps).chain(&self.common)
    }
}

/// Locks a file for this process in the folder. Returns `None` with a warning if the folder or the
/// file cannot be created, for example because the file system is read-only.
fn common(folder: &Path, process: &Process) -> Result<Option<File>, AttachError> {
    let without = |error: io::Error| {
        tracing::warn!(
            folder = %folder.display(),
            %error,
            "no lock can be taken in the folder, so an attacher that sees another mount of /proc is not kept out"
        );
        Ok(None)
    };
    let mut builder = fs::DirBuilder::new();
    if let Err(error) = builder.recursive(true).mode(0o755).create(folder) {
        return without(error);
    }
    ledger::remove_ended(folder, EXTENSION);
    let path = folder.join(format!("{}.{EXTENSION}", ledger::name_of(process)?));
    for _ in 0..MAX_ATTEMPTS {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => File::from(file),
            Err(error) => return without(error.into()),
        };
        lock(&file, process.pid())?;
        if is_same(file.metadata(), fs::symlink_metadata(&path)) {
            return Ok(Some(file));
        }
    }
    Err(AttachError::Refused(format!(
        "the lock {} is removed again and again while it is taken; try again",
        path.display()
    )))
}

fn is_same(one: io::Result<Metadata>, other: io::Result<Metadata>) -> bool {
    let identity = |file: &Metadata| (file.dev(), file.ino());
    matches!((one, other), (Ok(one), Ok(other)) if identity(&one) == identity(&other))
}

fn lock(file: &File, pid: u32) -> Result<(), AttachError> {
    flock(file, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
        let holder = file.metadata().ok();
        let holder = holder.and_then(|file| Locks::read(Path::new("/proc"), [&file]).holder(&file));
        let holder = holder.map_or(String::new(), |pid| format!(" {pid}"));
        AttachError::Refused(format!(
            "another process{holder} is attached to the guest of process {pid}; use its API socket, or end it first"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_lock_is_that_of_one_attacher() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().join("run/lock");
        let process = Process::open(std::process::id()).expect("it runs");
        let first = common(&folder, &process).expect("free");
        assert!(first.is_some());
        let error = common(&folder, &process).expect_err("taken").to_string();
        let holder = format!("another process {} is attached", std::process::id());
        assert!(error.contains(&holder), "{error}");
        // The lock ends with its holder. The file stays until the locked process has ended.
        drop(first);
        assert!(common(&folder, &process).expect("free").is_some());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn();
        let child = child.as_mut().expect("coreutils");
        let other = Process::open(child.id()).expect("it runs");
        assert!(common(&folder, &other).expect("free").is_some());
        let files = || fs::read_dir(&folder).expect("there").count();
        assert_eq!(files(), 2);
        child.kill().expect("it runs");
        child.wait().expect("it has ended");
        assert!(common(&folder, &process).expect("free").is_some());
        assert_eq!(files(), 1);
        // A folder that cannot be created is no reason for a refusal.
        let file = folder.join("file");
        fs::write(&file, "").expect("room");
        assert!(
            common(&file.join("x"), &process)
                .expect("no lock")
                .is_none()
        );
    }
}
