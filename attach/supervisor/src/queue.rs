// SPDX-License-Identifier: Apache-2.0
//! Limits the number of attachers that start at once for guests that were found by their processes.
//! Any user can start such processes without end, and each start may take long and fail.
//!
//! | guests of | start at once |
//! |---|---|
//! | users who may name their guests | [`MAX_STARTING`] |
//! | all others together | [`MAX_STARTING`] |
//! | one of the others | [`MAX_STARTING_EACH`] |
//!
//! So the guests of a user delay those of another one only if the user acts under several user ids,
//! and never those of a user who may name guests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) const MAX_STARTING: usize = 8;
pub(crate) const MAX_STARTING_EACH: usize = 2;

/// The attachers that start, and those that wait.
#[derive(Debug)]
pub(crate) struct Queue {
    trusted: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
    /// The semaphore of each user who has an attacher that starts or waits.
    each: Arc<Mutex<BTreeMap<u32, Arc<Semaphore>>>>,
}

/// The right to start an attacher, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _of_all: Option<OwnedSemaphorePermit>,
    _own: Own,
}

/// The share of one user.
#[derive(Debug)]
struct Own {
    permit: Option<OwnedSemaphorePermit>,
    /// `None` once this share is being dropped.
    semaphore: Option<Arc<Semaphore>>,
    user: Option<u32>,
    each: Arc<Mutex<BTreeMap<u32, Arc<Semaphore>>>>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            trusted: Arc::new(Semaphore::new(MAX_STARTING)),
            strangers: Arc::new(Semaphore::new(MAX_STARTING)),
            each: Arc::default(),
        }
    }
}

impl Queue {
    /// Waits until another attacher may start. `stranger` is the guest's user, unless the user may
    /// name the guest. A call that is dropped gives its place to others.
    pub async fn turn(&self, stranger: Option<u32>) -> Turn {
        let mut own = self.own(stranger);
        // The semaphores are never closed.
        if let Some(semaphore) = own.semaphore.clone() {
            own.permit = semaphore.acquire_owned().await.ok();
        }
        let of_all = match stranger {
            Some(_) => Arc::clone(&self.strangers).acquire_owned().await.ok(),
            None => None,
        };
        Turn {
            _of_all: of_all,
            _own: own,
        }
    }

    fn own(&self, stranger: Option<u32>) -> Own {
        let semaphore = match stranger {
            None => Arc::clone(&self.trusted),
            Some(user) => {
                let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
                let new = || Arc::new(Semaphore::new(MAX_STARTING_EACH));
                Arc::clone(each.entry(user).or_insert_with(new))
            }
        };
        Own {
            permit: None,
            semaphore: Some(semaphore),
            user: stranger,
            each: Arc::clone(&self.each),
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let Some(user) = self.user else { return };
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        // Both are dropped under the lock, so that the last of several shares sees no other one.
        self.permit = None;
        self.semaphore = None;
        let only_here = |semaphore: &Arc<Semaphore>| Arc::strong_count(semaphore) == 1;
        if each.get(&user).is_some_and(only_here) {
            each.remove(&user);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Returns the turn if there is no wait for it.
    fn at_once(queue: &Queue, stranger: Option<u32>) -> Option<Turn> {
        let turn = pin!(queue.turn(stranger));
        match turn.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    fn fill(queue: &Queue, stranger: Option<u32>) -> Vec<Turn> {
        std::iter::from_fn(|| at_once(queue, stranger)).collect()
    }

    #[test]
    fn a_users_guests_do_not_keep_those_of_others_waiting() {
        let queue = Queue::default();
        let first = fill(&queue, Some(1000));
        assert_eq!(first.len(), MAX_STARTING_EACH);
        let others: Vec<Vec<Turn>> = (1001..)
            .map(|user| fill(&queue, Some(user)))
            .take(4)
            .collect();
        let lengths: Vec<usize> = others.iter().map(Vec::len).collect();
        assert_eq!(lengths, [2, 2, 2, 0], "{MAX_STARTING} in all");
        assert_eq!(fill(&queue, None).len(), MAX_STARTING);
        drop(first);
        assert_eq!(fill(&queue, Some(1004)).len(), MAX_STARTING_EACH);
        drop(others);
        assert!(queue.each.lock().expect("no panic").is_empty());
    }

    /// Several of a user's attachers may end at once.
    #[test]
    fn turns_that_are_dropped_at_once_leave_nothing() {
        let queue = Queue::default();
        for _ in 0..1000 {
            let turns = fill(&queue, Some(1000));
            let together = std::sync::Barrier::new(turns.len());
            std::thread::scope(|scope| {
                for turn in turns {
                    scope.spawn(|| {
                        let turn = turn;
                        together.wait();
                        drop(turn);
                    });
                }
            });
            assert!(queue.each.lock().expect("no panic").is_empty());
        }
    }

    /// A guest may end while its attacher waits.
    #[tokio::test]
    async fn a_turn_that_is_not_awaited_any_more_is_given_to_others() {
        let queue = Queue::default();
        let mut first = fill(&queue, Some(1000));
        let mut waits = Box::pin(queue.turn(Some(1000)));
        let polled = waits.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        drop(waits);
        first.pop();
        let again = queue.turn(Some(1000)).await;
        drop((first, again));
        assert!(queue.each.lock().expect("no panic").is_empty());
    }
}
