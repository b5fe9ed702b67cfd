// SPDX-License-Identifier: Apache-2.0
//! Checks that the interface follows the rules, and that each rule finds the faults that it is
//! meant for.

use super::rules::check;
use super::support::{compile_text, interfaces, own};

#[test]
fn the_interface_follows_the_rules() {
    let set = interfaces();
    assert!(own(&set).count() >= 5, "no file is left out");
    let found = check(&set);
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// A file without a fault, for the faults to be put in.
const GOOD: &str = r#"syntax = "proto3";
package patchbay.v1;
service ThingService {
  rpc GetThing(GetThingRequest) returns (GetThingResponse);
  rpc ListThings(ListThingsRequest) returns (ListThingsResponse);
}
enum ThingKind {
  THING_KIND_UNSPECIFIED = 0;
  THING_KIND_SMALL = 1;
}
message GetThingRequest {
  string guest = 1;
  optional bool large = 2;
}
message GetThingResponse {
  oneof answer {
    ThingKind kind = 1;
  }
  map<string, string> labels = 2;
}
message ListThingsRequest {
  string guest = 1;
}
message ListThingsResponse {}
"#;
const PATH: &str = "patchbay/v1/things.proto";

#[test]
fn each_rule_finds_its_fault() {
    let found = check(&compile_text(PATH, GOOD));
    assert!(found.is_empty(), "{found:?}");
    let faults = [
        (
            "PACKAGE_DIRECTORY_MATCH",
            "package patchbay.v1;",
            "package patchbay.v2;",
        ),
        (
            "PACKAGE_VERSION_SUFFIX",
            "package patchbay.v1;",
            "package patchbay.vx;",
        ),
        (
            "PACKAGE_VERSION_SUFFIX",
            "package patchbay.v1;",
            "package patchbay;",
        ),
        (
            "PACKAGE_LOWER_SNAKE_CASE",
            "package patchbay.v1;",
            "package Patchbay.v1;",
        ),
        (
            "SYNTAX_SPECIFIED",
            "syntax = \"proto3\";",
            "syntax = \"proto2\";",
        ),
        ("ENUM_PASCAL_CASE", "enum ThingKind {", "enum thing_kind {"),
        ("ENUM_VALUE_PREFIX", "THING_KIND_SMALL", "SMALL"),
        (
            "ENUM_VALUE_UPPER_SNAKE_CASE",
            "THING_KIND_SMALL",
            "THING_KIND_Small",
        ),
        (
            "ENUM_ZERO_VALUE_SUFFIX",
            "THING_KIND_UNSPECIFIED",
            "THING_KIND_NONE",
        ),
        (
            "ENUM_NO_ALLOW_ALIAS",
            "THING_KIND_SMALL = 1;",
            "THING_KIND_SMALL = 1; THING_KIND_TINY = 1; option allow_alias = true;",
        ),
        (
            "MESSAGE_PASCAL_CASE",
            "message ListThingsResponse {}",
            "message ListThingsResponse {} message a_thing {}",
        ),
        ("FIELD_LOWER_SNAKE_CASE", "bool large", "bool isLarge"),
        ("FIELD_LOWER_SNAKE_CASE", "bool large", "bool large_"),
        ("FIELD_LOWER_SNAKE_CASE", "bool large", "bool is__large"),
        ("ONEOF_LOWER_SNAKE_CASE", "oneof answer", "oneof Answer"),
        ("NO_KEYWORD", "bool large", "bool class"),
        ("NO_KEYWORD", "bool large", "bool range"),
        (
            "NO_KEYWORD",
            "message ListThingsResponse {}",
            "message ListThingsResponse {} message None {}",
        ),
        (
            "NO_KEYWORD",
            "message ListThingsResponse {}",
            "message ListThingsResponse {} enum True { TRUE_UNSPECIFIED = 0; }",
        ),
        ("SERVICE_SUFFIX", "service ThingService", "service Things"),
        (
            "SERVICE_PASCAL_CASE",
            "service ThingService",
            "service thingService",
        ),
        ("RPC_PASCAL_CASE", "rpc GetThing(", "rpc getThing("),
        (
            "RPC_REQUEST_STANDARD_NAME",
            "rpc GetThing(GetThingRequest)",
            "rpc ReadThing(GetThingRequest)",
        ),
        (
            "RPC_RESPONSE_STANDARD_NAME",
            "returns (GetThingResponse)",
            "returns (ListThingsResponse)",
        ),
        (
            "RPC_REQUEST_RESPONSE_UNIQUE",
            "returns (ListThingsResponse)",
            "returns (GetThingResponse)",
        ),
        (
            "REQUEST_NAMES_GUEST",
            "  string guest = 1;\n}\nmessage ListThingsResponse",
            "}\nmessage ListThingsResponse",
        ),
        (
            "REQUEST_NAMES_GUEST",
            "  string guest = 1;\n}",
            "  string guest = 2;\n}",
        ),
        (
            "REQUEST_NAMES_GUEST",
            "  string guest = 1;\n}",
            "  bytes guest = 1;\n}",
        ),
    ];
    for (rule, good, bad) in faults {
        assert!(GOOD.contains(good), "{good}");
        let mut text = GOOD.replacen(good, bad, 1);
        if rule == "ENUM_PASCAL_CASE" {
            text = text.replace("ThingKind kind", "thing_kind kind");
        }
        if rule == "SYNTAX_SPECIFIED" {
            text = text.replace("  string guest", "  optional string guest");
        }
        let found = check(&compile_text(PATH, &text));
        assert!(
            found.iter().any(|fault| fault.starts_with(rule)),
            "{rule}, {bad}: {found:?}"
        );
    }
    let found = check(&compile_text("patchbay/v1/myThings.proto", GOOD));
    assert_eq!(found, ["FILE_LOWER_SNAKE_CASE: patchbay/v1/myThings.proto"]);
}
