// SPDX-License-Identifier: Apache-2.0
//! Tests the packages: installs, uses, upgrades and purges them in a clean Debian root, under a
//! systemd booted in namespaces.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::package::Programs;
use crate::step::Steps;
use crate::{bill, cache, cargo, host};

/// The tools that make a root from packages and boot it.
const TOOLS: &[&str] = &["mmdebstrap", "gpg", "debian-archive-keyring", "util-linux"];
const SUITE: &str = "bookworm";
const PACKAGES: &str = "systemd-sysv,dbus";
/// Time limit of all steps together, in seconds.
const LIMIT: &str = "300";
/// A version that sorts before every version that is built.
const PREVIOUS: &str = "0.0.1";

/// Runs `xtask/package/steps.sh`. `new` has the packages. The same programs are packed as a
/// previous version to upgrade from.
pub fn run(new: &Path) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root boots a systemd: run `cargo xtask package --try` as root"
    );
    let root = clean_root()?;
    let [shared, scratch] = [tempfile::tempdir()?, tempfile::tempdir()?];
    let at = |name: &str| shared.path().join(name);
    fs::create_dir(at("old"))?;
    fs::create_dir(at("new"))?;
    let programs = Programs::build()?;
    let crates = bill::crates(&["patchbay-guest-agent"])?;
    programs.host_package(PREVIOUS, &at("old"), &crates)?;
    programs.agent_package(PREVIOUS, &at("old"), &crates)?;
    for package in cache::files_below(new)? {
        if package.extension().is_some_and(|ending| ending == "deb") {
            let name = package.file_name().context("a package has a name")?;
            fs::copy(&package, at("new").join(name))?;
        }
    }
    let scripts = host::repository().join("xtask/package");
    fs::copy(scripts.join("steps.sh"), at("steps.sh"))?;
    fs::copy(guests()?, at("in_memory_guests"))?;
    let output = Command::new("timeout")
        .args([
            // unshare does not pass SIGTERM on to its child. If unshare is killed, `--kill-child`
            // kills the child.
            "--signal=KILL",
            LIMIT,
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
        ])
        .args(["--cgroup", "--ipc", "--uts", "--net", "sh"])
        .arg(scripts.join("boot.sh"))
        .args([scratch.path(), &root, shared.path()])
        .output()
        .context("cannot run unshare")?;
    let log = fs::read_to_string(at("log")).unwrap_or_default();
    if fs::read_to_string(at("done")).is_ok_and(|done| done == "all\n") {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    bail!(
        "the packages failed in a clean Debian root ({}):\n{log}{said}",
        output.status
    )
}

fn guests() -> Result<PathBuf> {
    let mut command = cargo::cargo("build");
    command.args(["--package", "patchbay-service", "--features", "testing"]);
    command.args(["--example", "in_memory_guests"]);
    cargo::run(&mut command)?;
    Ok(host::target().join("debug/examples/in_memory_guests"))
}

/// Returns a tar archive with Debian's essential packages and systemd.
fn clean_root() -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("clean root 1");
    inputs.add("suite", SUITE);
    inputs.add("packages", PACKAGES);
    let folder = cache::entry("clean-root", &inputs.key(), |folder| {
        host::ensure_packages(TOOLS)?;
        let log = folder.join("build.log");
        let steps = Steps::new("making a clean Debian root", &log)?;
        let mut command = Command::new("mmdebstrap");
        command
            .args(["--variant=minbase", "--include", PACKAGES, SUITE])
            .arg(folder.join("root.tar"));
        steps.run("installing its packages", &mut command)
    })?;
    Ok(folder.join("root.tar"))
}
