// SPDX-License-Identifier: Apache-2.0
//! `patchbay.v1` against its committed baseline: what a client may rely on stays.
//!
//! The baseline has a line for each message, field, enum value and method, and one for the access
//! to each method. A change may add lines, but must not remove one.

use std::collections::BTreeSet;
use std::path::PathBuf;

use patchbay_proto::methods::Method;
use prost_types::FileDescriptorSet;

use super::support::{compile_text, enums, interfaces, messages, own, root, type_of};

const PACKAGE: &str = "patchbay.v1";
const UPDATE: &str = "PATCHBAY_UPDATE_BASELINE";
const HEAD: &str = "# What clients of patchbay.v1 rely on. Lines are added by the test `baseline`\n\
    # with PATCHBAY_UPDATE_BASELINE=1, and taken away by hand before v1 is frozen.\n";

/// Returns what clients rely on: names if they write JSON or text, numbers and types if they write
/// the wire format, and methods.
fn describe(set: &FileDescriptorSet) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for file in own(set).filter(|file| file.package() == PACKAGE) {
        for (name, message) in messages(file) {
            lines.insert(format!("message {name}"));
            for field in &message.field {
                let (word, number) = (field.name(), field.number());
                lines.insert(format!(
                    "field {name}.{word} = {number}: {}",
                    type_of(message, field)
                ));
            }
        }
        for (name, of) in enums(file) {
            for value in &of.value {
                lines.insert(format!(
                    "value {name}.{} = {}",
                    value.name(),
                    value.number()
                ));
            }
        }
        for service in &file.service {
            for method in &service.method {
                let stream = |streams| if streams { "stream " } else { "" };
                lines.insert(format!(
                    "method {PACKAGE}.{}.{}({}{}) returns ({}{})",
                    service.name(),
                    method.name(),
                    stream(method.client_streaming()),
                    method.input_type().trim_start_matches('.'),
                    stream(method.server_streaming()),
                    method.output_type().trim_start_matches('.'),
                ));
            }
        }
    }
    lines
}

/// Returns who may call a method, what it changes, and which fields need another role.
fn access(method: &Method) -> String {
    let (path, role, effect) = (method.path, method.role, method.effect);
    let raised = method.raised.iter();
    let raised: String = raised
        .map(|(field, role)| format!(", {role} for field {field}"))
        .collect();
    format!("access {path}: {role}{raised}; {effect:?}")
}

/// Lines of the first that the second lacks.
fn missing(baseline: &BTreeSet<String>, found: &BTreeSet<String>) -> Vec<String> {
    baseline.difference(found).cloned().collect()
}

fn path() -> PathBuf {
    root().join("baseline/patchbay.v1.txt")
}

#[test]
fn nothing_that_clients_rely_on_is_gone() {
    let text = std::fs::read_to_string(path()).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let baseline: BTreeSet<String> = lines.map(str::to_owned).collect();
    let mut found = describe(&interfaces());
    found.extend(patchbay_proto::methods::METHODS.iter().map(access));
    let gone = missing(&baseline, &found);
    assert!(
        gone.is_empty(),
        "these changes break clients of {PACKAGE}; put back what is gone, or, before v1 is frozen, \
         delete the lines in {}:\n{}",
        path().display(),
        gone.join("\n")
    );
    let added = missing(&found, &baseline);
    if std::env::var_os(UPDATE).is_some_and(|value| value == "1") {
        let lines: String = found.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(path(), format!("{HEAD}{lines}")).expect("writable");
        return;
    }
    assert!(
        added.is_empty(),
        "the baseline lacks what was added; accept it with `{UPDATE}=1 cargo test -p patchbay-proto`:\n{}",
        added.join("\n")
    );
}

/// Each kind of break takes a line away, and each kind of addition takes none.
#[test]
fn breaks_are_told_from_additions() {
    const BEFORE: &str = r#"syntax = "proto3";
package patchbay.v1;
service ThingService {
  rpc GetThing(GetThingRequest) returns (GetThingResponse);
}
enum Kind {
  KIND_UNSPECIFIED = 0;
  KIND_SMALL = 1;
}
message GetThingRequest {
  string guest = 1;
  optional bool large = 2;
  map<string, uint32> limits = 3;
}
message GetThingResponse {
  message Part {
    Kind kind = 1;
  }
  repeated Part parts = 1;
  oneof answer {
    uint32 number = 2;
    string text = 3;
  }
}
"#;
    let describe = |text: &str| describe(&compile_text("patchbay/v1/things.proto", text));
    let before = describe(BEFORE);
    let change = |old: &str, new: &str| {
        assert!(BEFORE.contains(old), "{old}");
        missing(&before, &describe(&BEFORE.replace(old, new)))
    };
    let breaks = [
        ("  optional bool large = 2;\n", ""),
        ("bool large = 2", "bool large = 4"),
        ("bool large = 2", "bool big = 2"),
        ("optional bool large", "optional uint32 large"),
        ("optional bool large", "bool large"),
        ("optional bool large", "repeated bool large"),
        ("map<string, uint32>", "map<string, uint64>"),
        ("string text = 3;\n  }", "}\n  string text = 3;"),
        ("oneof answer", "oneof reply"),
        ("repeated Part parts", "Part parts"),
        ("KIND_SMALL = 1", "KIND_SMALL = 2"),
        ("KIND_SMALL = 1", "KIND_TINY = 1"),
        ("  KIND_SMALL = 1;\n", ""),
        ("Part", "Piece"),
        ("Kind kind = 1", "int32 kind = 1"),
        (
            "returns (GetThingResponse)",
            "returns (stream GetThingResponse)",
        ),
        (
            "GetThing(GetThingRequest)",
            "GetThing(stream GetThingRequest)",
        ),
        ("rpc GetThing(", "rpc ReadThing("),
        ("service ThingService", "service ThingsService"),
        ("(GetThingRequest)", "(GetThingResponse)"),
    ];
    for (old, new) in breaks {
        assert!(!change(old, new).is_empty(), "{old:?} became {new:?}");
    }
    let additions = [
        ("bool large = 2;", "bool large = 2; bytes more = 9;"),
        ("KIND_SMALL = 1;", "KIND_SMALL = 1; KIND_LARGE = 2;"),
        (
            "message GetThingRequest",
            "message Other {} message GetThingRequest",
        ),
        ("uint32 number = 2;", "uint32 number = 2; bool flag = 4;"),
        (
            "  rpc GetThing",
            "  rpc ListThings(GetThingRequest) returns (GetThingResponse);\n  rpc GetThing",
        ),
        ("Kind kind = 1;", "// What it is.\n Kind kind = 1;"),
    ];
    for (old, new) in additions {
        assert_eq!(change(old, new), Vec::<String>::new(), "{new:?}");
    }
}
