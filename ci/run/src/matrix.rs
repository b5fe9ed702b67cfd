// SPDX-License-Identifier: Apache-2.0
//! Runs the command with keys flipped, so that both sides of their branches are tested. All runs
//! share one boot, unless a run makes a new boot necessary, or each has a copy of one guest.

use anyhow::{Result, anyhow};

use crate::cases::{Cases, note};
use crate::ddmin::Search;
use crate::keys::{Selected, Setting};
use crate::report::{Case, Verdict};
use crate::runner::{Attempt, Runner, Stopped};
use crate::workers;

/// The name of the run without a flipped key.
const BASELINE: &str = "no key flipped";
/// The name of the run with all selected keys flipped.
const TOGETHER: &str = "all keys flipped";
/// The beginning of the name of a run with some of the selected keys flipped.
const SUBSET: &str = "some keys flipped";

/// Keys to flip for a run of the command, and the reason why they are not flipped, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flip {
    pub settings: Vec<Setting>,
    pub obstacle: Option<String>,
}

impl From<Selected> for Flip {
    fn from(key: Selected) -> Self {
        Self {
            settings: vec![key.setting],
            obstacle: key.obstacle,
        }
    }
}

/// Runs the command without a flipped key, and then once per key, in as many guests at once as
/// there are jobs. If the first run fails, no other follows.
///
/// # Errors
/// No guest boots, the globs select nothing, or the agent breaks the protocol. The cases before the
/// error were added.
pub async fn each(
    runner: &mut Runner,
    patterns: &[String],
    jobs: usize,
    cases: &mut Cases,
) -> Result<(), Stopped> {
    // The keys are selected first, so that a misspelt name does not cost a run.
    let keys = select(runner, patterns).await?;
    cases.plan(1 + keys.len());
    if baseline(runner, cases).await? {
        let keys = keys.into_iter().map(Flip::from).collect();
        share(runner, jobs, keys, flip, cases).await?;
    }
    Ok(())
}

/// Shares work among as many runners as there are jobs. The cases have the order of the items.
///
/// # Errors
/// The first error of the work, after which the runs of the other jobs end. The cases that were
/// completed were added.
pub async fn share<I>(
    runner: &mut Runner,
    jobs: usize,
    items: Vec<I>,
    work: impl AsyncFn(&mut Runner, I) -> Result<Case, Stopped>,
    cases: &mut Cases,
) -> Result<(), Stopped> {
    let halt = runner.halt.clone();
    let more = 1..jobs.min(items.len());
    let mut others: Vec<Runner> = more.map(|_| runner.another()).collect();
    let workers = std::iter::once(&mut *runner).chain(&mut others);
    let work = async |runner: &mut &mut Runner, item: I| work(runner, item).await;
    let stop = || halt.another_job_ended();
    let shared = workers::in_order(workers, items, work, |case| cases.add(case), stop).await;
    for other in others {
        runner.join(other).await;
    }
    match shared.err().and_then(Stopped::of_jobs) {
        Some(stopped) => Err(stopped),
        None => Ok(()),
    }
}

/// Flips the keys in one transaction and runs the command.
///
/// # Errors
/// The errors of [`Runner::attempt`].
pub async fn flip(runner: &mut Runner, flip: Flip) -> Result<Case, Stopped> {
    let name = names(&flip.settings);
    if let Some(why) = flip.obstacle {
        return Ok(skipped(name, why));
    }
    let attempt = runner.attempt(&name, &flip.settings).await?;
    Ok(match attempt {
        Attempt::Ran(case) | Attempt::NotFlipped(case) => case,
        Attempt::Refused(why) => skipped(name, why),
    })
}

/// Runs the command without a flipped key, and then with all keys flipped. If only the second run
/// fails, finds a smallest set of keys that makes it fail.
///
/// # Errors
/// The errors of [`each`], and one for keys that cannot be flipped together.
pub async fn together(
    runner: &mut Runner,
    patterns: &[String],
    cases: &mut Cases,
) -> Result<(), Stopped> {
    let mut settings = vec![];
    // The keys are selected first, so that a misspelt name does not cost a run.
    let keys = select(runner, patterns).await?;
    let obstacles = keys.iter().filter(|key| key.obstacle.is_some()).count();
    // All keys that can be flipped have one case together.
    cases.plan(1 + obstacles + usize::from(obstacles < keys.len()));
    if !baseline(runner, cases).await? {
        return Ok(());
    }
    for Selected { setting, obstacle } in keys {
        match obstacle {
            Some(why) => cases.add(skipped(setting.to_string(), why)),
            None => settings.push(setting),
        }
    }
    if settings.is_empty() {
        return Ok(());
    }
    let case = match runner.attempt(TOGETHER, &settings).await? {
        Attempt::Ran(case) if case.failed() => {
            note(&format!(
                "fails with all {} keys flipped; looking for the smallest set",
                settings.len()
            ));
            smallest(runner, &settings, case).await?
        }
        Attempt::Ran(case) | Attempt::NotFlipped(case) => case,
        Attempt::Refused(why) => {
            return Err(anyhow!("the keys cannot be flipped together: {why}").into());
        }
    };
    cases.add(case);
    Ok(())
}

/// Finds a smallest set of the keys that makes the command fail.
///
/// # Errors
/// The errors of [`Runner::attempt`], with the case of the smallest set so far.
async fn smallest(
    runner: &mut Runner,
    settings: &[Setting],
    mut failing: Case,
) -> Result<Case, Stopped> {
    let chosen = |numbers: &[usize]| -> Vec<Setting> {
        numbers
            .iter()
            .map(|&number| settings[number].clone())
            .collect()
    };
    let mut search = Search::new(settings.len());
    let mut runs = 0;
    let mut ended = None;
    while let Some(numbers) = search.next() {
        runs += 1;
        // The name of each run differs, because its collected files have a folder of this name.
        let name = format!("{SUBSET} {runs}");
        // A set that cannot be flipped counts as passed, so that the search continues with other
        // sets.
        let case = match runner.attempt(&name, &chosen(&numbers)).await {
            Ok(Attempt::Ran(case)) if case.failed() => Some(case),
            Ok(Attempt::Ran(_) | Attempt::Refused(_) | Attempt::NotFlipped(_)) => None,
            Err(error) => {
                ended = Some(error);
                break;
            }
        };
        search.answer(case.is_some());
        if let Some(case) = case {
            note(&format!("fails with {} of them flipped", numbers.len()));
            failing = case;
        }
    }
    let names = names(&chosen(search.smallest()));
    failing.name = TOGETHER.to_owned();
    if let Verdict::Failed(why) = &mut failing.verdict {
        let early = match ended {
            Some(_) => "; the search for a smaller set ended early",
            None => "",
        };
        *why = format!("fails with {names}: {why}{early}");
    }
    match ended {
        Some(error) => Err(Stopped {
            error,
            cases: vec![failing],
        }),
        None => Ok(failing),
    }
}

/// Returns the keys that the globs select.
///
/// # Errors
/// No guest boots, or the globs select nothing.
pub async fn select(runner: &mut Runner, patterns: &[String]) -> Result<Vec<Selected>> {
    let allow_guarded = runner.config.allow_guarded;
    runner.keys().await?.select(patterns, allow_guarded).await
}

/// Runs the command without a flipped key, and returns whether that passes. If it fails, a later
/// failure could not be attributed to a key. This is the first case, so from now on the results are
/// reported after a signal.
///
/// # Errors
/// The errors of [`Runner::attempt`].
pub async fn baseline(runner: &mut Runner, cases: &mut Cases) -> Result<bool> {
    runner.halt.keep_results();
    let Attempt::Ran(case) = runner.attempt(BASELINE, &[]).await? else {
        unreachable!("nothing was to be flipped");
    };
    let failed = case.failed();
    cases.add(case);
    if failed {
        note("the command fails without a flipped key, so no key was flipped");
    }
    Ok(!failed)
}

/// Returns the settings as on the command line, with spaces between them.
pub fn names(settings: &[Setting]) -> String {
    let names: Vec<String> = settings.iter().map(Setting::to_string).collect();
    names.join(" ")
}

pub fn skipped(name: String, why: String) -> Case {
    Case {
        name,
        verdict: Verdict::Skipped(why),
        time: std::time::Duration::ZERO,
        output: String::new(),
        cut: false,
    }
}
