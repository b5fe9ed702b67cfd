// SPDX-License-Identifier: Apache-2.0
//! Puts a layer in front of a store, which observes calls or causes faults.

use std::time::Duration;

use async_trait::async_trait;

use crate::store::{Entry, LeaseId, Revision, Snapshot, Store, StoreError, Transaction, Watch};

/// A store in front of another one. It passes every call on, except those that it overrides.
#[async_trait]
pub trait Layer: Send + Sync {
    /// Returns the store behind this one.
    fn behind(&self) -> &dyn Store;

    /// See [`Store::next_key`].
    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        self.behind().next_key(prefix, from).await
    }

    /// See [`Store::commit`].
    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        self.behind().commit(transaction).await
    }

    /// See [`Store::renew`].
    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.behind().renew(lease).await
    }
}

#[async_trait]
impl<L: Layer> Store for L {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.behind().get(key).await
    }

    async fn range(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        self.behind().range(prefix).await
    }

    async fn next_key(&self, prefix: &str, from: &str) -> Result<Option<String>, StoreError> {
        Layer::next_key(self, prefix, from).await
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        Layer::commit(self, transaction).await
    }

    async fn watch(&self, prefix: &str, from: Revision) -> Result<Box<dyn Watch>, StoreError> {
        self.behind().watch(prefix, from).await
    }

    async fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        self.behind().compact(revision).await
    }

    async fn grant(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        self.behind().grant(ttl).await
    }

    async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
        Layer::renew(self, lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.behind().revoke(lease).await
    }
}
