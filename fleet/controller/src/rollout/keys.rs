// SPDX-License-Identifier: Apache-2.0
//! Defines the sets of keys that rollouts claim. Guests with the same kernel have equal sets, which
//! are kept once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use patchbay_proto::text::hex;
use patchbay_proto::v1;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The state that a claim wants for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Want {
    On,
    Off,
    /// The key has a reference of the rollout's own.
    Held,
}

impl Want {
    /// Returns the spelling in specs and in the digest of an intent.
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
            Self::Held => "held",
        }
    }

    pub fn to_proto(self) -> v1::ClaimWant {
        match self {
            Self::On => v1::ClaimWant::On,
            Self::Off => v1::ClaimWant::Off,
            Self::Held => v1::ClaimWant::Held,
        }
    }
}

/// A claim on one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    pub key: String,
    pub want: Want,
}

/// A tracepoint that the spec selected on the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracepoint {
    /// The name, "system:name".
    pub event: String,
    pub key: String,
}

/// A guarded key that is claimed because the spec has `allow_guarded`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guarded {
    pub key: String,
    /// The known effect of a change from outside; may be empty.
    pub advice: String,
}

/// The claims of a rollout on the keys of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySet {
    digest: String,
    intent_digest: String,
    claims: Vec<Claim>,
    tracepoints: Vec<Tracepoint>,
    guarded: Vec<Guarded>,
}

impl Default for KeySet {
    fn default() -> Self {
        Self::new(vec![], vec![])
    }
}

impl KeySet {
    /// Creates the set. `tracepoints` are those whose keys are claimed.
    pub fn new(mut claims: Vec<Claim>, tracepoints: Vec<Tracepoint>) -> Self {
        claims.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        let mut intent = Sha256::new();
        for claim in &claims {
            intent.update(format!("{} {}\n", claim.key, claim.want.name()));
        }
        let intent_digest = hex(&intent.finalize());
        let mut hash = Sha256::new();
        hash.update(&intent_digest);
        hash.update((claims.len() as u64).to_le_bytes());
        for Tracepoint { event, key } in &tracepoints {
            for text in [event, key] {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
        }
        Self {
            digest: hex(&hash.finalize()),
            intent_digest,
            claims,
            tracepoints,
            guarded: vec![],
        }
    }

    /// Marks these keys of the set as guarded.
    #[must_use]
    pub fn with_guarded(mut self, guarded: Vec<Guarded>) -> Self {
        if !guarded.is_empty() {
            let mut hash = Sha256::new();
            hash.update(&self.digest);
            for Guarded { key, advice } in &guarded {
                for text in [key, advice] {
                    hash.update((text.len() as u64).to_le_bytes());
                    hash.update(text);
                }
            }
            self.digest = hex(&hash.finalize());
        }
        self.guarded = guarded;
        self
    }

    /// Returns a digest that also covers the tracepoints. Different sets have different digests.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the digest of the claims, as `patchbay.v1.SetClaimsRequest` defines it.
    pub fn intent_digest(&self) -> &str {
        &self.intent_digest
    }

    /// Returns whether the set claims this key.
    pub fn has(&self, key: &str) -> bool {
        let found = self
            .claims
            .binary_search_by(|claim| claim.key.as_str().cmp(key));
        found.is_ok()
    }

    /// Returns the claims, ordered by key.
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    pub fn tracepoints(&self) -> &[Tracepoint] {
        &self.tracepoints
    }

    /// Returns the guarded keys that are claimed, ordered by name.
    pub fn guarded(&self) -> &[Guarded] {
        &self.guarded
    }
}

/// Sets of keys by their digests.
#[derive(Debug, Default)]
pub struct KeySets(BTreeMap<String, Arc<KeySet>>);

impl KeySets {
    /// Returns the kept set that is equal to this one, and keeps this one if there is none.
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
