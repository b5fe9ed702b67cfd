// SPDX-License-Identifier: Apache-2.0
//! Guests that are reset, or stopped and resumed by another client, while a service runs.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use patchbay_guest::discovery::Discoverable;
use patchbay_memory::{Cpu, OutsideMemory, PhysicalMemory};
use static_keys::GateKind;

use super::*;
use crate::keys::SystemClock;
use crate::keys::audit::AuditLog;
use crate::keys::executor::Settings;
use crate::keys::shared::Shared;
use crate::keys::symbols::Symbols;
use crate::testing::found_after;

/// Serves a guest with a hold on alpha, an ON on beta, and an OFF that has taken away the guest's
/// own reference to gamma.
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
    // The death of the service does not bring the references back.
    let written = place.writes();
    drop(service);
    for (name, count) in [("alpha", 1), ("beta", 1), ("gamma", 0)] {
        guest.set_count(name, count);
    }
    let (next, _) = start(&guest, &place.after(written), Some(found_after(&guest, 0)));
    assert_eq!(next.holds().await, []);
}

/// No command is sent for a long time after `loadvm`.
#[tokio::test]
async fn an_earlier_state_of_the_guest_is_noticed_without_a_command() {
    let (guest, _place, service, registry) = held().await;
    service.keys.tick().await.expect("it runs");
    for (name, count) in [("alpha", 0), ("beta", 0), ("gamma", 1)] {
        guest.set_count(name, count);
    }
    registry
        .register_kernel(found_after(&guest, 1))
        .expect("taken");
    service.clock.advance(LOOK_INTERVAL);
    service.keys.tick().await.expect("it runs");
    // The guest's own code has taken as many references as were lost.
    guest.set_count("alpha", 1);
    guest.set_count("beta", 1);
    service.keys.adopt_ledger().await.expect("nothing waits");
    assert_eq!(service.holds().await, []);
    let claims = service.claims().await;
    assert!(claims.iter().all(|(.., state)| *state == Verdict::Void));
}

/// A guest whose kernel cannot be found.
#[derive(Debug, Default)]
struct Unknown {
    resets: AtomicU64,
    /// The number of requests for registers; each look makes several.
    asked: AtomicUsize,
}

impl PhysicalMemory for Unknown {
    fn ram(&self) -> Vec<Range<u64>> {
        Vec::new()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
        let length = bytes.len();
        Err(OutsideMemory { address, length })
    }
}

impl Discoverable for Unknown {
    fn memory(&self) -> &dyn PhysicalMemory {
        self
    }

    fn cpus(&self) -> Result<Option<Vec<Cpu>>, String> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Ok(Some(Vec::new()))
    }

    fn resets(&self) -> u64 {
        self.resets.load(Ordering::SeqCst)
    }

    fn confirms(&self) -> bool {
        false
    }

    fn is_held(&self) -> bool {
        false
    }

    fn memory_changes(&self, _anyway: bool) -> u64 {
        0
    }
}

/// The guest is busy, or in its firmware, at the first look after `loadvm`.
#[tokio::test]
async fn a_kernel_that_was_not_found_again_is_looked_for_without_a_command() {
    let (_guest, _place, service, registry) = held().await;
    let unknown = Arc::new(Unknown::default());
    registry.discover(unknown.clone(), None);
    let asked = || unknown.asked.load(Ordering::SeqCst);
    let mut last = asked();
    // A look soon after a failure is put off, unless the guest was reset again.
    for resets in 1..4 {
        unknown.resets.store(resets, Ordering::SeqCst);
        service.clock.advance(LOOK_INTERVAL);
        service.keys.tick().await.expect("it runs");
        registry.known().expect_err("it is not known");
        assert!(asked() > last, "look {resets}");
        last = asked();
    }
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
    // The next process finds references that were taken after the reset, although it has seen no
    // reset.
    service.update("gamma", Op::Inc, None).await.expect("made");
    let claimed = service.claim("a", 1, &[("beta", Want::Held)]).await;
    claimed.expect("no fence of the boot before");
    let (holds, claims) = (service.holds().await, service.claims().await);
    drop(service);
    let (next, _) = start(&guest, &place, Some(found(0)));
    assert_eq!(next.holds().await, holds);
    assert_eq!(next.claims().await, claims);
}

/// An OFF has no hold. The next process cannot tell the boot before the reset from this one.
#[tokio::test]
async fn a_reset_of_a_kernel_whose_boots_are_alike_is_kept() {
    let (guest, place) = (boot(), Place::default());
    let found = |resets| {
        let mut tables = found_after(&guest, resets);
        let kernel = tables.discovery.as_mut().expect("it was found");
        kernel.missing_gates.push(GateKind::SameKernel.name());
        tables
    };
    guest.set_count("gamma", 2);
    let (service, registry) = start(&guest, &place, Some(found(0)));
    let mut off = request("a", 7, &[("gamma", Want::Off)]);
    off.force = true;
    service.keys.set_claims(off).await.expect("made");
    registry.register_kernel(found(1)).expect("taken");
    service.keys.adopt_ledger().await.expect("nothing waits");
    drop(service);
    let (next, _) = start(&guest, &place, Some(found(0)));
    assert_eq!(next.claims().await, []);
    let made = next.claim("a", 1, &[]).await;
    made.expect("no fence of the boot before");
    assert_eq!(guest.count("gamma"), 0, "nobody gives back two references");
}

/// Returns the state of an executor thread, for a guest whose kernel was found.
fn executor(
    guest: &Arc<InMemoryGuest>,
    file: LedgerFile,
) -> (Executor<InMemoryGuest>, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    registry.attach(guest.ram().clone());
    registry
        .register_kernel(found_after(guest, 0))
        .expect("taken");
    let symbols = Symbols::default();
    let shared = Shared::new(Arc::clone(&registry), symbols, Arc::new(SystemClock));
    let (audit, settings) = (AuditLog::default(), Settings::default());
    let executor = Executor::new(Arc::clone(guest), Arc::new(shared), audit, settings);
    let executor = executor.keeping(Keeper::new(Some(file), None, &mut Incarnation::new()));
    (executor, registry)
}

/// A reset is noticed between the search for the kernel and the adoption.
#[test]
fn an_outdated_registration_is_not_followed() {
    let (guest, place) = (boot(), Place::default());
    let mut file = place.file();
    file.found = Some(Ledger::default());
    let (mut executor, registry) = executor(&guest, file);
    let outdated = registry.snapshot().expect("known");
    registry
        .register_kernel(found_after(&guest, 1))
        .expect("taken");
    assert!(!executor.follow_registration(&outdated));
    assert!(executor.ledger.waits(), "it is not forgotten");
    executor.snapshot().expect("the newer one");
    assert!(!executor.ledger.waits());
}

/// The same boot still has sites that were undone in part. Foreign bytes may have gone, and are
/// found again if not.
#[test]
fn a_key_that_was_undone_in_part_stays_in_quarantine() {
    let guest = boot();
    let (mut executor, registry) = executor(&guest, Place::default().file());
    let quarantined = |executor: &Executor<InMemoryGuest>| {
        let registration = registry.snapshot().expect("known").registration;
        let book = executor.shared.book();
        let keys = ["alpha", "beta"].map(|name| {
            let key = registration.catalog.find(name).expect("it is there");
            registration.instance(key)
        });
        keys.map(|key| (key, book.quarantine.contains_key(&key)))
    };
    executor.snapshot().expect("known");
    let [(alpha, _), (beta, _)] = quarantined(&executor);
    for (key, cause) in [
        (alpha, QuarantineCause::UndoIncomplete),
        (beta, QuarantineCause::ForeignBytes),
    ] {
        let message = String::new();
        let why = Quarantine { cause, message };
        executor.shared.book().quarantine.insert(key, why);
    }
    registry
        .register_kernel(found_after(&guest, 1))
        .expect("taken");
    executor.snapshot().expect("known");
    let [(again, is_quarantined), (_, other)] = quarantined(&executor);
    assert_ne!(again, alpha, "another epoch");
    assert!(is_quarantined && !other);
    assert_eq!(executor.shared.book().quarantine.len(), 1);
}

/// Checks that a client can tell that claims which were made in this boot are gone, and cannot make
/// them again, after a snapshot of an earlier boot was loaded.
#[tokio::test]
async fn the_earlier_claims_of_a_boot_that_comes_back_are_known_to_be_gone() {
    let (guest, place) = (boot(), Place::default());
    let (service, registry) = start(&guest, &place, Some(found(&guest)));
    let set = |generation, claims: &[(&str, Want)], after: Option<u64>| {
        let mut request = request("a", generation, claims);
        let ledger = service.keys.incarnation().ledger().to_owned();
        request.after = after.map(|after| (ledger, after));
        service.keys.set_claims(request)
    };
    let on = [("beta", Want::On)];
    let first = set(4, &on, None).await.expect("made");
    assert_eq!(first.generation_before, 0);
    let second = set(6, &on, Some(4)).await.expect("made");
    assert_eq!(second.generation_before, 4);
    let repeated = set(6, &on, Some(4)).await.expect("answered");
    assert_eq!((repeated.repeated, repeated.generation_before), (true, 4));
    let early = set(7, &on, Some(7)).await.expect_err("not made yet");
    assert_eq!(early.reason(), "LEDGER_LOST");

    let keys = ["alpha", "beta", "gamma"].map(|name| TestKey::new(name, 0));
    guest.run(&keys);
    service.find_kernel(&guest, &registry).await;
    let lost = set(8, &on, Some(6)).await.expect_err("another boot");
    assert_eq!((lost.reason(), guest.count("beta")), ("LEDGER_LOST", 0));
    // An empty set is taken, and does not count as claims that were made.
    for generation in [9, 10] {
        let released = set(generation, &[], None).await.expect("nothing to end");
        assert_eq!(released.generation_before, 0);
    }
    let lost = set(11, &on, Some(9)).await.expect_err("empty");
    assert_eq!(lost.reason(), "LEDGER_LOST");
}
