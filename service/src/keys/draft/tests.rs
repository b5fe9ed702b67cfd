// SPDX-License-Identifier: Apache-2.0

use std::time::Duration;

use static_keys::KeyId;

use super::*;

const KEY: KeyInstance = KeyInstance {
    epoch: 1,
    id: KeyId(0x1000),
};

fn request(holder: &str) -> UpdateRequest {
    UpdateRequest::new(Vec::new(), holder, Duration::ZERO, Instant::now())
}

fn terms(holder: &str, force: bool) -> Terms {
    let request = UpdateRequest {
        force,
        ..request(holder)
    };
    Terms::new(&request, Instant::now())
}

fn on_tracepoints(holder: &str, update: TracepointUpdate) -> Terms {
    let request = UpdateRequest {
        tracepoints: Some(update),
        ..request(holder)
    };
    Terms::new(&request, Instant::now())
}

fn book(holds: &Holds) -> Book {
    Book {
        holds: holds.clone(),
        ..Book::default()
    }
}

fn draft(count: i32) -> Draft {
    let mut draft = Draft::default();
    let state = KeyState {
        count,
        tracepoint: false,
        probes: None,
    };
    draft.open(&Book::default(), KEY, &"key".into(), state);
    draft
}

fn tracepoint(holds: &Holds, count: i32) -> Draft {
    let mut draft = Draft::default();
    let state = KeyState {
        count,
        tracepoint: true,
        probes: None,
    };
    draft.open(&book(holds), KEY, &"key".into(), state);
    draft
}

fn follow(draft: &mut Draft, op: Op, terms: &Terms) -> Result<(), KeysError> {
    match draft.follow(0, "key", op, terms) {
        Err(Unfollowed::Refused(error)) => Err(error),
        followed => {
            followed.expect("nobody else changes the holds");
            Ok(())
        }
    }
}

fn booked(draft: Draft) -> Holds {
    let mut holds = Holds::default();
    draft.book(&mut holds, &terms("a", false));
    holds
}

fn references_of(draft: &Draft, holder: &str) -> usize {
    let holds = draft.keys[0].holds.as_slice();
    holds.iter().filter(|hold| *hold.holder == *holder).count()
}

#[test]
fn what_one_takes_one_may_drop() {
    let mut draft = draft(0);
    for op in [
        Op::Inc,
        Op::Inc,
        Op::Dec,
        Op::Disable,
        Op::Enable,
        Op::Enable,
        Op::Disable,
    ] {
        follow(&mut draft, op, &terms("a", false)).expect("own reference");
    }
    assert_eq!(draft.keys[0].state.count, 0);
    assert_eq!(booked(draft).references(KEY), 0);
}

#[test]
fn references_of_others_and_of_the_guest_need_force() {
    for taken_by_b in [false, true] {
        let mut draft = draft(i32::from(!taken_by_b));
        if taken_by_b {
            follow(&mut draft, Op::Inc, &terms("b", false)).expect("taken");
        }
        for op in [Op::Dec, Op::Disable] {
            let error = follow(&mut draft, op, &terms("a", false)).expect_err("not a's");
            assert_eq!(error.reason(), "NOT_HOLDER");
        }
        follow(&mut draft, Op::Dec, &terms("a", true)).expect("forced");
        assert_eq!(booked(draft).references(KEY), 0);
    }
}

/// Enabling a key that is on takes no reference, so there is none to drop later.
#[test]
fn enable_of_an_enabled_key_holds_nothing() {
    let mut draft = draft(1);
    follow(&mut draft, Op::Enable, &terms("a", false)).expect("no change");
    assert!(follow(&mut draft, Op::Disable, &terms("a", false)).is_err());
}

#[test]
fn force_takes_own_then_others_then_the_guests() {
    let mut draft = draft(1);
    follow(&mut draft, Op::Inc, &terms("b", false)).expect("taken");
    follow(&mut draft, Op::Inc, &terms("a", false)).expect("taken");
    follow(&mut draft, Op::Dec, &terms("a", true)).expect("own");
    assert_eq!(references_of(&draft, "b"), 1);
    follow(&mut draft, Op::Dec, &terms("a", true)).expect("b's");
    assert_eq!(references_of(&draft, "b"), 0);
    follow(&mut draft, Op::Dec, &terms("a", true)).expect("the guest's");
    assert_eq!(draft.keys[0].state.count, 0);
}

/// If the guest has voided an expired reference meanwhile, the expiry does not drop another
/// reference in its place.
#[test]
fn an_expiry_drops_what_has_expired_and_nothing_else() {
    let now = Instant::now();
    let expiry = Terms::ending(Whose::Expired(now), &request("monitor"), now);
    let brief = UpdateRequest {
        ttl: Some(Duration::ZERO),
        ..request("a")
    };
    let brief = Terms::new(&brief, now);
    let mut draft = draft(1);
    follow(&mut draft, Op::Inc, &brief).expect("taken");
    follow(&mut draft, Op::Inc, &terms("a", false)).expect("taken");
    follow(&mut draft, Op::Dec, &expiry).expect("a's");
    let error = follow(&mut draft, Op::Dec, &expiry);
    assert_eq!(
        error.expect_err("nothing has expired").reason(),
        "NOT_HOLDER"
    );
    assert_eq!(draft.keys[0].state.count, 2, "one that has not expired");
}

fn fire(holds: &mut Holds, holder: &str, count: i32) {
    let terms = on_tracepoints(holder, TracepointUpdate::Fire);
    let mut draft = tracepoint(holds, count);
    follow(&mut draft, Op::Enable, &terms).expect("fired");
    let taken = draft.book(holds, &terms);
    assert!(taken[0].1.is_some(), "also of one that is on");
}

#[test]
fn who_fires_a_tracepoint_holds_it_and_the_last_one_turns_it_off() {
    let mut holds = Holds::default();
    fire(&mut holds, "a", 0);
    fire(&mut holds, "b", 1);
    fire(&mut holds, "a", 1);
    assert_eq!(holds.of(KEY).len(), 2);
    let park = |holder| on_tracepoints(holder, TracepointUpdate::Park);
    let state = KeyState {
        count: 1,
        tracepoint: true,
        probes: None,
    };
    for (holder, stays) in [("c", true), ("b", true), ("a", false)] {
        assert_eq!(
            park(holder).leave_on(&book(&holds), "key", KEY, &state),
            stays,
            "{holder}"
        );
        let op = if stays { Op::Enable } else { Op::Disable };
        let mut draft = tracepoint(&holds, 1);
        follow(&mut draft, op, &park(holder)).expect("parked");
        draft.book(&mut holds, &park(holder));
    }
    assert!(holds.of(KEY).is_empty());
    // A tracepoint that no client fired may be parked, but no client can end its firing with
    // LEAVE.
    assert!(!park("c").leave_on(&book(&holds), "key", KEY, &state));
    let leave = on_tracepoints("c", TracepointUpdate::Leave);
    assert!(leave.leave_on(&book(&holds), "key", KEY, &state));
}

/// The holders of a tracepoint that "a" and "b" fire, after "a" has switched it.
#[test]
fn each_switch_ends_the_holds_that_it_says() {
    for (update, op, left) in [
        (TracepointUpdate::Fire, Op::Enable, &["a", "b"][..]),
        (TracepointUpdate::Park, Op::Enable, &["b"][..]),
        (TracepointUpdate::Leave, Op::Enable, &["b"][..]),
        (TracepointUpdate::Silence, Op::Disable, &[][..]),
        (TracepointUpdate::HandOver, Op::Enable, &[][..]),
    ] {
        let mut holds = Holds::default();
        fire(&mut holds, "a", 0);
        fire(&mut holds, "b", 1);
        let mut draft = tracepoint(&holds, 1);
        let terms = on_tracepoints("a", update);
        follow(&mut draft, op, &terms).expect("permitted");
        draft.book(&mut holds, &terms);
        let holders = holds.of(KEY).iter().map(|hold| &*hold.holder);
        assert_eq!(holders.collect::<Vec<_>>(), left, "{update:?}");
        assert_eq!(terms.is_forced(), update == TracepointUpdate::Silence);
    }
}

#[test]
fn a_tracepoint_that_others_hold_is_disabled_by_force_alone() {
    let mut holds = Holds::default();
    fire(&mut holds, "a", 0);
    let disable = |holds: &Holds, holder: &str, force| {
        let mut draft = tracepoint(holds, 1);
        follow(&mut draft, Op::Disable, &terms(holder, force)).map(|()| booked(draft))
    };
    assert!(disable(&holds, "b", false).is_err());
    assert!(
        disable(&holds, "a", false)
            .expect("its own")
            .of(KEY)
            .is_empty()
    );
    fire(&mut holds, "b", 1);
    let error = disable(&holds, "a", false).expect_err("b holds it too");
    assert_eq!(error.reason(), "NOT_HOLDER");
    assert!(
        disable(&holds, "a", true)
            .expect("forced")
            .of(KEY)
            .is_empty()
    );
}

/// The holds changed after the op was chosen.
#[test]
fn an_op_that_no_longer_fits_the_holds_is_raced() {
    let mut holds = Holds::default();
    fire(&mut holds, "a", 0);
    let park = on_tracepoints("b", TracepointUpdate::Park);
    let mut draft = tracepoint(&holds, 1);
    let raced = draft.follow(0, "key", Op::Disable, &park);
    assert!(matches!(raced, Err(Unfollowed::Raced)), "{raced:?}");
    let mut draft = tracepoint(&Holds::default(), 1);
    let raced = draft.follow(0, "key", Op::Enable, &park);
    assert!(matches!(raced, Err(Unfollowed::Raced)), "{raced:?}");
}
