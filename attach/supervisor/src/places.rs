// SPDX-License-Identifier: Apache-2.0
//! Finds guests to attach to.
//!
//! ```text
//!  folders of QMP sockets ──inotify──▶ targets ──▶ Supervisor
//!  virsh list, in intervals ─────────▶    ▲
//!  Vms ───────────────────────────────────┘ without those of a socket or a domain
//! ```
//!
//! None of these waits for another: `virsh` and the scan for VMs run separately, and each change is
//! combined with the last results of the others.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use patchbay_host_kernel::{Kind, ListedVm};
use tokio::time::Instant;

use crate::domains::Libvirt;
use crate::run_dirs::{RunDirs, Watch};
use crate::target::Target;
use crate::vms::{Earlier, Owner, Vms};

/// The places that are searched for guests.
pub struct Places {
    sockets: Option<Watch>,
    libvirt: Option<Libvirt>,
    vms: Option<Vms>,
}

impl Places {
    /// Searches for sockets in the folders `qmp`, for the running domains of the libvirt at this
    /// URI, and for VMs.
    #[must_use]
    pub fn new(qmp: Vec<PathBuf>, libvirt: Option<String>, vms: Option<Vms>) -> Self {
        for folder in qmp.iter().filter(|folder| !folder.is_dir()) {
            let folder = folder.display();
            tracing::warn!(
                "there is no folder {folder} of QMP sockets; it is used once it is there"
            );
        }
        Self {
            sockets: (!qmp.is_empty()).then(|| Watch::new(RunDirs(qmp))),
            libvirt: libvirt.map(Libvirt::new),
            vms,
        }
    }

    /// Returns the guests to attach to. `is_free` returns whether no other guest has the name that
    /// a target would get. `earlier` returns the attacher of an earlier supervisor that serves a
    /// target.
    pub(crate) fn search(
        &mut self,
        is_free: impl Fn(&Target) -> bool,
        earlier: impl Fn(&Target) -> Earlier,
    ) -> BTreeSet<Target> {
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
                !found.iter().any(|other| other.name() == name) && is_free(target)
            },
            earlier,
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

    /// Waits until a place has changed, or is to be searched again. Dropping the call loses
    /// nothing.
    pub(crate) async fn changed(&mut self) {
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

    /// Makes the next search due soon, because a guest may have ended. `is_domain` tells whether it
    /// may have been a domain of libvirt.
    pub(crate) fn hurry(&mut self, is_domain: bool) {
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
    match found.iter().any(|target| serves(target, vm)) {
        true => Owner::Other,
        false if is_qemu && libvirt.is_some_and(|libvirt| libvirt.is_older_than(since)) => {
            Owner::Unknown
        }
        false => Owner::Process,
    }
}

/// Returns whether the guest of this VM is that of a target with a monitor. The process chooses its
/// own command line, by which it can only prevent the attachment to its own guest. The scan has
/// split the command line, because any user may have many processes with long ones.
fn serves(target: &Target, vm: &ListedVm) -> bool {
    let is_qemu = vm.monitor.kind == Kind::Qemu;
    match target {
        Target::Domain { name, .. } => is_qemu && vm.monitor.name.as_ref() == Some(name),
        Target::Qmp { path, .. } => {
            is_qemu
                && vm
                    .monitor
                    .words
                    .contain(path.as_os_str().as_encoded_bytes())
        }
        Target::Process { .. } => false,
    }
}

fn qmp(path: PathBuf) -> Option<Target> {
    let inode = std::fs::symlink_metadata(&path).ok()?.ino();
    Some(Target::Qmp { path, inode })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use patchbay_host_kernel::{Verdict, Words};

    use super::*;
    use crate::domains::{LIST_INTERVAL, LIST_REST};

    fn vm(kind: Kind, name: &str) -> ListedVm {
        let mut vm = crate::vms::tests::vm(std::process::id(), Some(name), Verdict::Yes);
        vm.monitor.kind = kind;
        vm
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
    fn a_guest_of_two_places_is_attached_once() {
        let domain = domain();
        assert!(serves(&domain, &vm(Kind::Qemu, "web")));
        assert!(!serves(&domain, &vm(Kind::Qemu, "web-1")));
        assert!(!serves(&domain, &vm(Kind::Firecracker, "web")));
        let socket = |path: &str| Target::Qmp {
            path: path.into(),
            inode: 1,
        };
        let with_line = |kind| {
            let mut vm = vm(kind, "x");
            vm.monitor.words = Arc::new(Words::of(b"-qmp\0unix:/run/vm/a,server=on\0"));
            vm
        };
        assert!(serves(&socket("/run/vm/a"), &with_line(Kind::Qemu)));
        assert!(!serves(&socket("/run/vm/a"), &with_line(Kind::Other)));
        assert!(!serves(&socket("/nonexistent"), &with_line(Kind::Qemu)));
    }
}
