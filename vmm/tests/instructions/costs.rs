// SPDX-License-Identifier: Apache-2.0
//! The instructions of each call, by thread, and their baseline.

use std::fmt::Write;

use super::callgrind::Program;
use super::conditions::Conditions;
use super::guest::WINDOW;
use super::rows::{CALLS, CLIENT, Row};

const BASELINE: &str = include_str!("baseline.txt");
/// The permitted growth beyond the baseline, in percent.
const GROWTH: u64 = 5;
/// The number of times that a row is counted if it costs more. The threads meet at other moments
/// each time, which changes a count by 1 or 2 %, and by more on a machine that is overloaded.
const ATTEMPTS: usize = 3;

/// The instructions of one call, in user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub client: u64,
    pub api: u64,
    pub executor: u64,
    /// Those of the executor while the guest is stopped.
    pub window: u64,
}

impl Cost {
    pub fn whole(self) -> u64 {
        self.client + self.api + self.executor
    }

    /// Returns the lesser of each number.
    fn least(self, other: Self) -> Self {
        Self {
            client: self.client.min(other.client),
            api: self.api.min(other.api),
            executor: self.executor.min(other.executor),
            window: self.window.min(other.window),
        }
    }

    /// Returns the numbers that are too large, each with its name and its baseline.
    fn above(self, (whole, window): (u64, u64)) -> Vec<(&'static str, u64, u64)> {
        let numbers = [
            ("the whole call", self.whole(), whole),
            ("the window", self.window, window),
        ];
        let too_large = |(_, now, before): &(_, u64, u64)| now * 100 > before * (100 + GROWTH);
        numbers.into_iter().filter(too_large).collect()
    }

    /// Counts one call of a row.
    fn of(program: &Program, row: &Row) -> Self {
        let threads = program.count(row.name);
        let client = threads.iter().find(|(_, parts)| parts.contains_key(CLIENT));
        let (&client, _) = client.unwrap_or_else(|| panic!("{}: no client: {threads:?}", row.name));
        let of = |thread| {
            let parts = threads.get(&thread).into_iter().flatten();
            parts.map(|(_, count)| count).sum::<u64>() / CALLS
        };
        // They are started in this order.
        let (executor, api) = (client + 1, client + 2);
        for (thread, parts) in &threads {
            // The first is the test harness, which wakes up when a test takes long.
            let known = [1, client, executor, api].contains(thread);
            let idle = parts.values().all(|count| *count == 0);
            assert!(known || idle, "{}: thread {thread}: {parts:?}", row.name);
        }
        let window = threads.get(&executor).and_then(|parts| parts.get(WINDOW));
        Self {
            client: of(client),
            api: of(api),
            executor: of(executor),
            window: window.map_or(0, |window| window / CALLS),
        }
    }
}

/// Counts a row. One that costs more than its baseline is counted again, and the least counts.
pub fn measure(program: &Program, row: &Row) -> Cost {
    let mut least = Cost::of(program, row);
    for _ in 1..ATTEMPTS {
        if baseline(row.name).is_none_or(|baseline| least.above(baseline).is_empty()) {
            break;
        }
        least = least.least(Cost::of(program, row));
    }
    least
}

/// Formats the rows as a table, and each beside its baseline.
pub fn table(costs: &[(&str, Cost)]) -> String {
    let mut table =
        "| instructions in user space | whole call | client | API | executor | window | \
         whole / baseline | window / baseline |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for (name, cost) in costs {
        let (whole, window) = baseline(name).unwrap_or_default();
        let ratio = |now: u64, before: u64| match before {
            0 => String::new(),
            _ => format!("{:.3}", now as f64 / before as f64),
        };
        let _ = writeln!(
            table,
            "| {name} | {} | {} | {} | {} | {} | {} | {} |",
            cost.whole(),
            cost.client,
            cost.api,
            cost.executor,
            cost.window,
            ratio(cost.whole(), whole),
            ratio(cost.window, window),
        );
    }
    table
}

/// Writes the conditions and the rows as the new baseline.
pub fn write_baseline(conditions: &Conditions, costs: &[(&str, Cost)]) {
    let line = |(name, cost): &(&str, Cost)| format!("{name}: {} {}\n", cost.whole(), cost.window);
    let lines: String = costs.iter().map(line).collect();
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/instructions/baseline.txt"
    );
    std::fs::write(file, format!("{conditions}{lines}")).expect("the baseline is written");
}

/// Checks that counts under these conditions can be compared with the baseline.
///
/// # Errors
/// A sentence about the first condition that differs.
pub fn comparable(conditions: &Conditions) -> Result<(), String> {
    match conditions.difference(&Conditions::read(BASELINE)) {
        Some(difference) => Err(format!("no baseline for these conditions: {difference}")),
        None => Ok(()),
    }
}

/// Returns the whole call and the window of a row in the baseline.
fn baseline(name: &str) -> Option<(u64, u64)> {
    let (_, numbers) = BASELINE
        .lines()
        .filter_map(|line| line.rsplit_once(": "))
        .find(|(row, _)| *row == name)?;
    let (whole, window) = numbers.split_once(' ')?;
    Some((whole.parse().ok()?, window.parse().ok()?))
}

/// Returns a sentence for each row that costs too much or has no baseline.
pub fn grown(costs: &[(&str, Cost)]) -> Vec<String> {
    let mut grown = Vec::new();
    for (name, cost) in costs {
        let Some(baseline) = baseline(name) else {
            grown.push(format!("{name}: the baseline has no such row"));
            continue;
        };
        for (what, now, before) in cost.above(baseline) {
            grown.push(format!(
                "{name}: {what} takes {now} instructions, more than {GROWTH} % above the baseline \
                 of {before}"
            ));
        }
    }
    grown
}
