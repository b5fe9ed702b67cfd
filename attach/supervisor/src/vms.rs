// SPDX-License-Identifier: Apache-2.0
//! Finds the VMs of this host that can be attached to.
//!
//! KVM does not report a new VM. A process that creates one first opens `/dev/kvm`, which is an
//! inotify event. This event does not show when the VM can be attached to: the monitor creates the
//! VM later, gives it memory, and starts its vCPUs. So an event causes a scan of /proc, and further
//! scans after delays that double from 20 ms to 5 s. Only the scans at intervals find a VM whose
//! monitor opens another node of the device, for example in its jail, and a VM that has been
//! restored or resumed without a start.
//!
//! A scan of 100 processes that have a VM and 100 descriptors each takes 0.13 s of CPU time in an
//! unoptimised build, more than half of it for the names of the descriptors. Every 5 s, this is
//! 2.6 % of one CPU. The netlink proc connector would not save the scans: it reports each fork,
//! exec and exit on the host, 300 events per second on a machine that compiles, but no VM, and
//! needs CAP_NET_ADMIN.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use patchbay_host_kernel::{HostKernel, Kind, ListedVm, Listing, OpenError, Verdict};
use tokio::time::Instant;

use crate::names;
use crate::reports::Reports;
use crate::scans::Scans;
use crate::target::Target;

/// A VM that cannot be attached to for this time is reported. Earlier, it may just not have
/// started.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// The maximum number of guests of one user that are attached to, unless the names of this user's
/// guests are trusted. Each guest takes memory, threads and a place among all targets.
pub const MAX_PER_USER: usize = 64;

/// The number of a process and its start.
type Identity = (u32, u64);

/// An attacher that an earlier supervisor started for a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// No earlier attacher serves the target.
    None,
    /// An earlier attacher runs, but its guest's name is not known yet.
    Unnamed,
    /// An earlier attacher serves the guest under this name.
    Named(String),
}

/// The owner of the attachment to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This supervisor attaches to the VM, by its process.
    Process,
    /// Another target serves the VM.
    Other,
    /// The owner is not known yet.
    Unknown,
}

/// Finds the VMs of this host.
#[derive(Debug)]
pub struct Vms {
    scans: Scans,
    /// The result of the last scan, if it has not been taken.
    listing: Option<Listing>,
    /// The reason why the last scan failed.
    failure: Option<String>,
    /// The users who may name their guests, besides the root of the host.
    namers: BTreeSet<u32>,
    found: BTreeMap<Identity, Found>,
    reports: Reports,
    /// The users with more than [`MAX_PER_USER`] guests.
    crowded: BTreeSet<u32>,
}

/// A process with a VM.
#[derive(Debug)]
struct Found {
    since: Instant,
    is_reported: bool,
    vm: ListedVm,
    user: u32,
    /// The user, unless the user may name the guest.
    stranger: Option<u32>,
    is_attachable: bool,
    /// Another target serves the VM, or has served it. This supervisor leaves such a VM alone,
    /// because it may have ended since the last scan.
    is_left: bool,
    /// The VM is within the limit on its user's guests.
    is_admitted: bool,
    /// The guest's name here. It is given when the VM is first found attachable.
    name: Option<String>,
}

impl Found {
    fn is_wanted(&self) -> bool {
        self.is_attachable && !self.is_left
    }
}

impl Vms {
    /// Opens the host's kernel and begins to watch the device. The guests of the host's root and of
    /// `namers` have the names that their monitors give them.
    ///
    /// # Errors
    /// The host's kernel cannot be read.
    pub fn open(namers: BTreeSet<u32>) -> Result<Self, OpenError> {
        Ok(Self::with(
            Scans::of_host(Some(HostKernel::open()?)),
            namers,
        ))
    }

    /// Does the same as [`Self::open`], but opens the kernel in the first scan, and tries again
    /// until the kernel can be read.
    #[must_use]
    pub fn new(namers: BTreeSet<u32>) -> Self {
        Self::with(Scans::of_host(None), namers)
    }

    fn with(scans: Scans, namers: BTreeSet<u32>) -> Self {
        Self {
            scans,
            listing: None,
            failure: None,
            namers,
            found: BTreeMap::new(),
            reports: Reports::default(),
            crowded: BTreeSet::new(),
        }
    }

    /// Makes the next scan due soon.
    pub fn hurry(&mut self) {
        self.scans.hurry();
    }

    /// Waits until the host has been scanned. Dropping the call loses nothing.
    pub async fn changed(&mut self) {
        match self.scans.next().await {
            Ok(listing) => {
                if self.failure.take().is_some() {
                    tracing::info!("VMs are found again");
                }
                self.listing = Some(listing);
            }
            Err(why) => {
                if self.failure.as_ref() != Some(&why) {
                    tracing::error!(why, "no VM is found");
                }
                self.failure = Some(why);
            }
        }
    }

    /// Remembers the result of the last scan. `is_free` returns whether no other guest has the name
    /// that a target would get. `earlier` returns the attacher of an earlier supervisor that serves
    /// a target.
    pub fn take(
        &mut self,
        is_free: impl Fn(&Target) -> bool,
        earlier: impl Fn(&Target) -> Earlier,
    ) {
        let Some(listing) = self.listing.take() else {
            return;
        };
        self.reports.of_listing(&listing);
        let mut before = std::mem::take(&mut self.found);
        for vm in listing.vms {
            let (Some(started), Some(user)) = (vm.started, vm.user) else {
                continue;
            };
            let identity = (vm.pid, started);
            // If a process has several VMs, the first row has the reason.
            if self.found.contains_key(&identity) {
                continue;
            }
            let mut found = before.remove(&identity).unwrap_or_else(|| Found {
                since: Instant::now(),
                is_reported: false,
                vm: vm.clone(),
                user,
                stranger: self.stranger(&vm, user),
                is_attachable: false,
                is_left: false,
                is_admitted: false,
                name: None,
            });
            found.vm = vm;
            self.found.insert(identity, found);
        }
        let mut identities: Vec<Identity> = self.found.keys().copied().collect();
        // Names are given in the order in which the processes started: of several guests that want
        // a name, the oldest gets it.
        identities.sort_unstable_by_key(|&(pid, started)| (started, pid));
        for identity in identities {
            self.decide(identity, &is_free, &earlier);
        }
    }

    /// Returns the user of a VM, unless the user may name it. The root of a container may not,
    /// unless the administrator has named it.
    fn stranger(&self, vm: &ListedVm, user: u32) -> Option<u32> {
        let is_root = user == 0 && !vm.is_contained;
        (!is_root && !self.namers.contains(&user)).then_some(user)
    }

    /// Names a VM that can be attached to, or reports the reason why it cannot.
    fn decide(
        &mut self,
        identity: Identity,
        is_free: &impl Fn(&Target) -> bool,
        earlier: &impl Fn(&Target) -> Earlier,
    ) {
        let (pid, started) = identity;
        let Some(found) = self.found.get(&identity) else {
            return;
        };
        let stranger = found.stranger;
        let target = |name: String| Target::Process {
            pid,
            started,
            name,
            stranger,
        };
        let can = match &found.vm.verdict {
            Verdict::Yes => Ok(()),
            Verdict::No(reasons) => Err(reasons.join("; ")),
            Verdict::Unknown(why) => Err(why.clone()),
        };
        let name = match (can, &found.name) {
            (Err(reason), _) => Err(Some(reason)),
            (Ok(()), Some(name)) => Ok(name.clone()),
            (Ok(()), None) => match (earlier(&target(String::new())), found.vm.attacher) {
                // An attacher keeps its guest's name, so the supervisor does too.
                (Earlier::Named(name), _) => Ok(name),
                (Earlier::Unnamed, _) => Err(None),
                (Earlier::None, Some(attacher)) => {
                    Err(Some(format!("process {attacher} is attached to it")))
                }
                (Earlier::None, None) => {
                    let is_taken = |name: &str| {
                        let mut names = self.found.values().map(|other| other.name.as_deref());
                        names.any(|other| other == Some(name))
                    };
                    let may_name = stranger.is_none();
                    Ok(names::name(&found.vm, found.user, may_name, |name| {
                        !is_taken(name) && is_free(&target(name.to_owned()))
                    }))
                }
            },
        };
        let Some(found) = self.found.get_mut(&identity) else {
            return;
        };
        found.is_attachable = name.is_ok();
        let reason = match name {
            Ok(name) => {
                found.name = Some(name);
                return;
            }
            Err(None) => return,
            Err(Some(reason)) => reason,
        };
        // The guest of Patchbay's own monitor is served without an attacher.
        let is_own = found.vm.monitor.kind == Kind::Patchbay;
        let is_due = !is_own && !found.is_reported && found.since.elapsed() >= REPORT_AFTER;
        if is_due && self.reports.may_report() {
            found.is_reported = true;
            let name = found.vm.name();
            tracing::warn!(pid, name, reason, "a guest cannot be attached to");
        }
    }

    /// Returns the VMs to attach to. `owner` returns the owner of the attachment, given the time
    /// when the VM was first found. A VM that another target has served is never attached to by its
    /// process again.
    pub fn targets(&mut self, owner: impl Fn(&ListedVm, Instant) -> Owner) -> BTreeSet<Target> {
        let mut waiting = BTreeSet::new();
        for (identity, found) in &mut self.found {
            if found.is_left {
                continue;
            }
            match owner(&found.vm, found.since) {
                Owner::Process => {}
                Owner::Unknown => {
                    waiting.insert(*identity);
                }
                Owner::Other => {
                    found.is_left = true;
                    if found.is_attachable && self.reports.may_report() {
                        let name = found.vm.name();
                        tracing::info!(
                            pid = identity.0,
                            name,
                            "this guest is left to its domain or its QMP socket"
                        );
                    }
                }
            }
        }
        self.admit(&waiting);
        let found = self.found.iter();
        let found = found.filter(|(_, found)| found.is_wanted() && found.is_admitted);
        found
            .filter_map(|(&(pid, started), found)| {
                Some(Target::Process {
                    pid,
                    started,
                    name: found.name.clone()?,
                    stranger: found.stranger,
                })
            })
            .collect()
    }

    /// Admits VMs up to the limit on the guests of each user. VMs that were admitted before remain
    /// admitted.
    fn admit(&mut self, waiting: &BTreeSet<Identity>) {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        let admitted = self.found.values().filter(|found| found.is_admitted);
        for user in admitted.filter_map(|found| found.stranger) {
            *counts.entry(user).or_default() += 1;
        }
        let mut crowded = BTreeSet::new();
        for (identity, found) in &mut self.found {
            if found.is_admitted || !found.is_wanted() || waiting.contains(identity) {
                continue;
            }
            if let Some(user) = found.stranger {
                let count = counts.entry(user).or_default();
                if *count >= MAX_PER_USER {
                    crowded.insert(user);
                    continue;
                }
                *count += 1;
            }
            found.is_admitted = true;
        }
        for user in crowded.difference(&self.crowded) {
            if self.reports.may_report() {
                tracing::warn!(
                    user,
                    "a user has more than {MAX_PER_USER} guests; the others are not attached to"
                );
            }
        }
        self.crowded = crowded;
    }

    /// Returns the time at which the newest QEMU was found, among those that can be attached to but
    /// have no target yet.
    #[must_use]
    pub fn newest_qemu(&self) -> Option<Instant> {
        let found = self.found.values().filter(|found| {
            found.vm.monitor.kind == Kind::Qemu && found.is_wanted() && !found.is_admitted
        });
        found.map(|found| found.since).max()
    }
}

#[cfg(test)]
pub(crate) mod tests;
