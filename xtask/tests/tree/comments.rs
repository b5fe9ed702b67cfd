// SPDX-License-Identifier: Apache-2.0
//! Checks the form of comments and documents: comments of at most 100 columns, documentation that
//! begins with a verb or a noun, and code fences that are closed.

use std::fs;
use std::path::Path;

/// rustfmt wraps code at this column, but leaves comments as they are.
const COLUMNS: usize = 100;

/// The names and texts of the files with an extension.
fn texts(extension: &str) -> Vec<(String, String)> {
    let is_wanted = |name: &String| Path::new(name).extension().is_some_and(|e| e == extension);
    let names = super::files().into_iter().filter(is_wanted);
    let read =
        |name: String| fs::read_to_string(super::root().join(&name)).map(|text| (name, text));
    names.filter_map(|name| read(name).ok()).collect()
}

/// The text of a line comment, without its marker.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']))
}

/// Words with which documentation must not begin, because they begin a clause and not a
/// description.
const BEGINNINGS: [&str; 7] = ["What", "Whether", "How", "Of", "That", "As", "So"];

/// Returns whether a line cannot be wrapped: it is a row of a table, a picture, a link's target, or
/// one word.
fn is_whole(text: &str) -> bool {
    let text = text.trim();
    let is_picture = |c: char| ('\u{2500}'..='\u{25ff}').contains(&c);
    text.starts_with('|')
        || text.contains(is_picture)
        || text.starts_with('[') && text.contains("]: ")
        || !text.contains(' ')
}

/// The faults of Rust source: lines whose comments are too long or begin with a wrong word, and
/// code fences that are not closed.
fn faults(source: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut fence = None;
    let mut continues = false;
    for (number, line) in (1..).zip(source.lines()) {
        let text = comment(line);
        let documents = ["///", "//!"]
            .iter()
            .any(|mark| line.trim_start().starts_with(mark));
        let first = text.and_then(|text| text.split_whitespace().next());
        if let Some(word) = first.filter(|word| BEGINNINGS.contains(word))
            && documents
            && !continues
        {
            faults.push(format!("{number}: begins with {word}"));
        }
        // The licence line above the documentation of a file is not part of the documentation.
        continues = text.is_some_and(|text| !text.contains("SPDX"));
        if text.is_some_and(|text| text.trim_start().starts_with("```")) {
            fence = match fence {
                None => Some(number),
                Some(_) => None,
            };
        } else if text.is_none() {
            faults.extend(
                fence
                    .take()
                    .map(|opened| format!("{opened}: an open fence")),
            );
        } else if let Some(text) = text {
            let columns = line.chars().count();
            if columns > COLUMNS && fence.is_none() && !is_whole(text) {
                faults.push(format!("{number}: {columns} columns"));
            }
        }
    }
    faults.extend(fence.map(|opened| format!("{opened}: an open fence")));
    faults
}

#[test]
fn comments_are_wrapped_begin_well_and_their_fences_are_closed() {
    let faults: Vec<String> = texts("rs")
        .iter()
        .flat_map(|(name, source)| {
            let faults = faults(source);
            faults
                .into_iter()
                .map(move |fault| format!("{name}:{fault}"))
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn fences_of_documents_are_closed() {
    for (name, text) in texts("md") {
        let fences = text
            .lines()
            .filter(|line| line.trim_start().starts_with("```"));
        assert_eq!(fences.count() % 2, 0, "{name}: a code fence is not closed");
    }
}

#[test]
fn faults_are_found() {
    let long = format!("/// {}", "word ".repeat(20));
    for (source, expected) in [
        (long.as_str(), "1: 104 columns"),
        ("/// ```\nfn f() {}", "1: an open fence"),
        ("//! ```text\n//! x", "1: an open fence"),
        ("    /// Whether it is on.", "1: begins with Whether"),
        ("// SPDX\n//! What a test needs.", "2: begins with What"),
    ] {
        assert_eq!(faults(source), [expected], "{source}");
    }
    let row = format!("//! | {} |", "cell ".repeat(30));
    let address = format!("// {}", "x".repeat(120));
    let continued = "/// Says\n/// What it is.\n// How else?";
    for source in [
        row.as_str(),
        &address,
        "/// ```\n/// x\n/// ```\nfn f() {}",
        continued,
    ] {
        assert_eq!(faults(source), [""; 0], "{source}");
    }
}
