// SPDX-License-Identifier: Apache-2.0
//! Limits the room that holds take in the ledger.
//!
//! A change that only ends holds and claims must always fit. So a change that adds some is refused
//! long before the ledger is full, and no principal can fill the ledger alone.

use std::collections::HashMap;
use std::sync::Arc;

use crate::keys::error::{ClaimRefusal, KeysError};
use crate::keys::holds::{Hold, Holds};

/// The maximum number of bytes that the holds of one holder take in the ledger.
const MAX_HELD_BYTES: usize = 32 << 20;
/// The bytes that a hold takes in the ledger besides its texts, including those of its key.
const HOLD_BYTES: usize = 384;

/// The bytes of holds before and after a change.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The change adds holds or claims.
    pub adds: bool,
    /// Bytes of the holds on the keys of the change by holder, before and after.
    bytes: HashMap<Arc<str>, (usize, usize)>,
}

impl Room {
    /// Adds the bytes that the holds on one key take before and after the change.
    pub fn count(&mut self, before: &[Hold], after: &[Hold]) {
        self.adds |= after.len() > before.len();
        for hold in before {
            self.of(hold).0 += bytes(hold);
        }
        for hold in after {
            self.of(hold).1 += bytes(hold);
        }
    }

    fn of(&mut self, hold: &Hold) -> &mut (usize, usize) {
        self.bytes.entry(Arc::clone(&hold.holder)).or_default()
    }

    /// Checks that each holder whose bytes increase has room for them. `all` contains the holds
    /// before the change.
    ///
    /// # Errors
    /// TOO_MANY_CLAIMS: the change must not be made.
    pub fn check(mut self, all: &Holds) -> Result<(), KeysError> {
        self.bytes.retain(|_, (before, after)| after > before);
        if self.bytes.is_empty() {
            return Ok(());
        }
        for hold in all.iter().flat_map(|(_, holds)| holds.as_slice()) {
            if let Some((_, after)) = self.bytes.get_mut(&hold.holder) {
                *after += bytes(hold);
            }
        }
        let full = self.bytes.into_iter();
        let mut full = full.filter(|(_, (before, after))| after - before > MAX_HELD_BYTES);
        match full.next() {
            None => Ok(()),
            Some((holder, _)) => Err(KeysError::ClaimsRefused {
                reason: ClaimRefusal::TooMany,
                generation: None,
                message: format!(
                    "the holds of {holder} would take more than {} MiB in the ledger, so nothing was changed; release some of them first",
                    MAX_HELD_BYTES >> 20
                ),
            }),
        }
    }
}

/// Returns an upper bound of the bytes that a hold takes. A reason may contain quotes, which are
/// escaped.
fn bytes(hold: &Hold) -> usize {
    HOLD_BYTES + hold.holder.len() + 2 * hold.reason.len()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use static_keys::KeyId;

    use super::*;
    use crate::keys::holds::{KeyHolds, KeyInstance, Taking};

    fn holds(holder: &str, number: usize) -> KeyHolds {
        let mut holds = KeyHolds::default();
        for at in 0..number {
            let taking = Taking {
                holder: holder.into(),
                reason: format!("{at:0>256}").into(),
                since: SystemTime::UNIX_EPOCH,
                expires: None,
                fired: false,
            };
            holds.take(&Hold::new(0, 1, taking));
        }
        holds
    }

    fn key(id: u64) -> KeyInstance {
        let id = KeyId(id);
        KeyInstance { epoch: 1, id }
    }

    /// Each key has few holds, because the keys are added one after the other.
    #[test]
    fn a_principal_has_room_for_its_own_holds_alone() {
        let (mut all, each) = (Holds::default(), 200);
        let number = |all: &mut Holds, id: u64, holder: &str, before: usize, after: usize| {
            let (before, after) = (holds(holder, before), holds(holder, after));
            let mut room = Room::default();
            room.count(before.as_slice(), after.as_slice());
            let (adds, checked) = (room.adds, room.check(all));
            if checked.is_ok() {
                all.put(key(id), after);
            }
            (adds, checked.map_err(|error| error.reason()))
        };
        let mut made = 0;
        while number(&mut all, made, "uid:7", 0, each) == (true, Ok(())) {
            made += 1;
            assert!(made < 1_000, "there is no limit");
        }
        let bytes = usize::try_from(made).expect("few") * each * (HOLD_BYTES + 2 * 256);
        assert!(
            bytes <= MAX_HELD_BYTES && bytes > MAX_HELD_BYTES / 10 * 9,
            "{bytes}"
        );
        let more = number(&mut all, made, "uid:7", 0, each);
        assert_eq!(more, (true, Err("TOO_MANY_CLAIMS")));
        assert_eq!(number(&mut all, made, "uid:8", 0, each), (true, Ok(())));
        let less = number(&mut all, 0, "uid:7", each, each - 1);
        assert_eq!(less, (false, Ok(())), "room is given back");
    }
}
