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
use crate::text::{harmless, one_line};

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

    /// Formats the table with aligned columns, without blanks at the ends of lines. Each row is
    /// one line, whatever its texts are.
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
            table.add_row(row.iter().map(|cell| one_line(cell)));
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
    match value.nouns() {
        Some(nouns) if output == Output::Table && value.names().is_empty() => {
            say_empty(nouns);
            Ok(())
        }
        _ => write(text(output, value)?),
    }
}

/// Formats a value for standard output.
///
/// # Errors
/// The value has no representation in the format.
pub fn text(output: Output, value: &impl Printable) -> Result<String, Failure> {
    match output {
        Output::Table => Ok(harmless(&value.table())),
        Output::Json => json(value),
        Output::Yaml => yaml(value),
        Output::Name => Ok(lines(&value.names())),
    }
}

/// Prints one value of a stream: as JSON on one line, or as a YAML document.
///
/// # Errors
/// The output cannot be written.
pub fn print_streamed(output: Output, value: &impl Printable) -> Result<(), Failure> {
    let text = match output {
        Output::Json => json_line(value)?,
        Output::Yaml => format!("---\n{}", yaml(value)?),
        Output::Table => harmless(&value.table()),
        Output::Name => lines(&value.names()),
    };
    write(&text)
}

/// Returns a value as JSON on one line.
///
/// # Errors
/// The value has no representation in JSON.
pub fn json_line(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(value)
        .map(|line| printable_json(&line).into_owned() + "\n")
        .map_err(unprintable)
}

/// Returns a value as indented JSON.
///
/// # Errors
/// The value has no representation in JSON.
pub fn json(value: &impl Serialize) -> Result<String, Failure> {
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
    serde_yaml_ng::to_string(value)
        .map(|text| quote_words(&text))
        .map_err(unprintable)
}

/// Quotes values in YAML that are texts in YAML 1.2 and booleans for readers of YAML 1.1.
fn quote_words(yaml: &str) -> String {
    const WORDS: [&str; 6] = ["y", "n", "yes", "no", "on", "off"];
    let mut text = String::with_capacity(yaml.len());
    // The column of the key or dash whose text is a block of lines that must not be changed.
    let mut block: Option<usize> = None;
    for line in yaml.lines() {
        let mut value = line.trim_start_matches(' ');
        let mut column = line.len() - value.len();
        if block.is_some_and(|start| value.is_empty() || column > start) {
            text += line;
            text.push('\n');
            continue;
        }
        let mut start = column;
        while let Some(item) = value.strip_prefix("- ") {
            start = column;
            column += 2;
            value = item;
        }
        if let Some((_, of_key)) = value.split_once(": ") {
            start = column;
            value = of_key;
        }
        block = value.starts_with(['|', '>']).then_some(start);
        if WORDS.iter().any(|word| word.eq_ignore_ascii_case(value)) {
            text += &format!("{}\"{value}\"\n", &line[..line.len() - value.len()]);
        } else {
            text += line;
            text.push('\n');
        }
    }
    text
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
    written(try_write(text))
}

/// Writes to standard output, for callers that have something to restore before [`written`].
///
/// # Errors
/// The output cannot be written.
pub fn try_write(text: impl AsRef<[u8]>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_ref())?;
    out.flush()
}

/// Handles the result of [`try_write`] like [`write()`].
///
/// # Errors
/// The output cannot be written, and standard output is not a closed pipe.
pub fn written(result: std::io::Result<()>) -> Result<(), Failure> {
    match result {
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
    fn a_row_of_a_table_is_one_line() {
        let mut rows = Rows::new(&["NAME", "NOTES"]);
        rows.push(["sched:x", "enabled in a\nsched:y  firing\u{202e}"]);
        rows.push(["sched:z", "filter comm ~ \"a\\b\""]);
        let lines = "NAME     NOTES\n\
                     sched:x  enabled in a\\nsched:y  firing\\u{202e}\n\
                     sched:z  filter comm ~ \"a\\b\"\n";
        assert_eq!(rows.text(), lines);
    }

    #[test]
    fn json_does_not_act_on_a_terminal() {
        let text = json(&["a\u{9b}\u{7f}\u{202e}\n", "b"]).expect("JSON");
        assert_eq!(text, "[\n  \"a\\u009b\\u007f\\u202e\\n\",\n  \"b\"\n]\n");
    }

    #[test]
    fn yaml_has_no_texts_that_older_readers_take_for_booleans() {
        let value = serde_json::json!([
            {"want": "on", "other": "Off", "text": "a: on\n\n  - no\nyes\n", "last": "only on"},
            "NO",
            "b: on\nc: off",
            ["y", {"x": "n", "z: on": "z: on", "t": true}],
        ]);
        let text = yaml(&value).expect("YAML");
        assert!(text.contains("want: \"on\"\n"), "{text}");
        assert!(text.contains("other: \"Off\"\n"), "{text}");
        assert!(text.contains("- \"NO\"\n"), "{text}");
        assert!(
            text.contains("last: only on\n") && text.contains("t: true\n"),
            "{text}"
        );
        let read: serde_json::Value = serde_yaml_ng::from_str(&text).expect("YAML");
        assert_eq!(read, value, "{text}");
    }
}
