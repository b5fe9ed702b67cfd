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
//! ([`conditions`]). On a machine that differs from the baseline's, the counts are not compared.
//! The test fails if the compiler differs, because the repository determines the compiler.
//!
//! The test also checks, on every machine, that the cost of a key, of a site, of a claim and of a
//! call does not depend on their number, on the size of the table or on the number of guests
//! ([`scale`]).
//!
//! The memory that a guest at rest takes on the host is also compared ([`memory`]).
//!
//! The test leaves out the rows that take long ([`rows::Row::is_tested`]). The command
//! `cargo xtask bench instructions` counts all rows, compares them and prints the table. With
//! `baseline` it also writes the baseline.
//! With `rows BEGINNING` it counts only the rows whose names begin so, and compares nothing.
//! With `profile ROW` it prints only the functions that execute most instructions in one row.

mod callgrind;
mod calls;
mod claims;
mod conditions;
mod costs;
// A small kernel in the memory of a guest. Only some of these functions are used here.
#[path = "../../../engine/kernel-image/tests/images/craft.rs"]
#[allow(dead_code)]
mod craft;
#[path = "../../../engine/kernel-image/tests/live/craft_btf.rs"]
#[allow(dead_code)]
mod craft_btf;
#[path = "../../../engine/kernel-image/tests/live/craft_guest.rs"]
#[allow(dead_code)]
mod craft_guest;
#[path = "../../../engine/kernel-image/tests/images/craft_kallsyms.rs"]
#[allow(dead_code)]
mod craft_kallsyms;
mod engine;
mod guest;
#[path = "../../benches/sites/kernel.rs"]
mod kernel;
mod memory;
mod monitor;
mod node;
mod rows;
mod scale;
mod served;
mod trace;

use callgrind::Program;
use conditions::{Comparable, Conditions};
use costs::Cost;
use memory::Use;
use rows::{ROWS, Row};
use scale::GROUPS;

/// Environment variable: the name of the row to profile.
const PROFILE: &str = "PATCHBAY_INSTRUCTIONS_PROFILE";
/// Environment variable: if it is set, the table is printed even if there is no baseline for
/// this machine.
const TABLE: &str = "PATCHBAY_INSTRUCTIONS_TABLE";
/// Environment variable: beginnings of the names of rows, one per line. Only these are counted.
const ONLY: &str = "PATCHBAY_INSTRUCTIONS_ROWS";
/// Environment variable: if it is set, the baseline is written.
const UPDATE: &str = "PATCHBAY_INSTRUCTIONS_BASELINE";
/// The name of the test below, which the processes of the rows also run.
const TEST: &str = "no_call_costs_noticeably_more_or_less_than_the_baseline";

#[test]
fn no_call_costs_noticeably_more_or_less_than_the_baseline() {
    match std::env::var(callgrind::ROW).as_deref() {
        Ok(conditions::ROW) => return Conditions::here().print(),
        Ok(monitor::ROW) => return monitor::run(),
        Ok(node::ROW) => return node::serve_guests(),
        Ok(name) if memory::perform(name) => return,
        Ok(name) => return rows::named(name).perform(),
        Err(_) => {}
    }
    if cfg!(debug_assertions) {
        return println!("SKIPPED: the baseline is for the release profile");
    }
    let program = Program::this(TEST);
    if let Err(reason) = callgrind::find() {
        return println!("SKIPPED: {reason}");
    }
    if let Ok(name) = std::env::var(PROFILE) {
        return program.profile(rows::named(&name).name);
    }
    if let Ok(beginnings) = std::env::var(ONLY) {
        let is_wanted = |row: &&Row| beginnings.lines().any(|of| row.name.starts_with(of));
        let costs = costs_of(ROWS.iter().filter(is_wanted), |row| Cost::of(&program, row));
        assert!(
            !costs.is_empty(),
            "no name of a row begins with {beginnings:?}"
        );
        return println!("{}", costs::table(&costs));
    }
    let conditions = program.conditions();
    if std::env::var_os(UPDATE).is_some() {
        let costs = costs_of(ROWS, |row| costs::measure(&program, row));
        let uses = uses_of(memory::ROWS);
        print(&costs, &uses);
        costs::write_baseline(&conditions, &costs, &uses);
        return assert_flat(&costs);
    }
    let counts_all = std::env::var_os(TABLE).is_some();
    let wanted = ROWS.iter().filter(|row| counts_all || row.is_tested());
    let measured = memory::ROWS.iter();
    let measured = measured.filter(|row| counts_all || row.is_tested);
    match costs::comparable(&conditions) {
        Comparable::Yes => {
            let mut differences = Vec::new();
            let costs = costs_of(wanted, |row| {
                let (cost, of_row) = costs::compare(&program, row);
                differences.extend(of_row);
                cost
            });
            let uses = uses_of(measured);
            print(&costs, &uses);
            differences.extend(uses.iter().filter_map(|(name, of)| of.difference(name)));
            let unknown = costs::unknown_rows().map(|row| format!("{row}: there is no such row"));
            differences.extend(unknown);
            assert!(
                differences.is_empty(),
                "{}\nIf the change is intended, or a call has become cheaper, write a new \
                 baseline: `cargo xtask bench instructions baseline`",
                differences.join("\n")
            );
            assert_flat(&costs);
        }
        Comparable::Outdated(difference) => {
            let costs = costs_of(wanted, |row| Cost::of(&program, row));
            print(&costs, &uses_of(measured));
            panic!(
                "the baseline is outdated: {difference}\nWrite a new one: \
                 `cargo xtask bench instructions baseline`"
            );
        }
        Comparable::Elsewhere(difference) => {
            // The scale can be checked on any machine.
            let of_scale = |row: &Row| GROUPS.iter().any(|group| group.has(row.name));
            let wanted = wanted.filter(|row| counts_all || of_scale(row));
            let costs = costs_of(wanted, |row| Cost::of(&program, row));
            if counts_all {
                print(&costs, &uses_of(measured));
            }
            assert_flat(&costs);
            println!(
                "\nSKIPPED: the costs do not depend on the scale, but they are not compared: no \
                 baseline for this machine: {difference}"
            );
        }
    }
}

type Costs = Vec<(&'static str, Cost)>;

fn costs_of(
    rows: impl IntoIterator<Item = &'static Row>,
    mut count: impl FnMut(&Row) -> Cost,
) -> Costs {
    let counted = |row: &'static Row| {
        let cost = count(row);
        // The table comes minutes later.
        println!("{}: {:?}", row.name, cost.numbers());
        (row.name, cost)
    };
    rows.into_iter().map(counted).collect()
}

fn uses_of(rows: impl IntoIterator<Item = &'static memory::Row>) -> Vec<(&'static str, Use)> {
    let measured = |row: &'static memory::Row| (row.name, memory::measure(row));
    rows.into_iter().map(measured).collect()
}

fn print(costs: &Costs, uses: &[(&str, Use)]) {
    println!(
        "{}\n{}\n{}",
        costs::table(costs),
        scale::table(costs),
        memory::table(uses)
    );
}

fn assert_flat(costs: &Costs) {
    let faults = GROUPS.iter().filter_map(|group| group.fault(costs));
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
