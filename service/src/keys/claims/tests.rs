// SPDX-License-Identifier: Apache-2.0
//! Compares claims with a model: a list of the owners' claims, and the references that follow from
//! it.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use smallvec::SmallVec;

use super::*;

fn owner(name: usize) -> Owner {
    Owner::new(format!("uid:{}", name % 2), format!("rollout/{name}"))
}

fn claim(owner: &Owner, want: Want, force: bool) -> Claim {
    Claim {
        owner: owner.clone(),
        want,
        force,
        since: SystemTime::UNIX_EPOCH,
        void: false,
        replaced: false,
    }
}

/// Keeps an answer. Returns whether its owner is known.
fn keep(claims: &mut Claims, owner: &Owner, answer: Answer) -> bool {
    let state = claims.answered(owner, Arc::new(answer), None);
    let is_known = state.is_some();
    state.into_iter().for_each(|state| claims.answer(state));
    is_known
}

/// A key of a guest: the references of the guest, of clients and of claims.
#[derive(Clone, Debug, Default)]
struct Guest {
    own: u32,
    others: u32,
    holders: SmallVec<[Arc<str>; 1]>,
    claims: KeyClaims,
}

impl Guest {
    fn seen(&self) -> Seen {
        Seen {
            own: self.own,
            others: self.others,
            holders: self.holders.clone(),
            ..Seen::default()
        }
    }

    fn count(&self) -> i32 {
        i32::try_from(self.own + self.others).expect("few") + self.holders.len() as i32
    }

    /// Replaces the claim of an owner, as the executor does.
    fn set(&mut self, owner: &Owner, want: Option<Want>, force: bool) -> Result<(), GuestHolds> {
        let seen = self.seen();
        let mut claims = self.claims.clone();
        claims.observe(&seen);
        match want {
            Some(want) => claims.put(claim(owner, want, force)),
            None => _ = claims.take(owner),
        }
        let target = claims.target(&seen, Some(owner))?;
        claims.settle(&target);
        self.own = target.own;
        self.holders = target.holders().cloned().collect();
        self.claims = claims;
        assert_eq!(i64::from(self.count()), target.count(&seen) as i64);
        Ok(())
    }
}

/// Returns the count that the claims ask for, computed only from the list of claims.
fn model(original: u32, others: u32, stack: &[(Owner, Want)]) -> i32 {
    let held = stack.iter().filter(|(_, want)| *want == Want::Held).count() as i32;
    let mut newest_first = stack.iter().rev().map(|(_, want)| *want);
    let base = match newest_first.find(|want| *want != Want::Held) {
        Some(Want::Off) => 0,
        Some(_) => original.max(1),
        None => original,
    };
    base as i32 + others as i32 + held
}

fn wants() -> impl Strategy<Value = Option<Want>> {
    prop_oneof![
        Just(None),
        Just(Some(Want::On)),
        Just(Some(Want::Off)),
        Just(Some(Want::Held))
    ]
}

proptest! {
    /// Each step leads to the state of the model and touches no claim of another owner. Removing
    /// all claims in any order returns to the state before.
    #[test]
    fn claims_follow_the_model_and_return_to_the_state_before(
        original in 0_u32..3,
        others in 0_u32..3,
        steps in prop::collection::vec((0_usize..4, wants()), 0..24),
        removals in Just(vec![0_usize, 1, 2, 3]).prop_shuffle(),
    ) {
        let mut guest = Guest { own: original, others, ..Guest::default() };
        let mut stack: Vec<(Owner, Want)> = Vec::new();
        for (number, want) in steps {
            let owner = owner(number);
            let before = guest.claims.clone();
            guest.set(&owner, want, true).expect("consent");
            let same = stack.iter().any(|(of, old)| *of == owner && Some(*old) == want);
            if !same {
                stack.retain(|(of, _)| *of != owner);
                stack.extend(want.map(|want| (owner.clone(), want)));
            }
            let wanted: Vec<_> = guest.claims.stack().iter().map(|c| (c.owner.clone(), c.want)).collect();
            prop_assert_eq!(&wanted, &stack);
            prop_assert_eq!(guest.count(), model(original, others, &stack));
            for claim in before.stack().iter().filter(|claim| claim.owner != owner) {
                prop_assert_eq!(guest.claims.of(&claim.owner), Some(claim));
            }
        }
        for number in removals {
            guest.set(&owner(number), None, false).expect("a removal needs no consent");
        }
        prop_assert!(guest.claims.is_empty());
        prop_assert_eq!(guest.own, original);
        prop_assert!(guest.holders.is_empty());
    }

    /// Whatever the guest does meanwhile, its own references and those of clients are never taken
    /// without consent, and claims that end leave no references.
    #[test]
    fn nothing_of_the_guest_is_lost_whatever_it_does(
        steps in prop::collection::vec((0_usize..4, wants(), 0_u32..3), 0..24),
    ) {
        let mut guest = Guest::default();
        for (number, want, own) in steps {
            guest.own = own;
            let _ = guest.set(&owner(number), want, false);
            prop_assert_eq!(guest.own, own);
        }
        for number in 0..4 {
            guest.set(&owner(number), None, false).expect("a removal needs no consent");
        }
        prop_assert!(guest.claims.is_empty());
        prop_assert!(guest.holders.is_empty());
    }

    /// Generations of one owner, compared with the highest one that was seen.
    #[test]
    fn generations_fence(requests in prop::collection::vec((1_u64..6, 0_u8..3, any::<bool>()), 0..20)) {
        let (mut claims, owner) = (Claims::default(), owner(0));
        let mut last: Option<(u64, u8, Option<Answer>)> = None;
        for (generation, content, answered) in requests {
            let fenced = claims.fence(&owner, generation, &[content; 32]);
            let expected = match &last {
                Some((current, ..)) if generation < *current => Err(Fence::Stale { current: *current }),
                Some((current, of, _)) if generation == *current && content != *of => Err(Fence::Reused),
                Some((current, _, Some(answer))) if generation == *current => Ok(Fenced::Answered(Arc::new(answer.clone()))),
                _ => Ok(Fenced::New),
            };
            prop_assert_eq!(&fenced, &expected);
            if fenced == Ok(Fenced::New) {
                claims.raise(&owner, generation, [content; 32], 0, SystemTime::now()).expect("few");
                let answer = answered.then(|| Answer { plan_digest: format!("{generation}"), ..Answer::default() });
                if let Some(answer) = &answer {
                    prop_assert!(keep(&mut claims, &owner, answer.clone()));
                }
                last = Some((generation, content, answer));
            }
        }
    }
}

#[test]
fn two_rollouts_are_undone_in_the_order_of_their_start() {
    let [a, b] = [0, 1].map(owner);
    let mut guest = Guest::default();
    guest.set(&a, Some(Want::On), false).expect("off before");
    guest
        .set(&b, Some(Want::Off), false)
        .expect("the claim's reference is not the guest's");
    assert_eq!(guest.count(), 0);
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::HeldByOthers));
    guest.set(&a, None, false).expect("undo");
    assert_eq!(guest.count(), 0, "B decides");
    guest.set(&b, None, false).expect("undo");
    assert_eq!((guest.count(), guest.claims.is_empty()), (0, true));
}

#[test]
fn an_off_takes_the_guests_references_by_consent_and_gives_them_back() {
    let [a, b] = [0, 1].map(owner);
    let mut guest = Guest {
        own: 2,
        ..Guest::default()
    };
    assert_eq!(guest.set(&a, Some(Want::Off), false), Err(GuestHolds(2)));
    assert!(guest.claims.is_empty(), "a refused claim leaves nothing");
    guest.set(&a, Some(Want::Off), true).expect("consent");
    assert_eq!(guest.count(), 0);
    guest.set(&b, Some(Want::On), false).expect("B decides");
    assert_eq!((guest.own, guest.count()), (2, 2));
    guest.set(&b, None, false).expect("A decides again");
    assert_eq!(guest.count(), 0);
    guest.set(&a, None, false).expect("undo");
    assert_eq!(guest.own, 2);
}

/// Returns a guest that had a key on. It has an ON of the first owner, and above it an OFF of the
/// second one that has ended while the key could not be changed yet.
fn beneath_an_off_that_has_ended() -> Guest {
    let [a, b] = [0, 1].map(owner);
    let mut guest = Guest {
        own: 1,
        ..Guest::default()
    };
    guest.set(&a, Some(Want::On), false).expect("it is on");
    guest.set(&b, Some(Want::Off), true).expect("consent");
    assert!(guest.claims.take(&b));
    guest
}

/// An OFF has ended, but the key could not be changed yet. The older ON decides meanwhile.
#[test]
fn references_that_could_not_be_returned_yet_void_no_older_claim() {
    let (a, mut guest) = (owner(0), beneath_an_off_that_has_ended());
    // The next attempt.
    guest.set(&owner(2), None, false).expect("returned");
    assert_eq!(guest.own, 1);
    assert_eq!(guest.claims.verdict(&a, 1), Some(Verdict::Made));
}

/// The deciding claim has ended, but the key could not be changed yet.
#[test]
fn a_change_that_is_still_to_be_made_voids_no_older_claim() {
    let [a, b] = [0, 1].map(owner);
    // The ON has no reference beneath the OFF.
    let mut guest = Guest::default();
    guest.set(&a, Some(Want::On), false).expect("off before");
    guest.set(&b, Some(Want::Off), false).expect("no consent");
    assert!(guest.claims.take(&b));
    let seen = guest.seen();
    guest.claims.observe(&seen);
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::HeldByOthers));
    guest.set(&owner(2), None, false).expect("the next attempt");
    assert_eq!(guest.count(), 1);
    assert_eq!(guest.claims.verdict(&a, 1), Some(Verdict::Made));
    // From now on, the guest is followed again.
    guest.holders.clear();
    guest.set(&owner(2), None, false).expect("nothing to do");
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::Void));
    // The guest has its references back beneath the ON.
    let mut guest = Guest {
        own: 2,
        ..Guest::default()
    };
    guest.set(&a, Some(Want::Off), true).expect("consent");
    guest.set(&b, Some(Want::On), false).expect("B decides");
    assert!(guest.claims.take(&b));
    guest.set(&owner(2), None, false).expect("the next attempt");
    assert_eq!(guest.count(), 0);
    guest.set(&a, None, false).expect("undo");
    assert_eq!(guest.own, 2);
}

/// Meanwhile, the guest turns the key on again itself.
#[test]
fn a_key_that_the_guest_has_turned_on_gets_no_further_reference() {
    let (a, mut guest) = (owner(0), beneath_an_off_that_has_ended());
    guest.own = 1;
    guest.set(&owner(2), None, false).expect("the next attempt");
    assert_eq!(guest.count(), 1, "not 2");
    guest.set(&a, None, false).expect("undo");
    assert_eq!(guest.count(), 1);
}

#[test]
fn a_key_that_the_guest_has_changed_is_void_and_stays_as_the_guest_left_it() {
    let a = owner(0);
    // The guest takes a reference of a key that a claim has turned off.
    let mut guest = Guest {
        own: 1,
        ..Guest::default()
    };
    guest.set(&a, Some(Want::Off), true).expect("consent");
    guest.own = 1;
    let mut claims = guest.claims.clone();
    claims.observe(&guest.seen());
    assert_eq!(claims.verdict(&a, 1), Some(Verdict::Void));
    guest.set(&a, None, false).expect("undo");
    assert_eq!(guest.own, 1, "not 2");
    // The guest turns off a key that it had turned on and that a claim keeps on.
    guest.set(&a, Some(Want::On), false).expect("it is on");
    assert!(guest.holders.is_empty(), "the guest's reference suffices");
    guest.own = 0;
    guest.set(&owner(1), None, false).expect("another owner");
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::Void));
    // The owner claims it again.
    guest.set(&a, Some(Want::On), false).expect("a new claim");
    assert_eq!(
        (guest.count(), guest.claims.verdict(&a, 1)),
        (1, Some(Verdict::Made))
    );
    // The guest drops the claim's reference, or an operator does so by force.
    guest.holders.clear();
    guest.set(&owner(1), None, false).expect("another owner");
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::Void));
    // The module of the key was loaded again.
    guest.set(&a, Some(Want::Held), false).expect("a new claim");
    assert!(guest.claims.stack().iter().all(|claim| !claim.replaced));
    guest.claims.lose();
    assert_eq!(guest.claims.verdict(&a, 0), Some(Verdict::Void));
    assert!(guest.claims.stack().iter().all(|claim| claim.replaced));
}

/// After a boot, owners make their claims again in any order.
#[test]
fn claims_stand_in_the_order_in_which_they_were_wanted() {
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let wanted_at = |name: usize, want, seconds| Claim {
        since: at(seconds),
        ..claim(&owner(name), want, false)
    };
    let order = |key: &KeyClaims| -> Vec<String> {
        let claims = key.stack().iter();
        claims.map(|claim| claim.owner.name.clone()).collect()
    };
    for numbers in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
        let mut key = KeyClaims::default();
        for number in numbers {
            let want = [Want::On, Want::Held, Want::Off][number];
            key.put(wanted_at(number, want, 10 * number as u64));
        }
        assert_eq!(order(&key), ["rollout/0", "rollout/1", "rollout/2"]);
        assert_eq!(key.decider().map(|claim| claim.want), Some(Want::Off));
        // If two claims have the same time, the one that is put last decides.
        key.put(wanted_at(3, Want::On, 20));
        assert_eq!(key.decider().map(|claim| claim.want), Some(Want::On));
        // A claim that is kept keeps its place, and one that is changed does not.
        key.put(wanted_at(0, Want::On, 30));
        assert_eq!(order(&key)[0], "rollout/0");
        key.put(wanted_at(0, Want::Off, 15));
        assert_eq!(
            order(&key),
            ["rollout/1", "rollout/0", "rollout/2", "rollout/3"]
        );
    }
}

/// The clock may have been set back since the newest claim was made.
#[test]
fn a_claim_without_a_time_is_the_newest() {
    let mut key = KeyClaims::default();
    let start = SystemTime::now();
    assert!(key.newest_since(SystemTime::now()) >= start);
    let since = start + Duration::from_hours(1);
    key.put(Claim {
        since,
        ..claim(&owner(0), Want::On, false)
    });
    assert_eq!(key.newest_since(SystemTime::now()), since);
}

#[test]
fn claims_and_owners_are_bounded() {
    let owner = |name: usize| Owner::new(format!("uid:{}", name % 4), name.to_string());
    let mut claims = Claims::default();
    for number in 0..MAX_OWNERS {
        claims
            .raise(&owner(number), 1, [0; 32], 0, SystemTime::now())
            .expect("within the bound");
    }
    assert_eq!(
        claims.raise(&owner(MAX_OWNERS), 1, [0; 32], 0, SystemTime::now()),
        Err(TooMany::Owners)
    );
    claims
        .raise(&owner(0), 2, [0; 32], MAX_CLAIMS, SystemTime::now())
        .expect("an earlier owner");
    assert_eq!(
        claims.raise(&owner(0), 3, [0; 32], MAX_CLAIMS + 1, SystemTime::now()),
        Err(TooMany::Claims)
    );
    assert_eq!(
        claims.owner(&owner(0)).map(|state| state.generation),
        Some(2)
    );
    let mut key = KeyClaims::default();
    key.put(claim(&owner(1), Want::On, false));
    claims.put("alpha", key);
    assert_eq!(
        claims.raise(&owner(0), 3, [0; 32], MAX_CLAIMS, SystemTime::now()),
        Err(TooMany::Claims)
    );
    claims
        .raise(&owner(0), 3, [0; 32], 0, SystemTime::now())
        .expect("an owner can always give back");
}

#[test]
fn keys_that_could_not_be_returned_are_tried_again_later_and_later() {
    let mut key = KeyClaims::default();
    let now = Instant::now();
    let waits = [1, 2, 4, 8, 16, 32, 64, 64].map(Duration::from_secs);
    for wait in waits {
        key.put_off(now);
        assert_eq!(key.due(), Some(now + wait));
    }
    let target = key
        .target(&Seen::default(), None)
        .expect("nothing is claimed");
    key.settle(&target);
    assert_eq!(key.due(), None);
}

#[test]
fn holders_of_claims_are_no_principals() {
    let owner = owner(0);
    let holder = &**owner.holder();
    assert_eq!(holder, "uid:0 · rollout/0");
    assert!(crate::auth::Principal::asserted(holder.as_bytes()).is_err());
}

/// The keys of old answers are dropped, but their generations are not.
#[test]
fn answers_are_kept_within_a_limit() {
    let answer = |keys: usize, text: usize| Answer {
        keys: (0..keys)
            .map(|key| KeyAnswer {
                key: format!("k{key}"),
                want: None,
                verdict: Verdict::Made,
                reason: String::new(),
                message: "x".repeat(text),
                count_before: 0,
                count_after: 0,
            })
            .collect(),
        plan_digest: "d".to_owned(),
    };
    let mut claims = Claims::default();
    let mut make = |name: usize, keys: usize, text: usize| {
        let owner = owner(name);
        claims
            .raise(&owner, 3, [1; 32], 0, SystemTime::now())
            .expect("room");
        assert!(keep(&mut claims, &owner, answer(keys, text)));
        let kept = |name: usize| match claims.fence(&super::tests::owner(name), 3, &[1; 32]) {
            Ok(Fenced::Answered(answer)) => Some(answer.keys.len()),
            _ => None,
        };
        [kept(0), kept(1), kept(2)]
    };
    assert_eq!(make(0, 50_000, 0), [Some(50_000), None, None]);
    assert_eq!(make(1, 65_536, 50), [Some(0), Some(65_536), None]);
    assert_eq!(make(2, 1_000, 0), [Some(0), Some(65_536), Some(1_000)]);
    // The bytes of texts count too.
    assert_eq!(make(0, 10, 600_000), [Some(10), Some(0), Some(1_000)]);
    assert_eq!(make(0, 10, 2_000_000), [Some(0), Some(0), Some(1_000)]);
}

/// One principal cannot take the room of all other principals.
#[test]
fn a_principal_has_a_limited_number_of_owners() {
    let mut claims = Claims::default();
    let mut raise = |principal: &str, name: usize| {
        let owner = Owner::new(principal.to_owned(), name.to_string());
        claims.raise(&owner, 1, [0; 32], 0, SystemTime::now())
    };
    for name in 0..1_024 {
        raise("uid:1", name).expect("room");
    }
    assert_eq!(raise("uid:1", 1_024), Err(TooMany::OwnersOfPrincipal));
    raise("uid:1", 7).expect("it is known");
    raise("uid:2", 0).expect("another principal");
}

/// When there is no room, the owner is forgotten that has had no claims for the longest time.
#[test]
fn an_idle_owner_makes_room() {
    let (zero, hour) = (Duration::ZERO, Duration::from_hours(1));
    let start = SystemTime::now();
    for (principals, refusal) in [(1, TooMany::OwnersOfPrincipal), (4, TooMany::Owners)] {
        let owner =
            |name: usize| Owner::new(format!("uid:{}", name % principals), name.to_string());
        let other = |principal: &str| Owner::new(principal.to_owned(), "other".to_owned());
        let mut claims = Claims::default();
        let raise =
            |claims: &mut Claims, owner, at| claims.raise(&owner, 1, [0; 32], 0, start + at);
        for name in 0..1_024 * principals {
            let at = if name < 3 { zero } else { hour };
            raise(&mut claims, owner(name), at).expect("room");
        }
        // If only this principal has no room, owners of others are not forgotten.
        let idle = other("uid:7");
        let is_full = raise(&mut claims, idle.clone(), zero).is_err();
        assert_eq!(is_full, refusal == TooMany::Owners);
        // The first owner has a claim, and the second makes another request.
        let mut key = KeyClaims::default();
        key.put(claim(&owner(0), Want::On, false));
        claims.put("alpha", key);
        raise(&mut claims, owner(1), hour * 2).expect("it is known");
        let new = match refusal {
            TooMany::Owners => other("uid:8"),
            _ => other("uid:0"),
        };
        assert_eq!(raise(&mut claims, new.clone(), hour * 24), Err(refusal));
        let later = hour * 24 + hour / 2;
        let room = claims.room(&new, 0, start + later);
        assert_eq!(room, Ok(Some(2)));
        raise(&mut claims, new.clone(), later).expect("room");
        let known = |name| claims.owner(&owner(name)).is_some();
        assert_eq!([0, 1, 2, 3].map(known), [true, true, false, true]);
        assert_eq!(claims.owner(&idle).is_some(), !is_full);
        let third = raise(&mut claims, owner(2), later);
        assert_eq!(third, Err(refusal), "the others are not idle yet");
    }
}

/// A boot that has ended forgets its owners.
#[test]
fn an_answer_to_an_unknown_owner_is_not_kept() {
    let mut claims = Claims::default();
    assert!(!keep(&mut claims, &owner(0), Answer::default()));
    assert!(claims.is_empty());
}
