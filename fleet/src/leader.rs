// SPDX-License-Identifier: Apache-2.0
//! The election of the one replica that runs rollouts.
//!
//! A replica that finds the leader's key absent writes it under a lease. The leader renews the lease,
//! and a watch tells the others when the key is gone. A leader that cannot renew in time stops by
//! itself; one that does not notice is stopped by the fence of its writes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::store::{Change, Expected, Fence, LeaseId, Store, StoreError, Transaction};

const KEY: &str = "leader";

/// A term as leader.
pub struct Term {
    pub fence: Fence,
    lease: LeaseId,
    ttl: Duration,
    renewed: Instant,
    store: Arc<dyn Store>,
}

/// Waits until this replica leads.
///
/// # Errors
/// [`StoreError`]: try again.
pub async fn campaign(
    store: &Arc<dyn Store>,
    replica: &str,
    ttl: Duration,
) -> Result<Term, StoreError> {
    loop {
        wait_until_absent(store.as_ref()).await?;
        let renewed = Instant::now();
        let lease = store.grant(ttl).await?;
        let candidacy = Transaction::new()
            .expect(KEY, Expected::Absent)
            .put_leased(KEY, replica, lease);
        match store.commit(candidacy).await {
            Ok(created) => {
                let key = KEY.to_owned();
                return Ok(Term {
                    fence: Fence { key, created },
                    lease,
                    ttl,
                    renewed,
                    store: Arc::clone(store),
                });
            }
            Err(StoreError::Conflict) => store.revoke(lease).await?,
            Err(error) => return Err(error),
        }
    }
}

async fn wait_until_absent(store: &dyn Store) -> Result<(), StoreError> {
    loop {
        let snapshot = store.range(KEY).await?;
        if snapshot.entries.is_empty() {
            return Ok(());
        }
        let mut watch = store.watch(KEY, snapshot.revision + 1).await?;
        loop {
            match watch.next().await {
                Ok(changes) => {
                    let is_gone = |change: &Change| matches!(change, Change::Deleted { .. });
                    if changes.iter().any(is_gone) {
                        break;
                    }
                }
                Err(StoreError::Compacted { .. }) => break,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Term {
    /// Renews the lease until that fails for as long as the lease lives; returns why.
    pub async fn keep(&mut self) -> StoreError {
        loop {
            tokio::time::sleep(self.ttl / 3).await;
            let begun = Instant::now();
            // A renewal that hangs must not outlive the lease.
            let renewal = self.store.renew(self.lease);
            let error = match tokio::time::timeout_at(self.renewed + self.ttl, renewal).await {
                Ok(Ok(())) => {
                    self.renewed = begun;
                    continue;
                }
                Ok(Err(error)) => error,
                Err(_) => StoreError::Unavailable("the store does not answer".to_owned()),
            };
            let is_over = self.renewed.elapsed() >= self.ttl;
            if is_over || matches!(error, StoreError::LeaseExpired(_)) {
                return error;
            }
            tracing::warn!("the leader's lease is not renewed: {error}");
        }
    }

    /// Lets another lead at once.
    pub async fn resign(self) {
        // The lease expires anyway.
        let _ = self.store.revoke(self.lease).await;
    }
}
