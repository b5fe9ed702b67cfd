// SPDX-License-Identifier: Apache-2.0
//! Integration tests of a kernel, in guests that `patchbay-testing` boots. `KERNEL` names the
//! bzImage.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use patchbay_testing::proto::v1::KeyOp;
use patchbay_testing::{Guest, GuestBuilder, in_place};

/// A key of the kernel's scheduler. The kernel does not declare it as safe to change, so the
/// monitor must allow that. No result of this test depends on whether the key is on.
const KEY: &str = "sched_asym_cpucapacity";

fn guest() -> Result<GuestBuilder> {
    let kernel = std::env::var_os("KERNEL").context("KERNEL does not name a bzImage")?;
    Ok(Guest::builder(&PathBuf::from(kernel)))
}

#[test]
fn programs_and_files_go_in_and_results_come_out() -> Result<()> {
    in_place(async || {
        let folder = std::env::temp_dir().join(format!("patchbay-example-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let script = folder.join("measure");
        std::fs::write(
            &script,
            "#!/bin/sh\nmkdir /results; nproc | tee /results/cpus; exit 3\n",
        )?;
        let mut guest = guest()?.vcpus(2).copy(&script, "/measure").boot().await?;
        let measured = guest.run(&["sh", "/measure"]).await?;
        ensure!(
            measured.status == 3 && measured.stdout == "2\n",
            "{measured:?}"
        );
        guest.collect("/results", &folder).await?;
        ensure!(std::fs::read_to_string(folder.join("results/cpus"))? == "2\n");
        std::fs::remove_dir_all(&folder)?;
        guest.assert_no_warnings().await
    })
}

#[test]
fn the_shell_works_on_both_sides_of_a_key() -> Result<()> {
    in_place(async || {
        let builder = guest()?.argument("--allow-guarded");
        let mut guest = builder.boot().await?;
        guest.assert_registered().await?;
        for op in [KeyOp::Enable, KeyOp::Disable] {
            guest.update(&[(KEY, op)]).await?;
            ensure!(guest.key(KEY).await?.enabled == (op == KeyOp::Enable));
            ensure!(guest.shell("echo $((6 * 7))").await? == "42");
        }
        ensure!(guest.run(&["/no/such/program"]).await.is_err());
        guest.assert_no_warnings().await
    })
}
