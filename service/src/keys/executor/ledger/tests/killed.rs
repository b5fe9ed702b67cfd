// SPDX-License-Identifier: Apache-2.0
//! Services that are killed while a change is pending, and guests that continue to run.

use super::*;

/// Kills a service after the first write of its next call, and starts the next one.
struct Kill {
    guest: Arc<InMemoryGuest>,
    place: Place,
    service: Service,
    writes: usize,
}

impl Kill {
    /// Prepares to kill the service in its next call.
    fn next(guest: &Arc<InMemoryGuest>, place: &Place, service: Service) -> Self {
        Self {
            guest: Arc::clone(guest),
            place: place.clone(),
            service,
            writes: place.writes(),
        }
    }

    /// Returns the next service, which finds the pending change and the mark of a watchdog.
    fn restart(self, mark: Option<bool>) -> (Service, Place) {
        let place = self.place.after(self.writes + 1);
        assert!(place.newest().pending.is_some(), "the write has the change");
        drop(self.service);
        if let Some(made) = mark {
            place.set_mark(made);
        }
        (serve(&self.guest, &place), place)
    }
}

/// The guest changes one of the keys back itself. The owner is gone too, so only the expiry returns
/// the other keys.
#[tokio::test]
async fn an_expiry_survives_a_kill_and_a_key_that_the_guest_has_changed() {
    for mark in [None, Some(true)] {
        let (guest, place) = (boot(), Place::default());
        let kill = Kill::next(&guest, &place, serve(&guest, &place));
        let keys = ["alpha", "beta", "gamma"];
        let mut wanted = request("a", 1, &keys.map(|name| (name, Want::On)));
        wanted.ttl = Some(Duration::from_secs(60));
        let made = kill.service.keys.set_claims(wanted).await;
        made.expect("made");
        guest.set_count("beta", 0);
        let (next, _) = kill.restart(mark);
        let made = next.claims().await.into_iter();
        let made = made.filter(|(.., state)| *state == Verdict::Made);
        assert_eq!(made.count(), 2, "{mark:?}");
        next.clock.advance(Duration::from_secs(61));
        assert_eq!(next.claims().await, [], "{mark:?}");
        assert_eq!(keys.map(|name| guest.count(name)), [0; 3], "{mark:?}");
    }
}

/// The change was made, but the count is the one before it, because the guest has dropped a
/// reference.
#[tokio::test]
async fn a_reference_is_not_forgotten_because_the_guest_has_dropped_its_own() {
    let (guest, place) = (boot(), Place::default());
    guest.set_count("alpha", 3);
    let kill = Kill::next(&guest, &place, serve(&guest, &place));
    let taken = kill.service.update("alpha", Op::Inc, None).await;
    taken.expect("made");
    guest.set_count("alpha", 3);
    let (next, _) = kill.restart(Some(true));
    let holds = next.holds().await;
    assert_eq!(holds.len(), 1);
    next.release(&holds[0].0).await.expect("its own");
    assert_eq!(guest.count("alpha"), 2);
}

#[tokio::test]
async fn a_reference_of_the_guest_is_not_taken_for_one_that_was_released() {
    let (guest, place) = (boot(), Place::default());
    guest.set_count("alpha", 3);
    let service = serve(&guest, &place);
    let taken = service.update("alpha", Op::Inc, Some(60)).await;
    taken.expect("made");
    let id = service.holds().await[0].0.clone();
    let kill = Kill::next(&guest, &place, service);
    kill.service.release(&id).await.expect("its own");
    guest.set_count("alpha", 4);
    let (next, _) = kill.restart(Some(true));
    assert_eq!(next.holds().await, []);
    next.clock.advance(Duration::from_secs(61));
    next.keys.tick().await.expect("it runs");
    assert_eq!(guest.count("alpha"), 4);
}

/// The change was rolled back, and the guest has taken a reference since.
#[tokio::test]
async fn a_reference_of_the_guest_is_not_taken_for_one_that_was_rolled_back() {
    let (guest, place) = (boot(), Place::default());
    let kill = Kill::next(&guest, &place, serve(&guest, &place));
    let taken = kill.service.update("alpha", Op::Inc, None).await;
    taken.expect("made");
    let (next, _) = kill.restart(Some(false));
    assert_eq!((guest.count("alpha"), next.holds().await), (1, vec![]));
}

/// A pending change of one key takes the same room, however many others are held.
#[tokio::test]
async fn a_pending_change_has_only_what_it_touches() {
    let (guest, place) = (boot(), Place::default());
    let service = serve(&guest, &place);
    let claimed = service.claim("a", 1, &[("gamma", Want::On)]).await;
    claimed.expect("made");
    let taken = service.update("alpha", Op::Inc, None).await;
    taken.expect("made");
    let names = |pending: &Pending| {
        let holds = pending.holds.iter().map(|of| of.key.name.clone());
        let claims = pending.claims.keys().cloned();
        (holds.collect::<Vec<_>>(), claims.collect::<Vec<_>>())
    };
    let kill = Kill::next(&guest, &place, service);
    let taken = kill.service.update("beta", Op::Inc, None).await;
    taken.expect("made");
    let place = kill.place.after(kill.writes + 1);
    let pending = place.newest().pending.expect("the change");
    assert_eq!(names(&pending), (vec!["beta".to_owned()], vec![]));
    assert_eq!(pending.owners, []);
    let kill = Kill::next(&guest, &kill.place, kill.service);
    let claimed = kill.service.claim("b", 1, &[("alpha", Want::Held)]).await;
    claimed.expect("made");
    let place = kill.place.after(kill.writes + 1);
    let pending = place.newest().pending.expect("the change");
    let alpha = || vec!["alpha".to_owned()];
    assert_eq!(names(&pending), (alpha(), alpha()));
    assert_eq!(pending.owners.len(), 1, "not the one of gamma");
}

/// The same change is pending a second time. A mark of the first time says nothing about the
/// second.
#[tokio::test]
async fn no_two_pending_changes_have_one_digest() {
    let (guest, place) = (boot(), Place::default());
    let service = serve(&guest, &place);
    let mut pending = Vec::new();
    for _ in 0..2 {
        let writes = place.writes();
        service
            .update("alpha", Op::Enable, None)
            .await
            .expect("made");
        service
            .update("alpha", Op::Disable, None)
            .await
            .expect("made");
        for write in writes + 1..=place.writes() {
            let ledger = place.after(write).newest();
            if ledger.pending.is_some() {
                pending.push(ledger.serial);
            }
        }
    }
    let all = pending.len();
    pending.dedup();
    assert_eq!((pending.len(), all), (4, 4));
}

/// The disk is full when the next service has adopted the ledger, so it stays as it was. A mark of
/// the first change must not be that of the second.
#[tokio::test]
async fn the_same_change_of_the_next_service_has_another_digest() {
    let (guest, place) = (boot(), Place::default());
    let service = serve(&guest, &place);
    service.update("alpha", Op::Inc, None).await.expect("made");
    let id = service.holds().await[0].0.clone();
    let kill = Kill::next(&guest, &place, service);
    kill.service.release(&id).await.expect("its own");
    let place = kill.place.after(kill.writes + 1);
    let first = place.newest();
    guest.set_count("alpha", 1);
    drop(kill.service);
    place.set_mark(false);
    place.set_full(true);
    let next = serve(&guest, &place);
    assert_eq!(next.holds().await.len(), 1, "not released");
    place.set_full(false);
    next.release(&id).await.expect("its own");
    let second = place.after(kill.writes + 2).newest();
    assert_eq!(first.pending, second.pending);
    assert_ne!(first, second);
}
