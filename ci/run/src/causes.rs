// SPDX-License-Identifier: Apache-2.0
//! Finds the sets of keys that make a run of several keys fail, if no key fails by itself.
//!
//! A failing pair hides the other pairs of its run. After the search has found a failing set, it
//! therefore tests the run again, without one and then without another of this set's keys, so that
//! every other pair is tested. Like [`Search`], it runs no tests itself.

use crate::ddmin::Search;

/// Limit on the number of failing sets that are looked for in one run.
pub const FOUND_MAX: usize = 4;

/// The next step of the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Test this set, and pass the outcome to [`Causes::answer`].
    Test(Vec<usize>),
    /// This set fails, and passes without any single one of its numbers. It is the last set that
    /// failed a test, or the whole set.
    Found(Vec<usize>),
    /// All pairs were tested. Or, if `untested`, more sets fail than the limit allows to look for.
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
    /// Set if a test failed after the limit was reached.
    is_over: bool,
}

impl Causes {
    /// Creates a search in a set of `count` numbers that fails as a whole.
    pub fn new(count: usize) -> Self {
        Self {
            to_test: vec![],
            passed: vec![],
            found: vec![],
            narrowing: Some(((0..count).collect(), Search::with_passing_singles(count))),
            is_over: false,
        }
    }

    /// Returns the next step. The numbers of a set are in ascending order.
    pub fn next(&mut self) -> Step {
        if let Some((set, search)) = &mut self.narrowing {
            let numbers = |indices: &[usize]| indices.iter().map(|&index| set[index]).collect();
            if let Some(indices) = search.next() {
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
            self.to_test.push(set.clone());
            return Step::Test(set);
        }
        Step::End { untested: false }
    }

    /// Accepts the outcome of the set that [`next`](Self::next) returned last.
    pub fn answer(&mut self, failed: bool) {
        if let Some((_, search)) = &mut self.narrowing {
            return search.answer(failed);
        }
        let Some(set) = self.to_test.pop() else {
            return;
        };
        match failed {
            true if self.found.len() == FOUND_MAX => self.is_over = true,
            true => {
                let search = Search::with_passing_singles(set.len());
                self.narrowing = Some((set, search));
            }
            false => self.passed.push(set),
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
    use std::collections::{BTreeMap, BTreeSet};

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
        let mut causes = Causes::new(count);
        let mut searched = Searched::default();
        let mut outcomes = BTreeMap::new();
        let mut last_failed: Vec<usize> = (0..count).collect();
        loop {
            match causes.next() {
                Step::Test(set) => {
                    assert!(set.len() > 1 && set.len() < count && set.is_sorted());
                    searched.tests += 1;
                    let failed = fails(&set);
                    outcomes.insert(set.clone(), failed);
                    match failed {
                        true => last_failed = set,
                        false => searched.passed.push(set),
                    }
                    causes.answer(failed);
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

    proptest! {
        /// Checks that every failing set is found, up to the limit, and that every other pair is in
        /// a set that passed.
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
            prop_assert_eq!(&found, &smallest);
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
