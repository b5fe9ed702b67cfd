// SPDX-License-Identifier: Apache-2.0
//! Identifies the process that an attacher stops and writes to. QEMU's own statements are not
//! enough: the process that answers on a socket could name the threads and addresses of any
//! process, and an attacher may have rights that the answering process lacks.
//!
//! | claim | proof |
//! |---|---|
//! | the process | the kernel's pidfd of the one that called listen(), or the number that the operator gave |
//! | the process speaks for the socket | its real, effective and saved user are the one that called listen(), or root called it |
//! | the vCPUs' threads | the threads in which the host's kernel shows that the vCPUs ran; if it cannot be read, threads of the process, with KVM also [`kvm::prove`] |
//! | the guest's RAM | writable mappings of the process ([`Process::mapping`]) |

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use serde_json::Value;

use crate::error::AttachError;
use crate::kvm;
use crate::monitor::{Monitor, unexpected};
use crate::process::Process;
use crate::qmp::{Peer, QmpError, listens};

/// The maximum number of times that QEMU is asked for its vCPUs while their number changes.
const ATTEMPTS: u32 = 10;
/// The maximum number of vCPUs. KVM supports no more on x86.
const MAX_VCPUS: usize = 4096;
/// The maximum number of threads that an error names.
const MAX_NAMED: usize = 16;

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

/// The threads of a guest's vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// The ids as QEMU names them; empty if no QEMU is asked.
    theirs: Vec<u32>,
    /// The thread that ran each vCPU last, as the host's kernel shows it; empty if the kernel
    /// cannot be read.
    kernels: Vec<Option<u32>>,
    /// The id of each vCPU's thread in this PID namespace.
    pub each: Vec<u32>,
}

impl Threads {
    /// Returns the threads without duplicates. One thread may run several vCPUs.
    #[must_use]
    pub fn distinct(&self) -> Vec<u32> {
        let distinct: BTreeSet<u32> = self.each.iter().copied().collect();
        distinct.into_iter().collect()
    }

    /// Returns whether these are still the threads of all vCPUs. Asks QEMU only if the host's
    /// kernel cannot be read.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn are_still_all(&self, monitor: &Monitor, patience: Duration) -> Result<bool, QmpError> {
        match monitor.host() {
            Some(host) => Ok(host.vcpus()? == self.kernels),
            None => Ok(monitor.connection().vcpu_threads(patience)? == self.theirs),
        }
    }
}

/// Returns the threads of the vCPUs. `known` are those of the last call.
///
/// # Errors
/// The process has no such threads, or the host does not show that they run the vCPUs.
pub fn vcpus(
    process: &Process,
    monitor: &Monitor,
    known: &Threads,
    patience: Duration,
) -> Result<Threads, AttachError> {
    let pid = process.pid();
    if let (true, Some(host)) = (monitor.is_host(), monitor.host()) {
        let each = host.vcpu_threads()?;
        // The host's kernel needs no proof, and gives the threads' ids in this namespace.
        if !each.iter().all(|id| process.has_thread(*id)) {
            return Err(AttachError::Refused(format!(
                "the vCPUs of process {pid} last ran in the threads {}, of which one has ended or belongs to another process",
                named(&each)
            )));
        }
        let kernels = each.iter().copied().map(Some).collect();
        let theirs = Vec::new();
        return Ok(Threads {
            theirs,
            kernels,
            each,
        });
    }
    let (theirs, kernels) = asked(monitor, patience)?;
    if theirs == known.theirs && kernels == known.kernels {
        return Ok(known.clone());
    }
    let each = process.threads(&theirs).ok_or_else(|| {
        AttachError::Refused(format!(
            "QEMU says that its vCPUs are the threads {}, but process {pid} has no such threads; give QEMU's process id with --pid",
            named(&theirs)
        ))
    })?;
    match monitor.host() {
        Some(_) => agree(pid, &each, &kernels).map_err(AttachError::Refused)?,
        None if monitor.uses_kvm() => kvm::prove(process, &each)?,
        None => {}
    }
    Ok(Threads {
        theirs,
        kernels,
        each,
    })
}

/// Returns the ids of the vCPUs' threads in an answer to `query-cpus-fast`.
///
/// # Errors
/// QEMU names no thread, or more than [`MAX_VCPUS`].
pub(crate) fn threads_in(answer: &Value) -> Result<Vec<u32>, QmpError> {
    let missing = || unexpected("query-cpus-fast", "thread-id");
    let vcpus = answer
        .as_array()
        .filter(|vcpus| !vcpus.is_empty())
        .ok_or_else(missing)?;
    if vcpus.len() > MAX_VCPUS {
        return Err(QmpError::Host(format!(
            "QEMU says that the guest has {} vCPUs, and no more than {MAX_VCPUS} are supported; check which process listens on its QMP socket",
            vcpus.len()
        )));
    }
    let id = |vcpu: &Value| u32::try_from(vcpu["thread-id"].as_u64()?).ok();
    let ids = vcpus.iter().map(|vcpu| id(vcpu).ok_or_else(missing));
    ids.collect()
}

/// Asks QEMU and the host's kernel for the vCPUs' threads, at a time at which no vCPU is added or
/// removed.
fn asked(
    monitor: &Monitor,
    patience: Duration,
) -> Result<(Vec<u32>, Vec<Option<u32>>), AttachError> {
    let kernels = || match monitor.host() {
        Some(host) => host.vcpus(),
        None => Ok(Vec::new()),
    };
    let mut before = kernels()?;
    let mut left = ATTEMPTS;
    loop {
        let theirs = monitor.connection().vcpu_threads(patience)?;
        let after = kernels()?;
        left -= 1;
        if before == after || left == 0 {
            return Ok((theirs, after));
        }
        before = after;
    }
}

/// Compares the threads that QEMU names, by their ids in this PID namespace, with those in which
/// the vCPUs ran last. QEMU may name the thread of a vCPU that has not run yet. A vCPU that was
/// unplugged stays in the kernel without a thread.
///
/// # Errors
/// They differ; the error is a sentence.
fn agree(pid: u32, theirs: &[u32], kernels: &[Option<u32>]) -> Result<(), String> {
    let distinct: BTreeSet<u32> = theirs.iter().copied().collect();
    let ran: BTreeSet<u32> = kernels.iter().copied().flatten().collect();
    let idle = kernels.iter().filter(|thread| thread.is_none()).count();
    let is_same = distinct.len() == theirs.len()
        && ran.is_subset(&distinct)
        && distinct.len() - ran.len() <= idle;
    is_same.then_some(()).ok_or_else(|| {
        let ran: Vec<u32> = ran.into_iter().collect();
        format!(
            "QEMU says that the vCPUs of process {pid} are the threads {}, but the host's kernel shows that they run in the threads {}, \
             and that {idle} vCPUs have no thread; give the process id of the guest's QEMU with --pid, and check which process listens on its QMP socket",
            named(theirs),
            named(&ran)
        )
    })
}

/// Returns the ids of threads for an error, which names only the first ones of a long list.
pub(crate) fn named(threads: &[u32]) -> String {
    match threads.split_at_checked(MAX_NAMED) {
        Some((first, rest)) if !rest.is_empty() => format!("{first:?} and {} more", rest.len()),
        _ => format!("{threads:?}"),
    }
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
    fn qemu_must_name_the_threads_that_the_kernel_shows() {
        let agree = |named: &[u32], kernels: &[Option<u32>]| agree(7, named, kernels);
        let two = [Some(11), Some(12)];
        for (named, kernels) in [
            (&[11, 12][..], &two[..]),
            (&[12, 11], &two),
            // A vCPU has not run yet, or was unplugged.
            (&[11, 12], &[Some(11), None]),
            (&[11, 12], &[None, None]),
            (&[11, 12], &[Some(11), None, Some(12)]),
        ] {
            assert_eq!(agree(named, kernels), Ok(()), "{named:?} {kernels:?}");
        }
        for (named, kernels) in [
            (&[11][..], &two[..]),
            (&[11, 13], &two),
            (&[11, 12, 13], &two),
            (&[11, 11], &[Some(11), None]),
            (&[11, 13], &[Some(11), Some(12), None]),
            (&[11, 12], &[]),
            (&[], &[Some(11)]),
        ] {
            agree(named, kernels).expect_err("they differ");
        }
        let error = agree(&[11, 13], &two).expect_err("they differ");
        let both = ["the threads [11, 13]", "the threads [11, 12]", "process 7"];
        assert!(both.iter().all(|part| error.contains(part)), "{error}");
    }

    #[test]
    fn the_number_of_vcpus_is_limited() {
        let answer =
            |count: usize| serde_json::json!(vec![serde_json::json!({ "thread-id": 5 }); count]);
        let most = threads_in(&answer(MAX_VCPUS)).expect("as many as are supported");
        assert_eq!(most, [5; MAX_VCPUS]);
        let error = threads_in(&answer(MAX_VCPUS + 1)).expect_err("too many");
        assert!(error.to_string().contains("has 4097 vCPUs"), "{error}");
        for nonsense in [answer(0), serde_json::json!({}), serde_json::json!([{}])] {
            threads_in(&nonsense).expect_err("no threads");
        }
    }

    #[test]
    fn an_error_names_only_some_threads_of_a_long_list() {
        let threads: Vec<u32> = (1..=5000).collect();
        let is_whole = |count: usize| !named(&threads[..count]).contains("more");
        assert!(is_whole(0) && is_whole(MAX_NAMED) && !is_whole(MAX_NAMED + 1));
        let error = agree(7, &threads, &[Some(5001)]).expect_err("they differ");
        let expected = "the threads [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16] and 4984 more, but";
        assert!(error.contains(expected), "{error}");
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
