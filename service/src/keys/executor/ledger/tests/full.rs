// SPDX-License-Identifier: Apache-2.0
//! Disks and ledgers that are full, and what the guest's watchdog is told then.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use patchbay_guest::testing::Told;

use super::*;
use crate::keys::RepairRequest;

/// Serves a guest that is stopped for each change. The disk is full after the first one has begun.
async fn made_on_a_full_disk() -> (Arc<InMemoryGuest>, Place, Service) {
    let keys = ["alpha", "beta"].map(|name| TestKey::new(name, 1));
    let guest = InMemoryGuest::boot(Arc::new(Registry::default()), &keys);
    let place = Place::default();
    let mut tables = found(&guest);
    tables.promises.fence = false;
    let (service, _) = start(&guest, &place, Some(tables));
    let disk = place.clone();
    guest.on_check(move || disk.set_full(true));
    service.update("alpha", Op::Inc, None).await.expect("made");
    assert!(place.newest().pending.is_some(), "the outcome is missing");
    (guest, place, service)
}

/// Returns the digest of the ledger with the first change, which was made.
fn first(guest: &InMemoryGuest) -> [u8; 32] {
    match guest.told()[..] {
        [
            Told::WillKeep { ledger, replaced },
            Told::WillWrite(of),
            Told::Begins,
            Told::Made,
        ] => {
            assert_eq!((of, replaced), (Some(ledger), None));
            ledger
        }
        ref told => panic!("{told:?}"),
    }
}

/// A watchdog that forgot the first change would leave no mark beside the ledger that has it.
#[tokio::test]
async fn the_change_that_the_ledger_has_is_told_with_the_one_that_it_may_get() {
    let (guest, place, service) = made_on_a_full_disk().await;
    let first = first(&guest);
    for _ in 0..2 {
        let refused = service.update("beta", Op::Inc, None).await;
        assert_eq!(refused.expect_err("full").reason(), "LEDGER_UNWRITABLE");
        match guest.told()[..] {
            [Told::WillKeep { replaced, .. }] => assert_eq!(replaced, Some(first)),
            ref told => panic!("{told:?}"),
        }
    }
    place.set_full(false);
    service.update("beta", Op::Inc, None).await.expect("room");
    let told = guest.told();
    assert_eq!(told.len(), 4, "{told:?}");
    assert_eq!(told[3], Told::Made);
}

/// The change needs no stop, so the guest's watchdog does not learn that it was made, and must not
/// tell the next service that it was not.
#[tokio::test]
async fn holds_and_claims_made_without_a_stop_on_a_full_disk_continue() {
    for is_claim in [false, true] {
        let (guest, place) = (boot(), Place::default());
        guest.set_count("alpha", 1);
        let mut tables = found(&guest);
        tables.promises.fence = true;
        let (first, _) = start(&guest, &place, Some(tables));
        // Only the pending change fits.
        place.set_full_after(1);
        let made = match is_claim {
            true => first.claim("a", 1, &[("alpha", Want::Held)]).await,
            false => first.update("alpha", Op::Inc, None).await,
        };
        made.expect("made");
        assert_eq!(guest.count("alpha"), 2);
        assert!(place.newest().pending.is_some(), "the outcome is missing");
        match guest.told()[..] {
            [
                Told::WillKeep { ledger, .. },
                Told::WillWriteRunning(forgotten),
            ] => assert_eq!(forgotten, ledger),
            ref told => panic!("{told:?}"),
        }
        drop(first);
        // The service was killed. Its watchdog has forgotten the change, so there is no mark.
        let second = serve(&guest, &place.after(1));
        let holds = second.holds().await;
        assert_eq!(holds.len(), 1, "{holds:?}");
        let released = match is_claim {
            true => second.claim("a", 2, &[]).await,
            false => second.release(&holds[0].0).await,
        };
        released.expect("its own");
        assert_eq!(guest.count("alpha"), 1, "no reference is left");
    }
}

/// The writes of a repair are not those of the change that the ledger has.
#[tokio::test]
async fn a_repair_is_told_as_a_change_of_its_own() {
    let (guest, _place, service) = made_on_a_full_disk().await;
    first(&guest);
    let site = guest.sites("beta")[0];
    guest.set_count("beta", 1);
    let jump: [u8; 5] = guest.read(site);
    guest.set_count("beta", 0);
    guest.write(site, &jump);
    let request = RepairRequest {
        name: "beta".to_owned(),
        caller: "uid:0".into(),
        reason: String::new(),
        validate_only: false,
        stop_timeout: Duration::from_secs(1),
        deadline: Instant::now() + Duration::from_secs(10),
    };
    let repaired = service.keys.repair(request).await.expect("repaired");
    assert_eq!(repaired.sites.len(), 1);
    let told = [Told::WillWrite(None), Told::Begins, Told::Made];
    assert_eq!(guest.told(), told);
}

/// Nobody sends a command, and the guest's counts may change until the service is killed.
#[tokio::test]
async fn an_outcome_is_written_once_there_is_room() {
    let (_guest, place, service) = made_on_a_full_disk().await;
    service.clock.advance(FIRST_DELAY);
    service.keys.tick().await.expect("it runs");
    assert!(place.newest().pending.is_some(), "still full");
    place.set_full(false);
    service.clock.advance(2 * FIRST_DELAY);
    service.keys.tick().await.expect("it runs");
    let ledger = place.newest();
    assert!(ledger.pending.is_none());
    assert_eq!(ledger.now.holds.len(), 1);
    let writes = place.writes();
    service.clock.advance(LAST_DELAY);
    service.keys.tick().await.expect("it runs");
    assert_eq!(place.writes(), writes, "nothing is late");
}

/// Another owner has claimed the key, so the set changes no count and has no outcome of a change.
#[tokio::test]
async fn a_generation_that_was_refused_on_a_full_disk_is_written_once_there_is_room() {
    let (guest, place) = (boot(), Place::default());
    let first = serve(&guest, &place);
    let on = [("beta", Want::On)];
    first.claim("a", 1, &on).await.expect("made");
    place.set_full(true);
    let error = first.claim("b", 4, &on).await.expect_err("full");
    assert_eq!(error.reason(), "LEDGER_UNWRITABLE");
    place.set_full(false);
    first.clock.advance(FIRST_DELAY);
    first.keys.tick().await.expect("it runs");
    drop(first);
    let second = serve(&guest, &place);
    let error = second.claim("b", 3, &on).await.expect_err("late");
    assert_eq!(error.reason(), "GENERATION_STALE");
    assert_eq!(guest.count("beta"), 1);
}

/// A large ledger would keep the executor busy on a disk that stays full.
#[tokio::test]
async fn holds_and_claims_that_stay_late_are_written_ever_more_rarely() {
    let (_guest, place, service) = made_on_a_full_disk().await;
    let mut refused = place.refused();
    for delay in [1, 2, 4, 8, 16, 32, 60, 60].map(|halves| FIRST_DELAY * halves) {
        let just_before = delay - Duration::from_millis(1);
        for (time, more) in [(just_before, 0), (Duration::from_millis(1), 1)] {
            service.clock.advance(time);
            service.keys.tick().await.expect("it runs");
            refused += more;
            assert_eq!(place.refused(), refused, "{delay:?}");
        }
    }
    place.set_full(false);
    service.clock.advance(LAST_DELAY);
    service.keys.tick().await.expect("it runs");
    assert!(place.newest().pending.is_none());
    // The next change fills the disk too. Its outcome is late for the short time only.
    service.update("beta", Op::Inc, None).await.expect("made");
    place.set_full(false);
    service.clock.advance(FIRST_DELAY);
    service.keys.tick().await.expect("it runs");
    assert!(place.newest().pending.is_none());
}

/// The owner that clears its claims lets another one decide, whose ON takes a reference.
#[tokio::test]
async fn an_owner_can_clear_its_claims_in_a_ledger_that_is_full() {
    let (guest, place) = (boot(), Place::default());
    let service = serve(&guest, &place);
    let on = service.claim("b", 1, &[("beta", Want::On)]).await;
    on.expect("made");
    let off = service.claim("a", 1, &[("beta", Want::Off)]).await;
    off.expect("made");
    assert_eq!(guest.count("beta"), 0);
    for seconds in 1..20 {
        let taken = service.update("alpha", Op::Inc, Some(3600 + seconds));
        taken.await.expect("room");
    }
    place.fill();
    let held = service.claim("c", 1, &[("beta", Want::Held)]).await;
    assert_eq!(held.expect_err("it adds").reason(), "LEDGER_UNWRITABLE");
    service.claim("a", 2, &[]).await.expect("it ends something");
    assert_eq!(guest.count("beta"), 1, "the ON decides again");
}

/// A file system in memory, unmounted on drop.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    /// Mounts a small file system. Prints a message and returns `None` if that is not permitted.
    fn mount() -> Option<Self> {
        let folder = Self(tempfile::tempdir().expect("temporary folder"));
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs"])
            .arg(folder.0.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(folder),
            refused => {
                eprintln!("SKIPPED: it mounts a tmpfs, which needs root: {refused:?}");
                None
            }
        }
    }

    /// Fills the file system. Returns the file that fills it.
    fn fill(&self) -> PathBuf {
        let path = self.0.path().join("filler");
        let mut file = File::create(&path).expect("its own");
        while file.write_all(&[0; 4096]).is_ok() {}
        path
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// The folder of the ledger is on a disk that really has no room.
#[tokio::test]
async fn a_full_file_system_refuses_a_change_before_its_first_byte() {
    let Some(disk) = Tmpfs::mount() else { return };
    let guest = InMemoryGuest::boot(Arc::new(Registry::default()), &[TestKey::new("alpha", 1)]);
    let path = disk.0.path().join("g.ledger");
    let site = guest.sites("alpha")[0];
    let before: [u8; 5] = guest.read(site);
    for (had_ledger, generation) in [(false, 1), (true, 4)] {
        let filler = disk.fill();
        let file = LedgerFile::open(&path, "").expect("nothing is written yet");
        let (service, _) = start_with(&guest, file, Some(found(&guest)));
        let content = std::fs::read(&path).ok();
        assert_eq!(content.is_some(), had_ledger);
        for result in [
            service.claim("a", generation, &[("alpha", Want::On)]).await,
            service.update("alpha", Op::Inc, None).await,
        ] {
            let error = result.expect_err("full");
            assert_eq!(error.reason(), "LEDGER_UNWRITABLE");
            assert!(error.to_string().contains("No space left"), "{error}");
        }
        assert_eq!((guest.count("alpha"), guest.read(site)), (0, before));
        let told = guest.told();
        let told = told
            .iter()
            .all(|told| matches!(told, Told::WillKeep { .. }));
        assert!(told, "no write was announced");
        assert_eq!(std::fs::read(&path).ok(), content, "it stays as it was");
        let left = std::fs::read_dir(disk.0.path()).expect("a folder").count();
        assert_eq!(left, 1 + usize::from(had_ledger), "no part of a file");
        std::fs::remove_file(filler).expect("its own");
        let made = service
            .claim("a", generation + 1, &[("alpha", Want::On)])
            .await;
        made.expect("room");
        assert_eq!(guest.count("alpha"), 1);
        let cleared = service.claim("a", generation + 2, &[]).await;
        cleared.expect("room");
        assert_eq!((guest.count("alpha"), guest.read(site)), (0, before));
        guest.told();
    }
}
