// SPDX-License-Identifier: Apache-2.0
//! Checks the files of the repository: its comments, its errors, and what its documents name.

mod comments;
mod documents;
mod errors;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root.
fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap().to_owned()
}

/// The files of the working tree that git does not ignore, relative to the root.
fn files() -> Vec<String> {
    let output = Command::new("git")
        .args([
            "-c",
            "safe.directory=*",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "{output:?}");
    let names = String::from_utf8(output.stdout).unwrap();
    let names = names.split_terminator('\0').map(str::to_owned);
    // A file that was deleted may still be in the index.
    names.filter(|name| root().join(name).exists()).collect()
}
