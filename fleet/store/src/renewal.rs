// SPDX-License-Identifier: Apache-2.0
//! Renews a lease in time, even if some renewals fail.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::{LeaseId, Store, StoreError};

/// The renewals of a lease, which begin three times in its lifetime.
pub struct Renewal {
    lease: LeaseId,
    ttl: Duration,
    renewed: Instant,
    /// The time of the next renewal.
    next: Instant,
}

impl Renewal {
    /// Begins with a lease that was requested at `granted`.
    pub fn new(lease: LeaseId, ttl: Duration, granted: Instant) -> Self {
        Self {
            lease,
            ttl,
            renewed: granted,
            next: granted + ttl / 3,
        }
    }

    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Renews the lease. Returns the error when renewals have failed for the lease's lifetime, or
    /// the lease has expired. A repeat after the future was dropped goes on with its schedule.
    pub async fn keep(&mut self, store: &dyn Store) -> StoreError {
        loop {
            tokio::time::sleep_until(self.next).await;
            let begun = Instant::now();
            // A renewal that hangs must not outlast the lease.
            let renewal = store.renew(self.lease);
            let renewal = tokio::time::timeout_at(self.renewed + self.ttl, renewal).await;
            // After a renewal that has failed late, the next one begins at once.
            self.next = begun + self.ttl / 3;
            let error = match renewal {
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
            tracing::warn!("a lease is not renewed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;

    use super::*;
    use crate::{EmbeddedStore, Layer};

    const TTL: Duration = Duration::from_secs(9);

    /// A store whose first renewal fails after this time. The times of all renewals are recorded.
    struct Slow {
        store: EmbeddedStore,
        fails_after: Duration,
        begun: Mutex<Vec<Instant>>,
    }

    #[async_trait]
    impl Layer for Slow {
        fn behind(&self) -> &dyn Store {
            &self.store
        }

        async fn renew(&self, _: LeaseId) -> Result<(), StoreError> {
            let number = {
                let mut begun = self.begun.lock().expect("no panic");
                begun.push(Instant::now());
                begun.len()
            };
            match number {
                1 => {
                    tokio::time::sleep(self.fails_after).await;
                    Err(StoreError::Unavailable("it is cut off".to_owned()))
                }
                2 => Ok(()),
                _ => std::future::pending().await,
            }
        }
    }

    /// Checks that a member of etcd that does not answer leaves enough time to ask another one.
    #[tokio::test]
    async fn a_renewal_that_fails_late_is_followed_by_another_at_once() {
        let folder = tempfile::tempdir().expect("room");
        let store = EmbeddedStore::open(&folder.path().join("store")).expect("opens");
        tokio::time::pause();
        let slow = Arc::new(Slow {
            store,
            fails_after: Duration::from_secs(5),
            begun: Mutex::default(),
        });
        let granted = Instant::now();
        let error = Renewal::new(LeaseId(1), TTL, granted).keep(&*slow).await;
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
        let begun = slow.begun.lock().expect("no panic").clone();
        // The clock of tests has a resolution of 1 ms.
        let is_at = |found: Instant, expected: Instant| {
            found >= expected && found - expected < Duration::from_millis(3)
        };
        assert!(is_at(begun[0], granted + TTL / 3), "{begun:?}");
        assert!(is_at(begun[1], begun[0] + slow.fails_after), "{begun:?}");
        // The third one hangs, and the lease is given up when it has ended.
        assert!(is_at(Instant::now(), begun[1] + TTL));
    }
}
