// SPDX-License-Identifier: Apache-2.0
//! Arming: probes attached, and parked before anything is told of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use patchbay_proto::v1::from_agent::Message as Answer;
use patchbay_proto::v1::to_agent::Message as Question;
use patchbay_proto::v1::{
    AgentDisable, AgentEnable, AgentEnabledEvent, AgentEvent, AgentEvents, AgentSettle, FlipReport,
    TracepointState,
};

use super::{ArmTerms, Outcome, SwitchTerms, Tracer};
use crate::trace::book::Armed;
use crate::trace::decode::Format;
use crate::trace::error::TraceError;
use crate::trace::hub::Source;
use crate::trace::link::{AgentError, bounded};
use crate::trace::select::{self, Wanted};
use crate::trace::switch::TracepointFacts;

/// Attaching a probe waits for the guest's RCU; per question to the agent.
const ENABLE_PATIENCE: Duration = Duration::from_secs(30);
const SETTLE_PATIENCE: Duration = Duration::from_secs(10);
const ENABLED_PER_QUESTION: usize = 32;

impl Tracer {
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
        self.forget_vanished(&facts);
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

    pub(super) fn refuse_others<'a>(
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
                connection,
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

    /// Has probes removed; what the agent does not answer for is tried again later.
    pub(super) async fn detach(&self, names: Vec<String>) -> Option<AgentError> {
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
