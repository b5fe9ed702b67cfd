// SPDX-License-Identifier: Apache-2.0
//! The short run of the fuzz targets; `cargo xtask fuzz` does the long one.

mod common;
#[path = "../fuzz/src/short_run.rs"]
mod short_run;
#[path = "../fuzz/src/targets.rs"]
mod targets;

use std::path::Path;

/// Mutations of each target's corpus.
const CASES: u32 = 2000;

fn run(name: &str) {
    let (name, target) = targets::TARGETS
        .iter()
        .find(|(target, _)| *target == name)
        .expect("a target of this name");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    short_run::short_run(&folder, name, *target, CASES);
}

#[test]
fn tables() {
    run("tables");
}

#[test]
fn modules() {
    run("modules");
}

#[test]
fn chains() {
    run("chains");
}

#[test]
fn names() {
    run("names");
}

#[test]
fn instructions() {
    run("instructions");
}
