// SPDX-License-Identifier: Apache-2.0
//! The results that do not fit into one response, kept for later pages.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::advice::Known;
use super::error::KeysError;
use super::incarnation::{HoldId, Incarnation};
use super::outcome::{KeyOutcome, UpdateOutcome};
use super::paging::{ITEM_BYTES, PAGE_BYTES};

const MAX_PAGE_RESULTS: usize = 10_000;
const KEPT_FOR: Duration = Duration::from_secs(600);
/// Maximum number of lists, and of results in all of them. The newest list is always kept.
const MAX_LISTS: usize = 64;
const MAX_RESULTS: usize = 1 << 18;

/// One page of results.
#[derive(Clone, Debug)]
pub struct ResultsPage {
    outcome: Arc<UpdateOutcome>,
    range: Range<usize>,
    /// Next page token; empty on the last page.
    pub next_page_token: String,
}

impl ResultsPage {
    /// Returns the results of this page, in order.
    #[must_use]
    pub fn results(&self) -> &[KeyOutcome] {
        &self.outcome.results[self.range.clone()]
    }

    /// Returns the outcome of the change, which contains the summary.
    #[must_use]
    pub fn outcome(&self) -> &UpdateOutcome {
        &self.outcome
    }
}

/// Lists of results that are not fully read, oldest first.
#[derive(Debug, Default)]
pub(super) struct ResultPages {
    lists: VecDeque<List>,
    made: u64,
}

#[derive(Debug)]
struct List {
    number: u64,
    /// The only principal that may read the list, because the list contains the names and etags of
    /// its change.
    principal: String,
    outcome: Arc<UpdateOutcome>,
    expires: Instant,
}

impl ResultPages {
    /// Returns the first page. Keeps the other results, if any.
    pub fn first(
        &mut self,
        outcome: Arc<UpdateOutcome>,
        principal: &str,
        incarnation: &Incarnation,
        now: Instant,
    ) -> ResultsPage {
        let range = page(&outcome.results, 0);
        let mut next_page_token = String::new();
        if range.end < outcome.results.len() {
            let number = self.keep(&outcome, principal, now);
            next_page_token = token(incarnation, number, range.end);
        }
        ResultsPage {
            outcome,
            range,
            next_page_token,
        }
    }

    /// Returns the page that a token identifies.
    ///
    /// # Errors
    /// [`KeysError::InvalidArgument`] for a token of another incarnation or principal, or of a list
    /// that is no longer kept.
    pub fn next(
        &mut self,
        page_token: &str,
        principal: &str,
        incarnation: &Incarnation,
        now: Instant,
    ) -> Result<ResultsPage, KeysError> {
        self.expire(now);
        let unknown = || KeysError::InvalidArgument {
            field: "page_token",
            message: "is unknown: results are kept for 10 minutes, for the client that made the \
                      change; list the keys to see how they are now"
                .to_owned(),
        };
        let (number, start) = parse(page_token, incarnation).ok_or_else(unknown)?;
        let list = self
            .lists
            .iter()
            .find(|list| list.number == number && list.principal == principal)
            .filter(|list| start < list.outcome.results.len())
            .ok_or_else(unknown)?;
        let range = page(&list.outcome.results, start);
        let next_page_token = if range.end < list.outcome.results.len() {
            token(incarnation, number, range.end)
        } else {
            String::new()
        };
        Ok(ResultsPage {
            outcome: Arc::clone(&list.outcome),
            range,
            next_page_token,
        })
    }

    /// Keeps a list and returns its number. If a repeated request has already kept the list, it is
    /// not kept again.
    fn keep(&mut self, outcome: &Arc<UpdateOutcome>, principal: &str, now: Instant) -> u64 {
        self.expire(now);
        let same = |list: &List| Arc::ptr_eq(&list.outcome, outcome) && list.principal == principal;
        let number = match self.lists.iter().position(same) {
            Some(index) => self.lists.remove(index).map(|list| list.number),
            None => None,
        };
        let number = number.unwrap_or_else(|| {
            self.made += 1;
            self.made
        });
        self.lists.push_back(List {
            number,
            principal: principal.to_owned(),
            outcome: Arc::clone(outcome),
            expires: now + KEPT_FOR,
        });
        while self.lists.len() > 1 && (self.lists.len() > MAX_LISTS || self.results() > MAX_RESULTS)
        {
            self.lists.pop_front();
        }
        number
    }

    fn results(&self) -> usize {
        let lists = self.lists.iter();
        lists.map(|list| list.outcome.results.len()).sum()
    }

    fn expire(&mut self, now: Instant) {
        self.lists.retain(|list| list.expires > now);
    }
}

/// Returns the results from `start` that fit into one response. Returns at least one.
fn page(results: &[KeyOutcome], start: usize) -> Range<usize> {
    let mut bytes = 0;
    let fits = |of: &&KeyOutcome| {
        let known = of.known.map_or(0, Known::text_bytes);
        bytes += of.key.len()
            + of.etag.len()
            + of.hold_id.as_ref().map_or(0, HoldId::len)
            + known
            + ITEM_BYTES;
        bytes <= PAGE_BYTES
    };
    let rest = results[start..].iter().take(MAX_PAGE_RESULTS);
    let count = rest.take_while(fits).count();
    start..(start + count.max(1)).min(results.len())
}

fn token(incarnation: &Incarnation, number: u64, start: usize) -> String {
    format!("{}-r{number}-{start}", incarnation.short())
}

/// Returns the list's number and the first result.
fn parse(token: &str, incarnation: &Incarnation) -> Option<(u64, usize)> {
    let rest = token.strip_prefix(incarnation.short())?;
    let (number, start) = rest.strip_prefix("-r")?.split_once('-')?;
    Some((number.parse().ok()?, start.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(results: usize, name: &str) -> Arc<UpdateOutcome> {
        let result = KeyOutcome {
            key: name.into(),
            count_before: 0,
            count_after: 1,
            sites_patched: 1,
            etag: "".into(),
            hold_id: None,
            known: None,
        };
        Arc::new(UpdateOutcome {
            results: vec![result; results],
            ..UpdateOutcome::default()
        })
    }

    #[test]
    fn pages_end_at_the_limits_and_make_up_the_whole() {
        let incarnation = Incarnation::new();
        let now = Instant::now();
        for (results, name) in [(25_000, "a".to_owned()), (9_000, "a".repeat(540))] {
            let mut pages = ResultPages::default();
            let mut page = pages.first(outcome(results, &name), "a", &incarnation, now);
            let mut seen = 0;
            loop {
                seen += page.results().len();
                assert!(page.results().len() <= MAX_PAGE_RESULTS);
                let bytes: usize = page.results().iter().map(|of| of.key.len()).sum();
                assert!(bytes <= PAGE_BYTES);
                if page.next_page_token.is_empty() {
                    break;
                }
                page = pages
                    .next(&page.next_page_token, "a", &incarnation, now)
                    .expect("kept");
            }
            assert_eq!(seen, results);
        }
    }

    #[test]
    fn what_fits_is_not_kept() {
        let mut pages = ResultPages::default();
        let whole = pages.first(
            outcome(10_000, "a"),
            "a",
            &Incarnation::new(),
            Instant::now(),
        );
        assert_eq!((whole.next_page_token.as_str(), pages.lists.len()), ("", 0));
    }

    #[test]
    fn a_token_is_the_incarnations_and_the_principals_and_expires() {
        let incarnation = Incarnation::new();
        let now = Instant::now();
        let mut pages = ResultPages::default();
        let first = pages.first(outcome(10_001, "a"), "a", &incarnation, now);
        let token = first.next_page_token;
        let mut next = |token: &str, principal, incarnation: &_, now| {
            pages.next(token, principal, incarnation, now).map(drop)
        };
        next(&token, "a", &incarnation, now).expect("its own");
        next(&token, "b", &incarnation, now).expect_err("another principal's");
        next(&token, "a", &Incarnation::new(), now).expect_err("another incarnation's");
        let short = incarnation.short();
        for bad in ["", "-r1-0", "r1", "r1-", "r1--1", "r1-10001", "r2-0"] {
            next(&format!("{short}-{bad}"), "a", &incarnation, now).expect_err(bad);
        }
        next(&token, "a", &incarnation, now + KEPT_FOR).expect_err("expired");
    }

    #[test]
    fn the_oldest_lists_make_room_and_a_repeat_takes_none() {
        let incarnation = Incarnation::new();
        let now = Instant::now();
        let mut pages = ResultPages::default();
        let same = outcome(10_001, "a");
        for _ in 0..2 * MAX_LISTS {
            let page = pages.first(Arc::clone(&same), "a", &incarnation, now);
            assert!(page.next_page_token.ends_with("-r1-10000"));
        }
        assert_eq!(pages.lists.len(), 1);
        for _ in 0..2 * MAX_LISTS {
            pages.first(outcome(10_001, "a"), "a", &incarnation, now);
            assert!(pages.results() <= MAX_RESULTS && pages.lists.len() <= MAX_LISTS);
        }
        assert!(
            pages
                .next(&token(&incarnation, 1, 1), "a", &incarnation, now)
                .is_err()
        );
        pages.first(outcome(MAX_RESULTS + 1, "a"), "a", &incarnation, now);
        assert_eq!(pages.lists.len(), 1, "the newest is kept");
    }
}
