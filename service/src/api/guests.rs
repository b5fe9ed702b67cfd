// SPDX-License-Identifier: Apache-2.0
//! The guests that an endpoint serves.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::ending::wait_for_end;
use crate::keys::Keys;
use crate::trace::{self, TraceThread, Tracer, Tracing};

/// A guest that endpoints serve.
pub struct ServedGuest {
    name: String,
    pub(super) keys: Arc<Keys>,
    pub(super) tracer: Arc<Tracer>,
    /// Time for which a stream's events stay armed after the stream ends.
    pub(super) grace: Duration,
    pub(super) started_at: SystemTime,
    /// Changes with each console output and at the guest's end.
    pub(super) printed: watch::Receiver<()>,
    /// True when the guest is removed or the endpoint shuts down.
    ending: watch::Sender<bool>,
    /// The decoding thread ends with the last reference to the guest.
    decoder: Option<TraceThread>,
}

impl ServedGuest {
    /// Starts tracing on the current tokio runtime. The guest has the name that the monitor gives
    /// it.
    ///
    /// # Errors
    /// The agent's socket cannot be used.
    pub fn start(keys: Keys, tracing: Tracing) -> std::io::Result<Self> {
        let keys = Arc::new(keys);
        let decoding = tracing.thread.as_ref();
        let decoding = decoding.map_or_else(Handle::current, |thread| thread.handle().clone());
        let tracer = trace::start(keys.clone(), tracing.agent, &decoding)?;
        trace::park_boot_events(&tracer, tracing.boot_events)?;
        let mut guest = Self::new(keys, tracer, tracing.grace);
        guest.decoder = tracing.thread;
        Ok(guest)
    }

    /// Wraps a guest that is traced already. Takes over the console's listener.
    #[must_use]
    pub fn new(keys: Arc<Keys>, tracer: Arc<Tracer>, grace: Duration) -> Self {
        let (sender, printed) = watch::channel(());
        let machine = keys.machine();
        machine.console().on_output(Box::new(move || {
            sender.send_replace(());
        }));
        Self {
            name: machine.description().name,
            keys,
            tracer,
            grace,
            started_at: SystemTime::now(),
            printed,
            ending: watch::Sender::new(false),
            decoder: None,
        }
    }

    /// Returns the name that requests use.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a receiver that becomes true when the guest's streams must end.
    pub(super) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Waits until the guest has ended or is removed.
    pub(super) async fn ended(&self) {
        let mut printed = self.printed.clone();
        let mut ending = self.ending();
        let ended = async {
            loop {
                printed.mark_unchanged();
                // The console's listener owns the sender and lives as long as the guest.
                if self.keys.machine().has_ended() || printed.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = ended => {}
            () = wait_for_end(&mut ending) => {}
        }
    }
}

/// The reason why a guest cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The name is in use.
    #[error("a guest named {0:?} is served already; give this one another name")]
    NameTaken(String),
    /// The name is empty, which in requests means "the only guest".
    #[error("the guest has no name; give it one")]
    NoName,
    /// The endpoint is shutting down.
    #[error("guest {0:?} cannot be served: the endpoint ends")]
    Ending(String),
}

/// The guests of an endpoint, by name. Clones share them. Guests can be added and removed at any
/// time.
#[derive(Clone, Default)]
pub struct Guests {
    shared: Arc<RwLock<Directory>>,
}

#[derive(Default)]
struct Directory {
    by_name: BTreeMap<String, Arc<ServedGuest>>,
    ending: bool,
}

impl Guests {
    /// Adds a guest.
    ///
    /// # Errors
    /// [`AddError`].
    pub fn add(&self, guest: ServedGuest) -> Result<(), AddError> {
        use std::collections::btree_map::Entry;
        if guest.name.is_empty() {
            return Err(AddError::NoName);
        }
        let mut directory = self.write();
        if directory.ending {
            return Err(AddError::Ending(guest.name));
        }
        match directory.by_name.entry(guest.name.clone()) {
            Entry::Occupied(taken) => Err(AddError::NameTaken(taken.key().clone())),
            Entry::Vacant(free) => {
                free.insert(Arc::new(guest));
                Ok(())
            }
        }
    }

    /// Removes a guest. Its streams end with UNAVAILABLE, and calls in progress are answered.
    /// Returns false if no guest has this name.
    pub fn remove(&self, name: &str) -> bool {
        let removed = self.write().by_name.remove(name);
        if let Some(guest) = &removed {
            guest.ending.send_replace(true);
        }
        removed.is_some()
    }

    /// Ends the streams of all guests and refuses new guests.
    pub(super) fn end(&self) {
        let mut directory = self.write();
        directory.ending = true;
        for guest in directory.by_name.values() {
            guest.ending.send_replace(true);
        }
    }

    /// Returns the guest with this name, or the only guest if `name` is empty. Returns `None` if
    /// there is not exactly one.
    pub(super) fn find(&self, name: &str) -> Option<Arc<ServedGuest>> {
        let directory = self.read();
        match name {
            "" if directory.by_name.len() == 1 => directory.by_name.values().next().cloned(),
            name => directory.by_name.get(name).cloned(),
        }
    }

    /// Returns all guests, ordered by name.
    pub(super) fn all(&self) -> Vec<Arc<ServedGuest>> {
        self.read().by_name.values().cloned().collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Directory> {
        // Each change is one insertion, removal or assignment, so a panic leaves no partial change.
        self.shared.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Directory> {
        self.shared.write().unwrap_or_else(PoisonError::into_inner)
    }
}
