// SPDX-License-Identifier: Apache-2.0
//! Tests a kernel that withdraws its registration and registers again, as around a hibernation that
//! fails. Its counts are the same, so holds and quarantines stay.

use std::time::Duration;

use patchbay_guest::testing::TestKey;
use patchbay_proto::v1;
use patchbay_proto::v1::KeyOp;
use tonic::Code;

use super::support::{Served, assert_refused, every_kind, request};

fn for_a_while(name: &str, seconds: i64) -> v1::UpdateStaticKeysRequest {
    v1::UpdateStaticKeysRequest {
        ttl: Some(prost_types::Duration { seconds, nanos: 0 }),
        ..request(&[(name, KeyOp::Inc)])
    }
}

async fn later(served: &Served, seconds: u64) {
    served.clock.advance(Duration::from_secs(seconds));
    served.keys.tick().await.expect("the executor runs");
}

/// Returns the names of keys with holds.
async fn held(served: &Served) -> Vec<String> {
    let holds = served.holds().await.into_iter();
    holds.map(|hold| hold.key).collect()
}

fn again(served: &Served) {
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(served.guest.register_again(), 0);
}

#[tokio::test]
async fn holds_outlive_a_generation_of_the_same_boot() {
    let served = Served::start().await;
    served.op("alpha", KeyOp::Inc).await.expect("a ref key");
    again(&served);
    // Every update first removes holds on keys that no longer exist.
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(held(&served).await, ["alpha", "beta"]);
    served.op("alpha", KeyOp::Dec).await.expect("its own hold");
    assert_eq!(served.guest.count("alpha"), 0);
}

#[tokio::test]
async fn a_quarantine_outlives_a_generation_of_the_same_boot() {
    let served = Served::start().await;
    let site = served.guest.sites("alpha")[0];
    let nop: [u8; 5] = served.guest.read(site);
    served.guest.write(site, &[0xeb, 0x03, 0xcc, 0xcc, 0xcc]);
    let foreign = served.op("alpha", KeyOp::Inc).await;
    assert_refused(foreign, Code::DataLoss, "FOREIGN_BYTES");
    served.guest.write(site, &nop);
    again(&served);
    let refused = served.op("alpha", KeyOp::Inc).await;
    assert_refused(refused, Code::FailedPrecondition, "KEY_QUARANTINED");
    // The quarantine ends, because the text of the new kernel is not the one that had the foreign
    // bytes.
    assert_eq!(served.guest.register(&every_kind()), 0);
    served.op("alpha", KeyOp::Inc).await.expect("a new kernel");
}

#[tokio::test]
async fn an_expiry_waits_until_the_kernel_registers_again() {
    let served = Served::start().await;
    let update = for_a_while("alpha", 5);
    served.update(update).await.expect("a ref key");
    assert_eq!(served.guest.unregister(), 0);
    later(&served, 10).await;
    assert_eq!(served.guest.count("alpha"), 1);
    assert_eq!(served.guest.register_again(), 0);
    assert_eq!(held(&served).await, ["alpha"]);
    later(&served, 1).await;
    assert_eq!(served.guest.count("alpha"), 0);
    assert!(held(&served).await.is_empty());
}

#[tokio::test]
async fn an_expiry_waits_until_its_module_is_told_again() {
    let served = Served::start().await;
    assert_eq!(served.guest.add_module("one", &[TestKey::new("key", 1)]), 0);
    let update = for_a_while("one:key", 5);
    served.update(update).await.expect("a ref key");
    again(&served);
    // The update and the expiry run before the kernel has registered its module again.
    later(&served, 5).await;
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(served.guest.add_module_again("one", |_| ()), 0);
    assert_eq!(held(&served).await, ["beta", "one:key"]);
    later(&served, 1).await;
    assert_eq!(served.guest.count("one:key"), 0);
}

#[tokio::test]
async fn a_module_that_stayed_keeps_its_holds_and_one_that_was_reloaded_does_not() {
    let served = Served::start().await;
    for name in ["stays", "reloads", "leaves"] {
        let added = served.guest.add_module(name, &[TestKey::new("key", 1)]);
        assert_eq!(added, 0, "{name}");
        let key = format!("{name}:key");
        let update = for_a_while(&key, 5);
        served.update(update).await.expect("a ref key");
    }
    assert_eq!(served.guest.unregister(), 0);
    assert_eq!(served.guest.delete_module("leaves"), 0);
    assert_eq!(served.guest.register_again(), 0);
    assert_eq!(served.guest.add_module_again("stays", |_| ()), 0);
    // The module is reloaded at the same address.
    let reloaded = |module: &mut patchbay_guest::abi::Module| module.load += 100;
    assert_eq!(served.guest.add_module_again("reloads", reloaded), 0);
    served.op("beta", KeyOp::Inc).await.expect("a ref key");
    assert_eq!(held(&served).await, ["beta", "stays:key"]);
    // The reloaded module has a new count, from which the expiry drops no reference.
    later(&served, 5).await;
    assert_eq!(served.guest.count("stays:key"), 0);
    assert_eq!(served.guest.count("reloads:key"), 1);
}

/// Checks that a module whose keys the guest failed to list is registered, and that the description
/// names it and the error.
#[tokio::test]
async fn a_module_without_a_directory_says_why() {
    let served = Served::start().await;
    assert_eq!(served.guest.add_module("one", &[]), 0);
    assert_eq!(served.keys.describe().error, None);
    assert_eq!(served.guest.delete_module("one"), 0);
    let failed = |module: &mut patchbay_guest::abi::Module| module.directory_error = -12;
    assert_eq!(served.guest.add_module_again("one", failed), 0);
    let description = served.keys.describe();
    assert_eq!(description.modules, 1);
    assert_eq!(
        description.error.as_deref(),
        Some("module one lists no keys: its kernel failed with error -12")
    );
}

#[tokio::test]
async fn answers_to_request_ids_are_kept_for_one_boot() {
    let served = Served::start().await;
    let mut update = request(&[("alpha", KeyOp::Inc)]);
    update.request_id = "r1".to_owned();
    let first = served.update(update.clone()).await.expect("a ref key");
    again(&served);
    let repeated = served.update(update.clone()).await.expect("a repeat");
    assert_eq!(repeated, first, "the same kernel");
    assert_eq!(served.guest.register(&every_kind()), 0);
    served.update(update).await.expect("a new kernel");
    assert_eq!(served.guest.count("alpha"), 1, "made, not repeated");
}
