// SPDX-License-Identifier: Apache-2.0
//! Guests that are reset, or stopped and resumed by another client, while a service runs.

use super::*;
use crate::testing::found_after;
use static_keys::GateKind;

/// Serves a guest with a hold on alpha, an ON on beta, and an OFF that has taken the reference of
/// gamma's own code.
async fn held() -> (Arc<InMemoryGuest>, Place, Service, Arc<Registry>) {
    let (guest, place) = (boot(), Place::default());
    guest.set_count("gamma", 1);
    let (service, registry) = start(&guest, &place, Some(found_after(&guest, 0)));
    service.update("alpha", Op::Inc, None).await.expect("made");
    let mut claims = request("a", 1, &[("beta", Want::On), ("gamma", Want::Off)]);
    claims.force = true;
    service.keys.set_claims(claims).await.expect("made");
    assert_eq!(counts(&guest), [1, 1, 0]);
    (guest, place, service, registry)
}

fn counts(guest: &InMemoryGuest) -> [i32; 3] {
    ["alpha", "beta", "gamma"].map(|name| guest.count(name))
}

/// A backup, or `virsh suspend` and `virsh resume`.
#[tokio::test]
async fn a_stop_and_resume_by_another_client_keeps_holds_and_claims() {
    let (guest, place, service, registry) = held().await;
    let (holds, claims) = (service.holds().await, service.claims().await);
    registry
        .register_kernel(found_after(&guest, 1))
        .expect("taken");
    service.keys.adopt_ledger().await.expect("nothing waits");
    assert_eq!(service.holds().await, holds);
    assert_eq!(service.claims().await, claims);
    assert!(claims.iter().all(|(.., state)| *state == Verdict::Made));
    service.claim("a", 2, &[]).await.expect("cleared");
    assert_eq!(counts(&guest), [1, 0, 1], "all references are returned");
    drop(service);
    let (next, _) = start(&guest, &place, Some(found_after(&guest, 0)));
    next.release(&holds[0].0).await.expect("the same hold");
    assert_eq!(counts(&guest), [0, 0, 1]);
}

/// `loadvm` brings back counts without the references.
#[tokio::test]
async fn an_earlier_state_of_the_guest_voids_the_references_that_it_has_not() {
    let (guest, place, service, registry) = held().await;
    for (name, count) in [("alpha", 0), ("beta", 0), ("gamma", 1)] {
        guest.set_count(name, count);
    }
    registry
        .register_kernel(found_after(&guest, 1))
        .expect("taken");
    service.keys.adopt_ledger().await.expect("nothing waits");
    assert_eq!(service.holds().await, []);
    let claims = service.claims().await;
    assert!(claims.iter().all(|(.., state)| *state == Verdict::Void));
    // A kill does not bring them back.
    let written = place.writes();
    drop(service);
    for (name, count) in [("alpha", 1), ("beta", 1), ("gamma", 0)] {
        guest.set_count(name, count);
    }
    let (next, _) = start(&guest, &place.after(written), Some(found_after(&guest, 0)));
    assert_eq!(next.holds().await, []);
}

/// A kernel without a stack canary may have booted again.
#[tokio::test]
async fn a_kernel_whose_boots_are_alike_loses_them_at_a_reset() {
    let (guest, place) = (boot(), Place::default());
    let found = |resets| {
        let mut tables = found_after(&guest, resets);
        let kernel = tables.discovery.as_mut().expect("it was found");
        kernel.missing_gates.push(GateKind::SameKernel.name());
        tables
    };
    let (service, registry) = start(&guest, &place, Some(found(0)));
    service.update("alpha", Op::Inc, None).await.expect("made");
    let claimed = service.claim("a", 1, &[("beta", Want::On)]).await;
    claimed.expect("made");
    registry.register_kernel(found(1)).expect("taken");
    service.keys.adopt_ledger().await.expect("nothing waits");
    assert_eq!(service.holds().await, []);
    assert_eq!(service.claims().await, []);
}

/// The claims are for the boot in which the request came.
#[tokio::test]
async fn a_reboot_during_a_call_makes_no_claims_in_the_next_boot() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(registry, &[TestKey::new("beta", 1)]);
    let place = Place::default();
    let (service, registry) = start(&guest, &place, Some(found_after(&guest, 0)));
    let mut next = found_after(&guest, 0);
    next.boot ^= 0x10;
    let mut next = Some(next);
    // The call has passed its first checks, and stops the guest for its change.
    guest.on_pause(move || {
        if let Some(next) = next.take() {
            registry.register_kernel(next).expect("taken");
        }
    });
    let mut wanted = request("a", 1, &[("beta", Want::On)]);
    wanted.ttl = Some(Duration::from_secs(60));
    let error = service.keys.set_claims(wanted).await;
    let error = error.expect_err("another boot");
    assert_eq!((error.reason(), guest.pauses()), ("BOOT_CHANGED", 1));
    assert_eq!((guest.count("beta"), service.claims().await), (0, vec![]));
    // Its generation fences no owner of the new boot.
    let made = service.claim("a", 1, &[("beta", Want::On)]).await;
    made.expect("made");
}
