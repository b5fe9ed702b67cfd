// SPDX-License-Identifier: Apache-2.0
//! Claims on the keys of tracepoints, which a later service continues.

use super::*;

/// The name of an owner, a generation and the claims.
type Set<'a> = (&'a str, u64, &'a [(&'a str, Want)]);

const KEYS: [&str; 2] = ["traced", "parked"];

/// Boots a guest that traces one event. Another event has a probe and is parked.
fn boot() -> Arc<InMemoryGuest> {
    let traced = TestKey {
        count: 1,
        ..TestKey::tracepoint(KEYS[0], true)
    };
    let keys = [traced, TestKey::tracepoint(KEYS[1], true)];
    InMemoryGuest::boot(Arc::new(Registry::default()), &keys)
}

fn counts(guest: &InMemoryGuest) -> [i32; 2] {
    KEYS.map(|name| guest.count(name))
}

#[tokio::test]
async fn claims_on_tracepoints_continue_and_end() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    let claims = [(KEYS[0], Want::Off), (KEYS[1], Want::On)];
    first.claim("a", 1, &claims).await.expect("made");
    let (holds, claims) = (first.holds().await, first.claims().await);
    assert_eq!((counts(&guest), holds.len()), ([0, 1], 1));
    drop(first);
    let second = serve(&guest, &place);
    assert_eq!(second.holds().await, holds, "with their ids");
    assert_eq!(second.claims().await, claims);
    assert!(claims.iter().all(|(.., verdict)| *verdict == Verdict::Made));
    // The next process, too: the one before has written the adopted state.
    drop(second);
    let third = serve(&guest, &place);
    third.claim("a", 2, &[]).await.expect("undo");
    assert_eq!((counts(&guest), third.holds().await.len()), ([1, 0], 0));
}

/// While no service ran, the guest has detached its probe, and has attached another one.
#[tokio::test]
async fn a_later_service_leaves_what_the_guest_has_switched() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    let claims = [(KEYS[0], Want::Off), (KEYS[1], Want::On)];
    first.claim("a", 1, &claims).await.expect("made");
    drop(first);
    guest.set_probes(KEYS[0], &[7]);
    guest.set_probes(KEYS[1], &[]);
    let second = serve(&guest, &place);
    let claims = second.claims().await;
    assert!(claims.iter().all(|(.., verdict)| *verdict == Verdict::Void));
    second.claim("a", 2, &[]).await.expect("undo");
    assert_eq!(counts(&guest), [1, 0]);
}

/// The service ends after the first write of each step, once with the change made and once without.
#[tokio::test]
async fn a_service_may_die_at_any_claim() {
    let steps: [Set<'_>; 4] = [
        ("a", 1, &[(KEYS[0], Want::Off), (KEYS[1], Want::On)]),
        ("b", 1, &[(KEYS[0], Want::On), (KEYS[1], Want::Off)]),
        ("b", 2, &[]),
        ("a", 2, &[]),
    ];
    for die_at in 0..steps.len() {
        for made in [false, true] {
            let (guest, place) = (boot(), Place::default());
            let first = serve(&guest, &place);
            for (name, generation, claims) in &steps[..die_at] {
                first.claim(name, *generation, claims).await.expect("made");
            }
            let before = counts(&guest);
            let (writes, (name, generation, claims)) = (place.writes(), steps[die_at]);
            first.claim(name, generation, claims).await.expect("made");
            drop(first);
            if !made {
                for (name, count) in KEYS.into_iter().zip(before) {
                    guest.set_count(name, count);
                }
            }
            let second = serve(&guest, &place.after(writes + 1));
            for (name, generation, claims) in &steps[die_at..] {
                let claimed = second.claim(name, *generation, claims).await;
                claimed.expect("made, or answered");
            }
            let left = (counts(&guest), second.claims().await, second.holds().await);
            assert_eq!(left, ([1, 0], vec![], vec![]), "step {die_at}, {made}");
        }
    }
}
