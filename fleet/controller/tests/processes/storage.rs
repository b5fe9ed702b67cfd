// SPDX-License-Identifier: Apache-2.0
//! Tests the records of large rollouts in a real etcd with its default limits.

use patchbay_fleet::storage;
use patchbay_fleet::store::{Fence, Store, Transaction, commit_all};

use super::etcd::Etcd;
use super::fleet::spec;
use super::samples::rollout;

#[tokio::test(flavor = "multi_thread")]
async fn guests_with_many_keys_are_stored_in_etcd() {
    let Some(etcd) = Etcd::start(1).await else {
        return;
    };
    let store = etcd.store();
    let created = store.commit(Transaction::new().put("leader", "one")).await;
    let fence = Fence {
        key: "leader".to_owned(),
        created: created.expect("written"),
    };
    // 128 guests with 255 keys are over etcd's limit, and so is one with 20,000.
    let text = spec("waves: [{size: rest}]");
    for (name, guests, keys) in [("many", 300, 255), ("large", 3, 10_000)] {
        let mut one = rollout(name, guests, guests, keys);
        let writes = storage::planned(&mut one, &text).expect("fits");
        let written = commit_all(&store, &fence, &writes).await;
        written.expect("etcd takes every transaction");
    }
    let refused = storage::planned(&mut rollout("huge", 1, 1, 20_000), &text);
    assert!(refused.is_err());
    let loaded = storage::load(&store, &storage::RecordKeys::default())
        .await
        .expect("loaded");
    assert_eq!(loaded.unreadable, []);
    for ((found, _), expected) in loaded.rollouts.iter().zip([("large", 3), ("many", 300)]) {
        let found = (&*found.header().name, found.members().len());
        assert_eq!(found, expected);
    }
}
