// SPDX-License-Identifier: Apache-2.0
//! Tests kernels of other configurations than the one that all other tests boot.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{
    KeyClass, KeyOp, KeyUpdate, ListStaticKeysRequest, UpdateStaticKeysRequest,
};
use patchbay_tests::{Environment, Guest, Seen, TestGuest};
use tonic::Code;

const TRACEPOINT: &str = "patchbay_test:patchbay_test_plain";
const TRACEPOINT_FILES: &str = "/sys/kernel/debug/patchbay_test/tracepoint/plain";

/// Boots a guest whose branches read the counter of their key, with the keys of `patchbay_test`.
async fn without_jump_labels() -> Result<Option<Guest>> {
    let Some(environment) = Environment::without_jump_labels() else {
        return Ok(None);
    };
    let mut guest = Guest::builder(&environment)
        .vcpus(2)
        .argument("--allow-guarded")
        .boot()
        .await?;
    guest.shell("insmod /lib/modules/patchbay_test.ko").await?;
    Ok(Some(guest))
}

/// Makes a change, and checks that the host reports no patched site.
async fn change(guest: &mut Guest, name: &str, op: KeyOp, after: i32) -> Result<()> {
    let request = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: name.to_owned(),
            op: op.into(),
            ..Default::default()
        }],
        // `force` is set, because the guest itself holds some of the references.
        force: true,
        ..Default::default()
    };
    let answer = guest.static_keys().update_static_keys(request).await;
    let answer = answer
        .with_context(|| format!("{op:?} {name}"))?
        .into_inner();
    let result = answer.results.first().context("no result")?;
    let patched = answer.report.as_ref().map(|report| report.sites_patched);
    ensure!(
        result.count_after == after && result.sites_patched == 0 && patched == Some(0),
        "{op:?} {name}: {answer:?}"
    );
    Ok(())
}

#[tokio::test]
async fn without_jump_labels_keys_have_no_sites() -> Result<()> {
    let Some(mut guest) = without_jump_labels().await? else {
        return Ok(());
    };
    let description = guest.assert_registered().await?;
    ensure!(
        description.sites == 0 && description.keys > 100,
        "{description:?}"
    );
    let request = ListStaticKeysRequest {
        page_size: 10_000,
        ..Default::default()
    };
    let listed = guest.static_keys().list_static_keys(request).await?;
    let keys = listed.into_inner().keys;
    // Without a jump table, the host finds only the keys that the kernel declares.
    for key in &keys {
        let known = matches!(key.key_class(), KeyClass::Ref | KeyClass::Tracepoint);
        ensure!(known && key.site_count == 0, "{key:?}");
    }
    for (name, class) in [
        ("getppid_key", KeyClass::Ref),
        ("sched_switch", KeyClass::Tracepoint),
        ("patchbay_test:ref_key", KeyClass::Ref),
        ("patchbay_test:array_keys[3]", KeyClass::Ref),
        ("patchbay_test:patchbay_test_plain", KeyClass::Tracepoint),
    ] {
        let found = keys
            .iter()
            .any(|key| (&*key.name, key.key_class()) == (name, class));
        ensure!(found, "no key {name}");
    }
    guest.shell("rmmod patchbay_test").await?;
    let gone = guest.key("patchbay_test:ref_key").await;
    ensure!(
        gone.is_err(),
        "the module is gone, its key is not: {gone:?}"
    );
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn without_jump_labels_branches_follow_the_count() -> Result<()> {
    let Some(mut guest) = without_jump_labels().await? else {
        return Ok(());
    };
    for (file, name, before) in [
        ("ref_key", "patchbay_test:ref_key", 0),
        ("ref_true_key", "patchbay_test:ref_true_key", 1),
        ("array_key_1", "patchbay_test:array_keys[1]", 0),
    ] {
        let there = [KeyOp::Enable, KeyOp::Inc, KeyOp::Inc, KeyOp::Dec];
        let back = [KeyOp::Dec, KeyOp::Disable, KeyOp::Enable, KeyOp::Disable];
        let counts = [1, 2, 3, 2, 1, 0, 1, 0];
        // One of the keys is initially on, and enabling it would have no effect.
        change(&mut guest, name, KeyOp::Disable, 0).await?;
        for (op, count) in there.into_iter().chain(back).zip(counts) {
            change(&mut guest, name, op, count).await?;
            let seen = guest.seen(file).await?;
            let on = count > 0;
            let expected = Seen {
                raw: count,
                count,
                likely: on,
                unlikely: on,
            };
            ensure!(seen == expected, "{op:?} {name}: the guest sees {seen:?}");
        }
        let below = guest.update(&[(name, KeyOp::Dec)]).await;
        let below = below.expect_err("the guest would warn");
        ensure!(below.code() == Code::FailedPrecondition, "{below:?}");
        if before > 0 {
            change(&mut guest, name, KeyOp::Enable, before).await?;
        }
    }
    for (op, count) in [(KeyOp::Inc, 1), (KeyOp::Dec, 0)] {
        change(&mut guest, "getppid_key", op, count).await?;
        guest.shell("dmesg -c >/dev/null; sh -c :").await?;
        let log = guest.shell("dmesg").await?;
        let taken = log.contains("I am the true branch");
        ensure!(taken == (count > 0), "getppid at {count}");
    }
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn without_jump_labels_tracepoints_are_parked() -> Result<()> {
    let Some(mut guest) = without_jump_labels().await? else {
        return Ok(());
    };
    let attach = format!("echo 1 > {TRACEPOINT_FILES}/probe");
    guest.shell(&attach).await?;
    let fire = format!("echo 10 > {TRACEPOINT_FILES}/fire; cat {TRACEPOINT_FILES}/hits");
    for (op, count, hits) in [
        (None, 1, "10"),
        (Some(KeyOp::Disable), 0, "10"),
        (Some(KeyOp::Enable), 1, "20"),
    ] {
        if let Some(op) = op {
            change(&mut guest, TRACEPOINT, op, count).await?;
        }
        let seen = guest.shell(&fire).await?;
        ensure!(seen == hits, "{op:?}: {seen} hits");
    }
    guest.assert_no_warnings().await
}
