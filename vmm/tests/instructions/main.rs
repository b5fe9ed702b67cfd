// SPDX-License-Identifier: Apache-2.0
//! No call executes noticeably more instructions in user space than the baseline.
//!
//! The guest has the monitor's memory, the tables of a synthetic kernel, and no vCPU, so no KVM is
//! needed. Instructions of the kernel are not counted; `cargo xtask bench flip --instructions` has
//! them.
//!
//! The counts do not depend on the load of the machine, but on the compiler, on the C library and
//! on the CPU that valgrind emulates. The baseline names them ([`conditions`]), and the test is
//! skipped where they differ. `cargo xtask bench instructions [baseline | profile ROW]` prints the
//! table, also writes the baseline, or prints the functions that execute most instructions in one
//! row.

mod callgrind;
mod conditions;
mod costs;
mod guest;
#[path = "../../benches/sites/kernel.rs"]
mod kernel;
mod rows;

use callgrind::Program;
use conditions::Conditions;
use rows::ROWS;

/// Name of the row whose functions are printed.
const PROFILE: &str = "PATCHBAY_INSTRUCTIONS_PROFILE";
/// If set, the baseline is written.
const UPDATE: &str = "PATCHBAY_INSTRUCTIONS_BASELINE";

#[test]
fn no_call_costs_noticeably_more_than_the_baseline() {
    match std::env::var(callgrind::ROW).as_deref() {
        Ok(conditions::ROW) => return Conditions::here().print(),
        Ok(name) => return rows::named(name).perform(),
        Err(_) => {}
    }
    if cfg!(debug_assertions) {
        return println!("SKIPPED: the baseline is for the release profile");
    }
    let program = Program::this("no_call_costs_noticeably_more_than_the_baseline");
    let writes = std::env::var_os(UPDATE).is_some();
    if let Err(reason) = callgrind::find() {
        return println!("SKIPPED: {reason}");
    }
    if let Ok(name) = std::env::var(PROFILE) {
        return program.profile(rows::named(&name).name);
    }
    let conditions = program.conditions();
    if !writes && let Err(reason) = costs::comparable(&conditions) {
        return println!("SKIPPED: {reason}");
    }
    let costs: Vec<_> = ROWS
        .iter()
        .map(|row| (row.name, costs::measure(&program, row)))
        .collect();
    println!("{}", costs::table(&costs));
    if writes {
        costs::write_baseline(&conditions, &costs);
        return;
    }
    let grown = costs::grown(&costs);
    assert!(
        grown.is_empty(),
        "{}\nIf the change is worth this, write a new baseline: \
         `cargo xtask bench instructions baseline`",
        grown.join("\n")
    );
}
