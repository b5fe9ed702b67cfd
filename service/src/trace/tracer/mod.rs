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
//! Events recorded between attaching and parking, if something else fired, are passed over by the
//! clock that was read: an armed event that was never fired tells nothing.
//!
//! Two things exclude each other, and neither waits for the other:
//!
//! - *Switching* keys, together with what is found out for it: `turn`, held for the milliseconds of
//!   a switch. Nobody asks the agent while holding it, so fire and park never wait for the guest.
//! - *Moving* an event, arming and disarming, together with the agent's answers: whoever moves events
//!   claims them all at once ([`Tracer::claim`]), and who wants one of them meanwhile waits for its
//!   end, or gives up. There is no lock: other events can be moved at the same time. The agent takes
//!   questions in order, so what was asked last counts.
//!
//! The book is locked for a look or a change, never across an await.

mod arm;
mod leave;
mod moves;
mod others;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{AgentEvents, AgentListEvents};
use patchbay_proto::v1::{TracepointResult, TracepointState};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

pub use self::others::Backoff;
use super::book::Book;
use super::error::{AgentError, TraceError};
use super::hub::Hub;
use super::link::{AgentLink, bounded};
use super::once::Answers;
use super::select::{self, Wanted};
use super::socket::AgentSocket;
use super::switch::{Switch, TracepointFacts, TracepointKeys};
use crate::keys::{FlipReport, KeysError, TracepointUpdate};

const LIST_PATIENCE: Duration = Duration::from_secs(5);
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
    /// How long the client keeps them armed; `None`: until it disarms them.
    pub ttl: Option<Duration>,
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
    /// How long the client keeps them firing; `None`: until it parks them.
    pub ttl: Option<Duration>,
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
        }
    }
}

/// What a call changed.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceOutcome {
    /// One per event.
    pub results: Vec<TracepointResult>,
    /// What the flip cost the guest; `None` if nothing was flipped.
    pub report: Option<FlipReport>,
}

/// What the guest's memory says of its tracepoints.
pub struct Facts {
    /// By name of the tracepoint.
    pub by_name: HashMap<String, TracepointFacts>,
    /// Count of events armed when it was read: it says nothing of later ones.
    armed: u64,
}

/// Everything about the guest's tracepoints.
pub struct Tracer {
    pub(crate) keys: Arc<dyn TracepointKeys>,
    pub(crate) link: AgentLink,
    pub(crate) hub: Arc<Hub>,
    /// Where events are decoded.
    pub(crate) decoding: Handle,
    pub(crate) answers: Answers,
    book: Mutex<Book>,
    turn: tokio::sync::Mutex<()>,
    /// Events are armed for some time.
    pub(super) armed_anew: Arc<Notify>,
    /// Advances when events are no longer moved.
    moved: watch::Sender<u64>,
    heed: Mutex<others::Heed>,
    /// What the agent told last.
    known: Mutex<AgentEvents>,
    /// They end with the tracer: the agent's link, and the decoder.
    pub(super) tasks: JoinSet<()>,
    /// Removed with the tracer.
    _socket: Option<AgentSocket>,
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Who waits for expiries finds that there is nothing more to wait for.
        self.armed_anew.notify_one();
    }
}

impl Tracer {
    /// Nothing is armed.
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
            armed_anew: Arc::default(),
            moved: watch::Sender::new(0),
            heed: Mutex::default(),
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

    /// Facts by name, read now.
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

    /// Switches keys. The caller has the turn.
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

    /// Who keeps armed events firing: who holds their keys. Nobody while the keys are not known.
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

    /// Whether anything fires.
    fn is_quiet(&self) -> bool {
        let names: Vec<String> = self.book().events.keys().cloned().collect();
        self.fired_by(&names).values().all(Vec::is_empty)
    }

    /// Those of the armed events that nobody else keeps firing.
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

    /// Fires for a client.
    ///
    /// # Errors
    /// [`TraceError`]; nothing is fired then.
    pub async fn fire(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &SwitchTerms,
    ) -> Result<TraceOutcome, TraceError> {
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

    /// Parks for a client what no other keeps firing.
    ///
    /// # Errors
    /// [`TraceError`]; nothing is parked then.
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
        // The agent's probe and no other on each is what is found nearly always; to read all facts
        // takes longer than the switch.
        let probes = self.keys.probes(&self.book().keys(&to_park))?;
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
        // Also those that others keep firing: the client no longer does.
        let keys = self.book().keys(&names);
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
            }
        };
        names.into_iter().map(result).collect()
    }
}
