// SPDX-License-Identifier: Apache-2.0
//! The bounded history of changes that watchers read from.
//!
//! Watchers pull: each keeps its own next revision and reads it from the one ring, so a watcher
//! that does not read costs nothing and, once the ring has moved past it, is dropped with a reason.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use super::Quarantine;
use super::error::KeysError;

/// What one transaction, registration or module event did.
#[derive(Debug)]
pub struct Revision {
    /// Counts up from 1 without gaps.
    pub number: u64,
    /// When it was appended.
    pub time: SystemTime,
    /// At least one.
    pub events: Vec<Event>,
}

/// What happened to one key, or to the keys of an image.
#[derive(Clone, Debug)]
pub enum Event {
    /// The service changed the key's count.
    Changed {
        /// Full name.
        key: Arc<str>,
        /// After the change.
        count: i32,
        /// Who changed it.
        by: Arc<Author>,
    },
    /// The keys of a module, or of the kernel image if that is empty, came.
    Added {
        /// Its name.
        module: String,
    },
    /// The keys of a module, or all if that is empty, went.
    Removed {
        /// Its name.
        module: String,
    },
    /// The key is not to be changed any more.
    Quarantined {
        /// Full name.
        key: Arc<str>,
        /// Until when, and why.
        why: Quarantine,
    },
}

/// Who made a change, and why.
#[derive(Debug)]
pub struct Author {
    /// "uid:0", or "monitor" when a hold expired.
    pub principal: String,
    /// As the client gave it.
    pub reason: String,
    /// As the client gave it; empty if it gave none.
    pub request_id: String,
}

impl Event {
    /// Full name of the key; `None` if the event is about a whole image.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Changed { key, .. } | Self::Quarantined { key, .. } => Some(key),
            Self::Added { .. } | Self::Removed { .. } => None,
        }
    }
}

/// How much history is kept.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Revisions.
    pub revisions: usize,
    /// Events in all kept revisions together, unless the newest revision alone has more.
    pub events: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            revisions: 4096,
            events: 1 << 17,
        }
    }
}

/// The ring of revisions.
#[derive(Debug)]
pub struct Journal {
    limits: Limits,
    ring: Mutex<Ring>,
    latest: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ring {
    revisions: VecDeque<Arc<Revision>>,
    events: usize,
    latest: u64,
}

impl Journal {
    /// An empty history.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ring: Mutex::default(),
            latest: watch::Sender::new(0),
        }
    }

    /// Adds one revision and returns its number. Never blocks on a watcher.
    pub fn append(&self, events: Vec<Event>) -> u64 {
        let mut ring = self.ring();
        ring.latest += 1;
        let number = ring.latest;
        ring.events += events.len();
        ring.revisions.push_back(Arc::new(Revision {
            number,
            time: SystemTime::now(),
            events,
        }));
        while ring.revisions.len() > 1
            && (ring.revisions.len() > self.limits.revisions || ring.events > self.limits.events)
        {
            if let Some(oldest) = ring.revisions.pop_front() {
                ring.events -= oldest.events.len();
            }
        }
        // Under the lock, so that the numbers are announced in their order.
        self.latest.send_replace(number);
        number
    }

    /// Number of the newest revision; 0 before the first.
    pub fn latest(&self) -> u64 {
        self.ring().latest
    }

    /// Starts a watch with the revision `start`, or with the next one if that is 0.
    ///
    /// # Errors
    /// [`KeysError::Compacted`] and [`KeysError::RevisionInFuture`].
    pub fn watch(self: &Arc<Self>, start: u64) -> Result<Watcher, KeysError> {
        let ring = self.ring();
        let next = if start == 0 { ring.latest + 1 } else { start };
        if next > ring.latest + 1 {
            return Err(KeysError::RevisionInFuture {
                wanted: next,
                next: ring.latest + 1,
            });
        }
        let oldest = ring.oldest();
        if next < oldest {
            return Err(KeysError::Compacted {
                wanted: next,
                oldest,
            });
        }
        Ok(Watcher {
            journal: Arc::clone(self),
            changed: self.latest.subscribe(),
            next,
        })
    }

    fn ring(&self) -> std::sync::MutexGuard<'_, Ring> {
        // Every method leaves the ring whole at each step that can panic.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn oldest(&self) -> u64 {
        self.revisions
            .front()
            .map_or(self.latest + 1, |revision| revision.number)
    }

    fn get(&self, number: u64) -> Option<Arc<Revision>> {
        let index = usize::try_from(number.checked_sub(self.oldest())?).ok()?;
        self.revisions.get(index).map(Arc::clone)
    }
}

/// One reader of the history.
#[derive(Debug)]
pub struct Watcher {
    journal: Arc<Journal>,
    changed: watch::Receiver<u64>,
    next: u64,
}

impl Watcher {
    /// The revision that [`Watcher::next`] will return.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Waits for the next revision.
    ///
    /// # Errors
    /// [`KeysError::WatchTooSlow`] if it is no longer kept.
    pub async fn next(&mut self) -> Result<Arc<Revision>, KeysError> {
        loop {
            self.changed.mark_unchanged();
            {
                let ring = self.journal.ring();
                if let Some(revision) = ring.get(self.next) {
                    self.next += 1;
                    return Ok(revision);
                }
                if self.next <= ring.latest {
                    return Err(KeysError::WatchTooSlow { missed: self.next });
                }
            }
            // The sender lives in the journal that this watcher keeps alive.
            if self.changed.changed().await.is_err() {
                return Err(KeysError::GuestStopped);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str) -> Vec<Event> {
        let module = name.to_owned();
        vec![Event::Added { module }]
    }

    fn journal(revisions: usize, events: usize) -> Arc<Journal> {
        Arc::new(Journal::new(Limits { revisions, events }))
    }

    #[tokio::test]
    async fn watcher_sees_every_revision_in_order() {
        let journal = journal(10, 10);
        let mut watcher = journal.watch(0).expect("from now on");
        assert_eq!(watcher.position(), 1);
        assert_eq!(journal.append(event("a")), 1);
        assert_eq!(journal.append(event("b")), 2);
        let first = watcher.next().await.expect("kept");
        assert!(matches!(&first.events[0], Event::Added { module } if module == "a"));
        assert_eq!(watcher.next().await.expect("kept").number, 2);
        let waiting =
            tokio::spawn(async move { watcher.next().await.map(|revision| revision.number) });
        tokio::task::yield_now().await;
        journal.append(event("c"));
        assert_eq!(waiting.await.expect("no panic").expect("kept"), 3);
    }

    #[test]
    fn start_is_checked_against_what_is_kept() {
        let journal = journal(2, 10);
        for name in ["a", "b", "c"] {
            journal.append(event(name));
        }
        assert!(matches!(
            journal.watch(1),
            Err(KeysError::Compacted {
                wanted: 1,
                oldest: 2
            })
        ));
        assert!(journal.watch(2).is_ok());
        assert!(journal.watch(4).is_ok());
        assert!(matches!(
            journal.watch(5),
            Err(KeysError::RevisionInFuture { wanted: 5, next: 4 })
        ));
    }

    #[tokio::test]
    async fn watcher_left_behind_is_told() {
        let journal = journal(2, 10);
        let mut watcher = journal.watch(0).expect("from now on");
        for name in ["a", "b", "c"] {
            journal.append(event(name));
        }
        assert!(matches!(
            watcher.next().await,
            Err(KeysError::WatchTooSlow { missed: 1 })
        ));
    }

    /// The ring is bounded by events too, but always keeps its newest revision.
    #[tokio::test]
    async fn many_events_push_out_old_revisions() {
        let journal = journal(100, 3);
        journal.append(event("a"));
        let mut watcher = journal.watch(2).expect("next");
        journal.append((0..5).flat_map(|_| event("b")).collect());
        assert!(journal.watch(1).is_err());
        assert_eq!(watcher.next().await.expect("kept").events.len(), 5);
    }
}
