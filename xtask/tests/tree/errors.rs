// SPDX-License-Identifier: Apache-2.0
//! Checks that no error prints its source, because programs print errors with their sources.

use std::fs;

/// The crates of the programs that print the sources of errors.
const CRATES: [&str; 5] = ["attach/", "fleet/", "guest-agent/", "service/", "vmm/"];

/// The variants of errors in Rust source that return their first field as their source and also
/// print it.
fn doubled(source: &str) -> Vec<String> {
    let (mut message, mut is_open) = (String::new(), false);
    let mut found = Vec::new();
    for (number, line) in (1..).zip(source.lines()) {
        let line = line.trim();
        if line.starts_with("#[error(") {
            message.clear();
            is_open = true;
        }
        if is_open {
            message += line;
            is_open = !line.ends_with(")]");
        } else if line.contains("(#[from]") || line.contains("(#[source]") {
            if message.contains("{0") {
                found.push(format!("{number}: {line}"));
            }
        } else if !line.starts_with("//") {
            message.clear();
        }
    }
    found
}

#[test]
fn no_error_prints_its_source() {
    let is_searched =
        |name: &String| name.ends_with(".rs") && CRATES.iter().any(|of| name.starts_with(of));
    let mut found = Vec::new();
    for name in super::files().into_iter().filter(is_searched) {
        let source = fs::read_to_string(super::root().join(&name)).unwrap();
        let here = doubled(&source).into_iter();
        found.extend(here.map(|fault| format!("{name}:{fault}")));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn an_error_that_prints_its_source_is_found() {
    let source = "#[error(\"a: {0}\")]\nA(#[from] B),\n\
                  #[error(\n\"c ({0}); \\\n d\"\n)]\n/// C.\nC(#[source] D),\n\
                  #[error(\"e\")]\nE(#[from] F),\n\
                  #[error(\"g: {0}\")]\nG(H),\n#[error(transparent)]\nI(#[from] J),\n";
    let found = doubled(source);
    assert_eq!(found, ["2: A(#[from] B),", "8: C(#[source] D),"]);
}
