// SPDX-License-Identifier: Apache-2.0
//! Arms, fires, parks and disarms.
//!
//! An event is
//!
//! ```text
//!                agent: stop recording if                 agent: read the
//!                nothing fires, set filter,    host:      clock, record
//!                attach probe (key 0 → 1)      park       again
//!     ┌─ disarmed ─────────▶ arming ────────────▶ arming ────────────▶ armed ◀─┐
//!     │      ▲                  │ failed             │ failed             │    │ fire, park:
//!     │      │                  ▼                    ▼                    │    │ the key alone
//!     │      └────────────  disarming ◀──────────────┴─── host: park ─────┴────┘
//!     │       agent: detach     │
//!     │                         │ no answer
//!     │                         ▼
//!     └─────────────────────  overdue ─── tried again each second while an agent answers
//! ```
//!
//! Events that were recorded between attaching and parking, because another user fired them, are
//! skipped up to the clock reading: an armed event that was never fired delivers nothing.
//!
//! Two kinds of exclusion, and neither waits for the other:
//!
//! - *Switching* keys, together with the reads that it is based on, holds `turn` for some
//!   milliseconds. The agent is never asked while it is held, so fire and park never wait for the
//!   guest.
//! - *Moving* an event (arming or disarming), together with the agent's answers, claims all events
//!   of the call at once ([`Tracer::claim`]). A call that needs one of them waits for the end of
//!   the claim or gives up. There is no lock: other events can be moved at the same time. The agent
//!   processes requests in order, so the last request decides.
//!
//! The book's lock is never held across an await.

mod arm;
mod leave;
mod moves;
mod others;
mod own;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_observe::trace::Enabled;
use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{AgentEvents, AgentListEvents};
use patchbay_proto::v1::{TracepointResult, TracepointState};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::book::Book;
use super::error::{AgentError, TraceError};
use super::hub::Hub;
use super::link::{AgentLink, bounded};
use super::once::Answers;
use super::select::{self, Wanted};
use super::socket::AgentSocket;
use super::switch::{Switch, TracepointFacts, TracepointKeys};
use crate::keys::{Caller, FlipReport, KeysError, TracepointUpdate, Use};

const LIST_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of events in the agent's answer. A longer answer is truncated.
const MAX_EVENTS: usize = 32_768;
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
const SWITCH_TIME: Duration = Duration::from_secs(30);

/// Options of an arming.
#[derive(Clone, Debug, Default)]
pub struct ArmTerms {
    /// Filter; empty for none.
    pub filter: String,
    /// Trigger; empty for none.
    pub trigger: String,
    /// Silence the event also for other users in the guest.
    pub even_if_others: bool,
    /// Only check the request.
    pub validate_only: bool,
    /// Time until the client's arming expires, or `None` if it lasts until the event is disarmed.
    pub ttl: Option<Duration>,
    /// The caller, whose permission is checked; `None` for the tracer itself.
    pub caller: Option<Caller>,
}

/// Options of fire and park.
#[derive(Clone, Debug)]
pub struct SwitchTerms {
    /// Only check the request.
    pub validate_only: bool,
    /// Time allowed for the vCPUs to stop.
    pub stop_timeout: Duration,
    /// Deadline for retries.
    pub deadline: Instant,
    /// Silence the events also for other users in the guest.
    pub even_if_others: bool,
    /// Also park events that other clients fire.
    pub force: bool,
    /// Time until the client's hold expires, or `None` if it lasts until the event is parked.
    pub ttl: Option<Duration>,
    /// The caller, whose permission is checked; `None` for the tracer itself.
    pub caller: Option<Caller>,
}

impl Default for SwitchTerms {
    fn default() -> Self {
        Self {
            validate_only: false,
            stop_timeout: STOP_TIMEOUT,
            deadline: Instant::now() + SWITCH_TIME,
            even_if_others: false,
            force: false,
            ttl: None,
            caller: None,
        }
    }
}

/// Result of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceOutcome {
    /// Results, one per event.
    pub results: Vec<TracepointResult>,
    /// The cost of the flip for the guest, or `None` if nothing was flipped.
    pub report: Option<FlipReport>,
}

/// State of the tracepoints in guest memory.
pub struct Facts {
    /// The facts, by the tracepoint's name.
    pub by_name: HashMap<String, TracepointFacts>,
    /// Value of [`Book::armed`] when the facts were read. The facts do not cover later armings.
    armed: u64,
}

/// Wakes the tasks of a tracer, which sleep while they have nothing to do. Each signal is for one
/// task.
#[derive(Debug, Default)]
pub(super) struct Wakes {
    /// An arming may have another expiry.
    pub expiries: Notify,
    /// Events were armed.
    pub armed: Notify,
    /// Events are overdue, and there were none before.
    pub overdue: Notify,
}

/// The tracepoints of one guest.
pub struct Tracer {
    pub(crate) keys: Arc<dyn TracepointKeys>,
    pub(crate) link: AgentLink,
    pub(crate) hub: Arc<Hub>,
    /// Runtime that decodes the events.
    pub(crate) decoding: Handle,
    pub(crate) answers: Answers,
    book: Mutex<Book>,
    turn: tokio::sync::Mutex<()>,
    pub(super) wakes: Arc<Wakes>,
    /// Signals the end of claims.
    moved: watch::Sender<u64>,
    switch_budget: Mutex<others::SwitchBudget>,
    /// The agent's last list of events.
    known: Mutex<AgentEvents>,
    /// Tasks of the link and the decoder, which end with the tracer.
    pub(super) tasks: JoinSet<()>,
    /// Socket of the agent. Its file is removed with the tracer.
    _socket: Option<AgentSocket>,
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Wakes the tasks, so that they end.
        let Wakes {
            expiries,
            armed,
            overdue,
        } = &*self.wakes;
        for wake in [expiries, armed, overdue] {
            wake.notify_one();
        }
    }
}

impl Tracer {
    /// Creates a tracer with no armed events.
    pub fn new(
        keys: Arc<dyn TracepointKeys>,
        link: AgentLink,
        socket: Option<AgentSocket>,
        decoding: Handle,
    ) -> Self {
        Self {
            keys,
            hub: Arc::new(Hub::new(link.clone())),
            link,
            decoding,
            answers: Answers::default(),
            book: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            wakes: Arc::default(),
            moved: watch::Sender::new(0),
            switch_budget: Mutex::default(),
            known: Mutex::default(),
            tasks: JoinSet::new(),
            _socket: socket,
        }
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, AgentEvents> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the event list. If it could not be refreshed, returns the cached list and the error.
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
                events.names.shrink_to_fit();
                events.others.truncate(64);
                events.others.shrink_to_fit();
                for other in &mut events.others {
                    other.name = bounded(std::mem::take(&mut other.name));
                    other.events.truncate(MAX_EVENTS);
                    other.events.shrink_to_fit();
                }
                *self.known() = events;
                None
            }
            Ok(_) => Some(AgentError::Confused),
            Err(error) => Some(error),
        };
        (self.known().clone(), stale)
    }

    /// Reads the facts of all tracepoints.
    pub(crate) async fn facts(&self) -> Result<Facts, TraceError> {
        let armed = self.book().armed;
        let keys = Arc::clone(&self.keys);
        let facts = tokio::task::spawn_blocking(move || keys.tracepoints()).await;
        let facts = facts.map_err(|error| KeysError::Internal {
            message: format!("the tracepoints cannot be read: {error}; report it, it is a bug"),
        })??;
        let by_name = select::by_name(facts);
        Ok(Facts { by_name, armed })
    }

    /// Reads the names of the kernel's events in the guest's memory; empty if they are not found.
    pub(crate) async fn events_in_memory(&self) -> Vec<String> {
        let keys = Arc::clone(&self.keys);
        let events = tokio::task::spawn_blocking(move || keys.events()).await;
        events.unwrap_or_default()
    }

    /// Reads in the guest's memory which instances have enabled which events; empty if this is not
    /// found.
    pub(crate) async fn enabled_in_memory(&self) -> Enabled {
        let keys = Arc::clone(&self.keys);
        let enabled = tokio::task::spawn_blocking(move || keys.enabled_in()).await;
        enabled.unwrap_or_default()
    }

    /// Reads the number of probes on the tracepoints of these keys.
    async fn probes(&self, names: Vec<String>) -> Result<Vec<Option<u32>>, KeysError> {
        let keys = Arc::clone(&self.keys);
        let probes = tokio::task::spawn_blocking(move || keys.probes(&names)).await;
        probes.map_err(|error| KeysError::Internal {
            message: format!("the probes cannot be read: {error}; report it, it is a bug"),
        })?
    }

    /// Refuses keys that the caller may not change.
    fn permit(
        &self,
        caller: Option<&Caller>,
        keys: &[String],
        validate_only: bool,
    ) -> Result<(), TraceError> {
        let how = match validate_only {
            true => Use::Check,
            false => Use::Change,
        };
        let permitted = caller.map(|caller| self.keys.permit(caller, keys, how));
        Ok(permitted.transpose().map(drop)?)
    }

    /// Switches keys. The caller holds `turn`.
    async fn switch(
        &self,
        keys: Vec<String>,
        update: TracepointUpdate,
        client: &str,
        reason: &'static str,
        terms: &SwitchTerms,
    ) -> Result<Option<FlipReport>, TraceError> {
        if keys.is_empty() {
            return Ok(None);
        }
        let switch = Switch {
            keys,
            update,
            holder: client.to_owned(),
            reason,
            ttl: terms.ttl,
            validate_only: terms.validate_only,
            stop_timeout: terms.stop_timeout,
            deadline: terms.deadline,
        };
        Ok(self.keys.switch(switch).await?)
    }

    /// Returns the holders of the keys of armed events; empty while the keys are unknown.
    pub(crate) fn fired_by(&self, names: &[String]) -> HashMap<String, Vec<Arc<str>>> {
        let (names, keys): (Vec<String>, Vec<String>) = {
            let book = self.book();
            let armed = names.iter().filter_map(|name| {
                let armed = book.events.get(name)?;
                Some((name.clone(), armed.key.clone()))
            });
            armed.unzip()
        };
        let holders = self.keys.holders(&keys).unwrap_or_default();
        names.into_iter().zip(holders).collect()
    }

    /// Returns whether no armed event is fired.
    fn is_quiet(&self) -> bool {
        let names: Vec<String> = self.book().events.keys().cloned().collect();
        self.fired_by(&names).values().all(Vec::is_empty)
    }

    /// Returns the armed events that no other client fires.
    fn without_others(&self, names: &[String], client: &str) -> Vec<String> {
        let fired_by = self.fired_by(names);
        let kept = |name: &&String| {
            let holders = fired_by.get(*name);
            holders.is_some_and(|holders| holders.iter().all(|other| **other == *client))
        };
        names.iter().filter(kept).cloned().collect()
    }

    fn armed(&self, wanted: &Wanted) -> Result<Vec<String>, TraceError> {
        wanted
            .select(self.book().events.keys())
            .map_err(|patterns| TraceError::NotArmed { patterns })
    }

    /// Fires events for a client.
    ///
    /// # Errors
    /// [`TraceError`]. Nothing is fired then.
    pub async fn fire(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<TraceOutcome, TraceError> {
        let _turn = self.turn.lock().await;
        let fired = self.try_fire(client, wanted, terms).await;
        let (names, report) = match fired {
            // The facts are read after the switch because reading takes longer than the switch.
            Err(TraceError::Keys(KeysError::KeyNotFound { .. } | KeysError::KeyRefused { .. }))
                if self.forget_vanished(&self.facts().await?) =>
            {
                self.try_fire(client, wanted, terms).await?
            }
            fired => fired?,
        };
        if !terms.validate_only {
            self.mark("fired", &names, client, report.as_ref());
        }
        Ok(TraceOutcome {
            results: self.results(names.into_iter(), client, None),
            report,
        })
    }

    async fn try_fire(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<(Vec<String>, Option<FlipReport>), TraceError> {
        let names = self.armed(wanted)?;
        let keys = self.book().keys(&names);
        self.permit(terms.caller.as_ref(), &keys, terms.validate_only)?;
        let report = self
            .switch(
                keys,
                TracepointUpdate::Fire,
                client,
                "fire tracepoints",
                terms,
            )
            .await?;
        Ok((names, report))
    }

    /// Parks a client's events, except those that another client fires.
    ///
    /// # Errors
    /// [`TraceError`]. Nothing is parked then.
    pub async fn park(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<TraceOutcome, TraceError> {
        let _turn = self.turn.lock().await;
        let choose = || {
            let names = self.armed(wanted)?;
            let to_park = match terms.force {
                true => names.clone(),
                false => self.without_others(&names, client),
            };
            Ok::<_, TraceError>((names, to_park))
        };
        let (mut names, mut to_park) = choose()?;
        // Normally each event has the agent's probe and no other. Reading all facts takes longer
        // than the switch.
        let keys = self.book().keys(&to_park);
        let probes = self.probes(keys).await?;
        if probes.iter().any(|probes| *probes != Some(1)) {
            let facts = self.facts().await?;
            self.forget_vanished(&facts);
            (names, to_park) = choose()?;
            if !terms.even_if_others {
                let events = self.known().clone();
                let strict = self.strict(&to_park);
                Self::refuse_others(&self.book(), &events, &facts.by_name, strict.iter())?;
            }
        }
        let update = match terms.force {
            true => TracepointUpdate::Silence,
            false => TracepointUpdate::Park,
        };
        // This includes events that other clients fire, because this client no longer fires them.
        let keys = self.book().keys(&names);
        self.permit(terms.caller.as_ref(), &keys, terms.validate_only)?;
        let report = self
            .switch(keys, update, client, "park tracepoints", terms)
            .await?;
        if !terms.validate_only {
            let mut book = self.book();
            for name in &to_park {
                if let Some(armed) = book.events.get_mut(name) {
                    armed.even_if_others |= terms.even_if_others;
                }
            }
            drop(book);
            self.mark("parked", &to_park, client, report.as_ref());
        }
        Ok(TraceOutcome {
            results: self.results(names.into_iter(), client, None),
            report,
        })
    }

    /// Returns the events that no client armed with `even_if_others`.
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
        let stopped = report.and_then(|report| report.pause).map(|times| {
            let total = times.stop + times.patch + times.resume;
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
        let names: Vec<String> = names.collect();
        let mut fired_by = self.fired_by(&names);
        let book = self.book();
        let result = |name: String| {
            let armed = book.events.get(&name);
            let fired_by = fired_by.remove(&name).unwrap_or_default();
            let state = match armed {
                None => absent.unwrap_or(TracepointState::Disarmed),
                Some(_) if fired_by.is_empty() => TracepointState::Parked,
                Some(_) => TracepointState::Firing,
            };
            let others = |clients: &mut dyn Iterator<Item = &str>| {
                let others = clients.filter(|other| *other != client);
                others.map(str::to_owned).collect()
            };
            let kept_by = match (state, armed) {
                (TracepointState::Firing, _) => others(&mut fired_by.iter().map(|of| &**of)),
                (_, Some(armed)) => others(&mut armed.armed_by.keys().map(|of| &**of)),
                (_, None) => vec![],
            };
            TracepointResult {
                name,
                state: state.into(),
                kept_by,
                also_serves: vec![],
            }
        };
        names.into_iter().map(result).collect()
    }
}
