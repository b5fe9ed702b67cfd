// SPDX-License-Identifier: Apache-2.0
//! The rules. Each has the name that `buf lint` gives it, or is named after the fault that it
//! prevents.

use std::collections::{BTreeMap, BTreeSet};

use prost_types::{FileDescriptorProto, FileDescriptorSet};

use super::support::{enums, messages, own};

/// Keywords of Python 3 and Go, for which generated code has no plain name.
const KEYWORDS: [&str; 53] = [
    "False",
    "None",
    "True",
    "and",
    "as",
    "assert",
    "async",
    "await",
    "break",
    "case",
    "chan",
    "class",
    "const",
    "continue",
    "def",
    "default",
    "defer",
    "del",
    "elif",
    "else",
    "except",
    "fallthrough",
    "finally",
    "for",
    "from",
    "func",
    "global",
    "go",
    "goto",
    "if",
    "import",
    "in",
    "interface",
    "is",
    "lambda",
    "map",
    "nonlocal",
    "not",
    "or",
    "package",
    "pass",
    "raise",
    "range",
    "return",
    "select",
    "struct",
    "switch",
    "try",
    "type",
    "var",
    "while",
    "with",
    "yield",
];

/// The package whose requests name a guest.
const CONTROL: &str = "patchbay.v1";
/// The only request of this package that does not name a guest.
const WITHOUT_GUEST: &str = "ListGuestsRequest";

/// Returns the violations of the rules, one sentence each.
pub fn check(set: &FileDescriptorSet) -> Vec<String> {
    let mut found = vec![];
    for file in own(set) {
        check_package(file, &mut found);
        check_enums(file, &mut found);
        check_messages(file, &mut found);
        check_services(file, &mut found);
    }
    check_requests(set, &mut found);
    found
}

fn check_package(file: &FileDescriptorProto, found: &mut Vec<String>) {
    let (name, package) = (file.name(), file.package());
    let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
    if folder.replace('/', ".") != package {
        found.push(format!(
            "PACKAGE_DIRECTORY_MATCH: {name} is of package {package:?}"
        ));
    }
    if !package.split('.').all(is_snake) {
        found.push(format!("PACKAGE_LOWER_SNAKE_CASE: {name}: {package:?}"));
    }
    let version = package
        .rsplit('.')
        .next()
        .and_then(|last| last.strip_prefix('v'));
    if !version.is_some_and(|version| version.parse::<u32>().is_ok_and(|number| number > 0)) {
        found.push(format!(
            "PACKAGE_VERSION_SUFFIX: {name}: {package:?} ends with no version"
        ));
    }
    let file_name = name.rsplit('/').next().unwrap_or_default();
    if !file_name.strip_suffix(".proto").is_some_and(is_snake) {
        found.push(format!("FILE_LOWER_SNAKE_CASE: {name}"));
    }
    if file.syntax() != "proto3" {
        found.push(format!(
            "SYNTAX_SPECIFIED: {name}: found {:?}, expected proto3",
            file.syntax()
        ));
    }
    for import in &file.public_dependency {
        found.push(format!(
            "IMPORT_NO_PUBLIC: {name}: import {import} is public"
        ));
    }
}

fn check_enums(file: &FileDescriptorProto, found: &mut Vec<String>) {
    for (name, of) in enums(file) {
        if !is_pascal(of.name()) {
            found.push(format!("ENUM_PASCAL_CASE: {name}"));
        }
        check_word(&name, of.name(), found);
        let prefix = format!("{}_", upper_snake(of.name()));
        let mut numbers = BTreeSet::new();
        for value in &of.value {
            let word = value.name();
            if !word.starts_with(&prefix) {
                found.push(format!(
                    "ENUM_VALUE_PREFIX: {name}.{word} does not begin with {prefix}"
                ));
            }
            if !is_snake(&word.to_lowercase()) || word != word.to_uppercase() {
                found.push(format!("ENUM_VALUE_UPPER_SNAKE_CASE: {name}.{word}"));
            }
            if !numbers.insert(value.number()) {
                let number = value.number();
                found.push(format!(
                    "ENUM_NO_ALLOW_ALIAS: {name}.{word} has the number {number} of another"
                ));
            }
        }
        let zero = of.value.iter().find(|value| value.number() == 0);
        let expected = format!("{prefix}UNSPECIFIED");
        if zero.map(|zero| zero.name()) != Some(&expected) {
            found.push(format!(
                "ENUM_ZERO_VALUE_SUFFIX: {name}: the value 0 is not {expected}"
            ));
        }
    }
}

fn check_messages(file: &FileDescriptorProto, found: &mut Vec<String>) {
    for (name, message) in messages(file) {
        if !is_pascal(message.name()) {
            found.push(format!("MESSAGE_PASCAL_CASE: {name}"));
        }
        check_word(&name, message.name(), found);
        for field in &message.field {
            let full = format!("{name}.{}", field.name());
            if !is_snake(field.name()) {
                found.push(format!("FIELD_LOWER_SNAKE_CASE: {full}"));
            }
            check_word(&full, field.name(), found);
        }
        for oneof in &message.oneof_decl {
            // An optional field has a oneof of its own, whose name begins with an underscore.
            let word = oneof.name();
            let synthetic = word.strip_prefix('_');
            if !synthetic.is_some_and(|word| message.field.iter().any(|field| field.name() == word))
                && !is_snake(word)
            {
                found.push(format!("ONEOF_LOWER_SNAKE_CASE: {name}.{word}"));
            }
        }
    }
}

fn check_services(file: &FileDescriptorProto, found: &mut Vec<String>) {
    for service in &file.service {
        let name = format!("{}.{}", file.package(), service.name());
        if !is_pascal(service.name()) {
            found.push(format!("SERVICE_PASCAL_CASE: {name}"));
        }
        if !service.name().ends_with("Service") {
            found.push(format!("SERVICE_SUFFIX: {name}"));
        }
        for method in &service.method {
            let (word, full) = (method.name(), format!("{name}.{}", method.name()));
            if !is_pascal(word) {
                found.push(format!("RPC_PASCAL_CASE: {full}"));
            }
            check_word(&full, word, found);
            let own = |suffix| format!(".{}.{word}{suffix}", file.package());
            if method.input_type() != own("Request") {
                found.push(format!(
                    "RPC_REQUEST_STANDARD_NAME: {full} takes {}",
                    method.input_type()
                ));
            }
            if method.output_type() != own("Response") {
                found.push(format!(
                    "RPC_RESPONSE_STANDARD_NAME: {full} answers {}",
                    method.output_type()
                ));
            }
        }
    }
}

/// Each request belongs to one method, and names its guest in the same place.
fn check_requests(set: &FileDescriptorSet, found: &mut Vec<String>) {
    let mut users: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for method in own(set)
        .flat_map(|file| &file.service)
        .flat_map(|service| &service.method)
    {
        for name in [method.input_type(), method.output_type()] {
            users.entry(name).or_default().push(method.name());
        }
    }
    for (name, users) in users.iter().filter(|(_, users)| users.len() > 1) {
        found.push(format!(
            "RPC_REQUEST_RESPONSE_UNIQUE: {name} is used by {}",
            users.join(" and ")
        ));
    }
    for (name, message) in own(set)
        .filter(|file| file.package() == CONTROL)
        .flat_map(messages)
    {
        let is_request =
            users.contains_key(format!(".{name}").as_str()) && name.ends_with("Request");
        let guest = message.field.iter().find(|field| field.number() == 1);
        let has_guest = guest.is_some_and(|field| {
            field.name() == "guest" && super::support::type_of(message, field) == "string"
        });
        if is_request && !has_guest && message.name() != WITHOUT_GUEST {
            found.push(format!(
                "REQUEST_NAMES_GUEST: {name}: field 1 is not `string guest`"
            ));
        }
    }
}

fn check_word(full: &str, word: &str, found: &mut Vec<String>) {
    if KEYWORDS.contains(&word) {
        found.push(format!(
            "NO_KEYWORD: {full}: {word} is a keyword of Python or Go"
        ));
    }
}

/// Code generators disagree about two underscores together, or one at an end.
fn is_snake(word: &str) -> bool {
    let lower = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    word.starts_with(|c: char| c.is_ascii_lowercase())
        && word
            .split('_')
            .all(|part| !part.is_empty() && part.chars().all(lower))
}

fn is_pascal(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_alphanumeric())
}

fn upper_snake(pascal: &str) -> String {
    let mut snake = String::new();
    for c in pascal.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_uppercase());
    }
    snake
}
