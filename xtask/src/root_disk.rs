// SPDX-License-Identifier: Apache-2.0
//! Makes the root disk of a guest that runs Debian with systemd, from Debian's packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::step::Steps;
use crate::{cache, host};

/// The tools that make a file system from packages. They need root, or user namespaces and uidmap.
pub const TOOLS: &[&str] = &["mmdebstrap", "genext2fs", "gpg", "debian-archive-keyring"];
pub const SUITE: &str = "bookworm";
/// Packages in addition to the essential ones.
const PACKAGES: &str = "systemd-sysv,udev,dbus";

/// Returns the raw image, and builds it if it is not in the cache. The cache key does not contain
/// the packages' versions. The same applies to the lab's kernel.
pub fn get() -> Result<PathBuf> {
    let mut inputs = cache::Inputs::new("root disk 1");
    inputs.add("suite", SUITE);
    inputs.add("packages", PACKAGES);
    let folder = cache::entry("disk", &inputs.key(), build)?;
    Ok(folder.join("disk.img"))
}

fn build(folder: &Path) -> Result<()> {
    host::ensure_packages(TOOLS)?;
    let steps = Steps::new(
        "making the root disk of a Debian guest",
        &folder.join("build.log"),
    )?;
    let mut command = Command::new("mmdebstrap");
    command
        .args(["--variant=minbase", "--format=ext2"])
        .args(["--include", PACKAGES, SUITE])
        .arg(folder.join("disk.img"));
    steps.run("installing its packages", &mut command)
}
