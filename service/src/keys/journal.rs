// SPDX-License-Identifier: Apache-2.0
//! The bounded history of changes that watchers read from.
//!
//! Watchers pull: each keeps the number of its next revision and reads that revision from the
//! common ring. So a watcher that does not read costs nothing. Once the ring has moved past its
//! revision, the watcher is dropped with a reason.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;

use super::error::KeysError;
use super::quarantine::Quarantine;

/// The events of one transaction, registration or module request.
#[derive(Debug)]
pub struct Revision {
    /// Number of the revision. Numbers count up from 1 without gaps.
    pub number: u64,
    /// Wall-clock time of the change.
    pub time: SystemTime,
    /// The changes, at least one.
    pub events: Vec<Event>,
}

/// A change of one key, or of the keys of an image.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client or an expiry changed the key's count.
    Changed {
        /// Full name.
        key: Arc<str>,
        /// Count after the change.
        count: i32,
        /// Principal, reason and request id.
        by: Arc<Author>,
    },
    /// Keys of a module, or of the kernel image if the name is empty, were added.
    Added {
        /// Name of the module.
        module: String,
    },
    /// Keys of a module, or all keys if the name is empty, were removed.
    Removed {
        /// Name of the module.
        module: String,
    },
    /// The key is quarantined.
    Quarantined {
        /// Full name.
        key: Arc<str>,
        /// Cause of the quarantine and how it ends.
        why: Quarantine,
    },
}

/// The author of a change.
#[derive(Debug)]
pub struct Author {
    /// "uid:0"; "monitor" if a hold or a claim ended by itself; "others in the guest" if the event
    /// was fired or parked for other users in the guest.
    pub principal: String,
    /// Reason that the client gave.
    pub reason: String,
    /// Request id, if the client gave one.
    pub request_id: Option<String>,
}

impl Event {
    /// Returns the full name of the key; `None` if the event is about an image.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Changed { key, .. } | Self::Quarantined { key, .. } => Some(key),
            Self::Added { .. } | Self::Removed { .. } => None,
        }
    }
}

/// Bounds of the history.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of revisions.
    pub revisions: usize,
    /// Maximum number of events in all revisions together. The newest revision alone may have more.
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
    /// Creates an empty history.
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
        // Sent under the lock, so that revisions are announced in order.
        self.latest.send_replace(number);
        number
    }

    /// Returns the newest revision; 0 before the first.
    pub fn latest(&self) -> u64 {
        self.ring().latest
    }

    /// Starts a watch at revision `start`, or at the next one if `start` is 0.
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
        // Each method leaves the ring consistent at every point that can panic.
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
    /// Returns the revision that [`Watcher::next`] will return.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Waits for the next revision.
    ///
    /// # Errors
    /// [`KeysError::WatchTooSlow`] if the revision is no longer kept.
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
            // The journal owns the sender, and this watcher keeps the journal alive.
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

    /// The number of events is bounded too, but the newest revision is always kept.
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
