// SPDX-License-Identifier: Apache-2.0
//! Recovers the guest if the attacher dies while the guest is stopped. QEMU does not record which
//! client stopped a guest, so a small process shares the connection and sends `cont`. A partial
//! change would crash the guest, so the same process rolls it back.
//!
//! ```text
//!   attacher ── what will be written, "stops", "writes", "runs" ──▶ pipe ──▶ watchdog ──▶ /proc/PID/mem of QEMU
//!      └─────────────────────── QMP connection, shared ───────────────────────┘
//! ```
//!
//! The kernel closes the pipe when the attacher ends. Messages that were written before stay in the
//! pipe or, during a stop, in a file ([`tail`]), so the watchdog knows of each stop that QEMU may
//! have received. The watchdog has its own
//! process group and ignores the signals that end a terminal's or a service's processes. Only
//! SIGKILL of both processes leaves a guest stopped or a change partial, or a rollback that hangs
//! for a minute in an access to the guest's memory ([`crate::freeze`]). The watchdog continues a
//! guest only if it is stopped here and the attacher stopped it ([`crate::resume`]).
//!
//! A watchdog that knows the attacher's ledger leaves a
//! [`Mark`](patchbay_service::keys::claims::Mark) beside the ledger. The mark tells the next
//! attacher whether the pending change was made.
//!
//! Threads that ptrace has stopped resume when the attacher dies. The watchdog stops them again for
//! the rollback, some milliseconds later.

mod tail;
mod words;

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use rustix::fs::{FileType, fstat};
use rustix::io::{FdFlags, fcntl_setfd};
use serde_json::Value;

use crate::freeze::{FreezeError, Frozen, Point, freeze};
use crate::host;
use crate::libvirt::Domain;
use crate::monitor::Migration;
use crate::process::Process;
use crate::qmp::QmpError;
use crate::resume::resume;
use crate::rollback::{Change, Outcome, Settled, count, roll_back};
use crate::terminal::say;
use crate::wire::Wire;
use tail::{Messages, Tail};
use words::{
    FORGET, LEDGER, MADE, PENDING, RESUMED, RUNS, STOPS, UNDONE, WILL_WRITE, WRITES, Words,
    last_words, optional,
};

/// The argument that runs the program as a watchdog. The number and the start of QEMU's process
/// and the descriptor of the file with the messages of a stop follow, and for a domain also
/// libvirt's URI and the domain's name.
pub const ARGUMENT: &str = "watchdog";
/// The program of this process, which is the same one after its file was replaced. So an attacher
/// that started before an upgrade does not speak to a watchdog of another version.
pub const OWN_PROGRAM: &str = "/proc/self/exe";
/// The name of the watchdog's process, which the kernel would otherwise take from [`OWN_PROGRAM`].
const NAME: &CStr = c"patchbay-attach";
/// Time allowed for QEMU's answer, and for the end of a cancelled migration.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time allowed for QEMU's answer while the vCPUs are frozen.
const LOOK: Duration = Duration::from_secs(2);
/// Time allowed for the stop of the vCPUs. The dead attacher still traces their threads until the
/// kernel has released them.
const FREEZE: Duration = Duration::from_secs(10);
/// Time allowed for the guest to finish a change of its own.
const OPEN: Duration = Duration::from_secs(10);
/// Time that the guest runs between two looks at its gates.
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// The maximum of this time if the guest is stopped by QMP. It doubles with each look.
const BETWEEN_STOPS: Duration = Duration::from_millis(128);
/// Maximum number of keys that a message names.
const NAMED: usize = 10;
/// The watchdog's connection to QEMU's monitor.
#[derive(Debug)]
pub enum Way<'a> {
    /// The attacher's connection.
    Connection(OwnedFd),
    /// A separate `virsh`.
    Libvirt {
        /// libvirt's URI.
        uri: &'a str,
        /// Name of the domain.
        domain: &'a str,
    },
    /// There is no monitor to ask. The attacher stops the guest only by ptrace.
    Nobody,
}

/// The attacher's handle to its watchdog.
#[derive(Debug)]
pub struct Watchdog {
    child: Child,
    pipe: Option<ChildStdin>,
    tail: Tail,
    /// The watchdog has been told what will be written.
    knows_writes: bool,
    /// The writes have begun, and may be incomplete.
    writing: bool,
}

impl Watchdog {
    /// Starts the watchdog of a QEMU, given by its process's number and start: `program` with
    /// [`ARGUMENT`]. It keeps a [`Way::Connection`] open, so no other client can use it meanwhile,
    /// and it keeps `locks`, so that no other attacher changes what it rolls back.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start<'a>(
        program: &Path,
        (qemu, started): (u32, u64),
        way: Way<'_>,
        locks: impl Iterator<Item = &'a File>,
    ) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg0(OsStr::from_bytes(NAME.to_bytes()));
        let tail = Tail::new()?;
        // The parent closes these copies after the start.
        let mut inherited: Vec<File> = locks.map(File::try_clone).collect::<io::Result<_>>()?;
        let tails = tail.file().try_clone()?;
        command.args([ARGUMENT, &qemu.to_string(), &started.to_string()]);
        command.arg(tails.as_raw_fd().to_string());
        inherited.push(tails);
        for file in &inherited {
            fcntl_setfd(file, FdFlags::empty())?;
        }
        match way {
            Way::Connection(connection) => command.stdout(connection),
            Way::Libvirt { uri, domain } => command.args([uri, domain]).stdout(Stdio::null()),
            Way::Nobody => command.stdout(Stdio::null()),
        };
        let mut child = command.stdin(Stdio::piped()).process_group(0).spawn()?;
        drop(inherited);
        let mut started = Self {
            pipe: child.stdin.take(),
            tail,
            child,
            knows_writes: false,
            writing: false,
        };
        // The child already has the pipe, even if it does not read it yet.
        started.say(&[RUNS])?;
        Ok(started)
    }

    /// Tells the watchdog that the guest is about to be stopped: by ptrace of these threads, or by
    /// QMP if there are none.
    ///
    /// # Errors
    /// The watchdog has ended. The guest must not be stopped.
    pub fn arm(&mut self, threads: &[u32], point: Point) -> io::Result<()> {
        self.check_lives()?;
        let mut words = vec![STOPS, u8::from(point == Point::Any)];
        words.extend(count(threads.len())?);
        words.extend(threads.iter().flat_map(|thread| thread.to_le_bytes()));
        self.leave(&words)
    }

    fn check_lives(&mut self) -> io::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(io::Error::other(format!(
                "the watchdog has ended ({status})"
            ))),
        }
    }

    /// Tells the watchdog what will be written once the guest is stopped, and the digest of the
    /// ledger that has the change as pending. This replaces an earlier change.
    ///
    /// # Errors
    /// The watchdog has ended. Nothing must be written.
    pub fn will_write(&mut self, change: &Change, ledger: Option<&[u8; 32]>) -> io::Result<()> {
        self.say(&[&[WILL_WRITE][..], &optional(ledger), &change.bytes()?].concat())?;
        self.knows_writes = true;
        self.writing = false;
        Ok(())
    }

    /// Tells the watchdog that the writes begin.
    ///
    /// # Errors
    /// The watchdog has ended, or does not know what will be written. Nothing must be written.
    pub fn begin_writes(&mut self) -> io::Result<()> {
        if !self.knows_writes {
            return Err(io::Error::other("the watchdog was not told of the change"));
        }
        self.check_lives()?;
        self.leave(&[WRITES])?;
        self.writing = true;
        Ok(())
    }

    /// Ends this process if a panic has interrupted the writes, because only the watchdog can roll
    /// them back. The caller is about to resume the guest, whose change may be partial.
    pub fn abort_in_panic(&self) {
        if self.writing && std::thread::panicking() {
            std::process::abort();
        }
    }

    /// Tells the watchdog that the change was made, so that nothing is rolled back any more.
    pub fn made(&mut self) {
        self.writing = false;
        let _ = self.leave(&[MADE]);
    }

    /// Tells the watchdog that the writes were undone.
    pub fn undone(&mut self) {
        let _ = self.leave(&[UNDONE]);
    }

    /// Tells the watchdog which ledger the attacher keeps.
    ///
    /// # Errors
    /// The watchdog has ended.
    pub fn keeps_ledger(&mut self, path: &Path) -> io::Result<()> {
        let path = path.as_os_str().as_bytes();
        self.say(&[&[LEDGER][..], &count(path.len())?, path].concat())
    }

    /// Tells the watchdog the digest of the ledger that is about to be written, which has a change
    /// as pending, and the digest of the ledger that it replaces, if that one has one too. The
    /// watchdog keeps the fates of both changes.
    pub fn will_keep(&mut self, digest: &[u8; 32], replaced: Option<&[u8; 32]>) {
        // A dead watchdog is detected before the guest is stopped for the change.
        let _ = self.say(&[&[PENDING][..], digest, &optional(replaced)].concat());
    }

    /// Tells the watchdog that the pending change of the ledger with this digest is made while the
    /// guest runs. The watchdog leaves no mark of it.
    pub fn forget(&mut self, ledger: &[u8; 32]) {
        // A watchdog that is dead leaves no mark either.
        let _ = self.say(&[&[FORGET][..], ledger].concat());
    }

    /// Tells the watchdog that another client has ended the stop by QMP.
    pub fn was_resumed(&mut self) {
        let _ = self.say(&[RESUMED]);
    }

    /// Tells the watchdog that its work is done: no partial change is left, and the guest runs or
    /// another client has to resume it.
    pub fn disarm(&mut self) {
        self.knows_writes = false;
        self.writing = false;
        // The next stop detects a dead watchdog.
        let _ = self.say(&[RUNS]);
    }

    /// Leaves words that the watchdog reads after this process's end, or with the next words that
    /// are said.
    fn leave(&mut self, words: &[u8]) -> io::Result<()> {
        match self.tail.has_room(words) {
            true => self.tail.add(words),
            false => self.say(words),
        }
    }

    fn say(&mut self, words: &[u8]) -> io::Result<()> {
        match &mut self.pipe {
            Some(pipe) => self.tail.send(pipe, words),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.pipe = None;
        // The watchdog releases the connection when it ends.
        let _ = self.child.wait();
    }
}

/// Runs the watchdog. Its standard input is the pipe from the attacher, and `tail` is the
/// descriptor of the file with the messages of a stop. Its standard output is the connection to
/// QEMU, if the attacher has one. It has inherited the attacher's locks in other descriptors. With
/// neither a connection nor a libvirt domain, no monitor can be asked.
///
/// # Errors
/// The guest may be left stopped, or with a partial change.
pub fn run(
    (qemu, started): (u32, u64),
    tail: RawFd,
    libvirt: Option<(&str, &str)>,
) -> io::Result<()> {
    let _ = rustix::thread::set_name(NAME);
    let tail = File::open(format!("/proc/self/fd/{tail}"))?;
    // Blocked signals stay pending; the watchdog ends with the attacher.
    let mut ignored = SigSet::empty();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGHUP,
    ] {
        ignored.add(signal);
    }
    ignored.thread_block()?;
    // An error does not matter yet, because a guest with shared memory can be attached to without
    // the right to open the memory of QEMU.
    let process = Process::open_started(qemu, started).map_err(io::Error::other);
    let monitor = match libvirt {
        Some((uri, domain)) => Asked::Libvirt(Domain::of(uri, domain)),
        None => {
            let output = io::stdout().as_fd().try_clone_to_owned()?;
            let is_socket = FileType::from_raw_mode(fstat(&output)?.st_mode) == FileType::Socket;
            match is_socket {
                true => Asked::Connection(Wire::new(UnixStream::from(output))),
                false => Asked::Nobody,
            }
        }
    };
    let pipe = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut left = last_words(Messages::new(pipe, tail));
    let rolled_back = match left.writes.take() {
        Some(change) if left.writing => match &process {
            Ok(qemu) => {
                let memory = qemu.memory().map_err(io::Error::other);
                put_right(&change, &mut left, Some(qemu), memory, &monitor)
            }
            Err(error) => Err(io::Error::other(error.to_string())),
        },
        _ => Ok(()),
    };
    let resumed = match left.stopped && left.threads.is_empty() {
        true => monitor.resume(left.resumed),
        false => Ok(()),
    };
    if let Err(error) = left.leave_mark() {
        say(format_args!(
            "the fate of the attacher's last change cannot be written ({error}), so the guest's counts tell the next attacher"
        ));
    }
    match (rolled_back, resumed) {
        (Err(first), Err(second)) => Err(io::Error::other(format!("{first}; {second}"))),
        (rolled_back, resumed) => rolled_back.and(resumed),
    }
}

/// QEMU's monitor.
enum Asked {
    Connection(Wire),
    Libvirt(Domain),
    /// The attacher asked no monitor.
    Nobody,
}

impl Asked {
    fn execute(&self, command: &str, patience: Duration) -> Result<Value, QmpError> {
        match self {
            Self::Connection(wire) => wire.execute(command, patience),
            Self::Libvirt(domain) => domain.execute(command, Value::Null, patience),
            Self::Nobody => Err(host::not_asked(command)),
        }
    }

    /// Cancels a migration that is in progress. The migration began after the attacher's last
    /// check, so it may have copied a part of a change. Returns the status of the last migration.
    fn cancel_migration(&self) -> Result<Migration, QmpError> {
        let migration = Migration::new(self.execute("query-migrate", LOOK)?);
        if migration.can_be_cancelled() {
            self.execute("migrate_cancel", LOOK)?;
            return Ok(Migration::new(self.execute("query-migrate", LOOK)?));
        }
        Ok(migration)
    }

    /// Returns whether the guest runs. If QEMU does not answer, the guest is assumed to be stopped,
    /// unless it is known to have been resumed.
    fn runs(&self, resumed: bool) -> io::Result<bool> {
        match self.execute("query-status", LOOK) {
            Ok(status) => Ok(status["status"] == "running"),
            Err(error) if resumed => Err(io::Error::other(error)),
            Err(_) => Ok(false),
        }
    }

    /// Forgets that the guest was resumed, because it is being stopped.
    fn forget_resume(&self) {
        if let Self::Connection(wire) = self {
            wire.forget_resume();
        }
    }

    /// Ends the attacher's stop by QMP.
    fn resume(&self, resumed: bool) -> io::Result<()> {
        let was_resumed = || match self {
            Self::Connection(wire) => wire.was_resumed(),
            Self::Libvirt(_) | Self::Nobody => false,
        };
        let execute = |command: &str| self.execute(command, PATIENCE);
        let is_ours = || !resumed && !was_resumed();
        let resumed = resume(execute, (is_ours, is_ours), Instant::now() + PATIENCE)
            .map_err(io::Error::other)?;
        match resumed.complaint() {
            Some(complaint) => Err(io::Error::other(complaint)),
            None => Ok(()),
        }
    }
}

/// Stops the guest if it runs, and rolls the change back. A guest that was changing its own keys
/// when it was stopped runs for a moment and is stopped again. A migration that began during the
/// change is cancelled, because QEMU's dirty log records neither the change nor its undo.
fn put_right(
    change: &Change,
    left: &mut Words,
    qemu: Option<&Process>,
    memory: io::Result<File>,
    monitor: &Asked,
) -> io::Result<()> {
    let mut frozen = std::thread::scope(|scope| {
        // A migration that only waits for the vCPUs completes when they run, unless QEMU receives
        // its cancellation first.
        scope.spawn(|| monitor.cancel_migration());
        (!left.threads.is_empty()).then(|| freeze_again(left, qemu))
    })
    .transpose()?;
    if frozen.is_none() {
        stop_again(left, monitor)?;
    }
    let memory = memory?;
    let end = Instant::now() + OPEN;
    let mut between = BETWEEN_LOOKS;
    let outcome = loop {
        let outcome = roll_back(change, &memory);
        let busy = matches!(outcome, Ok(Outcome::Busy));
        if !busy || Instant::now() >= end {
            break outcome;
        }
        let by_ptrace = frozen.take().is_some();
        if !by_ptrace {
            if monitor.resume(left.resumed).is_err() {
                break outcome;
            }
            left.resumed = true;
        }
        // No event reports the release of a mutex, so the gates are polled.
        std::thread::sleep(between);
        if !by_ptrace {
            // A stop by QMP flushes the guest's disks.
            between = (between * 2).min(BETWEEN_STOPS);
        }
        match by_ptrace {
            true => frozen = Some(freeze_again(left, qemu)?),
            false => stop_again(left, monitor)?,
        }
    };
    // The migration is cancelled before the vCPUs run, because it cannot complete without them.
    let migration = monitor.cancel_migration();
    drop(frozen);
    complain(&migration);
    match outcome? {
        Outcome::Settled(settled) => {
            left.settle(change, &settled);
            report(change, &settled)
        }
        Outcome::Busy => Err(io::Error::other(format!(
            "the attacher died during a change of {}, which was not rolled back, because the guest's kernel has been changing its own \
             keys or text since; the keys may be inconsistent: restart the guest",
            names(change, 0..)
        ))),
    }
}

fn report(change: &Change, settled: &Settled) -> io::Result<()> {
    if settled.rolled_back {
        say("the attacher died during a change, which was rolled back");
    }
    if !settled.moved.is_empty() {
        say(format_args!(
            "the guest has changed {} since the attacher's end; a reference of the attacher may be left: turn them off in the guest if they \
             should be",
            names(change, settled.moved.iter().copied())
        ));
    }
    if settled.inconsistent.is_empty() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "the attacher died during a change; {} may be inconsistent, since the guest has changed them: restart the guest",
        names(change, settled.inconsistent.iter().copied())
    )))
}

/// Returns the names of keys given by index.
fn names(change: &Change, keys: impl IntoIterator<Item = u32>) -> String {
    let all = keys.into_iter().take(change.keys.len());
    let names: Vec<&str> = all
        .filter_map(|key| change.keys.get(key as usize).map(String::as_str))
        .collect();
    let more = names.len().saturating_sub(NAMED);
    let named = names[..names.len() - more].join(", ");
    match more {
        0 => named,
        _ => format!("{named} and {more} more"),
    }
}

fn complain(migration: &Result<Migration, QmpError>) {
    match migration {
        Ok(migration) if migration.is_cancelled() => say(format_args!(
            "the attacher died during a change; a migration that may have copied a part of the change was cancelled: start the migration again"
        )),
        Ok(migration) if migration.is_under_way() => say(format_args!(
            "the attacher died during a change; a migration that may have copied a part of the change is {:?} and was not cancelled: do not run the \
             guest at the destination",
            migration.status()
        )),
        Ok(_) => {}
        Err(error) => say(format_args!(
            "the attacher died during a change, and the monitor does not say whether a migration has copied a part of the change ({error}): restart a guest \
             that was migrated meanwhile"
        )),
    }
}

/// Stops a guest by QMP if it runs.
fn stop_again(left: &mut Words, monitor: &Asked) -> io::Result<()> {
    if monitor.runs(left.resumed).map_err(not_stopped)? {
        // QEMU carries out a command that was sent, so the stop is the watchdog's own even if its
        // answer is late.
        left.resumed = false;
        monitor.forget_resume();
        monitor.execute("stop", LOOK).map_err(not_stopped)?;
    }
    Ok(())
}

fn not_stopped(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!(
        "the guest's keys may be inconsistent, since its vCPUs could not be stopped for a rollback: {error}"
    ))
}

/// Stops the threads that the attacher had stopped before it ended.
fn freeze_again(left: &Words, qemu: Option<&Process>) -> io::Result<Frozen> {
    let point = match left.anywhere {
        true => Point::Any,
        false => Point::Unlocked,
    };
    let deadline = Instant::now() + FREEZE;
    loop {
        match freeze(&left.threads, point, deadline) {
            // A stopped thread keeps its id, so threads that belong to QEMU now belonged to it when
            // they were stopped.
            Ok(frozen) => {
                let is_its = |thread: &u32| qemu.is_some_and(|qemu| qemu.has_thread(*thread));
                return match left.threads.iter().all(is_its) {
                    true => Ok(frozen),
                    false => Err(not_stopped(FreezeError::Gone)),
                };
            }
            // The kernel closes the dead attacher's pipe before it releases the traced threads.
            Err(FreezeError::Denied { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_micros(100));
            }
            Err(error) => return Err(not_stopped(error)),
        }
    }
}

#[cfg(test)]
mod tests;
