// SPDX-License-Identifier: Apache-2.0
//! Version 1 of the ledger, in which a pending change contains the whole state after the change.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use super::{Ledger, Pending, SavedHolds, SavedKey, State};
use crate::keys::claims::{MadeRequest, MadeRequests};

#[derive(Deserialize)]
struct LedgerV1 {
    #[serde(default)]
    process: String,
    boot: String,
    holds_of: String,
    now: State,
    pending: Option<PendingV1>,
    #[serde(default)]
    requests: MadeRequests,
}

#[derive(Deserialize)]
struct PendingV1 {
    counts: Vec<(SavedKey, i32, i32)>,
    after: State,
    #[serde(default)]
    request: Option<MadeRequest>,
}

/// Parses the body of a file.
pub(super) fn parse(body: &[u8]) -> serde_json::Result<Ledger> {
    let ledger: LedgerV1 = serde_json::from_slice(body)?;
    let pending = ledger.pending.map(|pending| pending.touched(&ledger.now));
    Ok(Ledger {
        process: ledger.process,
        serial: 0,
        boot: ledger.boot,
        holds_of: ledger.holds_of,
        pending,
        now: ledger.now,
        requests: ledger.requests,
    })
}

impl PendingV1 {
    /// Returns the change from `now` to this state, without the parts that stay the same.
    fn touched(self, now: &State) -> Pending {
        let State {
            newest_hold,
            mut holds,
            claims,
        } = self.after;
        let names: HashSet<&str> = holds.iter().map(|of| &*of.key.name).collect();
        let gone = now.holds.iter().filter(|of| !names.contains(&*of.key.name));
        let gone: Vec<SavedHolds> = gone.map(SavedHolds::ended).collect();
        holds.extend(gone);
        let before: HashMap<&str, &SavedHolds> =
            now.holds.iter().map(|of| (&*of.key.name, of)).collect();
        holds.retain(|of| before.get(&*of.key.name) != Some(&of));
        let (mut owners, mut keys) = claims.into_parts();
        owners.retain(|state| now.claims.owner(&state.owner) != Some(state));
        for (name, _) in now.claims.keys_from("") {
            keys.entry(name.clone()).or_default();
        }
        keys.retain(|name, claims| now.claims.key(name) != Some(claims));
        Pending {
            counts: self.counts,
            newest_hold,
            holds,
            claims: keys,
            owners,
            request: self.request,
        }
    }
}
