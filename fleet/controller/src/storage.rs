// SPDX-License-Identifier: Apache-2.0
//! Stores rollouts.
//!
//! ```text
//! rollouts/NAME/header            written last; the rollout exists once its header does
//! rollouts/NAME/spec              the text as it was given
//! rollouts/NAME/members/00000042
//! ```

use crate::rollout::{Header, Member, Rollout};
use crate::spec::Spec;
use crate::store::{Fence, MAX_TRANSACTION_OPS, Store, StoreError, Transaction};

const PREFIX: &str = "rollouts/";

fn header_key(name: &str) -> String {
    format!("{PREFIX}{name}/header")
}

fn member_key(name: &str, index: usize) -> String {
    format!("{PREFIX}{name}/members/{index:08}")
}

/// Returns the put that stores the text of a spec.
pub fn spec_put(name: &str, text: &str) -> (String, Vec<u8>) {
    (spec_key(name), text.as_bytes().to_vec())
}

fn spec_key(name: &str) -> String {
    format!("{PREFIX}{name}/spec")
}

fn encode(value: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(value).map_err(|error| StoreError::Invalid(error.to_string()))
}

/// Returns the keys and values of these members, followed by those of the header.
///
/// # Errors
/// [`StoreError::Invalid`], but never for a rollout that was made from a spec.
pub fn encode_changes(
    rollout: &Rollout,
    members: &[usize],
    header: bool,
) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let name = &rollout.header().name;
    let mut puts = Vec::with_capacity(members.len() + 1);
    for &index in members {
        puts.push((member_key(name, index), encode(&rollout.members()[index])?));
    }
    if header {
        puts.push((header_key(name), encode(rollout.header())?));
    }
    Ok(puts)
}

/// Writes all entries in this order, in as many transactions as needed. A repeat is harmless.
///
/// # Errors
/// [`StoreError::Conflict`] if another replica leads.
pub async fn save(
    store: &dyn Store,
    fence: &Fence,
    puts: &[(String, Vec<u8>)],
) -> Result<(), StoreError> {
    for some in puts.chunks(MAX_TRANSACTION_OPS) {
        let transaction = Transaction::new().fenced(fence);
        let put = |all: Transaction, (key, value): &(String, Vec<u8>)| all.put(key, value.clone());
        store.commit(some.iter().fold(transaction, put)).await?;
    }
    Ok(())
}

/// Loads all rollouts. Members without a header belong to a plan that was not completely stored,
/// and are ignored.
///
/// # Errors
/// [`StoreError::Invalid`] for a value that cannot be read. The value is not skipped, because the
/// rollout would then stop without a notice.
pub async fn load(store: &dyn Store) -> Result<Vec<(Rollout, Spec)>, StoreError> {
    let snapshot = store.range(PREFIX).await?;
    let mut rollouts = Vec::new();
    let values: std::collections::BTreeMap<&str, &[u8]> = snapshot
        .entries
        .iter()
        .map(|entry| (entry.key.as_str(), entry.value.as_slice()))
        .collect();
    for (key, value) in values.iter().filter(|(key, _)| key.ends_with("/header")) {
        let header: Header = decode(key, value)?;
        let spec = spec_key(&header.name);
        let text = values.get(spec.as_str()).ok_or_else(|| missing(&spec))?;
        let text = String::from_utf8_lossy(text);
        let spec = Spec::parse(&text).map_err(|error| {
            StoreError::Invalid(format!("the value of the key {spec} is malformed: {error}"))
        })?;
        let mut members: Vec<Member> = Vec::with_capacity(header.members);
        for index in 0..header.members {
            let key = member_key(&header.name, index);
            let value = values.get(key.as_str()).ok_or_else(|| missing(&key))?;
            members.push(decode(&key, value)?);
        }
        rollouts.push((Rollout::new(header, members), spec));
    }
    Ok(rollouts)
}

fn missing(key: &str) -> StoreError {
    StoreError::Invalid(format!("the key {key} is missing in the store"))
}

fn decode<'v, T: serde::Deserialize<'v>>(key: &str, value: &'v [u8]) -> Result<T, StoreError> {
    serde_json::from_slice(value).map_err(|error| {
        StoreError::Invalid(format!("the value of the key {key} is malformed: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::EmbeddedStore;

    #[tokio::test]
    async fn a_foreign_value_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = EmbeddedStore::open(&folder.path().join("x.redb")).expect("opens");
        let foreign = Transaction::new().put("rollouts/x/header", "not JSON");
        store.commit(foreign).await.expect("written");
        let error = load(&store)
            .await
            .map(|_| ())
            .expect_err("refused")
            .to_string();
        assert!(error.contains("rollouts/x/header"), "{error}");
    }
}
