// SPDX-License-Identifier: Apache-2.0
//! Finds the VMs of this host that can be attached to.
//!
//! KVM reports no new VM. A process that creates one opens `/dev/kvm` before, which is an inotify
//! event. It does not tell when the VM can be attached to: the monitor creates it later, gives it
//! memory, and starts its vCPUs. So an event causes a scan of /proc, and further scans after delays
//! that double from [`SETTLE`] to [`INTERVAL`]. The interval alone finds a VM whose monitor opens
//! another node of the device, for example in its jail, and one that has been restored or resumed
//! without a start.
//!
//! A scan of 100 processes that have a VM and 100 descriptors each takes 0.13 s of CPU time in an
//! unoptimised build, more than half of it for the names of the descriptors. At [`INTERVAL`] this
//! is 2.6 % of one CPU. The netlink proc connector would not save the scans: it reports each fork,
//! exec and exit on the host, 300 events per second on a machine that compiles, but no VM, and
//! needs CAP_NET_ADMIN.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use patchbay_host_kernel::{HostKernel, Kind, ListedVm, Listing, OpenError, Scanner, Verdict};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::unix::pipe;
use tokio::time::Instant;

use crate::target::Target;
use crate::{MAX_TARGETS, SETTLE};

/// Scan at least this often.
const INTERVAL: Duration = Duration::from_secs(5);
/// A VM that cannot be attached to for this time is reported. Before, it may not have started.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// The time after a scan, as a multiple of its duration, before the next one. It bounds the work,
/// even if a process opens the device all the time.
const REST: u32 = 20;
/// The device that a monitor opens to create a VM.
const DEVICE: &str = "/dev/kvm";
/// The maximum length of a name in bytes, so that a socket can be named after it.
const MAX_NAME_BYTES: usize = 64;

/// The number of a process and its start.
type Identity = (u32, u64);

/// Finds the VMs of this host.
#[derive(Debug)]
pub struct Vms {
    /// `None` if a scan has failed.
    scanner: Option<Scanner>,
    opens: Option<pipe::Receiver>,
    found: BTreeMap<Identity, Found>,
    /// The remarks that have been reported and still apply.
    reported: BTreeSet<String>,
    has_reported_hidden: bool,
    /// The delay after the last scan, without its rest.
    delay: Duration,
    /// The end of the last scan, and the earliest time of the next one.
    ended: Instant,
    rested: Instant,
}

/// A process with a VM.
#[derive(Debug)]
struct Found {
    since: Instant,
    is_reported: bool,
    vm: ListedVm,
    is_attachable: bool,
    /// Another target serves it, or has served it. It is left alone until it ends, because it may
    /// have ended since the last scan.
    is_left: bool,
    /// Its name here, given when it was first found attachable.
    name: Option<String>,
}

impl Vms {
    /// Opens the host's kernel and begins to watch the device.
    ///
    /// # Errors
    /// The host's kernel cannot be read.
    pub fn open() -> Result<Self, OpenError> {
        let kernel = HostKernel::open()?;
        let opens = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .and_then(|inotify| {
                inotify::add_watch(&inotify, DEVICE, WatchFlags::OPEN)?;
                Ok(inotify)
            })
            .map_err(io::Error::from)
            // The descriptor is read like a pipe, because the content of the events is not used.
            .and_then(pipe::Receiver::from_owned_fd_unchecked);
        let opens = opens
            .inspect_err(|error| {
                tracing::warn!(%error, "{DEVICE} is not watched; a new guest is found within {INTERVAL:?}");
            })
            .ok();
        let now = Instant::now();
        Ok(Self {
            scanner: Some(Scanner::new(kernel)),
            opens,
            found: BTreeMap::new(),
            reported: BTreeSet::new(),
            has_reported_hidden: false,
            // The first scan is due at once.
            delay: Duration::ZERO,
            ended: now,
            rested: now,
        })
    }

    fn due(&self) -> Instant {
        self.rested.max(self.ended + self.delay)
    }

    /// Makes the next scan due soon.
    pub fn hurry(&mut self) {
        self.delay = SETTLE;
    }

    /// Waits until a scan is due.
    pub async fn changed(&mut self) {
        let opened = async {
            match &self.opens {
                Some(opens) => {
                    let _ = opens.readable().await;
                    let mut events = [0; 4096];
                    while opens.try_read(&mut events).is_ok_and(|read| read > 0) {}
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = tokio::time::sleep_until(self.due()) => return,
            () = opened => self.hurry(),
        }
        tokio::time::sleep_until(self.due()).await;
    }

    /// Scans the host if a scan is due, and remembers what was found. `is_free` tells whether
    /// no other guest has the target's name, and `is_ours` whether an attacher of an earlier
    /// supervisor serves it. Returns whether a QEMU is new among the VMs to attach to.
    pub async fn scan_if_due(
        &mut self,
        is_free: impl Fn(&Target) -> bool,
        is_ours: impl Fn(&Target) -> bool,
    ) -> bool {
        if Instant::now() < self.due() {
            return false;
        }
        let Some(mut scanner) = self.scanner.take() else {
            return false;
        };
        let work = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let listing = scanner.scan();
            (scanner, listing, started.elapsed())
        });
        let Ok((scanner, listing, took)) = work.await else {
            tracing::error!("a scan for VMs has failed; none is found any more");
            return false;
        };
        self.scanner = Some(scanner);
        self.ended = Instant::now();
        self.rested = self.ended + took * REST;
        self.delay = (self.delay * 2).clamp(SETTLE, INTERVAL);
        let before = self.qemus();
        match listing {
            Ok(listing) => self.take(listing, is_free, is_ours),
            Err(error) => tracing::error!(%error, "/proc cannot be read; mount it"),
        }
        !self.qemus().is_subset(&before)
    }

    /// Returns the QEMUs to attach to.
    fn qemus(&self) -> BTreeSet<Identity> {
        let is_qemu = |found: &Found| found.is_attachable && found.vm.monitor.kind == Kind::Qemu;
        let found = self.found.iter();
        found
            .filter(|(_, found)| is_qemu(found))
            .map(|(identity, _)| *identity)
            .collect()
    }

    /// Takes a list of VMs.
    fn take(
        &mut self,
        listing: Listing,
        is_free: impl Fn(&Target) -> bool,
        is_ours: impl Fn(&Target) -> bool,
    ) {
        self.report(&listing);
        let mut before = std::mem::take(&mut self.found);
        for vm in listing.vms.into_iter().take(MAX_TARGETS) {
            let Some(started) = vm.started else { continue };
            let identity = (vm.pid, started);
            // Of a process with several VMs the first row tells the reason.
            if self.found.contains_key(&identity) {
                continue;
            }
            let mut found = before.remove(&identity).unwrap_or_else(|| Found {
                since: Instant::now(),
                is_reported: false,
                vm: vm.clone(),
                is_attachable: false,
                is_left: false,
                name: None,
            });
            found.vm = vm;
            self.found.insert(identity, found);
        }
        let identities: Vec<Identity> = self.found.keys().copied().collect();
        for identity in identities {
            self.decide(identity, &is_free, &is_ours);
        }
    }

    /// Names a VM that can be attached to, or reports the reason why it cannot.
    fn decide(
        &mut self,
        identity: Identity,
        is_free: &impl Fn(&Target) -> bool,
        is_ours: &impl Fn(&Target) -> bool,
    ) {
        let (pid, started) = identity;
        let target = |name: String| Target::Process { pid, started, name };
        let Some(found) = self.found.get(&identity) else {
            return;
        };
        let reason = match (&found.vm.verdict, found.vm.attacher) {
            (Verdict::Yes, None) => None,
            (Verdict::Yes, Some(_)) if found.name.is_some() => None,
            (Verdict::Yes, Some(attacher)) => (!is_ours(&target(String::new())))
                .then(|| format!("process {attacher} is attached to it")),
            (Verdict::No(reasons), _) => Some(reasons.join("; ")),
            (Verdict::Unknown(why), _) => Some(why.clone()),
        };
        let new_name = (reason.is_none() && found.name.is_none()).then(|| {
            let names = self
                .found
                .values()
                .filter_map(|found| found.name.as_deref());
            let taken: BTreeSet<&str> = names.collect();
            name_of(&found.vm, |name| {
                !taken.contains(name) && is_free(&target(name.to_owned()))
            })
        });
        let Some(found) = self.found.get_mut(&identity) else {
            return;
        };
        found.is_attachable = reason.is_none();
        found.name = found.name.take().or(new_name);
        // The guest of Patchbay's own monitor is served without an attacher.
        let is_own = found.vm.monitor.kind == Kind::Patchbay;
        if let Some(reason) = reason
            && !is_own
            && !found.is_reported
            && found.since.elapsed() >= REPORT_AFTER
        {
            found.is_reported = true;
            let name = found.vm.name();
            tracing::warn!(pid, name, reason, "a guest cannot be attached to");
        }
    }

    /// Reports what a list lacks, once.
    fn report(&mut self, listing: &Listing) {
        self.reported
            .retain(|remark| listing.remarks.contains(remark));
        for remark in &listing.remarks {
            if self.reported.insert(remark.clone()) {
                tracing::warn!("{remark}");
            }
        }
        if let Some(remark) = listing.hidden_remark()
            && !std::mem::replace(&mut self.has_reported_hidden, true)
        {
            tracing::warn!("{remark}");
        }
    }

    /// Returns the VMs to attach to, without those of which `is_served` has said once that another
    /// target serves them.
    pub fn targets(&mut self, is_served: impl Fn(&ListedVm) -> bool) -> BTreeSet<Target> {
        for found in self.found.values_mut() {
            found.is_left = found.is_left || is_served(&found.vm);
        }
        let found = self.found.iter();
        let found = found.filter(|(_, found)| found.is_attachable && !found.is_left);
        found
            .filter_map(|(&(pid, started), found)| {
                let name = found.name.clone()?;
                Some(Target::Process { pid, started, name })
            })
            .collect()
    }
}

/// Returns a name for a guest: its monitor's name for it if that is plain, or one that is made of
/// the program and the process. If it is not free, the process's number is appended.
fn name_of(vm: &ListedVm, is_free: impl Fn(&str) -> bool) -> String {
    let made = || format!("vm-{}", vm.pid);
    let name = [vm.name(), made()].into_iter().find(|name| is_plain(name));
    let name = name.unwrap_or_else(made);
    let ending = format!("-{}", vm.pid);
    match is_free(&name) {
        true => name,
        false => format!("{}{ending}", name.strip_suffix(&ending).unwrap_or(&name)),
    }
}

/// Returns whether a name can be that of a guest and of a socket.
fn is_plain(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_graphic() && c != '/';
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with(['.', '-'])
        && name.chars().all(is_letter)
}

#[cfg(test)]
mod tests {
    use patchbay_host_kernel::Monitor;

    use super::*;

    fn vm(pid: u32, name: Option<&str>, verdict: Verdict) -> ListedVm {
        ListedVm {
            pid,
            started: Some(70),
            descriptor: 9,
            monitor: Monitor {
                kind: Kind::Firecracker,
                program: "firecracker".to_owned(),
                name: name.map(str::to_owned),
            },
            vcpus: Some(1),
            memory_bytes: None,
            dirty_logging: None,
            verdict,
            attacher: None,
        }
    }

    fn empty() -> Vms {
        let now = Instant::now();
        Vms {
            scanner: None,
            opens: None,
            found: BTreeMap::new(),
            reported: BTreeSet::new(),
            has_reported_hidden: false,
            delay: INTERVAL,
            ended: now,
            rested: now,
        }
    }

    fn names(vms: &mut Vms) -> Vec<String> {
        let targets = vms.targets(|_| false).into_iter();
        targets.map(|target| target.name()).collect()
    }

    fn list(vms: Vec<ListedVm>) -> Listing {
        Listing {
            vms,
            ..Listing::default()
        }
    }

    #[tokio::test]
    async fn a_name_that_is_taken_gets_the_processs_number() {
        let mut vms = empty();
        let free = |target: &Target| target.name() != "db";
        let two = |first: u32| {
            let named = |pid, name| vm(pid, Some(name), Verdict::Yes);
            list(vec![named(first, "web"), named(7, "web"), named(9, "db")])
        };
        vms.take(two(3), free, |_| false);
        assert_eq!(names(&mut vms), ["web", "web-7", "db-9"]);
        // A guest keeps its name, also after the one that had it before is gone.
        vms.take(two(2), free, |_| false);
        assert_eq!(names(&mut vms), ["web", "web-7", "db-9"]);
        vms.take(list(vec![vm(7, Some("web"), Verdict::Yes)]), free, |_| {
            false
        });
        assert_eq!(names(&mut vms), ["web-7"]);
        // The same number with another start is another process.
        let mut later = vm(7, Some("web"), Verdict::Yes);
        later.started = Some(71);
        vms.take(list(vec![later]), free, |_| false);
        assert_eq!(names(&mut vms), ["web"]);
    }

    #[test]
    fn hostile_names_are_replaced() {
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for name in ["a/b", "../x", "-x", ".x", "a b", "a\nb", "ä", &long] {
            let vm = vm(7, Some(name), Verdict::Yes);
            assert_eq!(name_of(&vm, |_| true), "vm-7", "{name}");
        }
        let unnamed = vm(7, None, Verdict::Yes);
        assert_eq!(name_of(&unnamed, |_| true), "firecracker-7");
        assert_eq!(name_of(&unnamed, |_| false), "firecracker-7");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_cannot_be_attached_to_is_reported_once() {
        let mut vms = empty();
        let no = || Verdict::No(vec!["the guest has no memory".to_owned()]);
        let take = |vms: &mut Vms, verdict| {
            vms.take(list(vec![vm(7, None, verdict)]), |_| true, |_| false);
            vms.found[&(7, 70)].is_reported
        };
        assert!(!take(&mut vms, no()));
        tokio::time::advance(REPORT_AFTER / 2).await;
        assert!(!take(&mut vms, no()));
        tokio::time::advance(REPORT_AFTER / 2).await;
        assert!(take(&mut vms, no()));
        assert!(names(&mut vms).is_empty());
        // It has started.
        take(&mut vms, Verdict::Yes);
        assert_eq!(names(&mut vms), ["firecracker-7"]);
        take(&mut vms, Verdict::Unknown("a test".to_owned()));
        assert!(names(&mut vms).is_empty());
    }

    #[tokio::test]
    async fn a_guest_that_another_process_serves_is_left_to_it() {
        let mut vms = empty();
        let attached = || {
            let mut vm = vm(7, None, Verdict::Yes);
            vm.attacher = Some(5);
            list(vec![vm])
        };
        vms.take(attached(), |_| true, |_| false);
        assert!(names(&mut vms).is_empty());
        // An earlier supervisor has started the attacher.
        vms.take(attached(), |_| true, |_| true);
        assert_eq!(names(&mut vms), ["firecracker-7"]);
        // It is known from now on.
        vms.take(attached(), |_| true, |_| false);
        assert_eq!(names(&mut vms), ["firecracker-7"]);
        assert!(vms.targets(|_| true).is_empty());
        assert!(names(&mut vms).is_empty(), "it may have ended");
    }

    #[tokio::test(start_paused = true)]
    async fn scans_are_frequent_after_an_event_only() {
        let mut vms = empty();
        assert_eq!(vms.due() - vms.ended, INTERVAL);
        vms.hurry();
        assert_eq!(vms.due() - vms.ended, SETTLE);
        // A scan that took long is followed by a rest.
        vms.rested = vms.ended + Duration::from_secs(9);
        assert_eq!(vms.due(), vms.rested);
    }
}
