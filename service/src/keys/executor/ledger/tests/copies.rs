// SPDX-License-Identifier: Apache-2.0
//! Holds and claims of copies of a guest. Here a copy is a second service on the same memory.

use super::*;
use crate::keys::SaveRequest;
use crate::keys::claims::{ClaimQuery, CopiedHolds};

/// Returns the holds and claims in a snapshot of the service's guest.
async fn saved(service: &Service, guest: &InMemoryGuest) -> Vec<u8> {
    let error = service.keys.save(SaveRequest::to_nobody()).await;
    let error = error.expect_err("not saved");
    assert_eq!(error.reason(), "NOT_SAVED");
    guest.saved().pop().expect("it was asked").ledger
}

/// Starts the service of a copy, whose kernel is not known yet.
fn copy(guest: &Arc<InMemoryGuest>, ledger: &[u8]) -> (Service, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let clock = ManualClock::new();
    let config = KeysConfig {
        is_copy: true,
        copied: CopiedHolds::decode(ledger).expect("whole"),
        clock: Arc::<ManualClock>::clone(&clock),
        ..KeysConfig::default()
    };
    let (keys, _) =
        Keys::start(Arc::clone(guest), Arc::clone(&registry), config).expect("a thread");
    (Service { keys, clock }, registry)
}

async fn plain(guest: &Arc<InMemoryGuest>) -> Service {
    let (service, registry) = copy(guest, &[]);
    service.find_kernel(guest, &registry).await;
    service
}

#[tokio::test]
async fn a_copy_has_the_holds_and_claims_and_an_incarnation_of_its_own() {
    let guest = boot();
    let service = plain(&guest).await;
    assert_eq!(saved(&service, &guest).await, b"", "there are none");
    service.update("alpha", Op::Inc, None).await.expect("made");
    let claimed = service.claim("a", 1, &[("beta", Want::On)]).await;
    claimed.expect("made");
    let (holds, claims) = (service.holds().await, service.claims().await);
    let ledger = saved(&service, &guest).await;

    let (copied, registry) = copy(&guest, &ledger);
    // A copy that does not know its kernel yet cannot be copied: it does not know its holds either.
    let unknown = copied.keys.save(SaveRequest::to_nobody()).await;
    unknown.expect_err("not known yet");
    assert_eq!(guest.saved(), []);
    copied.find_kernel(&guest, &registry).await;
    assert_eq!(copied.holds().await, holds);
    assert_eq!(copied.claims().await, claims);
    let incarnations = [&service, &copied].map(|of| of.keys.incarnation().to_string());
    assert_ne!(incarnations[0], incarnations[1]);
    // The copy of a copy has them too.
    let (third, registry) = copy(&guest, &saved(&copied, &guest).await);
    third.find_kernel(&guest, &registry).await;
    assert_eq!(third.holds().await, holds);

    copied.release(&holds[0].0).await.expect("the same hold");
    copied.claim("a", 2, &[]).await.expect("cleared");
    let counts = ["alpha", "beta", "gamma"].map(|name| guest.count(name));
    assert_eq!(counts, [0, 0, 0], "all references are returned");
}

/// A controller that finds the boot that it knows takes its claims for those that it has confirmed.
#[tokio::test]
async fn the_boot_of_a_copy_has_a_name_of_its_own() {
    let guest = boot();
    let (copied, registry) = copy(&guest, &[]);
    copied.find_kernel(&guest, &registry).await;
    let (again, registry) = copy(&guest, &[]);
    again.find_kernel(&guest, &registry).await;
    let names = [&copied, &again].map(|of| of.keys.claims(&ClaimQuery::default()).boot);
    assert_ne!(names[0], names[1]);
    let mut wanted = request("a", 1, &[("beta", Want::On)]);
    wanted.boot.clone_from(&names[0]);
    let refused = again.keys.set_claims(wanted.clone()).await;
    assert_eq!(refused.expect_err("another copy").reason(), "BOOT_CHANGED");
    let made = copied.keys.set_claims(wanted).await.expect("made");
    assert_eq!(made.boot, names[0]);
}

/// A copy would number the two keys, so it would not find the hold's key by its name.
#[tokio::test]
async fn holds_are_not_saved_if_keys_would_have_other_names_in_a_copy() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 1)]);
    let config = KeysConfig::default();
    let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
    let clock = ManualClock::new();
    let service = Service { keys, clock };
    service.update("alpha", Op::Inc, None).await.expect("made");
    assert_ne!(saved(&service, &guest).await, b"");

    assert_eq!(guest.add_module("mod", &[TestKey::new("alpha", 1)]), 0);
    assert_ne!(saved(&service, &guest).await, b"", "the module's own key");
    assert_eq!(guest.delete_module("mod"), 0);
    let added = guest.add_module_again("mod", |module| {
        // The record's last member: the key is the kernel's.
        guest.write(module.directory.keys + 24, &[0; 8]);
    });
    assert_eq!(added, 0);
    let error = service.keys.save(SaveRequest::to_nobody()).await;
    let error = error.expect_err("refused").to_string();
    assert!(error.contains("of the name of alpha#0x"), "{error}");
    assert_eq!(guest.saved(), []);
}

#[tokio::test]
async fn a_hold_expires_in_the_copy_too() {
    let guest = boot();
    let service = plain(&guest).await;
    let held = service.update("alpha", Op::Inc, Some(60)).await;
    held.expect("made");
    let ledger = saved(&service, &guest).await;
    let (copied, registry) = copy(&guest, &ledger);
    copied.find_kernel(&guest, &registry).await;
    assert_eq!(copied.holds().await.len(), 1);
    copied.clock.advance(Duration::from_secs(61));
    assert_eq!(copied.holds().await, []);
    assert_eq!(guest.count("alpha"), 0);
}

/// The guest unloads a module after its holds were looked at, and before it is stopped.
#[tokio::test]
async fn holds_are_those_of_the_stopped_guest() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 0)]);
    assert_eq!(guest.add_module("mod", &[TestKey::new("delta", 0)]), 0);
    let clock = ManualClock::new();
    let config = KeysConfig {
        clock: Arc::<ManualClock>::clone(&clock),
        ..KeysConfig::default()
    };
    let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
    let service = Service { keys, clock };
    for key in ["alpha", "mod:delta"] {
        service.update(key, Op::Inc, None).await.expect("made");
    }
    let ledger = CopiedHolds::decode(&saved(&service, &guest).await).expect("whole");
    assert_eq!(ledger.expect("some").0.now.holds.len(), 2);

    let (pauses, mut left) = (guest.pauses(), 1);
    let pausing = Arc::downgrade(&guest);
    guest.on_pause(move || {
        if let Some(guest) = pausing.upgrade().filter(|_| left > 0) {
            left -= 1;
            assert_eq!(guest.delete_module("mod"), 0);
        }
    });
    let ledger = CopiedHolds::decode(&saved(&service, &guest).await).expect("whole");
    let holds = ledger.expect("some").0.now.holds;
    let names: Vec<&str> = holds.iter().map(|hold| hold.key.name.as_str()).collect();
    assert_eq!(names, ["alpha"]);
    assert_eq!(guest.saved(), [], "saved once");
    assert_eq!(guest.pauses(), pauses + 2);
}

#[tokio::test]
async fn a_guest_whose_keys_change_at_every_stop_is_not_saved() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(Arc::clone(&registry), &[TestKey::new("alpha", 0)]);
    let config = KeysConfig::default();
    let (keys, _) = Keys::start(Arc::clone(&guest), registry, config).expect("a thread");
    let clock = ManualClock::new();
    let service = Service { keys, clock };
    service.update("alpha", Op::Inc, None).await.expect("made");
    let pausing = Arc::downgrade(&guest);
    guest.on_pause(move || {
        if let Some(guest) = pausing.upgrade() {
            assert_eq!(guest.register_again(), 0);
        }
    });
    let refused = service.keys.save(SaveRequest::to_nobody()).await;
    let text = refused.expect_err("not saved").to_string();
    assert!(text.contains("repeat the command"), "{text}");
    assert_eq!(guest.saved(), []);
}

#[test]
fn damaged_holds_are_refused() {
    assert!(CopiedHolds::decode(b"").expect("none").is_none());
    let ledger = Ledger::default();
    let (bytes, _) = ledger.encode().expect("small");
    assert!(CopiedHolds::decode(&bytes).expect("whole").is_some());
    for wrong in [&bytes[..bytes.len() - 1], b"{}", &[0xff; 40]] {
        CopiedHolds::decode(wrong).expect_err("damaged");
    }
}
