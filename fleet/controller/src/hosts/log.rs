// SPDX-License-Identifier: Apache-2.0
//! A log of the latest changes, which several readers follow.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::watch;

/// The maximum number of changes that are kept.
const MAX_CHANGES: usize = 4096;

/// The changes, oldest first. The last one has the number in `counter`.
#[derive(Clone)]
pub struct Log<T> {
    latest: Arc<RwLock<VecDeque<T>>>,
    counter: watch::Sender<u64>,
}

impl<T: Clone> Log<T> {
    pub fn new() -> Self {
        Self {
            latest: Arc::default(),
            counter: watch::Sender::new(0),
        }
    }

    /// Returns a counter that advances with every change.
    pub fn counter(&self) -> watch::Receiver<u64> {
        self.counter.subscribe()
    }

    pub fn push(&self, change: T) {
        let mut latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
        latest.push_back(change);
        if latest.len() > MAX_CHANGES {
            latest.pop_front();
        }
        self.counter.send_modify(|count| *count += 1);
    }
}

/// A reader's place in a log.
pub struct Reader<T> {
    log: Log<T>,
    counter: watch::Receiver<u64>,
    /// The value of the counter up to which the changes were taken.
    seen: u64,
}

impl<T: Clone> Reader<T> {
    /// Begins with the changes after this call.
    pub fn new(log: &Log<T>) -> Self {
        let mut counter = log.counter();
        let seen = *counter.borrow_and_update();
        Self {
            log: log.clone(),
            counter,
            seen,
        }
    }

    /// Waits for a change since the last call of this function or of [`Reader::take`].
    pub async fn changed(&mut self) {
        if self.counter.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether [`Reader::changed`] returns at once.
    pub fn has_changed(&self) -> bool {
        self.counter.has_changed().unwrap_or(false)
    }

    /// Returns the changes since the last call that are still kept, and whether these are all.
    pub fn take(&mut self) -> (Vec<T>, bool) {
        let latest = self
            .log
            .latest
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let count = *self.counter.borrow_and_update();
        let since = std::mem::replace(&mut self.seen, count);
        let new = usize::try_from(count.saturating_sub(since)).unwrap_or(usize::MAX);
        let skipped = latest.len().saturating_sub(new);
        let changes = latest.iter().skip(skipped).cloned().collect();
        (changes, new <= latest.len())
    }
}
