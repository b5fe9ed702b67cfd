// SPDX-License-Identifier: Apache-2.0
//! Prints guests.

use serde_json::Value;

use super::{Printable, Rows, or_dash};
use crate::text::one_line;
use crate::view;

fn row(guest: &view::GuestDetails) -> Vec<String> {
    let cells = match &guest.details {
        Some(details) => [
            details.vcpus.to_string(),
            format!("{} MiB", details.memory_bytes >> 20),
            or_dash(&details.kernel_release).to_owned(),
            details.registration.to_owned(),
            if details.agent_connected { "yes" } else { "no" }.to_owned(),
            details.keys.to_string(),
            details.monitor_pid.to_string(),
        ],
        None => std::array::from_fn(|_| "-".to_owned()),
    };
    let state = [guest.state.to_owned()];
    state
        .into_iter()
        .chain(cells)
        .chain([guest.socket.clone()])
        .collect()
}

const HEADER: [&str; 9] = [
    "STATE",
    "VCPUS",
    "MEMORY",
    "KERNEL",
    "REGISTRATION",
    "AGENT",
    "KEYS",
    "PID",
    "SOCKET",
];

impl Printable for Vec<view::GuestDetails> {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["NAME"]);
        rows.header.extend(HEADER);
        for guest in self {
            rows.push([guest.name.clone()].into_iter().chain(row(guest)));
        }
        rows
    }

    fn nouns(&self) -> Option<&'static str> {
        Some("guests")
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|guest| guest.name.as_str()).collect()
    }
}

impl Printable for view::GuestDetails {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&HEADER);
        rows.push(row(self));
        rows
    }

    fn table(&self) -> String {
        let mut out = format!("{}: {}\n", self.name, self.state);
        let Some(details) = &self.details else {
            return out;
        };
        let Ok(Value::Object(fields)) = serde_json::to_value(details) else {
            return out;
        };
        for (label, value) in fields {
            out += &format!(
                "  {:<22}{}\n",
                label.replace('_', " "),
                or_dash(&text(&value))
            );
        }
        out
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}

/// Formats a value on one line, whatever its texts are. An object is formatted as its texts and the
/// names of its booleans that are true.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => one_line(text),
        Value::Bool(value) => if *value { "yes" } else { "no" }.to_owned(),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(text).collect();
            items.join(", ")
        }
        Value::Object(fields) => {
            let facts = fields.iter().filter_map(|(name, value)| match value {
                Value::String(text) => Some(one_line(text)),
                Value::Bool(true) => Some(name.replace('_', " ")),
                _ => None,
            });
            facts.collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

impl Printable for view::Power {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["STATE"]);
        rows.push([self.table().trim_end()]);
        rows
    }

    fn table(&self) -> String {
        let more = match self {
            Self {
                stop_us: Some(stop),
                paused_until: Some(until),
                ..
            } => format!(" until {until}; stop {stop:.1} us"),
            Self {
                stop_us: Some(stop),
                ..
            } => format!(" until it is resumed; stop {stop:.1} us"),
            Self {
                power_cut: Some(true),
                ..
            } => ": its power was cut".to_owned(),
            Self {
                power_cut: Some(false),
                ..
            } => ": it powered itself off".to_owned(),
            _ => String::new(),
        };
        format!("{}{more}\n", self.state)
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.guest]
    }
}

impl Printable for view::Status {
    fn rows(&self) -> Rows {
        let mut rows = Rows::new(&["STATE", "REGISTRATION", "AGENT"]);
        let agent = if self.agent_connected { "yes" } else { "no" };
        rows.push([self.state, self.registration, agent]);
        rows
    }

    fn table(&self) -> String {
        let mut out = format!("{}: {}", self.guest, self.state);
        if let Some(until) = &self.paused_until {
            out += &format!(" until {until}");
        }
        if !self.registration.is_empty() {
            out += &format!(", {}", self.registration);
            if !self.registration_error.is_empty() {
                out += &format!(" ({})", one_line(&self.registration_error));
            }
            let agent = if self.agent_connected { "" } else { "no " };
            out += &format!(", {agent}agent connected");
        }
        out + "\n"
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.guest]
    }
}

#[cfg(test)]
mod tests {
    use patchbay_proto::v1;

    use super::*;

    /// A guest's texts appear in the description, but cannot add lines to it.
    #[test]
    fn a_description_has_a_line_for_each_value() {
        const FORGED: &str = "a\n  panicked              no\u{9b}\u{202e}";
        let described = |text: &str| {
            let status = v1::GuestStatus {
                kernel_release: text.to_owned(),
                registration_error: text.to_owned(),
                ..Default::default()
            };
            let message = v1::KernelMessage {
                text: text.to_owned(),
                ..Default::default()
            };
            let state = v1::KernelState {
                tasks: vec![v1::CpuTask {
                    name: text.to_owned(),
                    ..Default::default()
                }],
                trace_instances: vec![text.to_owned(), text.to_owned()],
                last_warning: Some(message.clone()),
                panic: Some(message),
                ..Default::default()
            };
            let guest = v1::DescribeGuestResponse {
                status: Some(status),
                kernel_state: Some(state),
                declaration_errors: vec![text.to_owned()],
                ..Default::default()
            };
            view::GuestDetails::described("web-1".into(), "socket".into(), guest)
        };
        let forged = described(FORGED);
        let table = forged.table();
        let labels = |table: &str| -> Vec<String> {
            let lines = table.lines();
            lines
                .map(|line| line.chars().take(24).collect::<String>())
                .map(|label| label.trim_end().to_owned())
                .collect()
        };
        let expected = labels(&described("a").table());
        assert_eq!(labels(&table), expected, "{table}");
        assert!(!table.contains(['\u{9b}', '\u{202e}']), "{table:?}");
        let instances =
            "  trace instances       a\\n  panicked              no\\u{9b}\\u{202e}, a\\n";
        assert!(table.contains(instances), "{table}");
        // Programs get the exact name.
        let json = crate::print::json_line(&forged).expect("JSON");
        let read: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(read["details"]["trace_instances"][1], FORGED);
        // The table of several guests has one line for each.
        let rows = vec![forged].rows().text();
        assert_eq!(rows.lines().count(), 2, "{rows}");
    }
}
