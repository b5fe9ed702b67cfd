// SPDX-License-Identifier: Apache-2.0
//! Compares the host's operations on the keys of a live guest with the values that the guest itself
//! reads through its test module.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{KeyOp, ListStaticKeysRequest, StaticKey, UpdateStaticKeysRequest};
use patchbay_tests::{Guest, Seen, TEST_KEYS, TestGuest};
use tonic::Code;

async fn set_raw(guest: &mut Guest, key: &str, count: i32) -> Result<()> {
    guest
        .shell(&format!("echo {count} > {TEST_KEYS}/{key}/raw"))
        .await?;
    Ok(())
}

/// A cell of the table in docs/flip.md.
enum Cell {
    /// The change is made; this is the count afterwards.
    Done(i32),
    /// The change is refused, because the guest would warn.
    Refused,
    /// The guest is making a change of its own.
    Busy,
}

#[tokio::test]
async fn every_row_of_the_count_table() -> Result<()> {
    use Cell::{Busy, Done, Refused};
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let max = i32::MAX;
    let table = [
        (KeyOp::Inc, [Busy, Done(1), Done(2), Done(6), Refused]),
        (KeyOp::Dec, [Busy, Refused, Done(0), Done(4), Done(max - 1)]),
        (KeyOp::Enable, [Busy, Done(1), Done(1), Refused, Refused]),
        (KeyOp::Disable, [Busy, Done(0), Done(0), Refused, Refused]),
    ];
    for (op, row) in table {
        for (before, cell) in [-1, 0, 1, 5, max].into_iter().zip(row) {
            // The sites must agree with the count before the row is tried.
            let own = if before == 0 { "disable" } else { "enable" };
            let on = branch_on(&mut guest).await?;
            set_raw(&mut guest, "ref_key", i32::from(on)).await?;
            guest
                .shell(&format!("echo {own} > {TEST_KEYS}/ref_key/op"))
                .await?;
            set_raw(&mut guest, "ref_key", before).await?;

            let mut request = update("patchbay_test:ref_key", op);
            if matches!(cell, Busy) {
                // The guest stays in the middle of its change, so further attempts are useless. A
                // timeout of the client would also end a call that the lab delays.
                request.retry_timeout = Some(std::time::Duration::from_millis(500).try_into()?);
            }
            let answer = guest.static_keys().update_static_keys(request).await;
            let context = format!("{op:?} at {before}: {answer:?}");
            let after = match (&cell, &answer) {
                (Done(after), Ok(answer)) => {
                    let result = answer.get_ref().results.first().context("no result")?;
                    ensure!(
                        (result.count_before, result.count_after) == (before, *after),
                        "{context}"
                    );
                    *after
                }
                (Refused, Err(status)) => {
                    ensure!(status.code() == Code::FailedPrecondition, "{context}");
                    before
                }
                (Busy, Err(status)) => {
                    ensure!(status.code() == Code::Unavailable, "{context}");
                    before
                }
                _ => anyhow::bail!("{context}"),
            };
            let on = after != 0;
            let expected = Seen {
                raw: after,
                count: if after < 0 { 1 } else { after },
                likely: on,
                unlikely: on,
            };
            let seen = guest.seen("ref_key").await?;
            ensure!(seen == expected, "{context}: the guest sees {seen:?}");
        }
    }
    guest.assert_no_warnings().await
}

/// Returns whether all sites of ref_key have the encoding of an enabled key.
async fn branch_on(guest: &mut Guest) -> Result<bool> {
    Ok(guest.seen("ref_key").await?.unlikely)
}

fn update(name: &str, op: KeyOp) -> UpdateStaticKeysRequest {
    UpdateStaticKeysRequest {
        updates: vec![patchbay_proto::v1::KeyUpdate {
            name: name.to_owned(),
            op: op.into(),
            ..Default::default()
        }],
        allow_guarded: true,
        force: true,
        ..Default::default()
    }
}

#[tokio::test]
async fn every_kind_of_key_follows_the_host() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(2).await? else {
        return Ok(());
    };
    // The key in the guest's module, its name in the directory, and its initial count.
    let keys = [
        ("false_key", "patchbay_test:false_key", 0),
        ("true_key", "patchbay_test:true_key", 1),
        ("ref_key", "patchbay_test:ref_key", 0),
        ("ref_true_key", "patchbay_test:ref_true_key", 1),
        ("array_key_0", "patchbay_test:array_keys[0]", 0),
        ("array_key_1", "patchbay_test:array_keys[1]", 0),
        ("array_key_3", "patchbay_test:array_keys[3]", 0),
        ("true_array_key_0", "patchbay_test:true_array_keys[0]", 1),
        ("true_array_key_1", "patchbay_test:true_array_keys[1]", 1),
        ("maybe_true_key", "patchbay_test:maybe_true_key", 1),
        ("maybe_false_key", "patchbay_test:maybe_false_key", 0),
        ("hotplug_key", "patchbay_test:hotplug_key", 0),
        ("deferred_key", "patchbay_test:deferred_key", 0),
        ("limited_key", "patchbay_test:limited_key", 0),
        ("bare_key", "patchbay_test:bare_key", 0),
    ];
    for (file, name, count) in keys {
        let (there, back) = if count == 0 {
            (KeyOp::Enable, KeyOp::Disable)
        } else {
            (KeyOp::Disable, KeyOp::Enable)
        };
        for (op, count) in [(there, 1 - count), (back, count)] {
            guest
                .static_keys()
                .update_static_keys(update(name, op))
                .await
                .with_context(|| format!("{op:?} {name}"))?;
            let on = count == 1;
            let seen = guest.seen(file).await?;
            ensure!(
                seen == Seen {
                    raw: count,
                    count,
                    likely: on,
                    unlikely: on
                },
                "{op:?} {name}: the guest sees {seen:?}"
            );
        }
    }
    // The key has 56 sites, and either all are taken or none.
    for (op, taken) in [(KeyOp::Inc, "56"), (KeyOp::Dec, "0")] {
        guest
            .static_keys()
            .update_static_keys(update("patchbay_test:many_key", op))
            .await?;
        let unlikely = guest
            .shell(&format!("cat {TEST_KEYS}/many_key/unlikely"))
            .await?;
        ensure!(unlikely == taken, "{op:?}: {unlikely} of 56 branches taken");
    }
    // The key is in memory that the module may no longer write, so the kernel itself would fault.
    let sealed = guest
        .static_keys()
        .update_static_keys(update("patchbay_test:ro_key", KeyOp::Inc))
        .await
        .expect_err("read-only");
    ensure!(sealed.code() == Code::FailedPrecondition, "{sealed:?}");
    // The key has no sites, so only its count changes.
    let answer = guest
        .static_keys()
        .update_static_keys(update("patchbay_test:siteless_key", KeyOp::Inc))
        .await?
        .into_inner();
    ensure!(answer.results.len() == 1 && answer.results[0].sites_patched == 0);
    ensure!(
        guest
            .shell(&format!("cat {TEST_KEYS}/siteless_key/count"))
            .await?
            == "1"
    );
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn one_bad_key_among_good_ones_changes_nothing() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let good = ("patchbay_test:ref_key", KeyOp::Inc);
    let missing = guest
        .update(&[good, ("patchbay_test:reff_key", KeyOp::Inc)])
        .await
        .expect_err("there is no such key");
    ensure!(missing.code() == Code::NotFound, "{missing:?}");
    ensure!(
        missing.message().contains("ref_key"),
        "no near name: {}",
        missing.message()
    );
    let warning = guest
        .update(&[good, ("patchbay_test:siteless_key", KeyOp::Dec)])
        .await
        .expect_err("the guest would warn");
    ensure!(warning.code() == Code::FailedPrecondition, "{warning:?}");
    let seen = guest.seen("ref_key").await?;
    ensure!(seen.raw == 0 && !seen.unlikely, "half done: {seen:?}");
    guest.assert_no_warnings().await
}

/// Runs the kernel's own test (lib/test_static_keys.c). Whenever it is loaded, it checks that its
/// keys and those of test_static_key_base have the state that both modules gave them, and that
/// branches follow. It succeeds only as long as the host has restored every key.
#[tokio::test]
async fn the_kernels_own_self_test_agrees() -> Result<()> {
    const LOAD: &str = "insmod /lib/modules/test_static_keys.ko";
    const UNLOAD: &str = "rmmod test_static_keys";
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    guest
        .shell("insmod /lib/modules/test_static_key_base.ko")
        .await?;
    guest.shell(LOAD).await?;
    for (pattern, count) in [
        ("test_static_keys:*", 4),
        ("test_static_key_base:base_*", 8),
    ] {
        let request = ListStaticKeysRequest {
            patterns: vec![pattern.to_owned()],
            ..Default::default()
        };
        let listed = guest.static_keys().list_static_keys(request).await?;
        let keys = listed.into_inner().keys;
        ensure!(keys.len() == count, "{count} keys expected: {keys:?}");
        for key in keys {
            invert(&mut guest, &key, false).await?;
            invert(&mut guest, &key, true).await?;
        }
    }
    guest.shell(UNLOAD).await?;
    guest.shell(LOAD).await?;

    // The keys of test_static_key_base still exist after the module that branches on them is
    // unloaded.
    guest.shell(UNLOAD).await?;
    let key = guest.key("test_static_key_base:base_false_key").await?;
    ensure!(key.site_count == 0, "{key:?}");
    invert(&mut guest, &key, false).await?;
    let (status, said) = guest.console().run(LOAD).await?;
    ensure!(
        status != 0 && said.contains("Invalid argument"),
        "the self-test did not notice a key that is on: {said}"
    );
    invert(&mut guest, &key, true).await?;
    guest.shell(LOAD).await?;
    guest.assert_no_warnings().await
}

/// Changes the key to the opposite of the state in `key` or, with `back`, to that state. Then
/// checks its sites.
async fn invert(guest: &mut Guest, key: &StaticKey, back: bool) -> Result<()> {
    let name = key.name.clone();
    let enabled = key.enabled == back;
    let op = if enabled {
        KeyOp::Enable
    } else {
        KeyOp::Disable
    };
    guest
        .static_keys()
        .update_static_keys(update(&name, op))
        .await?;
    for site in guest.key(&name).await?.sites {
        let patchable = site.obstacle_message.is_empty();
        let jumps = site.disassembly.starts_with("jmp");
        ensure!(
            !patchable || jumps == (enabled != site.likely),
            "{op:?} {name}: site {:#x} says {}",
            site.address,
            site.disassembly
        );
    }
    Ok(())
}
