// SPDX-License-Identifier: Apache-2.0
//! Tests that the monitor discovers kernels that do not register and lack CONFIG_DEBUG_INFO_BTF or
//! CONFIG_KALLSYMS_ALL, with the help of a file on the host.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use patchbay_proto::v1::{DebugFile, KeyOp, RegistrationState, TableSource};
use patchbay_tests::{Environment, Guest, GuestBuilder, KernelFiles, switch_tracepoints};
use tonic::Code;

/// The key of a branch in getppid(), which every new shell calls.
const KEY: &str = "getppid_key";
const EVENT: &str = "sched_process_exec";
const TRACING: &str = "/sys/kernel/tracing";

/// Configures a guest without Patchbay's CPUID leaf, so that its kernel does not register.
fn silent(environment: &Environment) -> GuestBuilder {
    Guest::builder(environment)
        .argument("--no-patchbay")
        .argument("--allow-guarded")
}

fn with_file(guest: GuestBuilder, file: &Path) -> GuestBuilder {
    guest.argument(&format!("--debug-file={}", file.display()))
}

/// Returns whether a new shell makes the kernel print that the branch was taken.
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
    let mut guest = with_file(silent(&environment), &file).boot().await?;
    ensure!(guest.describe().await?.guest_status().registration() == RegistrationState::Absent);
    ensure!(!branch_taken(&mut guest).await?, "taken before the flip");
    guest.update(&[(KEY, KeyOp::Inc)]).await?;
    ensure!(branch_taken(&mut guest).await?, "not taken after the flip");
    guest.update(&[(KEY, KeyOp::Dec)]).await?;
    ensure!(
        !branch_taken(&mut guest).await?,
        "taken after the flip back"
    );

    let used = used_file(&mut guest, &file).await?;
    ensure!(
        used.types && used.same_build_id && !used.symbols,
        "{used:?}"
    );
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}

#[tokio::test]
async fn no_file_and_one_without_types_or_of_another_build_are_refused() -> Result<()> {
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
    let the = |file: &Path| format!("the debug file {} ", file.display());
    for (file, expected) in [
        (None, "without CONFIG_DEBUG_INFO_BTF".to_owned()),
        (
            Some(&environment.vmlinux),
            the(&environment.vmlinux) + "has no types",
        ),
        (Some(&other), the(&other) + "is of another build"),
    ] {
        let mut guest = silent(&environment);
        if let Some(file) = file {
            guest = with_file(guest, file);
        }
        let mut guest = guest.boot().await?;
        let refusal = guest.update(&[(KEY, KeyOp::Inc)]).await;
        let refusal = refusal.expect_err("nothing tells the types");
        ensure!(refusal.code() == Code::FailedPrecondition, "{refusal:?}");
        ensure!(refusal.message().contains(&expected), "{refusal:?}");
        ensure!(!branch_taken(&mut guest).await?, "it was refused");
        guest.power_off().await?;
    }
    Ok(())
}

/// Checks discovery with the file. `boot` tests the refusal without a file.
#[tokio::test]
async fn a_kernel_is_discovered_with_the_symbols_of_its_own_system_map() -> Result<()> {
    let (Some(environment), Some(file)) = (Environment::linux_guest(), Environment::system_map())
    else {
        return Ok(());
    };
    let Some(kernel) = environment.unpatched_kernel.clone() else {
        patchbay_tests::skip("PATCHBAY_TEST_UNPATCHED_KERNEL is not set");
        return Ok(());
    };
    let guest = silent(&environment).kernel(&kernel);
    let mut guest = with_file(guest, &file).boot().await?;
    let enable = format!("{TRACING}/events/sched/{EVENT}/enable");
    guest.shell(&format!("echo 1 >{enable}")).await?;
    ensure!(traced(&mut guest).await?, "not traced before the flip");
    for op in [KeyOp::Disable, KeyOp::Enable] {
        let request = switch_tracepoints(&[EVENT.to_owned()], op);
        guest.static_keys().update_static_keys(request).await?;
        let on = op == KeyOp::Enable;
        ensure!(traced(&mut guest).await? == on, "after {op:?}");
    }

    let used = used_file(&mut guest, &file).await?;
    ensure!(
        used.symbols && !used.types && !used.same_build_id,
        "{used:?}"
    );
    guest.assert_no_warnings().await?;
    guest.power_off().await?;
    Ok(())
}

/// Returns the data that the discovery of the guest's kernel has taken from the file.
async fn used_file(guest: &mut Guest, file: &Path) -> Result<DebugFile> {
    let description = guest.describe().await?;
    ensure!(description.guest_status().table_source() == TableSource::Discovered);
    ensure!(
        description.keys > 100 && description.sites > 500,
        "{description:?}"
    );
    let discovery = description.discovery.context("discovered")?;
    println!("{} keys, {discovery:?}", description.keys);
    let used = discovery.debug_file.context("the kernel reveals enough")?;
    ensure!(Path::new(&used.path) == file, "{used:?}");
    Ok(used)
}

/// Returns whether the guest records the start of a program.
async fn traced(guest: &mut Guest) -> Result<bool> {
    let line = format!("echo >{TRACING}/trace; busybox true; cat {TRACING}/trace");
    Ok(guest.shell(&line).await?.contains(&format!("{EVENT}:")))
}
