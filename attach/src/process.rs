// SPDX-License-Identifier: Apache-2.0
//! The process of a monitor: its threads, its mappings, its end.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::AttachError;

/// A running process. Its number is not used again as long as this object finds it alive.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process with this number.
    ///
    /// # Errors
    /// No such process runs.
    pub fn open(pid: u32) -> Result<Self, AttachError> {
        let gone = |error: io::Error| AttachError::Process {
            what: format!("process {pid}"),
            error: error.to_string(),
            next: "give the process id of a running QEMU".to_owned(),
        };
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| gone(io::ErrorKind::NotFound.into()))?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|error| gone(error.into()))?;
        Ok(Self { pid, pidfd })
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A file in its folder of /proc.
    #[must_use]
    pub fn proc(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }

    /// Waits for its end; false if it lives on after `patience`.
    #[must_use]
    pub fn has_ended_within(&self, patience: Duration) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let patience = Timespec::try_from(patience).ok();
        matches!(poll(&mut fds, patience.as_ref()), Ok(1..))
    }

    /// Makes this process the only attacher of that one, for as long as the answer lives. The kernel ends it with its holder.
    ///
    /// # Errors
    /// Another attacher has it, or this user may not look into the process.
    pub fn lock(&self) -> Result<File, AttachError> {
        let maps = self.open_proc("maps")?;
        flock(&maps, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let holder = lock_holder(&maps).map_or(String::new(), |pid| format!(" {pid}"));
            AttachError::Refused(format!(
                "another process{holder} is attached to the guest of process {}; use its API socket, or end it first",
                self.pid
            ))
        })?;
        Ok(maps)
    }

    /// Opens a file in its folder of /proc for reading.
    ///
    /// # Errors
    /// The process may not be looked into.
    pub fn open_proc(&self, name: &str) -> Result<File, AttachError> {
        let path = self.proc(name);
        File::open(&path).map_err(|error| {
            AttachError::process(format!("{} cannot be opened", path.display()), error)
        })
    }

    /// Its threads whose ids in its own PID namespace are `ids`, by their ids here; `None` if one of them is missing.
    #[must_use]
    pub fn threads(&self, ids: &[u32]) -> Option<Vec<u32>> {
        let mut by_own_id = HashMap::new();
        for entry in fs::read_dir(self.proc("task")).ok()?.flatten() {
            let id: u32 = entry.file_name().to_str()?.parse().ok()?;
            let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let own = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            // The innermost namespace comes last.
            let own = own.and_then(|ids| ids.split_ascii_whitespace().last());
            by_own_id.insert(own.and_then(|own| own.parse().ok()).unwrap_or(id), id);
        }
        ids.iter().map(|id| by_own_id.get(id).copied()).collect()
    }

    /// The mapping that an address lies in.
    ///
    /// # Errors
    /// Nothing is mapped there, or the process may not be looked into.
    pub fn mapping(&self, address: u64) -> Result<Mapping, AttachError> {
        let path = self.proc("maps");
        let text = fs::read_to_string(&path).map_err(|error| {
            AttachError::process(format!("{} cannot be read", path.display()), error)
        })?;
        text.lines()
            .filter_map(Mapping::parse)
            .find(|mapping| mapping.start <= address && address < mapping.end)
            .ok_or_else(|| {
                AttachError::Refused(format!(
                    "process {} has nothing mapped at {address:#x}: it is not the guest's monitor",
                    self.pid
                ))
            })
    }

    /// The file that a shared mapping is of, writable: as the kernel maps it, which needs CAP_CHECKPOINT_RESTORE, else by its path,
    /// else among the process's descriptors. `None`: none is found. On overlayfs a mapping names another file than its path does.
    #[must_use]
    pub fn file_of(&self, mapping: &Mapping) -> Option<File> {
        let writable = |path: &Path| File::options().read(true).write(true).open(path).ok();
        let mapped = self.proc(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end));
        if let Some(file) = writable(&mapped) {
            return Some(file);
        }
        let is_it = |path: &Path| {
            let metadata = fs::metadata(path).ok()?;
            ((metadata.dev(), metadata.ino()) == (mapping.device, mapping.inode)).then_some(())
        };
        let open = |path: &Path| {
            is_it(path)?;
            writable(path)
        };
        open(Path::new(&mapping.path)).or_else(|| {
            let descriptors = fs::read_dir(self.proc("fd")).ok()?.flatten();
            descriptors.filter_map(|entry| open(&entry.path())).next()
        })
    }
}

/// The process that holds the lock on a file; `None` if it is not found, for example in another PID namespace.
fn lock_holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let name = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let mut words = locks.lines().map(|line| line.split_ascii_whitespace());
    // "1: FLOCK  ADVISORY  WRITE 5215 fe:00:15368203 0 EOF", filesystems/proc.rst
    let mut holder = words.find(|words| words.clone().nth(5) == Some(name.as_str()))?;
    holder.nth(4)?.parse().ok().filter(|pid| *pid != 0)
}

/// A line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// What is written reaches the file.
    pub shared: bool,
    /// Offset of `start` in the file.
    pub offset: u64,
    /// Number of the file's device, as `stat` has it; 0 if it is no file's.
    pub device: u64,
    /// The file.
    pub inode: u64,
    /// Its name, which may be gone.
    pub path: String,
}

impl Mapping {
    /// Offset in the file of an address of the mapping.
    #[must_use]
    pub fn offset_of(&self, address: u64) -> Option<u64> {
        self.offset.checked_add(address.checked_sub(self.start)?)
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
        let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
        let shared = words.next()?.ends_with('s');
        let offset = hexadecimal(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let number = |digits| u32::from_str_radix(digits, 16).ok();
        let device = rustix::fs::makedev(number(major)?, number(minor)?);
        Some(Self {
            start,
            end,
            shared,
            offset,
            device,
            inode: words.next()?.parse().ok()?,
            path: words.next().unwrap_or("").trim_start().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn own() -> Process {
        Process::open(std::process::id()).expect("this process")
    }

    #[test]
    fn mappings_are_parsed() {
        let line = "7f1b83fff000-7f1c83fff000 rw-s 00001000 fe:01 1234                       /dev/shm/a b (deleted)";
        let mapping = Mapping::parse(line).expect("a mapping");
        assert_eq!(
            (mapping.start, mapping.end, mapping.offset),
            (0x7f1b_83ff_f000, 0x7f1c_83ff_f000, 0x1000)
        );
        assert!(
            mapping.shared && mapping.path == "/dev/shm/a b (deleted)" && mapping.inode == 1234
        );
        assert_eq!(mapping.device, rustix::fs::makedev(0xfe, 1));
        let private = Mapping::parse("1000-2000 rw-p 00000000 00:00 0").expect("a mapping");
        assert!(!private.shared && private.path.is_empty());
        for line in [
            "",
            "1000",
            "1000-2000",
            "x-y rw-p 0 0:0 0",
            "1000-2000 rw-p 0 00 0",
        ] {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_mapped_file_is_found_by_path_and_by_descriptor() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("ram");
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .expect("new");
        file.write_all(b"here").expect("room");
        let metadata = file.metadata().expect("open");
        let mapping = |path: &Path| Mapping {
            start: 0,
            end: 4096,
            shared: true,
            offset: 0,
            device: metadata.dev(),
            inode: metadata.ino(),
            path: path.display().to_string(),
        };
        let process = own();
        for path in [path.as_path(), Path::new("/gone")] {
            let found = process.file_of(&mapping(path)).expect("found");
            assert_eq!(found.metadata().expect("open").ino(), metadata.ino());
        }
        let other = Mapping {
            inode: u64::MAX,
            ..mapping(&path)
        };
        assert!(
            process.file_of(&other).is_none(),
            "another file of that name"
        );
    }

    #[test]
    fn a_process_has_one_attacher() {
        let lock = own().lock().expect("nobody has it");
        let error = own().lock().expect_err("taken").to_string();
        let named = format!("another process {} is attached", std::process::id());
        assert!(error.contains(&named), "{error}");
        drop(lock);
        own().lock().expect("free again");
    }

    #[test]
    fn threads_and_the_end_are_seen() {
        let process = own();
        let id = rustix::thread::gettid()
            .as_raw_nonzero()
            .get()
            .cast_unsigned();
        assert_eq!(process.threads(&[id]), Some(vec![id]));
        assert_eq!(process.threads(&[id, 1]), None);
        assert!(!process.has_ended_within(Duration::ZERO));
        let mut child = std::process::Command::new("true")
            .spawn()
            .expect("a process");
        let process = Process::open(child.id()).expect("not reaped");
        assert!(process.has_ended_within(Duration::from_secs(30)));
        child.wait().expect("it has ended");
        assert!(Process::open(u32::MAX).is_err());
        let mapping = own().mapping(0).expect_err("nothing is mapped there");
        assert!(
            mapping.to_string().contains("not the guest's monitor"),
            "{mapping}"
        );
    }
}
