// SPDX-License-Identifier: Apache-2.0
//! The registry, in which hosts write where the guests are. Terms list and follow it by
//! production's code, and each driver is told what has changed.

use std::collections::{BTreeMap, BTreeSet};

use patchbay_fleet::inventory::{self, Reach};
use patchbay_fleet::rollout::{Action, Millis, State, Step};
use patchbay_fleet::runner::LOOK_INTERVAL;
use patchbay_fleet::store::registry::{GuestRecord, HostRecord, PREFIX};
use patchbay_fleet::store::{Change, Entry, Store, Transaction};

use super::driver::{Driver, Input};
use super::faults::HOSTS;
use super::liar::PRETENDER;
use super::network::Network;
use super::world::{Event, World};

/// The machine of all hosts and controllers.
const MACHINE: &str = "m";

/// The interval at which `patchbayd` looks at its guests.
const HOST_INTERVAL: Millis = 10_000;

fn reach() -> Reach {
    Reach {
        machine: MACHINE.to_owned(),
        tls: None,
    }
}

/// The records that the hosts have written, by their keys.
#[derive(Default)]
pub struct Registered {
    records: BTreeMap<String, Record>,
    /// The hosts whose `patchbayd` has ended.
    pub gone: BTreeSet<&'static str>,
    /// The number of times that the `patchbayd` of each host was started again.
    restarts: BTreeMap<&'static str, i64>,
}

impl Registered {
    /// Lets the `patchbayd` of a host be started again, with another lease.
    pub fn restart(&mut self, host: &'static str) {
        self.gone.remove(host);
        *self.restarts.entry(host).or_default() += 1;
    }
}

#[derive(Clone, PartialEq, Eq)]
enum Record {
    Host(HostRecord),
    Guest(GuestRecord),
}

impl Record {
    fn value(&self) -> Vec<u8> {
        let value = match self {
            Self::Host(record) => serde_json::to_vec(record),
            Self::Guest(record) => serde_json::to_vec(record),
        };
        value.expect("JSON")
    }

    /// Returns the boot that a guest has according to its host.
    fn boot(&self) -> Option<&str> {
        match self {
            Self::Host(_) => None,
            Self::Guest(record) => Some(&record.incarnation),
        }
    }
}

/// Guests that have changed in the registry.
#[derive(Clone, Default)]
pub struct Changes {
    /// The names of guests whose boot has changed.
    boots: BTreeSet<String>,
    /// The hosts and names of guests of which only the keys have changed.
    keys: BTreeSet<(String, String)>,
}

impl Changes {
    fn is_empty(&self) -> bool {
        self.boots.is_empty() && self.keys.is_empty()
    }

    pub fn extend(&mut self, other: &Self) {
        self.boots.extend(other.boots.iter().cloned());
        self.keys.extend(other.keys.iter().cloned());
    }
}

/// The changes of which a driver was not told yet.
#[derive(Default)]
pub struct Told {
    changes: Changes,
    /// The time of the latest look.
    looked: Millis,
    /// Set while a further look is scheduled.
    is_due: bool,
}

impl Told {
    /// Begins a look at this time, and returns the guests that have changed since the last one.
    pub fn take(&mut self, now: Millis) -> Changes {
        (self.looked, self.is_due) = (now, false);
        std::mem::take(&mut self.changes)
    }
}

impl World {
    /// Returns the records that the hosts would write now.
    fn present(&self) -> BTreeMap<String, Record> {
        let hosts = HOSTS.into_iter();
        let hosts = hosts.filter(|host| !self.registered.gone.contains(host));
        let pretender = self.has_pretender.then_some(PRETENDER);
        let mut records = BTreeMap::new();
        for host in hosts.chain(pretender) {
            let record = HostRecord {
                machine: MACHINE.to_owned(),
                socket: format!("/nowhere/{host}"),
                address: None,
                labels: BTreeMap::new(),
                lease: self
                    .registered
                    .restarts
                    .get(host)
                    .map_or(1, |times| 1 + times),
            };
            records.insert(format!("{PREFIX}{host}/host"), Record::Host(record));
            for guest in &self.guests {
                let is_here = guest.host.as_deref() == Some(host) && guest.is_served();
                if !is_here && host != PRETENDER {
                    continue;
                }
                let record = GuestRecord {
                    incarnation: guest.boots.to_string(),
                    registered: true,
                    revision: guest.vm.pauses() + guest.own_changes,
                    ..GuestRecord::default()
                };
                let key = format!("{PREFIX}{host}/guests/{}", guest.name);
                records.insert(key, Record::Guest(record));
            }
        }
        records
    }

    /// Lets the hosts write what has changed, after some time.
    pub fn register_soon(&mut self) {
        let wait = match self.is_quiet {
            true => 1,
            false => self.rng.u64(1..20_000),
        };
        self.schedule(wait, Event::Register);
    }

    /// Lets the hosts write what has changed, and look again after some time.
    pub fn look_at_guests(&mut self) {
        if !self.is_quiet {
            self.register();
            self.schedule(HOST_INTERVAL, Event::HostsLook);
        }
    }

    /// Lets the hosts write what has changed, and the terms follow.
    pub fn register(&mut self) {
        let present = self.present();
        let before = std::mem::replace(&mut self.registered.records, present.clone());
        let keys: BTreeSet<&String> = before.keys().chain(present.keys()).collect();
        let (mut transaction, mut changes) = (Transaction::new(), Vec::new());
        let mut guests = Changes::default();
        for key in keys {
            let (old, new) = (before.get(key), present.get(key));
            if old == new {
                continue;
            }
            if let Some((host, guest)) = key.split_once("/guests/") {
                if old.and_then(Record::boot) == new.and_then(Record::boot) {
                    let host = host.trim_start_matches(PREFIX);
                    guests.keys.insert((host.to_owned(), guest.to_owned()));
                } else {
                    guests.boots.insert(guest.to_owned());
                }
            }
            let key = key.clone();
            transaction = match new {
                Some(record) => transaction.put(key.clone(), record.value()),
                None => transaction.delete(key.clone()),
            };
            changes.push(match new {
                Some(record) => Change::Put(Entry {
                    key,
                    value: record.value(),
                    created: 0,
                    modified: 0,
                }),
                None => Change::Deleted { key, revision: 0 },
            });
        }
        if changes.is_empty() {
            return;
        }
        self.trace(|| {
            let keys: Vec<&str> = changes.iter().map(Change::key).collect();
            format!("the registry has changed: {keys:?}")
        });
        let written = self.runtime.block_on(self.store.commit(transaction));
        written.expect("the store is reached");
        let mut watching = BTreeSet::new();
        {
            let _connections = self.runtime.enter();
            for (id, term) in &mut self.terms {
                match &mut term.missed {
                    Some((missed, _)) => missed.extend(&guests),
                    None => {
                        let each = |change| inventory::apply(&term.network.hosts, &reach(), change);
                        changes.iter().for_each(each);
                        watching.insert(*id);
                    }
                }
            }
        }
        self.tell(&watching, &guests);
    }

    /// Lets the leader lose its watch of the registry, for example because the store has compacted
    /// the changes that it had not read.
    pub fn lose_watch(&mut self) {
        let Some(leader) = self.leader else { return };
        let seen = self.runtime.block_on(self.store.range(PREFIX));
        let seen = seen.expect("the store is reached").revision;
        let term = self.terms.get_mut(&leader).expect("it leads");
        if term.missed.is_some() {
            return;
        }
        term.missed = Some((Changes::default(), seen));
        self.count("watch of the registry lost");
        self.trace(|| format!("term {leader} has lost its watch of the registry"));
        let wait = self.long_delay();
        self.schedule(wait, Event::List(leader));
    }

    /// Lets a term that has lost its watch list the registry again, as `inventory::follow` does.
    pub fn list_again(&mut self, term: u32) {
        let lost = self.terms.get_mut(&term);
        let Some((mut guests, seen)) = lost.and_then(|term| term.missed.take()) else {
            return;
        };
        // A guest that appeared and disappeared meanwhile is not in the list.
        let records = &self.registered.records;
        let is_listed = |guest: &String| {
            let end = format!("/guests/{guest}");
            records.keys().any(|key| key.ends_with(&end))
        };
        guests.boots.retain(is_listed);
        self.trace(|| format!("term {term} lists the registry again"));
        self.list_registry(&self.terms[&term].network, seen);
        self.tell(&BTreeSet::from([term]), &guests);
    }

    /// Lets a term list the registry, of which it has seen the changes up to this revision.
    pub fn list_registry(&self, network: &Network, seen: u64) {
        let reach = reach();
        let listed = inventory::list(self.store.as_ref(), &network.hosts, &reach, seen);
        self.runtime.block_on(listed).expect("the store is reached");
    }

    /// Tells the drivers of these terms that these guests have changed, as `Running::run` does: at
    /// most once in some seconds.
    fn tell(&mut self, terms: &BTreeSet<u32>, guests: &Changes) {
        let interval = Millis::try_from(LOOK_INTERVAL.as_millis()).expect("short");
        let mut looks = Vec::new();
        let drivers = self.drivers.iter_mut();
        for (id, driver) in drivers.filter(|(_, driver)| terms.contains(&driver.term)) {
            driver.told.changes.extend(guests);
            let has_news = !guests.is_empty() || driver.following.has_changed();
            if has_news && !std::mem::replace(&mut driver.told.is_due, true) {
                looks.push((*id, driver.told.looked + interval));
            }
        }
        for (id, at) in looks {
            self.schedule_at(at, Event::Input(id, Input::Look));
        }
    }

    /// Checks the step of a driver that was told that these guests have changed: it calls them at
    /// once. Otherwise it would find the change minutes later, which no other check shows. `now` is
    /// the time of the step by the driver's clock.
    pub fn check_look(&self, driver: &Driver, changes: &Changes, step: &Step, now: Millis) {
        // Claims that have ended by themselves are released in the next step, which follows at
        // once.
        if step.wake_at.is_some_and(|at| at <= now) {
            return;
        }
        let actions = &step.actions;
        let rollout = &driver.rollout;
        let header = rollout.header();
        for (index, member) in rollout.members().iter().enumerate() {
            let has_booted = changes.boots.contains(&member.guest);
            let place = (member.host.clone(), member.guest.clone());
            if !has_booted && !changes.keys.contains(&place) {
                continue;
            }
            // A guest that boots, or loads a module, after each change has to wait.
            let mut same = self.guests.iter().enumerate();
            let waits = same.any(|(number, guest)| {
                let has_lost = guest.boots > 1 || guest.loads > 1;
                guest.name == member.guest && (has_lost || self.liar == Some(number))
            });
            let is_meant = match member.state {
                State::AsWanted { .. } => header.phase.has_desired_state(),
                _ if member.state.is_ineffective() => header.phase.has_desired_state(),
                State::Claiming { .. } | State::Releasing { .. } => has_booted && !waits,
                _ => false,
            };
            let generation = member.generation;
            let is_call = |action: &Action| match action {
                Action::Claim { member, .. }
                | Action::Release { member, .. }
                | Action::Check { member, .. } => *member == index,
                _ => false,
            };
            let is_called = driver.calls.contains_key(&(index, generation));
            assert!(
                !is_meant || is_called || actions.iter().any(is_call),
                "{} has changed in the registry, and driver {} of {} does not call member {index}, \
                 which is {:?}",
                member.guest,
                driver.id,
                header.name,
                member.state
            );
        }
    }
}
