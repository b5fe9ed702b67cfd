// SPDX-License-Identifier: Apache-2.0
//! Identifies the process that an attacher stops and writes to. QEMU's own statements are not
//! enough: the process that answers on a socket could name the threads and addresses of any
//! process, and an attacher may have rights that the answering process lacks.
//!
//! | claim | proof |
//! |---|---|
//! | the process | the kernel's pidfd of the one that called listen(), or the number that the operator gave |
//! | the process speaks for the socket | its real, effective and saved user are the one that called listen(), or root called it |
//! | the vCPUs' threads | threads of the process; with KVM also [`kvm::prove`] |
//! | the guest's RAM | writable mappings of the process ([`Process::mapping`]) |

use std::collections::BTreeSet;
use std::path::Path;

use nix::errno::Errno;

use crate::error::AttachError;
use crate::kvm;
use crate::monitor::Monitor;
use crate::process::Process;
use crate::qmp::{Peer, listens};

/// Finds the process that called listen() on the socket at `path`.
///
/// # Errors
/// The process has ended, or it is in another PID namespace.
pub fn listener(peer: Peer, path: &Path) -> Result<Process, AttachError> {
    let refused = |what: &str| {
        AttachError::Refused(format!(
            "the process that listens on {} {what}; give QEMU's process id with --pid",
            path.display()
        ))
    };
    match peer.pidfd {
        Ok(pidfd) => {
            Process::of(pidfd).map_err(|_| refused("has ended, or is in another PID namespace"))
        }
        // Linux before 6.5 records only the number, and another process may have taken that number
        // since. The start time of the process does not reveal this, because it may be earlier than
        // this connection. But a process that has taken the number does not have the socket.
        Err(Errno::ENOPROTOOPT) => {
            let number = peer
                .pid
                .ok_or_else(|| refused("is in another PID namespace"))?;
            let process = Process::open(number)?;
            match listens(&process, path) {
                true => Ok(process),
                false => Err(refused(&format!(
                    "was process {number}, which does not have the socket"
                ))),
            }
        }
        Err(_) => Err(refused("has ended")),
    }
}

/// Refuses a process if the listener could not have changed that process's memory itself.
///
/// # Errors
/// [`AttachError`].
pub fn same_user(process: &Process, listener: u32) -> Result<(), AttachError> {
    let users = process.users()?;
    if listener == 0 || users == [listener; 3] {
        return Ok(());
    }
    Err(AttachError::Refused(format!(
        "user {listener} listens on the QMP socket, but process {} has the real, effective and saved users {users:?}, so it is not the \
         process that answers; give the process id of the guest's QEMU with --pid",
        process.pid()
    )))
}

/// Translates the ids of the vCPUs' threads, as the monitor names them, to this PID namespace.
///
/// # Errors
/// The process has no such threads, or the host does not show that they run vCPUs.
pub fn vcpus(
    process: &Process,
    monitor: &Monitor,
    theirs: &[u32],
    kvm: bool,
) -> Result<Vec<u32>, AttachError> {
    if let Monitor::Host(_) = monitor {
        // The host's kernel needs no proof, and gives the threads' ids in this namespace.
        return match theirs.iter().all(|id| process.has_thread(*id)) {
            // One thread may run several vCPUs.
            true => Ok(theirs
                .iter()
                .copied()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect()),
            false => Err(AttachError::Refused(format!(
                "the vCPUs of process {} last ran in the threads {theirs:?}, of which one has ended or belongs to another process",
                process.pid()
            ))),
        };
    }
    let ours = process.threads(theirs).ok_or_else(|| {
        AttachError::Refused(format!(
            "QEMU says that its vCPUs are the threads {theirs:?}, but process {} has no such threads; give QEMU's process id with --pid",
            process.pid()
        ))
    })?;
    if kvm {
        kvm::prove(process, &ours)?;
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    fn peer(pidfd: Result<std::os::fd::OwnedFd, Errno>, pid: u32) -> Peer {
        Peer {
            pid: Some(pid),
            user: 0,
            pidfd,
        }
    }

    /// Simulates the information of Linux before 6.5.
    fn old(pid: u32) -> Peer {
        peer(Err(Errno::ENOPROTOOPT), pid)
    }

    #[test]
    fn a_number_that_another_process_has_by_now_is_not_the_listeners() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("qmp");
        let _listener = UnixListener::bind(&path).expect("free");
        let own = std::process::id();
        assert_eq!(listener(old(own), &path).expect("it listens").pid(), own);
        let other = Command::new("sleep").arg("1000").spawn();
        let mut other = other.expect("coreutils");
        let error = listener(old(other.id()), &path).expect_err("it does not listen");
        assert!(
            error.to_string().contains("does not have the socket"),
            "{error}"
        );
        other.kill().expect("it runs");
        other.wait().expect("it has ended");
        for ended in [peer(Err(Errno::EINVAL), own), peer(Err(Errno::ESRCH), own)] {
            let error = listener(ended, &path).expect_err("it has ended");
            assert!(error.to_string().contains("has ended"), "{error}");
        }
    }

    #[test]
    fn a_process_of_another_user_is_not_the_listener() {
        let process = Process::open(std::process::id()).expect("it runs");
        let user = rustix::process::getuid().as_raw();
        same_user(&process, user).expect("the same");
        same_user(&process, 0).expect("root may anything");
        let error = same_user(&process, 12345).expect_err("another one");
        assert!(error.to_string().contains("user 12345"), "{error}");
    }
}
