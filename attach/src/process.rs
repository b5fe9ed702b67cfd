// SPDX-License-Identifier: Apache-2.0
//! A monitor's process: its threads, mappings, descriptors and end.

mod mappings;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, DirEntry, File};
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[cfg(test)]
pub(crate) use mappings::READS;
pub use mappings::{Mapping, Mappings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{SocketType, sockopt};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
};

use crate::error::AttachError;
use crate::lock::Lock;
use crate::rights::Rights;

/// The maximum number of sockets that are read. Firecracker's vsock device alone has up to 1023.
const MAX_SOCKETS: usize = 4096;
/// The name of the descriptor of a userfaultfd (`new_userfaultfd()`, `fs/userfaultfd.c`).
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// A running process. All methods refer to this process, never to a later one with the same number.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
    /// The process's directory in /proc. It is opened once, so it never refers to another process.
    folder: OwnedFd,
}

impl Process {
    /// Opens the process with this number.
    ///
    /// # Errors
    /// No process has this number.
    pub fn open(pid: u32) -> Result<Self, AttachError> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = number
            .ok_or(io::ErrorKind::NotFound.into())
            .and_then(|number| Ok(pidfd_open(number, PidfdFlags::empty())?));
        pidfd
            .and_then(|pidfd| Self::with(pid, pidfd))
            .map_err(|error| AttachError::Process {
                what: format!("process {pid}"),
                error: error.to_string(),
                next: "give the process id of a running monitor".to_owned(),
            })
    }

    /// Returns the process of a pidfd.
    ///
    /// # Errors
    /// The process has ended, or it is in another PID namespace.
    pub fn of(pidfd: OwnedFd) -> io::Result<Self> {
        Self::with(number(&pidfd)?, pidfd)
    }

    fn with(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty())?;
        // A process keeps its number until it is reaped, so the directory that was opened above
        // belongs to it.
        if number(&pidfd)? != pid {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { pid, pidfd, folder })
    }

    /// Returns the process's number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns a path by which the calling process can open a file in this process's directory in
    /// /proc.
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.folder.as_raw_fd()))
    }

    /// Waits for the process to end. Returns false if it still runs after `patience`.
    #[must_use]
    pub fn has_ended_within(&self, patience: Duration) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let patience = Timespec::try_from(patience).ok();
        matches!(poll(&mut fds, patience.as_ref()), Ok(1..))
    }

    /// Kills the process. An attacher without CAP_KILL takes the ids of the process for this.
    ///
    /// # Errors
    /// This user may not kill the process.
    pub fn kill(&self) -> io::Result<()> {
        let kill = || match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            // ESRCH: the process has ended.
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(io::Error::from(error)),
        };
        let Err(error) = kill() else { return Ok(()) };
        let taken = self.rights().ok().map(|rights| rights.call(|| Ok(kill())));
        taken.and_then(Result::ok).unwrap_or(Err(error))
    }

    /// Makes the calling process the only attacher of this process until the lock is dropped.
    ///
    /// # Errors
    /// Another attacher holds the lock, or this user may not inspect the process.
    pub fn lock(&self) -> Result<Lock, AttachError> {
        Lock::take(self, self.open_proc("maps")?)
    }

    /// Opens a file in the process's directory in /proc for reading.
    fn open_proc(&self, name: &str) -> Result<File, AttachError> {
        File::open(self.path(name)).map_err(|error| self.cannot("opened", name, error))
    }

    fn cannot(&self, be: &str, name: &str, error: io::Error) -> AttachError {
        AttachError::process(format!("/proc/{}/{name} cannot be {be}", self.pid), error)
    }

    /// Opens the process's memory for reading and writing by address.
    ///
    /// # Errors
    /// This user may not trace the process.
    pub fn memory(&self) -> Result<File, AttachError> {
        let memory = File::options()
            .read(true)
            .write(true)
            .open(self.path("mem"));
        memory.map_err(|error| self.cannot("opened", "mem", error))
    }

    /// Returns the process's command line, as /proc shows it.
    ///
    /// # Errors
    /// The process has ended.
    pub fn command_line(&self) -> Result<Vec<u8>, AttachError> {
        let line = patchbay_host_kernel::read_file(&self.path("cmdline"));
        line.map_err(|error| self.cannot("read", "cmdline", error))
    }

    /// Returns the file name of the process's program; empty if it cannot be read.
    #[must_use]
    pub fn program(&self) -> String {
        let program = fs::read_link(self.path("exe")).unwrap_or_default();
        let name = program.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Returns the time at which the process started, in clock ticks since the boot of the host
    /// (`starttime` in proc_pid_stat(5)). The process's number and this time together identify the
    /// process.
    ///
    /// # Errors
    /// The process has ended.
    pub fn started(&self) -> Result<u64, AttachError> {
        let stat =
            fs::read(self.path("stat")).map_err(|error| self.cannot("read", "stat", error))?;
        let stat = String::from_utf8_lossy(&stat);
        // The name may contain any characters. The start is the twentieth field after it.
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields);
        let started = fields.and_then(|fields| fields.split_ascii_whitespace().nth(19));
        started
            .and_then(|started| started.parse().ok())
            .ok_or_else(|| self.cannot("read", "stat", io::ErrorKind::InvalidData.into()))
    }

    /// Opens the process that has this number and started at this time.
    ///
    /// # Errors
    /// No such process exists, or it has ended.
    pub fn open_started(pid: u32, started: u64) -> Result<Self, AttachError> {
        let process = Self::open(pid)?;
        if process.started()? != started {
            return Err(AttachError::Refused(format!(
                "process {pid} has ended, and another process has its number"
            )));
        }
        Ok(process)
    }

    /// Returns the process's working directory.
    ///
    /// # Errors
    /// This user may not inspect the process.
    pub fn working_folder(&self) -> Result<PathBuf, AttachError> {
        fs::read_link(self.path("cwd")).map_err(|error| self.cannot("read", "cwd", error))
    }

    /// Returns the process's real, effective and saved user ids.
    ///
    /// # Errors
    /// The process has ended.
    pub fn users(&self) -> Result<[u32; 3], AttachError> {
        self.users_in(&self.status()?)
    }

    fn status(&self) -> Result<String, AttachError> {
        let status = fs::read_to_string(self.path("status"));
        status.map_err(|error| self.cannot("read", "status", error))
    }

    /// Returns the user ids in the text of `status`.
    fn users_in(&self, status: &str) -> Result<[u32; 3], AttachError> {
        let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        let mut ids = ids.unwrap_or_default().split_ascii_whitespace();
        let mut next = || ids.next()?.parse().ok();
        let users = (|| Some([next()?, next()?, next()?]))();
        users.ok_or_else(|| self.cannot("read", "status", io::ErrorKind::InvalidData.into()))
    }

    /// Returns the rights with which the process acts.
    ///
    /// # Errors
    /// The process has ended, or it has several users, as a set-user-ID program has.
    pub fn rights(&self) -> Result<Rights, AttachError> {
        let status = self.status()?;
        let users = self.users_in(&status)?;
        if users != [users[0]; 3] {
            return Err(AttachError::Refused(format!(
                "process {} has the real, effective and saved users {users:?}",
                self.pid
            )));
        }
        // Capabilities in another user namespace give no rights over the host's files.
        let namespace = fs::read_link(self.path("ns/user"));
        let namespace = namespace.map_err(|error| self.cannot("read", "ns/user", error))?;
        let is_own = fs::read_link("/proc/self/ns/user").is_ok_and(|own| own == namespace);
        Rights::parse(users[0], &status, is_own)
            .ok_or_else(|| self.cannot("read", "status", io::ErrorKind::InvalidData.into()))
    }

    /// Opens the process's root folder, or its working folder, from which it resolves paths.
    ///
    /// # Errors
    /// This user may not inspect the process.
    pub fn folder_of_paths(&self, absolute: bool) -> Result<OwnedFd, AttachError> {
        let name = if absolute { "root" } else { "cwd" };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(self.path(name), flags, Mode::empty())
            .map_err(|error| self.cannot("opened", name, error.into()))
    }

    /// Returns the paths at which the process listens on Unix stream sockets, as it named them. The
    /// kernel's own record of each socket is read through a duplicate of the descriptor, so no
    /// other process can add a path.
    ///
    /// # Errors
    /// This user may not inspect or trace the process, or it has too many sockets.
    pub fn listeners(&self) -> Result<BTreeSet<PathBuf>, AttachError> {
        let mut sockets = BTreeMap::new();
        for (number, name) in self.descriptors()? {
            let is_socket = name.as_os_str().as_bytes().starts_with(b"socket:[");
            if let (true, Ok(number)) = (is_socket, u32::try_from(number)) {
                sockets.insert(name, number);
            }
        }
        if sockets.len() > MAX_SOCKETS {
            return Err(AttachError::Refused(format!(
                "process {} has {} sockets; no more than {MAX_SOCKETS} are read",
                self.pid,
                sockets.len()
            )));
        }
        let mut paths = BTreeSet::new();
        for number in sockets.into_values() {
            // The process may have closed a connection meanwhile.
            let socket = match self.duplicate(number) {
                Ok(socket) => socket,
                Err(_) if !self.path(&format!("fd/{number}")).is_symlink() => continue,
                Err(error) => return Err(error),
            };
            let is_stream = sockopt::socket_type(&socket) == Ok(SocketType::STREAM);
            if !is_stream || sockopt::socket_acceptconn(&socket) != Ok(true) {
                continue;
            }
            // The address of another family is an error.
            if let Ok(address) = UnixListener::from(socket).local_addr() {
                paths.extend(address.as_pathname().map(Path::to_owned));
            }
        }
        Ok(paths)
    }

    /// Returns the ids in this PID namespace of the threads whose ids in the process's own PID
    /// namespace are `ids`; `None` if one of them is missing.
    #[must_use]
    pub fn threads(&self, ids: &[u32]) -> Option<Vec<u32>> {
        let mut by_own_id = HashMap::new();
        for entry in fs::read_dir(self.path("task")).ok()?.flatten() {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let own = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            // The innermost namespace comes last.
            let own = own.and_then(|ids| ids.split_ascii_whitespace().last());
            by_own_id.insert(own.and_then(|own| own.parse().ok()).unwrap_or(id), id);
        }
        ids.iter().map(|id| by_own_id.get(id).copied()).collect()
    }

    /// Returns the addresses at which the process has mapped the run pages of its vCPUs, in the
    /// order of the vCPUs' numbers. Firecracker maps each page twice; one of the two addresses is
    /// returned.
    ///
    /// # Errors
    /// This user may not inspect the process.
    pub fn run_pages(&self) -> Result<Vec<u64>, AttachError> {
        let mut pages = BTreeMap::new();
        for line in BufReader::new(self.open_proc("maps")?).split(b'\n') {
            let line = line.map_err(|error| self.cannot("read", "maps", error))?;
            let mapping = Mapping::parse(&String::from_utf8_lossy(&line));
            if let Some((number, address)) = mapping.and_then(|mapping| mapping.run_page()) {
                pages.entry(number).or_insert(address);
            }
        }
        Ok(pages.into_values().collect())
    }

    /// Returns whether the thread with this id, in this PID namespace, belongs to the process.
    #[must_use]
    pub fn has_thread(&self, id: u32) -> bool {
        self.path(&format!("task/{id}")).is_dir()
    }

    /// Returns the process's open descriptors, each with the kernel's name for its target.
    ///
    /// # Errors
    /// This user may not inspect the process.
    pub fn descriptors(&self) -> Result<Vec<(i32, PathBuf)>, AttachError> {
        let entries =
            fs::read_dir(self.path("fd")).map_err(|error| self.cannot("read", "fd", error))?;
        let descriptor = |entry: DirEntry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some((number, fs::read_link(entry.path()).ok()?))
        };
        Ok(entries.flatten().filter_map(descriptor).collect())
    }

    /// Returns whether the process has a userfaultfd open.
    ///
    /// # Errors
    /// This user may not inspect the process.
    pub fn has_userfaultfd(&self) -> Result<bool, AttachError> {
        let mut descriptors = self.descriptors()?.into_iter();
        Ok(descriptors.any(|(_, name)| name.as_os_str() == USERFAULTFD))
    }

    /// Duplicates a descriptor of the process.
    ///
    /// # Errors
    /// The descriptor is closed, or this user may not trace the process.
    pub fn duplicate(&self, descriptor: u32) -> Result<OwnedFd, AttachError> {
        let number = i32::try_from(descriptor).unwrap_or(-1);
        pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()).map_err(|error| {
            let what = format!(
                "descriptor {descriptor} of process {} cannot be duplicated",
                self.pid
            );
            AttachError::process(what, error)
        })
    }

    /// Returns the mappings of the process at these addresses, from one read of its list.
    ///
    /// # Errors
    /// This user may not inspect the process, or the list was not read before the deadline.
    pub fn mappings(
        &self,
        addresses: Vec<u64>,
        deadline: Instant,
    ) -> Result<Mappings, AttachError> {
        let lines = BufReader::new(self.open_proc("maps")?);
        Mappings::read(self.pid, lines, addresses, deadline)
            .map_err(|error| self.cannot("read", "maps", error))
    }

    /// Opens the file behind a shared mapping through a writable descriptor of the process; `None`
    /// if the process has no such descriptor. This is also the case on btrfs and overlayfs, where a
    /// mapping names another device than a descriptor does.
    #[must_use]
    pub fn file_of(&self, mapping: &Mapping) -> Option<File> {
        let entries = fs::read_dir(self.path("fd")).ok()?.flatten();
        let mut descriptors = entries.filter(|entry| mapping.is_of_path(&entry.path()));
        descriptors.find_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let file = match pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty()) {
                Ok(file) => File::from(file),
                // Opening may be allowed where taking the descriptor is not, because yama restricts
                // only the latter.
                Err(Errno::PERM | Errno::NOSYS) => self.reopen(number, mapping)?,
                Err(_) => return None,
            };
            let flags = fcntl_getfl(&file).ok()?;
            // pwrite() to a descriptor with O_APPEND writes at the end.
            let writes_anywhere =
                flags & OFlags::ACCMODE == OFlags::RDWR && !flags.contains(OFlags::APPEND);
            let is_it = file.metadata().is_ok_and(|found| mapping.is_of(&found));
            (writes_anywhere && is_it).then_some(file)
        })
    }

    /// Opens the file of a descriptor that is open for reading and writing.
    fn reopen(&self, number: i32, mapping: &Mapping) -> Option<File> {
        let information = fs::read_to_string(self.path(&format!("fdinfo/{number}"))).ok()?;
        let flags = field(&information, "flags:")?;
        let flags = OFlags::from_bits_retain(u32::from_str_radix(flags, 8).ok()?);
        if flags & OFlags::ACCMODE != OFlags::RDWR {
            return None;
        }
        // The file is identified before it is opened for writing, because opening may have side
        // effects.
        let place = self.path(&format!("fd/{number}"));
        let place = rustix::fs::open(place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let place = File::from(place.ok()?);
        place.metadata().ok().filter(|found| mapping.is_of(found))?;
        let path = format!("/proc/self/fd/{}", place.as_raw_fd());
        File::options().read(true).write(true).open(path).ok()
    }
}

/// Returns the number of a pidfd's process (`pidfd_show_fdinfo()`, `kernel/fork.c`).
fn number(pidfd: &OwnedFd) -> io::Result<u32> {
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    // -1: the process has been reaped. 0: the process is in another PID namespace.
    let number = field(&information, "Pid:").and_then(|number| number.parse().ok());
    let number = number.filter(|number| *number != 0);
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Returns the rest of the line that begins with `name`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let found = text.lines().find_map(|line| line.strip_prefix(name));
    found.map(str::trim)
}
