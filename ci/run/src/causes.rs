// SPDX-License-Identifier: Apache-2.0
//! Finds the sets of keys that make a run of several keys fail, if no key fails by itself.
//!
//! A failing pair hides the other pairs of its run. After the search has found a failing set, it
//! therefore tests the run again, without one and then without another of this set's keys, so that
//! every other pair is tested. Like [`Search`], it runs no tests itself.

use crate::ddmin::Search;

/// Limit on the number of failing sets that are looked for in one run.
pub const FOUND_MAX: usize = 4;

/// Limit on the number of tests of one search. It exceeds the tests for four pairs among 1,000
/// keys. A command that fails at random, or large sets that fail, could take the square of the
/// number of keys.
pub const TESTS_MAX: usize = 500;

/// The outcome of a test of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Failed,
    /// The keys were not flipped, so the command did not run.
    Refused,
}

/// The next step of the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Test this set, and pass the outcome to [`Causes::answer`].
    Test(Vec<usize>),
    /// This set fails, and no set without one of its numbers is known to fail. Each of those
    /// passed or was refused, unless the tests were used up. It is the last set that failed a
    /// test, or the whole set.
    Found(Vec<usize>),
    /// All pairs were tested. Or, if `untested`, a limit was reached or a set was refused.
    End { untested: bool },
}

/// A search over the numbers 0 to n-1. The whole set fails, and each number alone passes.
#[derive(Debug)]
pub struct Causes {
    /// The sets to test, the next one at the end.
    to_test: Vec<Vec<usize>>,
    passed: Vec<Vec<usize>>,
    found: Vec<Vec<usize>>,
    /// A failing set, and the search for a smallest failing set among the indices of its numbers.
    narrowing: Option<(Vec<usize>, Search)>,
    /// The number of tests so far.
    tests: usize,
    /// Set if a limit was reached.
    is_over: bool,
    /// Set if a set outside of a narrowing was refused.
    untested: bool,
}

impl Causes {
    /// Creates a search in a set of `count` numbers that fails as a whole.
    pub fn new(count: usize) -> Self {
        Self {
            to_test: vec![],
            passed: vec![],
            found: vec![],
            narrowing: Some(((0..count).collect(), Search::with_passing_singles(count))),
            tests: 0,
            is_over: false,
            untested: false,
        }
    }

    /// Returns the next step. The numbers of a set are in ascending order.
    pub fn next(&mut self) -> Step {
        if let Some((set, search)) = &mut self.narrowing {
            let numbers = |indices: &[usize]| indices.iter().map(|&index| set[index]).collect();
            if self.tests == TESTS_MAX {
                self.is_over = true;
            } else if let Some(indices) = search.next() {
                self.tests += 1;
                return Step::Test(numbers(&indices));
            }
            let cause: Vec<usize> = numbers(search.smallest());
            let set = std::mem::take(set);
            self.narrowing = None;
            self.split(&set, &cause);
            self.found.push(cause.clone());
            return Step::Found(cause);
        }
        if self.is_over {
            return Step::End { untested: true };
        }
        while let Some(set) = self.to_test.pop() {
            // The pairs of a subset are among those that have passed.
            if set.len() < 2 || self.passed.iter().any(|passed| contains(passed, &set)) {
                continue;
            }
            let known = self.found.iter().find(|cause| contains(&set, cause));
            if let Some(cause) = known.cloned() {
                self.split(&set, &cause);
                continue;
            }
            if self.tests == TESTS_MAX {
                return Step::End { untested: true };
            }
            self.tests += 1;
            self.to_test.push(set.clone());
            return Step::Test(set);
        }
        Step::End {
            untested: self.untested,
        }
    }

    /// Accepts the outcome of the set that [`next`](Self::next) returned last.
    pub fn answer(&mut self, outcome: Outcome) {
        if let Some((_, search)) = &mut self.narrowing {
            // A refused set shows no failure, so the search continues with other sets.
            return search.answer(outcome == Outcome::Failed);
        }
        let Some(set) = self.to_test.pop() else {
            return;
        };
        match outcome {
            Outcome::Failed if self.found.len() == FOUND_MAX => self.is_over = true,
            Outcome::Failed => {
                let search = Search::with_passing_singles(set.len());
                self.narrowing = Some((set, search));
            }
            Outcome::Passed => self.passed.push(set),
            Outcome::Refused => self.untested = true,
        }
    }

    /// Plans tests of all pairs of the set that are not the cause, each without one number of the
    /// cause. A pair lacks at least one of any three numbers, so three tests are enough.
    fn split(&mut self, set: &[usize], cause: &[usize]) {
        for left_out in cause.iter().take(3).rev() {
            let rest = set.iter().filter(|&number| number != left_out);
            self.to_test.push(rest.copied().collect());
        }
    }
}

/// Returns whether the first set contains the second. Both are in ascending order.
fn contains(set: &[usize], subset: &[usize]) -> bool {
    subset
        .iter()
        .all(|number| set.binary_search(number).is_ok())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The result of a search.
    #[derive(Debug, Default)]
    struct Searched {
        found: Vec<Vec<usize>>,
        passed: Vec<Vec<usize>>,
        untested: bool,
        tests: usize,
    }

    fn search(count: usize, fails: impl Fn(&[usize]) -> bool) -> Searched {
        search_with(count, |set| match fails(set) {
            true => Outcome::Failed,
            false => Outcome::Passed,
        })
    }

    fn search_with(count: usize, test: impl Fn(&[usize]) -> Outcome) -> Searched {
        let mut causes = Causes::new(count);
        let mut searched = Searched::default();
        let mut last_failed: Vec<usize> = (0..count).collect();
        loop {
            match causes.next() {
                Step::Test(set) => {
                    assert!(set.len() > 1 && set.len() < count && set.is_sorted());
                    searched.tests += 1;
                    let outcome = test(&set);
                    match outcome {
                        Outcome::Failed => last_failed = set,
                        Outcome::Passed => searched.passed.push(set),
                        Outcome::Refused => {}
                    }
                    causes.answer(outcome);
                }
                Step::Found(cause) => {
                    assert_eq!(cause, last_failed);
                    searched.found.push(cause);
                }
                Step::End { untested } => {
                    searched.untested = untested;
                    return searched;
                }
            }
        }
    }

    /// Returns a function of sets that contain one of the causes.
    fn any_of(causes: &[Vec<usize>]) -> impl Fn(&[usize]) -> bool {
        |set| causes.iter().any(|cause| contains(set, cause))
    }

    #[test]
    fn one_pair_is_found_with_few_tests() {
        let searched = search(50, any_of(&[vec![7, 31]]));
        assert_eq!(searched.found, [[7, 31]]);
        assert!(!searched.untested && searched.tests <= 40, "{searched:?}");
        // Two keys that fail together need no further test.
        let searched = search(2, |set| set.len() == 2);
        assert_eq!((searched.found, searched.tests), (vec![vec![0, 1]], 0));
    }

    #[test]
    fn pairs_with_a_common_key_and_larger_sets_are_all_found() {
        let causes = [vec![3, 9], vec![3, 20], vec![1, 2, 5, 8]];
        let searched = search(24, any_of(&causes));
        let found: BTreeSet<_> = searched.found.into_iter().collect();
        assert_eq!(found, BTreeSet::from(causes));
        assert!(!searched.untested);
    }

    #[test]
    fn the_search_ends_after_the_limit() {
        let searched = search(60, |set| set.len() > 1);
        assert_eq!(searched.found.len(), FOUND_MAX);
        assert!(searched.untested && searched.tests < 200, "{searched:?}");
    }

    #[test]
    fn the_search_ends_after_the_limit_of_tests() {
        // Only the whole set fails, which takes about twice as many tests as it has numbers.
        let searched = search(400, |set| set.len() == 400);
        assert_eq!((searched.tests, searched.found.len()), (TESTS_MAX, 1));
        assert!(searched.untested);
        // A row of the array of 1,000 keys has about half of them.
        let causes = [vec![7, 431], vec![20, 88], vec![300, 301], vec![99, 599]];
        let searched = search(600, any_of(&causes));
        assert_eq!(searched.found.len(), FOUND_MAX);
        assert!(!searched.untested, "{}", searched.tests);
    }

    proptest! {
        /// Checks that each pair is in a set that passed or was found, or that the search says that
        /// pairs were not tested.
        #[test]
        fn a_refused_set_is_not_reported_as_tested(
            count in 3usize..20, refused in (0usize..20, 0usize..20)
        ) {
            let refused = [refused.0 % count, refused.1 % count];
            let searched = search_with(count, |set| {
                if refused.iter().all(|number| set.contains(number)) {
                    Outcome::Refused
                } else if contains(set, &[0, 1]) {
                    Outcome::Failed
                } else {
                    Outcome::Passed
                }
            });
            let is_shown = |pair: [usize; 2]| {
                let mut shown = searched.passed.iter().chain(&searched.found);
                shown.any(|set| contains(set, &pair))
            };
            let mut all_shown = true;
            for second in 1..count {
                for first in 0..second {
                    all_shown &= is_shown([first, second]);
                }
            }
            prop_assert!(all_shown || searched.untested);
        }

        /// Checks that every failing set of two or three numbers is found, up to the limit, and
        /// that every other pair is in a set that passed.
        #[test]
        fn each_pair_passes_or_fails_in_a_set_that_is_found(
            (count, causes) in (2usize..30).prop_flat_map(|count| {
                let cause = prop::collection::btree_set(0..count, 2..=4.min(count));
                (Just(count), prop::collection::vec(cause, 1..=FOUND_MAX))
            })
        ) {
            let causes: Vec<Vec<usize>> =
                causes.into_iter().map(|cause| cause.into_iter().collect()).collect();
            let searched = search(count, any_of(&causes));
            let mut smallest: Vec<_> = causes
                .iter()
                .filter(|cause| !causes.iter().any(|other| other != *cause && contains(cause, other)))
                .cloned()
                .collect();
            smallest.sort();
            smallest.dedup();
            let mut found = searched.found.clone();
            found.sort();
            prop_assert!(found.iter().all(|set| smallest.contains(set)));
            // A larger set may hide another one that has its first three numbers, but no pair.
            if smallest.iter().all(|set| set.len() <= 3) {
                prop_assert_eq!(&found, &smallest);
            }
            prop_assert!(!searched.untested);
            for second in 1..count {
                for first in 0..second {
                    let pair = vec![first, second];
                    let passed = searched.passed.iter().any(|set| contains(set, &pair));
                    prop_assert!(passed || found.contains(&pair), "{:?}", pair);
                }
            }
        }

        /// Checks for any test function that the search ends, and that the sets it finds fail.
        #[test]
        fn the_search_ends_for_any_command(count in 2usize..20, seed: u64) {
            let fails = |set: &[usize]| {
                let word = set.iter().fold(seed | 1, |hash, &one| {
                    (hash ^ (one as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
                });
                set.len() == count || word % 3 == 0
            };
            let searched = search(count, fails);
            prop_assert!((1..=FOUND_MAX).contains(&searched.found.len()));
            prop_assert!(searched.found.iter().all(|set| fails(set)));
            prop_assert!(searched.tests < FOUND_MAX * (count * count + 3 * count) + 100);
        }
    }
}
