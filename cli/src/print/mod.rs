// SPDX-License-Identifier: Apache-2.0
//! Prints tables for people, JSON and YAML for programs, and names for shells.

mod comparison;
mod guests;
mod keys;

pub use self::keys::Detailed;

use std::io::Write;

use comfy_table::{ContentArrangement, Table, presets};
use patchbay_proto::text::printable_json;
use serde::Serialize;

use crate::args::output::Output;
use crate::failure::Failure;
use crate::text::harmless;

/// The rows of a table.
#[derive(Debug, Default)]
pub struct Rows {
    pub header: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
}

impl Rows {
    pub fn new(header: &[&'static str]) -> Self {
        Self {
            header: header.to_vec(),
            rows: vec![],
        }
    }

    pub fn push(&mut self, row: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    /// Formats the table with aligned columns, without blanks at the ends of lines.
    pub fn text(self) -> String {
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(self.header);
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        for row in self.rows {
            table.add_row(row);
        }
        let text = table.to_string();
        text.lines()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }
}

/// A value that can be printed.
pub trait Printable: Serialize {
    /// Returns the rows of a table, which may get a column for the guest in front.
    fn rows(&self) -> Rows {
        Rows::default()
    }

    /// Returns sentences to print below the rows, each on one line.
    fn footer(&self) -> String {
        String::new()
    }

    /// Returns the table for people.
    fn table(&self) -> String {
        let rows = self.rows();
        let table = if rows.rows.is_empty() && !self.footer().is_empty() {
            String::new()
        } else {
            rows.text()
        };
        table + &self.footer()
    }

    /// Returns the names, which are printed one per line.
    fn names(&self) -> Vec<&str>;

    /// Returns the plural noun of a list's items; `None` if the answer is not a list.
    fn nouns(&self) -> Option<&'static str> {
        None
    }
}

/// Reports on stderr that a list is empty. A table would only have a heading.
fn say_empty(nouns: &str) {
    complain(&format!("no {nouns} found"));
}

/// Sentences to print on stderr.
pub type Remarks = Vec<String>;

/// The answer of one guest.
#[derive(Debug)]
pub struct Answer<T> {
    pub value: T,
    /// The failure of the part of the request that was not carried out.
    pub undone: Option<Failure>,
    pub remarks: Remarks,
}

impl<T> From<T> for Answer<T> {
    fn from(value: T) -> Self {
        Self {
            value,
            undone: None,
            remarks: vec![],
        }
    }
}

/// Prints remarks on stderr. If `guest` is not empty, it precedes each remark.
pub fn remark(guest: &str, remarks: &Remarks) {
    for text in remarks {
        let guest = if guest.is_empty() {
            String::new()
        } else {
            format!("{guest}: ")
        };
        complain(&format!("{guest}{text}"));
    }
}

/// Prints a sentence on stderr. A closed stderr is no error.
pub fn complain(text: &str) {
    let text = harmless(&format!("patchbay: {text}\n"));
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Prints to standard output. A closed pipe is no error.
///
/// # Errors
/// The output cannot be written.
pub fn print(output: Output, value: &impl Printable) -> Result<(), Failure> {
    let text = match output {
        Output::Table => match value.nouns() {
            Some(nouns) if value.names().is_empty() => {
                say_empty(nouns);
                return Ok(());
            }
            _ => harmless(&value.table()),
        },
        Output::Json => json(value)?,
        Output::Yaml => yaml(value)?,
        Output::Name => lines(&value.names()),
    };
    write(&text)
}

/// Prints one value of a stream: as JSON on one line, or as a YAML document.
///
/// # Errors
/// The output cannot be written.
pub fn print_streamed(output: Output, value: &impl Printable) -> Result<(), Failure> {
    let text = match output {
        Output::Json => serde_json::to_string(value)
            .map(|line| printable_json(&line).into_owned() + "\n")
            .map_err(unprintable)?,
        Output::Yaml => format!("---\n{}", yaml(value)?),
        Output::Table => harmless(&value.table()),
        Output::Name => lines(&value.names()),
    };
    write(&text)
}

fn json(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value)
        .map(|text| printable_lines(&text))
        .map_err(unprintable)
}

/// Escapes control characters in JSON that has several lines.
fn printable_lines(json: &str) -> String {
    json.lines()
        .map(|line| printable_json(line).into_owned() + "\n")
        .collect()
}

fn yaml(value: &impl Serialize) -> Result<String, Failure> {
    serde_yaml_ng::to_string(value).map_err(unprintable)
}

fn unprintable(error: impl std::error::Error) -> Failure {
    Failure::error(format!("the answer cannot be printed: {error}"))
}

fn lines(names: &[&str]) -> String {
    names
        .iter()
        .map(|name| harmless(name).replace('\n', "\u{fffd}") + "\n")
        .collect()
}

/// Writes to standard output.
///
/// # Errors
/// The output cannot be written. If standard output is a closed pipe, the process ends without a
/// message instead, as if it were killed by SIGPIPE.
pub fn write(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(141),
        result => Ok(result?),
    }
}

/// Formats a count, such as "1 site" or "2 sites".
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

pub fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

/// The answer of one of several guests.
#[derive(Serialize)]
struct Entry<'a, T> {
    guest: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<EntryError<'a>>,
}

#[derive(Serialize)]
struct EntryError<'a> {
    message: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'a str,
    exit_code: u8,
}

/// Prints the answers of several guests as one table or one list.
///
/// # Errors
/// The output cannot be written.
pub fn by_guest<T: Printable>(
    output: Output,
    answers: &[(String, Result<Answer<T>, Failure>)],
) -> Result<(), Failure> {
    let values = || {
        answers.iter().filter_map(|(guest, answer)| {
            let answer = answer.as_ref().ok()?;
            Some((guest.as_str(), &answer.value))
        })
    };
    let entries = || -> Vec<Entry<T>> { answers.iter().map(entry).collect() };
    let text = match output {
        Output::Json => json(&entries())?,
        Output::Yaml => yaml(&entries())?,
        Output::Table => {
            let mut table = Rows::new(&["GUEST"]);
            let mut footers = String::new();
            for (guest, value) in values() {
                let rows = value.rows();
                if table.header.len() == 1 {
                    table.header.extend(rows.header);
                }
                for row in rows.rows {
                    table.push([guest.to_owned()].into_iter().chain(row));
                }
                for line in value.footer().lines() {
                    footers += &format!("{guest}: {line}\n");
                }
            }
            let nouns = values().find_map(|(_, value)| value.nouns());
            if let (Some(nouns), true) = (nouns, table.rows.is_empty()) {
                say_empty(nouns);
            }
            match table.rows.is_empty() {
                true => harmless(&footers),
                false => harmless(&(table.text() + &footers)),
            }
        }
        Output::Name => {
            let name = |guest: &str, name: &str| match guest == name {
                true => guest.to_owned(),
                false => format!("{guest}/{name}"),
            };
            let names: Vec<String> = values()
                .flat_map(|(guest, value)| {
                    let names = value.names().into_iter();
                    names.map(move |one| name(guest, one))
                })
                .collect();
            lines(&names.iter().map(String::as_str).collect::<Vec<_>>())
        }
    };
    write(&text)
}

fn entry<T>((guest, answer): &(String, Result<Answer<T>, Failure>)) -> Entry<'_, T> {
    let (result, failure) = match answer {
        Ok(answer) => (Some(&answer.value), answer.undone.as_ref()),
        Err(failure) => (None, Some(failure)),
    };
    Entry {
        guest,
        result,
        error: failure.map(|failure| EntryError {
            message: &failure.message,
            reason: &failure.reason,
            exit_code: failure.exit_code,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_does_not_act_on_a_terminal() {
        let text = json(&["a\u{9b}\u{7f}\u{202e}\n", "b"]).expect("JSON");
        assert_eq!(text, "[\n  \"a\\u009b\\u007f\\u202e\\n\",\n  \"b\"\n]\n");
    }
}
