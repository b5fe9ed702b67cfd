// SPDX-License-Identifier: Apache-2.0
//! Matches events against a client's patterns, and finds those that can be parked.

use std::collections::{BTreeMap, HashMap};

use patchbay_proto::agent::v1::AgentEvents;

use super::error::TraceError;
use super::switch::TracepointFacts;
use static_keys::Patterns;

use crate::keys::KeysError;

/// Patterns of a request, with their text.
#[derive(Clone, Debug)]
pub struct Wanted {
    texts: Vec<String>,
    patterns: Patterns,
}

impl Wanted {
    /// Parses globs.
    ///
    /// # Errors
    /// A pattern is invalid, or there is no pattern although `at_least_one` is set.
    pub fn parse(texts: Vec<String>, at_least_one: bool) -> Result<Self, TraceError> {
        if at_least_one && texts.is_empty() {
            let message = "is empty; name events, or '*' for all".to_owned();
            return Err(TraceError::Invalid {
                field: "patterns",
                message,
            });
        }
        let patterns = Patterns::parse(&texts).map_err(KeysError::from)?;
        Ok(Self { texts, patterns })
    }

    /// Returns the text of the patterns.
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Returns the patterns in the form that a stream uses.
    pub fn patterns(&self) -> &Patterns {
        &self.patterns
    }

    /// Returns whether an event matches.
    pub fn matches(&self, event: &str) -> bool {
        let (system, name) = split(event);
        self.patterns.select(system, name)
    }

    /// Returns whether a literal name matches the event.
    pub fn names(&self, event: &str) -> bool {
        let (_, name) = split(event);
        self.texts.iter().any(|text| text == event || text == name)
    }

    /// Returns the events that match.
    ///
    /// # Errors
    /// Returns the literal names that match nothing, or all patterns if nothing matches.
    pub fn select<'a>(
        &self,
        events: impl Iterator<Item = &'a String>,
    ) -> Result<Vec<String>, Vec<String>> {
        let found: Vec<String> = events
            .filter(|event| self.matches(event))
            .cloned()
            .collect();
        let is_plain = |text: &&String| !text.starts_with('!') && !text.contains(['*', '?', '[']);
        let means = |text: &str| {
            found
                .iter()
                .any(|event| event == text || split(event).1 == text)
        };
        let missing: Vec<String> = self
            .texts
            .iter()
            .filter(is_plain)
            .filter(|text| !means(text))
            .cloned()
            .collect();
        match (found.is_empty(), missing.is_empty()) {
            (_, false) => Err(missing),
            (true, true) => Err(self.texts.clone()),
            (false, true) => Ok(found),
        }
    }
}

/// Splits "system:name" into system and name.
pub fn split(event: &str) -> (&str, &str) {
    event.split_once(':').unwrap_or(("", event))
}

/// Returns the facts by the name of the tracepoint, which is also the name of its event.
pub fn by_name(facts: Vec<TracepointFacts>) -> HashMap<String, TracepointFacts> {
    let name = |key: &str| {
        key.rsplit_once(':')
            .map_or(key, |(_, name)| name)
            .to_owned()
    };
    facts
        .into_iter()
        .map(|facts| (name(&facts.key), facts))
        .collect()
}

/// Returns the reason why an event cannot be parked, or `None` if it can.
pub fn refusal(facts: Option<&TracepointFacts>) -> Option<String> {
    match facts {
        None => Some(
            "it has no tracepoint of its own among the registered keys (system calls share one, and dynamic events have none)"
                .to_owned(),
        ),
        Some(facts) if facts.switched_by_function => {
            Some("its tracepoint has a function that must run in the guest when it is switched (regfunc)".to_owned())
        }
        Some(_) => None,
    }
}

/// Returns the other users of each event.
pub fn others(
    events: &AgentEvents,
    facts: &HashMap<String, TracepointFacts>,
    is_armed: impl Fn(&str) -> bool,
) -> BTreeMap<String, Vec<String>> {
    let mut others: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for instance in &events.others {
        let who = if instance.name.is_empty() {
            "top level"
        } else {
            &instance.name
        };
        for event in &instance.events {
            others
                .entry(event.clone())
                .or_default()
                .push(format!("tracefs: {who}"));
        }
    }
    // The agent's list may be stale: without another probe there is no other user.
    others.retain(|event, _| {
        let probes = facts.get(split(event).1).and_then(|facts| facts.probes);
        probes.is_none_or(|probes| probes > u32::from(is_armed(event)))
    });
    for event in &events.names {
        let Some(probes) = facts.get(split(event).1).and_then(|facts| facts.probes) else {
            continue;
        };
        let known = others.get(event).map_or(0, Vec::len) + usize::from(is_armed(event));
        let unknown = usize::try_from(probes)
            .unwrap_or(usize::MAX)
            .saturating_sub(known);
        if unknown > 0 {
            let who = format!(
                "{unknown} unknown probe{} (perf, BPF or a module)",
                if unknown == 1 { "" } else { "s" }
            );
            others.entry(event.clone()).or_default().push(who);
        }
    }
    others
}

#[cfg(test)]
mod tests {
    use patchbay_proto::agent::v1::AgentInstance;

    use super::*;

    fn wanted(texts: &[&str]) -> Wanted {
        Wanted::parse(texts.iter().map(|&text| text.to_owned()).collect(), true)
            .expect("well-formed")
    }

    fn events() -> Vec<String> {
        [
            "irq:softirq_entry",
            "sched:sched_switch",
            "sched:sched_waking",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    fn facts(name: &str, probes: u32) -> TracepointFacts {
        TracepointFacts {
            key: name.to_owned(),
            enabled: false,
            probes: Some(probes),
            switched_by_function: false,
        }
    }

    #[test]
    fn globs_names_and_what_is_missing() {
        let select = |texts: &[&str]| wanted(texts).select(events().iter());
        assert_eq!(select(&["sched:*"]).expect("two").len(), 2);
        assert_eq!(
            select(&["sched_switch"]).expect("one"),
            ["sched:sched_switch"]
        );
        assert_eq!(select(&["*", "!irq:*"]).expect("two").len(), 2);
        assert_eq!(
            select(&["sched:*", "sched_swich"]).expect_err("misspelt"),
            ["sched_swich"]
        );
        assert_eq!(select(&["ext4:*"]).expect_err("none"), ["ext4:*"]);
        assert!(Wanted::parse(vec![], true).is_err());
        assert!(wanted(&["sched_switch"]).names("sched:sched_switch"));
        assert!(!wanted(&["sched_*"]).names("sched:sched_switch"));
    }

    #[test]
    fn others_are_named_as_far_as_they_are_known() {
        let instance = |name: &str, event: &str| AgentInstance {
            name: name.into(),
            events: vec![event.into()],
        };
        let told = AgentEvents {
            names: events(),
            others: vec![
                instance("", "sched:sched_switch"),
                instance("x", "sched:sched_switch"),
            ],
        };
        let facts = by_name(vec![
            facts("sched_switch", 4),
            facts("sched_waking", 1),
            facts("m:softirq_entry", 2),
        ]);
        let others = others(&told, &facts, |event| event != "irq:softirq_entry");
        assert_eq!(
            others["sched:sched_switch"],
            [
                "tracefs: top level",
                "tracefs: x",
                "1 unknown probe (perf, BPF or a module)"
            ]
        );
        assert_eq!(
            others.get("sched:sched_waking"),
            None,
            "the one probe is the agent's"
        );
        assert_eq!(
            others["irq:softirq_entry"],
            ["2 unknown probes (perf, BPF or a module)"]
        );
        let left = by_name(vec![self::facts("sched_switch", 1)]);
        assert!(
            super::others(&told, &left, |_| true).is_empty(),
            "they have ended since they were told of"
        );
    }

    #[test]
    fn what_cannot_be_parked_is_refused_with_the_reason() {
        assert!(refusal(None).expect("refused").contains("system calls"));
        let mut facts = facts("sys_enter", 0);
        assert_eq!(refusal(Some(&facts)), None);
        facts.switched_by_function = true;
        assert!(refusal(Some(&facts)).expect("refused").contains("regfunc"));
    }
}
