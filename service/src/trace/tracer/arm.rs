// SPDX-License-Identifier: Apache-2.0
//! Arming: attaches probes, and parks their keys before any event is sent to a client.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use patchbay_proto::agent::v1::from_agent::Message as Answer;
use patchbay_proto::agent::v1::to_agent::Message as Question;
use patchbay_proto::agent::v1::{
    AgentDisable, AgentEnable, AgentEnabledEvent, AgentEvent, AgentEvents, AgentSettle,
};
use patchbay_proto::v1::TracepointState;

use tokio::time::Instant;

use super::{ArmTerms, SwitchTerms, TraceOutcome, Tracer};
use crate::keys::{FlipReport, TracepointUpdate};
use crate::trace::book::{Armed, Book};
use crate::trace::decode::Format;
use crate::trace::error::{AgentError, TraceError};
use crate::trace::link::bounded;
use crate::trace::select::{self, Wanted};
use crate::trace::stream::Source;
use crate::trace::switch::TracepointFacts;

/// Timeout of an agent's request: attaching a probe waits for an RCU grace period in the guest.
const ENABLE_PATIENCE: Duration = Duration::from_secs(30);
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);
const ENABLED_PER_QUESTION: usize = 32;
const MAX_OVERDUE: usize = 16_384;
/// Maximum time for which an agent that does not answer may block the events.
pub(super) const CLAIM_PATIENCE: Duration = ENABLE_PATIENCE;
/// Limit on the size of the formats of all armed events in bytes. All formats of a distribution
/// kernel take a tenth of it.
const MAX_FORMATS_BYTES: usize = 16 << 20;

impl Tracer {
    /// Arms events for a client. If an event is already armed, the client is added to it.
    ///
    /// # Errors
    /// [`TraceError`]. No event is newly armed then.
    pub async fn arm(
        &self,
        client: &str,
        wanted: &Wanted,
        terms: &ArmTerms,
    ) -> Result<TraceOutcome, TraceError> {
        let (events, stale) = self.events().await;
        if let Some(error) = stale {
            return Err(error.into());
        }
        let names = wanted
            .select(events.names.iter())
            .map_err(|patterns| TraceError::EventNotFound { patterns })?;
        // The events are claimed before the facts are read, because other calls change these facts.
        let _moving = match terms.validate_only {
            true => None,
            false => Some(self.claim(&names, CLAIM_PATIENCE).await?),
        };
        let facts = self.facts().await?;
        self.forget_vanished(&facts);
        let chosen = Self::choose(names, wanted, &facts.by_name)?;
        let keys: Vec<String> = chosen.values().cloned().collect();
        self.permit(terms.caller.as_ref(), &keys, terms.validate_only)?;
        let fresh = {
            let book = self.book();
            let fresh = Self::fresh(&book, client, &chosen, terms)?;
            if !terms.even_if_others {
                Self::refuse_others(&book, &events, &facts.by_name, fresh.keys())?;
            }
            fresh
        };
        let mut report = None;
        if !terms.validate_only {
            if !fresh.is_empty() {
                report = self.attach(client, &fresh, terms).await?;
            }
            let until = terms.ttl.map(|ttl| Instant::now() + ttl);
            let mut book = self.book();
            for name in chosen.keys() {
                if let Some(armed) = book.events.get_mut(name) {
                    armed.armed_by.insert(client.to_owned(), until);
                    armed.even_if_others |= terms.even_if_others;
                }
            }
            self.wakes.expiries.notify_one();
        }
        Ok(TraceOutcome {
            results: self.results(chosen.into_keys(), client, Some(TracepointState::Parked)),
            report,
        })
    }

    /// Returns the events that can be parked, with the names of their keys.
    fn choose(
        names: Vec<String>,
        wanted: &Wanted,
        facts: &HashMap<String, TracepointFacts>,
    ) -> Result<BTreeMap<String, String>, TraceError> {
        let mut chosen = BTreeMap::new();
        for name in names {
            let of_event = select::of_event(facts, &name);
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
        Ok(chosen)
    }

    /// Returns the events that the agent must enable, or enable again with another filter.
    fn fresh(
        book: &Book,
        client: &str,
        chosen: &BTreeMap<String, String>,
        terms: &ArmTerms,
    ) -> Result<BTreeMap<String, String>, TraceError> {
        let mut fresh = BTreeMap::new();
        for (name, key) in chosen {
            if let Some(armed) = book.of_agent(name) {
                let same = |asked: &str, set: &str| asked.is_empty() || asked == set;
                if same(&terms.filter, &armed.filter) && same(&terms.trigger, &armed.trigger) {
                    continue;
                }
                if armed.armed_by.keys().any(|other| other != client) {
                    let owners = armed
                        .armed_by
                        .keys()
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

    pub(super) fn refuse_others<'a>(
        book: &Book,
        events: &AgentEvents,
        facts: &HashMap<String, TracepointFacts>,
        names: impl Iterator<Item = &'a String>,
    ) -> Result<(), TraceError> {
        let has_probe = |event: &str| book.may_have_probe(event);
        let others = select::others(events, &events.names, facts, has_probe);
        let traced: Vec<String> = names
            .filter_map(|name| Some(format!("{name} ({})", others.get(name)?.join(", "))))
            .collect();
        if traced.is_empty() {
            Ok(())
        } else {
            Err(TraceError::OthersTrace { events: traced })
        }
    }

    /// Lets the agent attach probes, then parks the keys.
    async fn attach(
        &self,
        client: &str,
        fresh: &BTreeMap<String, String>,
        terms: &ArmTerms,
    ) -> Result<Option<FlipReport>, TraceError> {
        let quiet = self.is_quiet();
        let attached = self.try_attach(client, fresh, terms, quiet).await;
        if attached.is_err() {
            let names: Vec<String> = {
                let book = self.book();
                let fresh = fresh.keys().cloned();
                fresh.filter(|name| !book.is_agents(name)).collect()
            };
            self.detach(&names).await;
            // The recording is restarted even if the agent does not answer in time, because it
            // processes requests in order.
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
        let connection = self.link.peer()?.connection;
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
                    text: Box::default(),
                    // Events of this source are skipped until the arming is complete.
                    settled_at: AtomicU64::new(u64::MAX),
                    events: AtomicU64::new(0),
                }));
            }
            self.afford(&sources)?;
        }
        let report = self.park_fresh(client, fresh).await?;
        let settled_at = self.settle().await?;
        let mut book = self.book();
        for source in sources {
            source.settled_at.store(settled_at, Ordering::Relaxed);
            self.hub.add_source(Arc::clone(&source));
            let Some(key) = fresh.get(&source.name) else {
                continue;
            };
            book.armed += 1;
            let earlier = book.events.remove(&source.name);
            let armed = Armed {
                key: key.clone(),
                filter: terms.filter.clone(),
                trigger: terms.trigger.clone(),
                connection,
                even_if_others: terms.even_if_others,
                armed_by: BTreeMap::from([(client.to_owned(), None)]),
                backoff: earlier.map(|armed| armed.backoff).unwrap_or_default(),
                serial: book.armed,
                source: Some(Arc::clone(&source)),
            };
            book.overdue.remove(&source.name);
            book.events.insert(source.name.clone(), armed);
        }
        self.wakes.armed.notify_one();
        Ok(report)
    }

    /// Parks the events to which the agent has just attached probes. Those that the guest's own
    /// kernel had armed continue to fire for their other clients.
    async fn park_fresh(
        &self,
        client: &str,
        fresh: &BTreeMap<String, String>,
    ) -> Result<Option<FlipReport>, TraceError> {
        let _turn = self.turn.lock().await;
        let (guests, rest): (Vec<_>, Vec<_>) = {
            let book = self.book();
            let is_guests = |name: &str| book.events.get(name).is_some_and(Armed::is_guests);
            fresh.iter().partition(|(name, _)| is_guests(name))
        };
        let mut report = None;
        // Silence drops the kernel's own reference, which no client holds, and holds of an earlier
        // arming.
        for (events, update) in [
            (guests, TracepointUpdate::Park),
            (rest, TracepointUpdate::Silence),
        ] {
            let keys = events.into_iter().map(|(_, key)| key.clone()).collect();
            let terms = SwitchTerms::default();
            let switched = self.switch(keys, update, client, "arm tracepoints", &terms);
            report = switched.await?.or(report);
        }
        Ok(report)
    }

    /// Checks the limit on the formats, whose size the guest chooses.
    fn afford(&self, sources: &[Arc<Source>]) -> Result<(), TraceError> {
        let book = self.book();
        let armed = book.events.values();
        let armed = armed.filter_map(|armed| armed.source.as_ref());
        let bytes = armed
            .chain(sources)
            .map(|source| source.format.bytes())
            .sum();
        if bytes > MAX_FORMATS_BYTES {
            return Err(TraceError::TooMuchArmed {
                bytes,
                max: MAX_FORMATS_BYTES,
            });
        }
        Ok(())
    }

    /// Lets the agent record again. Returns the guest's time just before that.
    pub(super) async fn settle(&self) -> Result<u64, TraceError> {
        match self
            .link
            .ask(Question::Settle(AgentSettle {}), SETTLE_PATIENCE)
            .await?
        {
            Answer::Done(done) => Ok(done.guest_time_ns),
            _ => Err(AgentError::Confused.into()),
        }
    }

    /// Asks the agent to detach probes. Requests without an answer are retried later. After the
    /// first timeout the agent is not asked about the remaining events.
    pub(super) async fn detach(&self, names: &[String]) -> Option<AgentError> {
        {
            // The number of overdue events is limited, because each new agent can report unknown
            // events.
            let mut book = self.book();
            let room = MAX_OVERDUE.saturating_sub(book.overdue.len());
            let was_empty = book.overdue.is_empty();
            book.overdue.extend(names.iter().take(room).cloned());
            if was_empty && !book.overdue.is_empty() {
                self.wakes.overdue.notify_one();
            }
        }
        for names in names.chunks(ENABLED_PER_QUESTION) {
            let question = Question::Disable(AgentDisable {
                names: names.to_vec(),
            });
            match self.link.ask(question, ENABLE_PATIENCE).await {
                Ok(Answer::Enabled(_)) => {
                    let mut book = self.book();
                    for name in names {
                        book.overdue.remove(name);
                    }
                }
                other => return Some(other.err().unwrap_or(AgentError::Confused)),
            }
        }
        None
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
