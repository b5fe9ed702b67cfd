// SPDX-License-Identifier: Apache-2.0
//! Defines the sets of keys that plans change. Guests with the same kernel have equal sets, which
//! are kept once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use patchbay_proto::text::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// An op of the inverse, with the fields of `patchbay.v1.KeyUpdate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InverseOp {
    pub key: String,
    pub op: i32,
    pub times: u32,
}

/// A tracepoint that an op of the spec selected on the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracepoint {
    /// The index of the op.
    pub op: usize,
    /// The name, "system:name".
    pub event: String,
    pub key: String,
}

/// The keys that a plan changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySet {
    digest: String,
    tracepoints: Vec<Tracepoint>,
    inverse: Vec<InverseOp>,
}

impl Default for KeySet {
    fn default() -> Self {
        Self::new(vec![], vec![])
    }
}

impl KeySet {
    /// Creates the set. `tracepoints` are those whose keys the request named.
    pub fn new(tracepoints: Vec<Tracepoint>, inverse: Vec<InverseOp>) -> Self {
        let mut hash = Sha256::new();
        let text = |hash: &mut Sha256, text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        hash.update((tracepoints.len() as u64).to_le_bytes());
        for tracepoint in &tracepoints {
            hash.update((tracepoint.op as u64).to_le_bytes());
            text(&mut hash, &tracepoint.event);
            text(&mut hash, &tracepoint.key);
        }
        for op in &inverse {
            text(&mut hash, &op.key);
            hash.update(op.op.to_le_bytes());
            hash.update(op.times.to_le_bytes());
        }
        Self {
            digest: hex(&hash.finalize()),
            tracepoints,
            inverse,
        }
    }

    /// Returns the digest, which differs between sets that are not equal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    pub fn tracepoints(&self) -> &[Tracepoint] {
        &self.tracepoints
    }

    /// Returns the ops that undo the plan.
    pub fn inverse(&self) -> &[InverseOp] {
        &self.inverse
    }

    /// Returns the names of the tracepoints that the plan changes.
    pub fn changed_tracepoints(&self) -> Vec<String> {
        let keys: BTreeSet<&str> = self.inverse.iter().map(|op| op.key.as_str()).collect();
        let changed = self.tracepoints.iter();
        let changed = changed.filter(|tracepoint| keys.contains(tracepoint.key.as_str()));
        changed.map(|tracepoint| tracepoint.event.clone()).collect()
    }
}

/// Sets of keys by their digests.
#[derive(Debug, Default)]
pub struct KeySets(BTreeMap<String, Arc<KeySet>>);

impl KeySets {
    /// Returns the set that is kept for all that are equal to this one.
    pub fn shared(&mut self, set: Arc<KeySet>) -> Arc<KeySet> {
        let digest = set.digest.clone();
        Arc::clone(self.0.entry(digest).or_insert(set))
    }

    pub fn get(&self, digest: &str) -> Option<Arc<KeySet>> {
        self.0.get(digest).cloned()
    }

    pub fn digests(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }
}
