// SPDX-License-Identifier: Apache-2.0
//! The holds and claims in a snapshot of a guest, from which a copy of the guest starts.

use super::{Ledger, Moved, State};
use crate::keys::error::KeysError;

/// The largest form of holds and claims in a snapshot, in bytes. It fits into the limit on the
/// snapshot's other state.
const MAX_BYTES: usize = 32 << 20;

/// The holds and claims of the guest that a copy is of. They belong to the same boot of the kernel,
/// which runs on in the copy.
#[derive(Debug)]
pub struct CopiedHolds(pub(in crate::keys) Ledger);

impl CopiedHolds {
    /// Returns the form for a snapshot of the holds and claims `now` on the keys of `boot`.
    /// `holds_of` is the first part of the holds' ids.
    ///
    /// # Errors
    /// They need more bytes than a snapshot may have.
    pub(in crate::keys) fn encode(
        boot: &str,
        holds_of: &str,
        now: State,
    ) -> Result<Vec<u8>, KeysError> {
        let ledger = Ledger {
            boot: boot.to_owned(),
            holds_of: holds_of.to_owned(),
            now,
            ..Ledger::default()
        };
        let refused = |why: String| KeysError::NotSaved {
            message: format!("the guest's holds and claims cannot be saved ({why}); release some"),
        };
        let (bytes, _) = ledger
            .encode()
            .map_err(|error| refused(error.to_string()))?;
        if bytes.len() > MAX_BYTES {
            let bytes = bytes.len();
            let why = format!("they have {bytes} bytes, expected at most {MAX_BYTES}");
            return Err(refused(why));
        }
        Ok(bytes)
    }

    /// Reads the form in a snapshot; `None` if it is empty.
    ///
    /// # Errors
    /// A sentence about the content.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, String> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let ledger = Ledger::decode(bytes).map_err(|unusable| unusable.to_string())?;
        Ok(Some(Self(ledger)))
    }

    /// Returns how many there are.
    #[must_use]
    pub fn numbers(&self) -> Moved {
        Moved::of(&self.0)
    }
}
