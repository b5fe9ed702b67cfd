// SPDX-License-Identifier: Apache-2.0
//! Short run of the fuzz targets; `cargo xtask fuzz` runs them for longer.

mod common;
#[path = "../fuzz/src/short_run.rs"]
mod short_run;
#[path = "../fuzz/src/targets.rs"]
mod targets;

/// Number of mutations of each target's corpus.
const CASES: u32 = 2000;

fn run(name: &str) {
    short_run::short_run(targets::TARGETS, name, CASES);
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
