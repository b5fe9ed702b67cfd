// SPDX-License-Identifier: Apache-2.0
//! A kernel without CONFIG_DEBUG_INFO_BTF that does not register: the monitor discovers it with a file
//! of the host.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{KeyOp, RegistrationState, TableSource};
use patchbay_tests::{Environment, Guest, KernelFiles};
use tonic::Code;

/// A branch of getppid(), which every new shell calls.
const KEY: &str = "getppid_key";

/// A guest whose kernel is not offered Patchbay, so that it does not register.
async fn boot(environment: &Environment, debug_file: &Path) -> Result<Guest> {
    Guest::builder(environment)
        .argument("--no-patchbay")
        .argument("--allow-guarded")
        .argument(&format!("--debug-file={}", debug_file.display()))
        .boot()
        .await
}

/// How often the kernel has said that the branch was taken, by a new shell.
async fn branch_taken(guest: &mut Guest) -> Result<bool> {
    guest.shell("dmesg -c >/dev/null; sh -c :").await?;
    Ok(guest.shell("dmesg").await?.contains("I am the true branch"))
}

#[tokio::test]
async fn a_kernel_is_discovered_with_the_types_of_its_own_vmlinux() -> Result<()> {
    let (Some(environment), Some(file)) = (Environment::linux_guest(), Environment::debug_file())
    else {
        return Ok(());
    };
    let mut guest = boot(&environment, &file).await?;
    ensure!(guest.describe().await?.guest_status().registration() == RegistrationState::Absent);
    ensure!(!branch_taken(&mut guest).await?, "taken before the flip");
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    ensure!(branch_taken(&mut guest).await?, "not taken after the flip");
    guest.update(&[(KEY, KeyOp::Dec)]).await?;
    ensure!(
        !branch_taken(&mut guest).await?,
        "taken after the flip back"
    );

    let description = guest.describe().await?;
    ensure!(description.guest_status().table_source() == TableSource::Discovered);
    ensure!(
        description.keys > 100 && description.sites > 500,
        "{description:?}"
    );
    let discovery = description.discovery.context("discovered")?;
    println!("{} keys, {discovery:?}", description.keys);
    let used = discovery.debug_file.context("the kernel has no types")?;
    ensure!(Path::new(&used.path) == file, "{used:?}");
    ensure!(
        used.types && used.same_build_id && !used.symbols,
        "{used:?}"
    );
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}

#[tokio::test]
async fn a_file_without_types_or_of_another_build_is_refused() -> Result<()> {
    let Some(environment) = Environment::linux_guest() else {
        return Ok(());
    };
    let other = match KernelFiles::named("UNPATCHED") {
        Ok(other) => other.vmlinux,
        Err(reason) => {
            patchbay_tests::skip(&reason);
            return Ok(());
        }
    };
    for (file, expected) in [
        (&environment.vmlinux, "has no types"),
        (&other, "is of another build"),
    ] {
        let mut guest = boot(&environment, file).await?;
        let refusal = guest.update(&[(KEY, KeyOp::Inc)]).await;
        let refusal = refusal.expect_err("nothing tells the types");
        ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
        let expected = format!("the debug file {} {expected}", file.display());
        ensure!(refusal.message().contains(&expected), "{refusal:?}");
        ensure!(!branch_taken(&mut guest).await?, "it was refused");
        guest.power_off().await?;
    }
    Ok(())
}
