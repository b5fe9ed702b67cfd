// SPDX-License-Identifier: Apache-2.0
//! Names a guest to attach to, and the arguments of its attacher.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The beginnings of the names of lasting sockets.
pub(crate) const ATTACHED: &str = "attached-";
const ATTACHED_PROCESS: &str = "attached-process-";

/// Returns whether a socket is that of an attacher whose guest was found by its process. If an
/// administrator has given another guest the same name, that guest is served under it.
#[must_use]
pub fn is_of_process(socket: &Path) -> bool {
    let name = socket.file_name().unwrap_or_default().as_encoded_bytes();
    name.starts_with(ATTACHED_PROCESS.as_bytes())
}

/// A guest to attach to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A QMP socket.
    Qmp {
        /// Path of the socket.
        path: PathBuf,
        /// Inode of the socket, which distinguishes the socket from one that replaced it.
        inode: u64,
    },
    /// A domain of libvirt.
    Domain {
        /// URI of the libvirt.
        uri: String,
        /// Name of the domain.
        name: String,
    },
    /// A process that runs a guest by KVM.
    Process {
        /// The process's number.
        pid: u32,
        /// The process's start, in clock ticks since the boot of the host, which distinguishes the
        /// process from a later one with the same number.
        started: u64,
        /// The guest's name here.
        name: String,
        /// The user of the process, unless the user may name the guest.
        stranger: Option<u32>,
    },
}

impl Target {
    /// Returns the name of the target for log messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Qmp { path, .. } => path.display().to_string(),
            Self::Domain { name, .. } | Self::Process { name, .. } => name.clone(),
        }
    }

    /// Returns the socket of an attacher in the run directory of a daemon. It depends on the target
    /// alone, so a later supervisor finds the attacher by it.
    #[must_use]
    pub fn lasting_socket(&self, run_dir: &Path) -> PathBuf {
        let mut hash = Sha256::new();
        match self {
            Self::Qmp { path, .. } => hash.update(path.as_os_str().as_encoded_bytes()),
            Self::Domain { uri, name } => hash.update(format!("{uri}\0{name}")),
            Self::Process { pid, started, .. } => hash.update(format!("\0{pid}\0{started}")),
        }
        let hash = hash.finalize();
        let digits: String = hash
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let beginning = match self {
            Self::Process { .. } => ATTACHED_PROCESS,
            _ => ATTACHED,
        };
        run_dir.join(format!("{beginning}{digits}.sock"))
    }

    /// Returns the attacher's arguments. `shared` are the arguments of all attachers.
    pub(crate) fn arguments(&self, socket: &Path, shared: &[OsString]) -> Vec<OsString> {
        let mut words: Vec<OsString> = match self {
            Self::Qmp { path, .. } => vec!["qemu".into(), "--qmp".into(), path.into()],
            Self::Domain { uri, .. } => vec!["libvirt".into(), "--connect".into(), uri.into()],
            Self::Process {
                pid, started, name, ..
            } => {
                let process = ["process".to_owned(), pid.to_string()].map(OsString::from);
                let identity = ["--started".to_owned(), started.to_string()].map(OsString::from);
                let name = OsString::from(format!("--name={name}"));
                process.into_iter().chain(identity).chain([name]).collect()
            }
        };
        words.extend(["--api-socket".into(), socket.into()]);
        words.extend(shared.iter().cloned());
        if let Self::Domain { name, .. } = self {
            // The domain's name may begin with a dash.
            words.extend(["--".into(), name.into()]);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_no_option() {
        let target = Target::Domain {
            uri: "qemu:///system".to_owned(),
            name: "--pause".to_owned(),
        };
        let socket = target.lasting_socket(Path::new("/run/p"));
        let words = target.arguments(&socket, &["--debug-file".into(), "/d".into()]);
        let last = ["--debug-file", "/d", "--", "--pause"];
        assert_eq!(words[words.len() - 4..], last);
        assert_eq!(words[..3], ["libvirt", "--connect", "qemu:///system"]);
        // The socket must differ from the socket of another target.
        let other = Target::Qmp {
            path: "--pause".into(),
            inode: 1,
        };
        assert_ne!(socket, other.lasting_socket(Path::new("/run/p")));
        assert!(!is_of_process(&socket));
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        let process = |started, name: &str| Target::Process {
            pid: 7,
            started,
            name: name.to_owned(),
            stranger: None,
        };
        let words = process(9, "web").arguments(Path::new("s"), &[]);
        let expected = [
            "process",
            "7",
            "--started",
            "9",
            "--name=web",
            "--api-socket",
            "s",
        ];
        assert_eq!(words, expected);
        let socket = |target: Target| target.lasting_socket(Path::new("/run/p"));
        assert_eq!(socket(process(9, "web")), socket(process(9, "web-7")));
        assert_ne!(socket(process(9, "web")), socket(process(10, "web")));
        assert!(is_of_process(&socket(process(9, "web"))));
    }
}
