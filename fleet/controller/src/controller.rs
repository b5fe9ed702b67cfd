// SPDX-License-Identifier: Apache-2.0
//! Runs a replica of the controller. It waits to be elected leader and then runs every rollout in
//! the store.

mod upkeep;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::authority::{Authority, Refused, finish};
use crate::gates::commands::{Commands, NotUsable};
use crate::hosts::{HostConfig, Hosts, NameTaken};
use crate::inventory::Reach;
use crate::leader::Leader;
use crate::metrics::Metrics;
use crate::rollout::{Phase, Rollout};
use crate::runner::{Context, Ended, NotDeleted, Running, now};
use crate::sight::Sight;
use crate::spec::{Spec, SpecError};
use crate::storage::{
    Archive, Keys, Leftover, Loaded, RecordKeys, TooLarge, Unreadable, deletions,
};
use crate::store::{Fence, Store, StoreError, commit_all};
use crate::webhooks::{self, Webhook};
use crate::{inventory, leader, plan, runner, storage};

/// The delay before the next candidacy after an error of the store.
const RETRY: Duration = Duration::from_secs(1);
const MAX_NAME_BYTES: usize = 64;

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

/// The reason why a plan is refused.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("{0}")]
    Spec(#[from] SpecError),
    /// The policy does not allow the planner to change these guests and keys. The reason may name
    /// guests that the planner may not see.
    #[error("{0}")]
    Denied(String),
    #[error("{0:?} is no name of a rollout; give 1 to 64 letters, digits and hyphens")]
    Name(String),
    #[error(
        "rollout {0} exists with another spec; give this one another name, or compare them with \
         `rollout diff`"
    )]
    NameTaken(String),
    #[error(
        "rollout {name} has ended and is {phase}; delete it with `rollout delete {name}`, or give \
         the new one another --name"
    )]
    Ended { name: String, phase: &'static str },
    #[error("rollout {name} exists and cannot be read: {why}; give this one another name")]
    Unreadable { name: String, why: String },
    #[error("rollout {other} changes {what} and has not ended; wait for it, or abort it")]
    Overlap { other: String, what: String },
    #[error(
        "rollout {other}, which is out of service, changes {what}; wait until it is in service \
         again, or delete it with `rollout delete {other} --unreadable`"
    )]
    Held { other: String, what: String },
    #[error(
        "rollout {name} is out of service, and the keys that it changes are not known: {why}; \
         repair it, or delete it with `rollout delete {name} --unreadable`"
    )]
    KeysUnknown { name: String, why: String },
    #[error("the spec selects no guest that can be changed: {0}")]
    Nothing(String),
    #[error("{0}")]
    Gate(#[from] NotUsable),
    #[error("{0}")]
    TooLarge(#[from] TooLarge),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("{0}")]
    Audit(Refused),
    #[error("this replica does not lead any more")]
    Deposed,
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
        })
    }

    /// Makes the replica deliver events to these webhooks while it leads.
    #[must_use]
    pub fn delivering_to(mut self, webhooks: Vec<Webhook>) -> Self {
        self.webhooks = webhooks;
        self
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
        let ttl = config.lease_ttl;
        let campaign = leader::campaign(&self.store, &config.replica, ttl, &self.leader);
        let mut term = tokio::select! {
            term = campaign => term?,
            error = &mut ended => return Ok(error),
        };
        let hosts = Hosts::new(&config.hosts);
        let hosts = hosts.map_err(|error| StoreError::Invalid(error.to_string()))?;
        let store = self.store.as_ref();
        let fence = term.fence.clone();
        let read = async {
            let registry = inventory::list(store, &hosts, &config.reach).await?;
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

    /// Waits until no replica leads, and signs the records that are not authenticated. Returns
    /// their number and the rollouts that cannot be read, whose records are left as they are.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn adopt(&self) -> Result<(usize, Vec<Unreadable>), StoreError> {
        let config = &self.config;
        let ttl = config.lease_ttl;
        let campaign = leader::campaign(&self.store, &config.replica, ttl, &self.leader);
        let mut term = campaign.await?;
        let (fence, keys) = (term.fence.clone(), config.keys.clone().adopting());
        let loaded = tokio::select! {
            error = term.keep() => Err(error),
            loaded = self.load(&fence, &keys) => loaded,
        };
        term.resign().await;
        loaded.map(|loaded| (loaded.resigned.len(), loaded.unreadable))
    }

    /// Loads the rollouts, and puts their records in order.
    async fn load(&self, fence: &Fence, keys: &RecordKeys) -> Result<Loaded, StoreError> {
        let store = self.store.as_ref();
        let mut loaded = storage::load(store, keys).await?;
        for leftover in std::mem::take(&mut loaded.leftovers) {
            self.sweep(leftover, fence).await?;
        }
        match commit_all(store, fence, &loaded.resigned).await {
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

    /// Plans a rollout and stores it. A repeat with the same spec returns the stored rollout.
    ///
    /// # Errors
    /// [`PlanError`].
    pub async fn plan(
        self: &Arc<Self>,
        name: &str,
        text: &str,
        principal: &str,
    ) -> Result<Arc<Running>, PlanError> {
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_letter) {
            return Err(PlanError::Name(name.to_owned()));
        }
        let spec = Spec::parse(text)?;
        let may_operate = self.authority.may_operate(principal);
        may_operate.map_err(PlanError::Denied)?;
        let may_plan = |rollout: &Rollout| {
            let may_plan = self.authority.may_plan(principal, rollout);
            may_plan.map_err(PlanError::Denied)
        };
        let planning = Arc::clone(&self.planning).lock_owned().await;
        if let Some(existing) = self.rollout(name) {
            let spec_digest = plan::spec_digest(text);
            let rollout = existing.rollout();
            may_plan(&rollout)?;
            let (name, phase) = (name.to_owned(), rollout.header().phase);
            return if matches!(phase, Phase::Reverting(_) | Phase::Ended(_)) {
                let phase = phase.name();
                Err(PlanError::Ended { name, phase })
            } else if rollout.header().spec_digest == spec_digest {
                Ok(Arc::clone(&existing))
            } else {
                Err(PlanError::NameTaken(name))
            };
        }
        if let Some(why) = self.unreadable().remove(name) {
            let name = name.to_owned();
            return Err(PlanError::Unreadable { name, why });
        }
        // No guest needs to be asked for a plan that is refused for this.
        self.retired()?;
        self.context.commands.check(&spec).await?;
        let rollout = plan::plan(self.hosts(), name, text, &spec, principal, now()).await;
        if rollout.header().waves.is_empty() {
            let policy = self.authority.policy().current();
            let hidden = Sight::new(&policy, principal).hidden(&rollout);
            return Err(PlanError::Nothing(hidden.shown(&nothing(&rollout))));
        }
        let rule = may_plan(&rollout)?;
        // A rollout that is retired meanwhile is among the retired ones before it leaves these.
        let mut active = self.rollouts();
        active.retain(|other| other.rollout().header().phase.is_active());
        let overlap = |others: &[Arc<Running>]| {
            others.iter().find_map(|other| {
                let other = other.rollout();
                let what = plan::overlap(rollout.members(), other.members())?;
                Some((other.header().name.clone(), what))
            })
        };
        let retired = self.retired()?;
        if let Some((other, what)) = overlap(&active) {
            return Err(PlanError::Overlap { other, what });
        }
        if let Some((other, what)) = overlap(&retired) {
            return Err(PlanError::Held { other, what });
        }
        let request = serde_json::json!({ "rollout": name, "digest": rollout.header().digest });
        let trace_id = rollout.header().trace_id.clone();
        let intent = self
            .authority
            .intend(principal, "Plan", &rule, &request, &trace_id);
        let intent = intent.await.map_err(PlanError::Audit)?;
        let (leadership, text) = (Arc::clone(self), text.to_owned());
        // If the client disconnects, what is stored must still be started.
        let kept = tokio::spawn(async move {
            let _planning = planning;
            leadership.keep(rollout, spec, &text).await
        });
        let kept = kept.await.unwrap_or(Err(PlanError::Deposed));
        finish(intent, kept.as_ref().map(|_| ""));
        kept
    }

    /// Stores a rollout and has it started.
    async fn keep(
        &self,
        mut rollout: Rollout,
        spec: Spec,
        text: &str,
    ) -> Result<Arc<Running>, PlanError> {
        let writes = storage::planned(&mut rollout, text)?;
        let writes = self.context.keys.signed(&rollout.header().run, writes);
        let (store, fence) = (self.context.store.as_ref(), &self.context.fence);
        // An earlier plan may have been stored although its last answer was lost. While its header
        // existed, the records of both would be taken for one rollout.
        let earlier = storage::header_deletion(&rollout.header().name);
        commit_all(store, fence, &[earlier]).await?;
        commit_all(store, fence, &writes).await?;
        let (reply, running) = oneshot::channel();
        let start = Start {
            rollout,
            spec,
            reply,
        };
        let sent = self.starts.send(start).await;
        sent.map_err(|_| PlanError::Deposed)?;
        running.await.map_err(|_| PlanError::Deposed)
    }
}

// No code panics while it holds one of these locks.
fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the reason why a plan changes nothing, which is the reason of its first guest.
fn nothing(rollout: &Rollout) -> String {
    use crate::rollout::State;
    let first = rollout.members().first();
    match first.map(|member| (&member.guest, &member.state)) {
        Some((guest, State::Skipped { why })) => format!("{guest}: {why}"),
        _ if rollout.header().message.is_empty() => "no guest matches the selector".to_owned(),
        _ => rollout.header().message.clone(),
    }
}
