// SPDX-License-Identifier: Apache-2.0
//! Matches events against a client's patterns, and finds those that can be parked.

use std::collections::{BTreeMap, HashMap};

use patchbay_kernel_image::live::EVENT_PROBES;
use patchbay_proto::agent::v1::AgentEvents;
use static_keys::{Patterns, split_name};

use super::error::TraceError;
use super::switch::{TracepointFacts, UNKNOWN_PROBE};
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
        self.patterns.select_full(event)
    }

    /// Returns whether a literal name matches the event.
    pub fn names(&self, event: &str) -> bool {
        let (_, name) = split_name(event);
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
                .any(|event| event == text || split_name(event).1 == text)
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

/// Returns the facts by the name of the tracepoint, which is also the name of its event.
pub fn by_name(facts: Vec<TracepointFacts>) -> HashMap<String, TracepointFacts> {
    facts
        .into_iter()
        .map(|facts| (split_name(&facts.key).1.to_owned(), facts))
        .collect()
}

/// Returns the facts of an event's tracepoint.
pub fn of_event<'a>(
    facts: &'a HashMap<String, TracepointFacts>,
    event: &str,
) -> Option<&'a TracepointFacts> {
    facts.get(split_name(event).1)
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

/// The users of a probe, by the prefix of its function.
const USERS: [(&str, &str); 3] = [
    (EVENT_PROBES[0], "tracefs or trace_event="),
    (EVENT_PROBES[1], "perf or BPF"),
    (EVENT_PROBES[2], "BPF"),
];

/// Returns the users of a tracepoint's probes other than the first `known` ones of tracefs, and
/// other than those that belong to no event. Returns `None` if the functions are not known.
fn named_users(facts: &TracepointFacts, mut known: usize) -> Option<Vec<String>> {
    if facts.functions.is_empty() {
        return None;
    }
    let mut counts: Vec<(&str, usize)> = vec![];
    let functions = facts.functions.iter().map(String::as_str);
    for function in functions.filter(|function| !facts.also_serves.contains(function)) {
        if known > 0 && function.starts_with(EVENT_PROBES[0]) {
            known -= 1;
            continue;
        }
        match counts.iter_mut().find(|(counted, _)| *counted == function) {
            Some((_, count)) => *count += 1,
            None => counts.push((function, 1)),
        }
    }
    let users = counts.into_iter();
    Some(
        users
            .map(|(function, count)| user(function, count))
            .collect(),
    )
}

/// Names `count` probes with the same function by their user.
fn user(function: &str, count: usize) -> String {
    let mut users = USERS.iter();
    let user = users.find(|(prefix, _)| function.starts_with(prefix));
    match (user, count) {
        (Some((_, user)), 1) => format!("{user} ({function})"),
        (Some((_, user)), _) => format!("{count} probes of {user} ({function})"),
        (None, 1) if function == UNKNOWN_PROBE => {
            "an unknown probe (the kernel or a module)".to_owned()
        }
        (None, _) if function == UNKNOWN_PROBE => {
            format!("{count} unknown probes (the kernel or a module)")
        }
        (None, 1) => format!("a probe of the kernel's own ({function})"),
        (None, _) => format!("{count} probes of the kernel's own ({function})"),
    }
}

/// Returns whether an event is recorded in the guest's rings. If the functions of the probes are
/// not known, any probe counts.
pub fn is_recorded(facts: &TracepointFacts) -> bool {
    let mut functions = facts.functions.iter();
    facts.has_probe()
        && (facts.functions.is_empty()
            || functions.any(|function| function.starts_with(EVENT_PROBES[0])))
}

/// Returns the other users of each of the events in `names`. `events` is the last report
/// of the agent.
pub fn others<'a>(
    events: &AgentEvents,
    names: impl IntoIterator<Item = &'a String>,
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
        let probes = of_event(facts, event).and_then(|facts| facts.probes);
        probes.is_none_or(|probes| probes > u32::from(is_armed(event)))
    });
    for event in names {
        let Some(facts) = of_event(facts, event) else {
            continue;
        };
        let Some(probes) = facts.probes else {
            continue;
        };
        let users = others.get(event).map_or(0, Vec::len) + usize::from(is_armed(event));
        let known = users + facts.also_serves.len();
        if !facts.also_serves.is_empty() {
            let who = format!("names of tasks ({})", facts.also_serves.join(", "));
            others.entry(event.clone()).or_default().push(who);
        }
        if let Some(users) = named_users(facts, users) {
            if !users.is_empty() {
                others.entry(event.clone()).or_default().extend(users);
            }
            continue;
        }
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
            functions: vec![],
            also_serves: vec![],
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
        let others = others(&told, &told.names, &facts, |event| {
            event != "irq:softirq_entry"
        });
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
        let mut with_names = self::facts("sched_switch", 4);
        with_names.also_serves = vec!["probe_sched_switch"];
        assert_eq!(
            super::others(&told, &told.names, &by_name(vec![with_names]), |_| true)["sched:sched_switch"],
            [
                "tracefs: top level",
                "tracefs: x",
                "names of tasks (probe_sched_switch)"
            ]
        );
        let left = by_name(vec![self::facts("sched_switch", 1)]);
        assert!(
            super::others(&told, &told.names, &left, |_| true).is_empty(),
            "they have ended since they were told of"
        );
    }

    /// Without an agent, the functions of the probes tell who uses a tracepoint.
    #[test]
    fn users_are_known_by_their_probes() {
        let mut of_switch = facts("sched_switch", 6);
        let functions = [
            "probe_sched_switch",
            "trace_event_raw_event_sched_switch",
            "trace_event_raw_event_sched_switch",
            "perf_trace_sched_switch",
            UNKNOWN_PROBE,
            "ftrace_filter_pid_sched_switch_probe",
        ];
        of_switch.functions = functions.map(str::to_owned).to_vec();
        of_switch.also_serves = vec!["probe_sched_switch"];
        let facts = by_name(vec![of_switch]);
        let name = ["sched:sched_switch".to_owned()];
        let users = |told: &AgentEvents, is_armed| {
            super::others(told, &name, &facts, |_| is_armed)["sched:sched_switch"].clone()
        };
        let rest = [
            "perf or BPF (perf_trace_sched_switch)",
            "an unknown probe (the kernel or a module)",
            "a probe of the kernel's own (ftrace_filter_pid_sched_switch_probe)",
        ];
        let first = "names of tasks (probe_sched_switch)";
        let tracefs = "tracefs or trace_event= (trace_event_raw_event_sched_switch)";
        let twice = format!("2 probes of {tracefs}");
        let none = AgentEvents::default();
        let expected = [&[first, &twice], &rest[..]].concat();
        assert_eq!(users(&none, false), expected);
        let expected = [&[first, tracefs], &rest[..]].concat();
        assert_eq!(users(&none, true), expected, "one is the agent's");
        let told = AgentEvents {
            names: name.to_vec(),
            others: vec![AgentInstance {
                name: "x".into(),
                events: name.to_vec(),
            }],
        };
        let expected = [&["tracefs: x", first], &rest[..]].concat();
        assert_eq!(users(&told, true), expected);
        let three = [UNKNOWN_PROBE, "ftrace_filter_pid_sched_switch_probe"];
        let three = three.map(|function| user(function, 3));
        let expected = [
            "3 unknown probes (the kernel or a module)",
            "3 probes of the kernel's own (ftrace_filter_pid_sched_switch_probe)",
        ];
        assert_eq!(three, expected);
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
