// SPDX-License-Identifier: Apache-2.0
//! Compares the sites of keys with the keys' counts.

use std::time::Duration;

use static_keys::{KeyId, Patterns};

use super::error::KeysError;
use super::handle::Keys;
use super::torn::TornKey;

/// Maximum number of torn keys in an answer.
pub const MAX_TORN: usize = 1000;
/// Number of checks of a key that seems torn, because the guest may be changing it.
const LOOKS: usize = 4;
/// Time between two checks. A change of one of the guest's own keys takes milliseconds.
const INTERVAL: Duration = Duration::from_millis(5);

/// The result of a verification of keys.
#[derive(Clone, Debug, Default)]
pub struct Verification {
    /// Number of keys that were checked.
    pub keys: usize,
    /// Number of sites of these keys that can be patched or hold foreign bytes.
    pub sites: usize,
    /// The torn keys, at most [`MAX_TORN`].
    pub torn: Vec<TornKey>,
    /// Number of all torn keys.
    pub torn_total: usize,
    /// The journal's newest revision before the verification.
    pub revision: u64,
}

impl Keys {
    /// Compares every site of the matching keys with the key's count, while the guest runs. Waits
    /// some milliseconds if a key seems torn, so do not call it on a thread that serves other
    /// tasks.
    ///
    /// # Errors
    /// [`KeysError::NotRegistered`].
    pub fn verify(&self, patterns: &Patterns) -> Result<Verification, KeysError> {
        let mut verification = Verification {
            revision: self.revision(),
            ..Verification::default()
        };
        let (registration, _) = self.registry().to_read()?;
        let ram = self.ram()?;
        let mut suspects: Vec<KeyId> = Vec::new();
        for key in registration.catalog.keys() {
            if patterns.select(key.module(), key.name()) {
                verification.keys += 1;
                let torn = registration.torn(ram, key, &mut verification.sites);
                suspects.extend(torn.map(|_| key.id));
            }
        }
        let mut torn = Vec::new();
        for look in 1..LOOKS {
            if suspects.is_empty() {
                break;
            }
            std::thread::sleep(INTERVAL);
            torn.clear();
            suspects.retain(|id| {
                let key = registration.catalog.key(*id);
                let still = key.and_then(|key| registration.torn(ram, key, &mut 0));
                let is_torn = still.is_some();
                torn.extend(still.filter(|_| look == LOOKS - 1));
                is_torn
            });
        }
        verification.torn_total = torn.len();
        torn.truncate(MAX_TORN);
        verification.torn = torn;
        Ok(verification)
    }
}
