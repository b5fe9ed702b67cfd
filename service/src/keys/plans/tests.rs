// SPDX-License-Identifier: Apache-2.0
//! Bounds of the kept plans, their owners and their digest.

use std::time::{Duration, SystemTime};

use super::*;
use crate::keys::Registry;
use crate::keys::UpdateSummary;
use crate::keys::planned::Resolved;
use patchbay_guest::testing::{InMemoryGuest, TestKey};
use static_keys::{Op, Options, Update};

/// Returns a plan of one key with this many sites.
fn plan(sites: u64) -> Plan<Place> {
    let registry = Arc::new(Registry::default());
    let keys = [TestKey::new("alpha", sites), TestKey::new("beta", 1)];
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &keys);
    let snapshot = registry.snapshot().expect("registered");
    let registration = &snapshot.registration;
    let memory = registration.memory(patchbay_guest::guest::Guest::ram(&*guest));
    let key = registration.find("alpha").expect("a key").id;
    let update = Update { key, op: Op::Inc };
    Plan::new(
        &registration.catalog,
        &memory,
        &[update],
        &Options::default(),
    )
    .expect("a plan")
}

fn kept(id: &str, version: u64, sites: u64) -> Kept {
    let answer = PrepareOutcome {
        plan_id: id.to_owned(),
        digest: String::new(),
        outcome: Arc::default(),
        predicted_pause: None,
        expires_at: SystemTime::UNIX_EPOCH,
    };
    let planned = Planned {
        plan: plan(sites),
        resolved: Resolved::default(),
    };
    Kept {
        principal: "a".to_owned(),
        request_id: None,
        expires: Instant::now(),
        version,
        generation: 0,
        answer: Arc::new(answer),
        state: State::Prepared(Box::new(Prepared {
            planned,
            request: UpdateRequest::new(
                vec![KeyUpdate::new("alpha", Op::Inc)],
                "a",
                Duration::ZERO,
                Instant::now(),
            ),
        })),
        bytes: 0,
    }
}

fn plans(plans: usize, bytes: usize) -> Plans {
    let all = PlanUsage { plans, bytes };
    Plans {
        limits: PlanLimits { all, each: all },
        ..Plans::default()
    }
}

fn of(principal: &str, id: &str, version: u64) -> Kept {
    Kept {
        principal: principal.to_owned(),
        ..kept(id, version, 1)
    }
}

fn ids(plans: &Plans) -> Vec<&str> {
    plans
        .kept
        .iter()
        .map(|kept| &*kept.answer.plan_id)
        .collect()
}

#[test]
fn memory_is_bounded_by_what_the_plans_take() {
    let large = kept("large", 1, 10_000).count_bytes();
    let small = kept("small", 1, 1).count_bytes();
    assert!(large > 10_000 * size_of::<Place>(), "{large}");
    assert!(small < 4096, "{small}");
    let mut plans = plans(10, large + small);
    plans.insert(kept("1", 1, 10_000), 1).expect("room");
    plans.insert(kept("2", 1, 1), 1).expect("room");
    let error = plans.insert(kept("3", 1, 1), 1).expect_err("no room");
    assert_eq!(error.reason(), "TOO_MANY_PLANS");
    let taken = plans.take("1", "a").expect("kept");
    plans.insert(kept("3", 1, 1), 1).expect("room");
    plans.put_back(taken);
    assert_eq!(ids(&plans), ["2", "3", "1"]);
}

/// A committed plan keeps its answer and releases the memory of the plan.
#[test]
fn a_commit_frees_the_plan() {
    let mut plans = plans(10, usize::MAX);
    plans.insert(kept("1", 1, 1000), 1).expect("room");
    let before = plans.usage(|_| true).bytes;
    let mut taken = plans.take("1", "a").expect("kept");
    let outcome = UpdateOutcome {
        summary: UpdateSummary::default(),
        ..UpdateOutcome::default()
    };
    taken.state = State::Committed(Arc::new(outcome));
    plans.put_back(taken);
    assert!(
        plans.usage(|_| true).bytes < 4096 && before > 40_000,
        "{before}"
    );
}

#[test]
fn what_no_commit_can_make_is_forgotten_first() {
    let mut plans = plans(3, usize::MAX);
    for (id, version) in [("1", 2), ("2", 1), ("3", 2)] {
        plans.insert(kept(id, version, 1), 2).expect("room");
    }
    plans.insert(kept("4", 2, 1), 2).expect("room");
    assert_eq!(ids(&plans), ["1", "3", "4"]);
    plans.insert(kept("5", 2, 1), 2).expect_err("no room");
    let mut committed = plans.take("3", "a").expect("kept");
    committed.state = State::Committed(Arc::default());
    plans.put_back(committed);
    plans.insert(kept("5", 2, 1), 2).expect("room");
    assert_eq!(ids(&plans), ["1", "4", "5"]);
}

/// When a principal has used up its share, the answers of other principals are kept.
#[test]
fn a_principal_has_a_share() {
    let each = PlanUsage {
        plans: 2,
        bytes: usize::MAX,
    };
    let mut plans = plans(4, usize::MAX);
    plans.limits.each = each;
    let mut first = of("b", "b1", 1);
    first.state = State::Committed(Arc::default());
    plans.insert(first, 1).expect("room");
    plans.insert(of("a", "a1", 1), 1).expect("room");
    plans.insert(of("a", "a2", 1), 1).expect("room");
    let error = plans.insert(of("a", "a3", 1), 1).expect_err("its share");
    assert_eq!(error.reason(), "TOO_MANY_PLANS");
    assert!(error.to_string().contains("kept for a "), "{error}");
    assert_eq!(ids(&plans), ["b1", "a1", "a2"]);
    plans.insert(of("b", "b2", 1), 1).expect("another's share");
    // If all plans reach the limit, anyone's answer is dropped.
    plans.insert(of("c", "c1", 1), 1).expect("room");
    assert_eq!(ids(&plans), ["a1", "a2", "b2", "c1"]);
    let error = plans.insert(of("c", "c2", 1), 1).expect_err("all");
    assert!(error.to_string().contains("are kept and"), "{error}");
    // The principal's own plan of another registration is dropped first.
    plans.insert(of("a", "a3", 2), 2).expect("room");
    assert_eq!(ids(&plans), ["a2", "b2", "c1", "a3"]);
}

/// One plan cannot take all of the memory.
#[test]
fn a_share_is_of_memory_too() {
    let bytes = kept("large", 1, 10_000).count_bytes();
    let mut plans = plans(10, 2 * bytes);
    plans.limits.each.bytes = bytes - 1;
    let error = plans
        .insert(kept("1", 1, 10_000), 1)
        .expect_err("too large");
    assert_eq!(error.reason(), "TOO_MANY_PLANS");
    plans.insert(kept("2", 1, 1), 1).expect("room");
}

#[test]
fn a_digest_is_of_every_byte() {
    let [one, two] = [1, 2].map(|sites| digest(&plan(sites)));
    assert_eq!(one, digest(&plan(1)));
    assert_ne!(one, two);
    assert!(one.len() == 64 && one.bytes().all(|byte| byte.is_ascii_hexdigit()));
}
