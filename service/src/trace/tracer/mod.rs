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

mod arm;
mod leave;
mod others;

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::to_agent::Message as Question;
use patchbay_proto::v1::{
    AgentEvents, AgentListEvents, FlipReport, TracepointResult, TracepointState,
};

use super::book::Book;
use super::error::TraceError;
use super::hub::Hub;
use super::link::{AgentError, AgentLink, bounded};
use super::select::{self, Wanted};
use super::switch::{Switch, TracepointFacts, TracepointKeys};
use crate::keys::KeysError;
use crate::keys::replay::{Content, Replay};

const LIST_PATIENCE: Duration = Duration::from_secs(5);
/// What the agent tells is cut off there.
const MAX_EVENTS: usize = 32_768;
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
const SWITCH_TIME: Duration = Duration::from_secs(30);
/// Answers that are kept for their request ids, and results in them.
const REPLAYED_ANSWERS: usize = 256;
const REPLAYED_RESULTS: usize = 65_536;

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

/// A change that is made once, however often it is asked for (AIP-155).
#[derive(Clone, Debug, Default)]
pub struct Once {
    /// Who asks.
    pub client: String,
    /// As the client named the change; empty if it may be made each time.
    pub request_id: String,
    /// Of the change.
    pub content: Content,
}

/// Everything about the guest's tracepoints.
pub struct Tracer {
    pub(super) keys: Arc<dyn TracepointKeys>,
    pub(crate) link: AgentLink,
    pub(crate) hub: Hub,
    book: Mutex<Book>,
    turn: tokio::sync::Mutex<()>,
    /// Locked across a change with a request id, so that a repeat waits for the answer. Before `turn`.
    answers: tokio::sync::Mutex<Replay<Outcome>>,
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
            answers: tokio::sync::Mutex::new(Replay::new(REPLAYED_ANSWERS, REPLAYED_RESULTS)),
            known: Mutex::default(),
        }
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, AgentEvents> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest's events as the agent told them last, and why they are not new if they are not.
    pub(crate) async fn events(&self) -> (AgentEvents, Option<AgentError>) {
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
    pub(crate) async fn facts(&self) -> Result<HashMap<String, TracepointFacts>, TraceError> {
        let keys = Arc::clone(&self.keys);
        let facts = tokio::task::spawn_blocking(move || keys.tracepoints()).await;
        Ok(select::by_name(
            facts.map_err(|_| KeysError::GuestStopped)??,
        ))
    }

    /// Makes a change, or answers what it led to when it was made. What failed may be tried again.
    ///
    /// # Errors
    /// Of the change, and if the request id was used for another.
    pub async fn once(
        &self,
        once: Once,
        change: impl Future<Output = Result<Outcome, TraceError>>,
    ) -> Result<Outcome, TraceError> {
        if once.request_id.is_empty() {
            return change.await;
        }
        let mut answers = self.answers.lock().await;
        if let Some(earlier) = answers.find(&once.client, &once.request_id, &once.content)? {
            return Ok((*earlier).clone());
        }
        let outcome = Arc::new(change.await?);
        let results = outcome.0.len();
        answers.remember(
            &once.client,
            &once.request_id,
            once.content,
            &outcome,
            results,
        );
        Ok((*outcome).clone())
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
        let fired = self.try_fire(client, wanted, terms).await;
        let (names, report) = match fired {
            // The facts are read only now: they take longer than the switch.
            Err(TraceError::Keys(KeysError::KeyNotFound { .. } | KeysError::KeyRefused { .. }))
                if self.forget_vanished(&self.facts().await?) =>
            {
                self.try_fire(client, wanted, terms).await?
            }
            fired => fired?,
        };
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

    async fn try_fire(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<(Vec<String>, Option<FlipReport>), TraceError> {
        let names = self.armed(wanted)?;
        let keys = self.book().keys(&names);
        let report = self
            .switch(keys, true, client, "fire tracepoints", terms)
            .await?;
        Ok((names, report))
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
        let choose = || {
            let names = self.armed(wanted)?;
            let to_park = self.book().to_park(&names, client, terms.force);
            let keys = self.book().keys(&to_park);
            Ok::<_, TraceError>((names, to_park, keys))
        };
        let (mut names, mut to_park, mut keys) = choose()?;
        // The agent's probe and no other on each is what is found nearly always; to read all facts
        // takes longer than the switch.
        let probes = self.keys.probes(&keys)?;
        if probes.iter().any(|probes| *probes != Some(1)) {
            let facts = self.facts().await?;
            self.forget_vanished(&facts);
            (names, to_park, keys) = choose()?;
            if !terms.even_if_others {
                let events = self.known().clone();
                let strict = self.strict(&to_park);
                self.refuse_others(&events, &facts, strict.iter())?;
            }
        }
        let report = self
            .switch(keys, false, client, "park tracepoints", terms)
            .await?;
        if !terms.validate_only {
            let mut book = self.book();
            book.release_fire(&names, client, terms.force);
            for name in &to_park {
                if let Some(armed) = book.events.get_mut(name) {
                    armed.even_if_others |= terms.even_if_others;
                }
            }
            drop(book);
            self.mark("parked", &to_park, client, report.as_ref());
        }
        Ok((self.results(names.into_iter(), client, None), report))
    }

    /// Those of the events of which nobody has said that others in the guest may be silenced.
    fn strict(&self, names: &[String]) -> Vec<String> {
        let book = self.book();
        let is_strict = |name: &&String| {
            let armed = book.events.get(*name);
            armed.is_some_and(|armed| !armed.even_if_others)
        };
        names.iter().filter(is_strict).cloned().collect()
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
