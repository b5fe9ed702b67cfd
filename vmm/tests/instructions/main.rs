// SPDX-License-Identifier: Apache-2.0
//! No call executes noticeably more instructions than the baseline.
//!
//! The test counts instructions, so the load of the machine does not matter. It needs valgrind and
//! the release profile, in which `cargo xtask test` builds it. Write a new baseline with
//! `cargo xtask bench instructions baseline` if a change is worth its cost, or costs less.

#![allow(dead_code, reason = "the benchmark uses more")]

#[path = "../benches/instructions/callgrind.rs"]
mod callgrind;
#[path = "../benches/instructions/costs.rs"]
mod costs;
#[path = "../benches/instructions/guest.rs"]
mod guest;
#[path = "../benches/sites/kernel.rs"]
mod kernel;
#[path = "../benches/instructions/rows.rs"]
mod rows;

use std::process::Command;

use callgrind::Program;

#[test]
fn no_call_costs_noticeably_more_than_the_baseline() {
    if cfg!(debug_assertions) {
        println!("skipped: the baseline is for the release profile");
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("skipped: valgrind is not installed");
        return;
    }
    if !costs::has_baseline() {
        println!("skipped: there is no baseline; see the head of this file");
        return;
    }
    let program = Program {
        path: std::env::current_exe().expect("a path"),
        arguments: vec!["--exact", "perform_one_row", "--ignored", "--nocapture"],
    };
    let costs = costs::measure(&program);
    println!("{}", costs::table(&costs));
    let grown = costs::grown(&costs);
    assert!(grown.is_empty(), "{}", grown.join("\n"));
}

/// Performs the row that the test above counts.
#[test]
#[ignore = "not a test of its own"]
fn perform_one_row() {
    if let Ok(name) = std::env::var(callgrind::ROW) {
        let row = rows::ROWS.iter().find(|row| row.name == name);
        row.expect("a known row").perform();
    }
}
