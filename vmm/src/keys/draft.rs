// SPDX-License-Identifier: Apache-2.0
//! What a transaction would do to counts and holds, worked out before anything is touched.

use std::collections::HashMap;
use std::time::{Instant, SystemTime};

use static_keys::{Op, apply};

use super::error::KeysError;
use super::holds::{Hold, Holds, KeyInstance};

/// Who asks, and on what terms.
#[derive(Clone, Debug)]
pub struct Terms<'a> {
    /// Owner of the references taken and dropped.
    pub owner: &'a str,
    /// Kept with the holds.
    pub reason: &'a str,
    /// Whether references of others may be dropped.
    pub force: bool,
    /// When the references taken lapse.
    pub expires: Option<(Instant, SystemTime)>,
}

/// The keys of one transaction.
#[derive(Debug)]
pub struct Draft {
    holds: Holds,
    counts: HashMap<KeyInstance, i32>,
}

impl Draft {
    /// Starts from the holds as they are.
    pub fn new(holds: &Holds) -> Self {
        Self {
            holds: holds.clone(),
            counts: HashMap::new(),
        }
    }

    /// Brings a key in with the count it has now. Holds beyond that count are void: the guest has
    /// dropped those references itself.
    pub fn open(&mut self, key: KeyInstance, count: i32) {
        self.counts.insert(key, count);
        self.holds.trim(key, count);
    }

    /// Follows one op. Ops that the engine will refuse are left to it, so that it words the error.
    ///
    /// # Errors
    /// NOT_HOLDER if the op drops a reference that is not the owner's, without force.
    pub fn follow(
        &mut self,
        name: &str,
        key: KeyInstance,
        op: Op,
        terms: &Terms<'_>,
    ) -> Result<(), KeysError> {
        let Some(before) = self.counts.get(&key).copied() else {
            return Ok(());
        };
        let Ok(after) = apply(before, op) else {
            return Ok(());
        };
        if after > before {
            self.holds.take(
                key,
                &Hold {
                    owner: terms.owner.to_owned(),
                    reason: terms.reason.to_owned(),
                    references: 1,
                    since: SystemTime::now(),
                    expires: terms.expires,
                },
            );
        } else if after < before && !self.holds.drop_one(key, Some(terms.owner)) {
            if !terms.force {
                return Err(self.not_holder(name, key, before));
            }
            // Of another client if there is one, else the guest's own.
            self.holds.drop_one(key, None);
            self.holds.trim(key, after);
        }
        self.counts.insert(key, after);
        Ok(())
    }

    /// The holds after the transaction.
    pub fn into_holds(self) -> Holds {
        self.holds
    }

    /// The count after the ops so far.
    pub fn count(&self, key: KeyInstance) -> Option<i32> {
        self.counts.get(&key).copied()
    }

    fn not_holder(&self, name: &str, key: KeyInstance, count: i32) -> KeysError {
        let mut holders: Vec<&str> = self
            .holds
            .of(key)
            .iter()
            .map(|hold| hold.owner.as_str())
            .collect();
        holders.sort_unstable();
        holders.dedup();
        let whose = if holders.is_empty() {
            "the guest's own code".to_owned()
        } else {
            format!("{} and perhaps the guest's own code", holders.join(", "))
        };
        KeysError::KeyRefused {
            key: name.to_owned(),
            reason: "NOT_HOLDER",
            message: format!(
                "key {name}: you hold none of its {count} references, they belong to {whose}; take one first, or drop theirs with force"
            ),
        }
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

    fn terms(owner: &str, force: bool) -> Terms<'_> {
        Terms {
            owner,
            reason: "",
            force,
            expires: None,
        }
    }

    fn draft(count: i32) -> Draft {
        let mut draft = Draft::new(&Holds::default());
        draft.open(KEY, count);
        draft
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
                .follow("key", KEY, op, &terms("a", false))
                .expect("own reference");
        }
        assert_eq!(draft.count(KEY), Some(0));
        assert_eq!(draft.into_holds().references(KEY), 0);
    }

    #[test]
    fn references_of_others_and_of_the_guest_need_force() {
        for taken_by_b in [false, true] {
            let mut draft = draft(i32::from(!taken_by_b));
            if taken_by_b {
                draft
                    .follow("key", KEY, Op::Inc, &terms("b", false))
                    .expect("taken");
            }
            for op in [Op::Dec, Op::Disable] {
                let error = draft
                    .follow("key", KEY, op, &terms("a", false))
                    .expect_err("not a's");
                assert_eq!(error.reason(), "NOT_HOLDER");
            }
            draft
                .follow("key", KEY, Op::Dec, &terms("a", true))
                .expect("forced");
            assert_eq!(draft.into_holds().references(KEY), 0);
        }
    }

    /// Enabling a key that is on takes no reference, so it cannot be dropped later.
    #[test]
    fn enable_of_an_enabled_key_holds_nothing() {
        let mut draft = draft(1);
        draft
            .follow("key", KEY, Op::Enable, &terms("a", false))
            .expect("no change");
        assert!(
            draft
                .follow("key", KEY, Op::Disable, &terms("a", false))
                .is_err()
        );
    }

    #[test]
    fn force_takes_own_then_others_then_the_guests() {
        let mut draft = draft(1);
        draft
            .follow("key", KEY, Op::Inc, &terms("b", false))
            .expect("taken");
        draft
            .follow("key", KEY, Op::Inc, &terms("a", false))
            .expect("taken");
        draft
            .follow("key", KEY, Op::Dec, &terms("a", true))
            .expect("own");
        assert_eq!(draft.holds.references_of(KEY, "b"), 1);
        draft
            .follow("key", KEY, Op::Dec, &terms("a", true))
            .expect("b's");
        assert_eq!(draft.holds.references_of(KEY, "b"), 0);
        draft
            .follow("key", KEY, Op::Dec, &terms("a", true))
            .expect("the guest's");
        assert_eq!(draft.count(KEY), Some(0));
    }
}
