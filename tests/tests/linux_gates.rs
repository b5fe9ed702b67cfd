// SPDX-License-Identifier: Apache-2.0
//! The guest at work on its own keys: the host waits, gives up, or follows.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{KeyOp, KeyUpdate, UpdateStaticKeysRequest};
use patchbay_tests::Guest;
use tonic::{Code, Status};

const TEST: &str = "/sys/kernel/debug/patchbay_test";

/// One op that keeps trying a busy guest for this long.
async fn update_within(
    guest: &mut Guest,
    name: &str,
    op: KeyOp,
    patience: Duration,
) -> Result<(), Status> {
    let request = UpdateStaticKeysRequest {
        updates: vec![KeyUpdate {
            name: name.to_owned(),
            op: op.into(),
            etag: String::new(),
        }],
        allow_guarded: true,
        force: true,
        retry_timeout: Some(prost_types::Duration {
            seconds: patience.as_secs().cast_signed(),
            nanos: patience.subsec_nanos().cast_signed(),
        }),
        ..Default::default()
    };
    guest.static_keys().update_static_keys(request).await?;
    Ok(())
}

/// Short enough to be over while a gate is held.
const IMPATIENT: Duration = Duration::from_millis(200);
/// Long enough for any gate that opens.
const PATIENT: Duration = Duration::from_secs(25);

#[tokio::test]
async fn held_mutexes_close_the_gate() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let key = "patchbay_test:ref_key";
    for mutex in ["jump_label_mutex", "text_mutex"] {
        guest
            .shell(&format!("echo 600000 > {TEST}/hold/{mutex}"))
            .await?;
        let refusal = update_within(&mut guest, key, KeyOp::Inc, IMPATIENT)
            .await
            .expect_err("the mutex is held");
        ensure!(refusal.code() == Code::Aborted, "{mutex}: {refusal:?}");
        ensure!(
            refusal.message().contains(mutex),
            "the gate is not named: {}",
            refusal.message()
        );
        guest
            .shell(&format!("echo 0 > {TEST}/hold/{mutex}"))
            .await?;
        update_within(&mut guest, key, KeyOp::Inc, PATIENT).await?;
        update_within(&mut guest, key, KeyOp::Dec, PATIENT).await?;
    }
    guest.assert_no_warnings().await
}

/// A count that does not cross zero touches no site, so it needs no gate and no pause.
#[tokio::test]
async fn counting_above_zero_passes_held_mutexes() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    let key = "patchbay_test:ref_key";
    update_within(&mut guest, key, KeyOp::Inc, PATIENT).await?;
    guest
        .shell(&format!("echo 600000 > {TEST}/hold/jump_label_mutex"))
        .await?;
    update_within(&mut guest, key, KeyOp::Inc, IMPATIENT).await?;
    update_within(&mut guest, key, KeyOp::Dec, IMPATIENT).await?;
    guest
        .shell(&format!("echo 0 > {TEST}/hold/jump_label_mutex"))
        .await?;
    guest.assert_no_warnings().await
}

/// Keys whose entries are spread over modules change in all of them, and only
/// while all of them are live.
#[tokio::test]
async fn keys_shared_between_modules() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    guest
        .shell("insmod /lib/modules/patchbay_test_user.ko")
        .await?;
    for key in ["patchbay_test_shared_key", "patchbay_test_lent_key"] {
        let file = key
            .trim_start_matches("patchbay_test_")
            .trim_end_matches("_key");
        let name = format!("patchbay_test:{key}");
        for (op, taken) in [(KeyOp::Inc, "2"), (KeyOp::Dec, "0")] {
            update_within(&mut guest, &name, op, PATIENT).await?;
            let seen = guest
                .shell(&format!("cat /sys/kernel/debug/patchbay_test_user/{file}"))
                .await?;
            ensure!(seen == taken, "{op:?} {key}: the other module sees {seen}");
        }
    }
    let before = guest.describe().await?;
    guest.shell("rmmod patchbay_test_user").await?;
    let after = guest.describe().await?;
    ensure!(
        after.modules + 1 == before.modules && after.sites < before.sites,
        "the module's sites are still there: {before:?} {after:?}"
    );
    update_within(
        &mut guest,
        "patchbay_test:patchbay_test_shared_key",
        KeyOp::Inc,
        PATIENT,
    )
    .await?;
    guest.shell("rmmod patchbay_test").await?;
    let gone = update_within(&mut guest, "patchbay_test:ref_key", KeyOp::Inc, PATIENT)
        .await
        .expect_err("its module is unloaded");
    ensure!(gone.code() == Code::NotFound, "{gone:?}");
    guest.assert_no_warnings().await
}

/// A module that has not finished loading keeps its keys closed.
#[tokio::test]
async fn a_loading_module_closes_the_gate() -> Result<()> {
    let Some(mut guest) = Guest::with_test_keys(1).await? else {
        return Ok(());
    };
    guest
        .shell("insmod /lib/modules/patchbay_test_stall.ko ms=600000 &")
        .await?;
    // Its init has begun when its files are there.
    guest
        .shell("until [ -e /sys/kernel/debug/patchbay_test_stall/release ]; do sleep 0.1; done")
        .await?;
    let key = "patchbay_test_stall:stall_key";
    let refusal = update_within(&mut guest, key, KeyOp::Inc, IMPATIENT)
        .await
        .expect_err("the module is COMING");
    ensure!(refusal.code() == Code::Aborted, "{refusal:?}");
    guest
        .shell("echo 1 > /sys/kernel/debug/patchbay_test_stall/release")
        .await?;
    update_within(&mut guest, key, KeyOp::Inc, PATIENT).await?;
    let taken = guest
        .shell("cat /sys/kernel/debug/patchbay_test_stall/taken")
        .await?;
    ensure!(
        taken == "1 0",
        "stall_key, and the shared key beside it: {taken}"
    );
    guest.assert_no_warnings().await
}

/// Guest threads take and drop references while the host does the same: in the
/// end each count is the sum of both, and no thread ever found a branch that
/// disagreed with a reference it held.
#[tokio::test]
async fn guest_and_host_count_on_the_same_keys() -> Result<()> {
    const ROUNDS: usize = 40;
    let Some(mut guest) = Guest::with_test_keys(2).await? else {
        return Ok(());
    };
    guest.shell(&format!("echo '3 0' > {TEST}/storm")).await?;
    let name = |key: usize| format!("patchbay_test:storm_key_{key}");
    for round in 0..ROUNDS {
        for key in [round % 16, (round * 7 + 3) % 16] {
            update_within(&mut guest, &name(key), KeyOp::Inc, PATIENT).await?;
            if round % 2 == 0 {
                update_within(&mut guest, &name(key), KeyOp::Dec, PATIENT).await?;
            }
        }
    }
    let mut expected = [0_i32; 16];
    for round in (0..ROUNDS).filter(|round| round % 2 == 1) {
        for key in [round % 16, (round * 7 + 3) % 16] {
            expected[key] += 1;
        }
    }
    let report = guest.shell(&format!("cat {TEST}/storm")).await?;
    ensure!(
        report.lines().any(|line| line == "torn 0"),
        "a branch disagreed with its key:\n{report}"
    );
    guest.shell(&format!("echo '0 0' > {TEST}/storm")).await?;
    let report = guest.shell(&format!("cat {TEST}/storm")).await?;
    for (key, expected) in expected.into_iter().enumerate() {
        let line = report
            .lines()
            .find(|line| line.split_whitespace().next() == Some(&format!("storm_key_{key}")))
            .with_context(|| format!("no key {key} in:\n{report}"))?;
        let count: i32 = line
            .split_whitespace()
            .nth(1)
            .context("no count")?
            .parse()?;
        ensure!(
            count == expected,
            "{line}: the host holds {expected} references"
        );
        // The sites have to say the same as the count.
        let state = guest.key(&name(key)).await?;
        for site in &state.sites {
            let jumps = site.disassembly.starts_with("jmp");
            ensure!(
                jumps == ((count > 0) != site.likely),
                "site {:#x} of {line} says {}",
                site.address,
                site.disassembly
            );
        }
    }
    guest.assert_no_warnings().await
}
