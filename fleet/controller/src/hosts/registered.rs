// SPDX-License-Identifier: Apache-2.0
//! The hosts and guests of the registry, and the changes that rollouts react to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use super::log::Reader;
use super::{Host, HostConfig, Hosts, NameTaken};
use crate::store::registry::GuestRecord;

/// A host or guest of the registry that has changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Changed {
    pub host: String,
    /// `None` for the host itself.
    pub guest: Option<String>,
}

/// A guest in whose record nothing but the revision of its keys has changed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeysChanged {
    pub host: String,
    pub guest: String,
}

/// The changes of the registry that a rollout has not reacted to yet.
pub struct Following {
    records: Reader<Changed>,
    keys: Reader<KeysChanged>,
}

/// The changes of the registry since the rollout last looked.
#[derive(Default)]
pub struct News {
    /// `None` if changes were lost, so that every guest must be asked.
    pub records: Option<Vec<Changed>>,
    /// The earliest are missing if more have changed than the log keeps. These guests are asked at
    /// their next query.
    pub keys: Vec<KeysChanged>,
}

impl Following {
    /// Begins with the changes after this call.
    pub fn new(hosts: &Hosts) -> Self {
        Self {
            records: Reader::new(&hosts.records),
            keys: Reader::new(&hosts.keys),
        }
    }

    /// Waits for a change since the last call of this function or of [`Following::take`].
    pub async fn changed(&mut self) {
        tokio::select! {
            () = self.records.changed() => {}
            () = self.keys.changed() => {}
        }
    }

    /// Returns whether [`Following::changed`] returns at once.
    pub fn has_changed(&self) -> bool {
        self.records.has_changed() || self.keys.has_changed()
    }

    /// Returns the changes since the last call.
    pub fn take(&mut self) -> News {
        let (records, are_all) = self.records.take();
        let (keys, _) = self.keys.take();
        News {
            records: are_all.then_some(records),
            keys,
        }
    }
}

impl Hosts {
    /// Returns a counter that advances with every change of a host or guest of the registry, except
    /// changes of keys.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.records.counter()
    }

    /// Makes the rollouts look at the guest, or at all guests of the host, because its record has
    /// changed or it has begun or ceased to answer.
    pub fn changed(&self, host: &str, guest: Option<&str>) {
        self.records.push(Changed {
            host: host.to_owned(),
            guest: guest.map(str::to_owned),
        });
    }

    /// Adds a host of the registry. A host of the configuration with the same name is not replaced.
    ///
    /// # Errors
    /// [`NameTaken`].
    pub fn register(&self, config: HostConfig) -> Result<(), NameTaken> {
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        match by_name.get(&config.name) {
            Some(known) if !known.registered => return Err(NameTaken(config.name)),
            // The connection is kept, because the host may only have been restarted.
            Some(known) if known.config == config => {}
            _ => {
                let name = config.name.clone();
                by_name.insert(name, Arc::new(Host::new(config.clone(), true)));
            }
        }
        drop(by_name);
        self.changed(&config.name, None);
        Ok(())
    }

    /// Removes a host of the registry.
    pub fn unregister(&self, name: &str) {
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        if by_name.get(name).is_some_and(|host| host.registered) {
            by_name.remove(name);
        }
    }

    /// Removes the hosts of the registry, and the records of guests, that are not among `present`.
    pub fn retain_registered(&self, present: &BTreeSet<Changed>) {
        let has = |host: &str, guest: Option<&str>| {
            present.contains(&Changed {
                host: host.to_owned(),
                guest: guest.map(str::to_owned),
            })
        };
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        by_name.retain(|name, host| !host.registered || has(name, None));
        drop(by_name);
        let mut gone = Vec::new();
        {
            let known = self.guests.read().unwrap_or_else(PoisonError::into_inner);
            for (guest, hosts) in known.iter() {
                let hosts = hosts.keys().filter(|host| !has(host, Some(guest)));
                gone.extend(hosts.map(|host| (host.clone(), guest.clone())));
            }
        }
        for (host, guest) in gone {
            self.set_guest(&host, &guest, None);
        }
    }

    /// Records what the registry has of a guest; `None` if it no longer has the guest.
    pub fn set_guest(&self, host: &str, guest: &str, record: Option<GuestRecord>) {
        let mut guests = self.guests.write().unwrap_or_else(PoisonError::into_inner);
        let hosts = guests.entry(guest.to_owned()).or_default();
        let before = match record.clone() {
            Some(record) => hosts.insert(host.to_owned(), record),
            None => hosts.remove(host),
        };
        if hosts.is_empty() {
            guests.remove(guest);
        }
        drop(guests);
        if before == record {
            return;
        }
        let same_keys = |of: Option<GuestRecord>| of.map(|of| GuestRecord { revision: 0, ..of });
        match same_keys(before) == same_keys(record) {
            true => self.keys.push(KeysChanged {
                host: host.to_owned(),
                guest: guest.to_owned(),
            }),
            false => self.changed(host, Some(guest)),
        }
    }

    /// Returns the other hosts that have a guest of this name, according to the registry.
    pub fn others(&self, host: &str, guest: &str) -> Vec<String> {
        let guests = self.guests.read().unwrap_or_else(PoisonError::into_inner);
        let hosts = guests.get(guest).into_iter().flat_map(BTreeMap::keys);
        hosts.filter(|name| *name != host).cloned().collect()
    }

    /// Returns the same hosts, but none while the registry has the guest on this host.
    pub fn elsewhere(&self, host: &str, guest: &str) -> Vec<String> {
        let guests = self.guests.read().unwrap_or_else(PoisonError::into_inner);
        match guests.get(guest) {
            Some(hosts) if !hosts.contains_key(host) => hosts.keys().cloned().collect(),
            _ => vec![],
        }
    }
}
