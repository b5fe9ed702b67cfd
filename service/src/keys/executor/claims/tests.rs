// SPDX-License-Identifier: Apache-2.0
//! Sets of claims on a guest in memory, through the handle that the API uses.

mod modules;
mod patterns;
mod renewals;
mod tracepoints;

use std::sync::Arc;
use std::time::{Duration, Instant};

use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};
use patchbay_proto::scope::{Scope, ScopeRule};
use static_keys::Op;

use crate::keys::audit::AuditLog;
use crate::keys::claims::{
    ClaimQuery, Claims, ClaimsOutcome, ClaimsRequest, Owner, Verdict, Want, intent_digest,
};
use crate::keys::error::KeysError;
use crate::keys::{Caller, KeyScope, KeyUpdate, Keys, KeysConfig, Registry, UpdateRequest};
use crate::testing::{ManualClock, listed_claims};

struct Rig {
    guest: Arc<InMemoryGuest>,
    clock: Arc<ManualClock>,
    keys: Keys,
}

fn rig() -> Rig {
    audited_rig(AuditLog::default())
}

fn audited_rig(audit: AuditLog) -> Rig {
    let registry = Arc::new(Registry::default());
    let keys = [
        TestKey::new("alpha", 1),
        TestKey::new("beta", 2),
        TestKey {
            count: 1,
            initially_true: true,
            ..TestKey::new("likely", 1)
        },
        TestKey {
            sealed: true,
            ..TestKey::new("sealed", 1)
        },
        TestKey::guarded("guarded"),
        TestKey::tracepoint("sched_switch", true),
        TestKey::tracepoint("unused", false),
        TestKey {
            count: 1,
            ..TestKey::tracepoint("traced", true)
        },
    ];
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &keys);
    let clock = ManualClock::new();
    let config = KeysConfig {
        clock: Arc::<ManualClock>::clone(&clock),
        audit,
        ..KeysConfig::default()
    };
    let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
    Rig { guest, clock, keys }
}

pub(in crate::keys::executor) fn request(
    name: &str,
    generation: u64,
    claims: &[(&str, Want)],
) -> ClaimsRequest {
    let claims = claims.iter().map(|(key, want)| ((*key).to_owned(), *want));
    ClaimsRequest::new(
        Caller::from("uid:0"),
        name,
        generation,
        claims.collect(),
        Duration::from_secs(1),
        Instant::now() + Duration::from_secs(10),
    )
}

impl Rig {
    async fn set(
        &self,
        name: &str,
        generation: u64,
        claims: &[(&str, Want)],
    ) -> Result<Arc<ClaimsOutcome>, KeysError> {
        self.keys
            .set_claims(request(name, generation, claims))
            .await
    }

    async fn verdicts(&self, name: &str, generation: u64, claims: &[(&str, Want)]) -> Vec<Verdict> {
        let outcome = self.set(name, generation, claims).await.expect("made");
        outcome.keys.iter().map(|answer| answer.verdict).collect()
    }

    async fn op(&self, name: &str, op: Op, force: bool) -> Result<(), KeysError> {
        let update = UpdateRequest {
            force,
            ..update("uid:0", name, op)
        };
        self.keys.update(update).await.map(drop)
    }

    fn listed(&self) -> Vec<(String, Verdict, bool)> {
        let claims = listed_claims(&self.keys).into_iter();
        claims
            .map(|view| (view.claim.owner.name.clone(), view.verdict, view.decides))
            .collect()
    }
}

fn update(principal: &str, name: &str, op: Op) -> UpdateRequest {
    let second = Duration::from_secs(1);
    let updates = vec![KeyUpdate::new(name, op)];
    UpdateRequest::new(updates, principal, second, Instant::now() + 10 * second)
}

fn reason(result: Result<Arc<ClaimsOutcome>, KeysError>) -> &'static str {
    result.expect_err("refused").reason()
}

#[tokio::test]
async fn owners_are_undone_in_the_order_of_their_start() {
    let rig = rig();
    assert_eq!(
        rig.verdicts("a", 1, &[("alpha", Want::On), ("beta", Want::Held)])
            .await,
        [Verdict::Made; 2]
    );
    assert!(rig.guest.jumps("alpha") && rig.guest.jumps("beta"));
    // The reference of A is not B's, and B can decide otherwise without force.
    assert_eq!(
        rig.verdicts("b", 1, &[("alpha", Want::Off)]).await,
        [Verdict::Made]
    );
    assert_eq!(rig.guest.count("alpha"), 0);
    let listed = rig.listed();
    assert_eq!(
        listed[..2],
        [
            ("a".to_owned(), Verdict::HeldByOthers, false),
            ("b".to_owned(), Verdict::Made, true)
        ]
    );
    rig.set("a", 2, &[]).await.expect("undo");
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (0, 0));
    rig.set("b", 2, &[]).await.expect("undo");
    assert_eq!(rig.guest.count("alpha"), 0);
    assert!(!rig.guest.jumps("alpha") && rig.listed().is_empty());
}

#[tokio::test]
async fn a_generation_acts_once_and_a_lower_one_never() {
    let rig = rig();
    let first = rig.set("a", 3, &[("alpha", Want::On)]).await.expect("made");
    assert!(!first.repeated && first.report.is_some());
    // The guest turns it off. A repeat changes nothing.
    rig.guest.set_count("alpha", 0);
    let again = rig
        .set("a", 3, &[("alpha", Want::On)])
        .await
        .expect("answered");
    assert!(again.repeated);
    assert_eq!((&again.keys, again.report), (&first.keys, None));
    assert_eq!(
        reason(rig.set("a", 3, &[("beta", Want::On)]).await),
        "GENERATION_STALE"
    );
    // An abort, and then a message that was delayed.
    let pauses = rig.guest.pauses();
    rig.set("a", 5, &[]).await.expect("nothing is left to do");
    assert_eq!(
        reason(rig.set("a", 4, &[("beta", Want::On)]).await),
        "GENERATION_STALE"
    );
    assert_eq!((rig.guest.count("beta"), rig.guest.pauses()), (0, pauses));
    // Another owner of the same principal has its own generations.
    rig.set("b", 1, &[("beta", Want::On)]).await.expect("made");
}

#[tokio::test]
async fn keys_are_answered_one_by_one() {
    let rig = rig();
    let claims = [
        ("alpha", Want::On),
        ("guarded", Want::On),
        ("likely", Want::Off),
        ("nothing", Want::On),
        ("sched_switch", Want::Held),
        ("sealed", Want::On),
    ];
    let outcome = rig.set("a", 1, &claims).await.expect("the others are made");
    let answers: Vec<_> = outcome
        .keys
        .iter()
        .map(|answer| (answer.key.as_str(), answer.verdict, answer.reason.as_str()))
        .collect();
    assert_eq!(
        answers,
        [
            ("alpha", Verdict::Made, ""),
            ("guarded", Verdict::Refused, "KEY_GUARDED"),
            ("likely", Verdict::Refused, "NOT_HOLDER"),
            ("nothing", Verdict::Missing, ""),
            ("sched_switch", Verdict::Refused, "TRACEPOINT_REFUSED"),
            ("sealed", Verdict::Refused, "KEY_SEALED"),
        ]
    );
    assert_eq!(
        (rig.guest.count("alpha"), rig.guest.count("likely")),
        (1, 1)
    );
    let mut forced = request("a", 2, &[("likely", Want::Off)]);
    forced.force = true;
    let outcome = rig.keys.set_claims(forced).await.expect("consent");
    assert_eq!(outcome.keys[0].verdict, Verdict::Made);
    assert_eq!(
        (rig.guest.count("alpha"), rig.guest.count("likely")),
        (0, 0)
    );
    rig.set("a", 3, &[]).await.expect("undo");
    assert_eq!(
        rig.guest.count("likely"),
        1,
        "the guest has its reference again"
    );
}

#[tokio::test]
async fn a_key_that_the_planner_refuses_is_left_out() {
    let rig = rig();
    // Foreign bytes at this site are found only in the stopped guest.
    let site = rig.guest.sites("beta")[0];
    rig.guest.write(site, &[0xcc; 5]);
    let claims = [("alpha", Want::On), ("beta", Want::On)];
    assert_eq!(reason(rig.set("a", 1, &claims).await), "FOREIGN_BYTES");
    assert_eq!(rig.guest.count("alpha"), 0);
    // The key is quarantined by now, and the same generation again leaves it out.
    let outcome = rig.set("a", 1, &claims).await.expect("the other is made");
    let answers: Vec<_> = outcome.keys.iter().map(|answer| &*answer.reason).collect();
    assert_eq!(answers, ["", "KEY_QUARANTINED"]);
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (1, 0));
    assert_eq!(rig.listed().len(), 1, "a refused claim is none");
}

#[tokio::test]
async fn holds_and_claims_do_not_take_each_others_references() {
    let rig = rig();
    rig.op("alpha", Op::Inc, false).await.expect("a hold");
    assert_eq!(
        rig.verdicts("a", 1, &[("alpha", Want::Held)]).await,
        [Verdict::Made]
    );
    assert_eq!(rig.guest.count("alpha"), 2);
    // The same principal has one reference from an op and one from its claim.
    rig.op("alpha", Op::Dec, false).await.expect("its own");
    let error = rig
        .op("alpha", Op::Dec, false)
        .await
        .expect_err("the claim's");
    assert_eq!(error.reason(), "NOT_HOLDER");
    // An OFF that another owner's reference overrides is not an error.
    let outcome = rig
        .set("b", 1, &[("alpha", Want::Off)])
        .await
        .expect("made");
    assert_eq!(outcome.keys[0].verdict, Verdict::HeldByOthers);
    assert!(outcome.keys[0].message.contains("uid:0 · a"), "{outcome:?}");
    rig.op("alpha", Op::Dec, true).await.expect("forced");
    assert_eq!(rig.guest.count("alpha"), 0);
    assert!(
        rig.listed()
            .contains(&("a".to_owned(), Verdict::Void, false))
    );
    let outcome = rig.set("a", 2, &[]).await.expect("nothing to drop");
    assert_eq!(outcome.keys[0].verdict, Verdict::Void);
    assert_eq!(rig.guest.count("alpha"), 0);
}

#[tokio::test]
async fn what_the_guest_has_changed_is_void() {
    let rig = rig();
    rig.set("a", 1, &[("alpha", Want::On)]).await.expect("made");
    rig.guest.set_count("alpha", 0);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Void, false)]);
    let outcome = rig.set("a", 2, &[]).await.expect("nothing to drop");
    assert_eq!(
        (outcome.keys[0].verdict, rig.guest.count("alpha")),
        (Verdict::Void, 0)
    );
}

#[tokio::test]
async fn a_request_that_does_not_fit_does_nothing() {
    let rig = rig();
    let mut other = request("a", 1, &[("alpha", Want::On)]);
    other.intent_digest = intent_digest(&[("alpha".to_owned(), Want::Off)]);
    assert_eq!(reason(rig.keys.set_claims(other).await), "INTENT_MISMATCH");
    let mut other = request("a", 1, &[("alpha", Want::On)]);
    other.boot = "0123456789abcdef".to_owned();
    assert_eq!(reason(rig.keys.set_claims(other).await), "BOOT_CHANGED");
    let mut dry = request("a", 1, &[("alpha", Want::On)]);
    dry.validate_only = true;
    let dry = rig.keys.set_claims(dry).await.expect("valid");
    assert_eq!(dry.keys[0].verdict, Verdict::Made);
    assert_eq!((rig.guest.pauses(), rig.guest.count("alpha")), (0, 0));
    assert!(rig.listed().is_empty());
    // The generation is still free, and the right digest and boot are accepted.
    let mut right = request("a", 1, &[("alpha", Want::On)]);
    right.boot.clone_from(&dry.boot);
    right.intent_digest.clone_from(&dry.intent_digest);
    let made = rig.keys.set_claims(right).await.expect("made");
    assert_eq!(made.plan_digest, dry.plan_digest);
    assert_eq!(rig.guest.count("alpha"), 1);
}

#[tokio::test]
async fn a_busy_guest_fences_and_keeps_what_it_had() {
    let rig = rig();
    rig.set("a", 1, &[("alpha", Want::On)]).await.expect("made");
    rig.guest.set_gate(Gate::TextMutex, 0x1000);
    let mut busy = request("a", 2, &[]);
    busy.deadline = Instant::now() + Duration::from_millis(50);
    assert_eq!(reason(rig.keys.set_claims(busy).await), "GUEST_BUSY");
    assert_eq!(
        reason(rig.set("a", 1, &[("alpha", Want::On)]).await),
        "GENERATION_STALE"
    );
    assert_eq!(rig.listed().len(), 1);
    rig.guest.set_gate(Gate::TextMutex, 0);
    let undone = rig
        .set("a", 2, &[])
        .await
        .expect("the same generation again");
    assert!(!undone.repeated);
    assert_eq!(rig.guest.count("alpha"), 0);
}

#[tokio::test]
async fn claims_expire_by_themselves() {
    let rig = rig();
    let mut short = request("a", 1, &[("alpha", Want::On)]);
    short.ttl = Some(Duration::from_secs(60));
    rig.keys.set_claims(short).await.expect("made");
    rig.clock.advance(Duration::from_secs(59));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count("alpha"), 1);
    rig.clock.advance(Duration::from_secs(2));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count("alpha"), 0);
    assert!(rig.listed().is_empty());
    assert_eq!(
        reason(rig.set("a", 1, &[("beta", Want::On)]).await),
        "GENERATION_STALE"
    );
}

/// One key of the set is busy for long.
#[tokio::test]
async fn a_busy_key_keeps_no_others_from_expiring() {
    let rig = rig();
    let mut short = request("a", 1, &[("alpha", Want::On), ("beta", Want::Held)]);
    short.ttl = Some(Duration::from_secs(60));
    rig.keys.set_claims(short).await.expect("made");
    // The guest is taking the first reference.
    rig.guest.set_count("beta", -1);
    rig.clock.advance(Duration::from_secs(61));
    rig.keys.tick().await.expect("it runs");
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (0, -1));
    assert_eq!(rig.listed().len(), 1, "the claim on beta stands");
    rig.guest.set_count("beta", 1);
    rig.clock.advance(Duration::from_secs(6));
    rig.keys.tick().await.expect("it runs");
    assert_eq!((rig.guest.count("beta"), rig.listed().len()), (0, 0));
}

/// The owner has made other claims before all of its expired claims were ended.
#[tokio::test]
async fn claims_that_were_made_again_do_not_end_with_the_expired_ones() {
    let rig = rig();
    let claims = [("alpha", Want::On), ("beta", Want::Held)];
    let mut short = request("a", 1, &claims);
    short.ttl = Some(Duration::from_secs(60));
    rig.keys.set_claims(short).await.expect("made");
    rig.guest.set_count("beta", -1);
    rig.clock.advance(Duration::from_secs(61));
    rig.keys.tick().await.expect("it runs");
    rig.guest.set_count("beta", 1);
    rig.set("a", 2, &claims).await.expect("made");
    rig.clock.advance(Duration::from_secs(60));
    rig.keys.tick().await.expect("it runs");
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (1, 1));
    assert_eq!(rig.listed().len(), 2);
}

/// Two rules cover one key of an owner each. Later no rule covers any.
#[tokio::test]
async fn an_owner_ends_its_claims_whatever_the_rules_say() {
    let rig = rig();
    let set = |generation, claims: &[(&str, Want)], covered: &[&str]| {
        let rule = |key: &&str| ScopeRule {
            name: (*key).to_owned(),
            keys: vec![(*key).to_owned()],
            max_keys: None,
            exhausted: String::new(),
        };
        let scope = Scope {
            rules: covered.iter().map(rule).collect(),
            ..Scope::default()
        };
        let mut request = request("a", generation, claims);
        request.caller.scope = Some(Arc::new(KeyScope::new(scope).expect("globs")));
        rig.keys.set_claims(request)
    };
    let both = ["alpha", "beta"];
    let (alpha, beta) = (("alpha", Want::On), ("beta", Want::On));
    set(1, &[alpha], &both).await.expect("the first rule");
    set(2, &[alpha, beta], &both)
        .await
        .expect("the second rule, for the new key");
    set(3, &[], &both).await.expect("ended");
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (0, 0));
    set(4, &[alpha], &both).await.expect("the first rule");
    assert_eq!(reason(set(5, &[alpha, beta], &[]).await), "ROLE_MISSING");
    set(5, &[], &[]).await.expect("ended");
    assert_eq!(rig.guest.count("alpha"), 0);
    assert_eq!(reason(set(6, &[alpha], &[]).await), "ROLE_MISSING");
}

/// The log also contains a set that changes no count. The principal of an expiry is the monitor.
#[tokio::test]
async fn the_audit_log_has_each_set_and_who_ended_it() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("audit");
    let rig = audited_rig(AuditLog::open(&path).expect("opens"));
    let mut short = request("a", 1, &[("alpha", Want::On)]);
    short.ttl = Some(Duration::from_secs(60));
    rig.keys.set_claims(short).await.expect("made");
    rig.set("b", 1, &[("alpha", Want::On)]).await.expect("made");
    rig.set("b", 1, &[("alpha", Want::On)])
        .await
        .expect("a repeat");
    rig.set("b", 2, &[]).await.expect("made");
    rig.clock.advance(Duration::from_secs(61));
    rig.keys.tick().await.expect("it runs");
    let text = std::fs::read_to_string(&path).expect("readable");
    let lines = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<serde_json::Value> = lines.collect();
    let of = |event: &'static str| lines.iter().filter(move |line| line["event"] == event);
    let sets: Vec<String> = of("claims")
        .map(|line| format!("{}{}", line["name"], line["generation"]))
        .collect();
    assert_eq!(sets, ["\"a\"1", "\"b\"1", "\"b\"2"], "{text}");
    assert_eq!(
        of("claims").next().map(|line| &line["ttl_ms"]),
        Some(&60_000.into())
    );
    let last = of("intent").next_back().expect("the end");
    assert_eq!(last["owner"], "monitor", "{text}");
    let reason = last["reason"].as_str().expect("text");
    assert!(reason.contains("uid:0 \u{b7} a"), "{reason}");
}

#[tokio::test]
async fn a_claim_that_cannot_be_returned_yet_is_returned_later() {
    let rig = rig();
    assert_eq!(rig.guest.add_module("mod", &[TestKey::new("gamma", 1)]), 0);
    let claims = [("mod:gamma", Want::Held)];
    rig.set("a", 1, &claims).await.expect("made");
    assert_eq!(rig.guest.count("mod:gamma"), 1);
    // The kernel registers again, and its module has not done so yet.
    assert_eq!(rig.guest.register_again(), 0);
    let outcome = rig.set("a", 2, &[]).await.expect("answered");
    assert_eq!(outcome.keys[0].reason, "MODULE_REFUSED");
    assert_eq!((rig.guest.count("mod:gamma"), rig.listed().len()), (1, 0));
    assert_eq!(rig.guest.add_module_again("mod", |_| {}), 0);
    rig.clock.advance(Duration::from_secs(1));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count("mod:gamma"), 0);
}

#[tokio::test]
async fn a_claim_goes_with_the_module_of_its_key() {
    let rig = rig();
    assert_eq!(rig.guest.add_module("mod", &[TestKey::new("gamma", 1)]), 0);
    let claims = [("alpha", Want::Held), ("mod:gamma", Want::On)];
    rig.set("a", 1, &claims).await.expect("made");
    assert_eq!(rig.guest.delete_module("mod"), 0);
    assert_eq!(
        rig.verdicts("a", 2, &[("alpha", Want::Held)]).await,
        [Verdict::Made, Verdict::Missing]
    );
    assert_eq!((rig.guest.count("alpha"), rig.listed().len()), (1, 1));
}

#[tokio::test]
async fn a_list_has_no_pages_for_claims_of_others() {
    let rig = rig();
    for (owner, key) in [("a", "alpha"), ("b", "beta"), ("b", "likely")] {
        let claims = [(key, Want::Held)];
        let generation = if key == "likely" { 2 } else { 1 };
        rig.set(owner, generation, &claims).await.expect("made");
    }
    let query = ClaimQuery {
        page_size: 1,
        name: "a".to_owned(),
        ..ClaimQuery::default()
    };
    let page = rig.keys.claims(&query);
    assert_eq!((page.claims.len(), &*page.next_page_token), (1, ""));
}

#[tokio::test]
async fn another_boot_forgets_claims_and_generations() {
    let rig = rig();
    let made = rig.set("a", 7, &[("alpha", Want::On)]).await.expect("made");
    rig.guest.run(&[TestKey::new("alpha", 1)]);
    let again = rig
        .set("a", 1, &[("alpha", Want::On)])
        .await
        .expect("another boot");
    assert_ne!(again.boot, made.boot);
    assert_eq!(
        (again.keys[0].verdict, rig.guest.count("alpha")),
        (Verdict::Made, 1)
    );
}

/// The table has room for no further owner. Its owners have just been answered.
#[tokio::test]
async fn a_set_without_claims_needs_no_room() {
    let rig = rig();
    let owner = |name: u32| Owner::new(format!("uid:{}", name % 7), name.to_string());
    rig.set("a", 1, &[]).await.expect("its boot is known");
    rig.keys.shared.book().claims = Claims::with_owners((0..4_096).map(owner));
    let alpha = [("alpha", Want::On)];
    assert_eq!(reason(rig.set("b", 1, &alpha).await), "TOO_MANY_CLAIMS");
    let mut dry = request("b", 1, &alpha);
    dry.validate_only = true;
    assert_eq!(reason(rig.keys.set_claims(dry).await), "TOO_MANY_CLAIMS");
    let undone = rig.set("b", 2, &[]).await.expect("nothing to end");
    assert!(undone.keys.is_empty() && !undone.repeated);
    assert_eq!(rig.guest.count("alpha"), 0);
}
