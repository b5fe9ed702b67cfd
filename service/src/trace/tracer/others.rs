// SPDX-License-Identifier: Apache-2.0
//! Others in the guest who trace what is armed here: ftrace, perf, BPF, modules.
//!
//! The kernel turns a tracepoint's key on for its first probe alone (`tracepoint_add_func()`,
//! `kernel/tracepoint.c`), and that is the agent's. So who comes after it to a parked event would see
//! nothing, and who stays after it too.

use std::collections::HashMap;

use super::{SwitchTerms, Tracer};
use crate::trace::select;
use crate::trace::switch::TracepointFacts;

/// The client for whom an event fires that others in the guest trace.
pub const OTHERS: &str = "others in the guest";

/// Whether somebody beside the agent has a probe there; None if it could not be read just now.
fn has_others(facts: &HashMap<String, TracepointFacts>, event: &str) -> Option<bool> {
    let probes = facts.get(select::split(event).1)?.probes?;
    Some(probes > 1)
}

impl Tracer {
    /// Lets armed events fire that others in the guest have begun to trace, unless a client has said
    /// that they may be silenced, and parks those that they trace no longer.
    pub async fn heed_others(&self) {
        let heeds = |tracer: &Self| {
            let book = tracer.book();
            book.events.values().any(|armed| !armed.even_if_others)
        };
        if !heeds(self) {
            return;
        }
        let _turn = self.turn.lock().await;
        // A guest that has not registered again has no events to heed.
        let Ok(facts) = self.facts().await else {
            return;
        };
        let (come, gone) = {
            let book = self.book();
            let changed = |now: bool| -> Vec<String> {
                let changed = book.events.iter().filter(|(name, armed)| {
                    !armed.even_if_others
                        && armed.fired_by.contains(OTHERS) != now
                        && has_others(&facts, name) == Some(now)
                });
                changed.map(|(name, _)| name.clone()).collect()
            };
            (changed(true), changed(false))
        };
        self.fire_for_others(&come).await;
        self.park_after_others(&gone).await;
    }

    async fn fire_for_others(&self, names: &[String]) {
        let keys = self.book().keys(names);
        let terms = SwitchTerms::default();
        match self
            .switch(keys, true, OTHERS, "fire tracepoints", &terms)
            .await
        {
            Ok(report) => {
                for name in names {
                    if let Some(armed) = self.book().events.get_mut(name) {
                        armed.fired_by.insert(OTHERS.to_owned());
                    }
                }
                self.mark("fired", names, OTHERS, report.as_ref());
            }
            Err(error) => tracing::warn!(
                ?names,
                %error,
                "others in the guest trace events that are parked and could not be fired"
            ),
        }
    }

    async fn park_after_others(&self, names: &[String]) {
        let to_park = {
            let mut book = self.book();
            book.release_fire(names, OTHERS, false);
            let idle = |name: &&String| {
                let armed = book.events.get(*name);
                armed.is_some_and(|armed| armed.fired_by.is_empty())
            };
            names.iter().filter(idle).cloned().collect::<Vec<_>>()
        };
        let keys = self.book().keys(&to_park);
        let terms = SwitchTerms::default();
        match self
            .switch(keys, false, OTHERS, "park tracepoints", &terms)
            .await
        {
            Ok(report) => self.mark("parked", &to_park, OTHERS, report.as_ref()),
            Err(error) => {
                tracing::warn!(?to_park, %error, "events that nobody keeps firing could not be parked");
            }
        }
    }

    /// Those of the events that somebody in the guest still traces when the agent's probe is gone,
    /// and the rest. Those that cannot be looked at now are among the rest.
    pub(super) async fn split_by_others(&self, names: &[String]) -> (Vec<String>, Vec<String>) {
        let facts = self.facts().await.unwrap_or_default();
        names
            .iter()
            .cloned()
            .partition(|name| has_others(&facts, name) == Some(true))
    }
}
