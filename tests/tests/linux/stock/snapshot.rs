// SPDX-License-Identifier: Apache-2.0
//! Tests that a copy of a guest whose kernel does not register finds the kernel in its memory, and
//! with it the holds.

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::KeyOp;
use patchbay_tests::{Guest, StockKernel, TestGuest};
use tempfile::TempDir;

use crate::snapshot::{NO_REPORTS, Restored, holds, patchbay, verify};

const KEY: &str = "sched_schedstats";
const SEEN: &str = "cat /proc/sys/kernel/sched_schedstats";

#[tokio::test]
async fn a_copy_of_debian_6_12_cloud_is_discovered_with_its_holds() -> Result<()> {
    let Some(kernel) = StockKernel::named("6_12") else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let path = folder.path();
    let mut guest = Guest::stock(&kernel)
        .argument("--allow-guarded")
        .boot()
        .await?;
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    ensure!(guest.shell(SEEN).await? == "1");
    let held = holds(&guest.channel()).await?;
    let snapshot = path.join("snapshot");
    let target = snapshot.to_str().context("a UTF-8 path")?;
    patchbay(&kernel.cli, guest.socket(), &["guest", "snapshot", target]).await?;
    // What the origin does afterwards is not in the copies.
    guest.update(&[(KEY, KeyOp::Dec)]).await?;

    for name in ["one", "two"] {
        let mut copy = Restored::start(&kernel.cli, path, name, &[]).await?;
        ensure!(copy.shell(SEEN).await? == "1");
        copy.shell("sleep 1").await?;
        ensure!(holds(&copy.channel).await? == held);
        let verified = verify(&copy.channel).await?;
        ensure!(
            verified.keys > 1000 && verified.torn_total == 0,
            "{verified:?}"
        );
        let socket = path.join(format!("{name}.sock"));
        let release = ["holds", "release", &held[0].id];
        patchbay(&kernel.cli, &socket, &release).await?;
        ensure!(copy.shell(SEEN).await? == "0");
        copy.shell(NO_REPORTS).await?;
        ensure!(copy.end().await?.success());
    }
    guest.assert_no_warnings().await
}
