// SPDX-License-Identifier: Apache-2.0
//! Discovers guests of other monitors. `patchbay-attach` serves each of them, with its socket in
//! the run directory.
//!
//! ```text
//!  folders of QMP sockets ──inotify──▶ targets ──▶ Supervisor ──▶ one patchbay-attach each
//!  virsh list, in intervals ─────────▶    ▲
//!  Vms ───────────────────────────────────┘ without those of a socket or a domain
//! ```
//!
//! An attacher ends when its guest ends. It keeps running when this process ends, because it keeps
//! the holds of its clients, and a new process finds it by its socket. One that dies leaves its
//! holds and claims in a file beside its socket, from which the next one continues.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use patchbay_host_kernel::{Kind, ListedVm};
use patchbay_supervisor::{Attacher, SETTLE, Supervisor, Target, Vms};
use tokio::process::Command;
use tokio::time::Instant;

use crate::monitors::{Directory, RunDirs, Watch};

/// The interval at which libvirt is asked for its domains.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout for an answer of libvirt.
const LIST_PATIENCE: Duration = Duration::from_secs(10);

/// The places that are searched for guests.
#[derive(Clone, Debug, Default)]
pub struct Attach {
    /// Folders whose sockets are QMP sockets.
    pub qmp: Vec<PathBuf>,
    /// The URI of a libvirt daemon on this host.
    pub libvirt: Option<String>,
    /// All VMs of this host.
    pub all: bool,
    /// The attacher program; by default the one next to this program.
    pub program: Option<PathBuf>,
    /// A debug file of the guests' kernel, or a folder with the files of many kernels.
    pub debug_file: Option<PathBuf>,
}

impl Attach {
    /// Returns whether any place is searched.
    #[must_use]
    pub fn is_given(&self) -> bool {
        !self.qmp.is_empty() || self.libvirt.is_some() || self.all
    }
}

/// Attaches to every guest that is discovered, until the future is dropped. `directory` has the
/// names of the guests that are served.
pub async fn run(attach: Attach, run_dir: PathBuf, directory: Directory) {
    if let Err(error) = std::fs::create_dir_all(&run_dir) {
        let folder = run_dir.display();
        return tracing::error!("the folder {folder} cannot be made: {error}; nothing is attached");
    }
    for folder in attach.qmp.iter().filter(|folder| !folder.is_dir()) {
        let folder = folder.display();
        tracing::warn!("there is no folder {folder} of QMP sockets; it is used once it is there");
    }
    let debug_file = attach.debug_file.map(OsString::from);
    let arguments = debug_file.map(|path| [OsString::from("--debug-file"), path]);
    let attacher = Attacher {
        program: attach.program.unwrap_or_else(default_program),
        arguments: arguments.into_iter().flatten().collect(),
        run_dir,
        outlives: true,
    };
    let mut places = Places {
        sockets: (!attach.qmp.is_empty()).then(|| Watch::new(RunDirs(attach.qmp))),
        libvirt: attach.libvirt.map(Libvirt::new),
        vms: attach.all.then(open_vms).flatten(),
    };
    let mut supervisor = Supervisor::new(attacher.clone());
    loop {
        let found = places.search(&attacher, &directory).await;
        supervisor.set(found);
        tokio::select! {
            () = places.changed() => {}
            () = supervisor.attacher_ended() => places.hurry(),
        }
        // The delay bounds the work, even if a process writes to a folder all the time.
        tokio::time::sleep(SETTLE).await;
    }
}

fn open_vms() -> Option<Vms> {
    Vms::open()
        .inspect_err(|error| {
            tracing::error!(%error, "the host's kernel cannot be read, so --attach-all finds no guest");
        })
        .ok()
}

/// The places that are searched for guests.
struct Places {
    sockets: Option<Watch>,
    libvirt: Option<Libvirt>,
    vms: Option<Vms>,
}

impl Places {
    /// Returns the guests to attach to.
    async fn search(&mut self, attacher: &Attacher, directory: &Directory) -> BTreeSet<Target> {
        let mut found: BTreeSet<Target> = match &mut self.sockets {
            Some(sockets) => sockets.sockets().into_iter().filter_map(qmp).collect(),
            None => BTreeSet::new(),
        };
        if let Some(libvirt) = &mut self.libvirt {
            libvirt.list_if_due().await;
            found.extend(libvirt.domains.iter().cloned());
        }
        let Some(vms) = &mut self.vms else {
            return found;
        };
        let is_free = |target: &Target| {
            let guest = directory.find(&target.name());
            guest.is_none_or(|guest| guest.monitor.path() == attacher.socket(target))
        };
        let has_new = vms
            .scan_if_due(is_free, |target| attacher.serves(target))
            .await;
        if let Some(libvirt) = &mut self.libvirt
            && has_new
        {
            // A domain that is new too must not be taken for a QEMU without libvirt.
            libvirt.list().await;
            found.extend(libvirt.domains.iter().cloned());
        }
        let rest = vms.targets(|vm| found.iter().any(|target| serves(target, vm)));
        found.extend(rest);
        found
    }

    /// Waits until a place has changed, or is to be searched again.
    async fn changed(&mut self) {
        let Self {
            sockets,
            libvirt,
            vms,
        } = self;
        let sockets = async {
            match sockets {
                Some(sockets) => sockets.changed().await,
                None => std::future::pending().await,
            }
        };
        let domains = async {
            match libvirt {
                Some(libvirt) => tokio::time::sleep_until(libvirt.due).await,
                None => std::future::pending().await,
            }
        };
        let vms = async {
            match vms {
                Some(vms) => vms.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sockets => {}
            () = domains => {}
            () = vms => {}
        }
    }

    /// Makes the next search due soon, because a guest may have ended.
    fn hurry(&mut self) {
        if let Some(libvirt) = &mut self.libvirt {
            libvirt.due = Instant::now();
        }
        if let Some(vms) = &mut self.vms {
            vms.hurry();
        }
    }
}

/// Returns whether a target with a monitor that is asked is the guest of this VM. The process
/// chooses its command line, by which it can only keep its own guest from being attached to.
fn serves(target: &Target, vm: &ListedVm) -> bool {
    let is_qemu = vm.monitor.kind == Kind::Qemu;
    match target {
        Target::Domain { name, .. } => is_qemu && vm.monitor.name.as_ref() == Some(name),
        Target::Qmp { path, .. } => {
            let path = path.as_os_str().as_encoded_bytes();
            let line = std::fs::read(format!("/proc/{}/cmdline", vm.pid)).unwrap_or_default();
            is_qemu && line.windows(path.len()).any(|part| part == path)
        }
        Target::Process { .. } => false,
    }
}

/// The domains of a libvirt.
struct Libvirt {
    uri: String,
    domains: BTreeSet<Target>,
    /// The time at which they are listed again.
    due: Instant,
}

impl Libvirt {
    fn new(uri: String) -> Self {
        Self {
            uri,
            domains: BTreeSet::new(),
            due: Instant::now(),
        }
    }

    async fn list_if_due(&mut self) {
        if Instant::now() >= self.due {
            self.list().await;
        }
    }

    async fn list(&mut self) {
        match list(&self.uri).await {
            Ok(now) => self.domains = now,
            Err(why) => tracing::warn!(uri = self.uri, why, "libvirt's domains are not known"),
        }
        self.due = Instant::now() + LIST_INTERVAL;
    }
}

fn qmp(path: PathBuf) -> Option<Target> {
    let inode = std::fs::symlink_metadata(&path).ok()?.ino();
    Some(Target::Qmp { path, inode })
}

/// Returns the attacher next to this program, or else the one in PATH.
fn default_program() -> PathBuf {
    const NAME: &str = "patchbay-attach";
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|own| Some(own.parent()?.join(NAME)));
    beside
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from(NAME))
}

/// Returns the running domains.
async fn list(uri: &str) -> Result<BTreeSet<Target>, String> {
    let output = Command::new("virsh")
        .args(["--connect", uri, "list", "--name"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(LIST_PATIENCE, output).await {
        Err(_) => return Err(format!("virsh does not answer within {LIST_PATIENCE:?}")),
        Ok(Err(error)) => {
            return Err(format!(
                "virsh cannot be started ({error}); install libvirt-clients"
            ));
        }
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("virsh says {:?}", said.trim()));
    }
    Ok(domains(uri, &String::from_utf8_lossy(&output.stdout)))
}

fn domains(uri: &str, text: &str) -> BTreeSet<Target> {
    let names = text.lines().map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| Target::Domain {
            uri: uri.to_owned(),
            name: name.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_are_named_by_lines() {
        let names = |text| {
            let found = domains("u", text).into_iter();
            found.map(|target| target.name()).collect::<Vec<_>>()
        };
        assert_eq!(names("web-1\n  db 2 \n\n"), ["db 2", "web-1"]);
        assert!(names("\n\n").is_empty());
    }

    #[test]
    fn a_guest_of_two_places_is_attached_once() {
        let vm = |kind, name: &str| ListedVm {
            pid: std::process::id(),
            started: None,
            descriptor: 9,
            monitor: patchbay_host_kernel::Monitor {
                kind,
                program: "p".to_owned(),
                name: Some(name.to_owned()),
            },
            vcpus: None,
            memory_bytes: None,
            dirty_logging: None,
            verdict: patchbay_host_kernel::Verdict::Yes,
            attacher: None,
        };
        let domain = Target::Domain {
            uri: "u".to_owned(),
            name: "web".to_owned(),
        };
        assert!(serves(&domain, &vm(Kind::Qemu, "web")));
        assert!(!serves(&domain, &vm(Kind::Qemu, "web-1")));
        assert!(!serves(&domain, &vm(Kind::Firecracker, "web")));
        // This process's command line names its program.
        let socket = |path: PathBuf| Target::Qmp { path, inode: 1 };
        let own = std::env::args_os().next().expect("a program");
        assert!(serves(&socket(own.clone().into()), &vm(Kind::Qemu, "x")));
        assert!(!serves(&socket(own.into()), &vm(Kind::Other, "x")));
        assert!(!serves(
            &socket("/nonexistent".into()),
            &vm(Kind::Qemu, "x")
        ));
    }
}
