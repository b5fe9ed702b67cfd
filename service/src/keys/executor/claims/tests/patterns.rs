// SPDX-License-Identifier: Apache-2.0
//! Validations whose claims select keys by patterns.

use static_keys::Patterns;

use super::*;
use crate::keys::{KeyRefusal, LeftOut, PrepareRequest, Selection};

/// Returns a validation of these patterns.
fn selecting(generation: u64, selections: &[(&[&str], Want)]) -> ClaimsRequest {
    let selection = |(patterns, want): &(&[&str], Want)| {
        let texts: Vec<String> = patterns.iter().map(|text| (*text).to_owned()).collect();
        let selection = Selection {
            patterns: Patterns::parse(&texts).expect("well-formed"),
            classes: Vec::new(),
        };
        (selection, *want)
    };
    ClaimsRequest {
        selections: selections.iter().map(selection).collect(),
        validate_only: true,
        ..request("a", generation, &[])
    }
}

fn keys(outcome: &ClaimsOutcome) -> Vec<(&str, Want)> {
    let keys = outcome.keys.iter();
    keys.filter_map(|answer| Some((answer.key.as_str(), answer.want?)))
        .collect()
}

#[tokio::test]
async fn a_validation_names_the_keys_that_patterns_select() {
    let rig = rig();
    // The sealed key and the guarded one are left out. A tracepoint's key is selected too.
    let selections: [(&[&str], Want); 3] = [
        (&["*e*", "!likely"], Want::Off),
        (&["beta", "likely"], Want::Off),
        (&["alpha"], Want::On),
    ];
    let mut dry = selecting(1, &selections);
    dry.claims = vec![
        ("gone".to_owned(), Want::Held),
        ("beta".to_owned(), Want::Off),
    ];
    let outcome = rig.keys.set_claims(dry.clone()).await.expect("valid");
    let selected = [
        ("alpha", Want::On),
        ("beta", Want::Off),
        ("gone", Want::Held),
        ("likely", Want::Off),
        ("sched_switch", Want::Off),
        ("traced", Want::Off),
        ("unused", Want::Off),
    ];
    assert_eq!(keys(&outcome), selected);
    let owned = selected.map(|(name, want)| (name.to_owned(), want));
    assert_eq!(outcome.intent_digest, intent_digest(&owned));
    assert!(rig.listed().is_empty() && rig.guest.pauses() == 0);
    // The digest that was approved.
    dry.intent_digest = outcome.intent_digest.clone();
    rig.keys.set_claims(dry.clone()).await.expect("approved");
    dry.intent_digest = intent_digest(&owned[1..]);
    assert_eq!(reason(rig.keys.set_claims(dry).await), "INTENT_MISMATCH");
    // The same keys, sent as the answer names them, in the same generation.
    let mut real = request("a", 1, &selected);
    real.intent_digest = outcome.intent_digest.clone();
    let made = rig.keys.set_claims(real).await.expect("made");
    let verdicts = |outcome: &ClaimsOutcome| -> Vec<Verdict> {
        outcome.keys.iter().map(|answer| answer.verdict).collect()
    };
    assert_eq!(verdicts(&made), verdicts(&outcome));
    assert_eq!(made.plan_digest, outcome.plan_digest);
    assert_eq!(rig.guest.count("traced"), 0);
}

#[tokio::test]
async fn guarded_keys_are_selected_by_permission() {
    let rig = rig();
    let mut dry = selecting(1, &[(&["*guard*", "alpha"], Want::On)]);
    let outcome = rig.keys.set_claims(dry.clone()).await.expect("valid");
    assert_eq!(keys(&outcome), [("alpha", Want::On)]);
    // The monitor does not permit them, which the answer says.
    dry.allow_guarded = true;
    let outcome = rig.keys.set_claims(dry).await.expect("valid");
    assert_eq!(keys(&outcome), [("alpha", Want::On), ("guarded", Want::On)]);
    assert_eq!(outcome.keys[1].reason, "KEY_GUARDED");
}

#[tokio::test]
async fn patterns_are_refused_as_in_updates() {
    let rig = rig();
    for (patterns, expected) in [
        (&["sealed"][..], "KEY_SEALED"),
        (&["alpha", "guarded"], "KEY_GUARDED"),
        (&["seal*"], "KEY_SEALED"),
        (&["nothing*"], "KEY_NOT_FOUND"),
        (&["alpha", "alpah"], "KEY_NOT_FOUND"),
    ] {
        let dry = selecting(1, &[(patterns, Want::On)]);
        assert_eq!(reason(rig.keys.set_claims(dry).await), expected);
    }
    let mut two = selecting(1, &[(&["al*"], Want::On), (&["*pha"], Want::Off)]);
    for _ in 0..2 {
        let error = rig.keys.set_claims(two.clone()).await.expect_err("two");
        let text = error.to_string();
        assert_eq!(error.reason(), "INVALID_ARGUMENT");
        assert!(text.contains("key alpha is claimed on and off"), "{text}");
        // The same of a key and a pattern.
        two.selections.remove(0);
        two.claims = vec![("alpha".to_owned(), Want::On)];
    }
}

#[tokio::test]
async fn a_validation_tells_what_patterns_leave_out() {
    let rig = rig();
    let more: Vec<TestKey> = (0..12)
        .map(|number| TestKey::guarded(&format!("g{number:02}")))
        .collect();
    assert_eq!(rig.guest.add_module("mod", &more), 0);
    // Each key counts once, however many patterns match it.
    let selections: [(&[&str], Want); 2] = [(&["*"], Want::Off), (&["mod:*", "b*"], Want::Off)];
    let error = rig
        .keys
        .set_claims(selecting(1, &[(&["mod:*"], Want::Off)]));
    assert_eq!(reason(error.await), "KEY_GUARDED");
    let outcome = rig.keys.set_claims(selecting(1, &selections)).await;
    let outcome = outcome.expect("valid");
    let first = (0..9).map(|number| format!("mod:g{number:02}").into());
    let guarded = LeftOut {
        reason: KeyRefusal::Guarded,
        count: 13,
        names: std::iter::once("guarded".into()).chain(first).collect(),
    };
    let sealed = LeftOut {
        reason: KeyRefusal::Sealed,
        count: 1,
        names: vec!["sealed".into()],
    };
    assert_eq!(outcome.left_out, [guarded, sealed]);
}

#[tokio::test]
async fn a_validation_predicts_sites_and_pause_as_a_prepare_does() {
    let rig = rig();
    let dry = |claims: &[(&str, Want)]| ClaimsRequest {
        validate_only: true,
        ..request("a", 1, claims)
    };
    let both = [("alpha", Want::On), ("beta", Want::On)];
    let first = rig.keys.set_claims(dry(&both)).await.expect("valid");
    assert_eq!((first.sites_patched, first.predicted_pause), (3, None));
    // The first pause, from which the next one is predicted.
    let made = rig.set("b", 1, &[("alpha", Want::On)]).await.expect("made");
    assert_eq!((made.sites_patched, made.predicted_pause), (1, None));
    let second = rig.keys.set_claims(dry(&both)).await.expect("valid");
    assert_eq!(second.sites_patched, 2);
    let updates = vec![KeyUpdate::new("beta", Op::Inc)];
    let (timeout, deadline) = (
        Duration::from_secs(1),
        Instant::now() + Duration::from_secs(10),
    );
    let prepared = PrepareRequest {
        update: UpdateRequest::new(updates, "uid:0", timeout, deadline),
        plan_ttl: Duration::from_secs(60),
    };
    let prepared = rig.keys.prepare(prepared).await.expect("prepared");
    assert!(second.predicted_pause.is_some());
    assert_eq!(second.predicted_pause, prepared.predicted_pause);
    // A further reference patches no site and needs no pause. A key that is on already needs no
    // change.
    let held = rig.keys.set_claims(dry(&[("alpha", Want::Held)])).await;
    let held = held.expect("valid");
    assert_eq!(
        (held.sites_patched, held.predicted_pause),
        (0, Some(Duration::ZERO))
    );
    let same = rig.keys.set_claims(dry(&[("likely", Want::On)])).await;
    let same = same.expect("valid");
    assert_eq!((same.sites_patched, same.predicted_pause), (0, None));
    // A repeat has the answer that is kept.
    let again = rig.set("b", 1, &[("alpha", Want::On)]).await.expect("made");
    assert_eq!((again.repeated, again.sites_patched), (true, 0));
    let made = rig.set("b", 2, &both).await.expect("made");
    assert_eq!((made.sites_patched, made.predicted_pause), (2, None));
}

/// A caller without rules, or whose credentials have expired, is refused before its patterns are
/// compared with names.
#[tokio::test]
async fn a_caller_who_may_change_nothing_selects_nothing() {
    let rig = rig();
    let mut dry = selecting(1, &[(&["nothing*"], Want::On)]);
    let rule = ScopeRule {
        name: "all".to_owned(),
        keys: Vec::new(),
        max_keys: None,
        exhausted: String::new(),
    };
    for (rules, expires) in [(vec![], 0), (vec![rule.clone()], 1)] {
        let scope = Scope {
            rules,
            expires,
            ..Scope::default()
        };
        dry.caller.scope = Some(Arc::new(KeyScope::new(scope).expect("globs")));
        let refused = rig.keys.set_claims(dry.clone()).await;
        assert_eq!(reason(refused), "ROLE_MISSING");
    }
    let scope = Scope {
        rules: vec![rule],
        ..Scope::default()
    };
    dry.caller.scope = Some(Arc::new(KeyScope::new(scope).expect("globs")));
    assert_eq!(reason(rig.keys.set_claims(dry).await), "KEY_NOT_FOUND");
}

#[tokio::test]
async fn patterns_are_compared_with_names_until_the_deadline() {
    let rig = rig();
    let mut late = selecting(1, &[(&["al*"], Want::On)]);
    late.deadline = Instant::now();
    let late = rig.keys.set_claims(late).await.expect_err("late");
    assert!(late.to_string().contains("patterns"), "{late}");
    assert_eq!(late.reason(), "GUEST_BUSY");
}
