// SPDX-License-Identifier: Apache-2.0
//! Finds a smallest failing subset by delta debugging (Zeller and Hildebrandt, "Simplifying and
//! Isolating Failure-Inducing Input", 2002, algorithm ddmin).
//!
//! The search runs no tests itself. It names the set to test next, and the caller passes the
//! outcome to it.

use std::collections::HashSet;

/// A search over the numbers 0 to n-1. The whole set fails.
///
/// The resulting set fails, but passes without any single one of its numbers.
#[derive(Debug)]
pub struct Search {
    failing: Vec<usize>,
    parts: usize,
    /// The index of this round's next candidate: first the parts, then their complements.
    at: usize,
    passed: HashSet<Vec<usize>>,
    asked: Option<Vec<usize>>,
}

impl Search {
    /// Creates a search in a set of `count` numbers that fails as a whole.
    pub fn new(count: usize) -> Self {
        Self {
            failing: (0..count).collect(),
            parts: 2,
            at: 0,
            passed: HashSet::from([vec![]]),
            asked: None,
        }
    }

    /// Creates a search in a set whose numbers are each known to pass alone.
    pub fn with_passing_singles(count: usize) -> Self {
        let mut search = Self::new(count);
        search.passed.extend((0..count).map(|number| vec![number]));
        search
    }

    /// Returns the next set to test, in ascending order; `None` at the end.
    pub fn next(&mut self) -> Option<Vec<usize>> {
        loop {
            let count = self.failing.len();
            if count < 2 {
                return None;
            }
            if self.at >= 2 * self.parts {
                if self.parts >= count {
                    return None;
                }
                self.parts = (2 * self.parts).min(count);
                self.at = 0;
            }
            let candidate = self.candidate();
            if self.passed.contains(&candidate) {
                self.at += 1;
                continue;
            }
            self.asked = Some(candidate.clone());
            return Some(candidate);
        }
    }

    fn candidate(&self) -> Vec<usize> {
        let count = self.failing.len();
        let part = self.at % self.parts;
        let (start, end) = (part * count / self.parts, (part + 1) * count / self.parts);
        if self.at < self.parts {
            self.failing[start..end].to_vec()
        } else {
            [&self.failing[..start], &self.failing[end..]].concat()
        }
    }

    /// Accepts the outcome of the set that [`next`](Self::next) returned last.
    pub fn answer(&mut self, failed: bool) {
        let Some(asked) = self.asked.take() else {
            return;
        };
        if !failed {
            self.passed.insert(asked);
            self.at += 1;
            return;
        }
        self.parts = if self.at < self.parts {
            2
        } else {
            (self.parts - 1).max(2)
        };
        self.failing = asked;
        self.at = 0;
    }

    /// Returns the smallest set known to fail.
    pub fn smallest(&self) -> &[usize] {
        &self.failing
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs the search and counts the tests.
    fn run(count: usize, fails: impl Fn(&[usize]) -> bool) -> (Vec<usize>, usize) {
        let mut search = Search::new(count);
        let mut tests = 0;
        while let Some(set) = search.next() {
            tests += 1;
            assert!(set.is_sorted() && !set.is_empty() && set.len() < count);
            search.answer(fails(&set));
        }
        (search.smallest().to_vec(), tests)
    }

    fn holds(set: &[usize], all: &[usize]) -> bool {
        all.iter().all(|one| set.contains(one))
    }

    #[test]
    fn a_single_cause_is_found_quickly() {
        for cause in [0, 50, 99] {
            let (found, tests) = run(100, |set| set.contains(&cause));
            assert_eq!(found, [cause]);
            assert!(tests <= 14, "{tests}");
        }
    }

    #[test]
    fn single_numbers_that_are_known_to_pass_are_not_tested() {
        let mut search = Search::with_passing_singles(9);
        while let Some(set) = search.next() {
            assert!(set.len() > 1, "{set:?}");
            search.answer(holds(&set, &[2, 6]));
        }
        assert_eq!(search.smallest(), [2, 6]);
    }

    #[test]
    fn sets_of_none_and_one_need_no_test() {
        assert_eq!(run(0, |_| true), (vec![], 0));
        assert_eq!(run(1, |_| true), (vec![0], 0));
    }

    proptest! {
        /// Checks that a conjunction of causes is found exactly.
        #[test]
        fn a_conjunction_is_found(
            (count, causes) in (2usize..60).prop_flat_map(|count| {
                (Just(count), prop::collection::btree_set(0..count, 1..6.min(count)))
            })
        ) {
            let causes: Vec<usize> = causes.into_iter().collect();
            let (found, tests) = run(count, |set| holds(set, &causes));
            prop_assert_eq!(found, causes);
            prop_assert!(tests <= count * count + 3 * count);
        }

        /// Checks for any test function that the result fails, and that no element of the result
        /// can be left out.
        #[test]
        fn the_result_fails_and_is_minimal(count in 1usize..24, seed: u64) {
            let fails = |set: &[usize]| {
                let word = set.iter().fold(seed | 1, |hash, &one| {
                    (hash ^ (one as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
                });
                set.len() == count || (!set.is_empty() && word % 3 == 0)
            };
            let (found, tests) = run(count, fails);
            prop_assert!(fails(&found));
            if found.len() > 1 {
                for at in 0..found.len() {
                    let mut less = found.clone();
                    less.remove(at);
                    prop_assert!(!fails(&less), "{:?} without {}", found, at);
                }
            }
            prop_assert!(tests <= count * count + 3 * count);
        }
    }
}
