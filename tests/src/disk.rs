// SPDX-License-Identifier: Apache-2.0
//! Changes the root disk of a Debian guest without mounting it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::e2fsprogs;

/// Copies a raw image to `disk.img` in `folder`.
///
/// # Errors
/// The image cannot be copied.
pub fn copy_disk(disk: &Path, folder: &Path) -> Result<PathBuf> {
    let image = folder.join("disk.img");
    let copied = Command::new("cp")
        .arg("--sparse=always")
        .args([disk, &image])
        .status()?;
    ensure!(copied.success(), "{} cannot be copied", disk.display());
    Ok(image)
}

/// Runs commands of debugfs(8) on an image and returns the output. A command that fails is no
/// error.
///
/// # Errors
/// debugfs is not installed.
pub fn debugfs(image: &Path, commands: &str) -> Result<String> {
    let script = image.with_extension("commands");
    std::fs::write(&script, commands).context("cannot write the commands of debugfs")?;
    let output = e2fsprogs("debugfs", &["-w".as_ref(), "-f".as_ref(), &script, image])?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
