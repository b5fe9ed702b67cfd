// SPDX-License-Identifier: Apache-2.0
//! Checks the files of the repository: its comments, its errors, and what its documents name.

mod comments;
mod documents;
mod errors;
#[path = "../../src/tracked.rs"]
mod tracked;

use std::path::{Path, PathBuf};

/// The repository's root.
fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap().to_owned()
}

/// The files of the working tree that git does not ignore, relative to the root.
fn files() -> Vec<String> {
    tracked::files(&root()).unwrap()
}
