// SPDX-License-Identifier: Apache-2.0
//! Printing: tables for people, JSON and YAML for programs, names for shells.

use std::io::Write;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::args::Output;
use crate::failure::Failure;
use crate::view;

/// What can be printed.
pub trait Printable: Serialize {
    /// For people.
    fn table(&self) -> String;
    /// One per line.
    fn names(&self) -> Vec<&str>;
}

/// Prints to standard output. A reader that has gone away is no error.
///
/// # Errors
/// If the output cannot be written.
pub fn print(output: Output, value: &impl Printable) -> Result<(), Failure> {
    let text = match output {
        Output::Table => value.table(),
        Output::Json => json(value)?,
        Output::Yaml => yaml(value)?,
        Output::Name => lines(value.names()),
    };
    write(&text)
}

/// Prints one of a stream of values: JSON on one line, a YAML document.
///
/// # Errors
/// If the output cannot be written.
pub fn print_streamed(output: Output, value: &impl Printable) -> Result<(), Failure> {
    let text = match output {
        Output::Json => serde_json::to_string(value)
            .map(|line| line + "\n")
            .map_err(unprintable)?,
        Output::Yaml => format!("---\n{}", yaml(value)?),
        Output::Table => value.table(),
        Output::Name => lines(value.names()),
    };
    write(&text)
}

fn json(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value)
        .map(|text| text + "\n")
        .map_err(unprintable)
}

fn yaml(value: &impl Serialize) -> Result<String, Failure> {
    serde_yaml_ng::to_string(value).map_err(unprintable)
}

fn unprintable(error: impl std::error::Error) -> Failure {
    Failure::error(format!("the answer cannot be printed: {error}"))
}

fn lines(names: Vec<&str>) -> String {
    names.into_iter().map(|name| format!("{name}\n")).collect()
}

/// Writes to standard output.
///
/// # Errors
/// If it cannot be written, unless its reader has gone away: then the process ends as one that is
/// killed by SIGPIPE would, without a message.
pub fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(141),
        result => Ok(result?),
    }
}

/// An empty table with a header.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

/// Its lines, without blanks at their ends.
pub fn text(table: &Table) -> String {
    let text = table.to_string();
    text.lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// "1 site", "2 sites".
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

impl Printable for Vec<view::Key> {
    fn table(&self) -> String {
        let mut table = table(&["NAME", "CLASS", "COUNT", "SITES", "HOLDS", "NOTES"]);
        for key in self {
            table.add_row([
                key.name.clone(),
                key.class.to_owned(),
                key.count.to_string(),
                format!("{}/{}", key.patchable_sites, key.site_count),
                key.holds.to_string(),
                notes(key),
            ]);
        }
        text(&table)
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|key| key.name.as_str()).collect()
    }
}

fn notes(key: &view::Key) -> String {
    let notes = [
        (key.initially_true, "initially true"),
        (key.sealed, "sealed"),
        (!key.quarantine.is_empty(), "quarantined"),
    ];
    let notes: Vec<&str> = notes
        .into_iter()
        .filter(|(holds, _)| *holds)
        .map(|(_, note)| note)
        .collect();
    notes.join(", ")
}

/// Keys with their sites.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Detailed(pub Vec<view::Key>);

impl Printable for Detailed {
    fn table(&self) -> String {
        self.0.iter().map(detailed).collect::<Vec<_>>().join("\n")
    }

    fn names(&self) -> Vec<&str> {
        self.0.names()
    }
}

fn detailed(key: &view::Key) -> String {
    let mut out = format!(
        "{}: {}, count {}, {} class\n  struct static_key at {}, etag {}\n  {} of {} sites patchable, {} held by clients\n",
        key.name,
        if key.enabled { "on" } else { "off" },
        key.count,
        key.class,
        key.address,
        key.etag,
        key.patchable_sites,
        key.site_count,
        key.holds,
    );
    let notes = notes(key);
    if !notes.is_empty() {
        out += &format!("  {notes}\n");
    }
    if !key.quarantine.is_empty() {
        out += &format!("  {}\n", key.quarantine);
    }
    if key.sites.is_empty() {
        return out;
    }
    let mut table = table(&[
        "ADDRESS",
        "FUNCTION",
        "BYTES",
        "INSTRUCTION",
        "OTHER BYTES",
        "OTHER INSTRUCTION",
        "NOTES",
    ]);
    for site in &key.sites {
        let mut notes = vec![];
        if site.likely {
            notes.push("likely".to_owned());
        }
        if !site.not_patchable.is_empty() {
            notes.push(format!("not patched: {}", site.not_patchable));
        }
        table.add_row([
            site.address.as_str(),
            or_dash(&site.symbol),
            &site.bytes,
            &site.disassembly,
            or_dash(&site.other_bytes),
            or_dash(&site.other_disassembly),
            &notes.join(", "),
        ]);
    }
    for line in text(&table).lines() {
        out += &format!("  {line}\n");
    }
    out
}

impl Printable for view::Update {
    fn table(&self) -> String {
        let mut out = String::new();
        if !self.results.is_empty() {
            let mut table = table(&["NAME", "COUNT", "SITES PATCHED"]);
            for change in &self.results {
                table.add_row([
                    change.name.clone(),
                    format!("{} -> {}", change.before, change.after),
                    change.sites_patched.to_string(),
                ]);
            }
            out += &text(&table);
        }
        out += &format!(
            "{} of {} changed",
            self.keys_changed,
            counted(self.keys.into(), "key")
        );
        if self.keys_left_out > 0 {
            out += &format!(
                "; {} more match and were left out, sealed or guarded (--allow-guarded)",
                self.keys_left_out
            );
        }
        out += "\n";
        if self.dry_run {
            out += "dry run: nothing was changed\n";
        } else if self.paused {
            let tries = if self.attempts > 1 {
                format!(", {} attempts", self.attempts)
            } else {
                String::new()
            };
            out += &format!(
                "{} patched; stop {:.1} us, patch {:.1} us, resume {:.1} us{tries}\n",
                counted(self.sites_patched.into(), "site"),
                self.stop_us,
                self.patch_us,
                self.resume_us
            );
        } else {
            out += "no site had to be patched: the guest was not stopped\n";
        }
        out
    }

    fn names(&self) -> Vec<&str> {
        self.results
            .iter()
            .map(|change| change.name.as_str())
            .collect()
    }
}

impl Printable for view::Event {
    fn table(&self) -> String {
        let mut out = format!(
            "{}  {}  {}  {}",
            self.revision, self.time, self.kind, self.name
        );
        if self.kind == "changed" {
            out += &format!("  count {}", self.count);
        }
        for (label, value) in [("by", &self.principal), ("reason", &self.reason)] {
            if !value.is_empty() {
                out += &format!("  {label} {value}");
            }
        }
        out + "\n"
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}

impl Printable for Vec<view::Hold> {
    fn table(&self) -> String {
        let mut table = table(&["NAME", "OWNER", "REFERENCES", "SINCE", "LAPSES", "REASON"]);
        for hold in self {
            table.add_row([
                hold.name.as_str(),
                &hold.holder,
                &hold.references.to_string(),
                &hold.since,
                hold.expires_at.as_deref().unwrap_or("never"),
                &hold.reason,
            ]);
        }
        text(&table)
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|hold| hold.name.as_str()).collect()
    }
}

impl Printable for Vec<view::Guest> {
    fn table(&self) -> String {
        let mut table = table(&[
            "NAME",
            "STATE",
            "VCPUS",
            "MEMORY",
            "KERNEL",
            "REGISTRATION",
            "KEYS",
            "PID",
            "SOCKET",
        ]);
        for guest in self {
            let cells = match &guest.details {
                Some(details) => [
                    details.vcpus.to_string(),
                    format!("{} MiB", details.memory_bytes >> 20),
                    or_dash(&details.kernel_release).to_owned(),
                    details.registration.to_owned(),
                    details.keys.to_string(),
                    details.monitor_pid.to_string(),
                ],
                None => std::array::from_fn(|_| "-".to_owned()),
            };
            let row = [guest.name.clone(), guest.state.to_owned()];
            table.add_row(row.into_iter().chain(cells).chain([guest.socket.clone()]));
        }
        text(&table)
    }

    fn names(&self) -> Vec<&str> {
        self.iter().map(|guest| guest.name.as_str()).collect()
    }
}

impl Printable for view::Power {
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
        vec![self.state]
    }
}

impl Printable for view::Guest {
    fn table(&self) -> String {
        let mut out = format!("{}: {}\n", self.name, self.state);
        let Some(details) = &self.details else {
            return out;
        };
        let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(details) else {
            return out;
        };
        for (label, value) in fields {
            let value = match value {
                serde_json::Value::String(text) => text,
                serde_json::Value::Array(items) => items
                    .iter()
                    .filter_map(|item| item.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
                other => other.to_string(),
            };
            out += &format!("  {:<22}{}\n", label.replace('_', " "), or_dash(&value));
        }
        out
    }

    fn names(&self) -> Vec<&str> {
        vec![&self.name]
    }
}
