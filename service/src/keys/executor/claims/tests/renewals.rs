// SPDX-License-Identifier: Apache-2.0
//! Owners that make their claims again.

use std::future::Future;
use std::task::{Context, Waker};
use std::time::SystemTime;

use super::*;

/// The owner's later generation was raised before its claims expired. Its request is made between
/// two sets in which the claims end.
#[tokio::test]
async fn a_renewal_between_two_ends_keeps_its_claims() {
    let rig = rig();
    let claims = [("alpha", Want::On), ("beta", Want::Held)];
    let short = move |generation| {
        let mut request = request("a", generation, &claims);
        request.ttl = Some(Duration::from_secs(60));
        request
    };
    rig.keys.set_claims(short(1)).await.expect("made");
    rig.guest.set_count("beta", -1);
    let mut busy = short(2);
    busy.deadline = Instant::now() + Duration::from_millis(50);
    assert_eq!(reason(rig.keys.set_claims(busy).await), "GUEST_BUSY");
    // Each key's claim ends in a separate set. The renewal is sent while the first set is made.
    let (keys, guest) = (rig.keys.clone(), Arc::clone(&rig.guest));
    let (sent, renewals) = std::sync::mpsc::channel();
    let mut sent = Some(sent);
    rig.guest.on_pause(move || {
        let Some(sent) = sent.take() else { return };
        guest.set_count("beta", 1);
        let (keys, request) = (keys.clone(), short(2));
        let mut renewal = Box::pin(async move { keys.set_claims(request).await });
        let mut context = Context::from_waker(Waker::noop());
        assert!(renewal.as_mut().poll(&mut context).is_pending(), "sent");
        let _ = sent.send(renewal);
    });
    rig.clock.advance(Duration::from_secs(61));
    rig.keys.tick().await.expect("it runs");
    let renewal = renewals.try_recv().expect("the first set has ended");
    let outcome = renewal.await.expect("made");
    assert!(outcome.keys.iter().all(|key| key.verdict == Verdict::Made));
    rig.keys.tick().await.expect("it runs");
    assert_eq!((rig.guest.count("alpha"), rig.guest.count("beta")), (1, 1));
    assert_eq!(rig.listed().len(), 2);
}

/// When a claim that the guest has voided is made again, it takes a reference. This and any renewal
/// need a rule. Ending a claim needs none.
#[tokio::test]
async fn an_owner_without_a_rule_renews_nothing() {
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
    let (alpha, beta) = (("alpha", Want::Held), ("beta", Want::Held));
    set(1, &[alpha], &["alpha"]).await.expect("a rule");
    assert_eq!(reason(set(2, &[alpha], &[]).await), "ROLE_MISSING");
    rig.guest.set_count("alpha", 0);
    assert_eq!(reason(set(2, &[alpha], &["beta"]).await), "ROLE_MISSING");
    assert_eq!(rig.guest.count("alpha"), 0);
    // Both claims are new, and no rule covers both keys.
    assert_eq!(
        reason(set(2, &[alpha, beta], &["alpha", "beta"]).await),
        "ROLE_MISSING"
    );
    set(2, &[alpha], &["alpha"]).await.expect("a rule");
    assert_eq!(rig.guest.count("alpha"), 1);
    set(3, &[], &[]).await.expect("ended");
    assert_eq!(rig.guest.count("alpha"), 0);
}

/// The guest has booted again. A is older than B, and C does not tell when it wanted its claims.
#[tokio::test]
async fn claims_that_are_made_again_stand_in_their_former_order() {
    for is_reversed in [false, true] {
        let rig = rig();
        let before = SystemTime::now() - Duration::from_secs(60);
        let set = async |owner: &str, want, made_at| {
            let set = ClaimsRequest {
                made_at,
                ..request(owner, 1, &[("alpha", want)])
            };
            rig.keys.set_claims(set).await.expect("made");
        };
        let a = ("a", Want::On, Some(before));
        let b = ("b", Want::Off, Some(before + Duration::from_secs(1)));
        let order = if is_reversed { [b, a] } else { [a, b] };
        for (owner, want, made_at) in order {
            set(owner, want, made_at).await;
        }
        assert_eq!(rig.guest.count("alpha"), 0, "{is_reversed}");
        let off = ("b".to_owned(), Verdict::Made, true);
        assert_eq!(rig.listed()[1], off, "{is_reversed}");
        set("c", Want::On, None).await;
        assert_eq!(rig.guest.count("alpha"), 1);
        // A time in the future and one that the ledger does not keep.
        let later = SystemTime::now() + Duration::from_secs(1 << 30);
        set("d", Want::Off, Some(later)).await;
        let earlier = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        set("e", Want::On, Some(earlier)).await;
        set("f", Want::On, None).await;
        assert_eq!(rig.guest.count("alpha"), 1, "F decides");
        let order: Vec<String> = rig.listed().into_iter().map(|claim| claim.0).collect();
        assert_eq!(order, ["e", "a", "b", "c", "d", "f"]);
    }
}

/// A key whose module is not registered at the moment. The newer claim, an OFF, ends meanwhile.
#[tokio::test]
async fn an_on_beneath_a_claim_that_ends_later_is_not_void() {
    let rig = rig();
    assert_eq!(rig.guest.add_module("mod", &[TestKey::new("gamma", 1)]), 0);
    let key = "mod:gamma";
    rig.set("a", 1, &[(key, Want::On)]).await.expect("made");
    rig.set("b", 1, &[(key, Want::Off)]).await.expect("made");
    assert_eq!(rig.guest.register_again(), 0);
    let outcome = rig.set("b", 2, &[]).await.expect("answered");
    assert_eq!(outcome.keys[0].reason, "MODULE_REFUSED");
    assert_eq!(rig.guest.add_module_again("mod", |_| {}), 0);
    let off = ("a".to_owned(), Verdict::HeldByOthers, true);
    assert_eq!(rig.listed(), [off]);
    rig.clock.advance(Duration::from_secs(1));
    rig.keys.tick().await.expect("it runs");
    assert_eq!(rig.guest.count(key), 1);
    assert_eq!(rig.listed(), [("a".to_owned(), Verdict::Made, true)]);
}
