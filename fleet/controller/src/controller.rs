// SPDX-License-Identifier: Apache-2.0
//! Runs a replica of the controller. It waits to be elected leader and then runs every rollout in
//! the store.

mod planning;
mod upkeep;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::JoinSet;

pub use self::planning::PlanError;
use crate::authority::Authority;
use crate::gates::commands::Commands;
use crate::hosts::{HostConfig, Hosts, NameTaken};
use crate::inventory::Reach;
use crate::leader::Leader;
use crate::metrics::Metrics;
use crate::rollout::Rollout;
use crate::runner::{Context, Ended, NotDeleted, Running};
use crate::spec::Spec;
use crate::storage::{Archive, Keys, Leftover, Loaded, RecordKeys, Unreadable, deletions};
use crate::store::{Fence, Store, StoreError, commit_all};
use crate::webhooks::{self, Webhook};
use crate::{inventory, leader, runner, storage};

/// The delay before the next candidacy after an error of the store.
const RETRY: Duration = Duration::from_secs(1);

pub struct Config {
    /// The record that this replica stores while it leads.
    pub replica: Leader,
    pub authority: Authority,
    pub hosts: Vec<HostConfig>,
    /// The settings by which hosts of the registry are reached.
    pub reach: Reach,
    /// The time without a renewal after which another replica leads.
    pub lease_ttl: Duration,
    pub archive: Archive,
    /// The commands of gates.
    pub commands: Commands,
    /// The keys by which records in the store are authenticated.
    pub keys: RecordKeys,
}

/// A replica of the controller; see the module's documentation.
pub struct Controller {
    config: Config,
    store: Arc<dyn Store>,
    leadership: watch::Sender<Option<Arc<Leadership>>>,
    /// The leader according to the store, while this replica does not lead.
    leader: watch::Sender<Option<Leader>>,
    /// True once this replica has been told to end.
    ends: watch::Sender<bool>,
    changes: watch::Sender<u64>,
    metrics: Metrics,
    webhooks: Vec<Webhook>,
    /// No other replica can use the store.
    is_alone: bool,
}

/// The state that only the leader has.
pub struct Leadership {
    context: Context,
    authority: Authority,
    rollouts: RwLock<BTreeMap<String, Arc<Running>>>,
    /// The rollouts that are out of service.
    unreadable: RwLock<BTreeMap<String, OutOfService>>,
    /// A lock that is held from the check for overlaps until the rollout is stored.
    planning: Arc<Mutex<()>>,
    starts: mpsc::Sender<Start>,
}

struct OutOfService {
    why: String,
    held: Held,
}

/// The keys that a rollout that is out of service keeps other rollouts from changing.
enum Held {
    /// The keys of a rollout that was in service. Its last change may not be stored, so it holds
    /// them in every phase.
    Rollout(Arc<Running>),
    /// The records that name the keys cannot be read.
    Unknown,
    Nothing,
}

/// A planned rollout whose runner must be started.
struct Start {
    rollout: Rollout,
    spec: Spec,
    reply: oneshot::Sender<Arc<Running>>,
}

impl Controller {
    /// Creates a replica that does not run yet.
    ///
    /// # Errors
    /// [`NameTaken`].
    pub fn new(config: Config, store: Arc<dyn Store>) -> Result<Self, NameTaken> {
        Hosts::new(&config.hosts)?;
        Ok(Self {
            config,
            store,
            leadership: watch::Sender::new(None),
            leader: watch::Sender::new(None),
            ends: watch::Sender::new(false),
            changes: watch::Sender::new(0),
            metrics: Metrics::default(),
            webhooks: vec![],
            is_alone: false,
        })
    }

    /// Makes the replica deliver events to these webhooks while it leads.
    #[must_use]
    pub fn delivering_to(mut self, webhooks: Vec<Webhook>) -> Self {
        self.webhooks = webhooks;
        self
    }

    /// Declares that no other replica can use the store.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// Returns why a call is refused while this replica does not lead, and the leader's address if
    /// it is known.
    pub fn why_not_leading(&self) -> (String, Option<String>) {
        if self.is_alone {
            let why =
                "this controller has just started and does not lead yet; try again".to_owned();
            return (why, None);
        }
        match self.leader_address() {
            Some(address) => {
                let why = format!("this replica does not lead; the leader is at {address}");
                (why, Some(address))
            }
            None => {
                let why = "this replica does not lead; try again, or try another replica";
                (why.to_owned(), None)
            }
        }
    }

    /// Returns the leader's state; `None` while this replica does not lead.
    pub fn leadership(&self) -> Option<Arc<Leadership>> {
        self.leadership.borrow().clone()
    }

    /// Returns a counter that advances with every saved change of any rollout, and when this
    /// replica begins or ceases to lead.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub fn authority(&self) -> &Authority {
        &self.config.authority
    }

    /// Returns the address at which the leader serves the API; `None` if no other replica leads or
    /// the leader serves only its socket.
    pub fn leader_address(&self) -> Option<String> {
        let leader = self.leader.borrow();
        let address = leader.as_ref()?.address.clone()?;
        // If this replica was killed while it led and has been restarted, the record may be its
        // own.
        (Some(&address) != self.config.replica.address.as_ref()).then_some(address)
    }

    /// Ends the replica. It resigns, so that another one can lead at once, and then
    /// [`Controller::run`] returns.
    pub fn end(&self) {
        self.ends.send_replace(true);
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Waits until this replica leads.
    pub async fn lead(&self) -> Arc<Leadership> {
        let mut leadership = self.leadership.subscribe();
        loop {
            if let Some(leads) = leadership.borrow_and_update().clone() {
                return leads;
            }
            // `self` owns the sender, so this cannot fail.
            let _ = leadership.changed().await;
        }
    }

    /// Campaigns for the leadership and leads, in a loop, until [`Controller::end`]. Dropping the
    /// future ends the replica without a resignation.
    pub async fn run(&self) {
        let mut ends = self.ends.subscribe();
        loop {
            let error = match self.term().await {
                Ok(error) | Err(error) => error,
            };
            self.leadership.send_replace(None);
            self.changed();
            if *self.ends.borrow() {
                return;
            }
            tracing::warn!("this replica does not lead: {error}");
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                _ = ends.wait_for(|ends| *ends) => return,
            }
        }
    }

    /// Runs one term, until an error ends it.
    async fn term(&self) -> Result<StoreError, StoreError> {
        let config = &self.config;
        let mut ends = self.ends.subscribe();
        let mut ended = std::pin::pin!(async {
            // `self` owns the sender, so this cannot fail.
            let _ = ends.wait_for(|ends| *ends).await;
            StoreError::Unavailable("this replica is shutting down".to_owned())
        });
        let mut term = tokio::select! {
            term = self.campaign() => term?,
            error = &mut ended => return Ok(error),
        };
        let hosts = Hosts::new(&config.hosts);
        let hosts = hosts.map_err(|error| StoreError::Invalid(error.to_string()))?;
        let store = self.store.as_ref();
        let fence = term.fence.clone();
        let read = async {
            let registry = inventory::list(store, &hosts, &config.reach, 0).await?;
            Ok::<_, StoreError>((registry, self.load(&fence, &config.keys).await?))
        };
        // Reading many rollouts may take longer than the lease lasts.
        let read = tokio::select! {
            error = term.keep() => Err(error),
            error = &mut ended => Err(error),
            read = read => read,
        };
        let (registry, loaded) = match read {
            Ok(read) => read,
            Err(error) => {
                term.resign().await;
                return Err(error);
            }
        };
        let context = Context {
            store: Arc::clone(&self.store),
            fence: term.fence.clone(),
            hosts,
            changes: self.changes.clone(),
            metrics: self.metrics.clone(),
            archive: config.archive.clone(),
            commands: config.commands.clone(),
            keys: config.keys.clone(),
        };
        let mut tasks = JoinSet::new();
        let mut rollouts = BTreeMap::new();
        for (rollout, spec) in loaded.rollouts {
            let name = rollout.header().name.clone();
            let running = Running::start(rollout, spec, context.clone(), &mut tasks);
            rollouts.insert(name, running);
        }
        let (starts, mut started) = mpsc::channel::<Start>(1);
        let leadership = Arc::new(Leadership {
            context: context.clone(),
            authority: config.authority.clone(),
            rollouts: RwLock::new(rollouts),
            unreadable: RwLock::default(),
            planning: Arc::default(),
            starts,
        });
        for Unreadable { name, why } in loaded.unreadable {
            let held = match loaded.over.contains(&name) {
                true => Held::Nothing,
                false => Held::Unknown,
            };
            leadership.retire(&name, why, held);
        }
        self.leadership.send_replace(Some(Arc::clone(&leadership)));
        self.changed();
        self.metrics.term();
        tracing::info!("replica {} leads", config.replica.name);
        let late = upkeep::change_late_guests(&leadership);
        let archive = upkeep::archive_ended(&leadership);
        let deliver = webhooks::deliver(&leadership, &self.webhooks, &self.metrics);
        let follow = inventory::follow(store, &context.hosts, &config.reach, registry);
        let error = {
            let mut late = std::pin::pin!(late);
            let mut archive = std::pin::pin!(archive);
            let mut follow = std::pin::pin!(follow);
            let mut deliver = std::pin::pin!(deliver);
            let mut keep = std::pin::pin!(term.keep());
            loop {
                tokio::select! {
                    error = &mut keep => break error,
                    error = &mut ended => break error,
                    () = &mut follow => {}
                    () = &mut late => {}
                    () = &mut archive => {}
                    () = &mut deliver => {}
                    Some(ended) = tasks.join_next() => match ended {
                        Ok(Ended::Term(error)) => break error,
                        Ok(Ended::Refused { name, why }) => {
                            leadership.retire_running(&name, why.to_string());
                        }
                        Ok(Ended::Deleted { name, archived, reply }) => {
                            leadership.remove(&name);
                            // The client may have disconnected.
                            let _ = reply.send(Ok(archived));
                        }
                        Err(error) => leadership.retire_failed(&error),
                    },
                    Some(Start { rollout, spec, reply }) = started.recv() => {
                        let running = Running::start(rollout, spec, context.clone(), &mut tasks);
                        leadership.insert(&running);
                        // The task that stored it may have ended.
                        let _ = reply.send(running);
                    }
                }
            }
        };
        // Calls in progress end here, before another replica can repeat them.
        tasks.shutdown().await;
        term.resign().await;
        Ok(error)
    }

    /// Waits until this replica leads.
    async fn campaign(&self) -> Result<leader::Term, StoreError> {
        let config = &self.config;
        let ttl = config.lease_ttl;
        leader::campaign(&self.store, &config.replica, ttl, &self.leader).await
    }

    /// Waits until no replica leads, and signs the records that are not authenticated. Returns
    /// their number and the rollouts that cannot be read, whose records are left as they are.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn adopt(&self) -> Result<(usize, Vec<Unreadable>), StoreError> {
        let config = &self.config;
        let mut term = self.campaign().await?;
        let (fence, keys) = (term.fence.clone(), config.keys.clone().adopting());
        let loaded = tokio::select! {
            error = term.keep() => Err(error),
            loaded = self.load(&fence, &keys) => loaded,
        };
        term.resign().await;
        loaded.map(|loaded| (loaded.signed_again.len(), loaded.unreadable))
    }

    /// Loads the rollouts, and puts their records in order.
    async fn load(&self, fence: &Fence, keys: &RecordKeys) -> Result<Loaded, StoreError> {
        let store = self.store.as_ref();
        let mut loaded = storage::load(store, keys).await?;
        for leftover in std::mem::take(&mut loaded.leftovers) {
            self.sweep(leftover, fence).await?;
        }
        match commit_all(store, fence, &loaded.signed_again).await {
            Err(error @ StoreError::TooLarge { .. }) if !keys.adopts() => {
                tracing::error!("the records cannot be signed with the first key: {error}");
                Ok(loaded)
            }
            committed => committed.map(|()| loaded),
        }
    }

    /// Deletes what is left of a rollout, after it was written to a file. What cannot be written
    /// to a file is left in the store.
    async fn sweep(&self, leftover: Leftover, fence: &Fence) -> Result<(), StoreError> {
        let Leftover { name, entries } = leftover;
        let deletions = deletions(&entries);
        match self.config.archive.write(&name, entries).await {
            Ok(file) => {
                commit_all(self.store.as_ref(), fence, &deletions).await?;
                let file = file.display();
                tracing::warn!(
                    rollout = name,
                    "what was left of a rollout without a header is deleted, and kept in {file}"
                );
            }
            Err(why) => {
                self.metrics.archive_failed();
                tracing::error!(
                    rollout = name,
                    "what is left of a rollout without a header is not deleted: {why}"
                );
            }
        }
        Ok(())
    }
}

impl Leadership {
    pub fn hosts(&self) -> &Hosts {
        &self.context.hosts
    }

    /// Returns a counter that advances with every saved change of any rollout.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.context.changes.subscribe()
    }

    pub fn rollout(&self, name: &str) -> Option<Arc<Running>> {
        read(&self.rollouts).get(name).cloned()
    }

    pub fn rollouts(&self) -> Vec<Arc<Running>> {
        read(&self.rollouts).values().cloned().collect()
    }

    /// Returns the rollouts that are out of service, and the reasons.
    pub fn unreadable(&self) -> BTreeMap<String, String> {
        let unreadable = read(&self.unreadable);
        let reasons = unreadable.iter();
        reasons
            .map(|(name, one)| (name.clone(), one.why.clone()))
            .collect()
    }

    /// Returns the rollouts that are out of service and whose keys are known.
    ///
    /// # Errors
    /// [`PlanError::KeysUnknown`] if those of another one are not.
    fn retired(&self) -> Result<Vec<Arc<Running>>, PlanError> {
        let unreadable = read(&self.unreadable);
        let mut retired = Vec::new();
        for (name, one) in unreadable.iter() {
            match &one.held {
                Held::Rollout(running) => retired.push(Arc::clone(running)),
                Held::Unknown => {
                    let (name, why) = (name.clone(), one.why.clone());
                    return Err(PlanError::KeysUnknown { name, why });
                }
                Held::Nothing => {}
            }
        }
        Ok(retired)
    }

    /// Takes a rollout out of service, and lets the others go on.
    fn retire(&self, name: &str, why: String, held: Held) {
        tracing::error!(rollout = name, "a rollout is out of service: {why}");
        write(&self.unreadable).insert(name.to_owned(), OutOfService { why, held });
        self.remove(name);
    }

    /// Takes a rollout whose runner has ended out of service. It still holds its keys.
    fn retire_running(&self, name: &str, why: String) {
        let held = self.rollout(name).map_or(Held::Unknown, Held::Rollout);
        self.retire(name, why, held);
    }

    fn insert(&self, running: &Arc<Running>) {
        let name = running.rollout().header().name.clone();
        write(&self.rollouts).insert(name, Arc::clone(running));
        self.context.changes.send_modify(|changes| *changes += 1);
    }

    fn remove(&self, name: &str) {
        write(&self.rollouts).remove(name);
        self.context.changes.send_modify(|changes| *changes += 1);
    }

    /// Deletes a rollout that cannot be read from the store, and returns the file to which its
    /// records were written. Its guests stay as they are.
    ///
    /// # Errors
    /// [`NotDeleted`].
    pub async fn delete_unreadable(
        &self,
        name: &str,
        principal: &str,
    ) -> Result<PathBuf, NotDeleted> {
        // Another call may have deleted it, and then the name may have been planned again.
        let _planning = self.planning.lock().await;
        if !self.unreadable().contains_key(name) {
            return Err(NotDeleted::InService(name.to_owned()));
        }
        let archived = runner::delete(&self.context, name, Keys::All, principal).await?;
        write(&self.unreadable).remove(name);
        self.context.changes.send_modify(|changes| *changes += 1);
        Ok(archived)
    }

    /// Takes the rollout out of service whose runner has panicked.
    fn retire_failed(&self, error: &tokio::task::JoinError) {
        for running in self.rollouts() {
            if running.is_task(error.id()) {
                let name = running.rollout().header().name.clone();
                let why = format!("its runner failed: {error}; report this with the log");
                self.retire_running(&name, why);
            }
        }
    }
}

// No code panics while it holds one of these locks.
fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
