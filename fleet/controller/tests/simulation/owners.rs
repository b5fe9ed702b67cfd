// SPDX-License-Identifier: Apache-2.0
//! The claims of other owners, which are older or newer than those of rollouts.

use std::collections::BTreeMap;

use patchbay_fleet::clock::timestamp;
use patchbay_fleet::rollout::{Millis, Want};
use patchbay_proto::v1;
use tokio::runtime::Runtime;

use super::guest::{Guest, Kill};

/// The principal of the other owners.
const OTHER: &str = "uid:7";
/// The owner of claims that are older than those of rollouts.
pub const EARLY: &str = "person/early";
/// The time at which the first rollout was planned, which orders its claims after the early ones.
pub const CREATED: Millis = 1000;
/// The owner of ON and OFF claims that are newer than those of rollouts.
pub const LATE: &str = "person/late";
/// The owner of HELD claims.
pub const HOLDER: &str = "person/holder";

impl Guest {
    /// Replaces the claims of another owner, and remembers those that are made. Returns false if
    /// nothing was changed because the disk of the ledger is full.
    pub fn claim_as(
        &mut self,
        runtime: &Runtime,
        now: Millis,
        owner: &'static str,
        wants: &BTreeMap<&'static str, Want>,
    ) -> bool {
        self.generation += 1;
        let claims = wants.iter().map(|(key, want)| v1::KeyClaim {
            key: (*key).to_owned(),
            want: want.to_proto().into(),
            ..v1::KeyClaim::default()
        });
        let request = v1::SetClaimsRequest {
            owner: owner.to_owned(),
            generation: self.generation,
            claims: claims.collect(),
            // The late claims have the time at which they are made.
            made_at: (owner == EARLY).then(|| timestamp(CREATED - 1)),
            ..v1::SetClaimsRequest::default()
        };
        let answer = self.set_claims(runtime, now, OTHER, request, false, Kill::Never);
        let results = match answer {
            Ok(answer) => answer.results,
            Err(_) if self.is_full => return false,
            Err(status) => panic!("guest {} refuses {owner}: {status}", self.name),
        };
        let is_made = |key: &str| {
            let result = results.iter().find(|result| result.key == key);
            let state = result.map(v1::ClaimResult::state);
            state.is_some_and(|state| {
                !matches!(state, v1::ClaimState::Refused | v1::ClaimState::Missing)
            })
        };
        let made = wants.iter().filter(|(key, _)| is_made(key));
        let made = made.map(|(key, want)| (*key, *want)).collect();
        self.others.insert(owner, made);
        true
    }

    /// Returns the count that a key has if rollouts claim this of it, oldest first.
    pub fn expected(&self, key: &'static str, claimed: &[Want]) -> i32 {
        let other = |owner: &str| {
            let wants = self.others.get(owner)?;
            wants.get(key).copied()
        };
        let mut stack = Vec::from_iter(other(EARLY));
        stack.extend(claimed);
        stack.extend(other(LATE));
        let original = self.original[key];
        // The guest's own references are not taken away without consent.
        let decides = |want: &&Want| match want {
            Want::On => true,
            Want::Off => original == 0,
            Want::Held => false,
        };
        let base = match stack.iter().rfind(decides) {
            Some(Want::Off) => 0,
            Some(_) => original.max(1),
            None => original,
        };
        let holder = other(HOLDER);
        let held = stack.iter().chain(&holder);
        let held = held.filter(|want| **want == Want::Held);
        base + i32::try_from(held.count()).expect("few")
    }
}
