// SPDX-License-Identifier: Apache-2.0
//! Elects the one replica that runs rollouts.
//!
//! A replica that finds the leader's key absent writes it under a lease. The leader renews the
//! lease, and a watch reports to the other replicas when the key is gone. A leader resigns if it
//! cannot renew its lease in time, or is told to end. If a leader does not notice that it has lost
//! the leadership, the fence of its writes stops it.

use std::sync::Arc;
use std::time::Duration;

use patchbay_access::connect::is_address;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::store::{Change, Expected, Fence, Renewal, Store, StoreError, Transaction};

const KEY: &str = "leader";
/// The maximum time of a resignation. If it takes longer, the lease expires by itself.
const RESIGN_TIMEOUT: Duration = Duration::from_secs(2);

/// The leader's record in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    /// The name of the replica.
    pub name: String,
    /// The ADDRESS:PORT at which the replica serves the API; `None` if it serves only its socket.
    pub address: Option<String>,
}

impl Leader {
    /// Parses a record. Earlier programs stored only the name, without JSON.
    fn read(value: &[u8]) -> Self {
        let mut leader: Self = serde_json::from_slice(value).unwrap_or_else(|_| Self {
            name: String::from_utf8_lossy(value).into_owned(),
            address: None,
        });
        // The address is sent to clients, which show it.
        leader.address = leader.address.filter(|address| is_address(address));
        leader
    }

    fn write(&self) -> Vec<u8> {
        // Serialization fails only for maps whose keys are not strings.
        serde_json::to_vec(self).expect("a record of texts")
    }
}

/// A term as leader.
pub struct Term {
    pub fence: Fence,
    renewal: Renewal,
    store: Arc<dyn Store>,
}

/// Waits until this replica leads. Until then, `leader` contains the record of the current leader.
///
/// # Errors
/// [`StoreError`], after which the caller may try again.
pub async fn campaign(
    store: &Arc<dyn Store>,
    replica: &Leader,
    ttl: Duration,
    leader: &watch::Sender<Option<Leader>>,
) -> Result<Term, StoreError> {
    loop {
        wait_until_absent(store.as_ref(), leader).await?;
        let granted = Instant::now();
        let lease = store.grant(ttl).await?;
        let candidacy = Transaction::new().expect(KEY, Expected::Absent).put_leased(
            KEY,
            replica.write(),
            lease,
        );
        match store.commit(candidacy).await {
            Ok(created) => {
                let key = KEY.to_owned();
                return Ok(Term {
                    fence: Fence { key, created },
                    renewal: Renewal::new(lease, ttl, granted),
                    store: Arc::clone(store),
                });
            }
            Err(StoreError::Conflict) => store.revoke(lease).await?,
            Err(error) => return Err(error),
        }
    }
}

async fn wait_until_absent(
    store: &dyn Store,
    leader: &watch::Sender<Option<Leader>>,
) -> Result<(), StoreError> {
    loop {
        let snapshot = store.range(KEY).await?;
        let found = snapshot.entries.first();
        leader.send_replace(found.map(|entry| Leader::read(&entry.value)));
        if found.is_none() {
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
    /// Renews the lease until that fails, and returns the error, as [`Renewal::keep`] does.
    pub async fn keep(&mut self) -> StoreError {
        self.renewal.keep(self.store.as_ref()).await
    }

    /// Gives up the leadership, so that another replica can lead at once.
    pub async fn resign(self) {
        // If this fails, the lease expires.
        let revoked = self.store.revoke(self.renewal.lease());
        let _ = tokio::time::timeout(RESIGN_TIMEOUT, revoked).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use async_trait::async_trait;
    use tokio::sync::Notify;

    use super::*;
    use crate::store::{EmbeddedStore, Layer, LeaseId};

    /// The lease's lifetime. It is long enough that a loaded machine does not end a term between
    /// two renewals.
    const TTL: Duration = Duration::from_secs(6);

    fn leader() -> Leader {
        Leader {
            name: "replica".to_owned(),
            address: None,
        }
    }

    /// A store whose renewals first have these outcomes and then succeed.
    struct Renewals {
        store: EmbeddedStore,
        outcomes: Mutex<VecDeque<StoreError>>,
        renewed: Notify,
    }

    #[async_trait]
    impl Layer for Renewals {
        fn behind(&self) -> &dyn Store {
            &self.store
        }

        async fn renew(&self, lease: LeaseId) -> Result<(), StoreError> {
            if let Some(error) = self.outcomes.lock().unwrap().pop_front() {
                return Err(error);
            }
            self.store.renew(lease).await?;
            self.renewed.notify_one();
            Ok(())
        }
    }

    /// Runs a term whose renewals first have these outcomes, and returns the error that ends it;
    /// `None` if it continues after a renewal.
    async fn end_after(outcomes: impl Into<VecDeque<StoreError>>) -> Option<StoreError> {
        let folder = tempfile::tempdir().unwrap();
        let renewals = Arc::new(Renewals {
            store: EmbeddedStore::open(&folder.path().join("store")).unwrap(),
            outcomes: Mutex::new(outcomes.into()),
            renewed: Notify::new(),
        });
        let store: Arc<dyn Store> = renewals.clone();
        let mut term = campaign(&store, &leader(), TTL, &watch::Sender::default())
            .await
            .unwrap();
        tokio::select! {
            error = term.keep() => Some(error),
            () = renewals.renewed.notified() => None,
        }
    }

    /// Checks that another member of etcd can answer the next renewal after one has failed.
    #[tokio::test]
    async fn one_renewal_that_fails_does_not_end_the_term() {
        let lost = StoreError::Unavailable("the connection is reset".to_owned());
        assert_eq!(end_after([lost]).await, None);
    }

    /// Checks that a term whose renewals are waited for with pauses renews in time, as when the
    /// rollouts are loaded and then run.
    #[tokio::test]
    async fn waiting_again_for_renewals_does_not_delay_them() {
        let folder = tempfile::tempdir().unwrap();
        let renewals = Arc::new(Renewals {
            store: EmbeddedStore::open(&folder.path().join("store")).unwrap(),
            outcomes: Mutex::default(),
            renewed: Notify::new(),
        });
        let store: Arc<dyn Store> = renewals.clone();
        let mut term = campaign(&store, &leader(), TTL, &watch::Sender::default())
            .await
            .unwrap();
        for _ in 0..12 {
            tokio::select! {
                error = term.keep() => panic!("{error}"),
                () = renewals.renewed.notified() => return,
                () = tokio::time::sleep(TTL / 6) => {}
            }
        }
        panic!("no renewal while its waits were shorter than the time between two");
    }

    #[tokio::test]
    async fn a_lease_that_has_expired_ends_the_term_at_once() {
        let error = end_after([StoreError::LeaseExpired(1)]).await;
        assert_eq!(error, Some(StoreError::LeaseExpired(1)));
    }

    #[tokio::test]
    async fn a_lease_that_is_never_renewed_ends_the_term() {
        let lost = || StoreError::Unavailable("no route".to_owned());
        let error = end_after((0..100).map(|_| lost()).collect::<VecDeque<_>>()).await;
        assert_eq!(error, Some(lost()));
    }
}
