// SPDX-License-Identifier: Apache-2.0
//! What a transaction would do to counts and holds, worked out before anything is touched.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use static_keys::{Op, Probes, apply};

use super::error::{KeyRefusal, KeysError};
use super::holds::{Hold, Holds, KeyHolds, KeyInstance};

/// Whose references an op may drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drops {
    /// The owner's.
    Own,
    /// The owner's, then other clients', then the guest's.
    Anyones,
    /// Clients', those that lapse first.
    Held,
}

impl Drops {
    /// What a client may drop, with force or without.
    pub fn of(force: bool) -> Self {
        if force { Self::Anyones } else { Self::Own }
    }
}

/// Who asks, and on what terms.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Whose references may be dropped.
    pub drops: Drops,
    /// One reference as it is taken on these terms.
    hold: Hold,
}

impl Terms {
    /// The terms of `owner`, who gives `reason`; references that are taken lapse at `expires`.
    pub fn new(
        owner: &str,
        reason: &str,
        drops: Drops,
        expires: Option<(Instant, SystemTime)>,
    ) -> Self {
        Self {
            drops,
            hold: Hold {
                owner: owner.into(),
                reason: reason.into(),
                references: 1,
                since: SystemTime::now(),
                expires,
            },
        }
    }

    /// Owner of the references taken and dropped.
    pub fn owner(&self) -> &Arc<str> {
        &self.hold.owner
    }

    /// Kept with the holds.
    pub fn reason(&self) -> &Arc<str> {
        &self.hold.reason
    }
}

/// The keys of one transaction, in the order of their first op, and what it makes of them.
#[derive(Debug, Default)]
pub struct Draft {
    keys: Vec<DraftKey>,
}

#[derive(Debug)]
struct DraftKey {
    key: KeyInstance,
    count: i32,
    holds: KeyHolds,
}

impl Draft {
    /// With room for so many keys.
    pub fn with_capacity(keys: usize) -> Self {
        Self {
            keys: Vec::with_capacity(keys),
        }
    }

    /// How many keys are in.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// The keys.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = KeyInstance> {
        self.keys.iter().map(|of| of.key)
    }

    /// Brings the next key in, with the count it has now, for whom its tracepoint fires if it is one's,
    /// and those of the holds on it that the guest has not voided.
    pub fn open(&mut self, holds: &Holds, key: KeyInstance, count: i32, probes: Option<Probes>) {
        let mut holds = holds.copy(key);
        holds.follow_guest(count, probes);
        self.keys.push(DraftKey { key, count, holds });
    }

    /// Follows one op on the key that was brought in as number `index`. Ops that the engine will refuse
    /// are left to it, so that it words the error.
    ///
    /// # Errors
    /// NOT_HOLDER if the op drops a reference that [`Drops`] does not have.
    pub fn follow(
        &mut self,
        index: usize,
        name: &str,
        op: Op,
        terms: &Terms,
    ) -> Result<(), KeysError> {
        let Some(DraftKey { count, holds, .. }) = self.keys.get_mut(index) else {
            return Ok(());
        };
        let Ok(after) = apply(*count, op) else {
            return Ok(());
        };
        if after > *count {
            holds.take(&terms.hold);
        } else if after < *count {
            let own = terms.drops != Drops::Held && holds.drop_one(Some(terms.owner()));
            let any = own || terms.drops != Drops::Own && holds.drop_one(None);
            // What nobody holds is the guest's own.
            if !any && terms.drops != Drops::Anyones {
                return Err(not_holder(name, holds, *count));
            }
        }
        *count = after;
        Ok(())
    }

    /// Books the holds after the transaction.
    pub fn book(self, holds: &mut Holds) {
        for of in self.keys {
            holds.put(of.key, of.holds);
        }
    }
}

fn not_holder(name: &str, holds: &KeyHolds, count: i32) -> KeysError {
    let mut holders: Vec<&str> = holds.as_slice().iter().map(|hold| &*hold.owner).collect();
    holders.sort_unstable();
    holders.dedup();
    let whose = if holders.is_empty() {
        "the guest's own code".to_owned()
    } else {
        format!("{} and perhaps the guest's own code", holders.join(", "))
    };
    KeysError::KeyRefused {
        key: name.to_owned(),
        reason: KeyRefusal::NotHolder,
        message: format!(
            "key {name}: you hold none of its {count} references, they belong to {whose}; take one first, or drop theirs with force"
        ),
    }
}

#[cfg(test)]
mod tests {
    use static_keys::KeyId;

    use super::*;

    const KEY: KeyInstance = KeyInstance {
        epoch: 1,
        id: KeyId(0x1000),
    };

    fn terms(owner: &str, force: bool) -> Terms {
        let drops = if force { Drops::Anyones } else { Drops::Own };
        Terms::new(owner, "", drops, None)
    }

    fn draft(count: i32) -> Draft {
        let mut draft = Draft::default();
        draft.open(&Holds::default(), KEY, count, None);
        draft
    }

    fn booked(draft: Draft) -> Holds {
        let mut holds = Holds::default();
        draft.book(&mut holds);
        holds
    }

    fn references_of(draft: &Draft, owner: &str) -> usize {
        let holds = draft.keys[0].holds.as_slice();
        holds.iter().filter(|hold| *hold.owner == *owner).count()
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
            draft
                .follow(0, "key", op, &terms("a", false))
                .expect("own reference");
        }
        assert_eq!(draft.keys[0].count, 0);
        assert_eq!(booked(draft).references(KEY), 0);
    }

    #[test]
    fn references_of_others_and_of_the_guest_need_force() {
        for taken_by_b in [false, true] {
            let mut draft = draft(i32::from(!taken_by_b));
            if taken_by_b {
                draft
                    .follow(0, "key", Op::Inc, &terms("b", false))
                    .expect("taken");
            }
            for op in [Op::Dec, Op::Disable] {
                let error = draft
                    .follow(0, "key", op, &terms("a", false))
                    .expect_err("not a's");
                assert_eq!(error.reason(), "NOT_HOLDER");
            }
            draft
                .follow(0, "key", Op::Dec, &terms("a", true))
                .expect("forced");
            assert_eq!(booked(draft).references(KEY), 0);
        }
    }

    /// Enabling a key that is on takes no reference, so it cannot be dropped later.
    #[test]
    fn enable_of_an_enabled_key_holds_nothing() {
        let mut draft = draft(1);
        draft
            .follow(0, "key", Op::Enable, &terms("a", false))
            .expect("no change");
        assert!(
            draft
                .follow(0, "key", Op::Disable, &terms("a", false))
                .is_err()
        );
    }

    #[test]
    fn force_takes_own_then_others_then_the_guests() {
        let mut draft = draft(1);
        draft
            .follow(0, "key", Op::Inc, &terms("b", false))
            .expect("taken");
        draft
            .follow(0, "key", Op::Inc, &terms("a", false))
            .expect("taken");
        draft
            .follow(0, "key", Op::Dec, &terms("a", true))
            .expect("own");
        assert_eq!(references_of(&draft, "b"), 1);
        draft
            .follow(0, "key", Op::Dec, &terms("a", true))
            .expect("b's");
        assert_eq!(references_of(&draft, "b"), 0);
        draft
            .follow(0, "key", Op::Dec, &terms("a", true))
            .expect("the guest's");
        assert_eq!(draft.keys[0].count, 0);
    }

    /// What the guest has voided since it lapsed is not taken from the guest instead.
    #[test]
    fn a_lapse_drops_what_clients_hold_and_nothing_else() {
        let lapse = Terms::new("monitor", "", Drops::Held, None);
        let mut draft = draft(1);
        draft
            .follow(0, "key", Op::Inc, &terms("a", false))
            .expect("taken");
        draft.follow(0, "key", Op::Dec, &lapse).expect("a's");
        let error = draft.follow(0, "key", Op::Dec, &lapse);
        assert_eq!(error.expect_err("the guest's").reason(), "NOT_HOLDER");
        assert_eq!(draft.keys[0].count, 1);
    }
}
