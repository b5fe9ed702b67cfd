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
//! None of these waits for another: `virsh` and the scan for VMs run separately, and each change is
//! combined with the last results of the others.
//!
//! An attacher ends when its guest ends. It keeps running when this process ends, because it keeps
//! the holds of its clients, and a new process finds it by its socket. An attacher that is killed
//! leaves its holds and claims in a file beside its socket, and the next attacher continues them.

use std::cell::LazyCell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use patchbay_host_kernel::{Kind, ListedVm, read_file};
use patchbay_supervisor::{Attacher, Earlier, Owner, SETTLE, Supervisor, Target, Vms};
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::monitors::{Directory, RunDirs, Watch};

/// The interval at which libvirt is asked for its domains.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// The minimum time between two lists if the first one succeeded. Processes of any user can cause
/// lists.
const LIST_REST: Duration = Duration::from_secs(1);
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
    /// The users other than root whose monitors name their guests.
    pub names_of: BTreeSet<u32>,
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

/// Attaches to every guest that is discovered, until the future is dropped. `directory` contains
/// the names of the guests that are served.
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
        vms: attach.all.then(|| Vms::new(attach.names_of)),
    };
    let mut supervisor = Supervisor::new(attacher.clone());
    loop {
        supervisor.set(places.search(&attacher, &directory));
        tokio::select! {
            () = places.changed() => {}
            is_domain = supervisor.attacher_ended() => places.hurry(is_domain),
        }
        // The delay bounds the work, even if a process writes to a folder all the time.
        tokio::time::sleep(SETTLE).await;
    }
}

/// The places that are searched for guests.
struct Places {
    sockets: Option<Watch>,
    libvirt: Option<Libvirt>,
    vms: Option<Vms>,
}

impl Places {
    /// Returns the guests to attach to.
    fn search(&mut self, attacher: &Attacher, directory: &Directory) -> BTreeSet<Target> {
        let mut found: BTreeSet<Target> = match &mut self.sockets {
            Some(sockets) => sockets.sockets().into_iter().filter_map(qmp).collect(),
            None => BTreeSet::new(),
        };
        let libvirt = self.libvirt.as_ref();
        found.extend(libvirt.iter().flat_map(|libvirt| &libvirt.domains).cloned());
        let Some(vms) = &mut self.vms else {
            return found;
        };
        vms.take(
            |target| {
                let name = target.name();
                let is_domain = |other: &Target| other.name() == name;
                let guest = directory.find(&name);
                !found.iter().any(is_domain)
                    && guest.is_none_or(|guest| guest.monitor.path() == attacher.socket(target))
            },
            |target| match attacher.serves(target) {
                true => match directory.name_at(&attacher.socket(target)) {
                    Some(name) => Earlier::Named(name),
                    None => Earlier::Unnamed,
                },
                false => Earlier::None,
            },
        );
        let rest = vms.targets(|vm, since| owner(&found, libvirt, vm, since));
        // The QEMU may be that of a domain that has not been listed.
        let newest = vms.newest_qemu();
        if let (Some(libvirt), Some(since)) = (&mut self.libvirt, newest)
            && libvirt.is_older_than(since)
        {
            libvirt.hurry();
        }
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
                Some(libvirt) => libvirt.changed().await,
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
    fn hurry(&mut self, is_domain: bool) {
        if let Some(libvirt) = self.libvirt.as_mut().filter(|_| is_domain) {
            libvirt.hurry();
        }
        if let Some(vms) = &mut self.vms {
            vms.hurry();
        }
    }
}

/// Returns the owner of the attachment to a VM that was found first at the time `since`. A QEMU may
/// belong to a domain, unless the domains were listed since.
fn owner(
    found: &BTreeSet<Target>,
    libvirt: Option<&Libvirt>,
    vm: &ListedVm,
    since: Instant,
) -> Owner {
    let is_qemu = vm.monitor.kind == Kind::Qemu;
    let path = format!("/proc/{}/cmdline", vm.pid);
    let line = LazyCell::new(|| read_file(Path::new(&path)).unwrap_or_default());
    match found.iter().any(|target| serves(target, vm, &line)) {
        true => Owner::Other,
        false if is_qemu && libvirt.is_some_and(|libvirt| libvirt.is_older_than(since)) => {
            Owner::Unknown
        }
        false => Owner::Process,
    }
}

/// Returns whether the guest of this VM is that of a target with a monitor. `line` is the VM's
/// command line, which the process chooses. By its command line, a process can only prevent the
/// attachment to its own guest.
fn serves(target: &Target, vm: &ListedVm, line: &impl Deref<Target = Vec<u8>>) -> bool {
    let is_qemu = vm.monitor.kind == Kind::Qemu;
    match target {
        Target::Domain { name, .. } => is_qemu && vm.monitor.name.as_ref() == Some(name),
        Target::Qmp { path, .. } => {
            is_qemu && names_path(line, path.as_os_str().as_encoded_bytes())
        }
        Target::Process { .. } => false,
    }
}

/// Returns whether a command line contains a path as a word, as in `unix:PATH,server=on` and
/// `path=PATH`, and not only the beginning or the end of another path.
fn names_path(line: &[u8], path: &[u8]) -> bool {
    let ends = |byte: Option<&u8>| byte.is_none_or(|byte| b"\0,:=".contains(byte));
    let starts = (0..line.len()).filter(|start| line[*start..].starts_with(path));
    !path.is_empty()
        && starts.into_iter().any(|start| {
            let before = start.checked_sub(1).and_then(|at| line.get(at));
            ends(before) && ends(line.get(start + path.len()))
        })
}

/// The domains of a libvirt daemon.
struct Libvirt {
    uri: String,
    domains: BTreeSet<Target>,
    /// The start of the last list that succeeded.
    listed: Option<Instant>,
    /// The list in progress, with its start.
    listing: Option<(Instant, JoinHandle<Result<BTreeSet<Target>, String>>)>,
    /// The time at which the domains are listed again, and the earliest time at which they may be
    /// listed.
    due: Instant,
    rested: Instant,
    /// The reason why the last list failed.
    failure: Option<String>,
}

impl Libvirt {
    fn new(uri: String) -> Self {
        let now = Instant::now();
        Self {
            uri,
            domains: BTreeSet::new(),
            listed: None,
            listing: None,
            due: now,
            rested: now,
            failure: None,
        }
    }

    /// Returns whether no list that began after `since` has succeeded.
    fn is_older_than(&self, since: Instant) -> bool {
        self.listed.is_none_or(|listed| listed < since)
    }

    /// Makes the next list due soon.
    fn hurry(&mut self) {
        self.due = self.rested;
    }

    /// Waits until the domains have been listed. Dropping the call loses nothing: the next call
    /// continues.
    async fn changed(&mut self) {
        if self.listing.is_none() {
            tokio::time::sleep_until(self.due).await;
        }
        let (started, listing) = self.listing.get_or_insert_with(|| {
            let uri = self.uri.clone();
            let listing = tokio::spawn(async move { list(&uri).await });
            (Instant::now(), listing)
        });
        let (started, listed) = (*started, listing.await);
        self.listing = None;
        self.ended(
            started,
            listed.unwrap_or_else(|error| Err(error.to_string())),
        );
    }

    /// Takes a list that was started at the time `started`.
    fn ended(&mut self, started: Instant, listed: Result<BTreeSet<Target>, String>) {
        let now = Instant::now();
        self.due = now + LIST_INTERVAL;
        match listed {
            Ok(domains) => {
                self.rested = now + LIST_REST;
                (self.domains, self.listed, self.failure) = (domains, Some(started), None);
            }
            Err(why) => {
                self.rested = self.due;
                if self.failure.as_ref() != Some(&why) {
                    tracing::warn!(
                        uri = self.uri,
                        why,
                        "libvirt's domains are not known; --attach-all waits with new QEMUs until they are"
                    );
                }
                self.failure = Some(why);
            }
        }
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

    fn vm(kind: Kind, name: &str) -> ListedVm {
        ListedVm {
            pid: std::process::id(),
            started: None,
            user: None,
            is_contained: false,
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
        }
    }

    fn domain() -> Target {
        Target::Domain {
            uri: "u".to_owned(),
            name: "web".to_owned(),
        }
    }

    /// While libvirt does not answer, a domain must not be attached to by its process, because this
    /// would exclude the domain's own attacher.
    #[tokio::test(start_paused = true)]
    async fn a_qemu_waits_for_a_list_of_the_domains() {
        let mut libvirt = Libvirt::new("u".to_owned());
        let (none, qemu) = (BTreeSet::new(), vm(Kind::Qemu, "web"));
        let second = Duration::from_secs(1);
        let since = Instant::now() + second;
        let owner_now = |libvirt: &Libvirt| {
            let mut found = none.clone();
            found.extend(libvirt.domains.iter().cloned());
            owner(&found, Some(libvirt), &qemu, since)
        };
        assert_eq!(owner_now(&libvirt), Owner::Unknown);
        let firecracker = vm(Kind::Firecracker, "web");
        let other = owner(&none, Some(&libvirt), &firecracker, since);
        assert_eq!(other, Owner::Process);
        assert_eq!(owner(&none, None, &qemu, since), Owner::Process);
        // The domain may be missing from a list that began before its QEMU was found.
        libvirt.ended(since - second, Ok(BTreeSet::new()));
        assert_eq!(owner_now(&libvirt), Owner::Unknown);
        libvirt.ended(since + second, Err("it hangs".to_owned()));
        assert_eq!(owner_now(&libvirt), Owner::Unknown);
        libvirt.ended(since, Ok(BTreeSet::new()));
        assert_eq!(owner_now(&libvirt), Owner::Process);
        libvirt.ended(since, Ok(BTreeSet::from([domain()])));
        assert_eq!(owner_now(&libvirt), Owner::Other);
    }

    #[tokio::test(start_paused = true)]
    async fn events_do_not_cause_lists_without_a_rest() {
        let mut libvirt = Libvirt::new("u".to_owned());
        assert_eq!(libvirt.due, Instant::now(), "the first is due at once");
        let now = Instant::now();
        libvirt.ended(now, Ok(BTreeSet::new()));
        assert_eq!(libvirt.due, now + LIST_INTERVAL);
        libvirt.hurry();
        assert_eq!(libvirt.due, now + LIST_REST);
        libvirt.ended(now, Err("it hangs".to_owned()));
        libvirt.hurry();
        assert_eq!(libvirt.due, now + LIST_INTERVAL);
        // The end of another target's attacher reveals nothing about the domains.
        libvirt.ended(now, Ok(BTreeSet::new()));
        let mut places = Places {
            sockets: None,
            libvirt: Some(libvirt),
            vms: None,
        };
        let due = |places: &Places| places.libvirt.as_ref().map(|libvirt| libvirt.due);
        places.hurry(false);
        assert_eq!(due(&places), Some(now + LIST_INTERVAL));
        places.hurry(true);
        assert_eq!(due(&places), Some(now + LIST_REST));
    }

    #[test]
    fn a_path_is_not_found_in_a_longer_one() {
        for (line, is_there) in [
            ("-qmp\0unix:/run/vm/a,server=on\0", true),
            ("-chardev\0socket,path=/run/vm/a\0", true),
            ("/run/vm/a", true),
            ("-qmp\0unix:/run/vm/ab,server=on\0", false),
            ("-qmp\0unix:/srv/run/vm/a\0", false),
            ("-qmp\0unix:/run/vm/ab\0-qmp\0unix:/run/vm/a\0", true),
            ("", false),
        ] {
            assert_eq!(
                names_path(line.as_bytes(), b"/run/vm/a"),
                is_there,
                "{line}"
            );
        }
        assert!(!names_path(b"x", b""));
    }

    #[test]
    fn a_guest_of_two_places_is_attached_once() {
        let own = read_file(Path::new("/proc/self/cmdline")).expect("it runs");
        let serves = |target: &Target, vm: &ListedVm| serves(target, vm, &&own);
        let domain = domain();
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
