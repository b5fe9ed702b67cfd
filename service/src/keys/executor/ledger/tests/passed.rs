// SPDX-License-Identifier: Apache-2.0
//! Holds and claims that expire while no service runs.

use std::time::SystemTime;

use super::*;

const TTL: Duration = Duration::from_secs(60);

/// Returns the ledger as it is after all expiries in it have passed. The file has them as times of
/// the wall clock.
fn an_hour_later(place: &Place) -> Place {
    let mut value = serde_json::to_value(place.newest()).expect("JSON");
    let end = |of: &mut serde_json::Value| {
        if !of["expires"].is_null() {
            of["expires"] = serde_json::to_value(SystemTime::UNIX_EPOCH).expect("JSON");
        }
    };
    let owners = value["now"]["claims"]["owners"].as_array_mut();
    owners.expect("a list").iter_mut().for_each(end);
    for of in value["now"]["holds"].as_array_mut().expect("a list") {
        let holds = of["holds"].as_array_mut();
        holds.expect("a list").iter_mut().for_each(end);
    }
    let ledger: Ledger = serde_json::from_value(value).expect("a ledger");
    let mut later = Place::default();
    later
        .replace(&ledger.encode().expect("JSON").0)
        .expect("room");
    later
}

/// The clock of the next service stands still, so nothing expires later.
#[tokio::test]
async fn holds_and_claims_that_expired_meanwhile_end_at_once() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    let mut short = request("a", 4, &[("alpha", Want::On), ("beta", Want::Held)]);
    short.ttl = Some(TTL);
    first.keys.set_claims(short).await.expect("made");
    first
        .claim("b", 1, &[("gamma", Want::On)])
        .await
        .expect("made");
    let held = first.update("gamma", Op::Inc, Some(TTL.as_secs()));
    held.await.expect("made");
    let counts = || ["alpha", "beta", "gamma"].map(|name| guest.count(name));
    assert_eq!(counts(), [1, 1, 2]);
    drop(first);
    let later = an_hour_later(&place);
    // Nothing ends before the kernel is known.
    let (second, registry) = start(&guest, &later, None);
    second.keys.tick().await.expect("it runs");
    assert_eq!(counts(), [1, 1, 2]);
    second.find_kernel(&guest, &registry).await;
    for _ in 0..2 {
        second.keys.tick().await.expect("it runs");
    }
    assert_eq!(counts(), [0, 0, 1]);
    let stays = [("gamma".to_owned(), "b".to_owned(), Verdict::Made)];
    assert_eq!(second.claims().await, stays, "it has no expiry");
    let late = second.claim("a", 3, &[("alpha", Want::On)]).await;
    assert_eq!(late.expect_err("late").reason(), "GENERATION_STALE");
    // The next service does not find them again.
    drop(second);
    let third = serve(&guest, &later);
    assert_eq!(third.claims().await, stays);
    assert_eq!(counts(), [0, 0, 1]);
}
