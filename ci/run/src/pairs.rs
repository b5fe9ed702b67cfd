// SPDX-License-Identifier: Apache-2.0
//! Runs the command with two keys flipped at a time.
//!
//! The run with no key flipped and the runs with one show three of the four combinations of each
//! pair, so only the fourth is left: both keys flipped. A key that fails by itself would fail in
//! each of its pairs and show nothing about them, so its pairs are left out.

use std::fmt;

use anyhow::{Result, bail};

use crate::args::Pairs;
use crate::cases::{Cases, note};
use crate::causes::{Causes, Outcome, Step};
use crate::covering;
use crate::keys::{Selected, Setting};
use crate::matrix::{self, Flip};
use crate::report::{Case, Verdict};
use crate::runner::{Attempt, Runner, Stopped};

/// Limit on the number of runs. 140 keys have 9,730 pairs.
const RUNS_MAX: usize = 10_000;
/// The number of keys that the reason of a skipped run names.
const SHOWN_MAX: usize = 10;
/// The beginning of the name of a run of the covering array.
const COVERING: &str = "covering run";

/// The numbers of runs, if no key and no run of a covering array fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Budget {
    how: Pairs,
    keys: usize,
    /// The number of runs with several keys.
    several: usize,
}

impl Budget {
    /// Computes the number of runs.
    ///
    /// # Errors
    /// The number exceeds the limit.
    fn within_limit(how: Pairs, keys: usize) -> Result<Self> {
        let budget = Self::of(how, keys);
        let runs = budget.runs();
        if runs <= RUNS_MAX {
            return Ok(budget);
        }
        let text =
            format!("the pairs of {keys} keys take {runs} runs, and the limit is {RUNS_MAX}; ");
        let covering = Self::of(Pairs::Covering, keys).runs();
        if how == Pairs::All && covering <= RUNS_MAX {
            bail!(
                "{text}give --pairs=covering, which takes {covering} runs, or select fewer keys \
                 with --matrix"
            );
        }
        bail!("{text}select fewer keys with --matrix")
    }

    fn of(how: Pairs, keys: usize) -> Self {
        let several = match how {
            Pairs::All => keys * keys.saturating_sub(1) / 2,
            // More keys exceed the limit in any case, so their array is not computed.
            Pairs::Covering => covering_rows(keys.min(RUNS_MAX)).len(),
        };
        Self { how, keys, several }
    }

    fn runs(&self) -> usize {
        1 + self.keys + self.several
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |count: usize, one: &str, several: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{count} {several}"),
        };
        let (keys, several) = (self.keys, self.several);
        let runs = counted(self.runs(), "run", "runs");
        write!(f, "{}: {runs}, ", counted(keys, "key", "keys"))?;
        write!(f, "1 with no key flipped, {keys} with one, ")?;
        match self.how {
            Pairs::All => write!(f, "{several} with two"),
            Pairs::Covering => write!(
                f,
                "{several} of the covering array; more if one of these fails"
            ),
        }
    }
}

/// Runs the command without a flipped key, with each key, and then with all pairs of the keys or
/// with the runs of a covering array. If the first run fails, no other follows.
///
/// # Errors
/// The errors of [`matrix::each`], and one for too many runs.
pub async fn pairs(
    runner: &mut Runner,
    patterns: &[String],
    how: Pairs,
    jobs: usize,
    cases: &mut Cases,
) -> Result<(), Stopped> {
    let selected = matrix::select(runner, patterns).await?;
    let keys: Vec<Option<Setting>> = selected.iter().map(can_be_flipped).collect();
    let budget = Budget::within_limit(how, keys.iter().flatten().count())?;
    note(&budget.to_string());
    cases.plan(1 + selected.len() + budget.several);
    if !matrix::baseline(runner, cases).await? {
        return Ok(());
    }
    let singles = selected.into_iter().map(Flip::from).collect();
    matrix::share(runner, jobs, singles, matrix::flip, cases).await?;
    // The first case is the run with no key flipped.
    let alone = keys.into_iter().zip(&cases.known()[1..]);
    let alone: Vec<Alone> = alone
        .filter_map(|(setting, case)| Some(Alone::of(setting?, &case.verdict)))
        .collect();
    if alone.len() < 2 {
        note("no pair was flipped: fewer than two of the selected keys can be flipped");
        return Ok(());
    }
    match how {
        Pairs::All => {
            let pairs = all(&alone);
            matrix::share(runner, jobs, pairs, matrix::flip, cases).await
        }
        Pairs::Covering => {
            for key in &alone {
                if let Some(why) = &key.obstacle {
                    note(&format!("not in the covering array: {why}"));
                }
            }
            let rows = covering_runs(alone);
            if rows.is_empty() {
                note("no pair was flipped: fewer than two keys pass by themselves");
            }
            for row in &rows {
                note(&format!("{}: {}", row.name, matrix::names(&row.settings)));
            }
            // The array is smaller if a key is not in it.
            cases.plan(cases.known().len() + rows.len());
            matrix::share(runner, jobs, rows, covering_run, cases).await
        }
    }
}

fn can_be_flipped(key: &Selected) -> Option<Setting> {
    key.obstacle.is_none().then(|| key.setting.clone())
}

/// A key, and the reason why it is in no pair, if there is one.
#[derive(Clone, Debug)]
struct Alone {
    setting: Setting,
    obstacle: Option<String>,
}

impl Alone {
    /// Decides by the run with only this key flipped.
    fn of(setting: Setting, verdict: &Verdict) -> Self {
        let obstacle = match verdict {
            Verdict::Passed => None,
            Verdict::Failed(_) => Some(format!("{setting} fails by itself")),
            Verdict::Skipped(_) => Some(format!("{setting} could not be flipped by itself")),
        };
        Self { setting, obstacle }
    }
}

/// Returns all pairs, in the order of the keys.
fn all(keys: &[Alone]) -> Vec<Flip> {
    let pair = |first: &Alone, second: &Alone| {
        let mut obstacles = [first, second].into_iter().filter_map(|key| {
            let why = key.obstacle.as_ref()?;
            Some(why.as_str())
        });
        let obstacle = obstacles.next().map(|first| match obstacles.next() {
            Some(second) => format!("{first}, and {second}"),
            None => first.to_owned(),
        });
        Flip {
            settings: vec![first.setting.clone(), second.setting.clone()],
            obstacle,
        }
    };
    let with_later = |(at, first)| keys[at + 1..].iter().map(move |second| pair(first, second));
    keys.iter().enumerate().flat_map(with_later).collect()
}

/// Returns the rows of a covering array that no other run of the matrix repeats: those with several
/// keys.
fn covering_rows(keys: usize) -> Vec<Vec<usize>> {
    let mut rows = covering::rows(keys);
    rows.retain(|row| row.len() > 1);
    rows
}

/// A run with several of the keys flipped.
#[derive(Clone, Debug)]
struct Row {
    name: String,
    settings: Vec<Setting>,
}

impl Row {
    fn with(&self, numbers: &[usize]) -> Vec<Setting> {
        let setting = |&number: &usize| self.settings[number].clone();
        numbers.iter().map(setting).collect()
    }
}

/// Returns the runs of the covering array of the keys that pass by themselves.
fn covering_runs(keys: Vec<Alone>) -> Vec<Row> {
    let passing = keys.into_iter().filter(|key| key.obstacle.is_none());
    let settings: Vec<Setting> = passing.map(|key| key.setting).collect();
    let rows = (1..).zip(covering_rows(settings.len()));
    rows.map(|(number, columns)| Row {
        name: format!("{COVERING} {number}"),
        settings: columns.iter().map(|&key| settings[key].clone()).collect(),
    })
    .collect()
}

/// Runs the command with several keys flipped. If it fails twice, finds the keys that fail
/// together.
///
/// # Errors
/// The errors of [`Runner::attempt`], with the case of this run if it is known to fail.
async fn covering_run(runner: &mut Runner, row: Row) -> Result<Case, Stopped> {
    let first = match runner.attempt(&row.name, &row.settings).await? {
        Attempt::Ran(case) if case.failed() => case,
        Attempt::Ran(case) => return Ok(case),
        Attempt::NotFlipped(case) => {
            return Ok(unsearched(case, "its pairs were not tested", &row.settings));
        }
        Attempt::Refused(why) => {
            note(&format!("{}: its pairs were not tested", row.name));
            let keys = shortened(&row.settings);
            return Ok(matrix::skipped(row.name, format!("{why}; with {keys}")));
        }
    };
    // A search for a failure that does not recur would name keys at random.
    let again = format!("{}.repeated", row.name);
    let not_repeated = "it could not be repeated";
    match runner.attempt(&again, &row.settings).await {
        Ok(Attempt::Ran(again)) if again.failed() => search(runner, row, first, again).await,
        Ok(Attempt::Ran(_)) => Ok(unsearched(
            first,
            "it passed when it was repeated",
            &row.settings,
        )),
        Ok(Attempt::NotFlipped(_) | Attempt::Refused(_)) => {
            Ok(unsearched(first, not_repeated, &row.settings))
        }
        Err(error) => Err(Stopped {
            error,
            cases: vec![unsearched(first, not_repeated, &row.settings)],
        }),
    }
}

/// Finds the keys that fail together in a run that failed twice.
///
/// # Errors
/// The errors of [`Runner::attempt`], with the case of this run.
async fn search(
    runner: &mut Runner,
    row: Row,
    first: Case,
    mut failing: Case,
) -> Result<Case, Stopped> {
    note(&format!(
        "{} fails with {} keys flipped; looking for the smallest sets: {}",
        row.name,
        row.settings.len(),
        matrix::names(&row.settings)
    ));
    let mut causes = Causes::new(row.settings.len());
    let (mut found, mut tests): (Vec<(String, Case)>, _) = (vec![], 0);
    loop {
        match causes.next() {
            Step::Test(numbers) => {
                tests += 1;
                // The name of each run differs, because its collected files have a folder of this
                // name.
                let name = format!("{}.{tests}", row.name);
                causes.answer(match runner.attempt(&name, &row.with(&numbers)).await {
                    Ok(Attempt::Ran(case)) if case.failed() => {
                        failing = case;
                        Outcome::Failed
                    }
                    Ok(Attempt::Ran(_)) => Outcome::Passed,
                    Ok(Attempt::Refused(_) | Attempt::NotFlipped(_)) => Outcome::Refused,
                    Err(error) => {
                        let why = "the search for the keys that fail together ended early";
                        let case = match found.is_empty() {
                            true => unsearched(first, why, &row.settings),
                            false => failed(row.name, found, true),
                        };
                        let cases = vec![case];
                        return Err(Stopped { error, cases });
                    }
                });
            }
            Step::Found(numbers) => {
                found.push((matrix::names(&row.with(&numbers)), failing.clone()));
            }
            Step::End { untested } => return Ok(failed(row.name, found, untested)),
        }
    }
}

/// Returns the case of a failed run whose failure no search explains, with the reason and the keys.
fn unsearched(case: Case, reason: &str, settings: &[Setting]) -> Case {
    let keys = shortened(settings);
    let verdict = match case.verdict {
        Verdict::Failed(why) => Verdict::Failed(format!("{why}; {reason}; with {keys}")),
        other => other,
    };
    Case { verdict, ..case }
}

/// Returns the first settings, and the number of the others.
fn shortened(settings: &[Setting]) -> String {
    let shown = settings.len().min(SHOWN_MAX);
    let names = matrix::names(&settings[..shown]);
    match settings.len() - shown {
        0 => names,
        more => format!("{names} and {more} more"),
    }
}

/// Returns the case of a failed run of the covering array, with the output of the first set of keys
/// that fails.
fn failed(name: String, found: Vec<(String, Case)>, untested: bool) -> Case {
    let why = |(names, case): &(String, Case)| match &case.verdict {
        Verdict::Failed(why) => format!("fails with {names}: {why}"),
        _ => unreachable!("the search found a failed run"),
    };
    let mut reasons: Vec<String> = found.iter().map(why).collect();
    if untested {
        reasons.push("other pairs of this run were not tested".to_owned());
    }
    let (_, first) = found.into_iter().next().expect("the whole set fails");
    Case {
        name,
        verdict: Verdict::Failed(reasons.join("; ")),
        ..first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Side;

    fn alone(name: &str, verdict: Verdict) -> Alone {
        let setting = Setting {
            key: name.to_owned(),
            side: Side::On,
        };
        Alone::of(setting, &verdict)
    }

    fn passing(count: usize) -> Vec<Alone> {
        let key = |number| alone(&format!("k{number}"), Verdict::Passed);
        (0..count).map(key).collect()
    }

    #[test]
    fn all_pairs_come_in_the_order_of_the_keys_and_those_that_show_nothing_are_skipped() {
        let keys = [
            alone("a", Verdict::Passed),
            alone("b", Verdict::Failed(String::new())),
            alone("c", Verdict::Skipped(String::new())),
            alone("d", Verdict::Passed),
        ];
        let pairs: Vec<(String, Option<String>)> = all(&keys)
            .into_iter()
            .map(|pair| (matrix::names(&pair.settings), pair.obstacle))
            .collect();
        let (fails, refused) = (
            "b=on fails by itself",
            "c=on could not be flipped by itself",
        );
        let both = format!("{fails}, and {refused}");
        let expected = [
            ("a=on b=on", Some(fails)),
            ("a=on c=on", Some(refused)),
            ("a=on d=on", None),
            ("b=on c=on", Some(both.as_str())),
            ("b=on d=on", Some(fails)),
            ("c=on d=on", Some(refused)),
        ];
        let expected = expected.map(|(name, why)| (name.to_owned(), why.map(str::to_owned)));
        assert_eq!(pairs, expected);
    }

    #[test]
    fn reasons_are_short_and_say_why_there_was_no_search() {
        let settings =
            |count| -> Vec<Setting> { passing(count).into_iter().map(|key| key.setting).collect() };
        assert_eq!(shortened(&settings(2)), "k0=on k1=on");
        assert!(shortened(&settings(25)).ends_with(" k9=on and 15 more"));
        let mut case = matrix::skipped("covering run 1".to_owned(), String::new());
        case.verdict = Verdict::Failed("exit status 1".to_owned());
        let case = unsearched(case, "it passed when it was repeated", &settings(2));
        let expected = "exit status 1; it passed when it was repeated; with k0=on k1=on";
        assert_eq!(case.verdict, Verdict::Failed(expected.to_owned()));
    }

    /// Checks that each pair is flipped in one of the runs. The runs with no key and with one key
    /// show the other combinations.
    #[test]
    fn the_covering_runs_flip_each_pair_of_passing_keys() {
        for count in 2..60 {
            let mut keys = passing(count);
            keys.insert(1, alone("fails", Verdict::Failed(String::new())));
            let rows = covering_runs(keys);
            let flipped = |row: &Row, key: &str| row.settings.iter().any(|set| set.key == key);
            for second in 1..count {
                for first in 0..second {
                    let names = [first, second].map(|number| format!("k{number}"));
                    let together = |row: &&Row| names.iter().all(|name| flipped(row, name));
                    assert!(rows.iter().any(|row| together(&row)), "{names:?}");
                }
            }
            assert!(rows.iter().all(|row| !flipped(row, "fails")));
            assert_eq!(rows[0].name, "covering run 1");
        }
        assert!(covering_runs(passing(1)).is_empty());
    }

    /// Checks the numbers of docs/ci.md.
    #[test]
    fn the_budget_counts_all_runs_and_has_a_limit() {
        let several = |how, keys| Budget::of(how, keys).several;
        for (keys, pairs, rows) in [
            (0, 0, 0),
            (1, 0, 0),
            (2, 1, 1),
            (3, 3, 3),
            (10, 45, 5),
            (30, 435, 7),
            (100, 4950, 9),
        ] {
            assert_eq!(several(Pairs::All, keys), pairs);
            assert_eq!(several(Pairs::Covering, keys), rows);
        }
        assert_eq!(several(Pairs::Covering, 1000), 13);
        let text = |how, keys| Budget::of(how, keys).to_string();
        assert_eq!(
            text(Pairs::All, 8),
            "8 keys: 37 runs, 1 with no key flipped, 8 with one, 28 with two"
        );
        assert_eq!(
            text(Pairs::Covering, 1),
            "1 key: 2 runs, 1 with no key flipped, 1 with one, 0 of the covering array; more if one \
             of these fails"
        );
        Budget::within_limit(Pairs::All, 140).unwrap();
        let error = Budget::within_limit(Pairs::All, 141)
            .unwrap_err()
            .to_string();
        assert!(error.contains("take 10012 runs"), "{error}");
        assert!(
            error.contains("--pairs=covering, which takes 152 runs"),
            "{error}"
        );
        for (how, keys) in [(Pairs::Covering, 9_990), (Pairs::All, 60_000)] {
            let error = Budget::within_limit(how, keys).unwrap_err().to_string();
            assert!(
                error.ends_with("select fewer keys with --matrix"),
                "{error}"
            );
            assert!(!error.contains("give"), "{error}");
        }
    }
}
