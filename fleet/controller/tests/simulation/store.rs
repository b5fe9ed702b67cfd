// SPDX-License-Identifier: Apache-2.0
//! A store in memory with revisions and conditions, whose commits can fail with an unknown outcome.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use patchbay_fleet::store::{
    Entry, Expected, LeaseId, Revision, Snapshot, Store, StoreError, Transaction, Watch, Write,
};

/// The fate of a commit whose caller is told that the store cannot be reached.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Applied,
    NotApplied,
}

#[derive(Default)]
struct Content {
    revision: Revision,
    entries: BTreeMap<String, Entry>,
    faults: VecDeque<Fault>,
}

#[derive(Default)]
pub struct MemoryStore(Mutex<Content>);

impl MemoryStore {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the next commit fail.
    pub fn fail(&self, fault: Fault) {
        self.content().faults.push_back(fault);
    }

    /// Returns the value of a key.
    pub fn value(&self, key: &str) -> Option<Vec<u8>> {
        let content = self.content();
        content.entries.get(key).map(|entry| entry.value.clone())
    }
}

impl Content {
    fn holds(&self, key: &str, expected: Expected) -> bool {
        let entry = self.entries.get(key);
        match expected {
            Expected::Absent => entry.is_none(),
            Expected::CreatedAt(at) => entry.is_some_and(|entry| entry.created == at),
            Expected::ModifiedAt(at) => entry.is_some_and(|entry| entry.modified == at),
        }
    }

    fn apply(&mut self, write: &Write) {
        match write {
            Write::Put { key, value, .. } => {
                let modified = self.revision;
                let created = self
                    .entries
                    .get(key)
                    .map_or(modified, |entry| entry.created);
                let entry = Entry {
                    key: key.clone(),
                    value: value.clone(),
                    created,
                    modified,
                };
                self.entries.insert(key.clone(), entry);
            }
            Write::Delete { key } => _ = self.entries.remove(key),
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        Ok(self.content().entries.get(key).cloned())
    }

    async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        let content = self.content();
        let from = content.entries.range(prefix.to_owned()..);
        let entries = from.take_while(|(key, _)| key.starts_with(prefix));
        Ok(Snapshot {
            entries: entries.map(|(_, entry)| entry.clone()).collect(),
            revision: content.revision,
        })
    }

    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        let content = self.content();
        let mut keys = content.entries.range(from.to_owned()..);
        let next = keys.next().map(|(key, _)| key.clone());
        Ok(next.filter(|key| key.starts_with(prefix)))
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        let mut content = self.content();
        let fault = content.faults.pop_front();
        let unavailable = || StoreError::Unavailable("simulated".to_owned());
        if matches!(fault, Some(Fault::NotApplied)) {
            return Err(unavailable());
        }
        let mut conditions = transaction.conditions().iter();
        if !conditions.all(|(key, expected)| content.holds(key, *expected)) {
            return Err(StoreError::Conflict);
        }
        content.revision += 1;
        for write in transaction.writes() {
            content.apply(write);
        }
        match fault {
            Some(_) => Err(unavailable()),
            None => Ok(content.revision),
        }
    }

    async fn watch(&self, _: &str, _: Revision) -> Result<Box<dyn Watch>, StoreError> {
        unreachable!("the simulation watches nothing")
    }

    async fn compact(&self, _: Revision) -> Result<(), StoreError> {
        Ok(())
    }

    async fn grant(&self, _: Duration) -> Result<LeaseId, StoreError> {
        unreachable!("the simulation elects by itself")
    }

    async fn renew(&self, _: LeaseId) -> Result<(), StoreError> {
        unreachable!("the simulation elects by itself")
    }

    async fn revoke(&self, _: LeaseId) -> Result<(), StoreError> {
        unreachable!("the simulation elects by itself")
    }
}
