// SPDX-License-Identifier: Apache-2.0
//! The faults of guests and hosts, and how often each kind of fault happens in a run.

use std::collections::BTreeMap;

use fastrand::Rng;
use patchbay_fleet::rollout::{Millis, Want};

use super::guest::{EARLY, KEYS, LATE};
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
}

pub const WORLD_FAULTS: [WorldFault; 4] = [
    WorldFault::Reboot,
    WorldFault::KillService,
    WorldFault::Change,
    WorldFault::Move,
];

impl World {
    /// Lets a fault happen to a guest.
    pub fn strike(&mut self, fault: WorldFault) {
        if self.is_quiet {
            return;
        }
        let index = self.rng.usize(0..self.guests.len());
        match fault {
            WorldFault::Reboot => self.reboot(index),
            WorldFault::KillService => {
                if self.guests[index].is_served() {
                    self.count("service killed");
                    self.trace(|| format!("the service of guest {index} is killed"));
                    self.guests[index].stop();
                    let wait = self.rng.u64(500..60_000);
                    self.schedule(wait, Event::Serve(index));
                }
            }
            WorldFault::Change => {
                let key = KEYS[self.rng.usize(0..KEYS.len())];
                let guest = &mut self.guests[index];
                if guest.is_namesake {
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
        }
    }

    fn reboot(&mut self, index: usize) {
        let is_in_place = self.rng.bool();
        self.count("guest rebooted");
        self.trace(|| format!("guest {index} boots again, in place: {is_in_place}"));
        self.guests[index].reboot(is_in_place);
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
        let host = free[self.rng.usize(0..free.len())].clone();
        self.count("guest moved");
        self.trace(|| format!("guest {index} leaves for {host}"));
        let guest = &mut self.guests[index];
        guest.stop();
        guest.host = None;
        guest.home.clone_from(&host);
        let wait = self.rng.u64(1..20_000);
        self.schedule(wait, Event::Arrive(index, host));
    }

    /// Makes the claims that another owner makes first in each boot.
    pub fn claim_early(&mut self, index: usize) {
        let guest = &mut self.guests[index];
        if guest.claimed_in < guest.boots {
            guest.claimed_in = guest.boots;
            let early = guest.early.clone();
            guest.claim_as(&self.runtime, self.now, EARLY, &early);
        }
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
        guest.claim_as(&self.runtime, self.now, owner, &wants);
        let made = guest.others[owner].clone();
        self.trace(|| format!("{owner} claims {made:?} on guest {index}"));
    }
}

pub const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
/// The time in which faults happen.
pub const WINDOW: Millis = 600_000;
