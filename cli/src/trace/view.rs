// SPDX-License-Identifier: Apache-2.0
//! Prints tracepoints and events.

use std::fmt::Write;

use patchbay_proto::v1;
use patchbay_proto::v1::trace_field::Value;
use serde::Serialize;

use crate::print::{self, Printable, Rows};
use crate::text::one_line;

#[derive(Debug, Serialize)]
pub struct Tracepoint {
    pub name: String,
    pub state: &'static str,
    /// Its key is on, regardless of who turned it on.
    pub enabled: bool,
    pub probes: Option<u32>,
    /// The functions of the probes, as far as their names are known.
    pub probe_functions: Vec<String>,
    pub others: Vec<String>,
    pub armed_by: Vec<String>,
    pub fired_by: Vec<String>,
    pub filter: String,
    pub trigger: String,
    pub events: u64,
    pub refused: String,
    /// The name of its static key; empty if it has none.
    pub key: String,
    /// The probes that belong to no event and are silent while it is parked.
    pub also_serves: Vec<String>,
    /// The tracefs instances that have enabled it, with `--armed`.
    pub enabled_in: Vec<String>,
}

impl From<v1::Tracepoint> for Tracepoint {
    fn from(tracepoint: v1::Tracepoint) -> Self {
        Self {
            state: state(tracepoint.state()),
            name: tracepoint.name,
            enabled: tracepoint.enabled,
            probes: tracepoint.probes,
            probe_functions: tracepoint.probe_functions,
            others: tracepoint.others,
            armed_by: tracepoint.armed_by,
            fired_by: tracepoint.fired_by,
            filter: tracepoint.filter,
            trigger: tracepoint.trigger,
            events: tracepoint.events,
            refused: tracepoint.refused,
            key: tracepoint.key,
            also_serves: tracepoint.also_serves,
            enabled_in: tracepoint.enabled_in,
        }
    }
}

fn state(state: v1::TracepointState) -> &'static str {
    match state {
        v1::TracepointState::Firing => "firing",
        v1::TracepointState::Parked => "parked",
        v1::TracepointState::Disarmed | v1::TracepointState::Unspecified => "disarmed",
    }
}

impl Printable for Vec<Tracepoint> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "STATE", "PROBES", "EVENTS", "NOTES"]);
        for tracepoint in self {
            rows.push([
                tracepoint.name.clone(),
                tracepoint.state.to_owned(),
                tracepoint
                    .probes
                    .map_or("-".to_owned(), |probes| probes.to_string()),
                tracepoint.events.to_string(),
                notes(tracepoint),
            ]);
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("events")
    }

    fn names(&self) -> Vec<&str> {
        self.iter()
            .map(|tracepoint| tracepoint.name.as_str())
            .collect()
    }
}

fn notes(tracepoint: &Tracepoint) -> String {
    let mut notes = vec![];
    let mut note = |what: &str, text: &str| {
        if !text.is_empty() {
            notes.push(format!("{what}{text}"));
        }
    };
    note("fired by ", &tracepoint.fired_by.join(" "));
    note("armed by ", &tracepoint.armed_by.join(" "));
    note("enabled in ", &tracepoint.enabled_in.join(", "));
    note("others: ", &tracepoint.others.join(", "));
    let is_silent = !tracepoint.enabled && tracepoint.state == "disarmed";
    if is_silent && tracepoint.probes.is_some_and(|probes| probes > 0) {
        note("silent, its key is off", " ");
    }
    note("filter ", &tracepoint.filter);
    note("trigger ", &tracepoint.trigger);
    // The reason is left out, because the same long sentence would be repeated for the event of
    // each system call.
    note(
        "cannot be parked",
        if tracepoint.refused.is_empty() {
            ""
        } else {
            " "
        },
    );
    notes.join("; ").trim_end().to_owned()
}

/// The results of a change.
#[derive(Debug, Serialize)]
pub struct Change {
    pub results: Vec<ChangedTracepoint>,
    pub events: usize,
    /// The number of events that fire after the call.
    pub firing: usize,
    pub dry_run: bool,
    /// The time from the request to stop until the last vCPU ran again, in nanoseconds.
    pub stopped_ns: Option<u64>,
    pub sites_patched: u32,
}

#[derive(Debug, Serialize)]
pub struct ChangedTracepoint {
    pub name: String,
    pub state: &'static str,
    pub kept_by: Vec<String>,
    /// The probes that belong to no event and are silent while it is parked.
    pub also_serves: Vec<String>,
}

impl Change {
    pub fn new(
        results: Vec<v1::TracepointResult>,
        report: Option<v1::FlipReport>,
        dry_run: bool,
    ) -> Self {
        let result = |result: v1::TracepointResult| ChangedTracepoint {
            state: state(result.state()),
            name: result.name,
            kept_by: result.kept_by,
            also_serves: result.also_serves,
        };
        let report = report.filter(|report| report.paused);
        let stopped = report.as_ref().map(|report| {
            [report.stop_time, report.patch_time, report.resume_time]
                .into_iter()
                .flatten()
                .map(nanoseconds)
                .sum()
        });
        let results: Vec<_> = results.into_iter().map(result).collect();
        let firing = state(v1::TracepointState::Firing);
        Self {
            events: results.len(),
            firing: results
                .iter()
                .filter(|result| result.state == firing)
                .count(),
            results,
            dry_run,
            stopped_ns: stopped,
            sites_patched: report.map_or(0, |report| report.sites_patched),
        }
    }

    /// Returns a remark for each event whose key also serves other probes.
    pub fn remarks(&self) -> Vec<String> {
        let shared = self.results.iter();
        let shared = shared.filter(|result| !result.also_serves.is_empty());
        let remark = |result: &ChangedTracepoint| {
            format!(
                "{}: its key also serves {}, by which the guest's kernel learns the names of tasks for its own traces",
                result.name,
                result.also_serves.join(", ")
            )
        };
        shared.map(remark).collect()
    }

    /// Takes the numbers from the summary, because an answer with a summary may have no results.
    pub fn with_summary(self, summary: Option<v1::TracepointSummary>) -> Self {
        let Some(v1::TracepointSummary { events, firing }) = summary else {
            return self;
        };
        let to_usize = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
        Self {
            events: to_usize(events),
            firing: to_usize(firing),
            ..self
        }
    }
}

fn nanoseconds(duration: prost_types::Duration) -> u64 {
    let seconds = u64::try_from(duration.seconds).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(duration.nanos).unwrap_or(0))
}

impl Printable for Change {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME", "STATE", "KEPT BY"]);
        for result in &self.results {
            rows.push([
                result.name.as_str(),
                result.state,
                &result.kept_by.join(" "),
            ]);
        }
        rows
    }

    fn footer(&self) -> String {
        let count = print::counted(self.events as u64, "event");
        match self.stopped_ns {
            _ if self.dry_run => format!("{count}; nothing was changed (dry run)\n"),
            Some(stopped) => format!(
                "{count}, {} patched in one pause, guest stopped for {}.{:03} µs\n",
                print::counted(self.sites_patched.into(), "site"),
                stopped / 1000,
                stopped % 1000
            ),
            None => format!("{count}, no pause\n"),
        }
    }

    fn names(&self) -> Vec<&str> {
        self.results
            .iter()
            .map(|result| result.name.as_str())
            .collect()
    }
}

/// A line of `tail`: an event, a loss or a client's change.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Line {
    Event(Box<Event>),
    Lost { lost: Losses },
    Mark { time: String, mark: String },
}

#[derive(Debug, Serialize)]
pub struct Event {
    /// The host's time, in RFC 3339 and UTC.
    pub time: String,
    /// The guest's CLOCK_MONOTONIC.
    pub guest_time_ns: u64,
    pub name: String,
    pub cpu: u32,
    pub pid: i32,
    pub comm: String,
    pub context: String,
    pub fields: serde_json::Map<String, serde_json::Value>,
    #[serde(skip)]
    pub text: String,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Losses {
    pub overwritten: u64,
    pub slow_client: u64,
    pub flood: u64,
    pub malformed: u64,
}

impl From<v1::TraceLosses> for Losses {
    fn from(losses: v1::TraceLosses) -> Self {
        let v1::TraceLosses {
            overwritten,
            slow_client,
            flood,
            malformed,
        } = losses;
        Self {
            overwritten,
            slow_client,
            flood,
            malformed,
        }
    }
}

impl Losses {
    /// Adds further losses. The guest chooses some of these numbers.
    pub fn add(&mut self, more: &Self) {
        for (sum, more) in [
            (&mut self.overwritten, more.overwritten),
            (&mut self.slow_client, more.slow_client),
            (&mut self.flood, more.flood),
            (&mut self.malformed, more.malformed),
        ] {
            *sum = sum.saturating_add(more);
        }
    }

    /// Returns a sentence for people; empty if nothing was lost.
    pub fn sentence(&self) -> String {
        let parts = [
            (self.overwritten, "overwritten in the guest's ring buffer"),
            (
                self.slow_client,
                "dropped because this command reads too slowly",
            ),
            (self.flood, "dropped by the flood guard (--max-rate)"),
            (self.malformed, "could not be decoded"),
        ];
        let parts: Vec<String> = parts
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, why)| format!("{count} {why}"))
            .collect();
        parts.join(", ")
    }
}

/// Returns the lines of a message, in order.
pub fn lines(batch: v1::StreamTracepointEventsResponse) -> Vec<Line> {
    let mut lines = vec![];
    if let Some(losses) = batch.losses {
        lines.push(Line::Lost {
            lost: losses.into(),
        });
    }
    lines.extend(batch.marks.into_iter().map(|mark| Line::Mark {
        time: rfc3339(mark.time),
        mark: mark.text,
    }));
    lines.extend(
        batch
            .events
            .into_iter()
            .map(|event| Line::Event(Box::new(event.into()))),
    );
    lines
}

impl From<v1::TraceEvent> for Event {
    fn from(event: v1::TraceEvent) -> Self {
        let time = rfc3339(event.time);
        // Any task of the guest may put a newline into its name.
        let comm = event.comm.replace(char::is_control, "\u{fffd}");
        let mut text = format!(
            "{} {:>6}.{:06} [{:03}] {} {:>20} {}:",
            time.get(11..26).unwrap_or("--:--:--.------"),
            event.guest_time_ns / 1_000_000_000,
            event.guest_time_ns / 1000 % 1_000_000,
            event.cpu,
            event.context,
            format!(
                "{}-{}",
                if event.comm.is_empty() {
                    "<...>"
                } else {
                    &comm
                },
                event.pid
            ),
            event.name,
        );
        let mut fields = serde_json::Map::new();
        for field in event.fields {
            let Some(value) = field.value else { continue };
            let _ = write!(text, " {}={}", field.name, shown(&value));
            fields.insert(field.name, json(value));
        }
        let text = one_line(&text) + "\n";
        Self {
            time,
            guest_time_ns: event.guest_time_ns,
            name: event.name,
            cpu: event.cpu,
            pid: event.pid,
            comm: event.comm,
            context: event.context,
            fields,
            text,
        }
    }
}

/// Formats a value for people.
fn shown(value: &Value) -> String {
    match value {
        Value::Signed(value) => value.to_string(),
        Value::Unsigned(value) => value.to_string(),
        Value::Hexadecimal(value) => format!("{value:#x}"),
        // Text from the guest must not control the terminal.
        Value::Text(text) => text
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect(),
        Value::Raw(bytes) => bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<Vec<_>>()
            .join(" "),
    }
}

/// Formats a value for programs. Numbers that JavaScript would round become text.
pub fn json(value: Value) -> serde_json::Value {
    const EXACT: u64 = 1 << 53;
    match value {
        Value::Signed(number) if number.unsigned_abs() <= EXACT => number.into(),
        Value::Unsigned(number) if number <= EXACT => number.into(),
        Value::Text(text) => text.into(),
        other => shown(&other).into(),
    }
}

impl Printable for Line {
    fn table(&self) -> String {
        match self {
            Self::Event(event) => event.text.clone(),
            Self::Lost { lost } => format!("--- lost: {} ---\n", lost.sentence()),
            Self::Mark { time, mark } => {
                let time = time.get(11..26).unwrap_or_default();
                format!("{time} --- {} ---\n", one_line(mark))
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        match self {
            Self::Event(event) => vec![&event.name],
            Self::Lost { .. } | Self::Mark { .. } => vec![],
        }
    }
}

/// Formats a time as "2026-01-31T23:59:59.123456789Z"; empty if there is none.
pub fn rfc3339(time: Option<prost_types::Timestamp>) -> String {
    time.map(|time| {
        // prost leaves out trailing zeros, but columns need all digits.
        let whole = prost_types::Timestamp {
            seconds: time.seconds,
            nanos: 0,
        }
        .to_string();
        format!("{}.{:09}Z", whole.trim_end_matches('Z'), time.nanos)
    })
    .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> v1::TraceEvent {
        let field = |name: &str, value| v1::TraceField {
            name: name.into(),
            value: Some(value),
        };
        v1::TraceEvent {
            name: "sched:sched_switch".into(),
            cpu: 1,
            pid: 42,
            comm: "in\nit".into(),
            guest_time_ns: 1_500_000_250,
            time: Some(prost_types::Timestamp {
                seconds: 3661,
                nanos: 5_000,
            }),
            fields: vec![
                field("comm", Value::Text("a\u{1b}[2J".into())),
                field("prio", Value::Signed(-3)),
                field("ptr", Value::Hexadecimal(u64::MAX)),
            ],
            context: "d.h..".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_line_has_both_times_and_cannot_steer_the_terminal() {
        let event = Event::from(event());
        assert_eq!(
            event.text,
            "01:01:01.000005      1.500000 [001] d.h..             in\u{fffd}it-42 sched:sched_switch: \
             comm=a\u{fffd}[2J prio=-3 ptr=0xffffffffffffffff\n"
        );
    }

    /// An agent chooses the names of events and fields, and a client the text of a mark.
    #[test]
    fn an_event_and_a_mark_are_one_line() {
        let mut forged = event();
        forged.name = "a:b\nc".to_owned();
        forged.context = "d\n".to_owned();
        forged.fields[0].name = "e\nf\u{202e}".to_owned();
        let text = Event::from(forged).text;
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        for part in [r"a:b\nc:", r"d\n ", r"e\nf\u{202e}="] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mark = Line::Mark {
            time: String::new(),
            mark: "armed\nfired".to_owned(),
        };
        assert_eq!(mark.table(), " --- armed\\nfired ---\n");
    }

    #[test]
    fn json_keeps_large_numbers_exact() {
        let event = serde_json::to_value(Event::from(event())).expect("JSON");
        assert_eq!(event["time"], "1970-01-01T01:01:01.000005000Z");
        assert_eq!(event["fields"]["prio"], -3);
        assert_eq!(event["fields"]["ptr"], "0xffffffffffffffff");
        assert_eq!(json(Value::Unsigned(u64::MAX)), "18446744073709551615");
    }

    #[test]
    fn losses_are_shown_by_cause() {
        let lost = Losses {
            overwritten: 2,
            flood: 7,
            ..Losses::default()
        };
        assert_eq!(
            Line::Lost { lost }.table(),
            "--- lost: 2 overwritten in the guest's ring buffer, 7 dropped by the flood guard (--max-rate) ---\n"
        );
    }
}
