// SPDX-License-Identifier: Apache-2.0
//! Parks events that the guest's own kernel has armed, because its command line says so. They can
//! then be fired and parked as events that the agent has armed, without an agent.
//!
//! The kernel's probe writes to the guest's rings, from where the events are read in memory. Only
//! the tracepoint's key decides whether the probe is called.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use patchbay_guest::log_limit::limited;

use super::{SwitchTerms, Tracer};
use crate::auth::COMMAND_LINE;
use crate::keys::{FlipReport, KeysError, RefusedKey, TracepointUpdate};
use crate::trace::book::Armed;
use crate::trace::error::TraceError;
use crate::trace::select::{self, Wanted};
use crate::trace::switch::TracepointFacts;

/// The maximum time of an attempt for retries.
const PARK_TIME: Duration = Duration::from_secs(1);
/// The maximum number of keys that one attempt leaves out because they are refused. The guest
/// chooses the keys that are.
const MAX_REFUSED: usize = 16;

impl Tracer {
    /// Parks the wanted events that the guest records, unless they are parked already, and except
    /// those whose keys are refused. Returns the number of the other events, with those that were
    /// armed before; `None` if the kernel's list of events is not found in memory.
    ///
    /// # Errors
    /// [`TraceError`]. Nothing is parked then.
    pub async fn park_own(&self, wanted: &Wanted) -> Result<Option<usize>, TraceError> {
        let mut names = self.events_in_memory().await;
        let _turn = self.turn.lock().await;
        let facts = self.facts().await?;
        if names.is_empty() {
            return Ok(None);
        }
        names.retain(|name| wanted.matches(name));
        self.forget_vanished(&facts);
        let fired_by = self.fired_by(&names);
        let (mut fresh, mut known) = (BTreeMap::new(), 0);
        {
            let book = self.book();
            // An event of an earlier boot is in the book, but the kernel of this boot fires it.
            let is_fired = |name: &str, facts: &TracepointFacts| {
                let is_held = fired_by.get(name).is_some_and(|by| !by.is_empty());
                facts.enabled && !is_held && !book.is_agents(name)
            };
            for name in names {
                let of_event = select::of_event(&facts.by_name, &name);
                let parkable = of_event.filter(|facts| select::refusal(Some(facts)).is_none());
                let Some(facts) = parkable.filter(|facts| select::is_recorded(facts)) else {
                    continue;
                };
                let is_known = book.events.contains_key(&name) && !is_fired(&name, facts);
                if is_known || book.moving.contains(&name) {
                    known += 1;
                } else {
                    fresh.insert(name, facts.key.clone());
                }
            }
        }
        let report = self.silence_own(&mut fresh).await?;
        let names: Vec<String> = fresh.keys().cloned().collect();
        {
            let mut book = self.book();
            for (name, key) in fresh {
                book.armed += 1;
                let armed = Armed {
                    key,
                    // The probes of the kernel itself and of other instances are silenced too.
                    even_if_others: true,
                    armed_by: BTreeMap::from([(COMMAND_LINE.to_owned(), None)]),
                    serial: book.armed,
                    ..Armed::default()
                };
                book.events.insert(name, armed);
            }
        }
        self.mark("parked", &names, COMMAND_LINE, report.as_ref());
        Ok(Some(names.len() + known))
    }

    /// Parks these events. Those whose keys are refused are removed from the map.
    async fn silence_own(
        &self,
        fresh: &mut BTreeMap<String, String>,
    ) -> Result<Option<FlipReport>, TraceError> {
        // All changes of the guest's keys wait for this one, which is repeated later.
        let terms = SwitchTerms {
            deadline: Instant::now() + PARK_TIME,
            ..SwitchTerms::default()
        };
        // This drops the kernel's own reference, which no client holds.
        let silence = TracepointUpdate::Silence;
        let reason = "park the events of --trace-events";
        let mut refused = vec![];
        loop {
            let keys = fresh.values().cloned().collect();
            let switched = self.switch(keys, silence, COMMAND_LINE, reason, &terms);
            let error = match switched.await {
                Ok(report) => {
                    if !refused.is_empty() {
                        limited!(
                            warn,
                            ?refused,
                            "the keys of some events of --trace-events are refused, so these events fire"
                        );
                    }
                    return Ok(report);
                }
                Err(error) => error,
            };
            let Some(key) = refused_key(&error).filter(|_| refused.len() < MAX_REFUSED) else {
                return Err(error);
            };
            let before = fresh.len();
            fresh.retain(|_, of_event| of_event != key);
            if fresh.is_empty() || fresh.len() == before {
                return Err(error);
            }
            refused.push(error.to_string());
        }
    }
}

/// Returns the key that a change of several keys was refused for.
fn refused_key(error: &TraceError) -> Option<&str> {
    match error {
        TraceError::Keys(
            KeysError::KeyRefused {
                key: RefusedKey::Named(key),
                ..
            }
            | KeysError::KeyNotFound { name: key, .. }
            | KeysError::ForeignBytes { key, .. },
        ) => Some(key),
        _ => None,
    }
}
