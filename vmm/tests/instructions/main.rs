// SPDX-License-Identifier: Apache-2.0
//! Checks that no call executes noticeably more or fewer instructions in user space than the
//! baseline.
//!
//! The guest has the monitor's memory, the tables of a synthetic kernel, and no vCPU, so no KVM is
//! needed. Instructions of the kernel are not counted; `cargo xtask bench flip --instructions`
//! counts them.
//!
//! The counts depend little on the load of the machine. They depend on the compiler, on the C
//! library and on the CPU that valgrind emulates, and the baseline records these conditions
//! ([`conditions`]). The test is skipped on a machine that differs from the baseline's. It fails if
//! the compiler differs, because the repository determines the compiler.
//!
//! `cargo xtask bench instructions` prints the table. With `baseline` it also writes the baseline.
//! With `profile ROW` it prints only the functions that execute most instructions in one row.

mod callgrind;
mod conditions;
mod costs;
mod guest;
#[path = "../../benches/sites/kernel.rs"]
mod kernel;
mod rows;

use callgrind::Program;
use conditions::{Comparable, Conditions};
use costs::Cost;
use rows::ROWS;

/// Environment variable: the name of the row to profile.
const PROFILE: &str = "PATCHBAY_INSTRUCTIONS_PROFILE";
/// Environment variable: if it is set, the table is printed even if there is no baseline for this
/// machine.
const TABLE: &str = "PATCHBAY_INSTRUCTIONS_TABLE";
/// Environment variable: if it is set, the baseline is written.
const UPDATE: &str = "PATCHBAY_INSTRUCTIONS_BASELINE";

#[test]
fn no_call_costs_noticeably_more_or_less_than_the_baseline() {
    match std::env::var(callgrind::ROW).as_deref() {
        Ok(conditions::ROW) => return Conditions::here().print(),
        Ok(name) => return rows::named(name).perform(),
        Err(_) => {}
    }
    if cfg!(debug_assertions) {
        return println!("SKIPPED: the baseline is for the release profile");
    }
    let program = Program::this("no_call_costs_noticeably_more_or_less_than_the_baseline");
    let writes = std::env::var_os(UPDATE).is_some();
    if let Err(reason) = callgrind::find() {
        return println!("SKIPPED: {reason}");
    }
    if let Ok(name) = std::env::var(PROFILE) {
        return program.profile(rows::named(&name).name);
    }
    let conditions = program.conditions();
    if writes {
        let costs: Vec<_> = ROWS
            .iter()
            .map(|row| (row.name, costs::measure(&program, row)))
            .collect();
        println!("{}", costs::table(&costs));
        return costs::write_baseline(&conditions, &costs);
    }
    let comparable = costs::comparable(&conditions);
    if let Comparable::Elsewhere(difference) = &comparable {
        let reason = format!("no baseline for this machine: {difference}");
        if std::env::var_os(TABLE).is_none() {
            return println!("SKIPPED: {reason}");
        }
        println!("Not compared, because there is {reason}");
    }
    if comparable != Comparable::Yes {
        let costs = ROWS.iter().map(|row| (row.name, Cost::of(&program, row)));
        println!("{}", costs::table(&costs.collect::<Vec<_>>()));
    }
    let differences = match comparable {
        Comparable::Elsewhere(_) => return,
        Comparable::Outdated(difference) => vec![format!("the baseline is outdated: {difference}")],
        Comparable::Yes => {
            let compared = ROWS.iter().map(|row| costs::compare(&program, row));
            let (costs, differences): (Vec<Cost>, Vec<Vec<String>>) = compared.unzip();
            let names = ROWS.iter().map(|row| row.name);
            println!("{}", costs::table(&names.zip(costs).collect::<Vec<_>>()));
            differences.concat()
        }
    };
    assert!(
        differences.is_empty(),
        "{}\nIf the change is intended, or a call has become cheaper, write a new baseline: \
         `cargo xtask bench instructions baseline`",
        differences.join("\n")
    );
}
