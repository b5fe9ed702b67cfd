// SPDX-License-Identifier: Apache-2.0
//! Tracks the monitors of the host, and the guests that they serve.
//!
//! ```text
//!  run directories ──inotify──▶ Watch ──▶ one task per socket ──▶ Directory ──▶ proxy
//!                                             │    ▲
//!                                 ListGuests, │    │ the connection ends: connect again,
//!                                 Health.Watch▼    │ until the socket's file is gone
//!                                          monitor
//! ```
//!
//! A monitor is independent of this process: it keeps running when this process ends, and a new
//! process finds it by its socket.

mod connect;
mod monitor;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

pub use patchbay_supervisor::{RunDirs, default_run_dirs};
use patchbay_supervisor::{SETTLE, Watch, is_of_process};
use tokio::sync::watch;

pub use self::monitor::Monitor;

/// The maximum number of guests that one host serves. Further guests are left out and logged.
pub const MAX_GUESTS: usize = 4096;
/// The maximum number of sockets that are examined.
pub const MAX_MONITORS: usize = 4096;

/// A guest and its monitor.
#[derive(Clone, Debug)]
pub struct HostedGuest {
    /// The guest's name.
    pub name: String,
    /// The monitor that serves it.
    pub monitor: Arc<Monitor>,
}

/// All guests that are served, by name.
#[derive(Clone, Debug)]
pub struct Directory {
    guests: Arc<RwLock<BTreeMap<String, HostedGuest>>>,
    changes: watch::Sender<u64>,
}

impl Default for Directory {
    fn default() -> Self {
        Self {
            guests: Arc::default(),
            changes: watch::Sender::new(0),
        }
    }
}

impl Directory {
    /// Returns the guest with that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<HostedGuest> {
        self.read().get(name).cloned()
    }

    /// Returns the name of a guest that the monitor with this socket serves.
    #[must_use]
    pub fn name_at(&self, socket: &Path) -> Option<String> {
        let guests = self.read();
        let mut all = guests.values();
        let guest = all.find(|guest| guest.monitor.path() == socket)?;
        Some(guest.name.clone())
    }

    /// Returns the only guest; `None` if there are several or none.
    #[must_use]
    pub fn only(&self) -> Option<HostedGuest> {
        let guests = self.read();
        let mut all = guests.values();
        match (all.next(), all.next()) {
            (Some(guest), None) => Some(guest.clone()),
            _ => None,
        }
    }

    /// Returns all guests in name order.
    #[must_use]
    pub fn all(&self) -> Vec<HostedGuest> {
        self.read().values().cloned().collect()
    }

    /// Returns a receiver that reports changes of the directory since it was made or last waited.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Sets the guests of a monitor. A name stays with the monitor that had it first, with one
    /// exception: if that monitor's guest was found by its process, whose command line chooses the
    /// name, and this monitor's guest was not, the name goes to this monitor.
    fn set(&self, monitor: &Arc<Monitor>, names: Vec<String>) {
        let mut guests = self.guests.write().unwrap_or_else(PoisonError::into_inner);
        let before: Vec<String> = guests
            .values()
            .filter(|guest| Arc::ptr_eq(&guest.monitor, monitor))
            .map(|guest| guest.name.clone())
            .collect();
        let mut changed = false;
        for name in before {
            if !names.contains(&name) {
                tracing::info!(guest = name, monitor = %monitor.path().display(), "guest gone");
                guests.remove(&name);
                changed = true;
            }
        }
        for name in names {
            match guests.get(&name) {
                Some(other) if Arc::ptr_eq(&other.monitor, monitor) => {}
                Some(other)
                    if is_of_process(other.monitor.path()) && !is_of_process(monitor.path()) =>
                {
                    tracing::warn!(
                        guest = name,
                        monitor = %monitor.path().display(),
                        instead_of = %other.monitor.path().display(),
                        "guest found; the guest of a process that was named so is left out"
                    );
                    let monitor = Arc::clone(monitor);
                    guests.insert(name.clone(), HostedGuest { name, monitor });
                    changed = true;
                }
                Some(other) => tracing::error!(
                    guest = name,
                    monitor = %monitor.path().display(),
                    serves = %other.monitor.path().display(),
                    "another monitor serves a guest of that name; give one of them another name"
                ),
                None if guests.len() >= MAX_GUESTS => tracing::error!(
                    guest = name,
                    "a host serves at most {MAX_GUESTS} guests; this one is left out"
                ),
                None => {
                    tracing::info!(guest = name, monitor = %monitor.path().display(), "guest found");
                    let monitor = Arc::clone(monitor);
                    guests.insert(name.clone(), HostedGuest { name, monitor });
                    changed = true;
                }
            }
        }
        drop(guests);
        if changed {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, HostedGuest>> {
        self.guests.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Finds monitors and updates `directory` until the future is dropped. `own` is the host's own
/// socket, which may be in a run directory.
pub async fn run(directory: Directory, dirs: RunDirs, own: Option<PathBuf>) {
    let mut tasks: BTreeMap<PathBuf, tokio::task::JoinHandle<()>> = BTreeMap::new();
    let mut watch = Watch::new(dirs);
    loop {
        let mut found = watch.scan();
        found.retain(|path| Some(path) != own.as_ref());
        if found.len() > MAX_MONITORS {
            tracing::error!(
                "{} sockets are in the run directories; only {MAX_MONITORS} are used",
                found.len()
            );
        }
        // A task ends when its socket's file is gone.
        tasks.retain(|_, task| !task.is_finished());
        for path in found.into_iter().take(MAX_MONITORS) {
            tasks.entry(path.clone()).or_insert_with(|| {
                let directory = directory.clone();
                tokio::spawn(monitor::keep(path, directory, watch.changes()))
            });
        }
        watch.changed().await;
        // The delay bounds the work, even if a process writes to a run directory all the time.
        tokio::time::sleep(SETTLE).await;
    }
}
