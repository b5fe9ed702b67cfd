// SPDX-License-Identifier: Apache-2.0
//! The bounded history of changes that watchers read from.
//!
//! Watchers pull: each keeps the number of its next revision and reads that revision from the
//! common ring. So a watcher that does not read costs nothing. Once the ring has moved past its
//! revision, the watcher is dropped with a reason.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use static_keys::KeyChange;
use tokio::sync::watch;

use super::error::KeysError;
use super::quarantine::Quarantine;

/// One transaction, registration or module request.
#[derive(Debug)]
pub struct Revision {
    /// Number of the revision. Numbers count up from 1 without gaps.
    pub number: u64,
    /// Wall-clock time of the change.
    pub time: SystemTime,
    /// The events, at least one.
    pub events: Events,
}

/// The events of a revision. They share what they have in common, because a revision may have many.
#[derive(Debug)]
pub enum Events {
    /// A client or an expiry changed the counts of keys.
    Changed {
        /// The changes. A count that has stayed the same is no event.
        changes: Arc<[KeyChange]>,
        /// Principal, reason and request id.
        by: Author,
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
    /// Keys are quarantined.
    Quarantined {
        /// Full names.
        keys: Vec<Arc<str>>,
        /// Cause of the quarantine and how it ends.
        why: Quarantine,
    },
}

/// An event about one key, or about the keys of an image; see [`Events`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "Events documents the fields")]
pub enum Event<'a> {
    /// The key's count was changed.
    Changed {
        change: &'a KeyChange,
        by: &'a Author,
    },
    /// Keys were added.
    Added { module: &'a str },
    /// Keys were removed.
    Removed { module: &'a str },
    /// The key is quarantined.
    Quarantined { key: &'a str, why: &'a Quarantine },
}

/// The author of a change.
#[derive(Debug)]
pub struct Author {
    /// "uid:0"; "monitor" if a hold or a claim ended by itself; "others in the guest" if the event
    /// was fired or parked for other users in the guest; "--trace-events" if it was parked because
    /// the guest's command line arms it.
    pub principal: String,
    /// Reason that the client gave.
    pub reason: String,
    /// Request id, if the client gave one.
    pub request_id: Option<String>,
}

impl Events {
    /// Returns the events from index `first` on, each with its index.
    pub fn from(&self, first: usize) -> impl Iterator<Item = (usize, Event<'_>)> {
        (first..self.len()).filter_map(|index| Some((index, self.get(index)?)))
    }

    /// Returns the end of the indices.
    fn len(&self) -> usize {
        match self {
            Self::Changed { changes, .. } => changes.len(),
            Self::Added { .. } | Self::Removed { .. } => 1,
            Self::Quarantined { keys, .. } => keys.len(),
        }
    }

    /// Returns the event with this index; `None` for a count that has stayed the same.
    fn get(&self, index: usize) -> Option<Event<'_>> {
        match self {
            Self::Changed { changes, by } => {
                let change = changes.get(index)?;
                (change.before != change.after).then_some(Event::Changed { change, by })
            }
            Self::Added { module } => Some(Event::Added { module }),
            Self::Removed { module } => Some(Event::Removed { module }),
            Self::Quarantined { keys, why } => {
                let key = keys.get(index)?;
                Some(Event::Quarantined { key, why })
            }
        }
    }
}

impl<'a> Event<'a> {
    /// Returns the full name of the key; `None` if the event is about an image.
    pub fn key(self) -> Option<&'a str> {
        match self {
            Self::Changed { change, .. } => Some(&change.name),
            Self::Quarantined { key, .. } => Some(key),
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
    pub fn append(&self, events: Events) -> u64 {
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
    use static_keys::KeyId;

    use super::*;

    fn event(name: &str) -> Events {
        let module = name.to_owned();
        Events::Added { module }
    }

    /// A revision that changes the first `changed` of `keys` keys.
    fn changes(keys: i32, changed: i32) -> Events {
        let change = |key| KeyChange {
            key: KeyId(0x1000),
            name: format!("k{key}").into(),
            before: 0,
            after: i32::from(key < changed),
            sites: 1,
        };
        let by = Author {
            principal: "uid:0".to_owned(),
            reason: String::new(),
            request_id: None,
        };
        let changes = (0..keys).map(change).collect();
        Events::Changed { changes, by }
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
        assert!(matches!(&first.events, Events::Added { module } if module == "a"));
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
        journal.append(changes(5, 5));
        assert!(journal.watch(1).is_err());
        assert_eq!(watcher.next().await.expect("kept").events.len(), 5);
    }

    #[test]
    fn only_counts_that_changed_are_events() {
        let events = changes(4, 2);
        let names = |first| -> Vec<_> {
            let events = events.from(first);
            events.map(|(index, event)| (index, event.key())).collect()
        };
        assert_eq!(names(0), [(0, Some("k0")), (1, Some("k1"))]);
        assert_eq!(names(1), [(1, Some("k1"))]);
        assert!(names(2).is_empty());
    }
}
