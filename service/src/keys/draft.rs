// SPDX-License-Identifier: Apache-2.0
//! The effect of a transaction on counts and holds, computed before anything is written.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use static_keys::{Op, apply};

use super::error::{KeyRefusal, KeysError};
use super::holds::{Hold, Holds, KeyHolds, KeyInstance, KeyState, Taking};
use super::request::{TracepointUpdate, UpdateRequest};

/// The holds whose references a transaction may drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The caller's holds. An op that would drop another reference is refused.
    Caller,
    /// All holds: first the caller's, then all others, then the references of the guest.
    Everyone,
    /// The holds that have expired at this time.
    Expired(Instant),
    /// The holds with these numbers.
    Numbered(HashSet<u64>),
}

impl Whose {
    /// Returns whether a transaction may drop the references of a hold.
    fn includes(&self, hold: &Hold, caller: &str) -> bool {
        match self {
            Self::Caller => *hold.holder == *caller,
            Self::Everyone => true,
            Self::Expired(now) => hold.has_expired(*now),
            Self::Numbered(numbers) => numbers.contains(&hold.number),
        }
    }
}

/// The effect of an op on the holds of a tracepoint's key. All holds of such a key share one
/// reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTracepoint {
    /// ENABLE takes a reference. DISABLE turns the key off, and is refused while other holders than
    /// [`Whose`] permits hold the key.
    Follow,
    /// ENABLE also holds a key that is on.
    Fire,
    /// The holds end. The key stays on for other holders and for probes of the guest.
    Leave,
    /// The holds end. The key stays on for other holders.
    Park,
    /// ENABLE leaves the key to the guest: all holds end.
    HandOver,
}

/// The principal of a transaction, and its permissions.
#[derive(Clone, Debug)]
pub struct Terms {
    whose: Whose,
    on_tracepoint: OnTracepoint,
    /// Template for the holds that the transaction adds.
    hold: Hold,
}

impl Terms {
    /// Creates the terms of a client's request that is made at `now`.
    pub fn new(request: &UpdateRequest, now: Instant) -> Self {
        let (whose, on_tracepoint) = match request.tracepoints {
            None if request.force => (Whose::Everyone, OnTracepoint::Follow),
            None => (Whose::Caller, OnTracepoint::Follow),
            Some(TracepointUpdate::Silence) => (Whose::Everyone, OnTracepoint::Follow),
            Some(TracepointUpdate::Fire) => (Whose::Caller, OnTracepoint::Fire),
            Some(TracepointUpdate::Park) => (Whose::Caller, OnTracepoint::Park),
            Some(TracepointUpdate::Leave) => (Whose::Caller, OnTracepoint::Leave),
            Some(TracepointUpdate::HandOver) => (Whose::Caller, OnTracepoint::HandOver),
        };
        Self {
            whose,
            on_tracepoint,
            hold: Hold::new(
                0,
                1,
                Taking {
                    holder: request.caller.name.as_str().into(),
                    reason: request.reason.as_str().into(),
                    since: SystemTime::now(),
                    expires: request.ttl.map(|ttl| (now + ttl, SystemTime::now() + ttl)),
                    fired: on_tracepoint == OnTracepoint::Fire,
                },
            ),
        }
    }

    /// Creates the terms of a request that ends these holds.
    pub fn ending(whose: Whose, request: &UpdateRequest, now: Instant) -> Self {
        Self {
            whose,
            on_tracepoint: OnTracepoint::Leave,
            ..Self::new(request, now)
        }
    }

    /// Returns the holder of the references taken and dropped.
    pub fn holder(&self) -> &Arc<str> {
        &self.hold.holder
    }

    /// Returns whether references of other principals, and the guest's, are dropped.
    pub fn is_forced(&self) -> bool {
        self.whose == Whose::Everyone
    }

    fn includes(&self, hold: &Hold) -> bool {
        self.whose.includes(hold, self.holder())
    }

    fn is_own(&self, hold: &Hold) -> bool {
        hold.holder == *self.holder()
    }

    /// Returns whether a tracepoint that is to be disabled stays on.
    pub fn leave_on(&self, holds: &Holds, key: KeyInstance, state: &KeyState) -> bool {
        // A key that is off stays off.
        if state.count == 0
            || !matches!(self.on_tracepoint, OnTracepoint::Leave | OnTracepoint::Park)
        {
            return false;
        }
        let mut holds = holds.copy(key);
        holds.follow_guest(state);
        !self.end(&mut holds, state)
    }

    /// Ends holds on a tracepoint by [`OnTracepoint::Leave`] or [`OnTracepoint::Park`]. Returns
    /// whether its key must be turned off.
    fn end(&self, holds: &mut KeyHolds, state: &KeyState) -> bool {
        let off = holds.end(state.probes, |hold| self.includes(hold));
        if self.on_tracepoint != OnTracepoint::Park {
            return off;
        }
        holds.set_probes(state.probes);
        holds.as_slice().is_empty()
    }
}

/// The keys of one transaction in the order of their first op, with the holds after the
/// transaction.
#[derive(Debug, Default)]
pub struct Draft {
    keys: Vec<DraftKey>,
}

#[derive(Debug)]
struct DraftKey {
    key: KeyInstance,
    state: KeyState,
    holds: KeyHolds,
    /// The transaction took references.
    taken: bool,
}

/// The reason for which the holds do not follow an op.
#[derive(Debug)]
pub enum Unfollowed {
    /// The holds changed after the op was chosen, so another op may now be the right one.
    Raced,
    /// The op drops a reference that [`Whose`] excludes.
    Refused(KeysError),
}

impl From<KeysError> for Unfollowed {
    fn from(error: KeysError) -> Self {
        Self::Refused(error)
    }
}

impl Draft {
    /// Reserves room for this many keys.
    pub fn with_capacity(keys: usize) -> Self {
        Self {
            keys: Vec::with_capacity(keys),
        }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the keys.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = KeyInstance> {
        self.keys.iter().map(|of| of.key)
    }

    /// Returns the key with this index, which was added before.
    pub fn key(&self, index: usize) -> KeyInstance {
        self.keys[index].key
    }

    /// Adds the next key with its state in guest memory, and with its holds except those that the
    /// guest has voided.
    pub fn open(&mut self, holds: &Holds, key: KeyInstance, name: &Arc<str>, state: KeyState) {
        let mut holds = holds.copy(key);
        holds.set_name(name);
        holds.follow_guest(&state);
        self.keys.push(DraftKey {
            key,
            state,
            holds,
            taken: false,
        });
    }

    /// Adds the next key with its state in guest memory, and with its holds after the transaction.
    pub fn set(&mut self, key: KeyInstance, state: KeyState, holds: KeyHolds) {
        self.keys.push(DraftKey {
            key,
            state,
            holds,
            taken: false,
        });
    }

    /// Returns the keys and their holds after the transaction.
    pub fn holds(&self) -> impl Iterator<Item = (KeyInstance, &KeyHolds)> {
        self.keys.iter().map(|of| (of.key, &of.holds))
    }

    /// Applies one op to the key with this index. An op that the engine will refuse is not refused
    /// here, so that the caller gets the engine's error.
    ///
    /// # Errors
    /// [`Unfollowed`]; NOT_HOLDER if the op is refused.
    pub fn follow(
        &mut self,
        index: usize,
        name: &str,
        op: Op,
        terms: &Terms,
    ) -> Result<(), Unfollowed> {
        let Some(of) = self.keys.get_mut(index) else {
            return Ok(());
        };
        let count = of.state.count;
        let Ok(after) = apply(count, op) else {
            return Ok(());
        };
        if of.state.tracepoint {
            of.follow_tracepoint(name, op, after, terms)?;
        } else if after > count {
            of.holds.take(&terms.hold);
            of.taken = true;
        } else if after < count {
            let forced = terms.is_forced();
            let dropped = (forced && of.holds.drop_one(|hold| terms.is_own(hold)))
                || of.holds.drop_one(|hold| terms.includes(hold));
            // References that no client holds belong to the guest.
            if !dropped && !forced {
                return Err(not_holder(name, &of.holds, count).into());
            }
        }
        of.state.count = after;
        Ok(())
    }

    /// Records the holds after the transaction. Returns for each key the number of the hold that
    /// took its references; `None` if none was taken.
    pub fn book(&mut self, holds: &mut Holds, terms: &Terms) -> Vec<Option<u64>> {
        let mut taken = Vec::with_capacity(self.keys.len());
        for of in &mut self.keys {
            let holds = holds.put(of.key, std::mem::take(&mut of.holds));
            let number = || holds?.number_of(&terms.hold);
            taken.push(of.taken.then(number).flatten());
        }
        taken
    }
}

impl DraftKey {
    /// Turns a tracepoint's key on or off, whether or not the caller holds it.
    fn follow_tracepoint(
        &mut self,
        name: &str,
        op: Op,
        after: i32,
        terms: &Terms,
    ) -> Result<(), Unfollowed> {
        let Self { state, holds, .. } = self;
        match (op, terms.on_tracepoint) {
            (Op::Enable, OnTracepoint::Fire) => {
                holds.fire(&terms.hold, state.probes);
                self.taken = true;
            }
            (Op::Enable, OnTracepoint::Follow) => {
                if after > state.count {
                    holds.take(&terms.hold);
                    self.taken = true;
                }
            }
            (Op::Enable, OnTracepoint::HandOver) => holds.clear(),
            // The op leaves the key on, for other holders or other probes.
            (Op::Enable, OnTracepoint::Leave | OnTracepoint::Park) => {
                if state.count == 0 || terms.end(holds, state) {
                    return Err(Unfollowed::Raced);
                }
            }
            (Op::Disable, OnTracepoint::Leave | OnTracepoint::Park) => {
                if !terms.end(holds, state) && state.count > 0 {
                    return Err(Unfollowed::Raced);
                }
            }
            (Op::Disable, _) if terms.is_forced() => holds.clear(),
            (Op::Disable, _) => {
                let is_own = |hold: &Hold| terms.is_own(hold);
                let others = holds.as_slice().iter().any(|hold| !is_own(hold));
                if after < state.count && (others || !holds.end(state.probes, is_own)) {
                    return Err(not_holder(name, holds, state.count).into());
                }
            }
            // Tracepoints are not counted: the engine refuses inc and dec.
            (Op::Inc | Op::Dec, _) => {}
        }
        Ok(())
    }
}

fn not_holder(name: &str, holds: &KeyHolds, count: i32) -> KeysError {
    let mut holders: Vec<&str> = holds.as_slice().iter().map(|hold| &*hold.holder).collect();
    holders.sort_unstable();
    holders.dedup();
    let whose = if holders.is_empty() {
        "the guest's own code".to_owned()
    } else {
        format!("{} and perhaps the guest's own code", holders.join(", "))
    };
    KeysError::KeyRefused {
        key: name.into(),
        reason: KeyRefusal::NotHolder,
        message: format!(
            "key {name}: you hold none of its {count} references that the op could drop, they belong to {whose}; take one first, or drop theirs with force"
        ),
    }
}

#[cfg(test)]
mod tests {
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

    fn draft(count: i32) -> Draft {
        let mut draft = Draft::default();
        let state = KeyState {
            count,
            tracepoint: false,
            probes: None,
        };
        draft.open(&Holds::default(), KEY, &"key".into(), state);
        draft
    }

    fn tracepoint(holds: &Holds, count: i32) -> Draft {
        let mut draft = Draft::default();
        let state = KeyState {
            count,
            tracepoint: true,
            probes: None,
        };
        draft.open(holds, KEY, &"key".into(), state);
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

    fn booked(mut draft: Draft) -> Holds {
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
        assert!(taken[0].is_some(), "also of one that is on");
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
                park(holder).leave_on(&holds, KEY, &state),
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
        assert!(!park("c").leave_on(&holds, KEY, &state));
        let leave = on_tracepoints("c", TracepointUpdate::Leave);
        assert!(leave.leave_on(&holds, KEY, &state));
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
}
