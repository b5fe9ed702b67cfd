// SPDX-License-Identifier: Apache-2.0
//! Runs the command with keys flipped, so that both sides of their branches are tested. All runs
//! share one boot, unless a run makes a new boot necessary.

use anyhow::{Result, bail};

use crate::ddmin::Search;
use crate::keys::{Selected, Setting};
use crate::report::{Case, Verdict};
use crate::runner::{Attempt, Runner};

/// The name of the run without a flipped key.
const BASELINE: &str = "no key flipped";
/// The name of the run with all selected keys flipped.
const TOGETHER: &str = "all keys flipped";

/// Receives each case as soon as it is known.
pub trait Progress {
    fn case(&mut self, case: &Case);
    fn note(&mut self, text: &str);
}

/// Runs the command without a flipped key, and then once per key. If the first run fails, no other
/// follows.
///
/// # Errors
/// No guest boots, the globs select nothing, or the agent breaks the protocol.
pub async fn each(
    runner: &mut Runner,
    patterns: &[String],
    progress: &mut impl Progress,
) -> Result<Vec<Case>> {
    let mut cases = vec![];
    let keys = begin(runner, patterns, &mut cases, progress).await?;
    for Selected { setting, obstacle } in keys {
        let name = setting.to_string();
        let case = match obstacle {
            Some(why) => skipped(name, why),
            None => match runner
                .attempt(&name, std::slice::from_ref(&setting))
                .await?
            {
                Attempt::Ran(case) => case,
                Attempt::Refused(why) => skipped(name, why),
            },
        };
        progress.case(&case);
        cases.push(case);
    }
    Ok(cases)
}

/// Runs the command without a flipped key, and then with all keys flipped. If only the second run
/// fails, finds a smallest set of keys that makes it fail.
///
/// # Errors
/// The errors of [`each`], and one for keys that cannot be flipped together.
pub async fn together(
    runner: &mut Runner,
    patterns: &[String],
    progress: &mut impl Progress,
) -> Result<Vec<Case>> {
    let mut cases = vec![];
    let mut settings = vec![];
    for Selected { setting, obstacle } in begin(runner, patterns, &mut cases, progress).await? {
        match obstacle {
            Some(why) => cases.push(skipped(setting.to_string(), why)),
            None => settings.push(setting),
        }
    }
    if settings.is_empty() {
        return Ok(cases);
    }
    let mut case = match runner.attempt(TOGETHER, &settings).await? {
        Attempt::Ran(case) => case,
        Attempt::Refused(why) => bail!("the keys cannot be flipped together: {why}"),
    };
    if case.failed() {
        progress.note(&format!(
            "fails with all {} keys flipped; looking for the smallest set",
            settings.len()
        ));
        case = smallest(runner, &settings, case, progress).await?;
    }
    progress.case(&case);
    cases.push(case);
    Ok(cases)
}

async fn smallest(
    runner: &mut Runner,
    settings: &[Setting],
    mut failing: Case,
    progress: &mut impl Progress,
) -> Result<Case> {
    let chosen = |numbers: &[usize]| -> Vec<Setting> {
        numbers
            .iter()
            .map(|&number| settings[number].clone())
            .collect()
    };
    let mut search = Search::new(settings.len());
    while let Some(numbers) = search.next() {
        // A set that cannot be flipped counts as passed, so that the search continues with other
        // sets.
        let case = match runner.attempt(TOGETHER, &chosen(&numbers)).await? {
            Attempt::Ran(case) if case.failed() => Some(case),
            Attempt::Ran(_) | Attempt::Refused(_) => None,
        };
        search.answer(case.is_some());
        if let Some(case) = case {
            progress.note(&format!("fails with {} of them flipped", numbers.len()));
            failing = case;
        }
    }
    let names: Vec<String> = chosen(search.smallest())
        .iter()
        .map(Setting::to_string)
        .collect();
    if let Verdict::Failed(why) = &mut failing.verdict {
        *why = format!("fails with {}: {why}", names.join(" "));
    }
    Ok(failing)
}

/// Runs the command without a flipped key and selects the keys. Returns `None` if that run fails,
/// because a later failure could not be attributed to a key.
async fn begin(
    runner: &mut Runner,
    patterns: &[String],
    cases: &mut Vec<Case>,
    progress: &mut impl Progress,
) -> Result<Vec<Selected>> {
    let allow_guarded = runner.config.allow_guarded;
    // The keys are selected first, so that a misspelt name does not cost a run.
    let keys = runner.keys().await?.select(patterns, allow_guarded).await?;
    let Attempt::Ran(case) = runner.attempt(BASELINE, &[]).await? else {
        unreachable!("nothing was to be flipped");
    };
    let failed = case.failed();
    progress.case(&case);
    cases.push(case);
    if failed {
        progress.note("the command fails without a flipped key, so no key was flipped");
        return Ok(vec![]);
    }
    Ok(keys)
}

fn skipped(name: String, why: String) -> Case {
    Case {
        name,
        verdict: Verdict::Skipped(why),
        time: std::time::Duration::ZERO,
        output: String::new(),
    }
}
