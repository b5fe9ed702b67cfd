// SPDX-License-Identifier: Apache-2.0
//! Follows the log in the memory of a guest, also across reboots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::kernel_memory::KernelMemory;
use patchbay_observe::log::{Batch, Follower, Record, Start, Summary, Terms, newest};
use patchbay_observe::state::State;
use patchbay_observe::tasks::Task;
use patchbay_proto::KERNEL_REPORTS;

use crate::keys::registry::{KernelLog, Look};
use crate::keys::{Keys, KeysError};

/// The maximum number of records that one poll returns.
const MAX_RECORDS: usize = 512;
/// The number of bytes of text after which a poll ends.
const MAX_BYTES: usize = 256 << 10;
/// Time without a record after which the reader searches for the running kernel again. If a kernel
/// starts another without a reset (kexec), the log of the old kernel stays in memory unchanged.
const QUIET: Duration = Duration::from_secs(10);
/// Time between two attempts to find the running kernel.
const REST: Duration = Duration::from_millis(500);
/// Time after which the reader skips an unfinished record and continues with the later ones.
const PATIENCE: Duration = Duration::from_secs(1);

/// A log and the kernel memory that contains it.
#[derive(Debug)]
pub struct Place {
    log: KernelLog,
    memory: KernelMemory,
}

/// The details of a kernel that take longer to read than the words of its state.
#[derive(Debug, Default)]
pub struct Details {
    /// The errors that the log reports, and its losses.
    pub log: Summary,
    /// The tasks that the CPUs run.
    pub tasks: Vec<Task>,
    /// The names of the tracefs instances, without the top level.
    pub instances: Vec<String>,
}

impl Place {
    /// Finds the log of the running kernel. This may take as long as a discovery.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason.
    pub fn find(keys: &Keys) -> Result<Self, KeysError> {
        let found = keys.registry().find_log(Look::Known);
        let log = found.map_err(|why| KeysError::NotRegistered {
            why: format!("the log of the guest's kernel is not found in its memory: {why}"),
        })?;
        Self::of(keys, log)
    }

    /// Does the same as [`Place::find`] on a thread that may block.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason, and [`KeysError::Internal`] if the search
    /// panics.
    pub async fn search(keys: &Arc<Keys>) -> Result<Self, KeysError> {
        Self::search_for(keys, |place| place).await
    }

    /// Finds the log as [`Place::find`] does, and reads it, on a thread that may block.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`] with the reason, and [`KeysError::Internal`] if the search or
    /// `read` panics.
    pub async fn search_for<T: Send + 'static>(
        keys: &Arc<Keys>,
        read: impl FnOnce(Self) -> T + Send + 'static,
    ) -> Result<T, KeysError> {
        let keys = Arc::clone(keys);
        let found = tokio::task::spawn_blocking(move || Self::find(&keys).map(read)).await;
        found.map_err(|error| KeysError::Internal {
            message: format!("the kernel's log cannot be read: {error}; report it, it is a bug"),
        })?
    }

    /// Reads the state of the kernel whose log was found last. Does not search for a log.
    pub fn state(keys: &Keys) -> Option<State> {
        let place = Self::of(keys, keys.registry().known_log()?).ok()?;
        Some(place.log.log.state.read(&place.memory))
    }

    /// Reads the details of the kernel. Those that cannot be read are empty.
    pub fn details(&self) -> Details {
        let log = &self.log.log;
        let tasks = log.tasks.as_ref().ok();
        let names = log.trace.as_ref().ok();
        let names = names.and_then(|trace| trace.names(&self.memory));
        let instances = names.unwrap_or_default().into_iter();
        // The top level has no name.
        let instances = instances.filter(|name| !name.is_empty());
        let summary = Summary::read(&self.memory, &log.source, KERNEL_REPORTS);
        Details {
            log: summary.unwrap_or_default(),
            tasks: tasks
                .and_then(|tasks| tasks.read(&self.memory))
                .unwrap_or_default(),
            instances: instances
                .map(|name| match String::from_utf8(name) {
                    Ok(name) => name,
                    Err(error) => error.as_bytes().escape_ascii().to_string(),
                })
                .collect(),
        }
    }

    fn of(keys: &Keys, log: KernelLog) -> Result<Self, KeysError> {
        let memory = KernelMemory::new(keys.ram()?, log.log.page_table);
        Ok(Self { log, memory })
    }

    /// Returns the newest whole record.
    pub fn newest(&self) -> Option<Record> {
        newest(&self.memory, &self.log.log.source)
    }

    fn follower(&self, start: Start) -> Follower {
        Follower::new(self.log.log.source.clone(), start)
    }
}

/// A reader of the log. Its methods usually block for microseconds, and at most for the duration of
/// a discovery.
pub struct Reader {
    keys: Arc<Keys>,
    place: Place,
    follower: Follower,
    /// The guest was reset, and its kernel is not known yet.
    is_reset: bool,
    /// The time of the last record or of the last search for the running kernel.
    confirmed: Instant,
    /// The time since which later records wait for an unfinished one.
    waits: Option<Instant>,
}

impl Reader {
    /// Creates a reader that begins at `start`.
    ///
    /// # Errors
    /// The log cannot be read where it was found.
    pub fn begin(keys: Arc<Keys>, place: Place, start: Start) -> Result<Self, KeysError> {
        let mut follower = place.follower(start);
        let none = Terms {
            records: 0,
            bytes: 0,
            unfinished: false,
        };
        // With `Start::End` this poll fixes the position.
        if follower.poll(&place.memory, none).unreadable {
            return Err(KeysError::NotRegistered {
                why: "the log of the guest's kernel cannot be read where it was found: the kernel boots, or another one runs; try again".to_owned(),
            });
        }
        // A new follower counts losses from its own first poll on.
        let follower = match start {
            Start::End => follower,
            start => place.follower(start),
        };
        Ok(Self {
            keys,
            place,
            follower,
            is_reset: false,
            confirmed: Instant::now(),
            waits: None,
        })
    }

    /// Returns the sequence number of the next record, once it is known.
    pub fn next_seq(&self) -> Option<u64> {
        self.follower.next_seq()
    }

    /// Returns the records since the last poll. With `unfinished`, also those that a writer may
    /// still append to.
    pub fn poll(&mut self, unfinished: bool) -> Batch {
        let registry = self.keys.registry();
        self.is_reset |= !registry.is_current_log(&self.place.log);
        let mut restarted = false;
        if self.is_reset {
            if !self.may_look(REST) || !self.look_again(Look::Search) {
                return Batch {
                    unreadable: true,
                    ..Batch::default()
                };
            }
            restarted = true;
        }
        let stuck = self.waits.is_some_and(|since| since.elapsed() > PATIENCE);
        let terms = Terms {
            records: MAX_RECORDS,
            bytes: MAX_BYTES,
            unfinished: unfinished || stuck,
        };
        let mut batch = self.follower.poll(&self.place.memory, terms);
        batch.restarted |= restarted;
        let idle = batch.records.is_empty();
        match (batch.waits && idle, self.waits) {
            (true, None) => self.waits = Some(Instant::now()),
            (true, Some(_)) => {}
            (false, _) => self.waits = None,
        }
        if !idle {
            self.confirmed = Instant::now();
        } else {
            let (rest, look) = match batch.unreadable {
                true => (REST, Look::Search),
                false => (QUIET, Look::Confirm),
            };
            // Records of another kernel come with the next poll.
            batch.restarted |= self.may_look(rest) && self.look_again(look);
        }
        batch
    }

    fn may_look(&self, rest: Duration) -> bool {
        self.confirmed.elapsed() >= rest
    }

    /// Searches for the running kernel. Returns true if another kernel runs. Its log is then read
    /// from the beginning.
    fn look_again(&mut self, look: Look) -> bool {
        self.confirmed = Instant::now();
        let found = self.keys.registry().find_log(look);
        let log = match found {
            Ok(log) if log != self.place.log => log,
            Ok(_) => return false,
            Err(why) => {
                tracing::debug!(why, "the kernel's log is not found");
                return false;
            }
        };
        let Ok(place) = Place::of(&self.keys, log) else {
            return false;
        };
        self.follower = place.follower(Start::Oldest);
        self.place = place;
        self.is_reset = false;
        true
    }
}
