// SPDX-License-Identifier: Apache-2.0
//! Tests the kernel series inside the guest: its record of changes, its own tests and its
//! parameter.

use anyhow::{Result, ensure};
use patchbay_proto::v1::{KeyOp, RegistrationState};
use patchbay_tests::{Environment, Guest};

const RECORDS: &str = "cat /sys/kernel/debug/patchbay/records";

/// A line of the guest's record of changes: sequence number, time, key, count before and after.
struct Record {
    sequence: u64,
    seconds: u64,
    key: String,
    counts: (i32, i32),
}

fn parse(line: &str) -> Option<Record> {
    let mut words = line.split_whitespace();
    let sequence = words.next()?.parse().ok()?;
    let (seconds, _) = words.next()?.split_once('.')?;
    let rest: Vec<&str> = words.collect();
    // The name of a module's key is followed by the module's name.
    let [key, .., before, after] = &rest[..] else {
        return None;
    };
    Some(Record {
        sequence,
        seconds: seconds.parse().ok()?,
        key: (*key).to_owned(),
        counts: (before.parse().ok()?, after.parse().ok()?),
    })
}

/// Checks the record of changes, a key that the kernel itself declares, and the series' own tests
/// in one boot.
#[tokio::test]
async fn the_guest_sees_what_was_changed() -> Result<()> {
    const STATS: &str = "bpf_stats_enabled_key";
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    // This monitor runs without --allow-guarded.
    let mut guest = Guest::builder(&environment).boot().await?;
    guest.assert_registered().await?;
    ensure!(
        guest.shell(RECORDS).await?.is_empty(),
        "nothing was changed"
    );

    let changes = [
        (KeyOp::Inc, (0, 1)),
        (KeyOp::Inc, (1, 2)),
        (KeyOp::Dec, (2, 1)),
        (KeyOp::Dec, (1, 0)),
    ];
    for (op, _) in changes {
        guest.update(&[(STATS, op)]).await?;
    }
    let text = guest.shell(RECORDS).await?;
    let records: Vec<Record> = text.lines().filter_map(parse).collect();
    ensure!(records.len() == changes.len(), "{text}");
    for (index, (record, (_, counts))) in (1..).zip(records.iter().zip(changes)) {
        let known = record.sequence == index
            && record.key.starts_with(STATS)
            && record.counts == counts
            && record.seconds > 1_700_000_000;
        ensure!(known, "record {index}: {text}");
    }

    guest
        .shell("insmod /lib/modules/kunit.ko enable=1 && insmod /lib/modules/patchbay_kunit.ko")
        .await?;
    let log = guest.shell("dmesg | grep -A20 'KTAP version 1'").await?;
    ensure!(
        log.contains("# patchbay: pass:6 fail:0 skip:0 total:6"),
        "{log}"
    );
    guest.assert_no_warnings().await
}

#[tokio::test]
async fn a_parameter_keeps_the_kernel_from_registering() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let builder = Guest::builder(&environment).command_line("patchbay=off");
    let mut guest = builder.boot().await?;
    let description = guest.describe().await?;
    ensure!(
        description.guest_status().registration() == RegistrationState::Absent,
        "{description:?}"
    );
    let records = guest
        .shell("ls /sys/kernel/debug/patchbay 2>/dev/null || echo none")
        .await?;
    ensure!(records == "none", "{records}");
    guest.assert_no_warnings().await
}
