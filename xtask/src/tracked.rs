// SPDX-License-Identifier: Apache-2.0
//! Lists the files of the repository. A test of the tree includes this file too.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Returns the command `git` in a folder, which may belong to another user.
pub fn git(folder: &Path) -> Command {
    let mut command = Command::new("git");
    command.args(["-c", "safe.directory=*"]).current_dir(folder);
    command
}

/// Returns the files of the working tree that git does not ignore, relative to its root.
pub fn files(root: &Path) -> Result<Vec<String>> {
    let mut list = git(root);
    list.args(["ls-files", "-z"]);
    list.args(["--cached", "--others", "--exclude-standard"]);
    let listed = list.output().context("cannot run git")?;
    if !listed.status.success() {
        bail!(
            "{list:?} failed: {}",
            String::from_utf8_lossy(&listed.stderr)
        );
    }
    let names = String::from_utf8(listed.stdout)?;
    let names = names.split_terminator('\0').map(str::to_owned);
    // A file that was deleted may still be in the index.
    Ok(names.filter(|name| root.join(name).exists()).collect())
}
