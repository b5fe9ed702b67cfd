// SPDX-License-Identifier: Apache-2.0
//! The instructions of each call, by thread, and their baseline.

use std::fmt::Write;

use super::callgrind::Program;
use super::conditions::{Comparable, Conditions};
use super::guest::WINDOW;
use super::memory::{self, Use};
use super::rows::{CALLS, ROWS, Row};

const BASELINE: &str = include_str!("baseline.txt");
/// The permitted difference from the baseline, in percent.
pub const DIFFERENCE: u64 = 5;
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
        let Some(baseline) = baseline::<{ NUMBERS.len() }>(name) else {
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
        // The harness is thread 1, and starts the test's thread first, which is the client.
        let client = threads.keys().copied().find(|thread| *thread > 1);
        let client = client.unwrap_or_else(|| panic!("{}: no client: {threads:?}", row.name));
        let of = |thread| {
            let parts = threads.get(&thread).into_iter().flatten();
            parts.map(|(_, count)| count).sum::<u64>() / CALLS
        };
        // The agent's thread, if there is one, and the executor's are the first to be started after
        // the client's. The agent belongs to the guest, so it is not counted.
        let agent = row.threads().agent.then_some(client + 1);
        let executor = row.threads().executor;
        let executor = executor.then_some(agent.unwrap_or(client) + 1);
        // The harness wakes up when a test takes long. All other threads work for the API: its own
        // thread, the thread of events, and those that read memory for a call.
        let left_out = [Some(1), Some(client), executor, agent];
        let others = threads.keys().copied();
        let others = others.filter(|thread| !left_out.contains(&Some(*thread)));
        // Callgrind notices a switch of threads only while it counts. A part that ends between two
        // counted calls may therefore be attributed to another thread. For this reason, the window
        // is read only from rows that change the guest.
        let parts = executor.and_then(|executor| threads.get(&executor));
        let parts = parts.filter(|_| row.stops());
        let window = parts.and_then(|parts| parts.get(WINDOW));
        Self {
            client: of(client),
            api: others.map(of).sum(),
            executor: executor.map_or(0, of),
            window: window.map_or(0, |window| window / CALLS),
        }
    }
}

/// Counts a row, and returns how it differs from the baseline. A row that differs is counted again,
/// and its smallest numbers are compared.
pub fn compare(program: &Program, row: &Row) -> (Cost, Vec<String>) {
    let mut cost = Cost::of(program, row);
    for _ in 1..ATTEMPTS {
        if baseline::<{ NUMBERS.len() }>(row.name).is_none() || cost.differences(row).is_empty() {
            break;
        }
        cost = cost.cheapest(Cost::of(program, row));
    }
    (cost, cost.differences(row))
}

/// Counts a row several times for the baseline, and returns the smallest numbers.
pub fn measure(program: &Program, row: &Row) -> Cost {
    let costs = (0..MEASURED).map(|_| {
        let cost = Cost::of(program, row);
        println!("{}: {:?}", row.name, cost.numbers());
        cost
    });
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
        let baseline: [u64; NUMBERS.len()] = baseline(name).unwrap_or_default();
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
pub fn write_baseline(conditions: &Conditions, costs: &[(&str, Cost)], uses: &[(&str, Use)]) {
    let line = |(name, cost): &(&str, Cost)| {
        let numbers = cost.numbers().map(|number| number.to_string());
        format!("{name}: {}\n", numbers.join(" "))
    };
    let mut lines: String = costs.iter().map(line).collect();
    lines.extend(
        uses.iter()
            .map(|(name, of)| format!("{name}: {}\n", of.heap)),
    );
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

/// Returns the rows of the baseline that are no longer counted.
pub fn unknown_rows() -> impl Iterator<Item = &'static str> {
    let lines = BASELINE.lines().filter_map(|line| line.rsplit_once(": "));
    let names = lines.map(|(name, _)| name);
    let known = ROWS.iter().map(|row| row.name);
    let known: Vec<&str> = known
        .chain(memory::ROWS.iter().map(|row| row.name))
        .collect();
    names.filter(move |name| !known.contains(name))
}

/// Returns the numbers of a row in the baseline.
pub fn baseline<const COUNT: usize>(name: &str) -> Option<[u64; COUNT]> {
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
