// SPDX-License-Identifier: Apache-2.0

use std::time::{Duration, Instant, SystemTime};

use super::*;
use crate::keys::claims::{Answer, Claims, MadeRequest, Owner, OwnerState};
use crate::keys::holds::{Hold, KeyHolds, Taking};
use crate::keys::outcome::UpdateSummary;
use crate::keys::replay::RequestId;

fn key(name: &str) -> SavedKey {
    SavedKey {
        name: name.to_owned(),
        address: 0x1000,
    }
}

fn holds(name: &str, references: u32) -> SavedHolds {
    let mut holds = KeyHolds::default();
    if references > 0 {
        let taking = Taking {
            holder: "uid:0".into(),
            reason: "".into(),
            since: SystemTime::UNIX_EPOCH,
            expires: None,
            fired: false,
        };
        holds.take(&Hold::new(1, references, taking));
    }
    SavedHolds::of(key(name), &holds)
}

fn owner(name: &str) -> Owner {
    Owner::new("uid:0".to_owned(), name.to_owned())
}

/// Returns a ledger with a hold on x and a pending change of a, b and c. The change drops the
/// reference on a, takes references on b and c, and gives the owner an expiry.
fn pending() -> Ledger {
    let at = Instant::now() + Duration::from_secs(60);
    let summary = UpdateSummary {
        keys: 3,
        keys_changed: 3,
        ..UpdateSummary::default()
    };
    Ledger {
        now: State {
            newest_hold: 4,
            holds: vec![holds("a", 1), holds("x", 1)],
            claims: Claims::with_owners([owner("o"), owner("other")].into_iter()),
        },
        pending: Some(Pending {
            counts: [("a", 1, 0), ("b", 0, 1), ("c", 0, 1)]
                .map(|(name, before, after)| (key(name), before, after))
                .to_vec(),
            newest_hold: 6,
            holds: vec![holds("a", 0), holds("b", 1), holds("c", 1)],
            owners: vec![OwnerState {
                owner: owner("o"),
                generation: 2,
                content: [2; 32],
                expires: Some((at, SystemTime::now())),
                answer: Some(Answer::default().into()),
                last: None,
                is_empty: false,
                before: 1,
            }],
            request: Some(MadeRequest {
                principal: "uid:0".to_owned(),
                request: RequestId::new("r".to_owned(), Vec::new).expect("an id"),
                summary,
                unmade: 0,
            }),
            ..Pending::default()
        }),
        ..Ledger::default()
    }
}

/// The outcome: the held keys, whether the owner has the new expiry and the answer, and the answer
/// to the request.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    held: String,
    expires: bool,
    answered: bool,
    request: Option<Result<u32, &'static str>>,
}

fn settled(mark: Option<&Mark>, counts: [Option<i32>; 3]) -> Outcome {
    let mut counts = counts.into_iter();
    let (state, requests) = pending().settled(mark, |_| counts.next().flatten());
    let mut held: Vec<&str> = state.holds.iter().map(|of| &*of.key.name).collect();
    held.sort_unstable();
    let owner_state = state.claims.owner(&owner("o")).expect("it was known");
    assert!(state.claims.owner(&owner("other")).is_some());
    // Claims that were made in part count as made.
    let made = if owner_state.expires.is_some() { 2 } else { 0 };
    assert_eq!(owner_state.made_before(3), made);
    let id = RequestId::new("r".to_owned(), Vec::new).expect("an id");
    Outcome {
        held: held.concat(),
        expires: owner_state.expires.is_some(),
        answered: owner_state.answer.is_some(),
        request: match requests.find("uid:0", &id) {
            Ok(found) => found.map(|summary| Ok(summary.keys_changed)),
            Err(error) => Some(Err(error.reason())),
        },
    }
}

fn whole() -> Outcome {
    Outcome {
        held: "bcx".to_owned(),
        expires: true,
        answered: true,
        request: Some(Ok(3)),
    }
}

fn none() -> Outcome {
    Outcome {
        held: "ax".to_owned(),
        expires: false,
        answered: false,
        request: None,
    }
}

fn part(held: &str) -> Outcome {
    Outcome {
        held: held.to_owned(),
        expires: true,
        answered: false,
        request: Some(Err("REQUEST_ID_REUSED")),
    }
}

/// The attacher and its watchdog were killed.
#[test]
fn without_a_mark_each_key_decides_for_itself() {
    let settled = |counts: [i32; 3]| settled(None, counts.map(Some));
    assert_eq!(settled([0, 1, 1]), whole());
    assert_eq!(settled([1, 0, 0]), none());
    assert_eq!(settled([0, 1, 0]), part("bx"));
    assert_eq!(settled([1, 0, 1]), part("acx"));
    // The guest has changed one of the keys, and the other keys decide.
    assert_eq!(settled([0, 7, 1]), whole());
    assert_eq!(settled([1, 0, 7]), none());
    assert_eq!(settled([7, 7, 7]), none());
    // The module of a key was unloaded.
    assert_eq!(super::tests::settled(None, [None, None, Some(1)]), whole());
    assert_eq!(super::tests::settled(None, [None; 3]), none());
}

/// The guest has changed some of the keys by one since.
#[test]
fn with_a_mark_the_change_is_made_as_a_whole_or_not_at_all() {
    let settled = |made, moved: &[&str], counts: [i32; 3]| {
        let moved = moved.iter().map(|name| (*name).to_owned()).collect();
        settled(Some(&Mark::new(&[0; 32], made, moved)), counts.map(Some))
    };
    assert_eq!(settled(true, &[], [0, 1, 1]), whole());
    assert_eq!(settled(true, &[], [0, 0, 1]), whole());
    assert_eq!(settled(true, &[], [1, 0, 1]), whole());
    assert_eq!(settled(false, &[], [1, 0, 0]), none());
    assert_eq!(settled(false, &[], [1, 0, 1]), none());
    assert_eq!(settled(false, &[], [0, 0, 1]), none());
    // The watchdog has not rolled back this key, and nothing but its count is known.
    assert_eq!(settled(false, &["b"], [1, 1, 0]), part("abx"));
    assert_eq!(settled(true, &["b"], [0, 0, 1]), part("cx"));
    assert_eq!(settled(true, &["b"], [0, 7, 1]), whole());
    // The guest was set back to an earlier state since.
    assert_eq!(settled(true, &[], [1, 0, 0]), none());
}

#[test]
fn one_key_does_not_contradict_the_mark() {
    for made in [false, true] {
        let ledger = Ledger {
            pending: Some(Pending {
                counts: vec![(key("b"), 3, 4)],
                holds: vec![holds("b", 1)],
                ..Pending::default()
            }),
            ..Ledger::default()
        };
        let mark = Mark::new(&[0; 32], made, Vec::new());
        // The guest has dropped one of its own references, or taken one.
        let (state, _) = ledger.settled(Some(&mark), |_| Some(if made { 3 } else { 4 }));
        assert_eq!(state.holds.len(), usize::from(made));
    }
}

/// A change of claims alone: the counts are the same, and the client has no answer.
#[test]
fn a_change_without_counts_is_not_made() {
    let mut ledger = pending();
    ledger.pending.as_mut().expect("one").counts = vec![(key("a"), 1, 1)];
    let (state, requests) = ledger.settled(None, |_| Some(1));
    assert_eq!(state.holds.len(), 2);
    assert_eq!(requests, MadeRequests::default());
}
