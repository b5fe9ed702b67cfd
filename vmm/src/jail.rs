// SPDX-License-Identifier: Apache-2.0

//! Confines the monitor process, from before it reads the guest's files.
//!
//! - `PR_SET_NO_NEW_PRIVS`: the monitor gains no privileges from set-uid programs.
//! - rlimits: the monitor writes no core dump, which would contain the guest's memory, and has at
//!   most [`DESCRIPTORS`] descriptors.
//! - Landlock: the monitor uses only the files and directories of its command line. It executes no
//!   program, uses no TCP, and reaches no abstract socket and no process outside its domain by a
//!   signal. On kernels with `LANDLOCK_ACCESS_FS_RESOLVE_UNIX` it connects only to sockets in the
//!   vsock's directory.
//!
//! The filters of [`seccomp`] are added per thread. What only a service manager can
//! provide (a dedicated user, cgroup limits, a device list) is in `patchbay@.service`.
//!
//! Landlock gained its rules step by step in kernels 5.13 to 7.x. An older kernel enforces the
//! rules that it supports.

use std::fs::{FileType, symlink_metadata};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};
use patchbay_guest::log_file::folder_of;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::seccomp::{self, SeccompLevel};

/// Limit on the monitor's descriptors: 256 vsock connections, 64 clients that have not named a
/// port, and the clients of the API.
pub const DESCRIPTORS: u64 = 2048;

/// The newest Landlock ABI whose rules are requested. The kernel enforces the rules that it
/// supports.
const RULES: ABI = ABI::V9;

/// The monitor cannot be confined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names the fields")]
pub enum JailError {
    #[error(
        "the kernel refuses a resource limit or PR_SET_NO_NEW_PRIVS ({0}); run with --jail off and report it"
    )]
    Limits(rustix::io::Errno),
    #[error("the kernel refuses the Landlock rules ({0}); run with --jail off and report it")]
    Landlock(RulesetError),
}

impl From<rustix::io::Errno> for JailError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Limits(error)
    }
}

impl From<RulesetError> for JailError {
    fn from(error: RulesetError) -> Self {
        Self::Landlock(error)
    }
}

/// Files and directories that the monitor needs.
#[derive(Debug, Default)]
pub struct Files {
    read: Vec<PathBuf>,
    write: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl Files {
    /// Allows reading a file.
    pub fn read(&mut self, path: &Path) {
        self.read.push(path.to_owned());
    }

    /// Allows reading and writing an existing file.
    pub fn write(&mut self, path: &Path) {
        self.write.push(path.to_owned());
    }

    /// Allows creating, renaming and removing a socket or log in its directory. Landlock grants
    /// this for every file of the directory. A pipe or a device is therefore allowed by itself: a
    /// grant for all of `/dev` would be too wide.
    pub fn make(&mut self, path: &Path) {
        let special = |kind: FileType| kind.is_fifo() || kind.is_char_device();
        match symlink_metadata(path) {
            Ok(found) if special(found.file_type()) => self.write(path),
            _ => self.folders.push(folder_of(path).to_owned()),
        }
    }
}

/// Confines the calling thread and the threads that it starts later, and sets how
/// [`seccomp::enter`] filters. Call it once, before any thread is started.
///
/// # Errors
/// [`JailError`]. The monitor must not continue then.
pub fn confine(level: SeccompLevel, files: &Files) -> Result<(), JailError> {
    seccomp::enforce(level);
    if level != SeccompLevel::On {
        return Ok(());
    }
    rustix::thread::set_no_new_privs(true)?;
    limit(Resource::Core, 0)?;
    limit(Resource::Nofile, DESCRIPTORS)?;
    match landlock(files)? {
        RulesetStatus::NotEnforced => tracing::warn!(
            "this host's kernel has no Landlock, so a thread can open what its user can until it has its filter; use a kernel with CONFIG_SECURITY_LANDLOCK and lsm=landlock"
        ),
        enforced => tracing::info!(?enforced, "confined by Landlock"),
    }
    Ok(())
}

/// Sets a limit unless a lower one is in force.
fn limit(resource: Resource, value: u64) -> rustix::io::Result<()> {
    let now = getrlimit(resource);
    let value = now.maximum.map_or(value, |maximum| maximum.min(value));
    let limits = Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    setrlimit(resource, limits)
}

fn landlock(files: &Files) -> Result<RulesetStatus, RulesetError> {
    let in_place = make_bitflags!(AccessFs::{ReadFile | WriteFile});
    let made = make_bitflags!(AccessFs::{
        ReadFile | WriteFile | Truncate | MakeReg | MakeSock | RemoveFile | ResolveUnix
    });
    let device = make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev});
    // Read by `std::thread::available_parallelism` for the cgroup's CPU limit.
    let cores = [
        "/proc/self/cgroup",
        "/proc/self/mountinfo",
        "/sys/fs/cgroup",
    ];
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(RULES))?
        .handle_access(AccessNet::from_all(RULES))?
        .scope(Scope::from_all(RULES))?
        .create()?
        // A missing file gets no rule; opening it later reports the error.
        .add_rules(path_beneath_rules(
            &files.read,
            BitFlags::from(AccessFs::ReadFile),
        ))?
        .add_rules(path_beneath_rules(
            cores,
            BitFlags::from(AccessFs::ReadFile),
        ))?
        .add_rules(path_beneath_rules(&files.write, in_place))?
        .add_rules(path_beneath_rules(&files.folders, made))?
        .add_rules(path_beneath_rules(["/dev/kvm"], device))?
        .restrict_self()?;
    Ok(status.ruleset)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, read, remove_file, rename, write};
    use std::io::ErrorKind::PermissionDenied;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    use landlock::{CompatLevel, Compatible};

    use super::*;

    /// Landlock is per thread, so the test does not affect others.
    #[test]
    fn what_was_not_named_cannot_be_reached() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("made")).unwrap();
        for name in ["kernel", "disk", "other", "made/old"] {
            write(path(name), name).unwrap();
        }
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = server.local_addr().unwrap();
        let mut files = Files::default();
        files.read(&path("kernel"));
        files.write(&path("disk"));
        files.make(&path("made/api.sock"));
        files.read(&path("nothing"));
        match landlock(&files).unwrap() {
            RulesetStatus::NotEnforced => return println!("SKIPPED: this kernel has no Landlock"),
            RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => {}
        }

        assert_eq!(read(path("kernel")).unwrap(), b"kernel");
        let denied = |result: std::io::Result<()>| {
            assert_eq!(result.unwrap_err().kind(), PermissionDenied);
        };
        denied(write(path("kernel"), ""));
        File::options()
            .read(true)
            .write(true)
            .open(path("disk"))
            .unwrap();
        denied(remove_file(path("disk")));
        denied(read(path("other")).map(drop));
        denied(write(path("new"), ""));
        denied(UnixListener::bind(path("new.sock")).map(drop));
        denied(std::process::Command::new("/bin/true").spawn().map(drop));
        let knows_tcp = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessNet::from_all(ABI::V4))
            .is_ok();
        if knows_tcp {
            denied(TcpStream::connect(server).map(drop));
        }

        rename(path("made/old"), path("made/old.1")).unwrap();
        write(path("made/new"), "").unwrap();
        drop(UnixListener::bind(path("made/api.sock")).unwrap());
        remove_file(path("made/api.sock")).unwrap();
    }

    #[test]
    fn the_folder_of_a_device_stays_closed() {
        let mut files = Files::default();
        for path in ["/dev/full", "/tmp/log", "log"] {
            files.make(Path::new(path));
        }
        assert_eq!(files.write, [Path::new("/dev/full")]);
        assert_eq!(files.folders, [Path::new("/tmp"), Path::new(".")]);
    }
}
