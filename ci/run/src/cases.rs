// SPDX-License-Identifier: Apache-2.0
//! Collects the cases of a run, and prints each as soon as it is known. If the run ends early, the
//! cases before that are kept.

use crate::console::printable;
use crate::report::{Case, Verdict};
use crate::runner::Stopped;
use crate::{FAILED, status_of};

/// The cases of a run.
#[derive(Debug, Default)]
pub struct Cases {
    known: Vec<Case>,
    /// The number of cases of the whole run; 0 until it is known.
    planned: usize,
    ended_early: Option<Early>,
}

/// The early end of a run.
#[derive(Debug)]
struct Early {
    /// The sentence that says why the run ended, and after how many cases.
    why: String,
    /// The exit status for this process.
    status: u8,
}

impl Cases {
    /// Returns the only case of a run without a matrix. It is not printed.
    pub fn one(case: Case) -> Self {
        Self {
            known: vec![case],
            planned: 1,
            ended_early: None,
        }
    }

    /// Sets the number of cases of the whole run.
    pub fn plan(&mut self, planned: usize) {
        self.planned = planned;
    }

    /// Prints a case and keeps it.
    pub fn add(&mut self, case: Case) {
        print(&case);
        self.known.push(case);
    }

    /// Returns the cases so far.
    pub fn known(&self) -> &[Case] {
        &self.known
    }

    /// Returns the number of cases for the plan of a report: those of the whole run if it ended
    /// early, and otherwise those that are known.
    pub fn planned(&self) -> usize {
        match self.ended_early {
            Some(_) => self.planned,
            None => self.known.len(),
        }
    }

    /// Returns the sentence that says why the run ended early and after how many cases; `None` if
    /// the cases are complete.
    pub fn ended_early(&self) -> Option<&str> {
        self.ended_early.as_ref().map(|early| &*early.why)
    }

    /// Ends the run after an error or a signal. Prints the reason and keeps it for the reports.
    ///
    /// # Errors
    /// No run was planned, so there is nothing to report but the error.
    pub fn end_early(&mut self, stopped: Stopped) -> anyhow::Result<()> {
        let Stopped { error, cases } = stopped;
        if self.planned == 0 {
            return Err(error);
        }
        let (completed, planned) = (self.known.len(), self.planned);
        for case in cases {
            self.add(case);
        }
        let why = format!("the run ended early, after {completed} of {planned} cases: {error:#}");
        note(&why);
        let status = status_of(&error);
        self.ended_early = Some(Early { why, status });
        Ok(())
    }

    /// Returns the exit status of a matrix: if it ended early, that of the signal, or 125 after an
    /// error; 1 if a case failed.
    pub fn status(&self) -> u8 {
        if let Some(early) = &self.ended_early {
            return early.status;
        }
        match self.known.iter().any(Case::failed) {
            true => FAILED,
            false => 0,
        }
    }

    /// Returns the number of cases whose verdict is accepted.
    pub fn count(&self, accepted: fn(&Verdict) -> bool) -> usize {
        let verdicts = self.known.iter().map(|case| &case.verdict);
        verdicts.filter(|verdict| accepted(verdict)).count()
    }

    /// Prints the numbers of cases of a matrix.
    pub fn summarize(&self) {
        let early = match self.ended_early {
            Some(_) => ", ended early",
            None => "",
        };
        tell!(
            "{} passed, {} failed, {} skipped{early}",
            self.count(|verdict| *verdict == Verdict::Passed),
            self.count(|verdict| matches!(verdict, Verdict::Failed(_))),
            self.count(|verdict| matches!(verdict, Verdict::Skipped(_)))
        );
        let skipped = |case: &Case| matches!(case.verdict, Verdict::Skipped(_));
        // The first case is the run with no key flipped.
        if self.ended_early.is_none()
            && let Some(keys @ [_, ..]) = self.known.get(1..)
            && keys.iter().all(skipped)
        {
            note("no key was flipped: the globs select none that can be");
        }
    }
}

/// Prints a message about the run.
pub fn note(text: &str) {
    tell!("patchbay: {}", printable(text));
}

/// Prints a case of a matrix.
fn print(case: &Case) {
    let seconds = case.time.as_secs_f64();
    match &case.verdict {
        Verdict::Passed => tell!("  ok    {} ({seconds:.2} s)", case.name),
        Verdict::Skipped(why) => tell!("  skip  {}: {}", case.name, printable(why)),
        Verdict::Failed(why) => {
            tell!("  FAIL  {} ({seconds:.2} s): {}", case.name, printable(why));
            for line in case.output.lines() {
                tell!("        {line}");
            }
        }
    }
}
