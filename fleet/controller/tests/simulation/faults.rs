// SPDX-License-Identifier: Apache-2.0
//! The faults of guests and hosts, and how often each kind of fault happens in a run.

use std::collections::BTreeMap;

use fastrand::Rng;
use patchbay_fleet::clock::TOLERANCE;
use patchbay_fleet::rollout::{Millis, Want};

use super::guest::{KEYS, Kind, MODULE_KEY};
use super::owners::{EARLY, LATE};
use super::world::{Event, World};

/// Chances in a thousand. A run has only some kinds of faults, so that each kind is also tried
/// without the others.
pub struct Rates {
    pub lose: u32,
    pub repeat: u32,
    pub delay: u32,
    pub refuse: u32,
    pub busy: u32,
    pub kill_service: u32,
    pub kill_driver: u32,
    pub stop_driver: u32,
    pub lease: u32,
    pub store: u32,
    pub gate: u32,
    pub unclear: u32,
    pub key: u32,
    pub hook: u32,
}

impl Rates {
    pub fn draw(rng: &mut Rng) -> Self {
        let mut rate = |most: u32| match rng.bool() {
            true => rng.u32(1..=most),
            false => 0,
        };
        Self {
            lose: rate(300),
            repeat: rate(300),
            delay: rate(200),
            refuse: rate(200),
            busy: rate(200),
            kill_service: rate(200),
            kill_driver: rate(60),
            stop_driver: rate(60),
            lease: rate(30),
            store: rate(200),
            gate: rate(200),
            unclear: rate(900),
            key: rate(500),
            hook: rate(400),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum WorldFault {
    Reboot,
    KillService,
    /// The guest's own code changes a key.
    Change,
    Move,
    /// The disk of a guest's ledger is full for some time.
    FillDisk,
    /// The clock of a controller jumps.
    Clock,
    /// The controllers begin to use another record key.
    RotateKey,
    /// Other people have rights.
    Rights,
    /// The guest boots into another kernel.
    Kernel,
    /// The host loses a guest's ledger.
    LoseLedger,
    /// A guest's ledger is exported, or an earlier export is imported.
    OldLedger,
    /// A snapshot of a guest is taken, or the guest is set back to one of an earlier boot.
    SetBack,
    /// The `patchbayd` of a host ends for some time.
    EndDaemon,
    /// A copy of a guest is started from a snapshot.
    Copy,
    /// A module of the guest is unloaded, or unloaded and loaded again.
    Module,
    /// The leader's watch of the registry is lost for some time.
    LoseWatch,
}

pub const WORLD_FAULTS: [WorldFault; 16] = [
    WorldFault::Reboot,
    WorldFault::KillService,
    WorldFault::Change,
    WorldFault::Move,
    WorldFault::FillDisk,
    WorldFault::Clock,
    WorldFault::RotateKey,
    WorldFault::Rights,
    WorldFault::Kernel,
    WorldFault::LoseLedger,
    WorldFault::OldLedger,
    WorldFault::SetBack,
    WorldFault::EndDaemon,
    WorldFault::Copy,
    WorldFault::Module,
    WorldFault::LoseWatch,
];

/// The longest jump of a clock, in milliseconds: three hours, so that a wait which the clock made
/// longer does not end in the run.
const MAX_JUMP: i64 = 10_800_000;

impl World {
    /// Lets a fault happen to a guest.
    pub fn strike(&mut self, fault: WorldFault) {
        if self.is_quiet {
            return;
        }
        // Nothing happens to copies.
        let guests = self.guests.iter().filter(|guest| guest.snapshot.is_none());
        let guests = guests.count();
        let index = self.rng.usize(0..guests);
        match fault {
            WorldFault::Copy => self.start_copy(index),
            WorldFault::Reboot => {
                let kinds = self.guests[index].kinds.clone();
                self.reboot(index, kinds);
            }
            WorldFault::Kernel => {
                let kinds = self.draw_kernel();
                self.trace(|| format!("another kernel: {kinds:?}"));
                self.reboot(index, kinds);
            }
            WorldFault::KillService => {
                if self.guests[index].is_served() {
                    self.count("service killed");
                    self.trace(|| format!("the service of guest {index} is killed"));
                    self.guests[index].stop();
                    let wait = self.rng.u64(500..60_000);
                    self.schedule(wait, Event::Serve(index));
                    self.register_soon();
                }
            }
            WorldFault::Change => {
                let key = KEYS[self.rng.usize(0..KEYS.len())];
                let guest = &mut self.guests[index];
                let is_fixed = matches!(guest.kind(key), Kind::Sealed | Kind::Missing);
                if guest.is_namesake || is_fixed {
                    return;
                }
                let before = guest.vm.count(key);
                let count = if before == 0 || self.rng.bool() {
                    before + 1
                } else {
                    before - 1
                };
                guest.change(key, count);
                self.count("key changed by the guest");
                self.trace(|| format!("guest {index} changes {key} from {before} to {count}"));
            }
            WorldFault::Move => self.depart(index),
            WorldFault::FillDisk => {
                self.count("disk of a ledger full");
                self.trace(|| format!("the disk of guest {index} is full"));
                self.guests[index].fill_disk(true);
                let wait = self.rng.u64(1..60_000);
                self.schedule(wait, Event::FreeDisk(index));
            }
            WorldFault::Clock => self.jump(),
            WorldFault::RotateKey => {
                if self.keys.rotate() {
                    self.count("record key replaced");
                    self.trace(|| "the controllers get another record key".to_owned());
                }
            }
            WorldFault::Rights => self.change_rights(),
            WorldFault::EndDaemon => self.end_daemon(),
            WorldFault::LoseWatch => self.lose_watch(),
            WorldFault::Module => {
                let loads_again = self.rng.bool();
                let guest = &mut self.guests[index];
                if guest.is_namesake {
                    return;
                }
                let was_loaded = guest.kind(MODULE_KEY) != Kind::Missing;
                if was_loaded {
                    guest.unload_module();
                }
                if loads_again || !was_loaded {
                    guest.load_module();
                    guest.reloads += 1;
                }
                let is_loaded = guest.kind(MODULE_KEY) != Kind::Missing;
                self.count(match is_loaded {
                    true => "module loaded",
                    false => "module unloaded",
                });
                self.trace(|| {
                    format!("guest {index}: the module was loaded: {was_loaded}, is: {is_loaded}")
                });
            }
            WorldFault::LoseLedger => {
                if self.may_lose_ledger(index) {
                    self.guests[index].lose_ledger(&self.runtime, self.now);
                    self.count("ledger lost");
                    self.trace(|| format!("the ledger of guest {index} is lost"));
                }
            }
            WorldFault::OldLedger => {
                if self.may_lose_ledger(index) {
                    let guest = &mut self.guests[index];
                    if guest.import_ledger(&self.runtime, self.now) {
                        self.count("earlier ledger imported");
                        self.trace(|| format!("guest {index} gets an earlier ledger"));
                    } else {
                        guest.export_ledger();
                        self.trace(|| format!("the ledger of guest {index} is exported"));
                    }
                }
            }
            WorldFault::SetBack => {
                if self.may_lose_ledger(index) && !self.set_back(index) {
                    self.guests[index].save_state(&self.runtime, self.now);
                    self.trace(|| format!("a snapshot of guest {index} is taken"));
                }
            }
        }
    }

    /// Sets a guest back to an earlier boot. Returns whether there is a snapshot of one.
    fn set_back(&mut self, index: usize) -> bool {
        let Some(saved) = self.guests[index].set_back() else {
            return false;
        };
        self.count("guest set back to an earlier boot");
        self.trace(|| format!("guest {index} is set back to an earlier boot"));
        // A controller that had an answer in that boot misses the ledger.
        let is_missed = !saved.owners.is_empty() || self.oracle.has_ever_answered(index);
        // After a later answer, a controller does not remember the ledger of the snapshot.
        let orphans = saved.owners.into_iter().filter_map(|(owner, generation)| {
            let is_latest = !self
                .oracle
                .has_answered(index, saved.epoch, &owner, generation);
            is_latest.then_some(owner)
        });
        let orphans = orphans.collect();
        self.guests[index].orphans = is_missed.then_some(orphans);
        self.register_soon();
        let wait = self.rng.u64(1..30_000);
        self.schedule(wait, Event::Serve(index));
        true
    }

    /// Returns whether the guest may lose its ledger. Little is promised of such a guest, so only
    /// the first one of a run ever does.
    fn may_lose_ledger(&self, index: usize) -> bool {
        let guest = &self.guests[index];
        index == 0 && guest.is_served() && !guest.is_full
    }

    /// Returns the difference of a new leader's clock from the right time.
    pub fn draw_clock(&mut self) -> i64 {
        match self.is_quiet {
            true => 0,
            false => self.rng.i64(-2_000..2_000),
        }
    }

    /// Sets the leader's clock. Short steps are those of a clock that is slewed.
    fn jump(&mut self) {
        let most = if self.rng.bool() { TOLERANCE } else { MAX_JUMP };
        let by = self.rng.i64(-most..=most);
        let Some(leader) = self.leader else {
            return;
        };
        self.count("clock of a controller set");
        self.is_clock_set = true;
        self.trace(|| format!("the clock of term {leader} jumps by {by} ms"));
        let clock = &mut self.terms.get_mut(&leader).expect("it leads").clock;
        *clock = (*clock + by).clamp(-MAX_JUMP, MAX_JUMP);
    }

    /// Returns the kinds of the keys of a kernel that are not plain.
    fn draw_kernel(&mut self) -> BTreeMap<&'static str, Kind> {
        let mut kinds = BTreeMap::new();
        for key in KEYS {
            let (kind, fault) = match self.rng.u32(0..9) {
                0 => (Kind::Guarded, "key became guarded"),
                1 => (Kind::Sealed, "key became sealed"),
                2 => (Kind::Missing, "key became missing"),
                _ => continue,
            };
            // The keys of modules are plain.
            if key == MODULE_KEY && kind != Kind::Missing {
                continue;
            }
            self.count(fault);
            kinds.insert(key, kind);
        }
        kinds
    }

    fn reboot(&mut self, index: usize, kinds: BTreeMap<&'static str, Kind>) {
        let is_in_place = self.rng.bool();
        self.count("guest rebooted");
        self.trace(|| format!("guest {index} boots again, in place: {is_in_place}"));
        self.guests[index].reboot(is_in_place, kinds);
        self.register_soon();
        match self.guests[index].is_served() {
            true => self.claim_early(index),
            false => {
                let wait = self.rng.u64(1..30_000);
                self.schedule(wait, Event::Serve(index));
            }
        }
    }

    /// Lets a guest leave its host for another one, with its ledger.
    fn depart(&mut self, index: usize) {
        let guest = &self.guests[index];
        if guest.is_namesake || guest.host.is_none() {
            return;
        }
        let taken = |host: &str| {
            let mut others = self.guests.iter();
            others.any(|other| other.name == guest.name && other.host.as_deref() == Some(host))
        };
        let free: Vec<String> = HOSTS
            .iter()
            .filter(|host| !taken(host))
            .map(|host| (*host).to_owned())
            .collect();
        if free.is_empty() {
            return;
        }
        let host = free[self.rng.usize(0..free.len())].clone();
        self.count("guest moved");
        self.trace(|| format!("guest {index} leaves for {host}"));
        let guest = &mut self.guests[index];
        guest.stop();
        guest.host = None;
        guest.home.clone_from(&host);
        guest.homes.insert(host.clone());
        let wait = self.rng.u64(1..20_000);
        self.schedule(wait, Event::Arrive(index, host));
        self.register_soon();
    }

    /// Ends the `patchbayd` of a host for some time. Its lease ends later, or it is started before.
    fn end_daemon(&mut self) {
        let host = HOSTS[self.rng.usize(0..HOSTS.len())];
        if self.registered.gone.insert(host) {
            self.count("patchbayd of a host ended");
            self.trace(|| format!("the patchbayd of {host} ends"));
            self.register_soon();
            let wait = self.rng.u64(500..60_000);
            self.schedule(wait, Event::Return(host));
        }
    }

    /// Starts the `patchbayd` of a host again.
    pub fn host_returns(&mut self, host: &'static str) {
        self.registered.restart(host);
        self.trace(|| format!("the patchbayd of {host} is started again"));
        self.register_soon();
    }

    /// Makes the claims that another owner makes first in each boot.
    pub fn claim_early(&mut self, index: usize) {
        let guest = &mut self.guests[index];
        if guest.claimed_in < guest.boots && guest.is_served() {
            let early = guest.early.clone();
            if guest.claim_as(&self.runtime, self.now, EARLY, &early) {
                guest.claimed_in = guest.boots;
            }
        }
    }

    /// Gives the disk of a guest's ledger room again.
    pub fn free_disk(&mut self, index: usize) {
        self.guests[index].fill_disk(false);
        self.claim_early(index);
    }

    /// Lets another owner replace its claims on a guest.
    pub fn claim_other(&mut self, owner: &'static str) {
        let index = self.rng.usize(0..self.guests.len());
        let mut wants = BTreeMap::new();
        for key in KEYS {
            if self.rng.bool() {
                let want = match owner {
                    LATE if self.rng.bool() => Want::On,
                    LATE => Want::Off,
                    _ => Want::Held,
                };
                wants.insert(key, want);
            }
        }
        let guest = &mut self.guests[index];
        if guest.is_namesake || !guest.is_served() {
            return;
        }
        let is_changed = guest.claim_as(&self.runtime, self.now, owner, &wants);
        let made = guest.others.get(owner).cloned().unwrap_or_default();
        self.trace(|| format!("{owner} claims {made:?} on guest {index}: {is_changed}"));
    }
}

pub const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
/// The time in which faults happen.
pub const WINDOW: Millis = 600_000;
