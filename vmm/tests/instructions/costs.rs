// SPDX-License-Identifier: Apache-2.0
//! The instructions of each call, by thread, and their baseline.

use std::fmt::Write;

use super::callgrind::Program;
use super::conditions::{Comparable, Conditions};
use super::guest::WINDOW;
use super::rows::{CALLS, CLIENT, ROWS, Row, Threads};

const BASELINE: &str = include_str!("baseline.txt");
/// The permitted difference from the baseline, in percent.
const DIFFERENCE: u64 = 5;
/// The number of times that a row is counted before it is reported as changed. The threads
/// interleave differently each time, which changes a count by 1 or 2 %, and on a busy machine by up
/// to 5 %.
const ATTEMPTS: usize = 5;
/// The number of times that a row is counted for the baseline.
const MEASURED: usize = 2;
/// Names of the numbers in the baseline.
const NUMBERS: [&str; 3] = ["the whole call", "the executor", "the window"];

/// The instructions of one call, in user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    pub client: u64,
    pub api: u64,
    pub executor: u64,
    /// Instructions of the executor while the guest is stopped.
    pub window: u64,
}

impl Cost {
    pub fn whole(self) -> u64 {
        self.client + self.api + self.executor
    }

    pub fn numbers(self) -> [u64; NUMBERS.len()] {
        [self.whole(), self.executor, self.window]
    }

    /// Returns the smaller number of each thread.
    fn cheapest(self, other: Self) -> Self {
        Self {
            client: self.client.min(other.client),
            api: self.api.min(other.api),
            executor: self.executor.min(other.executor),
            window: self.window.min(other.window),
        }
    }

    /// Returns a sentence for each number that differs too much from the baseline.
    fn differences(self, row: &Row) -> Vec<String> {
        let name = row.name;
        let permitted = if row.varies() {
            2 * DIFFERENCE
        } else {
            DIFFERENCE
        };
        let Some(baseline) = baseline(name) else {
            return vec![format!("{name}: the baseline has no such row")];
        };
        let mut differences = Vec::new();
        let compared = NUMBERS.iter().zip(self.numbers()).zip(baseline);
        for ((what, now), before) in compared.skip(usize::from(row.varies())) {
            let is_more = now * 100 > before * (100 + permitted);
            let is_less = now * 100 < before * (100 - permitted);
            if is_more || is_less {
                let how = if is_more { "more" } else { "less" };
                differences.push(format!(
                    "{name}: {what} takes {now} instructions, over {permitted} % {how} than the \
                     baseline of {before}"
                ));
            }
        }
        differences
    }

    /// Counts one call of a row.
    pub fn of(program: &Program, row: &Row) -> Self {
        let threads = program.count(row.name);
        let client = threads.iter().find(|(_, parts)| parts.contains_key(CLIENT));
        let (&client, _) = client.unwrap_or_else(|| panic!("{}: no client: {threads:?}", row.name));
        let of = |thread| {
            let parts = threads.get(&thread).into_iter().flatten();
            parts.map(|(_, count)| count).sum::<u64>() / CALLS
        };
        // Thread 1 is the test harness, which wakes up when a test takes long.
        let others = threads.keys().copied();
        let others = others.filter(|thread| ![1, client].contains(thread));
        let service = match row.threads() {
            Threads::Daemon => {
                return Self {
                    client: of(client),
                    api: others.map(of).sum(),
                    executor: 0,
                    window: 0,
                };
            }
            Threads::None => 0..0,
            // The threads are started in this order after the client's.
            Threads::Service { has_agent } => client + 1..client + 3 + u32::from(has_agent),
        };
        let (executor, api) = (client + 1, client + 2);
        for thread in others.filter(|thread| !service.contains(thread)) {
            assert_eq!(of(thread), 0, "{}: thread {thread} has worked", row.name);
        }
        // Callgrind notices a switch of threads only while it counts. A part that ends between two
        // counted calls may therefore be attributed to another thread. For this reason, the window
        // is read only from rows that change the guest.
        let parts = threads.get(&executor).filter(|_| row.stops());
        let window = parts.and_then(|parts| parts.get(WINDOW));
        Self {
            client: of(client),
            api: of(api),
            executor: of(executor),
            window: window.map_or(0, |window| window / CALLS),
        }
    }
}

/// Counts a row, and returns how it differs from the baseline. A row that differs is counted again,
/// and its smallest numbers are compared.
pub fn compare(program: &Program, row: &Row) -> (Cost, Vec<String>) {
    let mut cost = Cost::of(program, row);
    for _ in 1..ATTEMPTS {
        if baseline(row.name).is_none() || cost.differences(row).is_empty() {
            break;
        }
        cost = cost.cheapest(Cost::of(program, row));
    }
    (cost, cost.differences(row))
}

/// Counts a row several times for the baseline, and returns the smallest numbers.
pub fn measure(program: &Program, row: &Row) -> Cost {
    let costs = (0..MEASURED).map(|_| Cost::of(program, row));
    costs.reduce(Cost::cheapest).expect("at least one attempt")
}

/// Formats the rows as a table that compares each row with its baseline.
pub fn table(costs: &[(&str, Cost)]) -> String {
    let mut table =
        "| instructions in user space | whole call | client | API | executor | window | \
                     whole / baseline | executor / baseline | window / baseline |\n\
                     |---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for (name, cost) in costs {
        let baseline = baseline(name).unwrap_or_default();
        let ratio = |(now, before): (u64, u64)| match before {
            0 => String::new(),
            _ => format!("{:.3}", now as f64 / before as f64),
        };
        let ratios = cost.numbers().into_iter().zip(baseline).map(ratio);
        let ratios: Vec<String> = ratios.collect();
        let _ = writeln!(
            table,
            "| {name} | {} | {} | {} | {} | {} | {} |",
            cost.whole(),
            cost.client,
            cost.api,
            cost.executor,
            cost.window,
            ratios.join(" | "),
        );
    }
    table
}

/// Writes the conditions and the rows as the new baseline.
pub fn write_baseline(conditions: &Conditions, costs: &[(&str, Cost)]) {
    let line = |(name, cost): &(&str, Cost)| {
        let numbers = cost.numbers().map(|number| number.to_string());
        format!("{name}: {}\n", numbers.join(" "))
    };
    let lines: String = costs.iter().map(line).collect();
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/instructions/baseline.txt"
    );
    std::fs::write(file, format!("{conditions}{lines}")).expect("the baseline is written");
}

/// Compares the conditions with the baseline's.
pub fn comparable(conditions: &Conditions) -> Comparable {
    conditions.compare(&Conditions::read(BASELINE))
}

/// Returns the rows of the baseline that are counted no more.
pub fn unknown_rows() -> impl Iterator<Item = &'static str> {
    let lines = BASELINE.lines().filter_map(|line| line.rsplit_once(": "));
    let names = lines.map(|(name, _)| name);
    names.filter(|name| ROWS.iter().all(|row| row.name != *name))
}

/// Returns the numbers of a row in the baseline.
fn baseline(name: &str) -> Option<[u64; NUMBERS.len()]> {
    let (_, numbers) = BASELINE
        .lines()
        .filter_map(|line| line.rsplit_once(": "))
        .find(|(row, _)| *row == name)?;
    let numbers: Option<Vec<u64>> = numbers
        .split(' ')
        .map(|number| number.parse().ok())
        .collect();
    numbers?.try_into().ok()
}
