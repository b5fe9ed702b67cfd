// SPDX-License-Identifier: Apache-2.0
//! The keys of events that a caller may change.

use std::sync::Arc;

use patchbay_proto::scope::Scope;

use super::super::tracer::{ArmTerms, SwitchTerms};
use super::fake::Fake;
use super::tracing::wanted;
use crate::keys::{Caller, KeyScope, Use};

/// A scope that permits nothing.
fn forbidden() -> Caller {
    let scope = KeyScope::new(Scope::default()).expect("no globs");
    Caller {
        name: "alice".to_owned(),
        person: None,
        scope: Some(Arc::new(scope)),
    }
}

#[tokio::test]
async fn the_keys_of_events_are_permitted_before_anything_happens() {
    let fake = Fake::with_agent().await;
    let switch = wanted(&["sched_switch"]);
    let arm = |caller| ArmTerms {
        caller,
        ..ArmTerms::default()
    };
    let terms = |caller| SwitchTerms {
        caller,
        ..SwitchTerms::default()
    };
    let refused = fake.tracer.arm("a", &switch, &arm(Some(forbidden()))).await;
    assert_eq!(refused.expect_err("forbidden").reason(), "ROLE_MISSING");
    assert!(
        fake.tracer.book().events.is_empty(),
        "the agent was not asked"
    );
    let alice = || Some(Caller::from("alice"));
    fake.tracer
        .arm("a", &switch, &arm(alice()))
        .await
        .expect("armed");
    let refused = fake
        .tracer
        .fire("a", &switch, &terms(Some(forbidden())))
        .await;
    assert_eq!(refused.expect_err("forbidden").reason(), "ROLE_MISSING");
    assert!(!fake.keys.is_on("sched_switch"));
    fake.tracer
        .fire("a", &switch, &terms(alice()))
        .await
        .expect("fired");
    let refused = fake
        .tracer
        .park("a", &switch, &terms(Some(forbidden())))
        .await;
    assert_eq!(refused.expect_err("forbidden").reason(), "ROLE_MISSING");
    assert!(fake.keys.is_on("sched_switch"));
    let dry_run = SwitchTerms {
        validate_only: true,
        ..terms(alice())
    };
    fake.tracer
        .park("a", &switch, &dry_run)
        .await
        .expect("checked");
    for (force, caller) in [(false, forbidden()), (true, forbidden())] {
        let refused = fake.tracer.disarm("a", &switch, force, Some(&caller)).await;
        assert_eq!(refused.expect_err("forbidden").reason(), "ROLE_MISSING");
    }
    assert_eq!(fake.tracer.book().events.len(), 1);
    let permitted = fake.keys.permitted.lock().unwrap();
    let uses: Vec<Use> = permitted.iter().map(|(_, _, how)| *how).collect();
    let (change, check, give_back) = (Use::Change, Use::Check, Use::GiveBack);
    assert_eq!(
        uses,
        [
            change, change, change, change, change, check, give_back, change
        ]
    );
    assert!(
        permitted
            .iter()
            .all(|(_, keys, _)| keys == &["sched_switch"])
    );
}
