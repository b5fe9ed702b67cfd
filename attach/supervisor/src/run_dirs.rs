// SPDX-License-Identifier: Apache-2.0
//! Finds sockets of monitors in the run directories: `DIR/*.sock` and `DIR/NAME/api.sock`.
//!
//! An inotify event only causes the directories to be read again. Its content is not used.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::unix::pipe;
use tokio::sync::watch;

/// Rescan at least this often, because a watch may be lost, or the directory may be created later.
const RESCAN: Duration = Duration::from_secs(5);
/// The maximum number of entries of a run directory that are examined.
const MAX_ENTRIES: usize = 16_384;
/// The maximum number of reads of events at once.
const MAX_READS: usize = 16;
/// The name of the socket in a guest's own folder.
const API_SOCKET: &str = "api.sock";

/// The folders to watch.
#[derive(Clone, Debug)]
pub struct RunDirs(pub Vec<PathBuf>);

/// Returns the sockets in a run directory at which the guest of this name may be served.
#[must_use]
pub fn sockets_of(dir: &Path, name: &str) -> [PathBuf; 2] {
    [
        dir.join(format!("{name}.sock")),
        dir.join(name).join(API_SOCKET),
    ]
}

/// Returns the folders in which monitors put their sockets by default.
#[must_use]
pub fn default_run_dirs() -> RunDirs {
    let mut dirs = vec![PathBuf::from("/run/patchbay")];
    if let Some(own) = std::env::var_os("XDG_RUNTIME_DIR").filter(|own| !own.is_empty()) {
        dirs.push(PathBuf::from(own).join("patchbay"));
    }
    RunDirs(dirs)
}

/// The folders with their inotify watches.
pub struct Watch {
    dirs: RunDirs,
    inotify: Option<pipe::Receiver>,
    scans: watch::Sender<u64>,
}

impl Watch {
    /// Creates the watches. Without inotify, the folders are read at intervals.
    #[must_use]
    pub fn new(dirs: RunDirs) -> Self {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            // The descriptor is read like a pipe, because the content of the events is not used.
            .and_then(pipe::Receiver::from_owned_fd_unchecked);
        Self {
            dirs,
            inotify: inotify
                .inspect_err(|error| tracing::warn!(%error, "run directories are not watched, only read every {RESCAN:?}"))
                .ok(),
            scans: watch::Sender::new(0),
        }
    }

    /// Returns a counter that changes with each scan.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.scans.subscribe()
    }

    /// Returns the sockets that may belong to monitors, in order.
    pub fn scan(&mut self) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        for dir in &self.dirs.0 {
            // The watch begins before the folder is read, so that a change in between causes an
            // event.
            self.watch(dir);
            for path in entries(dir) {
                let Ok(metadata) = std::fs::symlink_metadata(&path) else {
                    continue;
                };
                if metadata.file_type().is_socket() && path.extension().is_some_and(|e| e == "sock")
                {
                    found.insert(path);
                } else if metadata.is_dir() {
                    self.watch(&path);
                    let socket = path.join(API_SOCKET);
                    if is_socket(&socket) {
                        found.insert(socket);
                    }
                }
            }
        }
        self.scans.send_modify(|scans| *scans += 1);
        found
    }

    /// Returns all sockets directly in the folders, in order.
    pub fn sockets(&mut self) -> BTreeSet<PathBuf> {
        let dirs = self.dirs.0.iter();
        // The watch begins before the folder is read, so that a change in between causes an event.
        let paths = dirs
            .inspect(|dir| self.watch(dir))
            .flat_map(|dir| entries(dir));
        paths.filter(|path| is_socket(path)).collect()
    }

    /// Waits until a folder has changed, or for [`RESCAN`].
    pub async fn changed(&self) {
        let Some(inotify) = &self.inotify else {
            return tokio::time::sleep(RESCAN).await;
        };
        let readable = tokio::time::timeout(RESCAN, inotify.readable()).await;
        let mut events = [0; 4096];
        // A process may cause events faster than they are read.
        for _ in 0..MAX_READS {
            if readable.is_err() || !inotify.try_read(&mut events).is_ok_and(|read| read > 0) {
                return;
            }
        }
    }

    fn watch(&self, dir: &Path) {
        if let Some(inotify) = &self.inotify {
            let flags = WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::ONLYDIR;
            // The next scan retries a folder that does not exist.
            let _ = inotify::add_watch(inotify, dir, flags);
        }
    }
}

/// Returns whether the path is a socket and not a symbolic link.
#[must_use]
pub fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return vec![];
    };
    let entries = entries.take(MAX_ENTRIES);
    entries.flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn sockets_are_found_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("patchbay");
        let mut watch = Watch::new(RunDirs(vec![dir.clone()]));
        assert!(watch.scan().is_empty(), "the folder is not there yet");
        std::fs::create_dir_all(dir.join("web-1")).expect("created");
        std::fs::create_dir(dir.join("folder.sock")).expect("created");
        std::fs::write(dir.join("file.sock"), "").expect("written");
        let sockets = [dir.join("db.sock"), dir.join("web-1/api.sock")];
        let mut listeners = vec![];
        for path in [
            &sockets[0],
            &sockets[1],
            &dir.join("other"),
            &dir.join("web-1/vsock"),
        ] {
            listeners.push(UnixListener::bind(path).expect("bound"));
        }
        std::os::unix::fs::symlink(&sockets[0], dir.join("link.sock")).expect("linked");
        assert_eq!(watch.scan().into_iter().collect::<Vec<_>>(), sockets);
    }

    #[tokio::test]
    async fn a_new_socket_in_a_new_folder_is_an_event() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut watch = Watch::new(RunDirs(vec![folder.path().to_owned()]));
        watch.scan();
        tokio::time::pause();
        let started = tokio::time::Instant::now();
        std::fs::create_dir(folder.path().join("web-1")).expect("created");
        watch.changed().await;
        watch.scan();
        let path = folder.path().join("web-1/api.sock");
        let _listener = UnixListener::bind(&path).expect("bound");
        watch.changed().await;
        assert!(watch.scan().contains(&path));
        assert_eq!(
            started.elapsed(),
            Duration::ZERO,
            "by an event, not by the interval"
        );
    }
}
