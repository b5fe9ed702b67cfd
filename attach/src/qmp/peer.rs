// SPDX-License-Identifier: Apache-2.0
//! Identifies the process that a unix socket belongs to.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

use crate::process::Process;

/// The flag of a listening socket (`__SO_ACCEPTCON` in `include/linux/net.h`).
const LISTENS: &str = "00010000";

/// The process that called listen() on the socket of a connection, as the kernel recorded it at
/// that time. Another process may answer.
#[derive(Debug)]
pub struct Peer {
    /// The process's number at that time; `None` if it is in another PID namespace.
    pub pid: Option<u32>,
    /// The process's effective user at that time.
    pub user: u32,
    /// The process itself; `ENOPROTOOPT` before Linux 6.5.
    pub pidfd: Result<OwnedFd, Errno>,
}

impl Peer {
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = getsockopt(stream, sockopt::PeerCredentials)?;
        Ok(Self {
            pid: u32::try_from(credentials.pid())
                .ok()
                .filter(|pid| *pid != 0),
            user: credentials.uid(),
            pidfd: getsockopt(stream, sockopt::PeerPidfd),
        })
    }
}

/// Returns the process that listens on a socket, without a connection to the socket. Returns `None`
/// if the process is in another namespace, if its socket has a relative name, or if this user may
/// not inspect the process.
pub fn owner(path: &Path) -> Option<u32> {
    let socket = listening_socket(path)?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.find(|pid| Process::open(*pid).is_ok_and(|process| has(&process, &socket)))
}

/// Returns whether a process has the socket that listens at `path`. Also returns false if the
/// process is in another network namespace.
pub fn listens(process: &Process, path: &Path) -> bool {
    listening_socket(path).is_some_and(|socket| has(process, &socket))
}

fn has(process: &Process, socket: &Path) -> bool {
    let descriptors = process.descriptors().unwrap_or_default();
    descriptors.iter().any(|(_, to)| to == socket)
}

/// Returns the kernel's name, as shown for descriptors, of the socket that listens at `path`.
fn listening_socket(path: &Path) -> Option<PathBuf> {
    let file = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let wanted = file(path)?;
    let sockets = fs::read("/proc/net/unix").ok()?;
    let inode = String::from_utf8_lossy(&sockets)
        .lines()
        .filter_map(listening)
        .find(|(_, name)| name.is_absolute() && file(name) == Some(wanted))
        .map(|(inode, _)| inode.to_owned())?;
    Some(PathBuf::from(format!("socket:[{inode}]")))
}

/// Returns the inode and the name in a line of /proc/net/unix if its socket listens.
fn listening(line: &str) -> Option<(&str, &Path)> {
    let mut fields = line.split_ascii_whitespace();
    if fields.nth(3)? != LISTENS {
        return None;
    }
    let inode = fields.nth(2)?;
    let (_, name) = line.split_once(&format!(" {inode} "))?;
    Some((inode, Path::new(name)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn the_listener_is_found_and_not_its_clients() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("a socket");
        assert_eq!(owner(&path), None);
        let listener = UnixListener::bind(&path).expect("free");
        let _client = UnixStream::connect(&path).expect("it listens");
        let (_accepted, _) = listener.accept().expect("a client");
        assert_eq!(owner(&path), Some(std::process::id()));
        let own = Process::open(std::process::id()).expect("it runs");
        assert!(listens(&own, &path));
        drop(listener);
        assert_eq!(owner(&path), None, "the accepted socket has its name");
        assert!(!listens(&own, &path));
    }

    #[test]
    fn lines_without_a_name_or_of_other_sockets_are_passed_over() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01 24161 /run/a b";
        assert_eq!(listening(line), Some(("24161", Path::new("/run/a b"))));
        for line in [
            "",
            "Num       RefCount Protocol Flags    Type St Inode Path",
            "0000000000000000: 00000002 00000000 00010000 0001 01 24161",
            "0000000000000000: 00000003 00000000 00000000 0001 03 24162 /run/a b",
        ] {
            assert_eq!(listening(line), None, "{line}");
        }
    }
}
