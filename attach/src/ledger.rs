// SPDX-License-Identifier: Apache-2.0
//! Names the file in which an attacher keeps holds and claims.
//!
//! The file is named after the process that runs the guest. So every attacher of the guest whose
//! socket is in the same folder finds it, whatever the guest's name and QMP socket, and no attacher
//! of another guest does.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use patchbay_guest::log_file::{NEXT, folder_of};
use patchbay_service::keys::claims::Mark;
use rustix::process::geteuid;

use crate::error::AttachError;
use crate::process::Process;

/// The end of the name of a ledger.
const EXTENSION: &str = "ledger";

/// The ledger of a guest.
#[derive(Clone, Debug)]
pub struct LedgerName {
    path: PathBuf,
    process: String,
}

/// A process, as the name of a ledger gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Named {
    /// Inode number of the PID namespace. Attachers in different containers may share a folder.
    namespace: u64,
    pid: u32,
    /// See [`Process::started`].
    started: u64,
}

impl Named {
    /// Parses the name of a file with this extension, or of one that is made beside it: its mark,
    /// and what a process that was killed has left of the next content of either.
    fn of(path: &Path, extension: &str) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let name = name.strip_suffix(NEXT).unwrap_or(name);
        let name = name.strip_suffix(Mark::ENDING).unwrap_or(name);
        let name = name.strip_suffix(extension)?.strip_suffix('.')?;
        let mut numbers = name.split('-');
        let named = Self {
            namespace: numbers.next()?.parse().ok()?,
            pid: numbers.next()?.parse().ok()?,
            started: numbers.next()?.parse().ok()?,
        };
        numbers.next().is_none().then_some(named)
    }

    /// Returns whether the process has ended. A process that cannot be inspected may still run.
    fn has_ended(self) -> bool {
        match Process::open(self.pid) {
            Ok(process) => process
                .started()
                .is_ok_and(|started| started != self.started),
            Err(_) => matches!(
                Path::new("/proc").join(self.pid.to_string()).try_exists(),
                Ok(false)
            ),
        }
    }
}

impl LedgerName {
    /// Returns the ledger of the guest that a process runs, beside the socket of an attacher.
    ///
    /// # Errors
    /// The process has ended.
    pub fn beside(socket: &Path, process: &Process) -> Result<Self, AttachError> {
        let name = name_of(process)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok(Self {
            path: folder_of(socket).join(format!("{name}.{EXTENSION}")),
            process: format!("{name} {}", boot.trim()),
        })
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name of the process. No other process on this host has it, before or after a
    /// boot of the host.
    #[must_use]
    pub fn process(&self) -> &str {
        &self.process
    }

    /// Removes the file, because the guest has ended.
    pub fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            let path = self.path.display();
            tracing::debug!(%path, %error, "the ledger of a guest that has ended stays");
        }
        let mark = Mark::path(&self.path);
        for left in [new(&self.path), new(&mark), mark] {
            let _ = fs::remove_file(left);
        }
    }

    /// Removes the ledgers of this user in the same folder whose processes have ended without an
    /// attacher.
    pub fn remove_ended(&self) {
        remove_ended(folder_of(&self.path), EXTENSION);
    }
}

/// Returns the name of a process, which no other process has until the host boots again.
pub(crate) fn name_of(process: &Process) -> Result<String, AttachError> {
    let (pid, started) = (process.pid(), process.started()?);
    Ok(format!("{}-{pid}-{started}", namespace()))
}

/// Removes the files of this user in a folder that are named after processes that have ended.
pub(crate) fn remove_ended(folder: &Path, extension: &str) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let named = Named::of(&path, extension).filter(|named| named.namespace == namespace());
        let is_own = || {
            let metadata = fs::symlink_metadata(&path);
            metadata.is_ok_and(|metadata| metadata.uid() == geteuid().as_raw())
        };
        if named.is_some_and(|named| is_own() && named.has_ended()) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Returns the path of the next content of a file while it is written.
fn new(path: &Path) -> PathBuf {
    let mut path = OsString::from(path);
    path.push(NEXT);
    path.into()
}

/// Returns the inode number of this process's PID namespace, in which the numbers of processes are
/// valid.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn all_attachers_of_a_process_in_a_folder_have_one_ledger() {
        let process = Process::open(std::process::id()).expect("it runs");
        let beside = |socket: &str| LedgerName::beside(Path::new(socket), &process).expect("runs");
        let (one, other) = (beside("/run/p/a.sock"), beside("/run/p/b.sock"));
        assert_eq!(one.path(), other.path());
        assert_eq!(one.process(), other.process());
        assert_eq!(one.path().parent(), Some(Path::new("/run/p")));
        let named = Named::of(one.path(), EXTENSION).expect("its own name");
        assert_eq!(named.pid, std::process::id());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn();
        let child = child.as_mut().expect("coreutils");
        let other = Process::open(child.id()).expect("it runs");
        let other = LedgerName::beside(Path::new("/run/p/a.sock"), &other).expect("it runs");
        child.kill().expect("it runs");
        child.wait().expect("it has ended");
        assert_ne!(one.path(), other.path());
    }

    #[test]
    fn only_ledgers_of_processes_that_have_ended_are_removed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let process = Process::open(std::process::id()).expect("it runs");
        let own = LedgerName::beside(&folder.path().join("g.sock"), &process).expect("it runs");
        let Named {
            namespace,
            pid,
            started,
        } = Named::of(own.path(), EXTENSION).expect("its own name");
        let file = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, "").expect("room");
            path
        };
        let stay = [
            own.path().to_owned(),
            // The ledger of another container.
            file(&format!("{}-{pid}-1.ledger", namespace ^ 1)),
            file(&format!("{namespace}-{pid}-1.ledger.1")),
            file(&format!("{namespace}-{pid}-1-1.ledger")),
            file("g.sock"),
        ];
        fs::write(&stay[0], "").expect("room");
        let go = [
            file(&format!("{namespace}-{pid}-{}.ledger", started ^ 1)),
            file(&format!("{namespace}-{}-1.ledger", i32::MAX)),
            file(&format!("{namespace}-{}-1.ledger.mark", i32::MAX)),
            // Their ledgers were removed, or never written.
            file(&format!("{namespace}-{}-2.ledger.mark", i32::MAX)),
            file(&format!("{namespace}-{}-3.ledger.new", i32::MAX)),
            file(&format!("{namespace}-{}-4.ledger.mark.new", i32::MAX)),
        ];
        let own_new = new(own.path());
        fs::write(&own_new, "").expect("room");
        let link = folder.path().join(format!("{namespace}-{pid}-2.ledger"));
        symlink(&stay[4], &link).expect("room");
        own.remove_ended();
        for path in &stay {
            assert!(path.exists(), "{}", path.display());
        }
        for path in go.iter().chain([&link]) {
            assert!(!path.exists(), "{}", path.display());
        }
        assert!(own_new.exists());
        own.remove();
        assert!(!own.path().exists() && !own_new.exists());
        own.remove();
    }
}
