// SPDX-License-Identifier: Apache-2.0
//! Services that end at any write of their ledger, and their successors on the same guest.

mod boots;
mod copies;
mod full;
mod killed;
mod moved;
mod passed;
mod repeats;
mod tracepoints;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use patchbay_guest::testing::{Gate, InMemoryGuest, TestKey};
use static_keys::Op;

use super::super::claims::tests::request;
use super::*;
use crate::keys::claims::{Verdict, Want};
use crate::keys::registry::KernelTables;
use crate::keys::{
    KeyUpdate, Keys, KeysConfig, Registry, ReleaseRequest, RenewRequest, UpdateRequest,
};
use crate::testing::{ManualClock, found, listed_claims, listed_holds};

/// The contents that were written, the newest last, and how many more there is room for.
#[derive(Debug, Default)]
struct Disk {
    written: Vec<Vec<u8>>,
    /// The number of contents at which the disk is full; `None` for no limit.
    full_at: Option<usize>,
    /// Number of contents for which there was no room.
    refused: usize,
    /// The largest content; 0 for no limit.
    at_most: u64,
    /// The watchdog has left a mark, which tells whether the pending change was made.
    mark: Option<bool>,
}

#[derive(Clone, Debug, Default)]
struct Place(Arc<Mutex<Disk>>);

impl LedgerPlace for Place {
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.0.lock().expect("no panic");
        if disk.full_at.is_some_and(|full| disk.written.len() >= full) {
            disk.refused += 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        disk.written.push(bytes.to_vec());
        Ok(())
    }

    fn name(&self) -> String {
        "g.ledger".to_owned()
    }

    fn at_most(&self) -> u64 {
        match self.0.lock().expect("no panic").at_most {
            0 => u64::MAX,
            at_most => at_most,
        }
    }
}

impl Place {
    fn file(&self) -> LedgerFile {
        let disk = self.0.lock().expect("no panic");
        let newest = disk.written.last();
        LedgerFile {
            found: newest.map(|bytes| Ledger::decode(bytes).expect("whole")),
            mark: disk.mark.map(|made| Mark::new(&[0; 32], made, Vec::new())),
            place: Box::new(self.clone()),
            process: String::new(),
        }
    }

    fn writes(&self) -> usize {
        self.0.lock().expect("no panic").written.len()
    }

    /// Returns the disk in the state after this many writes.
    fn after(&self, writes: usize) -> Self {
        let disk = self.0.lock().expect("no panic");
        Self(Arc::new(Mutex::new(Disk {
            written: disk.written[..writes].to_vec(),
            ..Disk::default()
        })))
    }

    fn set_mark(&self, made: bool) {
        self.0.lock().expect("no panic").mark = Some(made);
    }

    /// Returns the content that was written last.
    fn newest(&self) -> Ledger {
        let disk = self.0.lock().expect("no panic");
        Ledger::decode(disk.written.last().expect("one")).expect("whole")
    }

    /// Lets what ends something fit, and nothing that adds something.
    fn fill(&self) {
        let mut disk = self.0.lock().expect("no panic");
        let newest = disk.written.last().expect("one").len();
        disk.at_most = 2 * newest as u64;
    }

    fn set_full(&self, full: bool) {
        match full {
            true => self.set_full_after(0),
            false => self.0.lock().expect("no panic").full_at = None,
        }
    }

    /// Lets the disk be full after this many more contents.
    fn set_full_after(&self, writes: usize) {
        let mut disk = self.0.lock().expect("no panic");
        disk.full_at = Some(disk.written.len() + writes);
    }

    /// Returns the number of contents for which there was no room.
    fn refused(&self) -> usize {
        self.0.lock().expect("no panic").refused
    }
}

struct Service {
    keys: Keys,
    clock: Arc<ManualClock>,
}

/// Boots a guest whose keys have no sites, so that a test can set their counts back.
fn boot() -> Arc<InMemoryGuest> {
    let registry = Arc::new(Registry::default());
    let keys = ["alpha", "beta", "gamma"].map(|name| TestKey::new(name, 0));
    InMemoryGuest::boot(registry, &keys)
}

/// Starts a service of a guest that is running, which finds its kernel.
fn serve(guest: &Arc<InMemoryGuest>, place: &Place) -> Service {
    start(guest, place, Some(found(guest))).0
}

/// Starts a service that has found this kernel.
fn start(
    guest: &Arc<InMemoryGuest>,
    place: &Place,
    kernel: Option<KernelTables>,
) -> (Service, Arc<Registry>) {
    start_with(guest, place.file(), kernel)
}

fn start_with(
    guest: &Arc<InMemoryGuest>,
    ledger: LedgerFile,
    kernel: Option<KernelTables>,
) -> (Service, Arc<Registry>) {
    let registry = Arc::new(Registry::default());
    let clock = ManualClock::new();
    let config = KeysConfig {
        ledger: Some(ledger),
        clock: Arc::<ManualClock>::clone(&clock),
        ..KeysConfig::default()
    };
    registry.attach(guest.ram().clone());
    if let Some(kernel) = kernel {
        registry.register_kernel(kernel).expect("taken");
    }
    let (keys, _) =
        Keys::start(Arc::clone(guest), Arc::clone(&registry), config).expect("a thread");
    (Service { keys, clock }, registry)
}

impl Service {
    /// Lets a service that has found no kernel yet find the guest's, and adopt its ledger.
    async fn find_kernel(&self, guest: &InMemoryGuest, registry: &Registry) {
        registry.register_kernel(found(guest)).expect("taken");
        let adopted = self.keys.adopt_ledger().await;
        adopted.expect("the kernel is known");
    }

    async fn update(&self, name: &str, op: Op, ttl: Option<u64>) -> Result<(), KeysError> {
        let second = Duration::from_secs(1);
        let deadline = Instant::now() + Duration::from_secs(10);
        let updates = vec![KeyUpdate::new(name, op)];
        let mut request = UpdateRequest::new(updates, "uid:7", second, deadline);
        request.ttl = ttl.map(Duration::from_secs);
        request.reason = "incident".to_owned();
        self.keys.update(request).await.map(drop)
    }

    async fn claim(
        &self,
        name: &str,
        generation: u64,
        claims: &[(&str, Want)],
    ) -> Result<(), KeysError> {
        self.keys
            .set_claims(request(name, generation, claims))
            .await
            .map(drop)
    }

    async fn release(&self, id: &str) -> Result<(), KeysError> {
        let request = ReleaseRequest {
            ids: vec![id.to_owned()],
            caller: "uid:7".into(),
            force: false,
            request_id: None,
            summary_only: true,
            stop_timeout: Duration::from_secs(1),
            deadline: Instant::now() + Duration::from_secs(10),
        };
        self.keys.release(request).await.map(drop)
    }

    async fn renew(&self, id: &str, ttl: Option<Duration>) -> Result<(), KeysError> {
        let ids = vec![id.to_owned()];
        let caller = "uid:7".into();
        let request = RenewRequest { ids, caller, ttl };
        self.keys.renew(request).await.map(drop)
    }

    /// Returns the ids, keys and references of the holds.
    async fn holds(&self) -> Vec<(String, String, u32)> {
        self.keys.tick().await.expect("it runs");
        let holds = listed_holds(&self.keys).into_iter();
        holds
            .map(|hold| (hold.id, hold.key.to_string(), hold.references))
            .collect()
    }

    async fn claims(&self) -> Vec<(String, String, Verdict)> {
        self.keys.tick().await.expect("it runs");
        let claims = listed_claims(&self.keys).into_iter();
        claims
            .map(|view| (view.key, view.claim.owner.name.clone(), view.verdict))
            .collect()
    }
}

#[tokio::test]
async fn holds_claims_and_expiries_continue() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.update("alpha", Op::Inc, None).await.expect("made");
    first
        .update("alpha", Op::Inc, Some(60))
        .await
        .expect("made");
    first
        .claim("a", 4, &[("beta", Want::On)])
        .await
        .expect("made");
    let (holds, claims) = (first.holds().await, first.claims().await);
    let ledger = first.keys.incarnation().ledger().to_owned();
    drop(first);
    let second = serve(&guest, &place);
    assert_eq!(second.keys.incarnation().ledger(), ledger);
    let without = serve(&guest, &Place::default());
    assert_ne!(without.keys.incarnation().ledger(), ledger);
    drop(without);
    assert_eq!(second.holds().await, holds, "with their ids");
    assert_eq!(second.claims().await, claims);
    assert_eq!(claims, [("beta".to_owned(), "a".to_owned(), Verdict::Made)]);
    // The generations are still known.
    let error = second
        .claim("a", 3, &[("gamma", Want::On)])
        .await
        .expect_err("stale");
    assert_eq!(error.reason(), "GENERATION_STALE");
    // The process that runs now ends the expired holds.
    second.clock.advance(Duration::from_secs(61));
    second.keys.tick().await.expect("it runs");
    assert_eq!(guest.count("alpha"), 1);
    // A new hold has a new id.
    second.update("gamma", Op::Inc, None).await.expect("made");
    let ids = second.holds().await;
    assert!(
        ids.iter()
            .all(|(id, key, _)| key != "gamma" || holds.iter().all(|(old, ..)| old != id))
    );
    second.claim("a", 5, &[]).await.expect("undo");
    second
        .update("alpha", Op::Dec, None)
        .await
        .expect("its own reference");
    assert_eq!((guest.count("alpha"), guest.count("beta")), (0, 0));
}

/// The owner of a set of claims, its generation, and the claims.
type Set<'a> = (&'a str, u64, &'a [(&'a str, Want)]);

/// The service ends after each of its writes, once with the change made and once without.
#[tokio::test]
async fn a_service_may_die_at_any_write() {
    let steps: [Set<'_>; 5] = [
        ("a", 1, &[("alpha", Want::On), ("beta", Want::Held)]),
        ("b", 1, &[("alpha", Want::Off)]),
        ("a", 2, &[("beta", Want::Held)]),
        ("b", 2, &[]),
        ("a", 3, &[]),
    ];
    for die_at in 0..steps.len() {
        for made in [false, true] {
            let (guest, place) = (boot(), Place::default());
            let counts = || ["alpha", "beta"].map(|name| guest.count(name));
            let first = serve(&guest, &place);
            for (name, generation, claims) in &steps[..die_at] {
                first.claim(name, *generation, claims).await.expect("made");
            }
            let before = counts();
            let (writes, (name, generation, claims)) = (place.writes(), steps[die_at]);
            first.claim(name, generation, claims).await.expect("made");
            drop(first);
            if !made {
                for (name, count) in ["alpha", "beta"].into_iter().zip(before) {
                    guest.set_count(name, count);
                }
            }
            // The first write of the step contains the pending change, if there is one.
            let second = serve(&guest, &place.after(writes + 1));
            for (name, generation, claims) in &steps[die_at..] {
                second
                    .claim(name, *generation, claims)
                    .await
                    .expect("made, or answered");
            }
            assert_eq!(counts(), [0, 0], "died in step {die_at}, made: {made}");
            assert_eq!(second.claims().await, []);
            assert_eq!(second.holds().await, []);
        }
    }
}

#[tokio::test]
async fn a_full_disk_changes_nothing() {
    let (guest, place) = (boot(), Place::default());
    let service = serve(&guest, &place);
    service.update("alpha", Op::Inc, None).await.expect("made");
    let holds = service.holds().await;
    place.set_full(true);
    for result in [
        service.update("beta", Op::Inc, None).await,
        service.update("alpha", Op::Dec, None).await,
        service.claim("a", 1, &[("beta", Want::On)]).await,
        service.claim("b", 1, &[("nothing", Want::On)]).await,
    ] {
        assert_eq!(result.expect_err("full").reason(), "LEDGER_UNWRITABLE");
    }
    let renewal = service.renew(&holds[0].0, Some(Duration::from_secs(1)));
    let error = renewal.await.expect_err("full");
    assert_eq!(error.reason(), "LEDGER_UNWRITABLE");
    assert_eq!((guest.count("alpha"), guest.count("beta")), (1, 0));
    assert_eq!(service.holds().await, holds);
    place.set_full(false);
    // The next claim takes over the reference of the previous claim, and no count changes.
    let on = [("gamma", Want::On)];
    service.claim("a", 2, &on).await.expect("made");
    place.set_full(true);
    let error = service.claim("b", 2, &on).await.expect_err("full");
    assert_eq!(error.reason(), "LEDGER_UNWRITABLE");
    place.set_full(false);
    let made = [("gamma".to_owned(), "a".to_owned(), Verdict::Made)];
    assert_eq!(service.claims().await, made);
    service.claim("b", 3, &[]).await.expect("nothing to end");
    service.claim("a", 3, &[]).await.expect("cleared");
    assert_eq!(guest.count("gamma"), 0);
    service.clock.advance(Duration::from_secs(3600));
    assert_eq!(service.holds().await, holds, "the renewal is undone");
    service
        .claim("a", 4, &[("beta", Want::On)])
        .await
        .expect("room again");
    assert_eq!(guest.count("beta"), 1);
}

#[tokio::test]
async fn the_ledger_of_another_boot_is_forgotten() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first
        .claim("a", 4, &[("beta", Want::On)])
        .await
        .expect("made");
    first.update("alpha", Op::Inc, None).await.expect("made");
    let earlier = first.holds().await;
    drop(first);
    guest.run(&["alpha", "beta", "gamma"].map(|name| TestKey::new(name, 0)));
    let second = serve(&guest, &place);
    assert_eq!(
        (second.claims().await, second.holds().await),
        (vec![], vec![])
    );
    // The requests of the earlier boot do not name a later hold.
    second.update("alpha", Op::Inc, None).await.expect("made");
    second.update("alpha", Op::Inc, None).await.expect("made");
    let later = second.holds().await;
    assert!(
        later
            .iter()
            .all(|(id, ..)| earlier.iter().all(|(old, ..)| old != id))
    );
    second
        .claim("a", 1, &[("beta", Want::On)])
        .await
        .expect("no fence of another boot");
}

/// A generation counts as soon as its request was seen, even if the guest was too busy for the
/// change.
#[tokio::test]
async fn a_generation_that_was_refused_fences_in_the_next_service() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first
        .claim("a", 1, &[("beta", Want::On)])
        .await
        .expect("made");
    guest.set_gate(Gate::SystemState, 0);
    let mut busy = request("a", 2, &[]);
    busy.deadline = Instant::now() + Duration::from_millis(50);
    let error = first.keys.set_claims(busy).await.expect_err("busy");
    assert_eq!(error.reason(), "GUEST_BUSY");
    drop(first);
    guest.set_gate(Gate::SystemState, 2);
    let second = serve(&guest, &place);
    let error = second
        .claim("a", 1, &[("beta", Want::On)])
        .await
        .expect_err("late");
    assert_eq!(error.reason(), "GENERATION_STALE");
    assert_eq!(
        guest.count("beta"),
        1,
        "the claim stands until generation 2 is made"
    );
    second.claim("a", 2, &[]).await.expect("made");
    assert_eq!(guest.count("beta"), 0);
}

/// The guest changes keys while no service runs.
#[tokio::test]
async fn what_the_guest_has_changed_meanwhile_is_void() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.update("alpha", Op::Inc, None).await.expect("made");
    first
        .claim("a", 1, &[("beta", Want::On)])
        .await
        .expect("made");
    drop(first);
    guest.set_count("alpha", 0);
    guest.set_count("beta", 0);
    let second = serve(&guest, &place);
    assert_eq!(second.holds().await, []);
    let void = [("beta".to_owned(), "a".to_owned(), Verdict::Void)];
    assert_eq!(second.claims().await, void);
}

/// A client does not wait until the service has searched for the kernel by itself.
#[tokio::test]
async fn the_first_command_of_the_next_service_finds_the_holds() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.update("alpha", Op::Inc, None).await.expect("made");
    first.update("beta", Op::Inc, None).await.expect("made");
    let holds = first.holds().await;
    let claimed = first.claim("a", 4, &[("gamma", Want::On)]).await;
    claimed.expect("made");
    drop(first);
    let id = |name: &str| {
        let hold = holds.iter().find(|(_, key, _)| key == name);
        hold.expect("held").0.clone()
    };
    // Each service finds the file as the first one left it, and the kernel only after a search.
    let (mut services, last) = (Vec::new(), place.writes());
    for _ in 0..3 {
        let (service, registry) = start(&guest, &place.after(last), None);
        let error = service.keys.adopt_ledger().await.expect_err("no kernel");
        assert_eq!(error.reason(), "GUEST_NOT_REGISTERED");
        registry.register_kernel(found(&guest)).expect("taken");
        services.push(service);
    }
    let [released, renewed, listed] = &services[..] else {
        unreachable!("three")
    };
    released.release(&id("alpha")).await.expect("continued");
    assert_eq!(guest.count("alpha"), 0);
    renewed.renew(&id("beta"), None).await.expect("continued");
    listed
        .keys
        .adopt_ledger()
        .await
        .expect("the kernel is known");
    assert_eq!(listed_claims(&listed.keys).len(), 1);
}

/// Before the kernel is known, an empty list would be wrong. The file is the only copy of the
/// state.
#[tokio::test]
async fn the_ledger_waits_for_the_kernel() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    first.update("alpha", Op::Inc, None).await.expect("made");
    let holds = first.holds().await;
    drop(first);
    let writes = place.writes();
    let (second, registry) = start(&guest, &place, None);
    for result in [
        second.keys.adopt_ledger().await,
        second.renew(&holds[0].0, None).await,
        second.release(&holds[0].0).await,
        second.claim("a", 1, &[("beta", Want::On)]).await,
    ] {
        assert_eq!(
            result.expect_err("no kernel").reason(),
            "GUEST_NOT_REGISTERED"
        );
    }
    assert_eq!(place.writes(), writes, "nothing replaces the file");
    second.find_kernel(&guest, &registry).await;
    assert_eq!(second.holds().await, holds);
    let nothing = serve(&boot(), &Place::default());
    nothing.keys.adopt_ledger().await.expect("nothing to adopt");
}

/// References that an OFF has taken from a module's key are not given to the key of the same name
/// in a module that is loaded later.
#[tokio::test]
async fn claims_on_a_key_that_is_elsewhere_are_void() {
    let (guest, place) = (boot(), Place::default());
    guest.set_count("alpha", 1);
    let first = serve(&guest, &place);
    let mut off = request("a", 1, &[("alpha", Want::Off)]);
    off.force = true;
    first.keys.set_claims(off).await.expect("made");
    assert_eq!(guest.count("alpha"), 0);
    drop(first);
    let boot = found(&guest).boot;
    // The keys have the same names at other addresses.
    guest.run(&["gamma", "beta", "alpha"].map(|name| TestKey::new(name, 0)));
    let mut tables = found(&guest);
    tables.boot = boot;
    let (second, _) = start(&guest, &place, Some(tables));
    let void = [("alpha".to_owned(), "a".to_owned(), Verdict::Void)];
    assert_eq!(second.claims().await, void);
    second.claim("a", 2, &[]).await.expect("cleared");
    assert_eq!(guest.count("alpha"), 0, "another key");
}

/// The first service cannot return a key's references, and ends before it can.
#[tokio::test]
async fn the_next_service_returns_a_key_that_was_not_returned_yet() {
    let registry = Arc::new(Registry::default());
    let guest = InMemoryGuest::boot(registry, &[TestKey::new("alpha", 1)]);
    let place = Place::default();
    let first = serve(&guest, &place);
    let made = first.claim("a", 1, &[("alpha", Want::Held)]).await;
    made.expect("made");
    let site = guest.sites("alpha")[0];
    let bytes: [u8; 5] = guest.read(site);
    guest.write(site, &[0xcc; 5]);
    let error = first.claim("a", 2, &[]).await.expect_err("foreign");
    assert_eq!(error.reason(), "FOREIGN_BYTES");
    first.claim("a", 2, &[]).await.expect("left out");
    assert_eq!((guest.count("alpha"), first.claims().await), (1, vec![]));
    drop(first);
    guest.write(site, &bytes);
    let second = serve(&guest, &place);
    assert_eq!(second.holds().await.len(), 1);
    second.clock.advance(Duration::from_secs(1));
    assert_eq!(second.holds().await, []);
    assert_eq!(guest.count("alpha"), 0);
}
