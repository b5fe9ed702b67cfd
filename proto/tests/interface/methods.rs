// SPDX-License-Identifier: Apache-2.0
//! A method or a field with unusable options fails the build.

use protox::prost_reflect::DescriptorPool;

use super::support::root;

#[path = "../../build/methods.rs"]
mod generator;

const GOOD: &str = r#"syntax = "proto3";
package patchbay.v1;
import "patchbay/options/v1/options.proto";
service ThingService {
  rpc GetThing(GetThingRequest) returns (stream GetThingResponse) {
    option (patchbay.options.v1.access) = {role: ROLE_OPERATOR effect: EFFECT_GUEST};
  }
}
message GetThingRequest {
  string guest = 1;
  bool force = 2 [(patchbay.options.v1.role_if_set) = ROLE_ADMIN];
}
message GetThingResponse {}
"#;

fn generate(text: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("things.proto");
    std::fs::write(&file, text).expect("writable");
    let mut compiler = protox::Compiler::new([folder.path(), root()]).expect("folders");
    compiler.include_imports(true);
    compiler.open_file(&file).expect("it compiles");
    let pool: DescriptorPool = compiler.descriptor_pool();
    generator::table(&pool)
}

#[test]
fn the_table_has_the_facts_of_the_options() {
    let code = generate(GOOD).expect("whole");
    for part in [
        "impl Call for v1::GetThingRequest {",
        "path: \"/patchbay.v1.ThingService/GetThing\",",
        "role: Role::Operator,",
        "effect: Effect::Guest,",
        "streams: true,",
        "(2, Role::Admin),",
        "&self.guest",
        "vec![self.force]",
        "<v1::GetThingRequest as Call>::METHOD,",
    ] {
        assert!(code.contains(part), "no {part:?} in\n{code}");
    }
}

#[test]
fn a_method_without_the_option_or_a_part_of_it_is_refused() {
    let option =
        "option (patchbay.options.v1.access) = {role: ROLE_OPERATOR effect: EFFECT_GUEST};";
    for other in [
        "",
        "option (patchbay.options.v1.access) = {role: ROLE_OPERATOR};",
        "option (patchbay.options.v1.access) = {effect: EFFECT_GUEST};",
    ] {
        let error = generate(&GOOD.replace(option, other)).expect_err("incomplete");
        assert!(
            error.contains("/patchbay.v1.ThingService/GetThing"),
            "{error}"
        );
    }
}

#[test]
fn only_a_boolean_field_raises_the_role() {
    for (good, bad) in [
        ("bool force", "string force"),
        ("bool force", "repeated bool force"),
        ("ROLE_ADMIN", "ROLE_UNSPECIFIED"),
        (
            "message GetThingRequest",
            "message GetThingRequest { Part force = 1; }\nmessage Part",
        ),
    ] {
        let error = generate(&GOOD.replace(good, bad)).expect_err("unusable");
        assert!(error.contains(".force: the option"), "{error}");
    }
}
