// SPDX-License-Identifier: Apache-2.0
//! The instructions of each call, by thread, and their baseline.

use std::fmt::Write;

use super::callgrind::Program;
use super::guest::WINDOW;
use super::rows::{CALLS, CLIENT, ROWS, Row};

const BASELINE: &str = include_str!("baseline.txt");
/// How much more than the baseline is permitted, in percent.
const GROWTH: u64 = 5;

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
            let known = [client, executor, api].contains(thread);
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

/// Counts all rows.
pub fn measure(program: &Program) -> Vec<(&'static str, Cost)> {
    ROWS.iter()
        .map(|row| (row.name, Cost::of(program, row)))
        .collect()
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

/// Formats the rows as a new baseline.
pub fn as_baseline(costs: &[(&str, Cost)]) -> String {
    let line = |(name, cost): &(&str, Cost)| format!("{name}: {} {}\n", cost.whole(), cost.window);
    costs.iter().map(line).collect()
}

/// Returns whether a baseline was written.
pub fn has_baseline() -> bool {
    !BASELINE.trim().is_empty()
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
        let Some((whole, window)) = baseline(name) else {
            grown.push(format!("{name}: the baseline has no such row"));
            continue;
        };
        for (what, now, before) in [
            ("the whole call", cost.whole(), whole),
            ("the window", cost.window, window),
        ] {
            if now * 100 > before * (100 + GROWTH) {
                grown.push(format!(
                    "{name}: {what} takes {now} instructions, more than {GROWTH} % above the \
                     baseline of {before}"
                ));
            }
        }
    }
    grown
}
