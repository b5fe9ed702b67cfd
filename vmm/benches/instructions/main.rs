// SPDX-License-Identifier: Apache-2.0
//! Counts the instructions of calls in user space: those of the client, of the API's thread, and of
//! the executor, in all and while the guest is stopped.
//!
//! The guest has the monitor's memory, the tables of a synthetic kernel, and no vCPU, so no KVM is
//! needed. Two runs of one build differ by 1 or 2 %, whatever else the machine does. The kernel's
//! instructions are not counted; `cargo xtask bench flip --instructions` has them.
//!
//! `cargo xtask bench instructions [baseline | profile ROW]` prints the table, also writes the
//! baseline of the test, or prints the functions that execute most instructions in one row.

mod callgrind;
#[allow(dead_code, reason = "the test uses more")]
mod costs;
mod guest;
#[path = "../sites/kernel.rs"]
mod kernel;
mod rows;

use callgrind::Program;
use rows::ROWS;

fn main() {
    if let Ok(name) = std::env::var(callgrind::ROW) {
        let row = ROWS.iter().find(|row| row.name == name);
        return row.expect("a known row").perform();
    }
    let program = Program {
        path: std::env::current_exe().expect("a path"),
        arguments: Vec::new(),
    };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let words: Vec<&str> = words
        .into_iter()
        .filter(|word| *word != "--bench")
        .collect();
    match *words {
        ["profile", name] => {
            let Some(row) = ROWS.iter().find(|row| row.name.starts_with(name)) else {
                let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
                panic!("there is no row {name}; use one of {names:#?}");
            };
            program.profile(row.name);
        }
        [] | ["baseline"] => {
            let costs = costs::measure(&program);
            print!("{}", costs::table(&costs));
            for sentence in costs::grown(&costs) {
                println!("{sentence}");
            }
            if words == ["baseline"] {
                let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions");
                let file = format!("{folder}/baseline.txt");
                std::fs::write(file, costs::as_baseline(&costs)).expect("the baseline is written");
            }
        }
        _ => panic!("unknown arguments {words:?}; use none, `baseline` or `profile ROW`"),
    }
}
