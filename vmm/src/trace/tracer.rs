// SPDX-License-Identifier: Apache-2.0
//! Arms, fires, parks and disarms.
//!
//! Arming goes
//!
//! ```text
//!   agent: stop recording if nothing fires ─▶ set filter, attach probe (key 0 → 1)
//!   host:  park all keys in one pause (1 → 0)
//!   agent: read the clock, record again
//! ```
//!
//! and events of the time between, which were recorded if something else fired, are passed over by
//! that clock: an armed event that was never fired tells nothing. Failing on the way undoes it.
//!
//! Changes exclude each other (`turn`); the book is locked for a look or a change, never across an
//! await. Fire and park ask the agent nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::to_agent::Message as Question;
use patchbay_proto::v1::{
    AgentDisable, AgentEnable, AgentEnabledEvent, AgentEvent, AgentEvents, AgentListEvents,
    AgentSettle, FlipReport, TracepointResult, TracepointState,
};

use super::book::{Armed, Book};
use super::decode::Format;
use super::error::TraceError;
use super::hub::{Hub, Source};
use super::link::{AgentError, AgentLink, bounded};
use super::select::{self, Wanted};
use super::switch::{Switch, TracepointFacts, TracepointKeys};
use crate::keys::KeysError;

const LIST_PATIENCE: Duration = Duration::from_secs(5);
/// Attaching a probe waits for the guest's RCU; per question to the agent.
const ENABLE_PATIENCE: Duration = Duration::from_secs(30);
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);
const ENABLED_PER_QUESTION: usize = 32;
/// What the agent tells is cut off there.
const MAX_EVENTS: usize = 32_768;
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
const SWITCH_TIME: Duration = Duration::from_secs(30);

/// How to arm.
#[derive(Clone, Debug, Default)]
pub struct ArmTerms {
    /// Empty: none.
    pub filter: String,
    /// Empty: none.
    pub trigger: String,
    /// Silence other users in the guest.
    pub even_if_others: bool,
    /// Check and change nothing.
    pub validate_only: bool,
}

/// How to fire and park.
#[derive(Clone, Debug)]
pub struct SwitchTerms {
    /// Check and change nothing.
    pub validate_only: bool,
    /// How long the vCPUs may take to stop.
    pub stop_timeout: Duration,
    /// When to stop trying.
    pub deadline: Instant,
    /// Silence other users in the guest.
    pub even_if_others: bool,
    /// Also what other clients fired.
    pub force: bool,
}

impl Default for SwitchTerms {
    fn default() -> Self {
        Self {
            validate_only: false,
            stop_timeout: STOP_TIMEOUT,
            deadline: Instant::now() + SWITCH_TIME,
            even_if_others: false,
            force: false,
        }
    }
}

/// Results of a call, per event, and what its pause cost the guest.
pub type Outcome = (Vec<TracepointResult>, Option<FlipReport>);

/// Everything about the guest's tracepoints.
pub struct Tracer {
    pub(super) keys: Arc<dyn TracepointKeys>,
    pub(super) link: AgentLink,
    pub(super) hub: Hub,
    book: Mutex<Book>,
    turn: tokio::sync::Mutex<()>,
    /// What the agent told last.
    known: Mutex<AgentEvents>,
}

impl Tracer {
    /// Nothing is armed.
    pub fn new(keys: Arc<dyn TracepointKeys>, link: AgentLink) -> Self {
        Self {
            keys,
            hub: Hub::new(link.clone()),
            link,
            book: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, AgentEvents> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's events as the agent told them last, and why they are not new if they are not.
    pub(super) async fn events(&self) -> (AgentEvents, Option<AgentError>) {
        let stale = match self
            .link
            .ask(Question::ListEvents(AgentListEvents {}), LIST_PATIENCE)
            .await
        {
            Ok(Answer::Events(mut events)) => {
                events.names.truncate(MAX_EVENTS);
                events
                    .names
                    .iter_mut()
                    .for_each(|name| *name = bounded(std::mem::take(name)));
                events.names.sort_unstable();
                events.names.dedup();
                events.others.truncate(64);
                for other in &mut events.others {
                    other.name = bounded(std::mem::take(&mut other.name));
                    other.events.truncate(MAX_EVENTS);
                }
                *self.known() = events;
                None
            }
            Ok(_) => Some(AgentError::Confused),
            Err(error) => Some(error),
        };
        (self.known().clone(), stale)
    }

    /// Facts by name, read now.
    pub(super) async fn facts(&self) -> Result<HashMap<String, TracepointFacts>, TraceError> {
        let keys = Arc::clone(&self.keys);
        let facts = tokio::task::spawn_blocking(move || keys.tracepoints()).await;
        Ok(select::by_name(
            facts.map_err(|_| KeysError::GuestStopped)??,
        ))
    }

    /// Arms for a client; what is armed already gets one more client.
    ///
    /// # Errors
    /// [`TraceError`]; nothing is armed then that was not before.
    pub async fn arm(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &ArmTerms,
    ) -> Result<Outcome, TraceError> {
        let _turn = self.turn.lock().await;
        let (events, stale) = self.events().await;
        if let Some(error) = stale {
            return Err(error.into());
        }
        let names = wanted
            .select(events.names.iter())
            .map_err(|patterns| TraceError::EventNotFound { patterns })?;
        let facts = self.facts().await?;
        let mut chosen = BTreeMap::new();
        for name in names {
            let of_event = facts.get(select::split(&name).1);
            match (select::refusal(of_event), of_event) {
                (Some(why), _) if wanted.names(&name) => {
                    return Err(TraceError::Refused { name, why });
                }
                (Some(_), _) | (None, None) => {}
                (None, Some(facts)) => {
                    chosen.insert(name, facts.key.clone());
                }
            }
        }
        if chosen.is_empty() {
            let name = wanted.texts().join(" ");
            return Err(TraceError::Refused {
                name,
                why: "none of the events has a key that can be parked".to_owned(),
            });
        }
        let fresh = self.fresh(client, &chosen, terms)?;
        if !terms.even_if_others {
            self.refuse_others(&events, &facts, fresh.keys())?;
        }
        let mut report = None;
        if !terms.validate_only {
            if !fresh.is_empty() {
                report = self.attach(client, &fresh, terms).await?;
            }
            let mut book = self.book();
            for name in chosen.keys() {
                if let Some(armed) = book.events.get_mut(name) {
                    armed.armed_by.insert(client.to_owned());
                    armed.even_if_others |= terms.even_if_others;
                }
            }
        }
        Ok((
            self.results(chosen.into_keys(), client, Some(TracepointState::Parked)),
            report,
        ))
    }

    /// Those that the agent has to enable, or to enable anew with another filter.
    fn fresh(
        &self,
        client: &str,
        chosen: &BTreeMap<String, String>,
        terms: &ArmTerms,
    ) -> Result<BTreeMap<String, String>, TraceError> {
        let book = self.book();
        let mut fresh = BTreeMap::new();
        for (name, key) in chosen {
            if let Some(armed) = book.events.get(name) {
                let same = |asked: &str, set: &str| asked.is_empty() || asked == set;
                if same(&terms.filter, &armed.filter) && same(&terms.trigger, &armed.trigger) {
                    continue;
                }
                if armed.armed_by.iter().any(|other| other != client) {
                    let owners = armed
                        .armed_by
                        .iter()
                        .cloned()
                        .collect::<Vec<_>>()
                        .join(", ");
                    return Err(TraceError::FilterConflict {
                        name: name.clone(),
                        filter: armed.filter.clone(),
                        owners,
                    });
                }
            }
            fresh.insert(name.clone(), key.clone());
        }
        Ok(fresh)
    }

    fn refuse_others<'a>(
        &self,
        events: &AgentEvents,
        facts: &HashMap<String, TracepointFacts>,
        names: impl Iterator<Item = &'a String>,
    ) -> Result<(), TraceError> {
        let others = {
            let book = self.book();
            select::others(events, facts, |event| book.events.contains_key(event))
        };
        let traced: Vec<String> = names
            .filter_map(|name| Some(format!("{name} ({})", others.get(name)?.join(", "))))
            .collect();
        if traced.is_empty() {
            Ok(())
        } else {
            Err(TraceError::OthersTrace { events: traced })
        }
    }

    /// Has probes attached and parks their keys.
    async fn attach(
        &self,
        client: &str,
        fresh: &BTreeMap<String, String>,
        terms: &ArmTerms,
    ) -> Result<Option<FlipReport>, TraceError> {
        let quiet = self.book().is_quiet();
        let attached = self.try_attach(client, fresh, terms, quiet).await;
        if attached.is_err() {
            let known: BTreeSet<String> = self.book().events.keys().cloned().collect();
            let names: Vec<String> = fresh
                .keys()
                .filter(|name| !known.contains(*name))
                .cloned()
                .collect();
            self.detach(names).await;
            self.settle().await.ok();
        }
        attached
    }

    async fn try_attach(
        &self,
        client: &str,
        fresh: &BTreeMap<String, String>,
        terms: &ArmTerms,
        quiet: bool,
    ) -> Result<Option<FlipReport>, TraceError> {
        let names: Vec<&String> = fresh.keys().collect();
        let mut sources = Vec::with_capacity(names.len());
        for names in names.chunks(ENABLED_PER_QUESTION) {
            let event = |&name: &&String| AgentEvent {
                name: name.clone(),
                filter: terms.filter.clone(),
                trigger: terms.trigger.clone(),
            };
            let events = names.iter().map(event).collect();
            let question = Question::Enable(AgentEnable { events, quiet });
            let Answer::Enabled(enabled) = self.link.ask(question, ENABLE_PATIENCE).await? else {
                return Err(AgentError::Confused.into());
            };
            if enabled.events.len() != names.len() {
                return Err(AgentError::Confused.into());
            }
            for (&name, enabled) in names.iter().zip(enabled.events) {
                let format = format_of(name, enabled)?;
                sources.push(Arc::new(Source {
                    name: name.clone(),
                    format,
                    // Until it is settled, nothing of it is told.
                    settled_at: AtomicU64::new(u64::MAX),
                    events: AtomicU64::new(0),
                }));
            }
        }
        let keys = fresh.values().cloned().collect();
        let report = self
            .switch(
                keys,
                false,
                client,
                "arm tracepoints",
                &SwitchTerms::default(),
            )
            .await?;
        let settled_at = self.settle().await?;
        let mut book = self.book();
        for source in sources {
            source.settled_at.store(settled_at, Ordering::Relaxed);
            self.hub.add_source(Arc::clone(&source));
            let Some(key) = fresh.get(&source.name) else {
                continue;
            };
            let armed = Armed {
                key: key.clone(),
                filter: terms.filter.clone(),
                trigger: terms.trigger.clone(),
                even_if_others: terms.even_if_others,
                armed_by: BTreeSet::from([client.to_owned()]),
                fired_by: BTreeSet::new(),
                source: Arc::clone(&source),
            };
            book.overdue.remove(&source.name);
            book.events.insert(source.name.clone(), armed);
        }
        Ok(report)
    }

    /// Lets the agent record again; the guest's time just before.
    async fn settle(&self) -> Result<u64, TraceError> {
        match self
            .link
            .ask(Question::Settle(AgentSettle {}), SETTLE_PATIENCE)
            .await?
        {
            Answer::Done(done) => Ok(done.guest_time_ns),
            _ => Err(AgentError::Confused.into()),
        }
    }

    /// Has probes removed; what the agent does not answer for is tried again later.
    async fn detach(&self, names: Vec<String>) -> Option<AgentError> {
        let mut silent = None;
        for names in names.chunks(ENABLED_PER_QUESTION) {
            let question = Question::Disable(AgentDisable {
                names: names.to_vec(),
            });
            let answer = self.link.ask(question, ENABLE_PATIENCE).await;
            let mut book = self.book();
            match answer {
                Ok(Answer::Enabled(_)) => book.overdue.retain(|name| !names.contains(name)),
                other => {
                    silent = Some(other.err().unwrap_or(AgentError::Confused));
                    book.overdue.extend(names.iter().cloned());
                }
            }
        }
        silent
    }

    /// Switches keys.
    async fn switch(
        &self,
        keys: Vec<String>,
        on: bool,
        owner: &str,
        reason: &'static str,
        terms: &SwitchTerms,
    ) -> Result<Option<FlipReport>, TraceError> {
        if keys.is_empty() {
            return Ok(None);
        }
        let switch = Switch {
            keys,
            on,
            owner: owner.to_owned(),
            reason,
            validate_only: terms.validate_only,
            stop_timeout: terms.stop_timeout,
            deadline: terms.deadline,
        };
        Ok(self.keys.switch(switch).await?)
    }

    fn armed(&self, wanted: &Wanted) -> Result<Vec<String>, TraceError> {
        wanted
            .select(self.book().events.keys())
            .map_err(|patterns| TraceError::NotArmed { patterns })
    }

    /// Fires for a client.
    ///
    /// # Errors
    /// [`TraceError`]; nothing is fired then.
    pub async fn fire(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<Outcome, TraceError> {
        let _turn = self.turn.lock().await;
        let names = self.armed(wanted)?;
        let keys = self.book().keys(&names);
        let report = self
            .switch(keys, true, client, "fire tracepoints", terms)
            .await?;
        if !terms.validate_only {
            let mut book = self.book();
            for name in &names {
                if let Some(armed) = book.events.get_mut(name) {
                    armed.fired_by.insert(client.to_owned());
                }
            }
            drop(book);
            self.mark("fired", &names, client, report.as_ref());
        }
        Ok((self.results(names.into_iter(), client, None), report))
    }

    /// Parks for a client what no other keeps firing.
    ///
    /// # Errors
    /// [`TraceError`]; nothing is parked then.
    pub async fn park(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<Outcome, TraceError> {
        let _turn = self.turn.lock().await;
        let names = self.armed(wanted)?;
        let to_park = self.book().to_park(&names, client, terms.force);
        if !terms.even_if_others {
            let facts = self.facts().await?;
            let events = self.known().clone();
            let strict: Vec<String> = {
                let book = self.book();
                to_park
                    .iter()
                    .filter(|name| {
                        book.events
                            .get(*name)
                            .is_some_and(|armed| !armed.even_if_others)
                    })
                    .cloned()
                    .collect()
            };
            self.refuse_others(&events, &facts, strict.iter())?;
        }
        let keys = self.book().keys(&to_park);
        let report = self
            .switch(keys, false, client, "park tracepoints", terms)
            .await?;
        if !terms.validate_only {
            self.book().release_fire(&names, client, terms.force);
            self.mark("parked", &to_park, client, report.as_ref());
        }
        Ok((self.results(names.into_iter(), client, None), report))
    }

    /// Parks and disarms for a client what no other keeps armed.
    ///
    /// # Errors
    /// [`TraceError`]; if it is the agent's silence, the events are parked, and disarmed when it
    /// answers again.
    pub async fn disarm(
        &self,
        client: &str,
        wanted: &Wanted,
        force: bool,
    ) -> Result<Vec<TracepointResult>, TraceError> {
        let _turn = self.turn.lock().await;
        let names = self.armed(wanted)?;
        let to_disarm = self.book().to_disarm(&names, client, force);
        let silent = self.remove(client, &names, &to_disarm).await?;
        if let Some(error) = silent {
            return Err(error.into());
        }
        Ok(self.results(names.into_iter(), client, None))
    }

    /// `names` are the client's no more; `to_disarm` are nobody's.
    async fn remove(
        &self,
        client: &str,
        names: &[String],
        to_disarm: &[String],
    ) -> Result<Option<AgentError>, TraceError> {
        let keys = self.book().keys(to_disarm);
        // The guest's own removal of the probe parks as well, but perhaps late, perhaps never.
        match self
            .switch(
                keys,
                false,
                client,
                "disarm tracepoints",
                &SwitchTerms::default(),
            )
            .await
        {
            // The guest is gone or registered anew: there is nothing to park.
            Ok(_)
            | Err(TraceError::Keys(
                KeysError::NotRegistered { .. } | KeysError::KeyNotFound { .. },
            )) => {}
            Err(error) => return Err(error),
        }
        {
            let mut book = self.book();
            book.release_fire(names, client, false);
            book.release_arm(names, client);
            for name in to_disarm {
                if let Some(armed) = book.events.remove(name) {
                    self.hub.remove_source(armed.source.format.id);
                }
            }
        }
        Ok(self.detach(to_disarm.to_vec()).await)
    }

    /// A client is gone: what it alone kept is parked and disarmed.
    pub async fn leave(&self, client: &str) {
        let _turn = self.turn.lock().await;
        let (leaving, names) = {
            let book = self.book();
            (
                book.leaving(client),
                book.events.keys().cloned().collect::<Vec<_>>(),
            )
        };
        let keys = self.book().keys(&leaving.park);
        if let Err(error) = self
            .switch(
                keys,
                false,
                client,
                "park tracepoints",
                &SwitchTerms::default(),
            )
            .await
        {
            tracing::warn!(client, %error, "the events of a client that is gone could not be parked");
        }
        self.book().release_fire(&names, client, false);
        self.mark("parked", &leaving.park, client, None);
        match self.remove(client, &names, &leaving.disarm).await {
            Ok(None) => {}
            Ok(Some(error)) => {
                tracing::warn!(client, %error, "events of a client that is gone wait for being disarmed")
            }
            Err(error) => {
                tracing::warn!(client, %error, "the events of a client that is gone could not be disarmed")
            }
        }
    }

    /// Brings agent and book together when an agent has connected: what only the agent knows is
    /// disarmed, and what only the book knows is gone with its module, its boot or its instance.
    pub async fn reconcile(&self) {
        let _turn = self.turn.lock().await;
        let Ok(peer) = self.link.peer() else { return };
        let enabled: BTreeSet<String> = peer.hello.enabled.into_iter().collect();
        let (lost, strangers) = {
            let book = self.book();
            let lost: Vec<String> = book
                .events
                .keys()
                .filter(|name| !enabled.contains(*name))
                .cloned()
                .collect();
            let strangers: Vec<String> = enabled
                .into_iter()
                .filter(|name| !book.events.contains_key(name))
                .collect();
            (lost, strangers)
        };
        for name in &lost {
            if let Some(armed) = self.book().events.remove(name) {
                self.hub.remove_source(armed.source.format.id);
                self.hub
                    .mark(format!("{name} is no longer armed in the guest"));
            }
        }
        self.detach(strangers).await;
        // If the agent before died between stopping and starting.
        if let Err(error) = self.settle().await {
            tracing::warn!(%error, "the agent does not record");
        }
        self.hub.agent_connected();
    }

    /// Disarms what could not be disarmed when it was due.
    pub async fn catch_up(&self) {
        if self.link.silent_for().is_some() || self.book().overdue.is_empty() {
            return;
        }
        let _turn = self.turn.lock().await;
        let overdue: Vec<String> = {
            let book = self.book();
            book.overdue
                .iter()
                .filter(|name| !book.events.contains_key(*name))
                .cloned()
                .collect()
        };
        self.detach(overdue).await;
    }

    fn mark(&self, what: &str, names: &[String], client: &str, report: Option<&FlipReport>) {
        let Some(first) = names.first() else { return };
        let more = match names.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        let stopped = report.filter(|report| report.paused).map(|report| {
            let time = |part: Option<prost_types::Duration>| {
                part.and_then(|part| part.try_into().ok())
                    .unwrap_or(Duration::ZERO)
            };
            let total = time(report.stop_time) + time(report.patch_time) + time(report.resume_time);
            format!(", guest stopped for {} µs", total.as_micros())
        });
        self.hub.mark(format!(
            "{what} {first}{more} by {client}{}",
            stopped.unwrap_or_default()
        ));
    }

    fn results(
        &self,
        names: impl Iterator<Item = String>,
        client: &str,
        absent: Option<TracepointState>,
    ) -> Vec<TracepointResult> {
        let book = self.book();
        let result = |name: String| {
            let armed = book.events.get(&name);
            let state = match armed {
                None => absent.unwrap_or(TracepointState::Disarmed),
                Some(armed) if armed.fired_by.is_empty() => TracepointState::Parked,
                Some(_) => TracepointState::Firing,
            };
            let others = |clients: &BTreeSet<String>| {
                clients
                    .iter()
                    .filter(|other| *other != client)
                    .cloned()
                    .collect()
            };
            let kept_by = match (state, armed) {
                (TracepointState::Firing, Some(armed)) => others(&armed.fired_by),
                (_, Some(armed)) => others(&armed.armed_by),
                (_, None) => vec![],
            };
            TracepointResult {
                name,
                state: state.into(),
                kept_by,
            }
        };
        names.map(result).collect()
    }
}

fn format_of(name: &str, enabled: AgentEnabledEvent) -> Result<Format, TraceError> {
    let name = name.to_owned();
    if enabled.vanished {
        return Err(TraceError::EventVanished {
            name,
            message: bounded(enabled.error),
        });
    }
    if !enabled.error.is_empty() {
        let error = bounded(enabled.error);
        return Err(match error.split_once(": ") {
            Some(("filter", message)) => TraceError::Rejected {
                what: "filter",
                name,
                message: message.to_owned(),
            },
            Some(("trigger", message)) => TraceError::Rejected {
                what: "trigger",
                name,
                message: message.to_owned(),
            },
            _ => TraceError::ArmFailed {
                name,
                message: error,
            },
        });
    }
    Format::parse(&enabled.format).map_err(|error| TraceError::ArmFailed {
        name,
        message: error.to_string(),
    })
}
